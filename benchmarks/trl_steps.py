"""The batch and the measurements that both sides of `benchmarks.trl` share.

Imports nothing but the standard library and PyTorch, because it runs in TRL's environment as well.
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
"""TRL's constant, which no setting changes."""
GRADIENT_CLIP = 1.0
WARM_UP_TOKENS = 8
"""Tokens that prompts and responses of the first step are truncated to."""


@dataclass(frozen=True)
class Response:
    tokens: list[int]
    logprobs: list[float]
    reward: float


@dataclass(frozen=True)
class Group:
    prompt: list[int]
    responses: list[Response]

    def truncate(self, tokens: int) -> Group:
        """Returns the group with at most `tokens` tokens of the prompt and of each response."""
        responses = [
            Response(response.tokens[:tokens], response.logprobs[:tokens], response.reward)
            for response in self.responses
        ]
        return Group(self.prompt[:tokens], responses)


@dataclass(frozen=True)
class Side:
    """Settings of one measured process, whose batch and model are in `directory`."""

    directory: str
    steps: int = 1
    """Steps after the warm-up."""
    rows_at_once: int = 8
    """Rows of TRL's passes, each as long as the longest prompt plus the longest response."""
    tokens_at_once: int = 0
    """Tokens of our passes, none of them padding."""
    gradient_checkpointing: bool = False
    corrected: bool = True
    """Whether TRL corrects for the behaviour policy, which takes a pass to score the batch."""
    responses_only: bool = False
    """Whether TRL's output layer leaves out prompts and padding, as it does on GPUs."""
    liger: bool = False
    """Whether TRL takes Liger's fused loss, which needs a GPU."""

    @property
    def groups(self) -> list[Group]:
        groups = json.loads((Path(self.directory) / "batch.json").read_text())
        return [
            Group(group["prompt"], [Response(**response) for response in group["responses"]])
            for group in groups
        ]


def write_batch(directory: Path, groups: list[Group]) -> None:
    (directory / "batch.json").write_text(json.dumps([asdict(group) for group in groups]))


def slots(groups: list[Group]) -> int:
    """Returns the tokens of a row that TRL has padded: the longest prompt plus longest response."""
    return max(len(group.prompt) for group in groups) + max(
        len(response.tokens) for group in groups for response in group.responses
    )


def tokens_of(groups: list[Group]) -> int:
    """Returns the tokens of all sequences, without padding."""
    return sum(
        len(group.prompt) + len(response.tokens) for group in groups for response in group.responses
    )


@dataclass
class Meter:
    """Measures time and memory of the steps after the warm-up.

    Memory is the resident memory of this process by the kernel's account, or the memory that
    PyTorch has allocated on the GPU if there is one: `before` once the model, the optimizer's state
    and all libraries are loaded, the peak while steps are taken.
    """

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    before: float = 0.0

    def reset(self, model: torch.nn.Module) -> None:
        """Starts measuring after the warm-up: frees its memory and resets the peak."""
        for parameter in model.parameters():
            parameter.grad = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated() / (1 << 20)
            return
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak, VmHWM
        self.before = _memory("VmRSS")

    def add(self, seconds: float, cpu_seconds: float) -> None:
        self.seconds.append(seconds)
        self.cpu_seconds.append(cpu_seconds)

    def report(self) -> dict[str, Any]:
        cuda = torch.cuda.is_available()
        peak = torch.cuda.max_memory_allocated() / (1 << 20) if cuda else _memory("VmHWM")
        return {
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "losses": self.losses,
            "gradient_norms": self.gradient_norms,
            "before_mib": round(self.before),
            "peak_mib": round(peak),
            "extra_mib": round(peak - self.before),
        }


def _wall_clock() -> float:
    """Returns the time once the GPU, if there is one, has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass(frozen=True)
class Instant:
    """The time now, by the wall clock and by the processor."""

    seconds: float = field(default_factory=_wall_clock)
    cpu_seconds: float = field(default_factory=time.process_time)


def _memory(name: str) -> float:
    """Returns MiB of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise KeyError(name)


def finish(meter: Meter, model: torch.nn.Module, out: Path) -> None:
    """Writes the measurements as JSON, and the weights beside them."""
    out.with_suffix(".json").write_text(json.dumps(meter.report()))
    weights = {
        name.replace("_checkpoint_wrapped_module.", ""): _full(parameter).detach().cpu()
        for name, parameter in model.named_parameters()
    }
    torch.save(weights, out.with_suffix(".pt"))


def _full(parameter: Any) -> torch.Tensor:
    """Returns the whole tensor of a parameter, which our side shards on a GPU."""
    whole: torch.Tensor = getattr(parameter, "full_tensor", parameter.clone)()
    return whole


def read_side(text: str) -> Side:
    torch.set_num_threads(os.cpu_count() or 1)
    return Side(**json.loads(text))
