"""An image of one megabyte whose `python` is a shell script, for jobs that are to die."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from pathlib import Path

SMALL_IMAGE = "localhost/bapo/small:1"
APPLETS = ("sh", "head", "sleep", "tail")
SCRIPT = """#!/bin/sh
case "$MODE" in
oom) head -c 400000000 /dev/zero | tail ;;
exit*) exit ${MODE#exit } ;;
*) sleep 100000 ;;
esac
"""


def make_archive(path: Path) -> None:
    """Writes the image as an archive for `docker load` or `ctr images import`."""
    busybox = shutil.which("busybox")
    assert busybox is not None, "install busybox-static"
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(busybox, arcname="bin/busybox")
        for name in APPLETS:
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
        _add(tar, "bin/python", SCRIPT.encode(), 0o755)
    content = layer.getvalue()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/bin"], "User": "10001:10001"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(content).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [SMALL_IMAGE], "Layers": ["layer.tar"]}]
    with tarfile.open(path, "w") as archive:
        _add(archive, "config.json", json.dumps(config).encode())
        _add(archive, "layer.tar", content)
        _add(archive, "manifest.json", json.dumps(manifest).encode())


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), mode
    tar.addfile(member, io.BytesIO(content))
