"""Commands that query a running service print tables for people and JSON for programs."""

from __future__ import annotations

import io
import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from bapo_core.config.training import MlflowConfig
from bapo_core.errors import BapoError
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.cli import main as cli
from services.common.objectstore import ObjectStore
from services.exporters.curves import curves
from services.exporters.mlflow import MlflowRun, mirror_to_mlflow, update_mlflow
from services.stack.stack import Endpoints, running_stack
from tests.integration.support.driver import Driver, small_config

Ask = Callable[..., str]


@pytest.fixture(scope="module")
def driver(stack: Endpoints) -> Driver:
    driver = Driver(stack, small_config("asked"))
    for step in range(1, 5):
        driver.run_step(step)
    return driver


@pytest.fixture
def ask(driver: Driver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    monkeypatch.setenv("BAPO_BUFFER_URL", driver.stack.buffer_url)
    monkeypatch.setenv("BAPO_TOKEN", driver.stack.token)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> str:
        cli.main(arguments)
        return capsys.readouterr().out

    return run


def test_prompts_and_their_attempts_are_listed(ask: Ask, driver: Driver) -> None:
    listed = json.loads(ask("prompts", "asked", "--order", "hardest", "--limit", "5", "--json"))
    assert listed == [
        p.model_dump(mode="json") for p in driver.client.prompts(order="hardest", limit=5).items
    ]
    uid = listed[0]["uid"]
    table = ask("prompts", "asked", "--order", "hardest", "--limit", "5")
    assert uid in table
    assert len(table.strip().splitlines()) == 6
    history = json.loads(ask("prompt", "asked", uid, "--json"))
    assert len(history["attempts"]) == listed[0]["attempts"]
    assert f"{history['attempts'][0]['correct']}/4" in ask("prompt", "asked", uid)
    decision = ask("prompt", "asked", uid, "--step", "3")
    assert "fresh" in decision
    assert "replayed" in decision
    assert ask("prompts", "asked", "--search", "no such words") == ""


def test_buffers_and_batches_are_listed(ask: Ask, driver: Driver) -> None:
    items = json.loads(ask("buffer", "asked", "hard", "--step", "3", "--json"))
    assert [i["group_id"] for i in items] == [i.group_id for i in driver.client.buffer("hard", 3)]
    assert "admitted" in ask("buffer", "asked", "hard", "--events")
    sizes = json.loads(ask("buffer", "asked", "--json"))
    assert sizes == [size.model_dump(mode="json") for size in driver.client.buffers()]
    assert f"{sizes[0]['entries']} of {sizes[0]['capacity']}" in ask("buffer", "asked")
    assert len(json.loads(ask("batches", "asked", "--json"))) == 4
    members = json.loads(ask("batches", "asked", "--step", "2", "--json"))["members"]
    assert members == [m.model_dump(mode="json") for m in driver.client.recorded_batch(2).members]
    assert "replayed" in ask("batches", "asked")


def test_the_responses_of_a_group_can_be_read(ask: Ask, driver: Driver) -> None:
    member = driver.client.recorded_batch(2).members[0]
    group = driver.client.group(member.group_id)
    assert json.loads(ask("group", "asked", str(member.group_id), "--json")) == group.model_dump(
        mode="json"
    )
    shown = ask("group", "asked", str(member.group_id))
    assert shown.startswith(
        f"{member.prompt_uid}: {member.correct} of {member.size} responses are correct"
    )
    for number, response in enumerate(group.responses, start=1):
        verdict = "correct" if response.correct else "wrong (wrong_value)"
        assert (
            f"response {number}: reward {response.reward:g}, {verdict}, answer read: 1 + 2, "
        ) in shown
        assert f"\n{response.text}\n" in shown


def test_what_the_model_wrote_is_listed(ask: Ask, driver: Driver) -> None:
    listed = json.loads(ask("responses", "asked", "--wrong", "--limit", "3", "--json"))
    assert len(listed) == 3
    assert listed == [
        response.model_dump(mode="json")
        for response in list(driver.client.responses(correct=False))[:3]
    ]
    first = listed[0]
    shown = ask("responses", "asked", "--wrong", "--limit", "3")
    assert shown.startswith(
        f"{first['prompt_uid']} ({first['kind']}, step 4, group {first['group_id']})\n"
    )
    assert (
        f"response {first['index'] + 1}: reward 0, wrong (wrong_value), answer read: 1 + 2, "
        f"{first['tokens']} tokens\n1+2\n"
    ) in shown
    assert ask("responses", "asked", "--contains", "no such text", "--first", "1") == ""


def test_responses_cannot_change_the_terminal(
    ask: Ask, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = driver.client.group(driver.client.recorded_batch(1).members[0].group_id)
    response = group.responses[0].model_copy(update={"text": "é\n\x1b]0;title\x07"})
    changed = group.model_copy(update={"responses": [response]})
    monkeypatch.setattr(BufferClient, "group", lambda *_, **__: changed)
    assert ask("group", "asked", "1").endswith("é\n\\x1b]0;title\\x07\n")


def test_metrics_are_a_table_and_tensorboard_events(
    ask: Ask, driver: Driver, tmp_path: Path
) -> None:
    shown = ask("metrics", "asked", "--limit", "2").strip().splitlines()
    assert [line.split()[0] for line in shown] == ["step", "3", "4"]
    steps = driver.client.steps()
    assert json.loads(ask("metrics", "asked", "--json")) == [
        step.model_dump(mode="json") for step in steps
    ]
    for _ in range(2):  # The second export writes no point twice.
        assert "tensorboard --logdir" in ask("metrics", "asked", "--tensorboard", str(tmp_path))
    events = EventAccumulator(str(tmp_path / "asked"))
    events.Reload()
    for name, value in curves(steps[-1]).items():
        last = events.Scalars(name)[-1]
        assert (last.step, last.value) == (4, pytest.approx(value, rel=1e-6))
    assert [point.step for point in events.Scalars("reward")] == [1, 2, 3, 4]


def test_metrics_are_written_to_wandb_once_and_lead_to_the_dashboard(
    ask: Ask, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    # 4 steps, and the evaluations of two versions.
    assert "points are in wandb; `wandb sync`" in ask("metrics", "asked", "--wandb", "team/mine")
    (file,) = tmp_path.glob("wandb/wandb/offline-run-*/*.wandb")
    records = read_wandb(file.read_bytes())
    (run,) = [record.run for record in records if record.HasField("run")][:1]
    assert (run.entity, run.project, run.display_name) == ("team", "mine", "asked")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["dashboard"] == f"{driver.client.url}/#/runs/asked"
    assert config["rollout"]["group_size"] == driver.config.rollout.group_size
    points = [
        {
            item.key or item.nested_key[0]: json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records
        if record.HasField("history")
    ]
    steps = {point["training_step"]: point for point in points if "reward" in point}
    assert sorted(steps) == [1, 2, 3, 4]
    for step in driver.client.steps():
        for name, value in curves(step).items():
            assert steps[step.step][name] == pytest.approx(value, rel=1e-6)
    assert not list(tmp_path.rglob("wandb-metadata.json")), "nothing of the machine is sent"


def read_wandb(data: bytes) -> list[Any]:
    """Returns the records of a file of W&B, which is a log of LevelDB after 7 bytes of its own."""
    records, parts, position = [], b"", 7
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left  # A block ends with zeros where no head fits.
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # The whole record, or its last part.
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            records.append(record)
            parts = b""
    return records


def test_metrics_in_narrow_terminals_have_fewer_columns(
    ask: Ask, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert "MiB" in ask("metrics", "asked").splitlines()[0], "a pipe gets all columns"
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    table = click.unstyle(ask("metrics", "asked")).strip().splitlines()
    assert all(len(line) <= 40 for line in table)
    assert table[0].split()[:3] == ["step", "reward", "loss"]
    assert "MiB" not in table[0]
    monkeypatch.setenv("COLUMNS", "200")
    assert "MiB" in ask("metrics", "asked").splitlines()[0]


def test_an_address_of_mlflow_with_a_password_is_refused_without_it(
    ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        ask("metrics", "asked", "--mlflow", "http://me:secret@127.0.0.1:9")
    error = capsys.readouterr().err
    assert "the URI of MLflow holds a user or a password" in error
    assert "secret" not in error


def test_metrics_in_mlflow_go_on_where_they_ended(
    ask: Ask,
    driver: Driver,
    tmp_path: Path,
    reserved_port: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    interrupted = MlflowRun(uri, "bapo", driver.client)
    with monkeypatch.context() as patch:
        patch.setattr(interrupted._client, "log_batch", Mock(side_effect=MlflowException("away")))
        with pytest.raises(BapoError, match="MLflow: away"):
            interrupted.write()
    interrupted.write()
    for _ in range(2):
        assert "experiment 'bapo'" in ask("metrics", "asked", "--mlflow", uri)
    mlflow = MlflowClient(uri)
    (run,) = mlflow.search_runs([mlflow.get_experiment_by_name("bapo").experiment_id])
    assert (run.info.run_name, run.info.status) == ("asked", "RUNNING")
    assert run.data.params["rollout.group_size"] == "4"
    rewards = mlflow.get_metric_history(run.info.run_id, "reward")
    steps = driver.client.steps()
    assert [(m.step, m.value) for m in rewards] == [(s.step, s.r_tot) for s in steps]
    # A run exports what is new when it ends, and a failing export does not fail the run.
    other = Driver(driver.stack, small_config("mirrored", mlflow={"tracking_uri": uri}))
    with mirror_to_mlflow(other.config, other.client):
        other.run_step(1)
    other.client.set_status("failed")
    update_mlflow(other.config, other.client)
    (run,) = (
        candidate
        for candidate in mlflow.search_runs([run.info.experiment_id])
        if candidate.info.run_name == "mirrored"
    )
    assert run.info.status == "FAILED"
    assert [m.step for m in mlflow.get_metric_history(run.info.run_id, "reward")] == [1]
    unreachable = other.config.model_copy(
        update={"mlflow": MlflowConfig(tracking_uri=f"http://127.0.0.1:{reserved_port}")}
    )
    update_mlflow(unreachable, other.client)
    assert "`bapo metrics mirrored --mlflow` writes what is missing" in caplog.text
    with (
        pytest.raises(BapoError, match="MLflow at http"),
        mirror_to_mlflow(unreachable, other.client),
    ):
        pass


def test_runs_are_listed_paused_stopped_and_deleted(
    ask: Ask,
    stack: Endpoints,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Driver(stack, small_config("changed"))
    assert {run["name"] for run in json.loads(ask("runs", "--json"))} >= {"asked", "changed"}
    assert ask("pause", "changed") == "changed is paused after step 0\n"
    assert ask("resume", "changed") == "changed is running after step 0\n"
    stop = ("stop", "changed", "--reason", "its cores are needed")
    assert ask(*stop) == "changed is stopped after step 0\n"
    (listed,) = (run for run in json.loads(ask("runs", "--json")) if run["name"] == "changed")
    assert listed["stopped"]["reason"] == "its cores are needed"
    assert f"{listed['stopped']['by']}: its cores are needed" in " ".join(ask("runs").split())
    for answer in ("n\n", ""):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        with pytest.raises(SystemExit):
            cli.main(["delete", "changed"])
        error = capsys.readouterr().err
        assert "Delete run changed (stopped, 0 of 12 steps)" in error
        assert "was not deleted; --yes deletes it without asking" in error
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert "is deleted" in ask("delete", "changed")
    assert not [line for line in ask("runs").splitlines() if line.startswith("changed ")]
    Driver(stack, small_config("changed")).client.stop()
    assert "is deleted" in ask("delete", "changed", "--yes")


def test_tokens_are_created_listed_and_revoked(ask: Ask, driver: Driver) -> None:
    made = json.loads(ask("token", "create", "for a test", "--scope", "read", "--json"))
    assert "for a test" in ask("token", "list")
    assert (
        ask("token", "revoke", str(made["id"])) == f"token {made['id']} (for a test) is revoked\n"
    )
    assert "it is not shown again" in ask("token", "create", "another")


def test_garbage_is_counted(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    # This needs a stack of its own, because other tests leave rows without objects. As root, it
    # lets Postgres's user through the directories above its home, so that must not be in another's.
    with (
        tempfile.TemporaryDirectory(prefix="bapo-garbage-") as home,
        running_stack(Path(home), 0) as endpoints,
    ):
        monkeypatch.setenv("BAPO_BUFFER_URL", endpoints.buffer_url)
        monkeypatch.setenv("BAPO_TOKEN", endpoints.token)
        store = ObjectStore(endpoints.object_store)
        store.put("runs/orphan/one", b"1")
        assert ask("gc", "--dry-run") == (
            "runs/orphan/one\n1 of 1 objects have no row; those older than a day would be deleted\n"
        )
        # It is too young to be deleted.
        assert ask("gc").startswith("0 of 1 objects had no row")
        assert json.loads(ask("gc", "--json", "--dry-run"))["orphans"] == ["runs/orphan/one"]


def test_missing_objects_fail_the_command_in_both_formats(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    garbage = wire.Garbage(orphans=[], objects=0, missing=["runs/asked/lost"], deleted=0)
    monkeypatch.setattr(BufferClient, "collect_garbage", lambda *_, **__: garbage)
    for options in ((), ("--json",)):
        with pytest.raises(SystemExit) as caught:
            ask("gc", *options)
        assert caught.value.code == 1


def test_without_a_service_the_error_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("BAPO_BUFFER_URL", raising=False)
    monkeypatch.delenv("BAPO_TOKEN", raising=False)
    monkeypatch.setenv("BAPO_HOME", str(tmp_path))
    with pytest.raises(SystemExit) as caught:
        cli.main(["runs"])
    assert caught.value.code == 1
    assert "start it with `bapo stack up`" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["BAPO_BUFFER_URL", "BAPO_TOKEN"])
def test_a_service_that_is_half_named_is_not_taken_for_that_of_this_machine(
    ask: Ask, missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(missing)
    with pytest.raises(SystemExit):
        ask("delete", "asked", "--yes")
    assert f"{missing} is not set, but BAPO_" in capsys.readouterr().err


def test_the_report_is_of_the_service_that_the_environment_names(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BAPO_HOME", str(tmp_path / "home"))
    with pytest.raises(SystemExit):
        ask("report", "asked")
    assert "run 'asked' has committed 4 steps" in capsys.readouterr().err
    assert not (tmp_path / "home").exists(), "no stack of this machine was started"


def test_an_unknown_run_is_an_error_of_one_line(
    ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        ask("prompts", "nobody")
    error = capsys.readouterr().err
    assert error == "error: there is no run 'nobody'; `bapo runs` lists them\n"
