"""How fast a step was trained, and how much memory it took."""

from __future__ import annotations

import resource

import torch

from services.trainer.policy import Policy
from services.trainer.ranks import Ranks

SCORING, TRAINING, FROZEN = 2, 6, 4
"""FLOPs for every weight and token; of a frozen weight, training costs no gradient of its own.
Attention, and what is computed twice to save memory, do not count."""
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "A10": 125, "L4": 121}
"""Of dense bfloat16, as the vendor says, by what is in the device's name."""


def speed_of(policy: Policy, tokens: int, seconds: float, ranks: Ranks) -> dict[str, float]:
    """tokens: of this rank, prompts included. Every rank calls it.

    trainer/tokens_per_second is of all ranks together, trainer/tflops of each, and trainer/mfu the
    share of the device's peak, where that is known.
    """
    total = ranks.summed({"tokens": float(tokens)})["tokens"]
    flops = sum(
        parameter.numel() * (SCORING + (TRAINING if parameter.requires_grad else FROZEN))
        for parameter in policy.parameters()
    )
    tflops = flops * total / seconds / ranks.size / 1e12
    found = {
        "trainer/tokens_per_second": total / seconds,
        "trainer/tflops": tflops,
        "trainer/peak_memory_mib": float(ranks.largest(_peak_memory()) >> 20),
    }
    peak = _peak_tflops()
    return found | ({"trainer/mfu": tflops / peak} if peak else {})


def _peak_memory() -> int:
    """Bytes: of the GPU since it was asked last; of a process without one, since its start."""
    if not torch.cuda.is_available():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def _peak_tflops() -> float | None:
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)
