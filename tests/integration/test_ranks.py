"""Any number of processes trains the same model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.policy import load_policy
from tests.micro import micro_model

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
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[Path]]:
    """Directories of the model and its reference, by whether their embeddings are tied."""
    return {
        tied: [
            saved(micro_model(seed=seed, tie_word_embeddings=tied), tmp_path_factory)
            for seed in (0, 1)
        ]
        for tied in (False, True)
    }


def saved(model: Any, directories: pytest.TempPathFactory) -> Path:
    directory = directories.mktemp("model")
    model.save_pretrained(directory)
    return directory


def trained(
    processes: int, directory: Path, models: list[Path], rank: int, estimator: str
) -> dict[str, Any]:
    out = directory / f"trained-{processes}.pt"
    program = "tests.integration.ranks_program"
    saving = str(int(processes == 2 and rank == 0))
    given = (str(STEPS), str(rank), estimator, saving)
    torchrun(processes, program, str(out), *given, *map(str, models))
    found: dict[str, Any] = torch.load(out)
    return found


@pytest.mark.parametrize(
    ("processes", "tied", "rank", "estimator"),
    [
        (2, False, 0, "group"),
        (4, True, 0, "group"),
        pytest.param(2, False, 4, "group", id="adapters"),
        pytest.param(2, False, 0, "gae", id="critic"),
    ],
)
def test_losses_and_weights_do_not_depend_on_the_number_of_processes(
    models: dict[bool, list[Path]],
    processes: int,
    tied: bool,
    rank: int,
    estimator: str,
    tmp_path: Path,
) -> None:
    alone = trained(1, tmp_path, models[tied], rank, estimator)
    together = trained(processes, tmp_path, models[tied], rank, estimator)
    for one, other in zip(alone["metrics"], together["metrics"], strict=True):
        assert other == pytest.approx(one, rel=1e-5, abs=1e-6)
    assert alone["weights"].keys() == together["weights"].keys()
    assert ("model.lm_head.weight" in alone["weights"]) is not tied
    untrained = dict(load_policy(models[tied][0]).named_parameters())
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(together["weights"][name], weight, atol=1e-6, rtol=0)
        if rank == 0:
            assert not torch.allclose(untrained[name], weight, atol=1e-4), name
        elif ".lora_" not in name:
            assert torch.equal(untrained[name.replace(".base_layer", "")], weight), name
        elif ".lora_B" in name:
            assert weight.abs().max() > 1e-4, name
