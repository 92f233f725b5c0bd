"""Replicas and the fleet on the real buffer service and object store; only the engine is a fake.

The fake engine answers with tokens that encode the weights, the prompt and the sample, and fails in
the ways that a test asks for.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import queue
import random
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import torch
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor

from bapo_core.errors import BapoError
from services.buffer.api import wire as buffer_wire
from services.buffer.api.wire import StoredVersion
from services.common import layout
from services.common.errors import ServiceUnavailable
from services.common.objectstore import ObjectStore, ObjectStoreError, files_of
from services.rollout import fleet as fleet_module
from services.rollout import offers as offers_module
from services.rollout import replica as replica_module
from services.rollout.api.addresses import ReplicaHosts
from services.rollout.api.offers import Parameter, WeightOffer
from services.rollout.api.wire import (
    DiscardedTokens,
    Generated,
    GeneratedGroup,
    GeneratedResponse,
    GeneratedTokens,
    GenerateRequest,
    PromptRequest,
    StartedResponse,
)
from services.rollout.driver import AcceptOffer
from services.rollout.errors import EngineFaulty, EngineLost, ModelLoadError, PromptsFailed
from services.rollout.fleet import Fleet
from services.rollout.offers import PendingOffer
from services.rollout.replica import Replica
from services.rollout.server import create_app
from services.rollout.unfinished import UnfinishedGroups
from services.rollout.weights import WeightCache
from services.stack.stack import Endpoints
from services.trainer import nccl_broadcast as broadcast_module
from services.trainer.nccl import NcclError
from services.trainer.nccl_broadcast import NcclBroadcaster
from tests.integration.support.driver import Driver, small_config

G = 3


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens all intervals and time-outs."""
    monkeypatch.setattr(replica_module, "REPORT_INTERVAL_S", 0.1)
    monkeypatch.setattr(replica_module, "CHECK_INTERVAL_S", 0.1)
    monkeypatch.setattr(replica_module, "VERSION_TIMEOUT_S", 5.0)
    monkeypatch.setattr(replica_module, "FIRST_RETRY_S", 0.05)
    monkeypatch.setattr(fleet_module, "POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr(fleet_module, "HEARTBEAT_TIMEOUT_S", 1.5)


class FakeNccl:
    """Stands in for NCCL: ranks meet by the unique id, and a send waits until it is received."""

    def __init__(self, *, hangs: bool = False) -> None:
        """hangs: a send cannot be aborted."""
        self.hangs = hangs
        self.sent: dict[bytes, queue.SimpleQueue[list[Tensor]]] = {}
        self.ended: dict[bytes, threading.Event] = {}
        self.aborted: set[bytes] = set()

    def unique_id(self) -> bytes:
        unique_id = secrets.token_bytes(128)
        self.sent[unique_id], self.ended[unique_id] = queue.SimpleQueue(), threading.Event()
        return unique_id

    def send(self, unique_id: bytes, receivers: int, tensors: Sequence[Tensor]) -> None:
        assert receivers == 2
        self.sent[unique_id].put(list(tensors))
        self.ended[unique_id].wait()
        if unique_id in self.aborted:
            raise NcclError("given up")

    def receive(self, unique_id: bytes) -> list[Tensor]:
        tensors = self.sent[unique_id].get(timeout=200)
        self.ended[unique_id].set()
        return tensors

    def abort(self, unique_id: bytes) -> None:
        if not self.hangs:
            self.aborted.add(unique_id)
            self.ended[unique_id].set()


class FakeEngine:
    """An `EngineDriver` that answers (version, prompt, sample), one prompt after the other."""

    prompts_per_request = 1

    def __init__(self, nccl: FakeNccl | None = None, **faults: Any) -> None:
        self.faults, self.nccl = faults, nccl
        self.loaded: list[int] = []
        self.contents = ""
        self.answered = 0
        self.at_once = 0
        self.most_at_once = 0
        self.hold = asyncio.Event()
        self.hold.set()
        self.lost = False

    async def load(self, directory: Path, version: int) -> None:
        assert self.at_once == 0, "weights were loaded while groups were generated"
        self.contents = (directory / "weights").read_text()
        if self.contents == "bad":
            raise ModelLoadError(f"{directory}: bad weights; publish others")
        self.lost = False
        self.loaded.append(version)

    async def prepare(self, directory: Path) -> None:
        raise ModelLoadError(f"{directory}: bad weights; publish others")

    async def receive(self, offer: WeightOffer, accept: AcceptOffer) -> bool:
        assert self.at_once == 0, "weights were received while groups were generated"
        assert self.nccl is not None
        if self.faults.pop("another_model", False) or not accept(2):
            return False
        if self.faults.pop("breaks_off", False):
            raise EngineLost("the broadcast broke off")
        tensors = await asyncio.to_thread(self.nccl.receive, base64.b64decode(offer.unique_id))
        self.contents = "sent " + " ".join(
            f"{parameter.name}={tensor.tolist()}"
            for parameter, tensor in zip(offer.parameters, tensors, strict=True)
        )
        self.loaded.append(offer.policy_version)
        return True

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GeneratedGroup]:
        for index, prompt in enumerate(request.prompts):
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            try:
                await self.hold.wait()
                self._fail()
            finally:
                self.at_once -= 1
            self.answered += 1
            version = request.policy_version + self.faults.get("version", 0)
            yield GeneratedGroup(
                index=index,
                policy_version=version,
                refused=self.faults.get("refused", ""),
                responses=[
                    GeneratedResponse(
                        token_ids=[self.loaded[-1], *prompt.prompt_token_ids, sample],
                        logprobs=[-1.0] * (len(prompt.prompt_token_ids) + 2),
                        finish_reason="stop",
                    )
                    for sample in range(request.group_size - self.faults.get("fewer", 0))
                ],
            )

    def _fail(self) -> None:
        if (error := self.faults.pop("raises_once", None)) is not None:
            raise error
        if self.lost or self.answered == self.faults.get("dies_after", -1):
            self.lost = True
            self.faults.pop("dies_after", None)
            raise EngineLost("the engine crashed")

    async def check(self) -> None:
        if self.lost:
            raise EngineLost("the engine has crashed")

    async def metrics(self) -> str:
        return "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 2.0\n"

    async def close(self) -> None:
        self.lost = True


class StreamingEngine(FakeEngine):
    """A `FakeEngine` that streams tokens one by one, and draws others each time it is asked.

    Response i to a prompt has i + 3 tokens. It streams `before_hold` tokens of each response, and
    the rest when `hold` is set.
    """

    def __init__(self, before_hold: int = 0, **faults: Any) -> None:
        super().__init__(**faults)
        self.before_hold = before_hold
        self.continued: list[list[StartedResponse]] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Generated]:  # type: ignore[override]
        for index, prompt in enumerate(request.prompts):
            self.continued.append(prompt.started)
            empty = [StartedResponse(token_ids=[], logprobs=[]) for _ in range(request.group_size)]
            responses = [response.model_copy(deep=True) for response in prompt.started or empty]
            for _ in range(self.before_hold):
                for tokens in self._next_tokens(request, index, responses):
                    yield tokens
            await self.hold.wait()
            if self.faults.pop("void", False):
                yield DiscardedTokens(
                    index=index, policy_version=request.policy_version, discarded="other weights"
                )
                raise EngineLost("the engine had other weights")
            while tokens := self._next_tokens(request, index, responses):
                for line in tokens:
                    yield line
            yield GeneratedGroup(
                index=index,
                policy_version=request.policy_version,
                responses=[GeneratedResponse(**response.model_dump()) for response in responses],
            )

    def _next_tokens(
        self, request: GenerateRequest, index: int, responses: list[StartedResponse]
    ) -> list[GeneratedTokens]:
        """Samples a token of each unfinished response."""
        lines = []
        for number, response in enumerate(responses):
            start = len(response.token_ids)
            if response.finish_reason is None:
                response.token_ids.append(secrets.randbelow(1 << 20))
                response.logprobs.append(-secrets.randbelow(1 << 10) / 64)
                response.finish_reason = "stop" if start + 1 == number + 3 else None
                lines.append(
                    GeneratedTokens(
                        index=index,
                        policy_version=request.policy_version + self.faults.get("version", 0),
                        response=number + self.faults.get("response", 0),
                        start=start + self.faults.get("start", 0),
                        token_ids=response.token_ids[start:],
                        logprobs=response.logprobs[start:],
                        finish_reason=response.finish_reason,
                    )
                )
        return lines


class Unreachable:
    """The buffer service's client on a network that has failed."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> Any:
            raise ServiceUnavailable("the network is down")

        return call


CREDENTIAL = "the-credential-of-a-replica"
HOSTS = ReplicaHosts("127.0.0.1")


@dataclass
class Testbed:
    """A run, and replicas of it that run in this process behind real HTTP."""

    __test__ = False

    driver: Driver
    store: ObjectStore
    scratch: Path
    replicas: dict[str, tuple[Replica, asyncio.Task[None], uvicorn.Server]] = field(
        default_factory=dict
    )

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {CREDENTIAL}", "Content-Type": "application/json"}

    def publish(self, version: int, contents: str) -> StoredVersion:
        directory = self.scratch / f"published-{version}"
        directory.mkdir(exist_ok=True)
        (directory / "weights").write_text(contents)
        client = self.driver.client
        prefix = layout.weights(client.run, version, client.attempt)
        digest = self.store.put_files(prefix, files_of(directory))
        return client.publish_weights(version, digest)

    async def start(self, name: str, engine: FakeEngine) -> Replica:
        """Starts a replica, which takes offers if its engine has NCCL."""
        pending_offer = None if engine.nccl is None else PendingOffer()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        replica = Replica(
            engine,
            self.driver.client,
            WeightCache(self.store, self.scratch / name),
            name=name,
            url=f"http://127.0.0.1:{port}",
            credential=CREDENTIAL,
            pending_offer=pending_offer,
        )
        app = create_app(replica, engine, CREDENTIAL, pending_offer)
        server = uvicorn.Server(
            uvicorn.Config(app, port=port, log_config=None, timeout_graceful_shutdown=1)
        )
        serving = asyncio.create_task(server.serve())
        self.replicas[name] = (replica, serving, server)
        return replica

    async def stop(self, name: str) -> None:
        _, serving, server = self.replicas.pop(name)
        server.should_exit = True
        await serving

    @asynccontextmanager
    async def closing(self) -> AsyncIterator[Fleet]:
        fleet = Fleet(self.driver.client, HOSTS)
        try:
            async with fleet.watched():
                yield fleet
        finally:
            for name in list(self.replicas):
                await self.stop(name)

    def seen(self, name: str) -> buffer_wire.ReplicaView:
        return {view.name: view for view in self.driver.client.replicas()}[name]

    async def until(self, name: str, condition: Callable[[buffer_wire.ReplicaView], bool]) -> None:
        """Waits until the replica's report meets the condition."""
        async with asyncio.timeout(200):
            while True:
                views = await asyncio.to_thread(self.driver.client.replicas)
                if any(view.name == name and condition(view) for view in views):
                    return
                await asyncio.sleep(0.02)


@pytest.fixture
def testbed(stack: Endpoints, tmp_path: Path, request: pytest.FixtureRequest) -> Testbed:
    name = "".join(c if c.isalnum() else "-" for c in request.node.name.lower())[:60].rstrip("-")
    return Testbed(Driver(stack, small_config(name)), ObjectStore(stack.object_store), tmp_path)


def set_target(testbed: Testbed, step: int) -> int:
    """Asks for the prompts of a step, which sets the target version, and returns that version."""
    return testbed.driver.client.step_prompts(step).policy_version


def request_for(stored: StoredVersion, prompts: int = 12) -> GenerateRequest:
    return GenerateRequest(
        policy_version=stored.number,
        manifest_digest=stored.manifest_digest,
        temperature=1.0,
        max_tokens=8,
        group_size=G,
        prompts=[PromptRequest(prompt_token_ids=[100 + n], seed=n) for n in range(prompts)],
    )


async def collect(fleet: Fleet, request: GenerateRequest) -> dict[int, GeneratedGroup]:
    """Collects all groups; checks that none comes twice and that each is complete and right."""
    groups: dict[int, GeneratedGroup] = {}

    def on_group(group: GeneratedGroup) -> None:
        assert group.index not in groups
        groups[group.index] = group

    async with asyncio.timeout(300):
        await fleet.generate(
            request,
            on_group,
            indices=range(len(request.prompts)),
            unfinished=UnfinishedGroups(request.group_size),
        )
    assert groups.keys() == set(range(len(request.prompts)))
    for index, group in groups.items():
        assert [response.token_ids for response in group.responses] == [
            [request.policy_version, 100 + index, sample] for sample in range(G)
        ]
    return groups


def run(work: Awaitable[None]) -> None:
    async def main() -> None:
        await work

    asyncio.run(main())


async def stream(
    fleet: Fleet, request: GenerateRequest, unfinished: UnfinishedGroups
) -> dict[int, GeneratedGroup]:
    """Collects all groups of a request whose tokens are streamed."""
    groups: dict[int, GeneratedGroup] = {}
    async with asyncio.timeout(300):
        await fleet.generate(
            request.model_copy(update={"stream_every": 1}),
            lambda group: groups.update({group.index: group}),
            indices=range(len(request.prompts)),
            unfinished=unfinished,
        )
    return groups


async def generate_on_two(
    testbed: Testbed,
    first: StreamingEngine,
    second: StreamingEngine,
    *,
    begun: Callable[[UnfinishedGroups], bool],
    hand_over: Callable[[UnfinishedGroups], Awaitable[None]],
) -> tuple[GeneratedGroup, UnfinishedGroups]:
    """Has the first replica begin a group, and starts the second; returns the group.

    hand_over: called when `begun` holds and both replicas serve, to end or free the first.
    """
    first.hold.clear()
    async with testbed.closing() as fleet:
        await testbed.start("first", first)
        request = request_for(testbed.publish(1, "one"), prompts=1)
        set_target(testbed, 1)
        unfinished = UnfinishedGroups(G)
        generating = asyncio.create_task(stream(fleet, request, unfinished))
        async with asyncio.timeout(300):
            while not begun(unfinished):
                await asyncio.sleep(0.02)
            await testbed.start("second", second)
            await testbed.until("second", lambda view: view.loaded_version == 1)
            await hand_over(unfinished)
            return (await generating)[0], unfinished


def test_another_replica_continues_responses_under_the_same_version(testbed: Testbed) -> None:
    async def work() -> None:
        first, second = StreamingEngine(before_hold=3), StreamingEngine()
        begun: list[StartedResponse] = []

        async def stop_first(unfinished: UnfinishedGroups) -> None:
            begun.extend(unfinished.started(0))
            await testbed.stop("first")

        group, _ = await generate_on_two(
            testbed,
            first,
            second,
            begun=lambda unfinished: unfinished.token_count == 3 * G,
            hand_over=stop_first,
        )
        assert [response.finish_reason for response in begun] == ["stop", None, None]
        assert first.continued == [[]]
        assert second.continued == [begun]
        assert [len(response.token_ids) for response in group.responses] == [3, 4, 5]
        for response, beginning in zip(group.responses, begun, strict=True):
            assert response.token_ids[:3] == beginning.token_ids
            assert response.logprobs[:3] == beginning.logprobs
        assert group.policy_version == 1

    run(work())


def test_void_tokens_are_not_continued(testbed: Testbed) -> None:
    """The engine finds at the end that its tokens were of other weights."""

    async def work() -> None:
        faulty, sound = StreamingEngine(before_hold=2, void=True), StreamingEngine()

        async def free_faulty(_: UnfinishedGroups) -> None:
            faulty.hold.set()

        group, unfinished = await generate_on_two(
            testbed,
            faulty,
            sound,
            begun=lambda unfinished: unfinished.token_count == 2 * G,
            hand_over=free_faulty,
        )
        assert unfinished.voided == 1
        assert [*faulty.continued[1:], *sound.continued] == [[]], "one generation from the start"
        assert [response.token_ids for response in group.responses] == [
            response.token_ids for response in unfinished.started(0)
        ]

    run(work())


@pytest.mark.parametrize("fault", ["version", "response", "start"])
def test_tokens_out_of_place_are_not_taken(testbed: Testbed, fault: str) -> None:
    """They are from another version, or do not continue a response of the request."""

    async def work() -> None:
        bad, good = StreamingEngine(before_hold=1, **{fault: G}), StreamingEngine()

        async def mend_bad(_: UnfinishedGroups) -> None:
            bad.faults[fault] = 0
            bad.hold.set()

        group, unfinished = await generate_on_two(
            testbed, bad, good, begun=lambda _: bool(bad.continued), hand_over=mend_bad
        )
        assert not any(any(started) for started in bad.continued + good.continued)
        assert [response.token_ids for response in group.responses] == [
            response.token_ids for response in unfinished.started(0)
        ]

    run(work())


@pytest.mark.parametrize(("prompts_per_request", "generated"), [(1, 2), (0, 6)])
def test_a_request_that_is_generated_as_a_whole_is_not_cut(
    testbed: Testbed, prompts_per_request: int, generated: int
) -> None:
    async def work() -> None:
        engine = FakeEngine()
        engine.prompts_per_request = prompts_per_request
        async with testbed.closing() as fleet:
            await testbed.start("r", engine)
            request = request_for(testbed.publish(1, "one"), prompts=6)
            set_target(testbed, 1)
            received: list[int] = []
            async with asyncio.timeout(300):
                await fleet.generate(
                    request,
                    lambda group: received.append(group.index),
                    indices={2, 5},
                    unfinished=UnfinishedGroups(request.group_size),
                )
            assert sorted(received) == [2, 5]
            assert engine.answered == generated

    run(work())


# ---- the target version -------------------------------------------------------------------------


def test_a_replica_follows_the_target_version(testbed: Testbed) -> None:
    async def work() -> None:
        engine = FakeEngine()
        async with testbed.closing() as fleet:
            replica = await testbed.start("r", engine)
            await testbed.until("r", lambda view: view.state == "starting")
            assert not replica.ready()
            first = testbed.publish(1, "one")
            assert set_target(testbed, 1) == 1
            await testbed.until("r", lambda view: view.manifest_digest == first.manifest_digest)
            assert replica.ready()
            await collect(fleet, request_for(first))
            testbed.driver.run_step(1)
            second = testbed.publish(2, "two")
            assert set_target(testbed, 2) == 2
            await testbed.until("r", lambda view: view.loaded_version == 2)
            await collect(fleet, request_for(second))
            assert engine.loaded == [1, 2]
            assert engine.contents == "two"
            # Versions that cannot become the target again are deleted.
            assert sorted(path.name[:2] for path in (testbed.scratch / "r").iterdir()) == ["v2"]

    run(work())


def test_the_newest_version_is_fetched_before_it_is_the_target(testbed: Testbed) -> None:
    async def work() -> None:
        async with testbed.closing():
            await testbed.start("r", FakeEngine())
            first = testbed.publish(1, "one")
            set_target(testbed, 1)
            await testbed.until("r", lambda view: view.manifest_digest == first.manifest_digest)
            testbed.driver.run_step(1)
            second = testbed.publish(2, "two")
            fetched = testbed.scratch / "r" / f"v2-{second.manifest_digest[:16]}" / "weights"
            async with asyncio.timeout(200):
                while not fetched.exists():
                    await asyncio.sleep(0.02)
            assert testbed.seen("r").loaded_version == 1

    run(work())


def test_a_replica_that_starts_serves_the_newest_version_until_its_target_is_published(
    testbed: Testbed,
) -> None:
    """A replica that serves a version already loads no other one before its target."""

    async def work() -> None:
        first, second = FakeEngine(), FakeEngine()
        async with testbed.closing() as fleet:
            testbed.publish(1, "one")
            testbed.driver.run_step(1)
            assert set_target(testbed, 2) == 2
            replica = await testbed.start("first", first)
            await testbed.until("first", lambda view: view.loaded_version == 1)
            assert not replica.ready()
            two = testbed.publish(2, "two")
            await testbed.until("first", lambda view: view.loaded_version == 2)
            assert replica.ready()
            await collect(fleet, request_for(two))
            testbed.driver.run_step(2)
            testbed.driver.run_step(3)
            assert set_target(testbed, 4) == 4
            testbed.publish(3, "three")
            await testbed.start("second", second)
            await testbed.until("second", lambda view: view.loaded_version == 3)
            testbed.publish(4, "four")
            for name in ("first", "second"):
                await testbed.until(name, lambda view: view.loaded_version == 4)
            assert (first.loaded, second.loaded) == ([1, 2, 4], [3, 4])

    run(work())


def test_weights_wait_for_groups_and_requests_wait_for_weights(testbed: Testbed) -> None:
    """Nothing generates while weights are loaded; the fake engine asserts that."""

    async def work() -> None:
        engine = FakeEngine()
        async with testbed.closing() as fleet:
            await testbed.start("r", engine)
            first = testbed.publish(1, "one")
            set_target(testbed, 1)
            engine.hold.clear()
            earlier = asyncio.create_task(collect(fleet, request_for(first)))
            while not engine.at_once:
                await asyncio.sleep(0.01)
            testbed.driver.run_step(1)
            second = testbed.publish(2, "two")
            set_target(testbed, 2)
            later = asyncio.create_task(collect(fleet, request_for(second)))
            await asyncio.sleep(0.3)  # it must not load in the meantime
            assert engine.loaded == [1]
            engine.hold.set()
            await asyncio.gather(earlier, later)
            assert engine.loaded == [1, 2]

    run(work())


def test_a_version_published_again_with_other_bytes_is_loaded(testbed: Testbed) -> None:
    """After a rewind the same number may be published with other bytes."""

    async def work() -> None:
        engine = FakeEngine()
        async with testbed.closing() as fleet:
            await testbed.start("r", engine)
            testbed.publish(1, "one")
            set_target(testbed, 1)
            testbed.driver.run_step(1)
            old = testbed.publish(2, "two")
            set_target(testbed, 2)
            await testbed.until("r", lambda view: view.manifest_digest == old.manifest_digest)
            await asyncio.to_thread(testbed.driver.client.rewind, 0)
            testbed.driver.run_step(1)
            new = testbed.publish(2, "two, but other bytes")
            set_target(testbed, 2)
            await collect(fleet, request_for(new))
            assert engine.contents == "two, but other bytes"
            url = testbed.seen("r").url
            async with httpx.AsyncClient(timeout=200) as client:
                answer = await client.post(
                    f"{url}/v1/generate",
                    content=request_for(old).model_dump_json(),
                    headers=testbed.headers,
                )
            assert answer.status_code == 409
            assert "version 2 is not served here" in answer.json()["detail"]

    run(work())


# ---- failures of weights ------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["other bytes", "missing", "bad weights"])
def test_weights_that_fail_to_load_are_retried(testbed: Testbed, damage: str) -> None:
    async def work() -> None:
        async with testbed.closing() as fleet:
            engine = FakeEngine()
            await testbed.start("r", engine)
            stored = testbed.publish(1, "bad" if damage == "bad weights" else "one")
            key = f"{stored.uri}/weights"
            if damage == "other bytes":
                testbed.store.put(key, b"eno")
            elif damage == "missing":
                testbed.store.delete([key])
            set_target(testbed, 1)
            await testbed.until("r", lambda view: view.state == "failing")
            view = testbed.seen("r")
            details = {
                "other bytes": "digest",
                "missing": "NoSuchKey",
                "bad weights": "bad weights",
            }
            assert details[damage] in view.detail
            assert view.loaded_version == 0
            assert engine.loaded == []
            if damage == "bad weights":
                await asyncio.to_thread(testbed.driver.client.rewind, 0)
                return
            testbed.store.put(key, b"one")
            await collect(fleet, request_for(stored))

    run(work())


def test_an_interrupted_fetch_goes_on_where_it_ended(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = testbed.scratch / "large"
    directory.mkdir()
    contents = bytes(range(256)) * 40_000
    (directory / "shard").write_bytes(contents)
    digest = testbed.store.put_files("runs/x/weights/v1", files_of(directory))
    stored = StoredVersion(number=1, uri="runs/x/weights/v1", manifest_digest=digest)
    cache = WeightCache(testbed.store, testbed.scratch / "cache")
    place = cache._place(stored)
    place.mkdir(parents=True)
    (place / "shard.part").write_bytes(contents[:4_000_000])
    offsets = []
    get_object = testbed.store._client.get_object

    def counted(*arguments: Any, **options: Any) -> Any:
        offsets.append(options.get("offset"))
        return get_object(*arguments, **options)

    monkeypatch.setattr(testbed.store._client, "get_object", counted)
    assert (cache.fetch(stored) / "shard").read_bytes() == contents
    assert 4_000_000 in offsets
    # Another process verifies what an earlier one left, and fetches torn files again.
    offsets.clear()
    (place / "shard").write_bytes(b"torn" + contents[4:])
    assert (WeightCache(testbed.store, testbed.scratch / "cache").fetch(stored) / "shard").exists()
    assert (place / "shard").read_bytes() == contents
    # A damaged partial file is fetched again from its beginning.
    cache.prune([])
    place.mkdir(parents=True)
    (place / "shard.part").write_bytes(b"x" * 4_000_000)
    with pytest.raises(ObjectStoreError, match="do not have the digest"):
        cache.fetch(stored)
    assert (cache.fetch(stored) / "shard").read_bytes() == contents


# ---- failures of replicas -----------------------------------------------------------------------


def test_work_is_shared_and_bounded(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "PROMPTS_IN_FLIGHT", 5)

    async def work() -> None:
        engines = [FakeEngine(), FakeEngine()]
        async with testbed.closing() as fleet:
            stored = testbed.publish(1, "one")
            set_target(testbed, 1)
            for number, engine in enumerate(engines):
                await testbed.start(f"r{number}", engine)
            for number in range(2):
                await testbed.until(f"r{number}", lambda view: view.loaded_version == 1)
            await collect(fleet, request_for(stored, 1))  # the fleet has seen at least one of them
            await asyncio.sleep(0.2)
            for engine in engines:
                engine.hold.clear()
                engine.answered = 0
            collecting = asyncio.create_task(collect(fleet, request_for(stored, 40)))
            while [engine.at_once for engine in engines] != [5, 5]:
                await asyncio.sleep(0.01)
            for engine in engines:
                engine.hold.set()
            await collecting
            assert [engine.most_at_once for engine in engines] == [5, 5]
            assert sum(engine.answered for engine in engines) == 40
            assert min(engine.answered for engine in engines) >= 5

    run(work())


@pytest.mark.parametrize("faults", [{"dies_after": 5}, {"version": 1}, {"fewer": 1}])
def test_failed_groups_are_retried_on_another_replica(
    testbed: Testbed, faults: dict[str, int]
) -> None:
    """One that crashes in mid-answer, serves another version, or sends an incomplete group."""

    async def work() -> None:
        good, bad = FakeEngine(), FakeEngine(**faults)
        async with testbed.closing() as fleet:
            stored = testbed.publish(1, "one")
            set_target(testbed, 1)
            await testbed.start("bad", bad)
            await testbed.until("bad", lambda view: view.loaded_version == 1)
            collecting = asyncio.create_task(collect(fleet, request_for(stored)))
            while not bad.answered:
                await asyncio.sleep(0.01)
            await testbed.start("good", good)
            await collecting
            if "dies_after" in faults:
                await testbed.until("bad", lambda view: view.loaded_version == 1)
                assert bad.loaded == [1, 1]

    run(work())


def test_prompts_of_stopped_and_silent_replicas_are_retried_elsewhere(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "PROMPTS_IN_FLIGHT", 6)

    async def work() -> None:
        stopped, silent = FakeEngine(), FakeEngine()
        async with testbed.closing() as fleet:
            stored = testbed.publish(1, "one")
            set_target(testbed, 1)
            for name, engine in (("stopped", stopped), ("silent", silent)):
                engine.hold.clear()
                await testbed.start(name, engine)
                await testbed.until(name, lambda view: view.loaded_version == 1)
            collecting = asyncio.create_task(collect(fleet, request_for(stored)))
            while not (stopped.at_once and silent.at_once):
                await asyncio.sleep(0.01)
            await testbed.stop("stopped")
            # It still holds its connections, but sends no heartbeats any more.
            monkeypatch.setattr(testbed.replicas["silent"][0], "_buffer", Unreachable())
            await testbed.start("new", FakeEngine())
            await collecting
            silent.hold.set()

    run(work())


def test_a_lost_replica_that_has_the_weights_is_asked_for_at_intervals(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "POLL_INTERVAL_S", 0.5)
    stored = testbed.publish(1, "one")
    lost = buffer_wire.CallableReplica(
        credential=CREDENTIAL,
        name="lost",
        url="http://127.0.0.1:1",
        state="serving",
        loaded_version=1,
        manifest_digest=stored.manifest_digest,
        last_seen=datetime.now(UTC),
        silent_s=600.0,
    )
    polls: list[str] = []

    class Answering:
        """Answers at once, as the buffer service does once a replica has the weights."""

        def replica_credentials(
            self,
            *,
            serving: str,
            wait: float,  # noqa: ARG002
        ) -> list[buffer_wire.CallableReplica]:
            polls.append(serving)
            return [lost]

    async def work() -> None:
        fleet = Fleet(Answering(), HOSTS)  # type: ignore[arg-type]
        async with fleet.watched():
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.2):
                    await fleet.wait_until_served(request_for(stored))

    run(work())
    # One poll before the request waits, one for it at once, and two more half a second apart.
    assert polls.count(stored.manifest_digest) <= 4


def test_the_service_waits_for_a_replica_that_is_alive(testbed: Testbed) -> None:
    client, stored = testbed.driver.client, testbed.publish(1, "one")
    report = buffer_wire.ReplicaReport(
        url="http://127.0.0.1:1",
        state="serving",
        loaded_version=1,
        manifest_digest=stored.manifest_digest,
    )
    client.report_replica("alive", report)
    started = time.monotonic()
    (view,) = client.replicas(serving=stored.manifest_digest, wait=20)
    assert view.silent_s < 10
    assert time.monotonic() - started < 10
    url = testbed.driver.stack.database_url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(url) as connection:
        connection.execute("update replica set last_seen = last_seen - interval '1 minute'")
    started = time.monotonic()
    (view,) = client.replicas(serving=stored.manifest_digest, wait=1)
    assert view.silent_s > 50
    assert time.monotonic() - started >= 1
    client.report_replica("alive", report)  # An equal report is a heartbeat, too.
    (view,) = client.replicas()
    assert view.silent_s < 10


def test_without_any_replica_the_fleet_waits(
    testbed: Testbed, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with testbed.closing() as fleet:
            stored = testbed.publish(1, "one")
            set_target(testbed, 1)
            assert fleet.describe_replicas() == "none has reported yet"
            collecting = asyncio.create_task(collect(fleet, request_for(stored)))
            await asyncio.sleep(0.2)
            assert not collecting.done()
            await testbed.start("r", FakeEngine())
            await collecting

    run(work())


def test_a_prompt_that_no_replica_can_answer_ends_the_run(testbed: Testbed) -> None:
    async def work() -> None:
        async with testbed.closing() as fleet:
            stored = testbed.publish(1, "one")
            set_target(testbed, 1)
            await testbed.start("r", FakeEngine(refused="99 tokens are more than 64"))
            with pytest.raises(BapoError, match="replica r refuses a prompt: 99 tokens are more"):
                await collect(fleet, request_for(stored))

    run(work())


@pytest.mark.parametrize(
    ("replicas", "errors", "times"),
    [(1, ["index 99 is out of range"], 3), (2, [f"bad address {n}" for n in range(9)], 6)],
)
def test_prompts_on_which_the_engines_keep_failing_end_the_run(
    testbed: Testbed, replicas: int, errors: list[str], times: int
) -> None:
    """The other prompts of the request are answered. Errors may differ, as addresses do."""

    class FailingEngine(FakeEngine):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[GeneratedGroup]:
            if request.prompts[0].seed == FAILS:
                raise IndexError(next(raised))
            async for group in super().generate(request):
                yield group

    FAILS, raised, answered = 7, itertools.cycle(errors), set()

    async def work() -> None:
        async with testbed.closing() as fleet:
            stored = testbed.publish(1, "one")
            set_target(testbed, 1)
            for number in range(replicas):
                await testbed.start(f"r{number}", FailingEngine())
            async with asyncio.timeout(60):
                await fleet.generate(
                    request_for(stored),
                    lambda group: answered.add(group.index),
                    indices=range(12),
                    unfinished=UnfinishedGroups(G),
                )

    reason = rf"the engine failed {times} times in a row: IndexError: {errors[0][:4]}.*; the model"
    with pytest.raises(PromptsFailed, match=reason) as failure:
        run(work())
    assert failure.value.indices == [FAILS]
    assert FAILS not in answered


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No replica is taken for lost, because none is, however busy the machine is."""
    monkeypatch.setattr(fleet_module, "HEARTBEAT_TIMEOUT_S", 100.0)


class MortalEngine(FakeEngine):
    """Generates all its prompts side by side, and dies with all of them when `dies` says so.

    It streams, like vLLM, if the request asks for that. The responses are those of `FakeEngine`.
    """

    def __init__(self, dies: Callable[[PromptRequest, int], bool], **faults: Any) -> None:
        """dies: whether the engine dies of sampling the token of this index for this prompt."""
        super().__init__(**faults)
        self.dies = dies
        self.deaths = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Generated]:  # type: ignore[override]
        (prompt,), version = request.prompts, request.policy_version
        tokens = [[version, *prompt.prompt_token_ids, sample] for sample in range(G)]
        begun = len(prompt.started[0].token_ids) if prompt.started else 0
        for place in range(begun, 3):
            await asyncio.sleep(0.002)
            if not self.lost and self.dies(prompt, place):
                self.lost = True
                self.deaths += 1
                raise EngineLost(f"CUDA error number {self.deaths}")
            for sample in range(G if request.stream_every else 0):
                yield GeneratedTokens(
                    index=0,
                    policy_version=version,
                    response=sample,
                    start=place,
                    token_ids=tokens[sample][place : place + 1],
                    logprobs=[-1.0],
                    finish_reason="stop" if place == 2 else None,
                )
        yield GeneratedGroup(
            index=0,
            policy_version=version,
            responses=[
                GeneratedResponse(token_ids=tokens[n], logprobs=[-1.0] * 3, finish_reason="stop")
                for n in range(G)
            ],
        )


class SilentEngine(MortalEngine):
    """A `MortalEngine` that streams nothing before a group is complete."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Generated]:
        async for generated in super().generate(request.model_copy(update={"stream_every": 0})):
            yield generated


async def collect_from(
    testbed: Testbed, engines: Sequence[FakeEngine], *, stream_every: int = 0, prompts: int = 12
) -> None:
    """Collects the groups of a request from replicas with these engines."""
    async with testbed.closing() as fleet:
        stored = testbed.publish(1, "one")
        set_target(testbed, 1)
        for number, engine in enumerate(engines):
            await testbed.start(f"r{number}", engine)
            await testbed.until(f"r{number}", lambda view: view.loaded_version == 1)
        request = request_for(stored, prompts)
        await collect(fleet, request.model_copy(update={"stream_every": stream_every}))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("engine", [MortalEngine, SilentEngine])
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(("place", "stream_every"), [(0, 0), (2, 0), (2, 32)])
def test_a_prompt_that_kills_every_engine_ends_the_run(
    testbed: Testbed,
    engine: type[MortalEngine],
    replicas: int,
    place: int,
    stream_every: int,
) -> None:
    """It kills them at once or later, together with its neighbours, which are not blamed."""
    engines = [
        engine(lambda prompt, token: (prompt.seed, token) == (7, place)) for _ in range(replicas)
    ]
    reason = (
        r"engines died 8 times in a row while they generated responses \(1 tokens of prompt\), 6 "
        r"times with no other prompt in them \(replicas: r0.*\). Their last error: CUDA error"
    )
    with pytest.raises(PromptsFailed, match=reason) as failure:
        run(collect_from(testbed, engines, stream_every=stream_every))
    assert failure.value.indices == [7]
    assert sum(engine.deaths for engine in engines) == 8


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("replicas", [1, 2])
def test_one_of_several_prompts_that_kill_engines_ends_the_run(
    testbed: Testbed, replicas: int
) -> None:
    deadly = {0, 3, 7, 11}
    engines = [MortalEngine(lambda prompt, _: prompt.seed in deadly) for _ in range(replicas)]
    with pytest.raises(PromptsFailed, match="engines died 8 times in a row") as failure:
        run(collect_from(testbed, engines))
    assert len(failure.value.indices) == 1
    assert failure.value.indices[0] in deadly


@pytest.mark.usefixtures("patient")
def test_engines_that_die_of_whatever_they_generate_end_the_run(testbed: Testbed) -> None:
    engine = MortalEngine(lambda *_: True)
    with pytest.raises(PromptsFailed, match="engines died 8 times in a row"):
        run(collect_from(testbed, [engine]))
    # Other prompts may be in the engines that die before the first one is tried alone.
    assert engine.deaths >= 8


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("engine", [MortalEngine, SilentEngine])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_no_prompt_is_blamed_for_engines_that_die_at_random(
    testbed: Testbed, engine: type[MortalEngine], replicas: int, seed: int
) -> None:
    """Engines die on every tenth token, so on a quarter of the prompts that are alone in them."""
    rng = random.Random(seed)
    engines = [engine(lambda *_: rng.random() < 0.1) for _ in range(replicas)]
    run(collect_from(testbed, engines, prompts=24))
    assert sum(engine.deaths for engine in engines)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("seed", range(3))
def test_the_prompt_that_kills_engines_is_found_among_random_deaths(
    testbed: Testbed, seed: int
) -> None:
    rng = random.Random(seed)
    engines = [
        MortalEngine(lambda prompt, _: prompt.seed == 7 or rng.random() < 0.1) for _ in range(2)
    ]
    with pytest.raises(PromptsFailed) as failure:
        run(collect_from(testbed, engines))
    assert failure.value.indices == [7]


@pytest.mark.usefixtures("patient")
def test_no_prompt_is_blamed_for_a_replica_whose_engine_always_dies(testbed: Testbed) -> None:
    """A broken device lets an engine start, and fails when there is work."""
    broken, sound = MortalEngine(lambda *_: True), MortalEngine(lambda *_: False)
    run(collect_from(testbed, [broken, sound]))
    assert broken.deaths


@pytest.mark.usefixtures("patient")
def test_lost_replicas_say_nothing_about_prompts(testbed: Testbed) -> None:
    """A replica that is stopped, or whose weights were wrong, ends its streams without a word."""

    class CutOffEngine(FakeEngine):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[GeneratedGroup]:
            if request.prompts[0].seed == 7 and next(losses, None) is not None:
                raise EngineFaulty("tokens of other weights")
            async for group in super().generate(request):
                yield group

    losses = iter(range(20))
    run(collect_from(testbed, [CutOffEngine(), CutOffEngine()]))
    assert next(losses, None) is None


def test_an_engine_that_fails_once_is_asked_again(testbed: Testbed) -> None:
    async def work() -> None:
        async with testbed.closing() as fleet:
            stored = testbed.publish(1, "one")
            set_target(testbed, 1)
            await testbed.start("r", FakeEngine(raises_once=IndexError("a race")))
            await collect(fleet, request_for(stored))

    run(work())


def test_a_client_that_disconnects_ends_the_generation(testbed: Testbed) -> None:
    async def work() -> None:
        engine = FakeEngine()
        async with testbed.closing() as fleet:
            stored = testbed.publish(1, "one")
            set_target(testbed, 1)
            engine.hold.clear()
            await testbed.start("r", engine)
            collecting = asyncio.create_task(collect(fleet, request_for(stored)))
            while not engine.at_once:
                await asyncio.sleep(0.01)
            collecting.cancel()
            async with asyncio.timeout(200):
                while engine.at_once:
                    await asyncio.sleep(0.01)
            engine.hold.set()
            await collect(fleet, request_for(stored))

    run(work())


# ---- the replica's API ---------------------------------------------------------------------------


def test_health_readiness_and_tokens(testbed: Testbed) -> None:
    async def work() -> None:
        engine = FakeEngine()
        async with testbed.closing():
            await testbed.start("r", engine)
            await testbed.until("r", lambda view: view.state == "starting")
            url = testbed.seen("r").url
            headers = testbed.headers
            async with httpx.AsyncClient(base_url=url, timeout=200) as client:
                assert (await client.get("/health")).status_code == 200
                assert (await client.get("/readyz")).status_code == 503
                assert (await client.get("/v1/replica")).status_code == 401
                assert (await client.post("/v1/generate", json={})).status_code == 401
                stored = testbed.publish(1, "one")
                set_target(testbed, 1)
                await testbed.until("r", lambda view: view.loaded_version == 1)
                assert (await client.get("/readyz")).status_code == 200
                families = text_string_to_metric_families((await client.get("/metrics")).text)
                names = [family.name for family in families]
                assert {"bapo_tokens_generated", "vllm:num_requests_running"} <= set(names)
                assert len(names) == len(set(names)), "Prometheus refuses duplicates"
                state = (await client.get("/v1/replica", headers=headers)).json()
                assert state["manifest_digest"] == stored.manifest_digest
                answer = await client.post(
                    "/v1/generate", content=request_for(stored).model_dump_json(), headers=headers
                )
                lines = [json.loads(line) for line in answer.text.splitlines()]
                assert sorted(line["index"] for line in lines) == list(range(12))
                bad = await client.post("/v1/generate", json={"prompts": []}, headers=headers)
                assert bad.status_code == 422

    run(work())


def test_a_full_disk_is_reported_and_tried_again(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with testbed.closing() as fleet:
            stored = testbed.publish(1, "one")
            replica = await testbed.start("r", FakeEngine())

            def fetch_to_full_disk(stored: StoredVersion) -> Path:
                raise OSError(28, "No space left on device")

            with monkeypatch.context() as patch:
                patch.setattr(replica._cache, "fetch", fetch_to_full_disk)
                set_target(testbed, 1)
                await testbed.until("r", lambda view: "No space left" in view.detail)
            await collect(fleet, request_for(stored))

    run(work())


# ---- weights by NCCL ----------------------------------------------------------------------------


WEIGHTS = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3]])}
SENT = "sent a=[1.0, 2.0] b=[[3]]"


def sending(sender: NcclBroadcaster, stored: StoredVersion) -> asyncio.Task[list[str]]:
    """Broadcasts a version as the trainer does once it is stored."""
    return asyncio.create_task(
        asyncio.to_thread(sender.send, stored.number, stored.manifest_digest, WEIGHTS)
    )


async def first_version(testbed: Testbed) -> None:
    """Has all replicas load version 1 from its files, because no engine runs before."""
    first = testbed.publish(1, "one")
    set_target(testbed, 1)
    for name in testbed.replicas:
        await testbed.until(name, lambda view: view.manifest_digest == first.manifest_digest)
    testbed.driver.run_step(1)


def test_the_trainer_sends_to_every_replica_that_takes_weights(testbed: Testbed) -> None:
    """Another replica has an engine that takes files only, and a fourth one has stopped."""

    async def work() -> None:
        nccl = FakeNccl()
        engines = {"a": FakeEngine(nccl), "b": FakeEngine(nccl), "files": FakeEngine()}
        async with testbed.closing() as fleet:
            for name, engine in engines.items():
                await testbed.start(name, engine)
            await first_version(testbed)
            await testbed.start("stopped", FakeEngine(nccl))
            await testbed.until("stopped", lambda view: view.loaded_version == 1)
            await testbed.stop("stopped")
            second = testbed.publish(2, "two")
            sender = NcclBroadcaster(testbed.driver.client, HOSTS, nccl)
            sent = sending(sender, second)
            assert set_target(testbed, 2) == 2
            for name in engines:
                await testbed.until(name, lambda view: view.loaded_version == 2)
            assert await sent == ["a", "b"]
            assert {name: engine.contents for name, engine in engines.items()} == {
                "a": SENT,
                "b": SENT,
                "files": "two",
            }
            assert not list((testbed.scratch / "a").glob("v2-*")), "the files were fetched as well"
            await collect(fleet, request_for(second))

    run(work())


def test_weights_that_are_not_offered_come_from_the_object_store(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer died after it stored them, or offers other weights."""
    monkeypatch.setattr(offers_module, "OFFER_WAIT_S", 0.3)

    async def work() -> None:
        engine = FakeEngine(nccl := FakeNccl())
        async with testbed.closing():
            await testbed.start("r", engine)
            await first_version(testbed)
            second = testbed.publish(2, "two")
            sender = NcclBroadcaster(testbed.driver.client, HOSTS, nccl)
            other = sending(sender, second.model_copy(update={"manifest_digest": "0" * 64}))
            set_target(testbed, 2)
            await testbed.until("r", lambda view: view.loaded_version == 2)
            assert (engine.contents, engine.loaded) == ("two", [1, 2])
            # The next offer replaces that one.
            testbed.driver.run_step(2)
            testbed.driver.run_step(3)
            fourth = testbed.publish(4, "four")
            sent = sending(sender, fourth)
            assert await other == []
            assert set_target(testbed, 4) == 4
            assert await sent == ["r"]
            await testbed.until("r", lambda view: view.loaded_version == 4)
            assert engine.contents == SENT

    run(work())


@pytest.mark.parametrize("fault", ["breaks_off", "another_model"])
def test_weights_that_do_not_arrive_are_replaced_by_the_files(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Training goes on, and the next version is sent again."""
    monkeypatch.setattr(broadcast_module, "OFFER_TTL_S", 0.5)
    monkeypatch.setattr(broadcast_module, "SEND_WITHIN_S", 0.5)

    async def work() -> None:
        engine = FakeEngine(nccl := FakeNccl(), **{fault: True})
        async with testbed.closing() as fleet:
            await testbed.start("r", engine)
            await first_version(testbed)
            sender = NcclBroadcaster(testbed.driver.client, HOSTS, nccl)
            second = testbed.publish(2, "two")
            sent = sending(sender, second)
            set_target(testbed, 2)
            await testbed.until("r", lambda view: view.loaded_version == 2)
            assert engine.contents == "two"
            await collect(fleet, request_for(second))
            assert await sent == []
            assert not sender.stuck
            testbed.driver.run_step(2)
            testbed.driver.run_step(3)
            # Nothing goes wrong any more, so a busy machine may take its time.
            monkeypatch.setattr(broadcast_module, "SEND_WITHIN_S", 60.0)
            fourth = testbed.publish(4, "four")
            sent = sending(sender, fourth)
            set_target(testbed, 4)
            assert await sent == ["r"]
            assert engine.contents == SENT
            # A unique id is used up only if a receiver may have joined its communicator.
            assert len(nccl.sent) == (2 if fault == "breaks_off" else 1)

    run(work())


def test_an_offer_that_is_not_accepted_expires(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offers_module, "OFFER_TTL_S", 0.2)

    async def work() -> None:
        async with testbed.closing():
            await testbed.start("r", FakeEngine(nccl := FakeNccl()))
            await first_version(testbed)
            sender = NcclBroadcaster(testbed.driver.client, HOSTS, nccl)
            assert await sending(sender, testbed.publish(2, "two")) == []
            assert testbed.seen("r").loaded_version == 1
            url = testbed.seen("r").url
            offer = WeightOffer(
                policy_version=2,
                manifest_digest="0" * 64,
                parameters=[Parameter(name="a", dtype="float32", shape=[1])],
                unique_id="aWQ=",
            )
            async with httpx.AsyncClient(base_url=url) as client:
                body = offer.model_dump()
                stranger = await client.post("/v1/weights", json=body)
                assert stranger.status_code == 401
                refused = await client.post("/v1/weights", json=body, headers=testbed.headers)
                assert refused.status_code == 409
                assert "the offer of version 2" in refused.json()["detail"]

    run(work())


def test_a_broadcast_that_cannot_be_aborted_is_the_last_one(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The communicator never forms, and training goes on without broadcasts."""
    for name in ("SEND_WITHIN_S", "OFFER_TTL_S", "GIVE_UP_WITHIN_S"):
        monkeypatch.setattr(broadcast_module, name, 0.3)

    async def work() -> None:
        engine = FakeEngine(nccl := FakeNccl(hangs=True), breaks_off=True)
        async with testbed.closing():
            await testbed.start("r", engine)
            await first_version(testbed)
            second = testbed.publish(2, "two")
            sender = NcclBroadcaster(testbed.driver.client, HOSTS, nccl)
            set_target(testbed, 2)
            assert await sending(sender, second) == []
            assert sender.stuck
            assert await sending(sender, second) == []
            assert len(nccl.sent) == 1, "it was tried again"
            await testbed.until("r", lambda view: view.loaded_version == 2)
            nccl.ended[next(iter(nccl.sent))].set()

    run(work())


def test_an_offer_is_answered_once() -> None:
    """An offer is accepted at the last moment, declined before it is made, or replaced."""

    def offer(version: int) -> WeightOffer:
        parameters = [Parameter(name="a", dtype="float32", shape=[1])]
        return WeightOffer(
            policy_version=version, manifest_digest="d", parameters=parameters, unique_id="id"
        )

    def stored(version: int) -> StoredVersion:
        return StoredVersion(number=version, manifest_digest="d", uri="s3://b/k")

    async def work() -> None:
        pending = PendingOffer()
        first = asyncio.create_task(pending.submit(offer(1)))
        received = await pending.wait_for(stored(1))
        assert received is not None
        assert pending.accept(received, 3)
        assert not pending.accept(received, 3)
        pending.decline(stored(1))
        assert await first == 3
        pending.decline(stored(2))
        assert await pending.submit(offer(2)) == 0
        third = asyncio.create_task(pending.submit(offer(3)))
        await asyncio.sleep(0)
        fourth = asyncio.create_task(pending.submit(offer(4)))
        assert await third == 0
        pending.decline(stored(4))
        assert await fourth == 0

    run(work())


def test_a_unique_id_is_not_reused_when_a_replica_does_not_answer(testbed: Testbed) -> None:
    """A replica that does not answer may have joined; only a refusal says that it has not."""
    nccl = FakeNccl()
    report = buffer_wire.ReplicaReport(
        url="http://127.0.0.1:9", state="serving", loaded_version=1, manifest_digest="a" * 64
    )
    testbed.driver.client.report_replica("unreachable", report)
    sender = NcclBroadcaster(testbed.driver.client, HOSTS, nccl)
    for version in (2, 3):
        assert sender.send(version, "b" * 64, WEIGHTS) == []
    assert len(nccl.sent) == 2
