"""Runs with images in their prompts: trained, killed and resumed, exported and evaluated."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from bapo_core.config import config_from
from services.cli.doctor import measure_parity
from services.common import layout
from services.common.objectstore import ObjectStore
from services.stack.stack import Endpoints
from tests.e2e.test_run import TIMEOUT_S, Bapo, _child, _committed, _outcome, _wait_until
from tests.micro import micro_model, save_micro_vision_model

STEPS = 4


def configuration(name: str, model: Path) -> dict[str, Any]:
    return {
        "name": name,
        "seed": 5,
        "steps": STEPS,
        "model": {"path": str(model)},
        "task": {"name": "chance_diagrams", "train_prompts": 24, "test_prompts": 4},
        "rollout": {
            "prompts_per_step": 8,
            "group_size": 4,
            "max_prompt_tokens": 128,
            "max_response_tokens": 12,
        },
        "sync": {"every": 2, "reevaluate_every": 2},
        "optimizer": {"learning_rate": 1e-4, "minibatch_prompts": 4, "microbatch_tokens": 1024},
        "evaluation": {"every": 4},
        "checkpoint": {"every": 2},
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_micro_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def bapo(
    tmp_path_factory: pytest.TempPathFactory,
    environment: dict[str, str],
    stack: Endpoints,
    model: Path,
) -> Bapo:
    return Bapo(tmp_path_factory.mktemp("runs"), environment, stack, model, configuration)


@pytest.fixture(scope="module")
def undisturbed(bapo: Bapo) -> str:
    bapo.run("diagrams")
    return "diagrams"


def test_the_trainer_scores_as_the_engine_sampled(bapo: Bapo, undisturbed: str) -> None:
    steps = bapo.client(undisturbed).steps()
    assert len(steps) == STEPS
    assert steps[0].metrics["mismatch/logprob_diff_max"] < 1e-4
    assert steps[0].metrics["gradient_norm"] > 0


def test_members_of_a_batch_name_their_images(bapo: Bapo, undisturbed: str) -> None:
    store = ObjectStore(bapo.stack.object_store)
    members = bapo.client(undisturbed).recorded_batch(1).members
    assert members
    for member in members:
        (digest,) = member.images
        assert store.get(layout.image(digest), digest).startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_result_of_an_uninterrupted_run(
    bapo: Bapo, undisturbed: str
) -> None:
    process = bapo.start("diagrams-killed")
    client = bapo.client("diagrams-killed")
    _wait_until(lambda: _committed(client) >= 2, process)
    os.kill(_child(process.pid, "trainer"), signal.SIGKILL)
    process.communicate(timeout=TIMEOUT_S)
    bapo.run("diagrams-killed", "--resume")
    assert _outcome(bapo, "diagrams-killed", STEPS) == _outcome(bapo, undisturbed, STEPS)


def test_an_export_reads_images(bapo: Bapo, undisturbed: str, tmp_path: Path) -> None:
    target = tmp_path / "exported"
    bapo.inspect("checkpoints", undisturbed, "--export", str(target))
    assert (target / "preprocessor_config.json").is_file()
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(configuration("unused", bapo.model)))
    output = bapo.inspect("eval", str(target), str(config))
    assert re.search(r"^test +4 +4 +[01]\.\d+", output, re.MULTILINE), output


def test_doctor_proves_parity_with_images(model: Path, environment: dict[str, str]) -> None:
    parity = measure_parity(config_from(configuration("doctor", model)), model, prompts=6)
    assert parity.responses == 24
    assert parity.failures() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("model.path={text}", "has no vision tower that bapo supports; choose one of the types"),
    ],
)
def test_what_cannot_take_images_is_one_line_before_the_run(
    bapo: Bapo, tmp_path: Path, changes: str, message: str
) -> None:
    micro_model().save_pretrained(tmp_path)
    process = bapo.start("no-tower", changes.format(text=tmp_path))
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert message in errors
    assert len(errors.strip().splitlines()) == 1
    assert "no-tower" not in {state.name for state in bapo.client("no-tower").runs()}
