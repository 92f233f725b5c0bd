"""The local stack's S3 server: its volumes, and what it tells its authors."""

from __future__ import annotations

from pathlib import Path

import httpx

from services.stack.s3 import PORTS, VOLUMES, await_s3, start_s3
from services.stack.supervisor import Supervisor, free_ports


def test_it_has_volumes_on_a_small_disk_and_reports_to_nobody(tmp_path: Path) -> None:
    """As many volumes as fit on 2.5 GB, four, cannot serve two buckets of seven volumes each."""
    ports = free_ports(PORTS)
    with Supervisor(tmp_path / "logs") as supervisor:
        await_s3(supervisor, start_s3(supervisor, tmp_path / "s3", ports))
        status = httpx.get(f"http://127.0.0.1:{ports[0]}/dir/status").raise_for_status().json()
        log = (tmp_path / "logs" / "s3.log").read_text()
    assert status["Topology"]["Max"] == VOLUMES
    assert "telemetry" not in log, "SeaweedFS announces there that it will report"
