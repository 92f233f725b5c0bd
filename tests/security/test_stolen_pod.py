"""An attacker with what a pod of a run holds: the token of its process."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from services.buffer.api.client import BufferClient
from services.buffer.api.trajectories import encode_groups, encode_proximal
from services.buffer.api.wire import ReplicaHeartbeat
from services.common import layout
from services.common.errors import ServiceError
from services.common.objectstore import ObjectStore, files_of
from services.common.scopes import PROCESS_SCOPES, Scope
from services.rollout.api.addresses import ReplicaHosts
from services.rollout.api.wire import GenerateRequest, PromptRequest
from services.rollout.fleet import Fleet
from services.rollout.unfinished import UnfinishedGroups
from services.stack.stack import Endpoints
from services.trainer.nccl_broadcast import NcclBroadcaster
from tests.integration.support.driver import Driver, small_config, synthetic_group
from tests.security.conftest import MakeToken

READERS = {"read", "run", "pipeline"}
ANYONE = {*READERS, "replica", "collector", "trainer"}
RUN = "/v1/runs/{name}"
PERMITTED: dict[str, set[str]] = {
    "GET /v1/token": ANYONE,
    "GET /v1/runs": {*READERS, "replica", "collector"},
    f"GET {RUN}": ANYONE,
    f"GET {RUN}/target": {*READERS, "replica"},
    f"GET {RUN}/checkpoints": {*READERS, "collector"},
    f"GET {RUN}/checkpoints/latest": {*READERS, "trainer"},
    f"GET {RUN}/weights/{{version}}": {*READERS, "collector", "trainer"},
    f"GET {RUN}/evaluation-sets": {*READERS, "collector"},
    f"GET {RUN}/steps": {*READERS, "trainer"},
    f"GET {RUN}/replicas/credentials": {"collector", "trainer"},
    "POST /v1/images/missing": READERS,
    "POST /v1/runs": {"run", "pipeline"},
    "POST /v1/datasets/{dataset}": {"run", "pipeline"},
    "PUT /v1/images/{digest}": {"run", "pipeline"},
    "PUT /v1/configs/{name}": {"run"},
    "PUT /v1/reward-files/{digest}": {"run"},
    "GET /v1/reward-files/{digest}": {*READERS, "collector"},
    f"DELETE {RUN}": {"run"},
    f"PATCH {RUN}": {"run", "collector", "pipeline"},
    f"POST {RUN}/attempts": {"run", "trainer"},
    f"POST {RUN}/turn": {"run", "pipeline"},
    f"POST {RUN}/changes": {"run", "pipeline"},
    f"POST {RUN}/forks": {"run", "pipeline"},
    f"POST {RUN}/stop": {"run", "pipeline"},
    f"POST {RUN}/pause": {"run"},
    f"POST {RUN}/resume": {"run"},
    f"POST {RUN}/steps/{{step}}/prompts": {"collector"},
    f"POST {RUN}/steps/{{step}}/groups": {"collector"},
    f"POST {RUN}/steps/{{step}}/batch": {"trainer"},
    f"POST {RUN}/steps/{{step}}/proximal": {"trainer"},
    f"POST {RUN}/steps/{{step}}/commit": {"trainer"},
    f"PUT {RUN}/weights/{{version}}": {"trainer"},
    f"PUT {RUN}/checkpoints/{{step}}": {"trainer"},
    f"PUT {RUN}/replicas/{{replica}}": {"replica"},
    f"POST {RUN}/spans": {"replica", "collector", "trainer"},
    f"POST {RUN}/rewind": set(),
    "POST /v1/tokens": set(),
    "GET /v1/tokens": set(),
    "DELETE /v1/tokens/{token_id}": set(),
    "POST /v1/gc": set(),
}
"""Scopes beside `admin` that may call each route. Every other GET is for readers alone."""


def operations(stack: Endpoints) -> dict[str, set[str]]:
    """Returns the scopes that the document states for each operation."""
    paths = httpx.get(f"{stack.buffer_url}/openapi.json").json()["paths"]
    return {
        f"{method.upper()} {path}": set(operation["x-scopes"])
        for path, methods in paths.items()
        for method, operation in methods.items()
        if path.startswith("/v1")
    }


def test_every_route_is_open_to_the_scopes_that_are_listed_here(
    stack: Endpoints, make_token: MakeToken
) -> None:
    """A new route must be listed, or be a GET for readers."""
    scopes: list[Scope] = ["read", "run", *PROCESS_SCOPES]
    # Tokens of a run that does not exist change nothing.
    tokens = {scope: make_token(scope, run="no-such-run") for scope in scopes}
    found = operations(stack)
    assert set(PERMITTED) <= set(found)
    with httpx.Client(base_url=stack.buffer_url, timeout=60) as client:
        for operation, stated in found.items():
            method, path = operation.split()
            known = PERMITTED.get(operation, READERS if method == "GET" else None)
            assert known is not None, f"who may call {operation}?"
            assert stated == {*known, "admin"}, operation
            for scope, token in tokens.items():
                headers = {"Authorization": f"Bearer {token}"}
                answer = client.request(method, path, headers=headers)
                refused = answer.status_code == 403 and "needs scope" in answer.json()["detail"]
                assert refused == (scope not in known), (operation, scope, answer.text)


# ---- replicas -----------------------------------------------------------------------------------


@asynccontextmanager
async def recording(host: str) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Listens on a free port of a host; yields its address, and the heads of all requests."""
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, host)
    async with server:
        yield f"http://{host}:{server.sockets[0].getsockname()[1]}", heads


@pytest.fixture
def served(stack: Endpoints, tmp_path: Path) -> tuple[Driver, dict[str, Any]]:
    """A run with published weights, and what a replica that serves them would report."""
    driver = Driver(stack, small_config(f"served-{tmp_path.name.replace('_', '-')[-20:].lower()}"))
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "w").write_text("w")
    prefix = layout.weights(driver.client.run, 1, driver.client.attempt)
    digest = ObjectStore(stack.object_store).put_files(prefix, files_of(tmp_path / "weights"))
    driver.client.publish_weights(1, digest)
    return driver, {"state": "serving", "loaded_version": 1, "manifest_digest": digest}


def test_the_collector_sends_no_token_of_its_own_and_nothing_to_foreign_addresses(
    served: tuple[Driver, dict[str, Any]], stack: Endpoints, make_token: MakeToken
) -> None:
    """The attacker reports replicas: one elsewhere, and one in place of a replica here."""
    driver, report = served
    run = driver.config.name
    replica = BufferClient(stack.buffer_url, make_token("replica", run=run), run=run)
    secret = make_token("collector", run=run)
    collector = BufferClient(stack.buffer_url, secret, run=run)
    request = GenerateRequest(
        temperature=1,
        max_tokens=1,
        group_size=1,
        policy_version=1,
        manifest_digest=report["manifest_digest"],
        prompts=[PromptRequest(prompt_token_ids=[1], seed=1)],
    )

    async def work() -> tuple[list[bytes], list[bytes]]:
        async with (
            recording("127.0.0.2") as (foreign, sent_there),
            recording("127.0.0.1") as (local, sent_here),
        ):
            for name, url in (("evil", foreign), ("local", local)):
                heartbeat = ReplicaHeartbeat(url=url, credential=f"credential-of-{name}", **report)
                await asyncio.to_thread(replica.report_replica, name, heartbeat)
            fleet = Fleet(collector, ReplicaHosts("127.0.0.1"))
            async with fleet.watched():
                generating = asyncio.create_task(
                    fleet.generate(
                        request, lambda _: None, indices=[0], unfinished=UnfinishedGroups(1)
                    )
                )
                async with asyncio.timeout(60):
                    while not sent_here:
                        await asyncio.sleep(0.01)
                generating.cancel()
            return sent_there, sent_here

    sent_there, sent_here = asyncio.run(work())
    assert sent_there == []
    for head in sent_here:
        assert b"authorization: bearer credential-of-local" in head.lower()
        assert secret.encode() not in head
        assert stack.token.encode() not in head
    driver.client.stop()


def test_the_trainer_offers_weights_to_no_foreign_address(
    served: tuple[Driver, dict[str, Any]], stack: Endpoints, make_token: MakeToken
) -> None:
    driver, report = served
    run = driver.config.name
    replica = BufferClient(stack.buffer_url, make_token("replica", run=run), run=run)
    trainer = BufferClient(stack.buffer_url, make_token("trainer", run=run), run=run)

    class Never:
        def unique_id(self) -> bytes:
            return b"id"

        def send(self, *_: object) -> None:
            raise AssertionError("weights were sent")

        abort = send

    with socket.create_server(("127.0.0.2", 0)) as listener:
        url = f"http://127.0.0.2:{listener.getsockname()[1]}"
        replica.report_replica("evil", ReplicaHeartbeat(url=url, credential="x", **report))
        sender = NcclBroadcaster(trainer, ReplicaHosts("127.0.0.1,localhost"), Never())
        assert sender.send(2, "0" * 64, {"w": torch.ones(1)}) == []
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()
    driver.client.stop()


@pytest.mark.parametrize(
    ("url", "hosts", "believed"),
    [
        ("http://127.0.0.1:1", "127.0.0.1,localhost", True),
        ("http://bapo-rollout-0.bapo-rollout.ml.svc:8702", ".bapo-rollout.ml.svc", True),
        ("http://BAPO-rollout-0.bapo-rollout.ml.svc:8702", ".bapo-rollout.ml.svc", True),
        ("http://evil.example", ".bapo-rollout.ml.svc", False),
        ("http://bapo-rollout.ml.svc.evil.example", ".bapo-rollout.ml.svc", False),
        ("http://evilbapo-rollout.ml.svc", ".bapo-rollout.ml.svc", False),
        ("http://127.0.0.1@evil.example", "127.0.0.1", False),
        ("http://evil.example#.bapo-rollout.ml.svc", ".bapo-rollout.ml.svc", False),
        ("http://evil.example?.bapo-rollout.ml.svc", ".bapo-rollout.ml.svc", False),
        ("http://evil.example\\.bapo-rollout.ml.svc", ".bapo-rollout.ml.svc", False),
        ("http://169.254.169.254", "127.0.0.1", False),
        ("http://[::1", "::1", False),
    ],
)
def test_the_host_of_an_address_decides_and_not_its_spelling(
    url: str, hosts: str, believed: bool
) -> None:
    assert ReplicaHosts(hosts).admit("replica", url) is believed


def test_credentials_of_replicas_are_for_their_callers_alone(
    victim: Driver, make_token: MakeToken, call: Callable[..., httpx.Response]
) -> None:
    run = victim.config.name
    heartbeat = ReplicaHeartbeat(
        url="http://127.0.0.1:1", state="starting", loaded_version=0, credential="of-one-replica"
    )
    victim.client.report_replica("seen", heartbeat)
    for scope in ("read", "run", "pipeline"):
        answer = call(make_token(scope), "GET", f"/runs/{run}/replicas")
        assert answer.status_code == 200
        assert "of-one-replica" not in answer.text
    answer = call(make_token("collector", run=run), "GET", f"/runs/{run}/replicas/credentials")
    assert "of-one-replica" in answer.text


# ---- checkpoints --------------------------------------------------------------------------------


def test_a_recorded_checkpoint_is_not_replaced(
    victim: Driver, stack: Endpoints, make_token: MakeToken
) -> None:
    run = victim.config.name
    attacker = BufferClient(stack.buffer_url, make_token("trainer", run=run), run=run, attempt=1)
    victim.client.record_checkpoint(1, "a" * 64)
    victim.client.record_checkpoint(1, "a" * 64)  # The first answer was lost.
    with pytest.raises(ServiceError, match=r"step 1 .* has a checkpoint with another digest"):
        attacker.record_checkpoint(1, "b" * 64)
    recorded = victim.client.latest_checkpoint()
    assert recorded is not None
    assert recorded.manifest_digest == "a" * 64


def test_a_trainer_learns_that_its_checkpoint_was_anticipated(
    victim: Driver, stack: Endpoints, make_token: MakeToken
) -> None:
    run = victim.config.name
    attacker = BufferClient(stack.buffer_url, make_token("trainer", run=run), run=run, attempt=1)
    attacker.record_checkpoint(2, "b" * 64)
    with pytest.raises(ServiceError, match=r"find out who has a token .*bapo token revoke"):
        victim.client.record_checkpoint(2, "a" * 64)


# ---- trajectories -------------------------------------------------------------------------------


def inflate(body: bytes, length: int) -> bytes:
    """Has the buffer of this length claim that it is 3 GB long once it is decompressed."""
    stored = struct.pack("<q", length)
    assert stored in body
    return body.replace(stored, struct.pack("<q", 3 << 30))


@pytest.mark.parametrize("route", ["groups", "proximal"])
def test_what_takes_much_memory_is_refused_before_it_is_decompressed(
    victim: Driver, make_token: MakeToken, call: Callable[..., httpx.Response], route: str
) -> None:
    """51 KB with zstd take 1.5 GB of memory."""
    run = victim.config.name
    token = make_token("collector" if route == "groups" else "trainer", run=run)
    if route == "groups":
        group = synthetic_group("uid", 1, size=1, rng=random.Random(1))
        group.responses[0] = replace(group.responses[0], text="a" * 100_000)
        body = inflate(encode_groups([group]), 100_000)
    else:
        body = inflate(encode_proximal({1: [[0.0] * 20_000]}), 80_000)
    answer = call(token, "POST", f"/runs/{run}/steps/3/{route}", content=body)
    assert answer.status_code == 400, answer.text
    assert "bytes of memory, more than 1073741824" in answer.json()["detail"]


@pytest.mark.parametrize("route", ["groups", "proximal"])
def test_the_run_is_looked_up_before_a_body_is_decoded(
    make_token: MakeToken, call: Callable[..., httpx.Response], route: str
) -> None:
    token = make_token("collector" if route == "groups" else "trainer")
    answer = call(token, "POST", f"/runs/no-such-run/steps/3/{route}", content=b"not Arrow")
    assert answer.status_code == 404, answer.text


def test_damaged_metadata_are_an_error_of_the_sender(
    victim: Driver, make_token: MakeToken, call: Callable[..., httpx.Response]
) -> None:
    run = victim.config.name
    token = make_token("collector", run=run)
    body = encode_groups([synthetic_group("uid", 1, size=2, rng=random.Random(1))])
    rng = random.Random(2)
    for _ in range(100):
        damaged = bytearray(body)
        for _ in range(3):
            damaged[rng.randrange(1500)] = rng.randrange(256)
        answer = call(token, "POST", f"/runs/{run}/steps/3/groups", content=bytes(damaged))
        assert answer.status_code == 400, answer.text
