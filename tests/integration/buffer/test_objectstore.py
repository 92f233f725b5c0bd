"""The object store's client repeats transfers whose connection breaks in mid-body."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.common.objectstore import ObjectStore, ObjectStoreUnavailable, digest_of
from services.stack.stack import Endpoints

DATA = os.urandom(3 << 20)
AFTER = 1 << 20
"""Bytes of a response that are relayed before the connection is cut."""


class CuttingRelay:
    """Relays connections to a server, and cuts the first `cuts` of them in mid-response."""

    def __init__(self, target: tuple[str, int], cuts: int) -> None:
        self._target, self.cuts = target, cuts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            response_limit = None
            if self.cuts:
                self.cuts, response_limit = self.cuts - 1, AFTER
            for source, sink, limit in ((client, server, None), (server, client, response_limit)):
                threading.Thread(target=_pump, args=(source, sink, limit), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, limit: int | None) -> None:
    """Relays up to `limit` bytes, then closes both connections."""
    try:
        while data := source.recv(1 << 16):
            if limit is not None and (limit := limit - len(data)) < 0:
                break
            sink.sendall(data)
    except OSError:
        pass
    finally:
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


@pytest.fixture
def store_behind_cuts(stack: Endpoints) -> Iterator[Callable[..., ObjectStore]]:
    """Makes clients whose first connections are cut in mid-response."""
    settings = stack.object_store
    host, port = settings.endpoint.removeprefix("http://").split(":")

    relays = []

    def make(cuts: int, **options: int) -> ObjectStore:
        relays.append(CuttingRelay((host, int(port)), cuts))
        endpoint = f"http://127.0.0.1:{relays[-1].port}"
        return ObjectStore(settings.model_copy(update={"endpoint": endpoint}), **options)

    yield make
    for relay in relays:
        relay.close()


def test_processes_that_fetch_the_same_file_get_it_whole(stack: Endpoints, tmp_path: Path) -> None:
    ObjectStore(stack.object_store).put("shared/data", DATA)
    target = tmp_path / "data"

    def fetch(_: int) -> bytes:
        ObjectStore(stack.object_store).get_file("shared/data", digest_of(DATA), target)
        return target.read_bytes()

    with ThreadPoolExecutor(8) as pool:
        assert all(data == DATA for data in pool.map(fetch, range(16)))
    assert list(tmp_path.iterdir()) == [target]


def test_a_read_that_breaks_is_repeated(
    stack: Endpoints, store_behind_cuts: Callable[..., ObjectStore], tmp_path: Path
) -> None:
    ObjectStore(stack.object_store).put("cut/data", DATA)
    digest = digest_of(DATA)
    assert store_behind_cuts(2).get("cut/data", digest) == DATA
    store_behind_cuts(2).get_file("cut/data", digest, tmp_path / "data")
    assert (tmp_path / "data").read_bytes() == DATA
    with pytest.raises(ObjectStoreUnavailable, match="cut/data"):
        store_behind_cuts(1, retries=0).get("cut/data", digest)
