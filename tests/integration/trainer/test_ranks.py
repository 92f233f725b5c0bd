"""Training gives the same model with any number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.load_policy import load_policy
from tests.forked import run_ranks
from tests.integration.support.ranks_program import CASES, train_cases
from tests.micro import micro_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a model and a reference, each with tied and untied embeddings; returns their parent."""
    directory = tmp_path_factory.mktemp("models")
    for tied in (False, True):
        for seed, name in enumerate(("model", "reference")):
            model = micro_model(seed=seed, tie_word_embeddings=tied)
            model.save_pretrained(directory / f"{name}-{tied}")
    return directory


def trained(processes: int, cases: list[str], models: Path, directory: Path) -> Any:
    out = directory / f"trained-{processes}.pt"
    run_ranks(processes, train_cases, out, models, cases)
    return torch.load(out)


@pytest.fixture(scope="module")
def alone(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trained(1, list(CASES), models, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def together(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Trains the case "tied" in 4 processes, all others in 2."""
    directory = tmp_path_factory.mktemp("together")
    others = [name for name in CASES if name != "tied"]
    return trained(2, others, models, directory) | trained(4, ["tied"], models, directory)


def test_losses_and_weights_do_not_depend_on_the_number_of_processes(
    alone: Any, together: Any
) -> None:
    for name, case in CASES.items():
        if case.half:
            continue
        one, other = alone[name], together[name]
        for metrics, others in zip(one["metrics"], other["metrics"], strict=True):
            assert others == pytest.approx(metrics, rel=1e-5, abs=1e-6), name
        assert one["weights"].keys() == other["weights"].keys()
        assert ("model.lm_head.weight" in one["weights"]) is not case.tied
        # AdamW divides a gradient by its own size, so where an element of it is almost 0 the order
        # of summation shows, which depends on the CPU's vector instructions, too. So single
        # elements may differ by half a percent of a learning rate, and a tensor as a whole by far
        # less.
        for key, weight in one["weights"].items():
            difference = other["weights"][key] - weight
            assert difference.abs().max() < 5e-6, (name, key)
            assert difference.square().mean().sqrt() < 2e-7, (name, key)


def test_digests_do_not_depend_on_the_number_of_processes(alone: Any, together: Any) -> None:
    for name in CASES:
        assert together[name]["digests"] == alone[name]["digests"], name


def test_results_in_bfloat16_stay_close(alone: Any, together: Any) -> None:
    """GPUs compute in bfloat16, with weights and sums of gradients in fp32."""
    one, other = alone["half"], together["half"]
    for step, (metrics, others) in enumerate(zip(one["metrics"], other["metrics"], strict=True)):
        assert others["loss"] != metrics["loss"]
        # After the first step, the weights differ already; how much depends on the CPU.
        relative, absolute = (0.02, 0.002) if step == 0 else (0.15, 0.02)
        for name in ("loss", "entropy", "kl", "gradient_norm"):
            expected = pytest.approx(metrics[name], rel=relative, abs=absolute)
            assert others[name] == expected, (step, name)
    for key, weight in one["weights"].items():
        torch.testing.assert_close(other["weights"][key], weight, atol=0.02, rtol=0)


def test_only_trained_weights_change(models: Path, alone: Any) -> None:
    for name, case in CASES.items():
        untrained = dict(load_policy(models / f"model-{case.tied}").named_parameters())
        for key, weight in alone[name]["weights"].items():
            if "adapters" not in name:
                assert not torch.allclose(untrained[key], weight, atol=1e-4), key
            elif ".lora_" not in key:
                assert torch.equal(untrained[key.replace(".base_layer", "")], weight), key
            elif ".lora_B" in key:
                assert weight.abs().max() > 1e-4, key
