"""Rollouts: engines, the replica server in front of an engine, and the collector."""
