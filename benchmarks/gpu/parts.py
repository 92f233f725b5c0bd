"""The parts of the suite, and the plans that fit into a quarter of an hour of a GPU.

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
    """What the part measures."""
    limit_s: float
    """Seconds after which the process is ended if the whole part runs."""
    programs: tuple[str, ...] = ()
    """Modules that the part runs in other processes, so that their code is the part's as well; a
    package stands for all of its modules."""


PARTS = (
    Part("environment", "versions, driver, modules that import", 180),
    Part("ceilings", "matrix product and copies, as fast as the device can", 60),
    Part("attention", "every attention kernel: results against the CPU, and times", 300),
    Part("correctness", "losses, log-probs and gradients against the CPU", 180),
    Part("logprobs", "log-probs of 16,384 tokens against Liger and the whole matrix", 90),
    Part("trainer", "training steps of Qwen3-0.6B and Qwen3-4B shapes", 570),
    Part(
        *("end_to_end", "`bapo run` on the GPU with the trainer killed once", 240),
        programs=("bapo_core", "services"),
    ),
    Part(
        *("ragged", "the optimisation phase against TRL on ragged responses", 400),
        programs=("benchmarks.trl_ours", "benchmarks.trl_theirs"),
    ),
    Part("prefix", "training steps whose prompts are long, equal and short", 150),
    Part("generate", "the transformers engine against `model.generate`", 150),
    Part(
        *("vllm", "vLLM: loads, generates, takes new weights", 540),
        programs=("bapo_core", "services"),
    ),
)
BY_NAME = {part.name: part for part in PARTS}


@dataclass(frozen=True, slots=True)
class Step:
    """Cases of a part that one process measures."""

    part: str
    cases: tuple[str, ...] = ()
    """Names of the cases; all if there are none."""
    estimate_s: float = 0.0
    """Seconds that the step takes on an H100; benchmarks/gpu/README.md has the arithmetic."""
    limit_s: float = 0.0
    """Seconds after which its process is ended."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps that fit into one call of a machine that is there for a quarter of an hour."""

    title: str
    archives: tuple[str, ...]
    """Archives of `bundle` that a machine without a network needs."""
    start_s: float
    """Seconds of the machine before the suite starts: its start, and the transfer of all files."""
    unpack_s: float
    """Seconds in which the suite unpacks the archives."""
    steps: tuple[Step, ...]

    @property
    def estimate_s(self) -> float:
        """Seconds of the machine that the plan takes."""
        return self.start_s + self.unpack_s + sum(step.estimate_s for step in self.steps)

    @property
    def limit_s(self) -> float:
        """Seconds after which the suite ends the plan."""
        return PLAN_LIMIT_S - self.start_s


PLAN_LIMIT_S = 480.0
"""Seconds of the machine that a plan may take, its start included."""

PLANS = {
    "attention": Plan(
        "every attention kernel, and compiled updates",
        ("core", "flash4"),
        45,  # two calls
        15,
        (
            # A process for each kernel, because a kernel that fails may take the device's context
            # along, and because FlashAttention 4 is compiled for every shape.
            Step("attention", ("varlen", "varlen-repeated"), 30, 45),
            Step("attention", ("flash4",), 75, 90),
            Step("attention", ("padded",), 40, 45),
            Step("trainer", ("qwen3-0.6b-16384-compiled",), 50, 90),
            Step("trainer", ("qwen3-0.6b-65536-compiled",), 80, 150),
        ),
    ),
    "first": Plan(
        "correctness, log-probs, updates, a run",
        ("core", "base"),
        35,
        6,
        (
            Step("correctness", (), 60, 120),
            Step("logprobs", (), 21, 45),
            Step(
                "trainer",
                (
                    "qwen3-0.6b-16384-compiled",
                    "qwen3-4b-16384-lora16-compiled",
                    "qwen3-0.6b-16384",
                ),
                180,
                220,
            ),
            Step("end_to_end", (), 121, 180),
            Step("environment", (), 19, 40),
        ),
    ),
    "second": Plan(
        "ragged batches against TRL, shared prompts, the engine",
        ("core", "base"),
        35,
        6,
        (
            Step("ragged", (), 205, 240),
            Step("prefix", ("4096:1024", "2048:2048", "512:4096"), 70, 100),
            Step("generate", ("tiny",), 35, 60),
            Step("generate", ("qwen3-0.6b",), 45, 75),
            Step("ceilings", (), 10, 20),
            Step("trainer", ("qwen3-4b-16384-lora16",), 60, 80),
        ),
    ),
    "vllm": Plan(
        "vLLM alone",
        ("core", "base", "vllm"),
        110,  # four calls
        20,
        (Step("vllm", (), 330, 350),),
    ),
}
