"""Files and sockets that other processes use meanwhile."""

from __future__ import annotations

import os
import socket
import tempfile
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
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


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
