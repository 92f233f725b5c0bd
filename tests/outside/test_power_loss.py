"""The local stack starts after a power loss, with files of other versions and in unusual paths."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from bapo_core.errors import BapoError
from services.common.errors import ServiceError
from services.common.http import HttpClient
from services.common.objectstore import ObjectStore, ObjectStoreError, digest_of
from services.common.process import as_user
from services.stack.postgres import (
    _create_cluster,
    _remove_stale_pid,
    explain_failure,
    find_binaries,
    start_postgres,
)
from services.stack.s3 import PORTS, await_s3, start_s3
from services.stack.settings import default_home
from services.stack.stack import Endpoints, find_stack
from services.stack.supervisor import Supervisor
from tests.outside.servers import check_message, open_directory, server_user


def command(home: Path, *arguments: str) -> str:
    """Runs a command of bapo in a home and returns what it prints. Fails if the command does."""
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", *arguments],
        env={**os.environ, "BAPO_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def own_home() -> Iterator[Path]:
    """Yields a home without a stack, which the user of Postgres can reach."""
    directory = Path(tempfile.mkdtemp(prefix="bapo-own-"))
    yield directory
    command(directory, "stack", "down", "--force")
    shutil.rmtree(directory)


@pytest.mark.parametrize("text", ["", "{", "null", "[]", '{"buffer_url": "http://127.0.0.1:9"}'])
def test_an_unreadable_stack_file_without_a_stack_counts_as_none(text: str, home: Path) -> None:
    directory = home / "power-loss"
    directory.mkdir(mode=0o700, exist_ok=True)
    (directory / "stack.json").write_text(text)
    assert find_stack(directory) is None


def test_a_stack_of_a_newer_version_is_read(stack: Endpoints, home: Path) -> None:
    path = home / "stack.json"
    original = path.read_text()
    try:
        path.write_text(json.dumps({**json.loads(original), "of_a_newer_version": True}))
        assert find_stack(home) == stack
    finally:
        path.write_text(original)


def test_an_unreadable_stack_file_of_a_running_stack_names_its_process(
    stack: Endpoints, home: Path
) -> None:
    path = home / "stack.json"
    original = path.read_text()
    try:
        path.write_text("")
        with pytest.raises(
            BapoError, match=rf"while a stack runs; end process {stack.pid}"
        ) as caught:
            find_stack(home)
        check_message(str(caught.value))
    finally:
        path.write_text(original)


def test_the_process_id_of_a_postgres_that_has_ended_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "postmaster.pid"
    other = subprocess.Popen(["sleep", "60"])
    try:
        for text in (f"{other.pid}\n/data\n", "4194304999\n", ""):
            path.write_text(text)
            _remove_stale_pid(tmp_path)
            assert not path.exists()
    finally:
        other.kill()
        other.wait()


def test_the_process_id_of_another_users_process_is_removed(tmp_path: Path) -> None:
    """The number of a user's Postgres belongs to a daemon of root after a reboot."""
    code = (
        "import os, sys; from pathlib import Path; from services.stack import postgres;"
        "os.geteuid() or os.setgroups([]) or os.setuid(12345);"
        "postgres._remove_stale_pid(Path(sys.argv[1]))"
    )
    with open_directory() as directory:
        if os.geteuid() == 0:
            os.chown(directory, 12345, -1)
        path = directory / "postmaster.pid"
        path.write_text("1\n/data\n")
        command = [sys.executable, "-c", code, str(directory)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert not path.exists()


def test_the_process_id_of_the_postgres_of_another_directory_is_removed(
    stack: Endpoints, home: Path
) -> None:
    running = (home / "postgres" / "postmaster.pid").read_text()
    with open_directory() as directory:
        path = directory / "postmaster.pid"
        path.write_text(running)
        _remove_stale_pid(directory)
        assert not path.exists()


def test_the_process_id_of_a_running_postgres_stays(stack: Endpoints, home: Path) -> None:
    path = home / "postgres" / "postmaster.pid"
    before = path.read_text()
    _remove_stale_pid(home / "postgres")
    assert path.read_text() == before


def test_the_stack_starts_beside_the_process_that_has_the_number_of_its_postgres(
    own_home: Path,
) -> None:
    command(own_home, "stack", "up", "--port", "0")
    path = own_home / "postgres" / "postmaster.pid"
    lines = path.read_text().splitlines()
    command(own_home, "stack", "down")
    owner = server_user()
    other = subprocess.Popen(["sleep", "600"], **as_user(owner))
    try:
        path.write_text("\n".join([str(other.pid), *lines[1:], ""]))
        if owner is not None:
            shutil.chown(path, owner)
        command(own_home, "stack", "up", "--port", "0")
        assert path.read_text().splitlines()[0] != str(other.pid)
        assert command(own_home, "stack", "down") == "stopped"
    finally:
        other.kill()
        other.wait()


@contextmanager
def initdb_of(script: str) -> Iterator[tuple[Path, Path]]:
    """Yields a directory of programs with an `initdb` that runs a script, and one for data."""
    with open_directory() as directory:
        programs = directory / "bin"
        programs.mkdir()
        (programs / "initdb").write_text(f"#!/bin/sh\n{script}\n")
        (programs / "initdb").chmod(0o755)
        yield programs, directory / "postgres"


def test_a_database_whose_creation_was_interrupted_is_made_anew() -> None:
    with initdb_of('data=${1#-D}; echo 17 > "$data/PG_VERSION"; kill -KILL $$') as (programs, data):
        with pytest.raises(BapoError, match="initdb was killed by SIGKILL; correct this") as caught:
            _create_cluster(programs, data, server_user())
        check_message(str(caught.value))
        assert not data.exists()
        _create_cluster(find_binaries(), data, server_user())
        assert (data / "global" / "pg_control").exists()
        assert sorted(path.name for path in data.parent.iterdir()) == ["bin", "postgres"]


def test_the_name_of_a_new_database_is_on_the_disk_before_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a power loss would give it the name of an interrupted one, which is removed."""
    synced: list[tuple[str, bool]] = []

    def sync(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), data.exists()))

    with initdb_of("exit 0") as (programs, data):
        monkeypatch.setattr(os, "fsync", sync)
        _create_cluster(programs, data, server_user())
        assert synced == [(str(data.parent), True)]


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        (
            'initdb: error: could not access directory "/x": Permission denied\n'
            "initdb: hint: Run initdb as another user.",
            'could not access directory "/x": Permission denied',
        ),
        (
            "2026-11-28 00:03:53.776 UTC [6433] FATAL:  could not write to file "
            '"pg_wal/xlogtemp.6433": No space left on device\n'
            "child process exited with exit code 1\n"
            'initdb: removing data directory "/x"',
            'could not write to file "pg_wal/xlogtemp.6433": No space left on device',
        ),
        ("", "initdb failed (exit 1)"),
    ],
)
def test_the_error_of_initdb_is_the_reason_and_not_what_follows_it(
    printed: str, reason: str
) -> None:
    with initdb_of(f"cat >&2 <<'END'\n{printed}\nEND\nexit 1") as (programs, data):
        with pytest.raises(BapoError) as caught:
            _create_cluster(programs, data, server_user())
        assert check_message(str(caught.value)).startswith(
            f"Postgres could not make a database in {data}: {reason}; correct this"
        )


def test_files_that_are_no_database_are_neither_used_nor_removed() -> None:
    with open_directory() as directory:
        (directory / "base").mkdir()
        with pytest.raises(
            BapoError, match=r"not PG_VERSION.*restore a backup.*or move it away"
        ) as caught:
            _create_cluster(find_binaries(), directory, server_user())
        check_message(str(caught.value))
        assert (directory / "base").is_dir()


@pytest.mark.parametrize("file", ["global/pg_control", "global/pg_filenode.map"])
def test_a_damaged_database_names_the_file(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Postgres ends for the first file, and refuses each connection for the second."""
    with open_directory() as directory:
        data, sockets = directory / "home" / "postgres", directory / "sockets"
        data.parent.mkdir()
        sockets.mkdir()
        with Supervisor(directory / "logs") as supervisor:
            start_postgres(supervisor, data, sockets)
        os.truncate(data / file, 0)
        monkeypatch.setattr("services.stack.postgres.READY_WITHIN_S", 5.0)
        with (
            pytest.raises(
                BapoError, match=rf"{file}.*if a file .* restore a backup of it"
            ) as caught,
            Supervisor(directory / "logs") as supervisor,
        ):
            start_postgres(supervisor, data, sockets)
        check_message(str(caught.value))


STARTING = "2026-11-28 00:03:53.776 UTC [7] FATAL:  the database system is starting up\n"
STARTED = "2026-11-28 00:03:53.776 UTC [7] LOG:  starting PostgreSQL 18.0\n"
DAMAGED = "if a file in /d is damaged, restore a backup of it, or move it away"
CORRECT = "correct this, and repeat the command"
FULL = 'FATAL:  could not write to file "pg_wal/xlogtemp.6433": No space left on device'


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ('FATAL:  could not open file "global/pg_filenode.map": No such file', DAMAGED),
        ('PANIC:  could not read file "global/pg_control": read 0 of 296', DAMAGED),
        ("PANIC:  could not locate a valid checkpoint record at 0/16B7F28", DAMAGED),
        ("FATAL:  incorrect checksum in control file", DAMAGED),
        ("FATAL:  relation mapping file contains incorrect checksum", DAMAGED),
        ("FATAL:  invalid page in block 0 of relation base/5/2600", DAMAGED),
        ('FATAL:  "/d" is not a valid data directory', DAMAGED),
        ('FATAL:  configuration file "/d/postgresql.conf" contains errors', DAMAGED),
        (FULL, "free space on that disk, and repeat the command"),
        (FULL.replace("FATAL", "PANIC"), "free space on that disk, and repeat the command"),
        ('FATAL:  could not open file "global/pg_control": Permission denied', CORRECT),
        ("FATAL:  could not map anonymous shared memory: Cannot allocate memory", CORRECT),
        ('FATAL:  invalid value for parameter "max_connections": "x"', CORRECT),
        ('FATAL:  lock file "postmaster.pid" already exists', CORRECT),
    ],
)
def test_a_failed_start_says_what_helps_against_its_error(error: str, advice: str) -> None:
    random = Random(error)
    line = f"2026-11-28 00:03:53.776 UTC [7] {error}\n"
    for _ in range(4):
        before, after = (STARTING * random.randint(0, 3) for _ in range(2))
        text = f"{STARTED}{before}{line}{after}"
        said = explain_failure(text, Path("/d"), runs=random.random() < 0.5)
        assert said == (error, advice)


def test_a_long_recovery_is_no_damage() -> None:
    recovering = f"{STARTED}{STARTING * 3}2026-11-28 00:04 UTC [9] LOG:  redo in progress\n"
    said = explain_failure(recovering, Path("/d"), runs=True)
    assert said == ("it recovers from an interruption", "wait a minute, and repeat the command")
    for text, runs in ((recovering, False), (STARTED, True), ("", True)):
        reason, advice = explain_failure(text, Path("/d"), runs=runs)
        assert (reason == text.strip().split("\n")[-1], advice) == (True, CORRECT)


def test_a_start_that_takes_too_long_says_that_postgres_recovers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with initdb_of("") as (programs, data):
        data.mkdir()
        (data / "PG_VERSION").write_text("18\n")
        (programs / "postgres").write_text(f"#!/bin/sh\necho '{STARTING}'\nexec sleep 600\n")
        (programs / "postgres").chmod(0o755)
        monkeypatch.setattr("services.stack.postgres.find_binaries", lambda: programs)
        monkeypatch.setattr("services.stack.postgres.READY_WITHIN_S", 0.5)
        with (
            pytest.raises(
                BapoError, match=r"in 0 s; see .*: it recovers.* repeat the command"
            ) as e,
            Supervisor(data.parent / "logs") as supervisor,
        ):
            start_postgres(supervisor, data, programs)
        check_message(str(e.value))


def test_objects_that_were_half_written_are_named_and_all_others_are_read(tmp_path: Path) -> None:
    """SeaweedFS appends objects to its volumes, whose ends a power loss may cut off."""
    random = Random(54)
    objects = {f"runs/cut/{n}": random.randbytes(random.randint(1, 200_000)) for n in range(12)}
    with Supervisor(tmp_path / "logs") as supervisor:
        settings = start_s3(supervisor, tmp_path / "s3", supervisor.reserve_ports(PORTS))
        await_s3(supervisor, settings)
        store = ObjectStore(settings)
        for key, data in objects.items():
            store.put(key, data)
    largest = max((tmp_path / "s3").glob("*.dat"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size - random.randint(1, 1000))
    with Supervisor(tmp_path / "logs") as supervisor:
        settings = start_s3(supervisor, tmp_path / "s3", supervisor.reserve_ports(PORTS))
        await_s3(supervisor, settings)
        store = ObjectStore(settings, retries=0)
        lost: dict[str, str] = {}
        for key, data in objects.items():
            try:
                assert store.get(key, digest_of(data)) == data
            except ObjectStoreError as error:
                lost[key] = check_message(str(error))
        ((key, reason),) = lost.items()
        assert f"cannot read bapo/{key}" in reason
        store.put(key, objects[key])
        assert store.get(key, digest_of(objects[key])) == objects[key]


def test_a_tilde_in_the_home_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAPO_HOME", "~/runs")
    assert default_home() == Path(os.path.expanduser("~/runs")).resolve()


def test_a_comma_in_the_home_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAPO_HOME", "/tmp/a,b")
    with pytest.raises(BapoError, match="set BAPO_HOME to a directory without one") as caught:
        default_home()
    check_message(str(caught.value))


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (413, {"html": "<html>nginx</html>"}, "raise its limit to 64 MiB"),
        (401, {"html": "<html>nginx</html>"}, r"answered with a page \(HTTP 401\); check the addr"),
        (404, {"text": "no route\n" * 999}, r"answered with 'no route no .* \(HTTP 404\); check"),
        (405, {"json": {"error": ["x"] * 999}}, r"answered with '.* \(HTTP 405\); check"),
        (400, {"content": bytes(range(256)) * 9}, r"answered with '.* \(HTTP 400\); check"),
        (404, {"text": "x" * 999}, rf"answered with '{'x' * 100}' \(HTTP 404\); check"),
        (403, {}, r"answered with nothing \(HTTP 403\); check"),
        (403, {"html": " "}, r"answered with nothing \(HTTP 403\); check"),
    ],
)
def test_the_answer_of_a_proxy_is_explained(
    status: int, body: dict[str, Any], expected: str
) -> None:
    client = HttpClient("buffer service", "http://buffer", "a-token")
    page = httpx.Response(status, **body)
    client._client = httpx.Client(
        transport=httpx.MockTransport(lambda _: page), base_url="http://buffer"
    )
    with pytest.raises(ServiceError, match=expected) as caught:
        client.call("POST", "/v1/datasets")
    assert "<html>" not in check_message(str(caught.value))
