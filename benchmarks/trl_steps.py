"""What both sides of `benchmarks.trl` share: the batch, and how steps are measured.

Imports nothing but the standard library and PyTorch, for it runs in TRL's environment as well.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

LEARNING_RATE = 1e-5
CLIP = 0.2
WEIGHT_CAP = 3.0
ADVANTAGE_EPS = 1e-4
"""TRL's own, which cannot be set."""
GRADIENT_CLIP = 1.0
WARM_UP_TOKENS = 8
"""Prompts and responses of the first step are cut to this."""


@dataclass(frozen=True)
class Response:
    tokens: list[int]
    logprobs: list[float]
    reward: float


@dataclass(frozen=True)
class Group:
    prompt: list[int]
    responses: list[Response]

    def cut(self, tokens: int) -> Group:
        """The same with so many tokens of the prompt and of each response."""
        responses = [
            Response(each.tokens[:tokens], each.logprobs[:tokens], each.reward)
            for each in self.responses
        ]
        return Group(self.prompt[:tokens], responses)


@dataclass(frozen=True)
class Side:
    """What one process is to do. Its batch and model lie in `directory`."""

    directory: str
    steps: int = 1
    """After the warm-up."""
    rows_at_once: int = 8
    """TRL's rows of a pass, each as long as the longest prompt and the longest response."""
    tokens_at_once: int = 0
    """Our tokens of a pass, none of them padding."""
    gradient_checkpointing: bool = False
    corrected: bool = True
    """Whether TRL corrects for the behaviour policy, which costs a pass to score the batch."""
    responses_only: bool = False
    """Whether TRL's output layer leaves out what is no response, as it does on GPUs."""

    @property
    def groups(self) -> list[Group]:
        found = json.loads((Path(self.directory) / "batch.json").read_text())
        return [
            Group(group["prompt"], [Response(**each) for each in group["responses"]])
            for group in found
        ]


def write_batch(directory: Path, groups: list[Group]) -> None:
    (directory / "batch.json").write_text(json.dumps([asdict(group) for group in groups]))


def slots(groups: list[Group]) -> int:
    """Tokens of a row that is padded as TRL does: the longest prompt and the longest response."""
    return max(len(group.prompt) for group in groups) + max(
        len(response.tokens) for group in groups for response in group.responses
    )


def tokens_of(groups: list[Group]) -> int:
    """All tokens of all sequences, without padding."""
    return sum(
        len(group.prompt) + len(response.tokens) for group in groups for response in group.responses
    )


@dataclass
class Meter:
    """Time and memory of the steps after the warm-up.

    Memory is the kernel's account of this process. `before` is taken once the model, the
    optimizer's state and all libraries are there, `peak` is the highest while steps are taken.
    """

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    before: float = 0.0

    def warm(self, model: torch.nn.Module) -> None:
        """The warm-up is over: what it left behind goes."""
        for parameter in model.parameters():
            parameter.grad = None
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the highest is counted anew
        self.before = _memory("VmRSS")

    def took(self, seconds: float, cpu_seconds: float) -> None:
        self.seconds.append(seconds)
        self.cpu_seconds.append(cpu_seconds)

    def report(self) -> dict[str, Any]:
        peak = _memory("VmHWM")
        return {
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "losses": self.losses,
            "gradient_norms": self.gradient_norms,
            "before_mib": round(self.before),
            "peak_mib": round(peak),
            "extra_mib": round(peak - self.before),
        }


@dataclass(frozen=True)
class Instant:
    """For the time between two."""

    seconds: float = field(default_factory=time.perf_counter)
    cpu_seconds: float = field(default_factory=time.process_time)


def _memory(name: str) -> float:
    """MiB, by a name of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise KeyError(name)


def finish(meter: Meter, model: torch.nn.Module, out: Path) -> None:
    """Writes what was measured, and then the weights."""
    out.with_suffix(".json").write_text(json.dumps(meter.report()))
    weights = {
        name.replace("_checkpoint_wrapped_module.", ""): each.detach().clone()
        for name, each in model.named_parameters()
    }
    torch.save(weights, out.with_suffix(".pt"))


def read_side(text: str) -> Side:
    torch.set_num_threads(os.cpu_count() or 1)
    return Side(**json.loads(text))
