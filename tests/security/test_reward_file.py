"""An attacker who may start runs, and whose reward file is whatever they wrote."""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bapo_core.config import config_from
from bapo_core.errors import TaskError
from bapo_core.selection import check_selection
from bapo_core.tasks import get_task
from services.buffer.api.client import BufferClient
from services.cli.reward_files import pin_reward, store_reward
from services.datasets import DataSources, prepare_run
from services.model.resolve import TINY_MODEL
from services.stack.stack import Endpoints
from tests.security.conftest import MakeToken
from tests.security.test_task_plug_in import SECRETS, TOKEN, require_confinement, serving

Attack = Callable[[str], str]
"""Imports code as a reward file; returns the text of its global `found`, or what ended it."""
REWARD = """
def score(completions, **columns):
    raise ValueError(found)
"""


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="bapo-reward-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def attack(directory: Path) -> Iterator[Attack]:
    require_confinement()
    home = directory / "home"
    home.mkdir()
    (home / "token").write_text(TOKEN)
    with serving(directory, {**SECRETS, "BAPO_HOME": str(home)}) as client:

        def run(code: str) -> str:
            request: dict[str, Any] = {
                "task": "function",
                "options": {"reward": "rewards.py:score", "source": f"{code}\n{REWARD}"},
                "items": [{"payload": {"prompt": "a", "columns": {}}, "responses": ["b"]}],
            }
            answer = client.post("/v1/verify", json=request)
            if answer.is_success:
                return str(answer.json()["verdicts"][0][0]["detail"])
            return str(answer.json()["detail"])

        yield run


def test_a_reward_file_sees_no_secret_among_its_variables(attack: Attack) -> None:
    variables = attack("import os; found = sorted(os.environ.items())")
    assert "PATH" in variables
    assert "secret" not in variables


def test_a_reward_file_opens_no_socket(attack: Attack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        found = attack(f"import socket; found = socket.create_connection({address!r})")
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert "rewards.py raised PermissionError" in found


def test_a_reward_file_reads_and_writes_no_file_of_others(attack: Attack, directory: Path) -> None:
    for path in (directory / "home" / "token", Path("/etc/shadow"), Path(tempfile.gettempdir())):
        assert "Permission denied" in attack(f"found = open({str(path)!r}).read()"), path
    for path in (directory / "home" / "written", Path("/dev/shm/written")):
        assert "Permission denied" in attack(f"found = open({str(path)!r}, 'w')"), path
        assert not path.exists()
    environment = "import os; found = open(f'/proc/{os.getppid()}/environ').read()"
    assert "Permission denied" in attack(environment)


def test_no_process_but_a_worker_runs_a_reward_file(
    directory: Path,
    tmp_path: Path,
    stack: Endpoints,
    make_token: MakeToken,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks, stores and prepares a run with a file that would leave a mark wherever it runs."""
    monkeypatch.chdir(tmp_path)
    mark = tmp_path / "mark"
    source = f"open({str(mark)!r}, 'w').close()\ndef score(completions, **columns): return [1.0]"
    (tmp_path / "rewards.py").write_text(source)
    rows = [{"prompt": f"{n}+1="} for n in range(8)]
    for name, part in (("train", rows[:4]), ("test", rows[4:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    config = config_from(
        {
            "name": "marked",
            "task": {
                "reward": "rewards.py:score",
                "train_path": "train.jsonl",
                "test_path": "test.jsonl",
            },
            "rollout": {"prompts_per_step": 4, "group_size": 2},
            "optimizer": {"minibatch_prompts": 2},
        }
    )
    client = BufferClient(stack.buffer_url, make_token("run"), run="marked")
    config = pin_reward(config)
    store_reward(config, client)
    check_selection(config)
    client.create_run(prepare_run(config, TINY_MODEL, DataSources(), client, show=lambda _: None))
    task = get_task("function", **config.task.arguments)
    with pytest.raises(TaskError, match="run in the verifier only"):
        task.verify({"prompt": "a", "columns": {}}, "b")
    client.delete_run()
    assert not mark.exists()


def test_a_token_of_a_run_replaces_no_file(stack: Endpoints, make_token: MakeToken) -> None:
    client = BufferClient(stack.buffer_url, make_token("run"))
    digest = client.upload_reward_file("def score(completions): return [1.0]")
    with pytest.raises(Exception, match="send it whole"):
        client._send("PUT", f"/v1/reward-files/{digest}", json={"text": "def score(): ..."})
    assert client.reward_file(digest) == "def score(completions): return [1.0]"
    bound = BufferClient(stack.buffer_url, make_token("run", run="mine"))
    with pytest.raises(Exception, match="for run 'mine' alone"):
        bound.upload_reward_file("def score(completions): return [2.0]")
