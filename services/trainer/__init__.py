"""The trainer: trains the model on the batches of a run, and publishes its weights."""
