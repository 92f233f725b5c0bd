"""The parts of the suite, in the order in which they run: most value for a minute of a GPU first.

Imports nothing but the standard library, because the suite starts before its dependencies are
installed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A module of this package with a function `measure(record)`, run in a process of its own."""

    name: str
    """Name of the module and of the result file."""
    title: str
    """Title in the table, which says what the part measures."""
    limit_s: float
    """Seconds after which the process is ended; about twice the estimate for the full size."""
    by_default: bool = True
    """Whether the part runs when none is named."""


PARTS = (
    Part("environment", "versions, driver, modules that import", 180),
    Part("ceilings", "matrix product and copies, as fast as the device can", 60),
    Part("correctness", "losses, log-probs and gradients against the CPU", 180),
    Part("logprobs", "log-probs of 16,384 tokens against Liger and the whole matrix", 90),
    Part("trainer", "training steps of Qwen3-0.6B and Qwen3-4B shapes", 420),
    Part("end_to_end", "`bapo run` on the GPU with the trainer killed once", 300),
    Part("ragged", "the optimisation phase against TRL on ragged responses", 300),
    Part("prefix", "training steps whose prompts are long, equal and short", 150),
    Part("generate", "the transformers engine against `model.generate`", 180),
    Part("vllm", "vLLM: loads, generates, takes new weights", 540, by_default=False),
)
NAMES = tuple(part.name for part in PARTS)


def choose(names: list[str]) -> list[Part]:
    """Returns the parts of these names in the suite's order; those that run by default if none."""
    return [part for part in PARTS if (part.name in names if names else part.by_default)]
