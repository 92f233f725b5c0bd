"""Files and sockets that other processes use meanwhile."""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner can read, at no moment otherwise.

    Another process that reads `path` meanwhile sees the whole former file or the whole new one.
    """
    # `mkstemp` creates the file with mode 0600.
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            # Else a power loss may leave an empty file under the new name.
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def sync_directory(path: Path) -> None:
    """Returns once the names in a directory would outlast a power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def open_exclusively(path: Path) -> Iterator[io.BufferedRandom]:
    """Opens a file for reading and appending under an exclusive lock, and creates it if needed.

    Waits while another thread or process holds the lock. A holder may rename or delete the file;
    the next one then opens a new file of the same name.
    """
    while True:
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Whoever had the file before may have renamed or deleted it.
            if _is_name_of(path, file):
                file.seek(0)
                yield file
                return


def _is_name_of(path: Path, file: io.BufferedRandom) -> bool:
    """Returns whether `path` is a name of an open file."""
    # The path is looked up once, because it can be renamed or deleted between two lookups.
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def is_dead_socket(path: Path) -> bool:
    """Returns whether a file is a Unix socket on which nothing listens any more."""
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


class OwnedDirectory:
    """A directory for temporary files that only its user can enter, and that ends with its process.

    Its process holds a lock on it, which the kernel releases whenever and however the process ends.
    The next directory of the same prefix removes those that nobody holds.
    """

    def __init__(self, prefix: str) -> None:
        """Makes the directory among the temporary ones, where its path is short."""
        remove_abandoned(prefix)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            with suppress(FileNotFoundError):
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
                # Another process may have removed it before it was locked.
                if self.path.exists():
                    return
                os.close(self._descriptor)

    def remove(self) -> None:
        """Removes the directory and what is in it. Further calls do nothing."""
        if self._descriptor >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = -1


def remove_abandoned(prefix: str) -> None:
    """Removes this user's temporary directories of a prefix whose process has ended."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        # Others remove them at the same time, and those of other users cannot be opened.
        with suppress(OSError):
            if left.lstat().st_uid != os.geteuid():
                continue
            descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(descriptor)
