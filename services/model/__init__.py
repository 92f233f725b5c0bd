"""Initial models: where a run's `model.path` is found, stored and fetched, and the tiny models."""
