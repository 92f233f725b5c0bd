"""The algorithm of BAPO (arXiv 2602.20722) as pure functions and dataclasses.

Nothing in this package opens a network connection or a database, reads a clock, or draws from a
global random generator; only tasks and configurations read files, whose paths they are given.
"""
