"""Exit codes say whether a restart helps; child processes are stopped and explained."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from torch.distributed.run import config_from_args, parse_args

from bapo_core.errors import BapoError, ConfigError, TaskError
from bapo_core.tasks import get_task
from services.common.errors import ServiceCallError, ServiceError, ServiceUnavailable
from services.common.objectstore import ObjectStoreError, ObjectStoreUnavailable
from services.common.process import (
    EXIT_RETRYABLE,
    ChildProcess,
    describe_exit,
    last_error,
    python_command,
    run_until_error,
)
from services.stack.supervisor import Supervisor
from services.trainer.launch import name_host
from services.trainer.update import NonFiniteLoss

ROOT = Path(__file__).parents[3]
IP_LOCAL_PORT_RANGE = 51
"""Linux's option (6.3 and newer) for the ports that the kernel may choose for a socket."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BapoError("wrong configuration"), 1),
        (ConfigError("config: seed: input should be a valid integer"), 1),
        (TaskError("no task 'countup'; known tasks: countdown, geometry, math"), 1),
        (ServiceError(400, "refused"), 1),
        (ObjectStoreError("damaged"), 1),
        (ObjectStoreUnavailable("away"), EXIT_RETRYABLE),
        (ServiceUnavailable("away"), EXIT_RETRYABLE),
        (NonFiniteLoss("nan"), EXIT_RETRYABLE),
        (RuntimeError("connection closed by peer"), EXIT_RETRYABLE),
    ],
)
def test_exit_codes(error: Exception, code: int) -> None:
    def work() -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        run_until_error(work)
    assert caught.value.code == code


def test_a_process_that_meets_an_unknown_task_is_not_restarted() -> None:
    with pytest.raises(SystemExit) as caught:
        run_until_error(lambda: get_task("countup") and None)
    assert caught.value.code == 1


def test_the_launcher_ends_as_the_first_process_that_failed() -> None:
    """A trainer without its settings exits with 1, because no restart helps."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "services.trainer.launch", "--standalone"),
            *("--nproc-per-node", "1"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": "/tmp"},
    )
    assert done.returncode == 1, done.stderr
    assert "BAPO_SCRATCH is not set" in done.stdout + done.stderr


@pytest.mark.parametrize("endpoint", ["reachable", "nowhere"])
def test_workers_that_do_not_find_each_other_are_started_again(
    endpoint: str, reserved_port: int
) -> None:
    """The rendezvous fails when a node is missing, or when the node that hosts it was evicted."""
    port = reserved_port if endpoint == "reachable" else 1
    done = subprocess.run(
        [sys.executable, "-m", "services.trainer.launch", "--nproc-per-node", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": "/tmp",
            "PET_NNODES": "2:2",
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ID": "job",
            "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
            "PET_RDZV_CONF": f"join_timeout=2,read_timeout=2,is_host={endpoint == 'reachable'}",
        },
    )
    assert done.returncode == EXIT_RETRYABLE, done.stderr
    assert "the workers do not find each other" in done.stderr


@pytest.mark.parametrize("node", ["job-node-0-0", "job-node-0-1"])
def test_a_node_knows_itself_before_its_name_can_be_resolved(
    node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise all nodes would wait ten minutes for a host."""
    monkeypatch.setattr(socket, "gethostname", lambda: node)
    endpoint, conf = "job-node-0-0.job:29500", "join_timeout=2,read_timeout=2"
    options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-conf", conf]
    arguments = parse_args([*options, "-m", "some.module"])  # type: ignore[no-untyped-call]
    name_host(arguments)
    config, _, _ = config_from_args(arguments)  # type: ignore[no-untyped-call]
    expected = "true" if node == "job-node-0-0" else None
    assert config.rdzv_configs.get("is_host") == expected
    assert config.rdzv_configs["read_timeout"] == "2"


def test_every_failed_call_to_a_service_has_one_parent() -> None:
    assert issubclass(ServiceUnavailable, ServiceCallError)
    assert issubclass(ServiceError, ServiceCallError)


# ---- child processes ----------------------------------------------------------------------------


def child(program: str, log: Path, **options: object) -> ChildProcess:
    command = [sys.executable, "-u", "-c", textwrap.dedent(program)]
    return ChildProcess(command, log=log, **options)  # type: ignore[arg-type]


def wait_for_line(log: Path, line: str) -> None:
    deadline = time.monotonic() + 30
    while line not in log.read_text():
        assert time.monotonic() < deadline, f"{line!r} is not in {log.read_text()!r}"
        time.sleep(0.01)


def test_a_child_stops_by_its_signal(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = """
        import signal, sys, time
        signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
        print("ready")
        time.sleep(60)
    """
    process = child(program, log, stop_signal=signal.SIGINT)
    assert process.exit_code is None
    wait_for_line(log, "ready")
    process.stop()
    assert process.exit_code == 7
    process.stop()  # a second time changes nothing


def test_a_child_that_ignores_its_signal_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready")
        time.sleep(60)
    """
    process = child(program, log)
    wait_for_line(log, "ready")
    process.stop(within_s=0.1)
    assert process.exit_code == -signal.SIGKILL
    assert describe_exit(-signal.SIGKILL) == "was killed by SIGKILL"


def test_a_child_of_a_killed_parent_gets_the_signal_that_stops_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child_program = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("child", os.getpid(), flush=True)
        time.sleep(60)
    """
    parent_program = f"""
        import signal, sys
        from services.common.process import ChildProcess
        program = {textwrap.dedent(child_program)!r}
        ChildProcess([sys.executable, "-c", program], stop_signal=signal.SIGKILL).wait()
    """
    parent = child(parent_program, log)
    wait_for_line(log, "child")
    pid = int(log.read_text().split()[1])
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_for_end(pid)


def test_killing_the_group_kills_grandchildren(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = """
        import subprocess, sys
        grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print("grandchild", grandchild.pid, flush=True)
        grandchild.wait()
    """
    process = child(program, log)
    wait_for_line(log, "grandchild")
    pid = int(log.read_text().split()[1])
    process.kill_group()
    assert process.exit_code == -signal.SIGKILL
    wait_for_end(pid)


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 30
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still running"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie that waits for its new parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_last_error_of_a_structured_log_is_found(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = """
        from services.common.logs import configure_logs
        import logging
        configure_logs("trainer")
        logging.getLogger("x").error("first")
        logging.getLogger("x").error("out of memory: lower optimizer.microbatch_tokens")
        logging.getLogger("x").info("stopping")
        print("Aborted")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    process = ChildProcess(command, log=log, environment={"PYTHONPATH": str(ROOT)})
    assert process.wait(60) == 0
    expected = f"out of memory: lower optimizer.microbatch_tokens (log: {log})"
    assert process.last_error() == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Traceback\nValueError: wrong\n", "ValueError: wrong"),
        ('{"level": "info", "message": "started"}\n[1, 2]\nkilled\n', "killed"),
        ("", "it wrote nothing"),
        (None, "it wrote nothing"),
    ],
)
def test_the_last_line_of_a_plain_log_stands_for_its_error(
    text: str | None, message: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    if text is not None:
        log.write_text(text)
    assert last_error(log) == f"{message} (log: {log})"


def test_a_log_is_replaced_or_continued(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for text, append in (("one", False), ("two", True), ("three", False), ("four", True)):
        child(f"print({text!r})", log, append_log=append).wait(60)
    assert log.read_text() == "three\nfour\n"


def test_a_package_in_the_working_directory_does_not_shadow_ours(tmp_path: Path) -> None:
    """The migration starts as usual and asks for its setting."""
    package = tmp_path / "services"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the wrong package')")
    log = tmp_path / "log"
    process = ChildProcess(
        python_command("services.buffer.migrate"),
        environment={"PYTHONPATH": str(ROOT)},
        log=log,
        working_directory=tmp_path,
    )
    assert process.wait(120) == 1
    assert "BAPO_DATABASE_URL is not set" in process.last_error()
    assert "the wrong package" not in log.read_text()


def test_orphans_are_reaped_and_children_are_left_to_their_owners(tmp_path: Path) -> None:
    """The program inherits orphans, as the first process of a container does."""
    log = tmp_path / "log"
    program = """
        import ctypes, os, subprocess, sys, time
        from services.common.process import reap_orphans

        PR_SET_CHILD_SUBREAPER = 36
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        reap_orphans()
        child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
        # Not a Popen, which waits for its process if that ends first.
        leave = "import os; print(os.posix_spawnp('sleep', ['sleep', '0'], os.environ))"
        orphan = int(subprocess.check_output([sys.executable, "-c", leave]))
        while f"{orphan} (sleep) Z {os.getpid()} " not in open(f"/proc/{orphan}/stat").read():
            time.sleep(0.01)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        while os.path.exists(f"/proc/{orphan}"):
            reap_orphans(child.pid)
            child.poll()
        print(child.wait())
    """
    done = child(program, log)
    assert done.wait(60) == 0, log.read_text()
    assert log.read_text() == "3\n"


def test_the_log_of_an_earlier_child_is_kept(tmp_path: Path) -> None:
    """It tells why a run ended that was then resumed, even if its process still writes."""
    for word in ("first", "second"):
        with Supervisor(tmp_path) as supervisor:
            supervisor.start("child", ["echo", word])
            while not supervisor.finished("child"):
                time.sleep(0.01)
    assert (tmp_path / "child.log").read_text() == "second\n"
    assert (tmp_path / "child.previous.log").read_text() == "first\n"


# ---- ports --------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "0.0.0.0"])
def test_the_kernel_gives_a_reserved_port_only_to_those_who_name_it(
    reserved_port: int, address: str
) -> None:
    """A port that was merely free a moment ago went to some client before SeaweedFS listened.

    One of 127.0.0.1 alone went to Gloo, on the host's address, before PyTorch's store listened on
    all addresses.
    """
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        for connects in (False, True):
            for reuses in (False, True):
                with socket.socket() as other:
                    only = reserved_port | reserved_port << 16
                    other.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", only))
                    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses)
                    call, target = (
                        (other.connect, server.getsockname())
                        if connects
                        else (other.bind, (address, 0))
                    )
                    with pytest.raises(OSError, match=r"in use|Cannot assign"):
                        call(target)
    with socket.socket() as named:
        named.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        named.bind((address, reserved_port))
        named.listen()
        with socket.create_connection((address, reserved_port)):
            pass


STOPPED_ANYWHERE = """
import inspect, os, signal, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from services.common.http import HttpClient
from services.common.process import stop_on_signals

class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
threading.Thread(target=server.serve_forever, daemon=True).start()

def is_of_httpcore(frame):
    # A generator that is closed goes on without handling signals.
    is_generator = frame.f_code.co_flags & inspect.CO_GENERATOR
    return frame.f_globals.get("__name__", "").startswith("httpcore.") and not is_generator

start, kill, late = threading.Thread.start, os.kill, []

def start_interrupted(thread):
    # The next signal arrives while the handler of the first one postpones it.
    signal.raise_signal(signal.SIGTERM)
    start(thread)

def kill_late(*arguments):
    # Python does not see the first signal that is sent again before the main thread blocks.
    if late:
        kill(*arguments)
    late.append(True)

def call_and_stop_at(place):
    # Calls the service. The signal arrives at this one of the places where Python handles signals:
    # when a function of httpcore begins, and when a function in C that it has called has returned.
    client = HttpClient("service", f"http://127.0.0.1:{server.server_port}", "token")
    places = 0
    def profiler(frame, event, _):
        nonlocal places
        if event in ("call", "c_return") and is_of_httpcore(frame):
            places += 1
            if places == place:
                sys.setprofile(None)
                signal.getsignal(signal.SIGTERM)(signal.SIGTERM, frame)
    stop_on_signals()
    threading.Thread.start, os.kill = start_interrupted, kill_late
    sys.setprofile(profiler)
    client.call("GET", "/")
    sys.setprofile(None)
    if places < place:
        os._exit(0)
    time.sleep(60)  # a signal that was postponed ends this

hung, place, code = [], 0, None
while code != 0 and len(hung) < 3:
    place += 1
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            call_and_stop_at(place)
        except SystemExit as stopped:
            os._exit(stopped.code)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, 128 + signal.SIGTERM):
        hung.append((place, code))
print(place, hung)
"""


def test_a_signal_at_any_place_of_a_request_ends_the_process() -> None:
    """An exception between taking httpcore's lock and releasing it made the request wait for it."""
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_ANYWHERE],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    places, hung = done.stdout.split(maxsplit=1)
    assert int(places) > 50
    assert hung.strip() == "[]"
