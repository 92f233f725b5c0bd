"""The bundled object store, started with the chart's own command."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from pydantic import SecretStr

from services.common.objectstore import ObjectStore, ObjectStoreError
from services.common.settings import ObjectStoreSettings
from services.stack.supervisor import Supervisor, free_ports
from tests.charts.helm import Object, container_of, one

DIGEST = hashlib.sha256(b"ready").hexdigest()
SERVERS = ("master", "volume", "filer", "s3")


@pytest.fixture
def settings(dev: list[Object], tmp_path: Path) -> Iterator[ObjectStoreSettings]:
    """Of one that runs, with the keys of the Secret, on ports of this machine."""
    data, identities = tmp_path / "data", tmp_path / "identities.json"
    data.mkdir()
    secret = one(dev, "Secret", "bapo-s3-identities")["data"]
    identities.write_bytes(base64.b64decode(secret["identities.json"]))
    given = container_of(dev, "StatefulSet", "bapo-s3")["command"]
    places = {"/identities/identities.json": str(identities), "/data": str(data)}
    ports = free_ports(2 * len(SERVERS))
    command = [_placed(each, places) for each in given]
    # Of a flag that is given twice, the last one counts.
    for each, port, grpc in zip(SERVERS, ports[:4], ports[4:], strict=True):
        command += [f"-{each}.port={port}", f"-{each}.port.grpc={grpc}"]
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert weed is not None
    keys = {
        key: base64.b64decode(value).decode()
        for key, value in one(dev, "Secret", "bapo-s3")["data"].items()
    }
    endpoint = f"http://127.0.0.1:{ports[3]}"
    found = ObjectStoreSettings(
        endpoint=endpoint,
        bucket="bapo",
        access_key=SecretStr(keys["BAPO_S3_ACCESS_KEY"]),
        secret_key=SecretStr(keys["BAPO_S3_SECRET_KEY"]),
    )
    with Supervisor(tmp_path / "logs") as supervisor:
        supervisor.start("s3", [weed, *command[1:]], stop_within_s=1.0)
        supervisor.wait_until(lambda: _usable(found), "the object store", seconds=60)
        yield found


def _placed(argument: str, places: dict[str, str]) -> str:
    for inside, here in places.items():
        argument = argument.replace(inside, here)
    return argument


def _usable(settings: ObjectStoreSettings) -> bool:
    store = ObjectStore(settings, retries=0)
    try:
        store.ensure_bucket()
        store.put("ready", b"ready")
    except ObjectStoreError:
        return False
    return True


def test_it_serves_those_who_have_the_keys(settings: ObjectStoreSettings) -> None:
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
        each
        for each in psutil.Process().children(recursive=True)
        if f"-s3.port={settings.endpoint.rpartition(':')[2]}" in each.cmdline()
    )
    listening = {
        each.laddr.port
        for each in weed.net_connections()
        if each.status == psutil.CONN_LISTEN and each.laddr.ip != "127.0.0.1"
    }
    given = dict(each.partition("=")[::2] for each in weed.cmdline())
    # The second is closed by the network policy, and no Service has it.
    assert listening == {int(given["-s3.port"]), int(given["-s3.port.grpc"])}
