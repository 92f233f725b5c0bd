"""Seeds of all random draws, derived from the run's seed and the name of a purpose.

A draw that depends only on (seed, purpose, step) needs no generator state in a checkpoint: a run
that resumes at step t draws what an uninterrupted run draws at step t.
"""

from __future__ import annotations

import hashlib
import random


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Returns a 63-bit seed for one purpose, equal in all processes and on all machines."""
    text = "/".join([str(seed), *map(str, purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def derive_rng(seed: int, *purpose: str | int) -> random.Random:
    """Returns a generator for one purpose, as in `derive_rng(seed, "batch", step)`."""
    return random.Random(derive_seed(seed, *purpose))
