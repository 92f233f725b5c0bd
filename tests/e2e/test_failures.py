"""Failures from outside end in one line with cause and remedy, and leave no process behind."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from services.buffer.api.client import BufferClient
from services.cli.main import main
from services.common.objectstore import ObjectStore, ObjectStoreError, digest_of
from services.stack.stack import Endpoints, find_or_start_stack, find_stack, running_stack
from tests.conftest import CHANCE, EASY
from tests.e2e.test_run import TIMEOUT_S, configuration

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def own_home() -> Iterator[Path]:
    """Returns a home without a stack."""
    directory = Path(tempfile.mkdtemp(prefix="bapo-own-"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def command(tmp_path: Path, own_home: Path) -> Command:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "services.cli", *arguments],
            cwd=tmp_path,
            env={**os.environ, "BAPO_HOME": str(own_home)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )

    return run


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the one line of a command that has failed."""
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def refused_here(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Returns the one line of a command that fails in this process."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    return line


def test_help_is_instant_and_teaches(command: Command) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = command("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU time does not grow when other processes compete for the cores.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
    assert "bapo run examples/countdown.yaml" in done.stdout


def test_an_unknown_key(command: Command, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("sync: {evry: 3}\n")
    message = refused(command("config", "check", "run.yaml"))
    assert "run.yaml: sync.evry: no such key; did you mean sync.every?" in message


def test_a_model_directory_that_is_not_one(command: Command, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: {path: nowhere}\n")
    message = refused(command("run", "run.yaml", "--port", "0"))
    assert "model.path nowhere is not a model directory" in message


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"numbers": [1, 2]}, "no column nums, target (there are numbers)"),
        ({"nums": [1, 2], "target": 50}, "no expression over [1, 2] equals 50"),
        ({"nums": "1 2", "target": 3}, "make it a list"),
    ],
)
def test_a_dataset_with_a_bad_row(
    tmp_path: Path,
    row: dict[str, object],
    message: str,
    small_model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"nums": [1, 2], "target": 3}) + "\n" + json.dumps(row) + "\n")
    config = configuration("bad-data", small_model)
    config["task"] = {"options": EASY, "train_path": str(data), "test_path": str(data)}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    error = refused_here(capsys, "eval", str(small_model), str(tmp_path / "run.yaml"))
    assert f"{data}, row 2" in error
    assert message in error


def test_a_busy_port(command: Command, own_home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refused(command("stack", "up", "--port", str(port)))
    assert f"port {port} is busy" in message
    assert "--port" in message
    assert processes_of(own_home) == []


def test_stack_up_and_down_leave_nothing(
    command: Command, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as environment:
        # No proxy reaches the services of this machine.
        environment.setenv("HTTP_PROXY", "http://127.0.0.1:1")
        assert command("stack", "up", "--port", "0").returncode == 0
    endpoints = find_stack(own_home)
    assert endpoints is not None
    assert (own_home / "stack.json").stat().st_mode & 0o077 == 0
    assert own_home.stat().st_mode & 0o007 == 0
    with find_or_start_stack(own_home, 0) as used:
        assert used == endpoints
        assert "another command uses the services" in refused(command("stack", "down"))
    assert command("stack", "down").stdout.strip() == "stopped"
    assert processes_of(own_home) == []
    assert find_stack(own_home) is None
    with socket.socket() as free:
        free.bind(("127.0.0.1", int(endpoints.buffer_url.rsplit(":", 1)[1])))


def test_stack_up_is_refused_while_the_services_are_those_of_another_command(
    command: Command, own_home: Path
) -> None:
    """It would print addresses that answer no longer once that command ends."""
    with running_stack(own_home, 0):
        assert "end with it; use them meanwhile" in refused(command("stack", "up"))


def test_a_killed_supervisor_takes_the_stack_with_it(command: Command, own_home: Path) -> None:
    assert command("stack", "up", "--port", "0").returncode == 0
    endpoints = find_stack(own_home)
    assert endpoints is not None
    os.kill(endpoints.pid, signal.SIGKILL)
    wait_until_none_runs(own_home)
    assert command("stack", "up", "--port", "0").returncode == 0
    again = find_stack(own_home)
    assert again is not None
    assert again.token != endpoints.token, "what has read the old one has nothing"
    sockets = Path(endpoints.database_url.rpartition("host=")[2])
    assert not sockets.exists(), "the next stack removes what a killed one leaves in /tmp"
    with find_or_start_stack(own_home, 0):
        assert command("stack", "down", "--force").stdout.strip() == "stopped"


def test_a_stack_of_which_a_process_ends_can_be_started_again(
    command: Command, own_home: Path
) -> None:
    assert command("stack", "up", "--port", "0").returncode == 0
    buffer = buffer_service_of(own_home)
    buffer.kill()
    wait_until_none_runs(own_home)
    assert "buffer was killed by SIGKILL" in (own_home / "logs/stack.log").read_text()
    assert command("stack", "up", "--port", "0").returncode == 0
    assert command("stack", "down").stdout.strip() == "stopped"


def test_a_stack_that_does_not_answer_is_not_taken_for_none(
    command: Command, own_home: Path
) -> None:
    assert command("stack", "up", "--port", "0").returncode == 0
    buffer = buffer_service_of(own_home)
    buffer.suspend()
    try:
        assert "does not answer" in refused(command("stack", "down"))
    finally:
        buffer.resume()
    assert command("stack", "down").stdout.strip() == "stopped"
    assert command("stack", "down").stdout.strip() == "no stack is running"


def test_a_stale_file_of_a_stack_is_told_by_the_lock(
    command: Command, own_home: Path, stack: Endpoints
) -> None:
    assert command("stack", "up", "--port", "0").returncode == 0
    state = own_home / "stack.json"
    stale = json.loads(state.read_text())
    assert command("stack", "down").returncode == 0
    assert find_stack(own_home) is None
    state.write_text(json.dumps(stale | {"buffer_url": stack.buffer_url}))
    assert find_stack(own_home) is None
    state.write_text(json.dumps(stale | {"buffer_url": stack.buffer_url, "token": stack.token}))
    assert find_stack(own_home) is None


def test_a_request_that_can_only_fail_ends_the_run_with_prompts_and_reason(
    environment: dict[str, str], stack: Endpoints, small_model: Path, tmp_path: Path
) -> None:
    """The model has fewer positions than a prompt with its response. It passes the check at the
    start, because its configuration has a key of rotary embeddings, which have no last position."""
    tokenizer = AutoTokenizer.from_pretrained(small_model)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=8,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        rope_theta=10_000,
    )
    model = tmp_path / "model"
    GPT2LMHeadModel(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(configuration("hopeless", model)))
    done = run_on_stack(environment, tmp_path, "run", "run.yaml")
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert re.search(
        r"prompts? 'chance:\d+'.*: the engine failed 3 times in a row: IndexError: index out of "
        r"range in self .*; the model cannot take these prompts",
        message,
    ), message
    lines = (Path(environment["BAPO_HOME"]) / "logs/hopeless/collector.log").read_text()
    times = [datetime.fromisoformat(json.loads(line)["time"]) for line in lines.splitlines()]
    assert times[-1] - times[0] < timedelta(minutes=1)
    client = BufferClient(stack.buffer_url, stack.token, run="hopeless")
    assert client.run_state().status == "failed"


def test_a_negative_reward_ends_a_run_that_divides_by_the_mean_reward(
    environment: dict[str, str], stack: Endpoints, small_model: Path, tmp_path: Path
) -> None:
    sections = configuration("negative", small_model) | {"algorithm": "maxrl", "replay": "off"}
    sections["task"] = CHANCE | {"options": {"wrong": -1.0}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(sections))
    done = run_on_stack(environment, tmp_path, "run", "run.yaml")
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert "collector failed (exit 1): a response got the reward -1, but advantage.esti" in message
    client = BufferClient(stack.buffer_url, stack.token, run="negative")
    assert client.run_state().status == "failed"
    assert not client.steps(), "a step has trained backwards"


def run_on_stack(
    environment: dict[str, str], directory: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command that uses the tests' stack."""
    return subprocess.run(
        [sys.executable, "-m", "services.cli", *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def test_a_lost_buffer_service_ends_the_run_and_loses_nothing(
    command: Command, own_home: Path, tmp_path: Path, small_model: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(configuration("lost", small_model)))
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli", "run", str(path), "--port", "0"],
        cwd=tmp_path,
        env={**os.environ, "BAPO_HOME": str(own_home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    committed = 0
    deadline = time.monotonic() + TIMEOUT_S
    while committed < 4:
        assert process.poll() is None
        assert time.monotonic() < deadline
        endpoints = find_stack(own_home)
        if endpoints is not None:
            client = BufferClient(endpoints.buffer_url, endpoints.token, run="lost")
            committed = {s.name: s.current_step for s in client.runs()}.get("lost", 0)
        time.sleep(0.05)
    buffer = buffer_service_of(own_home)
    buffer.kill()
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert len(errors.strip().splitlines()) == 1
    assert "buffer" in errors
    assert "--resume" in errors
    assert processes_of(own_home) == []
    done = command("run", str(path), "--resume", "--port", "0")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^continuing from the checkpoint of step \d", done.stdout, re.MULTILINE)
    assert json.loads((tmp_path / "runs/lost/summary.json").read_text())["steps"] == 9


def test_a_stack_stays_until_its_last_user_ends(own_home: Path) -> None:
    """The first command starts the stack and ends first; a second uses it; a third follows."""
    up, leave = threading.Event(), threading.Event()
    events: list[str] = []

    def first() -> None:
        with find_or_start_stack(own_home, 0) as endpoints:
            events.append(endpoints.token)
            up.set()
            leave.wait()
        events.append("first is down")

    thread = threading.Thread(target=first)
    thread.start()
    assert up.wait(TIMEOUT_S)
    with find_or_start_stack(own_home, 0) as joined:
        assert joined.token == events[0]
        leave.set()
        thread.join(2)
        assert thread.is_alive(), "the first command waits for the second"
        assert find_stack(own_home) == joined
    with find_or_start_stack(own_home, 0) as third:
        # It either joined the first stack, or waited for its end and started the next.
        assert find_stack(own_home) == third
        answer = httpx.get(f"{third.buffer_url}/readyz", timeout=10)
        assert answer.is_success
    thread.join(TIMEOUT_S)
    assert events == [joined.token, "first is down"]
    assert processes_of(own_home) == []


@pytest.fixture
def small_disk(own_home: Path) -> Iterator[Path]:
    """A home whose object store has 40 MB. Mounting it needs root, or sudo without a password."""
    sudo = [] if os.geteuid() == 0 else ["sudo", "--non-interactive"]
    if sudo and (not shutil.which("sudo") or subprocess.run([*sudo, "true"]).returncode):
        pytest.skip("mounting a small disk needs root, or sudo without a password")
    directory = own_home / "s3"
    directory.mkdir()
    options = f"size=40m,uid={os.geteuid()},gid={os.getegid()}"
    mount = [*sudo, "mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    subprocess.run(mount, check=True)
    yield own_home
    subprocess.run([*sudo, "umount", str(directory)], check=True)


def test_a_full_disk_loses_nothing_that_was_acknowledged(small_disk: Path) -> None:
    with running_stack(small_disk, 0) as endpoints:
        store = ObjectStore(endpoints.object_store, retries=0)
        stored: dict[str, str] = {}

        def fill() -> None:
            for number in range(100):
                key = f"filler/{number}"
                data = os.urandom(1 << 20)
                store.put(key, data)
                stored[key] = digest_of(data)

        with pytest.raises(ObjectStoreError, match="has space"):
            fill()
        assert stored
        for key, digest in stored.items():
            assert store.get(key, digest)


def test_secrets_stay_out_of_logs(stack: Endpoints, home: Path) -> None:
    logs = list((home / "logs").rglob("*.log"))
    assert logs
    for log in logs:
        text = log.read_text(errors="replace")
        assert stack.token not in text, log
        assert stack.s3_secret_key not in text, log


def buffer_service_of(home: Path) -> psutil.Process:
    """Returns the buffer service of this home's stack."""
    (buffer,) = [p for p in processes_of(home) if "services.buffer.main" in p.cmdline()]
    return buffer


def wait_until_none_runs(home: Path) -> None:
    """Returns once no process of this home is running."""
    deadline = time.monotonic() + TIMEOUT_S
    while processes_of(home):
        assert time.monotonic() < deadline, processes_of(home)
        time.sleep(0.1)


def processes_of(home: Path) -> list[psutil.Process]:
    """Returns the running processes that were started for this home."""
    processes = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            belongs = environment.get("BAPO_HOME") == str(home) or str(home) in " ".join(
                process.cmdline()
            )
            if belongs and process.pid != os.getpid() and process.status() != "zombie":
                processes.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return processes
