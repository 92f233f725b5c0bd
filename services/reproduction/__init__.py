"""Experiments that answer what the papers claim: declarations, recorded runs and verdicts."""
