"""The trainer: owns the model, trains the batch it is given, and reports."""
