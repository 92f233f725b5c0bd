"""Keys and prefixes of all kinds of objects in the object store."""

from __future__ import annotations

import re

MODEL_SCHEME = "store://"
"""Scheme of names of models in the object store: `store://<prefix>#<digest of the manifest>`."""
WITHOUT_ROW = re.compile(r"runs/(?P<run>[^/]+)/(failures|profiles|journal)/")
"""Matches objects that no row points to but that of their run, with which they are deleted."""


def run_prefix(run: str) -> str:
    """Returns the prefix of everything that belongs to a run."""
    return f"runs/{run}"


def weights(run: str, version: int, attempt: int) -> str:
    """Returns the prefix of a policy version: a Hugging Face model directory and its manifest.

    A trainer that was superseded and does not know it yet writes nothing over what another attempt
    has stored.
    """
    return f"{run_prefix(run)}/weights/v{version}-attempt-{attempt}"


def checkpoint(run: str, step: int, attempt: int) -> str:
    """Returns the prefix of the trainer's state after `step`, as an attempt has it."""
    return f"{run_prefix(run)}/checkpoints/step-{step}-attempt-{attempt}"


def trajectories(run: str, step: int, kind: str, digest: str) -> str:
    """Returns the key of groups that were delivered together, as Arrow.

    `digest` is the SHA-256 of the bytes. `kind` is a rollout kind, or `proximal` for log-probs
    of the trainer at the storage step.
    """
    return f"{run_prefix(run)}/trajectories/step={step}/{kind}-{digest[:16]}.arrow"


def journal(run: str, step: int, kind: str, part: int | str) -> str:
    """Returns the prefix of the journal of unfinished responses of a kind.

    part: the generation round, or the set of an evaluation, each of which has its own.
    """
    return f"{run_prefix(run)}/journal/step={step}/{kind}-{part}"


def profiles(run: str) -> str:
    """Returns the prefix of the trainer's traces."""
    return f"{run_prefix(run)}/profiles"


def failure(run: str, step: int, rank: int) -> str:
    """Returns the key of the inputs that led to a non-finite loss on one rank."""
    return f"{run_prefix(run)}/failures/step-{step}-rank-{rank}.pt"


def image(digest: str) -> str:
    """Returns the key of an image of prompts; `digest` is the SHA-256 of its file."""
    return f"images/{digest}"


def model(content: str) -> str:
    """Returns the prefix of an initial model; `content` is the digest of its files."""
    return f"models/{content}"


def imported(digest: str, name: str) -> str:
    """Returns the key of a data set that a pipeline imported; `digest` is the SHA-256 of its file.

    No row points to it, so garbage collection deletes it: a run has a copy of its prompts.
    """
    return f"imports/{digest}/{name}"
