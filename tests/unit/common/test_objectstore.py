"""Tests how the object store's client addresses, signs and sends requests."""

from __future__ import annotations

import gzip
import io
import random
import socket
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import urllib3
from minio.credentials import IamAwsProvider
from pydantic import ValidationError

from services.common import objectstore
from services.common.images import LARGEST_IMAGE, stored_images
from services.common.objectstore import (
    LARGEST_MANIFEST,
    ObjectStore,
    ObjectStoreError,
    digest_of,
)
from services.common.settings import ObjectStoreSettings


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def settings(endpoint: str, **more: Any) -> ObjectStoreSettings:
    keys = {"access_key": "access", "secret_key": "secret"}
    return ObjectStoreSettings.model_validate(
        {"endpoint": endpoint, "bucket": "bapo", **keys, **more}
    )


def address(store_settings: ObjectStoreSettings) -> str:
    """Returns the signed address of an object."""
    client: Any = ObjectStore(store_settings)._client
    signed: str = client.presigned_get_object(bucket_name="bapo", object_name="key")
    return signed


@pytest.mark.parametrize(
    ("endpoint", "more", "host_and_path", "region"),
    [
        ("http://minio:9000", {}, "http://minio:9000/bapo/key", "us-east-1"),
        ("http://minio:9000", {"region": "garage"}, "http://minio:9000/bapo/key", "garage"),
        (
            "https://s3.fr-par.scw.cloud",
            {"region": "fr-par"},
            "https://s3.fr-par.scw.cloud/bapo/key",
            "fr-par",
        ),
        (
            "https://s3.fr-par.scw.cloud",
            {"region": "fr-par", "path_style": "never"},
            "https://bapo.s3.fr-par.scw.cloud/key",
            "fr-par",
        ),
        # The client would ignore the region of the host name if it were given another one.
        (
            "https://s3.eu-west-1.amazonaws.com",
            {},
            "https://bapo.s3.eu-west-1.amazonaws.com/key",
            "eu-west-1",
        ),
        (
            "https://s3.amazonaws.com",
            {"region": "eu-west-1"},
            "https://bapo.s3.eu-west-1.amazonaws.com/key",
            "eu-west-1",
        ),
        (
            "https://s3.eu-west-1.amazonaws.com",
            {"path_style": "always"},
            "https://s3.eu-west-1.amazonaws.com/bapo/key",
            "eu-west-1",
        ),
    ],
)
def test_requests_are_addressed_and_signed_for_the_region(
    endpoint: str, more: dict[str, Any], host_and_path: str, region: str
) -> None:
    signed = address(settings(endpoint, **more))
    assert signed.startswith(f"{host_and_path}?")
    assert f"%2F{region}%2Fs3%2F" in signed


def test_a_cloud_identity_needs_no_keys() -> None:
    identity = settings(
        "https://s3.eu-west-1.amazonaws.com",
        credentials="identity",
        access_key="",
        secret_key="",
    )
    client: Any = ObjectStore(identity)._client
    assert isinstance(client._provider._provider, IamAwsProvider)


@pytest.mark.parametrize("missing", ["access_key", "secret_key"])
def test_a_missing_key_is_named(missing: str) -> None:
    with pytest.raises(ValidationError, match=f"BAPO_S3_{missing.upper()} is not set"):
        settings("http://minio:9000", **{missing: ""})


def test_the_server_is_reached_through_the_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", ".svc,localhost")
    outside: Any = ObjectStore(settings("https://s3.example.com"))._client
    inside: Any = ObjectStore(settings("https://s3.storage.svc"))._client
    assert isinstance(outside._http, urllib3.ProxyManager)
    assert outside._http.proxy.host == "proxy"
    assert not isinstance(inside._http, urllib3.ProxyManager)


def test_a_server_may_read_an_object_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that waits for its disk reads nothing for longer than a connection takes."""
    monkeypatch.setattr(objectstore, "CONNECT_WITHIN_S", 0.2)
    data = bytes(32 << 20)  # more than the sockets' buffers hold
    requests: list[int] = []

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        threading.Event().wait(1.0)  # five times as long as a connection may take
        with connection, connection.makefile("rb") as received:
            length = 0
            for line in iter(received.readline, b"\r\n"):
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            requests.append(len(received.read(length)))
            connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "x"\r\nContent-Length: 0\r\n\r\n')

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        ObjectStore(settings(endpoint), retries=0).put("key", data)
        server.join()
    assert requests == [len(data)]


# ---- objects of somebody who has the keys of the bucket ------------------------------------------

ENDLESS = 1 << 28
"""Bytes of an object that must not be read whole."""


class Zeros(io.RawIOBase):
    """Many zeros, which count how many of them were read."""

    taken = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), ENDLESS - self.taken)
        self.taken += size
        buffer[:size] = bytes(size)
        return size


def serving(body: io.IOBase, **headers: str) -> ObjectStore:
    """Returns a store whose server answers each request with a body."""
    store = ObjectStore(settings("http://minio:9000"))
    response = urllib3.HTTPResponse(body, headers, preload_content=False)
    store._client = Mock()
    store._client.get_object.return_value = response
    return store


def test_a_manifest_that_is_none_is_read_in_part(tmp_path: Path) -> None:
    zeros = Zeros()
    with pytest.raises(ObjectStoreError, match=r"manifest\.json: has more than 16777216"):
        serving(zeros).get_directory("runs/r/weights/1", "0" * 64, tmp_path / "out")
    assert zeros.taken <= LARGEST_MANIFEST + (2 << 20)
    assert not (tmp_path / "out").exists()


def test_an_image_that_is_none_is_read_in_part() -> None:
    zeros = Zeros()
    with pytest.raises(ObjectStoreError, match="has more than"):
        stored_images(serving(zeros)).get("0" * 64)
    assert zeros.taken <= LARGEST_IMAGE + (2 << 20)


def test_nothing_is_unpacked_that_calls_itself_compressed() -> None:
    packed = gzip.compress(bytes(1 << 26))
    store = serving(io.BytesIO(packed), **{"content-encoding": "gzip"})
    assert store.get("key", digest_of(packed), largest=1 << 20) == packed


@pytest.mark.parametrize("seed", range(4))
def test_an_object_of_the_largest_size_is_read(seed: int) -> None:
    data = random.Random(seed).randbytes(random.Random(seed).randrange(1, 3 << 20))
    store = serving(io.BytesIO(data))
    assert store.get("key", digest_of(data), largest=len(data)) == data
    with pytest.raises(ObjectStoreError, match="has more than"):
        serving(io.BytesIO(data)).get("key", digest_of(data), largest=len(data) - 1)


def test_a_manifest_that_no_reader_takes_is_not_written() -> None:
    store = serving(io.BytesIO())
    listing = {f"{number:0200}": "0" * 64 for number in range(70_000)}
    with pytest.raises(ObjectStoreError, match="store fewer files"):
        store.put_manifest("prefix", listing)
    assert not store._client.put_object.called  # type: ignore[attr-defined]
