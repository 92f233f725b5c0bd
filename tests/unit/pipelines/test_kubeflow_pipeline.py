"""Tests the compiled pipeline, and the arguments that the command line gives it."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bapo_core.config import RunConfig, load_config
from bapo_core.errors import BapoError
from pipelines.bapo_pipeline import CONNECTION, COUNTDOWN
from pipelines.parameters import parameters_of
from pipelines.steps import read_config, segment_ends
from services.cli import COMPILED
from services.cli.main import main

ROOT = Path(__file__).parents[3]
PIPELINE, PLATFORM = yaml.safe_load_all((ROOT / COMPILED).read_text())
PICTURE = ROOT / "docs/images/pipeline.svg"
CONFIG = str(ROOT / "examples/countdown.yaml")


def tasks(dag: dict[str, Any]) -> dict[str, dict[str, Any]]:
    by_name: dict[str, dict[str, Any]] = dag["dag"]["tasks"]
    return by_name


def every_task() -> dict[str, dict[str, Any]]:
    """Returns the tasks that run a component of `pipelines.bapo_pipeline`, by name."""
    by_name: dict[str, dict[str, Any]] = {}
    for component in [PIPELINE["root"], *PIPELINE["components"].values()]:
        if "dag" in component:
            by_name |= {
                name: task
                for name, task in tasks(component).items()
                if "executorLabel" in PIPELINE["components"][task["componentRef"]["name"]]
            }
    return by_name


def test_the_compiled_pipeline_is_current(tmp_path: Path) -> None:
    compiled = tmp_path / "compiled.yaml"
    main(["pipeline", "compile", "--output", str(compiled)])
    assert compiled.read_text() == (ROOT / COMPILED).read_text(), "run `bapo pipeline compile`"


def test_the_picture_shows_every_step() -> None:
    drawn = re.findall(r'font-weight="600"[^>]*>([a-z0-9-]+)<', PICTURE.read_text())
    dags = [PIPELINE["root"], *PIPELINE["components"].values()]
    assert sorted(drawn) == sorted(name for dag in dags if "dag" in dag for name in tasks(dag))


def test_images_can_come_from_another_registry(tmp_path: Path) -> None:
    output = tmp_path / "images.yaml"
    images = ["--service-image", "r.example/s:1", "--trainer-image", "r.example/t:1"]
    main(["pipeline", "compile", "--output", str(output), *images])
    used = set(re.findall(r"image: (\S+)", output.read_text()))
    assert used == {"r.example/s:1", "r.example/t:1"}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["compile", "--output", "x.txt"], "ends with .yaml"),
        (["compile", "--output", "x.yaml", "--service-image", "not one"], "'not one' is no image"),
        (["compile", "--output", "x.yaml", "--trainer-image", "r/t:latest"], "give a version"),
        (["run-local", CONFIG, "--replicas", "0"], "--replicas is 0"),
    ],
)
def test_invalid_arguments_of_commands_are_refused(
    command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["pipeline", *command])
    assert message in capsys.readouterr().err


def test_the_pipeline_has_these_steps() -> None:
    assert sorted(every_task()) == [
        "checkpoint-and-sync",
        "clean-up",
        "create-or-resume-run",
        "evaluate",
        "export-model",
        "prepare-data",
        "report",
        "train",
    ]


@pytest.mark.parametrize("name", sorted(every_task()))
def test_every_step_is_retried_and_never_cached(name: str) -> None:
    task = every_task()[name]
    assert task["retryPolicy"]["maxRetryCount"] == 3
    assert not task.get("cachingOptions", {}).get("enableCache", False)


@pytest.mark.parametrize("name", sorted(every_task()))
def test_every_step_gets_the_configmap_and_the_secrets_of_its_release(name: str) -> None:
    executors = PLATFORM["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    executor = executors[f"exec-{name}"]
    keys = {entry["configMapKey"] for entry in executor["configMapAsEnv"][0]["keyToEnv"]}
    assert keys == set(CONNECTION)
    secrets = {
        key["secretKey"]: secret["secretNameParameter"]["componentInputParameter"]
        for secret in executor["secretAsEnv"]
        for key in secret["keyToEnv"]
    }
    assert {key: parameter.split("--")[-1] for key, parameter in secrets.items()} == {
        "BAPO_TOKEN": "token_secret",
        "BAPO_S3_ACCESS_KEY": "s3_secret",
        "BAPO_S3_SECRET_KEY": "s3_secret",
    }
    assert executor["podMetadata"]["labels"] == {"app.kubernetes.io/part-of": "bapo"}


def test_segments_run_in_order_and_clean_up_runs_last() -> None:
    root = tasks(PIPELINE["root"])
    clean_up = root["clean-up"]
    assert clean_up["triggerPolicy"] == {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}
    loops = [
        task
        for component in PIPELINE["components"].values()
        if "dag" in component
        for task in tasks(component).values()
        if "parameterIterator" in task
    ]
    assert [loop["iteratorPolicy"] for loop in loops] == [{"parallelismLimit": 1}]


def test_every_parameter_has_a_description() -> None:
    for name, parameter in PIPELINE["root"]["inputDefinitions"]["parameters"].items():
        assert parameter.get("description"), name


def test_the_default_run_is_the_first_example() -> None:
    example = load_config(ROOT / "examples/countdown-vllm.yaml", ["name=countdown"])
    assert read_config(COUNTDOWN, "", "countdown") == example


@given(
    steps=st.integers(1, 300),
    every=st.integers(1, 20),
    per_segment=st.integers(1, 100),
    done=st.integers(0, 300),
)
def test_segments_end_at_checkpoints_and_with_the_run(
    steps: int, every: int, per_segment: int, done: int
) -> None:
    config = RunConfig.model_validate({"steps": steps, "checkpoint": {"every": every}})
    ends = segment_ends(config, 0, per_segment)
    assert ends[-1] == steps
    assert ends == sorted(set(ends))
    assert all(config.checkpoints_after(end) for end in ends)
    assert segment_ends(config, done, per_segment) == [end for end in ends if end > done]
    if len(ends) > 1:
        # The last segment is longer than half of the others.
        assert 2 * (ends[-1] - ends[-2]) > per_segment
    for before, after in pairwise(ends[:-1]):
        # Apart from the last one, at most one segment ends in every `per_segment` steps.
        assert (after + 1) // per_segment > (before + 1) // per_segment


def test_arguments_are_parameters_of_the_pipeline_or_overrides_of_the_configuration() -> None:
    parameters = parameters_of(CONFIG, ["run=mine", "workers=2", "seed=3", "rollout.group_size=4"])
    assert parameters.pop("config") == Path(CONFIG).read_text()
    assert parameters == {"run": "mine", "workers": 2, "overrides": "seed=3\nrollout.group_size=4"}
    assert parameters_of(CONFIG, [])["run"] == "countdown"
    assert parameters_of(None, ["steps=7"]) == {"overrides": "steps=7"}


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (None, ["workers=two"], "workers=two: give a whole number"),
        (None, ["oops"], "give parameter=value"),
        (None, ["worker=2"], "did you mean workers?"),
        (None, ["rollout.groupsize=4"], "groupsize"),
        ("missing.yaml", [], "missing.yaml: cannot be read: No such file"),
        (None, ["run=Mine"], "name"),
        (None, ["steps_per_segment=0"], "steps_per_segment is 0; give at least 1"),
        (None, ["workers=0"], "give at least one worker"),
        (None, ["memory_per_worker=8gb"], "'8gb' is no amount of memory"),
        (None, ["cpu_per_worker=many"], "'many' is no amount of cores"),
    ],
)
def test_invalid_parameters_are_refused_before_anything_starts(
    config: str | None, arguments: list[str], message: str
) -> None:
    with pytest.raises(BapoError, match=message):
        parameters_of(config, arguments)


def test_segments_have_at_least_one_step() -> None:
    with pytest.raises(BapoError, match="steps_per_segment is 0"):
        segment_ends(RunConfig(), 0, 0)


def test_the_charts_configmap_has_every_key_that_the_pipeline_needs() -> None:
    """Pods of the pipeline would not start without one of these keys."""
    text = (ROOT / "charts/bapo/templates/connection.yaml").read_text()
    text += (ROOT / "charts/bapo/templates/_helpers.tpl").read_text()
    assert set(CONNECTION) <= set(re.findall(r"^\s*(BAPO_[A-Z0-9_]+):", text, re.MULTILINE))
