"""What another user of the machine can reach of a local stack: all its ports, but no file."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pwd
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from unittest.mock import MagicMock

import httpx
import psutil
import psycopg
import pytest

from bapo_core.errors import BapoError
from services.cli import main as cli
from services.common.objectstore import ObjectStore
from services.rollout.vllm import worker
from services.rollout.vllm.server import VllmOptions, VllmServer
from services.stack import postgres, s3
from services.stack.stack import Endpoints, find_stack, running_stack, stack_up
from services.stack.supervisor import Supervisor, bind_port
from tests.security.neighbour import answers_beyond_loopback, as_other_user, other_user

SECRET = b"weights of alice"


# ---- the object store ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ports(stack: Endpoints) -> dict[str, int]:
    """Returns the ports of the stack's object store, by the name of their option."""
    endpoint = stack.s3_endpoint.rpartition(":")[2]
    for process in psutil.Process().children():
        if process.status() == psutil.STATUS_ZOMBIE:
            continue  # Another test's process, which nobody has waited for yet.
        arguments = dict(
            argument.removeprefix("-").split("=", 1)
            for argument in process.cmdline()
            if "=" in argument
        )
        if arguments.get("s3.port") == endpoint:
            return {
                name: int(value)
                for name, value in arguments.items()
                if ".port" in f".{name}" and value.isdecimal() and value != "0"
            }
    raise AssertionError("the object store does not run")


@pytest.fixture(scope="module")
def secret(stack: Endpoints) -> Iterator[str]:
    """Stores an object of the user, and checks at the end that nobody has changed it."""
    store = ObjectStore(stack.object_store)
    store.put("runs/secret/weights", SECRET)
    yield "runs/secret/weights"
    assert store.get("runs/secret/weights", sha256(SECRET).hexdigest()) == SECRET


def ask(method: str, url: str, **headers: str) -> tuple[int, str]:
    """Returns status and text of an answer to another user; 0 where none comes."""

    def work() -> tuple[int, str]:
        content = b"forged" if method in ("POST", "PUT") else None
        try:
            answer = httpx.request(
                method, url, content=content, headers=headers, timeout=10, trust_env=False
            )
        except httpx.HTTPError:
            return 0, ""
        return answer.status_code, answer.text

    status, text = as_other_user(work)
    return status, text


@pytest.mark.parametrize(
    "path",
    [
        "dir/lookup?fileId=2,03254e53d3&read=yes",
        "dir/lookup?volumeId=2",
        "dir/assign?count=1&collection=bapo",
        "dir/status",
        "vol/grow?count=4&collection=bapo",
        "vol/vacuum?garbageThreshold=0",
        "vol/status",
        "col/delete?collection=bapo",
        "submit",
        "cluster/raft/stats",
        "2,03254e53d3",
        "stats/health",
        "debug/pprof/heap",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_master_answers_no_request_of_another_user(
    ports: dict[str, int], secret: str, method: str, path: str
) -> None:
    status, text = ask(method, f"http://127.0.0.1:{ports['master.port']}/{path}")
    assert status in (0, 404, 405)
    assert "bapo" not in text


@pytest.mark.parametrize("port", ["filer.port", "volume.port", "s3.port"])
@pytest.mark.parametrize("method", ["GET", "PUT", "POST", "DELETE"])
@pytest.mark.parametrize("path", ["buckets/bapo/runs/secret/weights", "bapo/runs/secret/weights"])
def test_objects_are_for_the_stack_alone(
    ports: dict[str, int], secret: str, method: str, port: str, path: str
) -> None:
    status, text = ask(method, f"http://127.0.0.1:{ports[port]}/{path}")
    assert status in (400, 401, 403, 404, 405)
    assert SECRET.decode() not in text


def test_the_files_of_the_object_store_are_for_the_stack_alone(home: Path, secret: str) -> None:
    assert as_other_user(lambda: not os.access(home / "s3", os.R_OK | os.X_OK)) or os.geteuid()
    assert (home / "s3").stat().st_mode & 0o077 == 0


LIST = "volume.list\nfs.ls /buckets/bapo/runs/secret\n"


def test_the_tools_of_the_object_store_get_nothing_without_its_certificate(
    stack: Endpoints, home: Path, ports: dict[str, int], secret: str
) -> None:
    directory = home / "s3"
    certificate = {
        "WEED_GRPC_CA": str(directory / "grpc.crt"),
        "WEED_GRPC_CLIENT_CERT": str(directory / "grpc.crt"),
        "WEED_GRPC_CLIENT_KEY": str(directory / "grpc.key"),
    }
    arguments = [
        "shell",
        f"-master=127.0.0.1:{ports['master.port']}.{ports['master.port.grpc']}",
        f"-filer=127.0.0.1:{ports['filer.port']}.{ports['filer.port.grpc']}",
    ]
    ours = run_weed(arguments, LIST, certificate)
    assert "weights" in ours
    assert "Topology" in ours
    theirs = run_weed(arguments, f"{LIST}fs.rm /buckets/bapo/runs/secret/weights\n", None)
    assert "weights" not in theirs
    assert "Topology" not in theirs


def run_weed(arguments: Sequence[str], commands: str, certificate: dict[str, str] | None) -> str:
    """Runs the object store's program, as another user if there is no certificate.

    Returns what it writes within a few seconds: without a certificate it tries for ever.
    """
    with open(s3.find_weed(), "rb") as program:
        process = subprocess.Popen(
            ["weed", *arguments],
            # The other user may not be able to enter the program's directory.
            executable=f"/proc/self/fd/{program.fileno()}",
            pass_fds=[program.fileno()],
            cwd="/",
            env={**os.environ, **(certificate or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **({} if certificate else other_user()),
        )
    try:
        output, _ = process.communicate(commands, timeout=60 if certificate else 3)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    return output


def test_an_object_store_says_nothing_to_sockets_that_another_user_has_put_into_tmp(
    tmp_path: Path,
) -> None:
    """SeaweedFS connects to sockets of predictable names before it connects to its own ports."""
    directory = tmp_path / "s3"
    heard: list[bytes] = []
    with Supervisor(tmp_path / "logs") as supervisor, ExitStack() as squatters:
        ports = supervisor.reserve_ports(s3.PORTS)
        paths = [
            s3.SOCKETS / f"seaweedfs-{part}-grpc-{port}.sock"
            for part, port in zip(("master", "volume", "filer", "s3"), ports[1::2], strict=True)
        ]
        squatters.enter_context(squatting(paths, heard))
        settings = s3.start_s3(supervisor, directory, ports)
        store = ObjectStore(settings, retries=0)
        # It cannot start, or it starts by TCP: either way it tells the squatter nothing.
        done = threading.Event()
        for _ in range(30):
            with suppress(Exception):
                store.ensure_bucket()
                store.put("secret", SECRET)
                break
            done.wait(0.1)
    assert all(first[:1] == b"\x16" for first in heard), "not a TLS handshake"
    assert not any(b"/" in first and b"HTTP" in first for first in heard)


@contextmanager
def squatting(paths: Sequence[Path], heard: list[bytes]) -> Iterator[None]:
    """Listens on Unix sockets as another user would, and records what is sent there first."""
    listeners = []
    for path in paths:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        path.chmod(0o777)
        if not os.geteuid():
            os.chown(path, other_user()["user"], other_user()["group"])
        listener.listen()
        listeners.append(listener)

    def listen(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.settimeout(2)
                    first = connection.recv(4096)
                    if first:
                        heard.append(first)

    threads = [threading.Thread(target=listen, args=(each,), daemon=True) for each in listeners]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for listener in listeners:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for path in paths:
            path.unlink(missing_ok=True)


def test_an_object_store_that_has_ended_leaves_no_socket(tmp_path: Path) -> None:
    def sockets() -> list[str]:
        names = (path.name for path in s3.SOCKETS.glob("seaweedfs-*"))
        return [name for name in names if any(f"-{port}.sock" in name for port in ports)]

    with Supervisor(tmp_path / "logs") as supervisor:
        ports = supervisor.reserve_ports(s3.PORTS)
        s3.await_s3(supervisor, s3.start_s3(supervisor, tmp_path / "s3", ports))
        s3.remove_dead_sockets()
        assert sockets(), "those of servers that run stay"
    s3.remove_dead_sockets()
    assert not sockets()


# ---- vLLM ---------------------------------------------------------------------------------------


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmServer]:
    """Runs the stand-in for vLLM as a replica runs vLLM."""
    for name in ("BAPO_TOKEN", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "a-secret-of-the-replica")
    python = tmp_path / "python"
    fake = Path(__file__).parents[1] / "integration" / "support" / "fake_vllm.py"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {fake} "$@"\n')
    python.chmod(0o755)
    model = tmp_path / "v1"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "marker").write_text("weights")
    server = VllmServer(VllmOptions(str(python), 96, "float32", tmp_path / "vllm.log"), model)

    async def start() -> None:
        await server.wait_ready()

    with asyncio.Runner() as runner:
        runner.run(start())
        yield server
        runner.run(server.stop())


def test_vllm_is_reached_by_its_user_alone(vllm: VllmServer) -> None:
    """Its routes have no authentication, and replace the policy's weights."""
    process = psutil.Process(vllm.pid)
    words = process.cmdline()
    sockets = Path(words[words.index("--uds") + 1])
    assert not process.net_connections("inet"), "it listens on no port, which a page could reach"
    assert sockets.parent.stat().st_mode & 0o077 == 0

    def connect() -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(sockets))
            except PermissionError:
                return False
        return True

    assert connect(), "its own user reaches it"
    assert as_other_user(connect) is bool(os.geteuid())


@pytest.mark.parametrize(
    ("code", "answers"),
    [
        ("from http.server import *; s = HTTPServer(('0.0.0.0', 0), BaseHTTPRequestHandler)", 1),
        (
            "from http.server import *; s = HTTPServer(('127.0.0.1', 0), BaseHTTPRequestHandler)",
            0,
        ),
        ("from torch.distributed import TCPStore; s = TCPStore('127.0.0.1', 0, is_master=True)", 0),
    ],
    ids=["all addresses", "loopback", "PyTorch's store"],
)
def test_what_answers_beyond_loopback_is_found(code: str, answers: int) -> None:
    """The contract with the real vLLM (tests/integration/rollout/test_vllm.py) relies on it."""
    serve = f"{code}; print(flush=True); getattr(s, 'serve_forever', input)()"
    server = subprocess.Popen(
        [sys.executable, "-c", serve], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        server.stdout.readline()
        found = answers_beyond_loopback(psutil.Process(server.pid))
    finally:
        server.kill()
        server.communicate()
    assert len(found) == answers
    assert all(answer.startswith(b"HTTP/") for answer in found.values())


def test_vllm_holds_no_secret_of_its_replica(vllm: VllmServer) -> None:
    variables = psutil.Process(vllm.pid).environ()
    assert "a-secret-of-the-replica" not in variables.values()
    assert "PATH" in variables


@pytest.mark.parametrize(
    "path", ["/tmp/mallory", "../mallory", "versions/../../mallory", "link", "", ".", "/"]
)
def test_vllm_loads_no_weights_that_the_replica_has_not_fetched(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "scratch"
    (root / "v2").mkdir(parents=True)
    (root / "link").symlink_to(tmp_path)
    monkeypatch.setenv(worker.WEIGHTS_ROOT, str(root))
    loaded: list[str] = []

    class Worker(worker.LoadsPolicies):
        model_runner = MagicMock()

        def reload_weights(self, weights_path: str) -> None:
            loaded.append(weights_path)

    with pytest.raises(ValueError, match="is not below"):
        Worker().load_policy(path)
    assert not loaded
    for inside in ("v2", str(root / "v2")):
        Worker().load_policy(inside)
    assert loaded == [str((root / "v2").resolve())] * 2


# ---- addresses, tokens and the home ------------------------------------------------------------


@pytest.fixture
def stranger() -> Iterator[tuple[str, list[bytes]]]:
    """Yields the address of a server of another user, and what it has been sent."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        heard.append(connection.recv(4096))
                        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

        threading.Thread(target=listen, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", heard
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("lock", ["missing", "free", "of another process"])
def test_after_a_crash_nobody_who_listens_on_the_old_port_gets_the_token(
    lock: str,
    stack: Endpoints,
    stranger: tuple[str, list[bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, heard = stranger
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "stack.json").write_text(json.dumps({**asdict(stack), "buffer_url": url}))
    monkeypatch.setenv("BAPO_HOME", str(home))
    monkeypatch.delenv("BAPO_BUFFER_URL", raising=False)
    with (home / "stack.lock").open("w") as file:
        if lock == "missing":
            (home / "stack.lock").unlink()
        elif lock == "of another process":
            file.write("1")
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX)
        for arguments in (["runs"], ["stop", "a-run"], ["token", "list"]):
            with pytest.raises(SystemExit):
                cli.main(arguments)
            assert "no stack is running" in capsys.readouterr().err
    assert heard == []


@pytest.mark.parametrize("planted", ["owner", "writable", "sticky"])
def test_a_home_that_another_user_may_have_filled_is_refused(planted: str, tmp_path: Path) -> None:
    home = tmp_path / ".bapo"
    home.mkdir(mode=0o700)
    (home / "token").write_text("known to the other user")
    if planted == "owner":
        # Root alone can give a directory away.
        home = Path("/etc") if os.geteuid() else home
        if not os.geteuid():
            os.chown(home, other_user()["user"], other_user()["group"])
        expected = "belongs to another user"
    else:
        home.chmod(0o1777 if planted == "sticky" else 0o770)
        expected = "can be written to by other users"
    for use in (find_stack, stack_up, lambda home: running_stack(home, 0).__enter__()):
        with pytest.raises(BapoError, match=expected):
            use(home)
    assert [path.name for path in (tmp_path / ".bapo").iterdir()] == ["token"]


def test_another_user_cannot_enter_the_home(stack: Endpoints, home: Path) -> None:
    def readable() -> list[str]:
        names = ("", "stack.json", "logs", "s3", "postgres", "models", "scratch", "stack.lock")
        return [name for name in names if os.access(home / name, os.R_OK)]

    assert "stack.json" in readable()
    if not os.geteuid():
        assert as_other_user(readable) == []
    assert home.stat().st_mode & 0o067 == 0


def test_a_home_that_was_open_to_readers_is_closed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o755)
    with find_lock(home):
        pass
    assert home.stat().st_mode & 0o077 == 0o010 & home.stat().st_mode


@contextmanager
def find_lock(home: Path) -> Iterator[None]:
    """Begins to start a stack in a home, which a busy port ends."""
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(BapoError, match=f"port {port} is busy"):
            running_stack(home, port).__enter__()
        yield


def test_a_port_of_a_service_is_taken_before_the_service_runs() -> None:
    with bind_port() as ours:
        port = ours.getsockname()[1]

        def bind() -> bool:
            with socket.socket() as theirs:
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                try:
                    theirs.bind(("127.0.0.1", port))
                    theirs.listen()
                except OSError:
                    return False
            return True

        assert not as_other_user(bind)


def test_what_a_killed_stack_has_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    """A busy port ends the next one before its services start."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    left = Path(tempfile.mkdtemp(prefix="bapo-", dir="/tmp"))
    (left / ".s.PGSQL.5432").touch()
    (home / "sockets").write_text(str(left))
    (home / "stack.json").write_text("{}")
    with find_lock(home):
        assert not left.exists()
        assert sorted(path.name for path in home.iterdir()) == ["logs", "stack.lock"]


def test_postgres_knows_root_alone(stack: Endpoints) -> None:
    """All stacks of root share the user of Postgres, which can enter the socket's directory."""
    directory = stack.database_url.rpartition("host=")[2]

    def connect() -> str:
        try:
            psycopg.connect(host=directory, user="postgres", dbname="postgres").close()
        except psycopg.OperationalError as error:
            return str(error)
        return "connected"

    assert connect() == "connected"
    if not os.geteuid():
        entry = pwd.getpwnam(postgres.USER)
        assert "Peer authentication failed" in as_other_user(connect, entry)
