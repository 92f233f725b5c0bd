"""A model that reads images is the same whatever the number of processes that train it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import run_ranks
from tests.integration.support.vision_ranks_program import train
from tests.micro import VISION_MODELS, save_micro_vision_model


@pytest.mark.slow
@pytest.mark.parametrize("architecture", VISION_MODELS)
def test_weights_do_not_depend_on_the_number_of_processes(
    architecture: str, tmp_path: Path
) -> None:
    """One of the two ranks has a micro-batch without images while the other has images."""
    model = save_micro_vision_model(tmp_path / "model", architecture)
    results: list[Any] = []
    for processes in (1, 2):
        out = tmp_path / f"{processes}.pt"
        run_ranks(processes, train, out, model)
        results.append(torch.load(out))
    alone, together = results
    for metrics, others in zip(alone["metrics"], together["metrics"], strict=True):
        assert others == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    for name, weight in alone["weights"].items():
        assert (together["weights"][name] - weight).square().mean().sqrt() < 2e-6, name
