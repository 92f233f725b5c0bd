"""The command line `bapo`. Nothing imports it; it starts the services and asks them."""

from pathlib import Path

VERSION = "0.2.0"
"""Version of the project, as in `pyproject.toml`. It stands here because the images hold the code
without the metadata of an installed package."""
COMPILED = Path("pipelines/bapo_pipeline.yaml")
"""The compiled pipeline in a checkout, relative to its root."""
