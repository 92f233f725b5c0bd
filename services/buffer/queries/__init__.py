"""What people ask of a run: decisions, prompts, difficulty, evaluations and comparisons."""
