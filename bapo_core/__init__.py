"""The algorithm of BAPO (arXiv 2602.20722): pure functions and dataclasses.

Nothing here opens a socket, a database or a file handle of its own accord, reads a clock, or
touches a global random generator.
"""
