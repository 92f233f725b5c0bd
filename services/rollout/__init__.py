"""Rollouts: engines, the server in front of one, and the collector that drives it."""
