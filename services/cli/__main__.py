"""Runs the command line: `python -m services.cli` is the same as `bapo`."""

from services.cli.main import main

main()
