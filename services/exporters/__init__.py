"""Exports a run's metrics to TensorBoard and MLflow."""
