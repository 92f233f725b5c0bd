"""Who writes a text that a command prints does not command the terminal that it is printed on.

The texts are those of data sets, models, other people's files, and holders of tokens.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from bapo_core.config import RunConfig
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.buffer.api.trajectories import TrajectoryGroup
from services.cli import main as cli
from services.cli.console import plain_console
from services.cli.progress import RunDisplay
from services.datasets.load import RunDatasets, load_datasets
from services.stack.stack import Endpoints
from tests.integration.support.driver import Driver, small_config

HOSTILE = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\r\x9b31m\u202e\u2066[red]x[/red]"
"""Sets the clipboard, clears the screen, begins the line again, and turns the text around."""


class HostileDriver(Driver):
    """A run whose data set, responses and holders of tokens write `HOSTILE`."""

    def __init__(self, stack: Endpoints) -> None:
        super().__init__(stack, small_config("hostile-texts"), create_hostile_run)

    def groups(
        self, step: int, kind: wire.Kind = "fresh", generation_round: int = 0
    ) -> list[TrajectoryGroup]:
        return [
            replace(
                group,
                responses=[
                    replace(response, text=HOSTILE, answer=HOSTILE) for response in group.responses
                ],
            )
            for group in super().groups(step, kind, generation_round)
        ]


def create_hostile_run(client: BufferClient, config: RunConfig) -> None:
    datasets = load_datasets(config)
    prompts = [
        prompt.model_copy(
            update={"uid": f"{HOSTILE}{number}", "payload": {**prompt.payload, HOSTILE: HOSTILE}}
        )
        for number, prompt in enumerate(datasets.train.prompts)
    ]
    train = replace(datasets.train, name="hostile-prompts", prompts=prompts)
    datasets = RunDatasets(train, datasets.test)
    for dataset in datasets.all:
        client.upload_dataset(dataset.name, dataset.prompts)
    client.create_run(datasets.run_request(config))


@pytest.fixture(scope="module")
def driver(stack: Endpoints) -> Driver:
    driver = HostileDriver(stack)
    driver.run_step(1)
    driver.run_step(2)
    driver.client.stop(by=HOSTILE, reason=HOSTILE)
    return driver


@pytest.fixture(autouse=True)
def log_records() -> Iterator[None]:
    """Restores the log records that `bapo` replaces in its own process."""
    factory = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(factory)


def assert_harmless(printed: str) -> None:
    """Fails if a terminal would obey the text; the colours of `bapo` itself are left out."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", printed)
    obeyed = [
        character for character in plain if not (character.isprintable() or character == "\n")
    ]
    assert obeyed == []


def test_no_command_prints_what_a_terminal_obeys(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BAPO_BUFFER_URL", driver.stack.buffer_url)
    monkeypatch.setenv("BAPO_TOKEN", driver.stack.token)
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    member = driver.client.recorded_batch(1).members[0]
    quoting = []
    for arguments in (
        ["prompts"],
        ["prompts", "--json"],
        ["prompt", member.prompt_uid],
        ["prompt", member.prompt_uid, "--step", "1"],
        ["prompt", f"{HOSTILE} unknown"],
        ["group", str(member.group_id)],
        ["group", str(member.group_id), "--json"],
        ["batches", "--step", "1"],
        ["buffer", "hard", "--events"],
        ["resume"],
        ["metrics", f"--{HOSTILE}"],
    ):
        command, *rest = arguments
        with suppress(SystemExit):
            cli.main([command, driver.config.name, *rest])
        out, err = capsys.readouterr()
        assert_harmless(out + err)
        if "1b]52" in out + err:
            quoting.append(command)
    assert set(quoting) >= {"prompts", "prompt", "group", "batches", "metrics"}


def test_names_of_files_do_not_reach_the_terminal_raw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"{HOSTILE.replace('/', '')}.yaml"
    path.write_text("name: [")
    with pytest.raises(SystemExit):
        cli.main(["config", "check", str(path)])
    error = capsys.readouterr().err
    assert "\\x1b]52" in error
    assert_harmless(error)


def test_errors_of_replicas_do_not_reach_the_terminal_raw() -> None:
    replica = wire.ReplicaView(
        name="evil",
        url="http://127.0.0.1:1",
        state="failing",
        detail=HOSTILE,
        loaded_version=0,
        last_seen=datetime.now(UTC),
        silent_s=0.0,
    )
    for terminal in (False, True):
        file = io.StringIO()
        console = plain_console(file=file, force_terminal=terminal, width=200)
        display = RunDisplay(console, "run", 10, 0)
        display.update([], [], [replica])
        console.print(display._render())
        assert "\\x1b]52" in file.getvalue()
        assert_harmless(file.getvalue())


def test_warnings_of_libraries_do_not_reach_the_terminal_raw(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cli.main(["config", "show"])
    capsys.readouterr()
    handler = logging.StreamHandler(file := io.StringIO())
    logger = logging.getLogger("a.library")
    logger.addHandler(handler)
    logger.warning("a model of type `%s`", HOSTILE)
    logger.removeHandler(handler)
    assert "\\x1b]52" in file.getvalue()
    assert_harmless(file.getvalue())


@pytest.mark.parametrize("name", ["\x1b]0;admin\x07", "\x9b2J", "two\nlines", "\x7f"])
def test_tokens_have_printable_names(name: str, stack: Endpoints) -> None:
    response = httpx.post(
        f"{stack.buffer_url}/v1/tokens",
        json={"name": name, "scope": "read"},
        headers={"Authorization": f"Bearer {stack.token}"},
    )
    assert response.status_code == 422
