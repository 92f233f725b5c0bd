"""`bapo doctor trainer` shows kernels, compilation and memory of a configuration's trainer."""

from __future__ import annotations

import json

from click.testing import CliRunner

from bapo_core.config import config_from
from services.cli.main import bapo
from services.cli.trainer_report import GIB, SYSTEM_GIB, fit_card, report_trainer
from services.model.resolve import TINY_MODEL
from services.trainer.memory import MARGIN, ModelSize

LARGE = ModelSize(
    trained=7_000_000_000,
    frozen=0,
    frozen_bytes=4,
    largest_layer=200_000_000,
    root=600_000_000,
    root_trained=600_000_000,
    layers=32,
    width=4_096,
    vocabulary=150_000,
    layer_elements=120_000,
)
SMALL = {
    "rollout": {"max_prompt_tokens": 128, "max_response_tokens": 128},
    "optimizer": {"microbatch_tokens": 2_048},
}


def test_a_cpu_pads_sequences_and_keeps_activations() -> None:
    report = report_trainer(config_from(SMALL), TINY_MODEL)
    assert report.device == "CPU"
    assert report.attention == [
        "padded for heads of 32 in float32 (flash4 needs a GPU; varlen needs a GPU)"
    ]
    assert not report.compiled
    assert report.plan == "gradient_checkpointing none, micro-batches of at most 2,048 tokens"
    assert 0 < report.predicted_gib["full"] < report.predicted_gib["none"] < 1
    assert list(report.cards) == ["16 GB", "24 GB", "48 GB", "80 GB", "141 GB"]


def test_a_gpu_that_is_too_small_is_said_to_be() -> None:
    """7 billion parameters take 112 GB before activations."""
    config = config_from(SMALL)
    assert fit_card(config, LARGE, 80).startswith("too small: 1")
    fitting = fit_card(config, LARGE, 141)
    assert fitting.startswith("gradient_checkpointing full, micro-batches of at most 2,048")
    predicted = float(fitting.split(": ")[1].split(" of ")[0])
    assert predicted * MARGIN <= (141 - SYSTEM_GIB) * GIB


def test_the_command_prints_a_table_or_json() -> None:
    arguments = ["doctor", "trainer", "rollout.max_prompt_tokens=64", "lora.rank=4"]
    shown = CliRunner().invoke(bapo, arguments)
    assert shown.exit_code == 0, shown.output
    for label in ("device", "attention", "compiled", "memory here", "predicted", "GPU of 80 GB"):
        assert label in shown.output
    data = json.loads(CliRunner().invoke(bapo, [*arguments, "--json"]).output)
    assert data["device"] == "CPU"
    assert data["predicted_gib"].keys() == {"none", "full"}
