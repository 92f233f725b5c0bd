"""Queries about a run: its decisions, prompts, difficulty, evaluations and comparisons."""
