"""Tests the bundled object store, started with the chart's command."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from pydantic import SecretStr

from services.common.objectstore import ObjectStore, ObjectStoreError
from services.common.settings import ObjectStoreSettings
from services.stack.supervisor import Supervisor
from tests.charts.helm import Object, container_of, one

DIGEST = hashlib.sha256(b"ready").hexdigest()
SERVERS = ("master", "volume", "filer", "s3")


@pytest.fixture
def settings(dev: list[Object], tmp_path: Path) -> Iterator[ObjectStoreSettings]:
    """Runs the bundled object store with the keys of the Secret, on free ports."""
    data, identities = tmp_path / "data", tmp_path / "identities.json"
    data.mkdir()
    secret = one(dev, "Secret", "bapo-s3-identities")["data"]
    identities.write_bytes(base64.b64decode(secret["identities.json"]))
    original = container_of(dev, "StatefulSet", "bapo-s3")["command"]
    paths = {
        "/identities/identities.json": str(identities),
        "/data": str(data),
        "$(POD_IP)": "0.0.0.0",
    }
    command = [_replace_paths(argument, paths) for argument in original]
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert weed is not None
    keys = {
        key: base64.b64decode(value).decode()
        for key, value in one(dev, "Secret", "bapo-s3")["data"].items()
    }
    with Supervisor(tmp_path / "logs") as supervisor:
        ports = supervisor.reserve_ports(2 * len(SERVERS))
        # The last one of repeated flags applies.
        for server, port, grpc in zip(SERVERS, ports[:4], ports[4:], strict=True):
            command += [f"-{server}.port={port}", f"-{server}.port.grpc={grpc}"]
        settings = ObjectStoreSettings(
            endpoint=f"http://127.0.0.1:{ports[3]}",
            bucket="bapo",
            access_key=SecretStr(keys["BAPO_S3_ACCESS_KEY"]),
            secret_key=SecretStr(keys["BAPO_S3_SECRET_KEY"]),
        )
        supervisor.start("s3", [weed, *command[1:]], stop_signal=signal.SIGKILL)
        supervisor.wait_until(lambda: _usable(settings), "the object store", seconds=60)
        yield settings


def _replace_paths(argument: str, paths: dict[str, str]) -> str:
    for inside, outside in paths.items():
        argument = argument.replace(inside, outside)
    return argument


def _usable(settings: ObjectStoreSettings) -> bool:
    store = ObjectStore(settings, retries=0)
    try:
        store.ensure_bucket()
        store.put("ready", b"ready")
    except ObjectStoreError:
        return False
    return True


def test_the_object_store_requires_its_keys(settings: ObjectStoreSettings) -> None:
    assert ObjectStore(settings).get("ready", DIGEST) == b"ready"
    stranger = ObjectStoreSettings(
        endpoint=settings.endpoint,
        bucket=settings.bucket,
        access_key=SecretStr("stranger"),
        secret_key=SecretStr("secret"),
    )
    with pytest.raises(ObjectStoreError):
        ObjectStore(stranger, retries=0).get("ready", DIGEST)


def test_only_s3_listens_beyond_loopback(settings: ObjectStoreSettings) -> None:
    (weed,) = (
        process
        for process in psutil.Process().children(recursive=True)
        if f"-s3.port={settings.endpoint.rpartition(':')[2]}" in process.cmdline()
    )
    listening = {
        process.laddr.port
        for process in weed.net_connections()
        if process.status == psutil.CONN_LISTEN and process.laddr.ip != "127.0.0.1"
    }
    flags = dict(process.partition("=")[::2] for process in weed.cmdline())
    # The gRPC port is in no Service, and the network policy blocks it.
    assert listening == {int(flags["-s3.port"]), int(flags["-s3.port.grpc"])}
