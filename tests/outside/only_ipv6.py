"""Starts Postgres and the chart's servers, and calls them, in a network without IPv4 addresses.

The test in `test_ipv6.py` runs this file in a network namespace whose only address beside loopback
is `ADDRESS`. The arguments are a directory for files, the chart's BAPO_HOST and the command of its
object store. Fails unless each server answers there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
from pydantic import SecretStr

from services.buffer.api.client import BufferClient
from services.common.objectstore import ObjectStore, ObjectStoreError
from services.common.process import ChildProcess, python_command
from services.common.settings import ObjectStoreSettings
from tests.outside.servers import Postgres, await_true, open_directory

ADDRESS = "fd00:bb::5"
TOKEN = "a-token-of-the-namespace"
KEYS = {"accessKey": "access-key-1", "secretKey": "secret-key-1"}


def health(port: int, path: str = "/health") -> Callable[[], bool]:
    """Returns whether a probe of the kubelet succeeds."""

    def succeeds() -> bool:
        with suppress(httpx.TransportError):
            url = f"http://[{ADDRESS}]:{port}{path}"
            return httpx.get(url, timeout=5, trust_env=False).is_success
        return False

    return succeeds


def main() -> None:
    directory, host, command = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    store = ObjectStoreSettings(
        endpoint=f"http://[{ADDRESS}]:8333",
        bucket="bapo",
        access_key=SecretStr(KEYS["accessKey"]),
        secret_key=SecretStr(KEYS["secretKey"]),
    )
    base = {**os.environ, "BAPO_HOST": host, "BAPO_TOKEN": TOKEN, "BAPO_HOME": str(directory)}
    buffer = {"BAPO_BUFFER_URL": f"http://[{ADDRESS}]:8700"}

    def stores() -> bool:
        with suppress(ObjectStoreError):
            client = ObjectStore(store, retries=0)
            client.ensure_bucket()
            client.put("a/key", b"value")
            return client.keys("a/") == ["a/key"]
        return False

    with ExitStack() as running:

        def start(name: str, command: list[str], variables: dict[str, str]) -> None:
            log = directory / f"{name}.log"
            child = ChildProcess(command, environment={**base, **variables}, log=log)
            running.callback(child.stop)

        database = Postgres(running.enter_context(open_directory()), 5432, ADDRESS)
        database.create()
        database.start()
        running.callback(database.stop)
        start("s3", command, {})
        await_true(stores, "the object store works")
        services = {"BAPO_DATABASE_URL": database.url(), **store.environment()}
        subprocess.run(
            python_command("services.buffer.migrate"), env={**base, **services}, check=True
        )
        start("buffer", python_command("services.buffer.main"), {**services, "BAPO_PORT": "8700"})
        verifier = {"BAPO_PORT": "8701", "BAPO_VERIFIER_WORKERS": "1"}
        start("verifier", python_command("services.verifier.app"), verifier)
        watcher = python_command("services.rollout.run_watcher", "services.rollout.server")
        start("watcher", watcher, {**buffer, "BAPO_PORT": "8702"})
        await_true(health(8700, "/readyz"), "the buffer service is ready")
        await_true(health(8701), "the verifier answers")
        await_true(health(8702, "/readyz"), "the run watcher answers")
        client = BufferClient(buffer["BAPO_BUFFER_URL"], TOKEN)
        assert client.create_token("one", "read").name in [each.name for each in client.tokens()]


if __name__ == "__main__":
    main()
