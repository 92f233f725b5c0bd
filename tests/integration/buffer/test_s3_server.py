"""The local stack's S3 server: its volumes, whom it serves, and what it tells its authors."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.common.objectstore import ObjectStore, ObjectStoreError
from services.stack.s3 import PORTS, VOLUMES, await_s3, find_weed, start_s3
from services.stack.supervisor import Supervisor


def test_it_has_volumes_on_a_small_disk_and_reports_to_nobody(tmp_path: Path) -> None:
    """As many volumes as fit on 2.5 GB, four, cannot serve two buckets of seven volumes each."""
    with Supervisor(tmp_path / "logs") as supervisor:
        ports = supervisor.reserve_ports(PORTS)
        await_s3(supervisor, start_s3(supervisor, tmp_path / "s3", ports))
        status = ask_shell("volume.list", ports, tmp_path / "s3")
        log = (tmp_path / "logs" / "s3.log").read_text()
    assert f"/{VOLUMES} " in status
    assert "telemetry" not in log, "SeaweedFS announces there that it will report"


def test_the_space_of_deleted_objects_is_freed(tmp_path: Path) -> None:
    with Supervisor(tmp_path / "logs") as supervisor:
        ports = supervisor.reserve_ports(PORTS)
        settings = start_s3(supervisor, tmp_path / "s3", ports, reclaim_every_s=0.2)
        await_s3(supervisor, settings)
        store = ObjectStore(settings)
        store.put("runs/large", bytes(32 << 20))

        def stored() -> int:
            return sum(path.stat().st_size for path in (tmp_path / "s3").glob("*.dat"))

        assert stored() > 32 << 20
        store.delete(["runs/large"])
        supervisor.wait_until(lambda: stored() < 1 << 20, "the space", seconds=60)


def test_a_bucket_that_was_deleted_stays_away_and_every_access_says_so(tmp_path: Path) -> None:
    """SeaweedFS would make it anew with the next write, empty, so that a run trained on without its
    checkpoints and initial model."""
    with Supervisor(tmp_path / "logs") as supervisor:
        settings = start_s3(supervisor, tmp_path / "s3", supervisor.reserve_ports(PORTS))
        await_s3(supervisor, settings)
        store = ObjectStore(settings)
        store.put("runs/kept", b"bytes")
        store._client.remove_bucket(bucket_name=settings.bucket)
        gone = f"there is no bucket {settings.bucket}; check its name, or restore it from a backup"
        with pytest.raises(ObjectStoreError, match=f"cannot write bapo/runs/other: {gone}"):
            store.put("runs/other", b"bytes")
        with pytest.raises(ObjectStoreError, match=f"cannot read bapo/runs/kept: {gone}"):
            store.read("runs/kept")
        with pytest.raises(ObjectStoreError, match=gone):
            store.check()
        store.ensure_bucket()
        lost = "cannot read bapo/runs/kept: NoSuchKey; the object was deleted after it was stored"
        with pytest.raises(ObjectStoreError, match=lost):
            store.read("runs/kept")


def ask_shell(command: str, ports: Sequence[int], directory: Path) -> str:
    """Runs a command of SeaweedFS's shell, with the certificate of the server."""
    variables = {
        "WEED_GRPC_CA": str(directory / "grpc.crt"),
        "WEED_GRPC_CLIENT_CERT": str(directory / "grpc.crt"),
        "WEED_GRPC_CLIENT_KEY": str(directory / "grpc.key"),
    }
    done = subprocess.run(
        [find_weed(), "shell", f"-master=127.0.0.1:{ports[0]}.{ports[1]}"],
        input=f"{command}\n",
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout
