"""The processes of a run: buffer service, verifier, rollout, trainer, and the local stack."""

VERSION = "0.3.0"
"""Version of the project, as in `pyproject.toml`. It stands here because the images hold the code
without the metadata of an installed package."""
