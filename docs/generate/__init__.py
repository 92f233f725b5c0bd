"""Generates the pages that are made from the code; no part of the installed packages."""
