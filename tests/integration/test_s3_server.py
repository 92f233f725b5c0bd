"""The local stack's S3 server stores objects however little of the disk is free."""

from __future__ import annotations

from pathlib import Path

import httpx

from services.stack.s3 import PORTS, VOLUMES, await_s3, start_s3
from services.stack.supervisor import Supervisor, free_ports


def test_the_number_of_volumes_does_not_depend_on_the_free_disk(tmp_path: Path) -> None:
    """As many volumes as fit on 2.5 GB, four, cannot serve two buckets of seven volumes each."""
    ports = free_ports(PORTS)
    with Supervisor(tmp_path / "logs") as supervisor:
        await_s3(supervisor, start_s3(supervisor, tmp_path / "s3", ports))
        status = httpx.get(f"http://127.0.0.1:{ports[0]}/dir/status").raise_for_status().json()
    assert status["Topology"]["Max"] == VOLUMES
