"""Any number of processes trains the same model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.trainer.test_update import policy

STEPS = 4
ROOT = Path(__file__).parents[2]


def torchrun(processes: int, *arguments: str) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(processes), "-m", *arguments),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=200,
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained(1, tmp_path_factory.mktemp("ranks"))


def trained(processes: int, directory: Path) -> dict[str, Any]:
    out = directory / "trained.pt"
    torchrun(processes, "tests.integration.ranks_program", str(out), str(STEPS))
    found: dict[str, Any] = torch.load(out)
    return found


@pytest.mark.parametrize("processes", [2, 4])
def test_losses_and_weights_do_not_depend_on_the_number_of_processes(
    alone: dict[str, Any], processes: int, tmp_path: Path
) -> None:
    together = trained(processes, tmp_path)
    for one, other in zip(alone["metrics"], together["metrics"], strict=True):
        assert other == pytest.approx(one, rel=1e-5, abs=1e-6)
    assert alone["weights"].keys() == together["weights"].keys()
    untrained = dict(policy().named_parameters())
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(together["weights"][name], weight, atol=1e-6, rtol=0)
        assert not torch.allclose(untrained[name], weight, atol=1e-4), name
