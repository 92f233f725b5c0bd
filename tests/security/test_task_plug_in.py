"""What a hostile grader, or a response that takes one over, can reach in the real verifier."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from services.stack.stack import Endpoints
from services.stack.supervisor import Supervisor
from services.trainer import launch, loop
from services.trainer.settings import TrainerSettings
from tests.forked import run_forked

PR_GET_DUMPABLE = 3
"""The option of `prctl` that tells whether other processes of the user may read this one."""

SECRETS = {
    "BAPO_S3_SECRET_KEY": "secret-of-the-object-store",
    "BAPO_DATABASE_URL": "postgresql://bapo:secret-of-the-database@db/bapo",
    "HF_TOKEN": "secret-of-the-hub",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-cloud",
    "WANDB_API_KEY": "secret-of-the-logger",
    "PGPASSWORD": "secret-of-postgres",
    "HTTPS_PROXY": "http://user:secret-of-the-proxy@proxy:3128",
    "A_NAME_THAT_SAYS_NOTHING": "secret-of-a-plain-name",
}
TOKEN = "secret-of-the-verifier"

HOSTILE_TASK = '''
from bapo_core.tasks import Verdict


class HostileTask:
    """Runs the response, which leaves what it has found in `found`."""

    name = "hostile"
    columns = ()

    def uid(self, payload):
        return "0"

    def render(self, payload):
        return []

    def parse_row(self, row):
        return row

    def verify(self, payload, response):
        names = {}
        exec(response, names)
        return Verdict(1.0, "ok", str(names["found"]))
'''

Attack = Callable[[str], str]
"""Runs code in a grader; returns the text of `found`, or the exception that ended it."""


def require_confinement() -> None:
    """Skips a test where the kernel cannot do what it is about."""
    code = "from services.verifier.confinement import confine; print(confine())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if done.stdout.strip() != "[]":
        pytest.skip(f"needs a Linux with Landlock and seccomp (lacks {done.stdout.strip()})")


@contextmanager
def serving(directory: Path, environment: dict[str, str]) -> Iterator[httpx.Client]:
    """Runs a verifier with the hostile task, as a service of its own; yields a client."""
    packages = directory / "packages"
    info = packages / "hostile-1.0.dist-info"
    info.mkdir(parents=True)
    (packages / "hostile.py").write_text(HOSTILE_TASK)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[bapo.tasks]\nhostile = hostile:HostileTask\n")
    variables = {
        "BAPO_TOKEN": TOKEN,
        "BAPO_VERIFIER_WORKERS": "1",
        "PYTHONPATH": os.pathsep.join([str(packages), *(path or os.getcwd() for path in sys.path)]),
        **environment,
    }
    with Supervisor(directory / "logs") as supervisor:
        (port,) = supervisor.reserve_ports(1)
        url = f"http://127.0.0.1:{port}"
        supervisor.start_python(
            "verifier", "services.verifier.app", {**variables, "BAPO_PORT": str(port)}
        )
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
            supervisor.wait_until(lambda: is_ready(client), url, seconds=60)
            yield client


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").is_success
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="bapo-hostile-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def attack(directory: Path) -> Iterator[Attack]:
    require_confinement()
    home = directory / "home"
    home.mkdir()
    (home / "token").write_text(TOKEN)
    (directory / "tables").mkdir()
    (directory / "tables" / "table").write_text("a table")
    environment = {
        **SECRETS,
        "BAPO_HOME": str(home),
        "BAPO_VERIFIER_READ": f"/does/not/exist:{directory / 'tables'}",
    }
    with serving(directory, environment) as client:

        def run(code: str) -> str:
            item = {"payload": {}, "responses": [code]}
            answer = client.post("/v1/verify", json={"task": "hostile", "items": [item]})
            verdict = answer.raise_for_status().json()["verdicts"][0][0]
            return str(verdict["extracted"] or verdict["detail"])

        yield run


def test_a_grader_sees_no_secret_among_its_variables(attack: Attack) -> None:
    variables = attack("import os; found = sorted(os.environ.items())")
    assert "PATH" in variables
    assert "secret" not in variables


def start_trainer(program: str, found: Path) -> None:
    """Starts a program of the trainer; writes what the kernel says when its work would begin."""
    libc = ctypes.CDLL(None)

    def record(*_: object) -> None:
        found.write_text(f"dumpable: {libc.prctl(PR_GET_DUMPABLE, 0, 0, 0, 0)}")

    if program == "launcher":
        launch.run = record
        sys.argv = ["launch"]
        launch.main()
    else:
        TrainerSettings.load = record  # type: ignore[assignment, method-assign]
        loop.run_rank(program, lambda *_: None, in_attempt=False)


@pytest.mark.parametrize("program", ["launcher", "trainer", "audit"])
def test_the_trainer_closes_its_memory_to_processes_of_its_user(
    tmp_path: Path, program: str
) -> None:
    """Its environment has a token and the object store's keys, which a grader must not read even
    where the kernel cannot confine it."""
    with suppress(ProcessRaisedException, ProcessExitedException):
        run_forked(start_trainer, program, tmp_path / "found")
    assert (tmp_path / "found").read_text() == "dumpable: 0"


@pytest.mark.parametrize("file", ["environ", "mem", "maps", "fd/0", "cwd/x", "root/etc/passwd"])
def test_a_grader_reads_no_other_process_of_its_user(attack: Attack, file: str) -> None:
    code = f"import os; found = open(f'/proc/{{os.getppid()}}/{file}', 'rb').read(99)"
    assert "Permission denied" in attack(code)


def test_a_grader_reads_no_process_but_its_own(attack: Attack) -> None:
    readable = attack(
        "import os\n"
        "def readable(pid):\n"
        "    try: return bool(open(f'/proc/{pid}/environ', 'rb').read())\n"
        "    except OSError: return False\n"
        "found = [int(pid) == os.getpid() for pid in os.listdir('/proc')\n"
        "         if pid.isdecimal() and readable(pid)]"
    )
    assert readable == "[True]"


@pytest.mark.parametrize(
    "call",
    [
        "ptrace(16, os.getppid(), 0, 0)",
        "process_vm_readv(os.getppid(), None, 0, None, 0, 0)",
        "syscall(438, os.pidfd_open(os.getppid()), 0, 0)",
        "syscall(425, 8, bytes(200))",
        "syscall(0x40000000 + 41, 2, 1, 0)",
    ],
    ids=["ptrace", "process_vm_readv", "pidfd_getfd", "io_uring", "socket of x32"],
)
def test_a_grader_has_no_system_call_to_other_memory_and_sockets(attack: Attack, call: str) -> None:
    number = attack(
        "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True)\n"
        f"found = libc.{call}, os.strerror(ctypes.get_errno())"
    )
    assert number == "(-1, 'Permission denied')"


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_PACKET"])
def test_a_grader_opens_no_socket(attack: Attack, family: str) -> None:
    found = attack(f"import socket; found = socket.socket(socket.{family}, socket.SOCK_RAW)")
    assert "Permission denied" in found


def test_what_a_grader_starts_opens_no_socket_either(attack: Attack, directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        code = f"import socket; socket.create_connection({listener.getsockname()!r})"
        found = attack(
            "import subprocess, sys\n"
            f"done = subprocess.run([sys.executable, '-S', '-c', {code!r}], capture_output=True)\n"
            "found = done.stderr.decode()[-200:]"
        )
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert "Permission denied" in found


def test_a_grader_reads_neither_the_home_of_the_stack_nor_other_files(
    attack: Attack, directory: Path
) -> None:
    for path in (
        directory / "home" / "token",
        directory / "logs" / "verifier.log",
        Path("/etc/shadow"),
        Path("/etc/hostname"),
        Path.home() / ".profile",
        Path("/proc/1/environ"),
        Path(tempfile.gettempdir()),
    ):
        read = f"open({str(path)!r}).read()"
        assert "denied" in attack(f"found = {read}") or not path.exists(), path


def test_hidden_files_of_a_project_on_the_import_path_are_not_readable(
    tmp_path: Path,
) -> None:
    require_confinement()
    for name in (".bapo/token", "state/of/token", "state/module.py", "package/module.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("pass")
    code = (
        "from pathlib import Path; from services.verifier.confinement import confine\n"
        f"root = Path({str(tmp_path)!r}); confine(hidden=str(root / 'state' / 'of'))\n"
        "def readable(name):\n"
        "    try: return bool((root / name).read_text())\n"
        "    except PermissionError: return False\n"
        "import package.module\n"
        "names = ['.bapo/token', 'state/of/token', 'state/module.py', 'package/module.py']\n"
        "print([readable(name) for name in names])"
    )
    paths = os.pathsep.join([str(tmp_path), *(path or os.getcwd() for path in sys.path)])
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "[False, False, True, True]", done.stderr


def test_a_grader_writes_no_file_and_signals_nobody(attack: Attack, directory: Path) -> None:
    target = directory / "packages" / "hostile.py"
    assert "denied" in attack(f"found = open({str(target)!r}, 'w')")
    assert "denied" in attack("import os; found = os.mkdir('/dev/shm/x')")
    assert "not permitted" in attack("import os; found = os.kill(os.getppid(), 0)")


def test_a_grader_has_no_capability(attack: Attack) -> None:
    status = attack("found = [l for l in open('/proc/self/status') if l.startswith('CapEff')]")
    assert int(status.split("\\t")[1].split("\\n")[0], 16) & ~(1 << 2) == 0


def test_a_grader_reads_what_the_operator_names(attack: Attack, directory: Path) -> None:
    assert attack(f"found = open({str(directory / 'tables' / 'table')!r}).read()") == "a table"


def test_the_verifier_of_a_stack_holds_no_secret_but_its_own_token(stack: Endpoints) -> None:
    """The admin token does not open the verifier, nor the verifier's token the buffer service."""

    def status(url: str, token: str) -> int:
        # An address of its own: after the unknown tokens of other tests, theirs may get 429.
        with httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.5")) as client:
            return client.get(url, headers={"Authorization": f"Bearer {token}"}).status_code

    item = {"task": "countdown", "items": []}
    for token, expected in ((stack.token, 401), (stack.verifier_token, 200)):
        headers = {"Authorization": f"Bearer {token}"}
        answer = httpx.post(f"{stack.verifier_url}/v1/verify", json=item, headers=headers)
        assert answer.status_code == expected
    assert status(f"{stack.buffer_url}/v1/token", stack.token) == 200
    assert status(f"{stack.buffer_url}/v1/token", stack.verifier_token) == 401
    verifiers = [
        child for child in psutil.Process().children() if "services.verifier.app" in child.cmdline()
    ]
    if os.geteuid():
        for verifier in verifiers:
            with pytest.raises(psutil.AccessDenied):
                verifier.environ()
        return
    port = stack.verifier_url.rpartition(":")[2]
    environments = [verifier.environ() for verifier in verifiers]
    (variables,) = (variables for variables in environments if variables["BAPO_PORT"] == port)
    assert variables["BAPO_TOKEN"] == stack.verifier_token
    held = " ".join(variables.values())
    for secret in (stack.token, stack.s3_secret_key, stack.database_url):
        assert secret not in held
