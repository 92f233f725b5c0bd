"""Measures how fast a step was trained, and how much memory it took."""

from __future__ import annotations

import resource

import torch

from services.trainer.policy import Policy
from services.trainer.ranks import Ranks

SCORING, TRAINING, FROZEN = 2, 6, 4
"""FLOPs for each weight and token to score, to train, and to train through a frozen weight, which
has no gradient of its own. Attention and recomputed activations do not count."""
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "A10": 125, "L4": 121}
"""The vendor's peak in dense bfloat16, by a part of the device's name."""


def measure_speed(
    policy: Policy, tokens: int, seconds: float, ranks: Ranks, *, epochs: int = 1
) -> dict[str, float]:
    """Returns a step's throughput and peak memory. Every rank calls it.

    trainer/tokens_per_second counts all ranks together, trainer/tflops each rank, trainer/mfu its
    share of the device's peak where that is known; trainer/peak_memory_mib is the ranks' largest.

    tokens: number in this rank's batch, each prompt counted once. seconds: duration of scoring it
    and training on it. epochs: how often it was trained on; statistics of an objective do not
    count.
    """
    total = ranks.all_reduce_sum({"tokens": float(tokens)})["tokens"]
    flops = sum(
        parameter.numel() * (SCORING + epochs * (TRAINING if parameter.requires_grad else FROZEN))
        for parameter in policy.parameters()
    )
    tflops = flops * total / seconds / ranks.size / 1e12
    metrics = {
        "trainer/tokens_per_second": total / seconds,
        "trainer/tflops": tflops,
        "trainer/peak_memory_mib": float(ranks.all_reduce_max(_peak_memory()) >> 20),
    }
    peak = _peak_tflops()
    return metrics | ({"trainer/mfu": tflops / peak} if peak else {})


def _peak_memory() -> int:
    """Returns bytes: the GPU's peak since the last call, or the process's since its start."""
    if not torch.cuda.is_available():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def _peak_tflops() -> float | None:
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for model, peak in PEAK_TFLOPS.items() if model in name), None)
