"""Settings of the verifier, from the environment.

| variable | default | meaning |
| --- | --- | --- |
| `BAPO_VERIFIER_WORKERS` | half of the cores, at least 1 | processes that score |
| `BAPO_VERIFIER_DEADLINE_S` | 5 | seconds that one response may take |
| `BAPO_VERIFIER_MEMORY_MB` | 1024 | MiB that one response may take |
| `BAPO_VERIFIER_QUEUE` | 65536 | responses under way or waiting; beyond it, 429 |
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from services.common.errors import BapoError


@dataclass(frozen=True, slots=True)
class VerifierSettings:
    workers: int = max(1, (os.cpu_count() or 2) // 2)
    deadline_s: float = 5.0
    memory_mb: int = 1024
    queue: int = 65_536

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> VerifierSettings:
        """Raises `BapoError` naming the variable that is no positive number."""
        defaults = cls()

        def number(name: str, default: float, at_least: float) -> float:
            text = environment.get(name, "")
            try:
                value = float(text) if text else float(default)
            except ValueError:
                value = math.nan
            if not at_least <= value < math.inf:
                raise BapoError(f"{name} is {text!r}; make it a number of at least {at_least:g}")
            return value

        return cls(
            workers=int(number("BAPO_VERIFIER_WORKERS", defaults.workers, 1)),
            deadline_s=number("BAPO_VERIFIER_DEADLINE_S", defaults.deadline_s, 0.1),
            # SymPy alone wants more than a few MiB for an honest answer.
            memory_mb=int(number("BAPO_VERIFIER_MEMORY_MB", defaults.memory_mb, 64)),
            queue=int(number("BAPO_VERIFIER_QUEUE", defaults.queue, 1)),
        )
