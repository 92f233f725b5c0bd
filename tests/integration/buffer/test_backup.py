"""A backup restored as docs/operations.md describes gives the same answers."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import psycopg
import pytest

from services.buffer.api.client import BufferClient
from services.common.errors import ServiceError
from services.common.objectstore import ObjectStore
from services.stack.postgres import find_binaries
from services.stack.stack import Endpoints
from services.stack.supervisor import Supervisor
from tests.integration.support.driver import Driver, small_config

QUESTIONS = (
    "",
    "/steps",
    "/evaluations",
    "/difficulty/bins?step=2",
    "/difficulty/migration?before=1&after=4",
    "/prompts?order=hardest",
    "/buffers/hard",
    "/buffers/high_quality/events",
    "/batches/3",
    "/checkpoints/latest",
)


def test_a_restored_backup_gives_the_same_answers(
    stack: Endpoints, tmp_path: Path, reserved_port: int
) -> None:
    driver = Driver(stack, small_config("kept"))
    for step in range(1, 5):
        driver.run_step(step)
    driver.client.record_checkpoint(4, "c" * 64)

    binaries = find_binaries()
    sockets = parse_qs(urlsplit(stack.database_url).query)["host"][0]
    server = ["--host", sockets, "--username", "postgres"]
    dump = tmp_path / "bapo.dump"
    subprocess.run(
        [binaries / "pg_dump", *server, "--format=custom", "--file", dump, "postgres"], check=True
    )
    source = ObjectStore(stack.object_store)
    saved = tmp_path / "bucket"
    for key in source.keys("runs/kept/"):
        path = saved / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source._client.get_object(bucket_name="bapo", object_name=key).read())

    subprocess.run([binaries / "createdb", *server, "restored"], check=True)
    subprocess.run(
        [binaries / "pg_restore", *server, "--dbname=restored", "--no-owner", dump], check=True
    )
    settings = stack.object_store.model_copy(update={"bucket": "restored"})
    target = ObjectStore(settings)
    target.ensure_bucket()
    for path in saved.rglob("*.arrow"):
        target.put(str(path.relative_to(saved)), path.read_bytes())

    restored = dataclasses.replace(
        stack,
        database_url=stack.database_url.replace("/postgres?", "/restored?"),
        buffer_url=f"http://127.0.0.1:{reserved_port}",
        token="a token that was rotated",
    )
    environment = {
        **os.environ,
        **restored.environment(),
        "BAPO_S3_BUCKET": "restored",
        "BAPO_PORT": str(urlsplit(restored.buffer_url).port),
    }
    with Supervisor(tmp_path / "logs") as supervisor:
        supervisor.start_python("buffer", "services.buffer.main", environment)
        supervisor.wait_until(lambda: is_ready(restored), "the restored service", seconds=60)
        for question in QUESTIONS:
            assert answer(restored, question) == answer(stack, question), question
        group = driver.client.recorded_batch(3).members[0].group_id
        assert answer(restored, f"/groups/{group}") == answer(stack, f"/groups/{group}")
        # The dump holds the token of the first service, which the second one replaces by its own.
        tokens = BufferClient(restored.buffer_url, restored.token).tokens()
        assert [token.name for token in tokens].count("from the environment") == 1
        with pytest.raises(ServiceError, match="not known here, was revoked"):
            BufferClient(restored.buffer_url, stack.token).runs()
    admin = stack.database_url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute("drop database restored with (force)")


def is_ready(stack: Endpoints) -> bool:
    try:
        return httpx.get(f"{stack.buffer_url}/readyz", timeout=5).is_success
    except httpx.TransportError:
        return False


def answer(stack: Endpoints, question: str) -> object:
    url = f"{stack.buffer_url}/v1/runs/kept{question}"
    response = httpx.get(url, headers={"Authorization": f"Bearer {stack.token}"})
    assert response.status_code == 200, response.text
    return response.json()
