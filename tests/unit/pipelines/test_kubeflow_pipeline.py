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

from bapo_core.config import ConfigHistory, RunConfig, load_config
from bapo_core.errors import BapoError, ConfigError
from pipelines import IMPORTABLE, RELEASE_NAMES, SEGMENTS
from pipelines.bapo_pipeline import CONNECTION
from pipelines.configuration import COUNTDOWN, read_config
from pipelines.parameters import config_of, parameters_of
from pipelines.settings import DeploymentSettings, StepSettings
from pipelines.steps import segment_ends
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
    # Only the pinned version of kfp writes its own number into the file.
    version = re.compile(r"^sdkVersion: kfp-.*$", re.MULTILINE)
    expected, actual = (version.sub("", p.read_text()) for p in (ROOT / COMPILED, compiled))
    assert actual == expected, "run `bapo pipeline compile`"


def test_the_picture_shows_every_step() -> None:
    texts = re.findall(r'font-weight="600" fill="#1f2933"[^>]*>(.*?)</text>', PICTURE.read_text())
    drawn = [re.sub(r"</?tspan[^>]*>", " ", text).split() for text in texts]
    dags = [PIPELINE["root"], *PIPELINE["components"].values()]
    shown = [
        task["taskInfo"]["name"] for dag in dags if "dag" in dag for task in tasks(dag).values()
    ]
    assert sorted(map(" ".join, drawn)) == sorted(shown)


def test_images_can_come_from_another_registry(tmp_path: Path) -> None:
    output = tmp_path / "images.yaml"
    images = ["--service-image", "r.example/s:1", "--trainer-image", "r.example/t:1"]
    main(["pipeline", "compile", "--output", str(output), *images])
    used = set(re.findall(r"image: (\S+)", output.read_text()))
    assert used == {"r.example/s:1", "r.example/t:1"}


def test_a_pipeline_with_imports_stores_the_artifacts_first(tmp_path: Path) -> None:
    output = tmp_path / "imports.yaml"
    main(
        ["pipeline", "compile", "--output", str(output), "--import", "model", "--import=test_data"]
    )
    pipeline, _ = yaml.safe_load_all(output.read_text())
    training = tasks(pipeline["components"]["comp-exit-handler-1"])
    prepared = training["prepare-run"]["inputs"]["parameters"]
    assert "componentInputParameter" in prepared["train_data"], "it is not imported"
    kinds = {}
    for parameter in ("model", "test_data"):
        stored = training[prepared[parameter]["taskOutputParameter"]["producerTask"]]
        artifact = stored["inputs"]["artifacts"]["artifact"]["taskOutputArtifact"]
        importer = training[artifact["producerTask"]]
        uri = importer["inputs"]["parameters"]["uri"]["componentInputParameter"]
        assert uri == f"pipelinechannel--{parameter}"
        component = pipeline["components"][importer["componentRef"]["name"]]
        kinds[parameter] = component["outputDefinitions"]["artifacts"]["artifact"]["artifactType"]
        assert stored["taskInfo"]["name"] == f"store {parameter.replace('_', ' ')}"
    assert kinds["model"]["schemaTitle"] == "system.Model"
    assert kinds["test_data"]["schemaTitle"] == "system.Dataset"


def test_an_importer_has_the_name_by_which_kubeflow_looks_for_it(tmp_path: Path) -> None:
    """Kubeflow 2.17 records an importer under `taskInfo.name`, and looks for it by its key. With
    another name, what follows fails: "cannot find producer task"."""
    output = tmp_path / "imports.yaml"
    imports = [f"--import={name}" for name in IMPORTABLE]
    main(["pipeline", "compile", "--output", str(output), *imports])
    pipeline, _ = yaml.safe_load_all(output.read_text())
    executors = pipeline["deploymentSpec"]["executors"]
    importers = {
        key: task["taskInfo"]["name"]
        for key, task in tasks(pipeline["components"]["comp-exit-handler-1"]).items()
        if "importer"
        in executors[pipeline["components"][task["componentRef"]["name"]]["executorLabel"]]
    }
    assert len(importers) == len(IMPORTABLE)
    assert list(importers) == list(importers.values())


def test_an_import_without_an_address_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "imports.yaml")
    main(["pipeline", "compile", "--output", output, "--import", "train_data"])
    vllm = str(ROOT / "examples/countdown-vllm.yaml")
    for command in (
        ["submit", vllm, "--package", output, "--host", "http://127.0.0.1:9"],
        ["run-local", vllm, "--import", "train_data"],
    ):
        with pytest.raises(SystemExit):
            main(["pipeline", *command, "model=tiny"])
        assert "train_data is empty, but the pipeline imports" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["compile", "--output", "x.txt"], "ends with .yaml"),
        (["compile", "--output", "x.yaml", "--service-image", "not one"], "'not one' is no image"),
        (["compile", "--output", "x.yaml", "--trainer-image", "r/t:latest"], "give a version"),
        (["compile", "--output", "x.yaml", "--segments", "0"], "--segments is 0; give 1 to 50"),
        (["compile", "--output", "x.yaml", "--segments", "51"], "--segments is 51; give 1 to 50"),
        (["compile", "--output", "x.yaml", "--name", "token=x"], "KEY is one of connection, token"),
        (["compile", "--output", "x.yaml", "--name", "s3_secret=My Keys"], "NAME that of a Config"),
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
    numbers = ["", *(f"-{number}" for number in range(2, SEGMENTS + 1))]
    assert sorted(every_task()) == [
        "clean-up",
        "evaluate-and-export",
        "prepare-run",
        *(f"sync{number}" for number in numbers[:-1]),
        *(f"train{number}" for number in numbers),
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
    (connection,) = executor["configMapAsEnv"]
    assert {entry["configMapKey"] for entry in connection["keyToEnv"]} == set(CONNECTION)
    # A pod would wait for ever for what it lacks; the step says what that is.
    for source in (connection, *executor["secretAsEnv"], *executor["configMapAsVolume"]):
        assert source["optional"]
    secrets = {
        key["secretKey"]: secret["secretNameParameter"]["runtimeValue"]["constant"]
        for secret in executor["secretAsEnv"]
        for key in secret["keyToEnv"]
    }
    hub = {"HF_TOKEN": "bapo-hub"} if name == "prepare-run" else {}
    assert secrets == {
        "BAPO_PIPELINE_TOKEN": "bapo-token",
        "BAPO_S3_ACCESS_KEY": "bapo-s3",
        "BAPO_S3_SECRET_KEY": "bapo-s3",
        **hub,
    }
    assert executor["podMetadata"]["labels"] == {"app.kubernetes.io/part-of": "bapo"}


def test_the_names_of_a_releases_secrets_are_compiled_into_the_pipeline(tmp_path: Path) -> None:
    output = tmp_path / "named.yaml"
    names = {key: f"my-{key.replace('_', '-')}" for key in RELEASE_NAMES}
    options = [f"--name={key}={name}" for key, name in names.items()]
    main(["pipeline", "compile", "--output", str(output), *options])
    text = output.read_text()
    assert set(names.values()) == set(re.findall(r"constant: (my-\S+)", text))
    assert not re.findall(r"bapo-(connection|token|s3|hub|ca)\b", text)


def graph() -> dict[str, dict[str, Any]]:
    """Returns the tasks inside the exit handler."""
    return tasks(PIPELINE["components"]["comp-exit-handler-1"])


@pytest.mark.parametrize("name", sorted(every_task()))
def test_every_step_has_requests_and_limits(name: str) -> None:
    """A namespace with a quota, as Kubeflow's profiles have one, refuses a pod without."""
    label = PIPELINE["components"][every_task()[name]["componentRef"]["name"]]["executorLabel"]
    resources = PIPELINE["deploymentSpec"]["executors"][label]["container"]["resources"]
    assert resources.keys() >= {
        *("resourceCpuRequest", "resourceCpuLimit"),
        *("resourceMemoryRequest", "resourceMemoryLimit"),
    }
    if name.startswith("train"):
        assert resources["resourceMemoryRequest"] == "150Mi", "it only watches"
        assert resources["resourceCpuRequest"] == "100m"


def test_each_step_depends_on_the_one_before_and_clean_up_runs_last() -> None:
    """A step that fails ends the graph: Argo runs nothing that depends on it."""
    clean_up = tasks(PIPELINE["root"])["clean-up"]
    assert clean_up["triggerPolicy"] == {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}
    order = ["prepare-run"]
    for number in range(1, SEGMENTS + 1):
        suffix = "" if number == 1 else f"-{number}"
        order += [f"train{suffix}", f"sync{suffix}"]
    order[-1] = "evaluate-and-export"
    steps = graph()
    assert set(order) == set(steps)
    for before, after in pairwise(order):
        assert steps[after]["dependentTasks"] == [before], "the graph is a chain"
    assert "dependentTasks" not in steps[order[0]]
    outputs = [
        source
        for step in steps.values()
        for source in step["inputs"]["parameters"].values()
        if "taskOutputParameter" in source
    ]
    assert not outputs, "an edge for each output would draw a tangle"


def test_a_run_of_one_segment_has_ten_pods(tmp_path: Path) -> None:
    """Kubeflow makes a driver and an executor for each step, and a driver for each of two graphs;
    each step costs 20 seconds."""
    output = tmp_path / "one.yaml"
    main(["pipeline", "compile", "--output", str(output), "--segments", "1"])
    pipeline, _ = yaml.safe_load_all(output.read_text())
    steps = tasks(pipeline["components"]["comp-exit-handler-1"])
    assert list(steps) == ["evaluate-and-export", "prepare-run", "train"]
    assert 2 * len([*steps, "clean-up"]) + 2 == 10


def test_there_is_no_loop_and_one_click_leads_to_the_steps() -> None:
    """Kubeflow's "Retry" of a loop hangs for ever, and a loop goes on after a failure."""
    for component in PIPELINE["components"].values():
        for task in tasks(component).values() if "dag" in component else ():
            assert "parameterIterator" not in task
            assert "executorLabel" in PIPELINE["components"][task["componentRef"]["name"]]


def test_the_names_of_steps_say_where_the_run_stands() -> None:
    names = [task["taskInfo"]["name"] for task in graph().values()]
    for number in range(1, SEGMENTS + 1):
        assert f"train {number} of {SEGMENTS}" in names
        assert (f"sync {number} of {SEGMENTS}" in names) == (number < SEGMENTS)
    assert max(map(len, names)) <= 19, "Kubeflow's graph cuts off longer ones"


def test_another_number_of_segments_can_be_compiled(tmp_path: Path) -> None:
    output = tmp_path / "segments.yaml"
    main(["pipeline", "compile", "--output", str(output), "--segments", "1"])
    pipeline, _ = yaml.safe_load_all(output.read_text())
    steps = tasks(pipeline["components"]["comp-exit-handler-1"])
    assert [name for name in steps if name.startswith("train")] == ["train"]
    assert steps["train"]["taskInfo"]["name"] == "train"


def test_the_form_begins_with_the_name_of_the_run() -> None:
    """Kubeflow sorts the parameters by name."""
    assert min(PIPELINE["root"]["inputDefinitions"]["parameters"]) == "bapo_run"


def test_the_form_has_an_editor_for_what_has_structure() -> None:
    """Kubeflow joins the lines of a text; it has a JSON editor for objects and lists."""
    kinds = {
        name: parameter["parameterType"]
        for name, parameter in PIPELINE["root"]["inputDefinitions"]["parameters"].items()
    }
    assert (kinds["config"], kinds["overrides"]) == ("STRUCT", "LIST")
    assert (kinds["steps"], kinds["learning_rate"]) == ("NUMBER_INTEGER", "NUMBER_DOUBLE")


def test_the_compiled_file_is_the_same_each_time() -> None:
    """KFP writes a comment in which the keys of a default have a random order."""
    assert not (ROOT / COMPILED).read_text().startswith("#")


def test_every_parameter_has_a_description() -> None:
    for name, parameter in PIPELINE["root"]["inputDefinitions"]["parameters"].items():
        assert parameter.get("description"), name


def test_the_default_run_is_the_first_example() -> None:
    example = load_config(ROOT / "examples/countdown-vllm.yaml", ["name=countdown"])
    assert read_config("countdown", COUNTDOWN, None, [], {}) == example


@given(
    steps=st.integers(1, 300),
    every=st.integers(1, 20),
    segments=st.integers(1, 50),
)
def test_segments_end_at_checkpoints_and_with_the_run(
    steps: int, every: int, segments: int
) -> None:
    config = RunConfig.model_validate({"steps": steps, "checkpoint": {"every": every}})
    ends = segment_ends(ConfigHistory(config), segments)
    assert len(ends) == segments
    assert ends[-1] == steps
    assert ends == sorted(ends)
    assert all(config.checkpoints_after(end) for end in ends)
    for number, end in enumerate(ends, 1):
        # Less than one checkpoint later than its share of the steps.
        assert 0 <= end * segments - number * steps < every * segments or end == steps


@pytest.mark.parametrize(
    ("segments", "past", "ends"),
    [(2, 8, [11, 12]), (4, 4, [7, 9, 11, 12]), (4, 10, [11, 11, 12, 12]), (1, 11, [12])],
)
def test_the_segments_of_a_fork_divide_its_own_steps(
    segments: int, past: int, ends: list[int]
) -> None:
    # It has checkpoints after steps 1, 3, 5, 7, 9, 11 and 12.
    config = load_config(None, ["steps=12", "sync.every=1", "checkpoint.every=2"])
    assert segment_ends(ConfigHistory(config), segments, past) == ends


def test_a_pipeline_has_at_least_one_segment() -> None:
    with pytest.raises(BapoError, match="has 0 segments"):
        segment_ends(ConfigHistory(RunConfig()), 0)


def test_arguments_are_parameters_of_the_pipeline_or_overrides_of_the_configuration() -> None:
    arguments = ["name=mine", "workers=2", "steps=7", "learning_rate=1e-5", "seed=3"]
    parameters = parameters_of(CONFIG, [*arguments, "rollout.group_size=4"])
    assert parameters.pop("config") == yaml.safe_load(Path(CONFIG).read_text())
    assert parameters == {
        "bapo_run": "mine",
        "workers": 2,
        "steps": 7,
        "learning_rate": 1e-5,
        "overrides": ["seed=3", "rollout.group_size=4"],
    }
    assert parameters_of(CONFIG, [])["bapo_run"] == "countdown", "the file has a name"
    assert parameters_of(None, ["seed=7"]) == {"overrides": ["seed=7"]}


def test_a_fork_needs_no_file_and_has_the_configuration_of_its_run() -> None:
    arguments = ["name=other", "fork_of=mine", "fork_step=3", "steps=9", "replay.select=off"]
    assert parameters_of(None, arguments) == {
        "bapo_run": "other",
        "fork_of": "mine",
        "fork_step": 3,
        "steps": 9,
        "overrides": ["replay.select=off"],
    }


def test_a_file_without_a_name_starts_a_new_run(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("steps: 9\n")
    assert "bapo_run" not in parameters_of(str(file), [])
    assert parameters_of(str(file), ["name=mine"])["bapo_run"] == "mine"


def test_arguments_make_the_configuration_that_a_run_of_this_machine_has(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("name: one\nsteps: 9\nmodel: {path: tiny}\ntask: {train_path: null}\n")
    overrides = ["rollout.group_size=4", "optimizer.weight_decay=0"]
    parameters = parameters_of(str(file), overrides)
    assert config_of(parameters) == load_config(file, overrides)
    assert "train_path" not in str(parameters["config"]), "KFP's local runner refuses nulls"


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (None, ["workers=two"], "workers=two: give a whole number"),
        (None, ["learning_rate=low"], "learning_rate=low: give a number"),
        (None, ["oops"], "give parameter=value"),
        (None, ["worker=2"], "did you mean workers?"),
        (None, ["rollout.groupsize=4"], "groupsize"),
        ("missing.yaml", [], "missing.yaml: cannot be read: No such file"),
        (None, ["name=Mine"], "name"),
        (None, ["run=mine"], "the name of a run is name=NAME"),
        (None, ["bapo_run=mine"], "give name=NAME"),
        (
            None,
            ["token_secret=mine"],
            "belongs to the release; `bapo pipeline compile` takes it as",
        ),
        (None, ["config={}"], "give the YAML file as the first argument"),
        (None, ["steps_per_segment=5"], "--segments"),
        (CONFIG, ["stored_config=mine"], "are both given"),
        (CONFIG, ["fork_of=mine", "fork_step=3"], "a file and fork_of are both given"),
        (None, ["fork_of=mine"], "fork_of is 'mine', but fork_step is 0; give the last step"),
        (None, ["fork_step=3"], "fork_step is 3, but fork_of is empty"),
        (None, ["fork_of=mine", "fork_step=three"], "fork_step=three: give a whole number"),
        (None, ["workers=0"], "give at least one worker"),
        (None, ["memory_per_worker=8gb"], "'8gb' is no amount of memory"),
        (None, ["cpu_per_worker=many"], "'many' is no amount of cores"),
        (None, ["start_within_minutes=0"], "start_within_minutes is 0; give at least 1"),
    ],
)
def test_invalid_parameters_are_refused_before_anything_starts(
    config: str | None, arguments: list[str], message: str
) -> None:
    with pytest.raises(BapoError, match=message):
        parameters_of(config, arguments)


def test_the_charts_configmap_has_every_key_that_the_pipeline_reads() -> None:
    text = (ROOT / "charts/bapo/templates/connection.yaml").read_text()
    text += (ROOT / "charts/bapo/templates/_helpers.tpl").read_text()
    assert set(CONNECTION) <= set(re.findall(r"^\s*([A-Z][A-Z0-9_]+):", text, re.MULTILINE))
    settings = {f"BAPO_{name.upper()}" for name in DeploymentSettings.model_fields}
    assert settings <= set(CONNECTION), "a step would silently take the default"


def test_a_step_that_lacks_its_configmap_or_a_secret_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in CONNECTION:
        monkeypatch.delenv(name, raising=False)
    message = "BAPO_S3_ENDPOINT is not set.* compiled with the names that `helm status` prints"
    with pytest.raises(ConfigError, match=message):
        StepSettings.load()
