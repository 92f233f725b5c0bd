"""Machines whose users have no name, as in OpenShift, or whose home is closed to other users."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.stack.postgres import let_traverse
from tests.outside.servers import check_message

NAMELESS = 12345


@pytest.fixture
def directory() -> Iterator[Path]:
    """Yields a directory that every user can reach and write to."""
    path = Path(tempfile.mkdtemp(prefix="bapo-user-"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


CODE = f"""
import os, sys
from pathlib import Path
from bapo_core.errors import BapoError
from services.stack.postgres import _create_cluster, find_binaries, let_traverse
if os.geteuid() == 0:
    let_traverse(find_binaries())
    os.setgroups([])
    os.setgid({NAMELESS})
    os.setuid({NAMELESS})
try:
    _create_cluster(find_binaries(), Path(sys.argv[1]), None)
except BapoError as error:
    print(error)
"""


def test_a_user_id_without_a_name_is_told_how_to_get_one(directory: Path) -> None:
    """Postgres's own `initdb` looks the name up."""
    command = [sys.executable, "-P", "-c", CODE, f"{directory}/data"]
    if os.geteuid() != 0:
        mapping = [f"--map-user={NAMELESS}", f"--map-group={NAMELESS}"]
        command = ["unshare", "--user", *mapping, *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/")
    assert done.stdout.startswith(f"the user id {NAMELESS} has no name"), done.stderr
    check_message(done.stdout.strip())
    assert f'add a line to /etc/passwd, "bapo:x:{NAMELESS}:{NAMELESS}::/tmp:/bin/sh"' in done.stdout


def test_a_directory_that_is_opened_for_postgres_is_named(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Under root, Postgres runs as another user, who must pass the directories above the home."""
    closed, home = directory / "closed", directory / "closed" / "work" / "home"
    home.mkdir(parents=True)
    closed.chmod(0o700)
    with caplog.at_level(logging.WARNING):
        let_traverse(home)
        let_traverse(home)
    assert stat.S_IMODE(closed.stat().st_mode) == 0o701
    assert [record.getMessage() for record in caplog.records] == [
        f"{closed} was closed to other users; they can pass through it from now on, and not list "
        f"it, because Postgres does not run as root (chmod o-x {closed} closes it, while no stack "
        "runs)"
    ]
