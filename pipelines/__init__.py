SEGMENTS = 4
"""Segments of the compiled pipeline, unless `bapo pipeline compile` is told otherwise."""
