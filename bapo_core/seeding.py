"""Seeds for everything random, derived from the run's seed and the name of the purpose.

A draw that depends only on (seed, purpose, step) needs no state in a checkpoint: a run resumed at
step t makes the draws that an undisturbed run makes at step t.
"""

from __future__ import annotations

import hashlib
import random


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, stable across processes and machines."""
    text = "/".join([str(seed), *map(str, purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def derive_rng(seed: int, *purpose: str | int) -> random.Random:
    """A generator for one purpose: `derive_rng(seed, "batch", step)`."""
    return random.Random(derive_seed(seed, *purpose))
