"""Files that hold secrets are private, and are never seen half written; directories end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.common.files import OwnedDirectory, write_private


def test_a_private_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret.json"
    path.write_text("of before")
    path.chmod(0o644)
    write_private(path, "secret")
    assert path.read_text() == "secret"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_another_reader_sees_the_whole_file_or_the_one_of_before(tmp_path: Path) -> None:
    path = tmp_path / "secret.json"
    texts = ["a" * 2**20, "b" * 2**20]
    write_private(path, texts[0])
    ended = threading.Event()

    def write() -> None:
        try:
            for count in range(200):
                write_private(path, texts[count % 2])
        finally:
            ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not ended.is_set():
        assert path.read_text() in texts
    thread.join()


def test_a_write_that_fails_leaves_the_file_of_before(tmp_path: Path) -> None:
    path = tmp_path / "secret.json"
    write_private(path, "of before")
    with pytest.raises(UnicodeEncodeError):
        write_private(path, "\ud800")
    assert path.read_text() == "of before"
    assert list(tmp_path.iterdir()) == [path]


OWNER = """
import sys
from services.common.files import OwnedDirectory
print(OwnedDirectory("bapo-test-").path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes `tmp_path` the place of temporary directories, here and in child processes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_the_directory_of_a_killed_process_is_removed_by_the_next(temporary: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        # As vLLM does, which binds its socket minutes before it listens on it.
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(left / "api.sock"))
            first = OwnedDirectory("bapo-test-")
            assert (left / "api.sock").exists(), "its process is alive"
        process.send_signal(signal.SIGKILL)
    second = OwnedDirectory("bapo-test-")
    assert set(temporary.iterdir()) == {first.path, second.path}
    assert second.path.stat().st_mode & 0o777 == 0o700
    second.remove()
    second.remove()
    first.remove()
    assert not list(temporary.iterdir())


def test_directories_are_made_and_removed_at_the_same_time(temporary: Path) -> None:
    def make(count: int) -> Path:
        mine = OwnedDirectory("bapo-test-")
        (mine.path / "socket").write_text("")
        if count % 2:
            mine.remove()
            assert not mine.path.exists()
        kept.append(mine)
        return mine.path

    kept: list[OwnedDirectory] = []
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(make, range(400)))
    assert set(temporary.iterdir()) == set(made[::2])
    assert all((path / "socket").exists() for path in made[::2])
