"""Fixtures: a verifier on a real port, and a plug-in task that misbehaves on demand."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from services.verifier.app import create_app
from services.verifier.settings import VerifierSettings

TOKEN = "a-token-of-the-verifier"

ODD_TASK = '''
import os, signal, sys, time
from bapo_core.errors import PayloadError
from bapo_core.tasks import Verdict, VerdictStatus


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError(chr(0xD800))


class OddTask:
    """Does what the response says."""

    name = "odd"

    def __init__(self, reward=1.0):
        if not isinstance(reward, float):
            raise ValueError(f"reward is {reward!r}; make it a number")
        self.reward = reward

    def uid(self, payload):
        return str(payload["n"])

    def render(self, payload):
        return [{"role": "user", "content": str(payload["n"])}]

    columns = ("n",)

    def parse_row(self, row):
        return {"n": row["n"]}

    def verify(self, payload, response):
        if response == "hang":
            time.sleep(3600)
        elif response == "slow":
            time.sleep(2)
        elif response == "spin":
            10 ** 10 ** 9  # holds the interpreter, in C
        elif response == "exit":
            os._exit(0)
        elif response == "sys.exit":
            sys.exit(3)
        elif response == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif response == "raise":
            raise KeyError("nums")
        elif response == "memory":
            hoard = [bytes(1 << 20) for _ in range(100_000)]
        elif response == "half":
            return Verdict(0.5, VerdictStatus.WRONG_VALUE, parts={"format": 1.0, "length": -2.5})
        elif response == "nan":
            return Verdict(float("nan"), VerdictStatus.OK)
        elif response == "infinite part":
            return Verdict(1.0, VerdictStatus.OK, parts={"format": float("inf")})
        elif response == "named part":
            return Verdict(1.0, VerdictStatus.OK, parts={"The Format": 1.0})
        elif response == "parts":
            return Verdict(1.0, VerdictStatus.OK, parts={"p" * n: 1.0 for n in range(1, 30)})
        elif response == "status":
            return Verdict(0.0, "Not A Status")
        elif response == "secret":
            return Verdict(1.0, "ok", str([name for name in os.environ if "BAPO" in name]))
        elif response == "pid":
            return Verdict(1.0, "ok", str(os.getpid()))
        elif response == "long":
            return Verdict(1.0, "ok", "x" * 100_000)
        elif response == "own":
            return Verdict(0.0, "not_funny", "own")
        elif response == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif response == "surrogate answer":
            return Verdict(1.0, VerdictStatus.OK, chr(0xD800) + chr(0))
        elif response == "surrogate detail":
            raise ValueError(chr(0xD800) + chr(0))
        elif response == "message that raises":
            raise Unprintable
        elif response == "answer that raises":
            return Verdict(1.0, VerdictStatus.OK, Unprintable())
        elif response == "reserved status":
            return Verdict(1.0, "verifier_lost")
        elif response == "surrogate status":
            return Verdict(1.0, chr(0xD800))
        elif response == "surrogate part":
            return Verdict(1.0, VerdictStatus.OK, parts={chr(0xD800): 1.0})
        elif response == "huge reward":
            return Verdict(10**400, VerdictStatus.OK)
        elif response == "reward beyond float32":
            return Verdict(1e300, VerdictStatus.OK)
        elif response == "part beyond float32":
            return Verdict(1.0, VerdictStatus.OK, parts={"length": -1e39})
        elif response == "text reward":
            return Verdict(chr(0xD800), VerdictStatus.OK)
        elif response == "no verdict":
            return chr(0xD800)
        elif response == "parts that raise":
            return Verdict(1.0, VerdictStatus.OK, parts=Unprintable())
        elif response == "recursion":
            return self.verify(payload, response)
        elif response == "closed socket":
            # Its number may be any: it is the one in the process of the tests.
            os.closerange(3, 1 << 16)
        return Verdict(self.reward, VerdictStatus.OK, f"{payload['n']}")


class LoadingTask(OddTask):
    """Loads payloads, which takes as long as they say."""

    name = "loading"

    def load(self, payload):
        time.sleep(payload["load_s"])
        if payload["n"] < 0:
            raise PayloadError(f"n is {payload['n']}; make it positive" + payload.get("more", ""))


class HeavyTask(OddTask):
    name = "heavy"

    def warm_up(self):
        bytearray(300 << 20)


class RefusingTask(OddTask):
    name = "refusing"

    def __init__(self):
        raise ValueError(chr(0xD800) + " is no text")


class Lacking:
    name = "lacking"
'''


@pytest.fixture
def odd_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a distribution, as pip installs it, on the path of this process and of the workers."""
    (tmp_path / "odd_task.py").write_text(ODD_TASK)
    info = tmp_path / "odd_task-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-task\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[bapo.tasks]\nodd = odd_task:OddTask\nloading = odd_task:LoadingTask\n"
        "heavy = odd_task:HeavyTask\nrefusing = odd_task:RefusingTask\n"
        "lacking = odd_task:Lacking\ngone = no_such_module:Task\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@contextmanager
def serving(settings: VerifierSettings) -> Iterator[tuple[FastAPI, httpx.Client]]:
    """Runs a verifier on a free port; yields its app and a client."""
    app = create_app(TOKEN, settings)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        headers = {"Authorization": f"Bearer {TOKEN}"}
        try:
            with httpx.Client(
                base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=300
            ) as client:
                wait_until(lambda: _ready(client))
                yield app, client
        finally:
            server.should_exit = True
            thread.join()


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").is_success
    except httpx.TransportError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    """Waits until the condition holds; fails the test if it does not in time."""
    pause = threading.Event()
    for _ in range(int(seconds * 50)):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError(f"the condition did not hold within {seconds} s")
