"""The command line `bapo`. Nothing imports it; it starts the services and asks them."""

from pathlib import Path

COMPILED = Path("pipelines/bapo_pipeline.yaml")
"""The compiled pipeline in a checkout, relative to its root."""
