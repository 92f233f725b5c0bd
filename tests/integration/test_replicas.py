"""Replicas and the fleet on the real buffer service and object store; only the engine is made up.

The made-up engine gives every prompt tokens that tell which weights, which prompt and which sample
they come from, and does what it is told to do wrong.
"""

from __future__ import annotations

import asyncio
import base64
import json
import queue
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from torch import Tensor

from bapo_core.errors import BapoError
from services.buffer.api import wire as buffer_wire
from services.buffer.api.wire import StoredVersion
from services.common.errors import ServiceUnavailable
from services.common.objectstore import ObjectStore, ObjectStoreError
from services.rollout import fleet as fleet_module
from services.rollout import offers as offers_module
from services.rollout import replica as replica_module
from services.rollout.api.offers import Parameter, WeightOffer
from services.rollout.api.wire import (
    GeneratedGroup,
    GeneratedResponse,
    GenerateRequest,
    PromptRequest,
)
from services.rollout.driver import Accept, EngineLost
from services.rollout.engine import ModelLoadError
from services.rollout.fleet import Fleet
from services.rollout.offers import Offers
from services.rollout.replica import Replica
from services.rollout.server import create_app
from services.rollout.weights import WeightCache
from services.stack.stack import Endpoints
from services.trainer import nccl_broadcast as direct_module
from services.trainer.nccl import NcclError
from services.trainer.nccl_broadcast import NcclBroadcaster
from tests.integration.driver import Driver, small_config

G = 3


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rules at a quicker pace."""
    monkeypatch.setattr(replica_module, "REPORT_EVERY_S", 0.1)
    monkeypatch.setattr(replica_module, "CHECK_EVERY_S", 0.1)
    monkeypatch.setattr(replica_module, "WAIT_FOR_VERSION_S", 5.0)
    monkeypatch.setattr(replica_module, "FIRST_RETRY_S", 0.05)
    monkeypatch.setattr(fleet_module, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(fleet_module, "SILENT_S", 1.5)


class MemoryLink:
    """Stands in for NCCL: groups meet by their id, and who sends waits until somebody receives."""

    def __init__(self, *, deaf: bool = False) -> None:
        """`deaf`: what hangs cannot be aborted."""
        self.deaf = deaf
        self.sent: dict[bytes, queue.SimpleQueue[list[Tensor]]] = {}
        self.over: dict[bytes, threading.Event] = {}
        self.aborted: set[bytes] = set()

    def unique_id(self) -> bytes:
        found = secrets.token_bytes(128)
        self.sent[found], self.over[found] = queue.SimpleQueue(), threading.Event()
        return found

    def send(self, unique_id: bytes, receivers: int, tensors: Sequence[Tensor]) -> None:
        assert receivers == 2
        self.sent[unique_id].put(list(tensors))
        self.over[unique_id].wait()
        if unique_id in self.aborted:
            raise NcclError("given up")

    def receive(self, unique_id: bytes) -> list[Tensor]:
        found = self.sent[unique_id].get(timeout=200)
        self.over[unique_id].set()
        return found

    def abort(self, unique_id: bytes) -> None:
        if not self.deaf:
            self.aborted.add(unique_id)
            self.over[unique_id].set()


class MadeUpHost:
    """An `EngineDriver` that answers (version, prompt, sample), one prompt after the other."""

    prompts_per_request = 1

    def __init__(self, link: MemoryLink | None = None, **wrong: Any) -> None:
        self.wrong, self.link = wrong, link
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

    async def receive(self, offer: WeightOffer, accept: Accept) -> bool:
        assert self.at_once == 0, "weights were received while groups were generated"
        assert self.link is not None
        if self.wrong.pop("another_model", False) or not accept(2):
            return False
        if self.wrong.pop("breaks_off", False):
            raise EngineLost("half of it is missing")
        tensors = await asyncio.to_thread(self.link.receive, base64.b64decode(offer.unique_id))
        self.contents = "sent " + " ".join(
            f"{each.name}={tensor.tolist()}"
            for each, tensor in zip(offer.parameters, tensors, strict=True)
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
            version = request.policy_version + self.wrong.get("version", 0)
            yield GeneratedGroup(
                index=index,
                policy_version=version,
                refused=self.wrong.get("refused", ""),
                responses=[
                    GeneratedResponse(
                        token_ids=[self.loaded[-1], *prompt.prompt_token_ids, sample],
                        logprobs=[-1.0] * (len(prompt.prompt_token_ids) + 2),
                        finish_reason="stop",
                    )
                    for sample in range(request.group_size - self.wrong.get("fewer", 0))
                ],
            )

    def _fail(self) -> None:
        if self.lost or self.answered == self.wrong.get("dies_after", -1):
            self.lost = True
            self.wrong.pop("dies_after", None)
            raise EngineLost("it died")

    async def check(self) -> None:
        if self.lost:
            raise EngineLost("it is dead")

    async def close(self) -> None:
        self.lost = True


class Unreachable:
    """The buffer service as seen from behind a network that has failed."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> Any:
            raise ServiceUnavailable("the network is down")

        return call


@dataclass
class Field:
    """A run, and replicas of it that live in this process behind real HTTP."""

    driver: Driver
    store: ObjectStore
    scratch: Path
    replicas: dict[str, tuple[Replica, asyncio.Task[None], uvicorn.Server]] = field(
        default_factory=dict
    )

    @property
    def headers(self) -> dict[str, str]:
        token = self.driver.stack.token
        return {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def publish(self, version: int, contents: str) -> StoredVersion:
        directory = self.scratch / f"published-{version}"
        directory.mkdir(exist_ok=True)
        (directory / "weights").write_text(contents)
        prefix = f"runs/{self.driver.config.name}/weights/v{version}"
        digest = self.store.put_directory(prefix, directory)
        return self.driver.client.publish_weights(version, digest)

    async def start(self, name: str, host: MadeUpHost) -> Replica:
        """A replica; one whose engine has a link takes offers."""
        offers = None if host.link is None else Offers()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        replica = Replica(
            host,
            self.driver.client,
            WeightCache(self.store, self.scratch / name),
            name=name,
            url=f"http://127.0.0.1:{port}",
            offers=offers,
        )
        app = create_app(replica, host, self.driver.stack.token, offers)
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
        fleet = Fleet(self.driver.client, self.driver.stack.token)
        try:
            async with fleet.watched():
                yield fleet
        finally:
            for name in list(self.replicas):
                await self.stop(name)

    def seen(self, name: str) -> buffer_wire.ReplicaView:
        return {view.name: view for view in self.driver.client.replicas()}[name]

    async def until(self, name: str, condition: Callable[[buffer_wire.ReplicaView], bool]) -> None:
        """Returns once what the replica says of itself meets the condition."""
        async with asyncio.timeout(200):
            while True:
                views = await asyncio.to_thread(self.driver.client.replicas)
                if any(view.name == name and condition(view) for view in views):
                    return
                await asyncio.sleep(0.02)


@pytest.fixture
def ground(stack: Endpoints, tmp_path: Path, request: pytest.FixtureRequest) -> Field:
    name = "".join(c if c.isalnum() else "-" for c in request.node.name.lower())[:60].rstrip("-")
    return Field(Driver(stack, small_config(name)), ObjectStore(stack.object_store), tmp_path)


def want(ground: Field, step: int) -> int:
    """Asks for the prompts of a step, which is what makes a version wanted."""
    return ground.driver.client.step_prompts(step).policy_version


def asking(stored: StoredVersion, prompts: int = 12) -> GenerateRequest:
    return GenerateRequest(
        policy_version=stored.number,
        manifest_digest=stored.manifest_digest,
        temperature=1.0,
        max_tokens=8,
        group_size=G,
        prompts=[PromptRequest(prompt_token_ids=[100 + n], seed=n) for n in range(prompts)],
    )


async def collect(fleet: Fleet, request: GenerateRequest) -> dict[int, GeneratedGroup]:
    """All groups; none comes twice, each is whole and of the weights asked for."""
    groups: dict[int, GeneratedGroup] = {}

    def on_group(group: GeneratedGroup) -> None:
        assert group.index not in groups
        groups[group.index] = group

    async with asyncio.timeout(300):
        await fleet.generate(request, on_group)
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


# ---- what is served -----------------------------------------------------------------------------


def test_a_replica_follows_what_is_wanted(ground: Field) -> None:
    async def work() -> None:
        host = MadeUpHost()
        async with ground.closing() as fleet:
            replica = await ground.start("r", host)
            await ground.until("r", lambda view: view.state == "starting")
            assert not replica.ready()
            first = ground.publish(1, "one")
            assert want(ground, 1) == 1
            await ground.until("r", lambda view: view.manifest_digest == first.manifest_digest)
            assert replica.ready()
            await collect(fleet, asking(first))
            ground.driver.run_step(1)
            second = ground.publish(2, "two")
            assert want(ground, 2) == 2
            await ground.until("r", lambda view: view.loaded_version == 2)
            await collect(fleet, asking(second))
            assert host.loaded == [1, 2]
            assert host.contents == "two"
            # What nobody will want again is not kept.
            assert sorted(path.name[:2] for path in (ground.scratch / "r").iterdir()) == ["v2"]

    run(work())


def test_the_newest_version_is_fetched_before_it_is_wanted(ground: Field) -> None:
    async def work() -> None:
        async with ground.closing():
            await ground.start("r", MadeUpHost())
            first = ground.publish(1, "one")
            want(ground, 1)
            await ground.until("r", lambda view: view.manifest_digest == first.manifest_digest)
            ground.driver.run_step(1)
            second = ground.publish(2, "two")
            fetched = ground.scratch / "r" / f"v2-{second.manifest_digest[:16]}" / "weights"
            async with asyncio.timeout(200):
                while not fetched.exists():
                    await asyncio.sleep(0.02)
            assert ground.seen("r").loaded_version == 1

    run(work())


def test_weights_wait_for_groups_and_requests_wait_for_weights(ground: Field) -> None:
    """Nothing generates while weights are loaded: the engine checks it."""

    async def work() -> None:
        host = MadeUpHost()
        async with ground.closing() as fleet:
            await ground.start("r", host)
            first = ground.publish(1, "one")
            want(ground, 1)
            host.hold.clear()
            earlier = asyncio.create_task(collect(fleet, asking(first)))
            while not host.at_once:
                await asyncio.sleep(0.01)
            ground.driver.run_step(1)
            second = ground.publish(2, "two")
            want(ground, 2)
            later = asyncio.create_task(collect(fleet, asking(second)))
            await asyncio.sleep(0.3)  # however long: it must not load meanwhile
            assert host.loaded == [1]
            host.hold.set()
            await asyncio.gather(earlier, later)
            assert host.loaded == [1, 2]

    run(work())


def test_another_version_of_the_same_number_is_another(ground: Field) -> None:
    """After a rewind the same number may be published with other bytes."""

    async def work() -> None:
        host = MadeUpHost()
        async with ground.closing() as fleet:
            await ground.start("r", host)
            ground.publish(1, "one")
            want(ground, 1)
            ground.driver.run_step(1)
            old = ground.publish(2, "two")
            want(ground, 2)
            await ground.until("r", lambda view: view.manifest_digest == old.manifest_digest)
            await asyncio.to_thread(ground.driver.client.rewind, 0)
            ground.driver.run_step(1)
            new = ground.publish(2, "two, but other bytes")
            want(ground, 2)
            await collect(fleet, asking(new))
            assert host.contents == "two, but other bytes"
            url = ground.seen("r").url
            async with httpx.AsyncClient(timeout=200) as client:
                answer = await client.post(
                    f"{url}/v1/generate",
                    content=asking(old).model_dump_json(),
                    headers=ground.headers,
                )
            assert answer.status_code == 409
            assert "version 2 is not served here" in answer.json()["detail"]

    run(work())


# ---- what goes wrong with weights ---------------------------------------------------------------


@pytest.mark.parametrize("harm", ["other bytes", "gone", "bad weights"])
def test_weights_that_cannot_be_had_are_shown_and_tried_again(ground: Field, harm: str) -> None:
    async def work() -> None:
        async with ground.closing() as fleet:
            host = MadeUpHost()
            await ground.start("r", host)
            stored = ground.publish(1, "bad" if harm == "bad weights" else "one")
            key = f"{stored.uri}/weights"
            if harm == "other bytes":
                ground.store.put(key, b"eno")
            elif harm == "gone":
                ground.store.delete([key])
            want(ground, 1)
            await ground.until("r", lambda view: view.state == "failing")
            view = ground.seen("r")
            words = {"other bytes": "digest", "gone": "NoSuchKey", "bad weights": "bad weights"}
            assert words[harm] in view.detail
            assert view.loaded_version == 0
            assert host.loaded == []
            if harm == "bad weights":
                await asyncio.to_thread(ground.driver.client.rewind, 0)
                return
            ground.store.put(key, b"one")
            await collect(fleet, asking(stored))

    run(work())


def test_an_interrupted_fetch_goes_on_where_it_ended(
    ground: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = ground.scratch / "large"
    directory.mkdir()
    contents = bytes(range(256)) * 40_000
    (directory / "shard").write_bytes(contents)
    digest = ground.store.put_directory("runs/x/weights/v1", directory)
    stored = StoredVersion(number=1, uri="runs/x/weights/v1", manifest_digest=digest)
    cache = WeightCache(ground.store, ground.scratch / "cache")
    place = cache._place(stored)
    place.mkdir(parents=True)
    (place / "shard.part").write_bytes(contents[:4_000_000])
    offsets = []
    get_object = ground.store._client.get_object

    def counted(*arguments: Any, **options: Any) -> Any:
        offsets.append(options.get("offset"))
        return get_object(*arguments, **options)

    monkeypatch.setattr(ground.store._client, "get_object", counted)
    assert (cache.fetch(stored) / "shard").read_bytes() == contents
    assert 4_000_000 in offsets
    # Another process finds what lies there, and checks it.
    offsets.clear()
    (place / "shard").write_bytes(b"torn" + contents[4:])
    assert (WeightCache(ground.store, ground.scratch / "cache").fetch(stored) / "shard").exists()
    assert (place / "shard").read_bytes() == contents
    # What was left behind damaged is fetched again as a whole.
    cache.prune([])
    place.mkdir(parents=True)
    (place / "shard.part").write_bytes(b"x" * 4_000_000)
    with pytest.raises(ObjectStoreError, match="do not have the digest"):
        cache.fetch(stored)
    assert (cache.fetch(stored) / "shard").read_bytes() == contents


# ---- what goes wrong with replicas --------------------------------------------------------------


def test_work_is_shared_and_bounded(ground: Field, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "PROMPTS_IN_FLIGHT", 5)

    async def work() -> None:
        hosts = [MadeUpHost(), MadeUpHost()]
        async with ground.closing() as fleet:
            stored = ground.publish(1, "one")
            want(ground, 1)
            for number, host in enumerate(hosts):
                await ground.start(f"r{number}", host)
            for number in range(2):
                await ground.until(f"r{number}", lambda view: view.loaded_version == 1)
            await collect(fleet, asking(stored, 1))  # the fleet has seen at least one of them
            await asyncio.sleep(0.2)
            for host in hosts:
                host.hold.clear()
                host.answered = 0
            collecting = asyncio.create_task(collect(fleet, asking(stored, 40)))
            while [host.at_once for host in hosts] != [5, 5]:
                await asyncio.sleep(0.01)
            for host in hosts:
                host.hold.set()
            await collecting
            assert [host.most_at_once for host in hosts] == [5, 5]
            assert sum(host.answered for host in hosts) == 40
            assert min(host.answered for host in hosts) >= 5

    run(work())


@pytest.mark.parametrize("wrong", [{"dies_after": 5}, {"version": 1}, {"fewer": 1}])
def test_what_one_replica_gets_wrong_another_gets_right(
    ground: Field, wrong: dict[str, int]
) -> None:
    """Dead in mid-answer, another version, a group that is not whole."""

    async def work() -> None:
        good, bad = MadeUpHost(), MadeUpHost(**wrong)
        async with ground.closing() as fleet:
            stored = ground.publish(1, "one")
            want(ground, 1)
            await ground.start("bad", bad)
            await ground.until("bad", lambda view: view.loaded_version == 1)
            collecting = asyncio.create_task(collect(fleet, asking(stored)))
            while not bad.answered:
                await asyncio.sleep(0.01)
            await ground.start("good", good)
            await collecting
            if "dies_after" in wrong:
                await ground.until("bad", lambda view: view.loaded_version == 1)
                assert bad.loaded == [1, 1]

    run(work())


def test_a_replica_that_has_gone_and_one_that_is_silent(
    ground: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "PROMPTS_IN_FLIGHT", 6)

    async def work() -> None:
        gone, silent = MadeUpHost(), MadeUpHost()
        async with ground.closing() as fleet:
            stored = ground.publish(1, "one")
            want(ground, 1)
            for name, host in (("gone", gone), ("silent", silent)):
                host.hold.clear()
                await ground.start(name, host)
                await ground.until(name, lambda view: view.loaded_version == 1)
            collecting = asyncio.create_task(collect(fleet, asking(stored)))
            while not (gone.at_once and silent.at_once):
                await asyncio.sleep(0.01)
            await ground.stop("gone")
            # It still holds its connections, but nothing is heard of it any more.
            monkeypatch.setattr(ground.replicas["silent"][0], "_buffer", Unreachable())
            await ground.start("new", MadeUpHost())
            await collecting
            silent.hold.set()

    run(work())


def test_without_any_replica_it_waits(ground: Field, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with ground.closing() as fleet:
            stored = ground.publish(1, "one")
            want(ground, 1)
            fleet_states = fleet.states()
            assert fleet_states == "none has reported yet"
            collecting = asyncio.create_task(collect(fleet, asking(stored)))
            await asyncio.sleep(0.2)
            assert not collecting.done()
            await ground.start("r", MadeUpHost())
            await collecting

    run(work())


def test_a_prompt_that_no_replica_can_answer_ends_the_run(ground: Field) -> None:
    async def work() -> None:
        async with ground.closing() as fleet:
            stored = ground.publish(1, "one")
            want(ground, 1)
            await ground.start("r", MadeUpHost(refused="99 tokens are more than 64"))
            with pytest.raises(BapoError, match="replica r refuses a prompt: 99 tokens are more"):
                await collect(fleet, asking(stored))

    run(work())


def test_a_client_that_hangs_up_ends_the_work(ground: Field) -> None:
    async def work() -> None:
        host = MadeUpHost()
        async with ground.closing() as fleet:
            stored = ground.publish(1, "one")
            want(ground, 1)
            host.hold.clear()
            await ground.start("r", host)
            collecting = asyncio.create_task(collect(fleet, asking(stored)))
            while not host.at_once:
                await asyncio.sleep(0.01)
            collecting.cancel()
            async with asyncio.timeout(200):
                while host.at_once:
                    await asyncio.sleep(0.01)
            host.hold.set()
            await collect(fleet, asking(stored))

    run(work())


# ---- its own API --------------------------------------------------------------------------------


def test_health_readiness_and_tokens(ground: Field) -> None:
    async def work() -> None:
        host = MadeUpHost()
        async with ground.closing():
            await ground.start("r", host)
            await ground.until("r", lambda view: view.state == "starting")
            url = ground.seen("r").url
            headers = ground.headers
            async with httpx.AsyncClient(base_url=url, timeout=200) as client:
                assert (await client.get("/health")).status_code == 200
                assert (await client.get("/readyz")).status_code == 503
                assert (await client.get("/v1/replica")).status_code == 401
                assert (await client.post("/v1/generate", json={})).status_code == 401
                stored = ground.publish(1, "one")
                want(ground, 1)
                await ground.until("r", lambda view: view.loaded_version == 1)
                assert (await client.get("/readyz")).status_code == 200
                state = (await client.get("/v1/replica", headers=headers)).json()
                assert state["manifest_digest"] == stored.manifest_digest
                answer = await client.post(
                    "/v1/generate", content=asking(stored).model_dump_json(), headers=headers
                )
                lines = [json.loads(line) for line in answer.text.splitlines()]
                assert sorted(line["index"] for line in lines) == list(range(12))
                bad = await client.post("/v1/generate", json={"prompts": []}, headers=headers)
                assert bad.status_code == 422

    run(work())


def test_a_full_disk_is_shown_and_tried_again(
    ground: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with ground.closing() as fleet:
            stored = ground.publish(1, "one")
            replica = await ground.start("r", MadeUpHost())
            fetch, tries = replica._cache.fetch, 0

            def full(wanted: StoredVersion) -> Path:
                nonlocal tries
                tries += 1
                if tries < 3:
                    raise OSError(28, "No space left on device")
                return fetch(wanted)

            monkeypatch.setattr(replica._cache, "fetch", full)
            want(ground, 1)
            await ground.until("r", lambda view: "No space left" in view.detail)
            await collect(fleet, asking(stored))

    run(work())


# ---- weights without files ----------------------------------------------------------------------


WEIGHTS = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3]])}
SENT = "sent a=[1.0, 2.0] b=[[3]]"


def sending(sender: NcclBroadcaster, stored: StoredVersion) -> asyncio.Task[list[str]]:
    """What the trainer does once a version is stored."""
    return asyncio.create_task(
        asyncio.to_thread(sender.send, stored.number, stored.manifest_digest, WEIGHTS)
    )


async def first_version(ground: Field) -> None:
    """By files: there is no engine before."""
    first = ground.publish(1, "one")
    want(ground, 1)
    for name in ground.replicas:
        await ground.until(name, lambda view: view.manifest_digest == first.manifest_digest)
    ground.driver.run_step(1)


def test_the_trainer_sends_to_every_replica_that_takes_weights(ground: Field) -> None:
    """One of three has an engine for files alone, one is not there any more."""

    async def work() -> None:
        link = MemoryLink()
        hosts = {"a": MadeUpHost(link), "b": MadeUpHost(link), "files": MadeUpHost()}
        async with ground.closing() as fleet:
            for name, host in hosts.items():
                await ground.start(name, host)
            await first_version(ground)
            await ground.start("gone", MadeUpHost(link))
            await ground.until("gone", lambda view: view.loaded_version == 1)
            await ground.stop("gone")
            second = ground.publish(2, "two")
            sender = NcclBroadcaster(ground.driver.client, ground.driver.stack.token, link)
            sent = sending(sender, second)
            assert want(ground, 2) == 2
            for name in hosts:
                await ground.until(name, lambda view: view.loaded_version == 2)
            assert await sent == ["a", "b"]
            assert {name: host.contents for name, host in hosts.items()} == {
                "a": SENT,
                "b": SENT,
                "files": "two",
            }
            assert not list((ground.scratch / "a").glob("v2-*")), "the files were fetched as well"
            await collect(fleet, asking(second))

    run(work())


def test_weights_that_nobody_sends_come_from_the_object_store(
    ground: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer has died after it stored them, or offers others."""
    monkeypatch.setattr(offers_module, "WAIT_S", 0.3)

    async def work() -> None:
        host = MadeUpHost(link := MemoryLink())
        async with ground.closing():
            await ground.start("r", host)
            await first_version(ground)
            second = ground.publish(2, "two")
            sender = NcclBroadcaster(ground.driver.client, ground.driver.stack.token, link)
            other = sending(sender, second.model_copy(update={"manifest_digest": "0" * 64}))
            want(ground, 2)
            await ground.until("r", lambda view: view.loaded_version == 2)
            assert (host.contents, host.loaded) == ("two", [1, 2])
            # The next offer takes that one's place.
            ground.driver.run_step(2)
            ground.driver.run_step(3)
            fourth = ground.publish(4, "four")
            sent = sending(sender, fourth)
            assert await other == []
            assert want(ground, 4) == 4
            assert await sent == ["r"]
            await ground.until("r", lambda view: view.loaded_version == 4)
            assert host.contents == SENT

    run(work())


@pytest.mark.parametrize("wrong", ["breaks_off", "another_model"])
def test_weights_that_do_not_arrive_are_replaced_by_the_files(
    ground: Field, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """Training goes on, and the next version is sent again."""
    monkeypatch.setattr(direct_module, "STANDS_S", 0.5)
    monkeypatch.setattr(direct_module, "SEND_WITHIN_S", 0.5)

    async def work() -> None:
        host = MadeUpHost(link := MemoryLink(), **{wrong: True})
        async with ground.closing() as fleet:
            await ground.start("r", host)
            await first_version(ground)
            sender = NcclBroadcaster(ground.driver.client, ground.driver.stack.token, link)
            second = ground.publish(2, "two")
            sent = sending(sender, second)
            want(ground, 2)
            await ground.until("r", lambda view: view.loaded_version == 2)
            assert host.contents == "two"
            await collect(fleet, asking(second))
            assert await sent == []
            assert not sender.stuck
            ground.driver.run_step(2)
            ground.driver.run_step(3)
            fourth = ground.publish(4, "four")
            sent = sending(sender, fourth)
            want(ground, 4)
            assert await sent == ["r"]
            assert host.contents == SENT
            # A group is left behind only where somebody may have joined it.
            assert len(link.sent) == (2 if wrong == "breaks_off" else 1)

    run(work())


def test_an_offer_that_is_not_wanted_ends(ground: Field, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers_module, "STANDS_S", 0.2)

    async def work() -> None:
        async with ground.closing():
            await ground.start("r", MadeUpHost(link := MemoryLink()))
            await first_version(ground)
            sender = NcclBroadcaster(ground.driver.client, ground.driver.stack.token, link)
            assert await sending(sender, ground.publish(2, "two")) == []
            assert ground.seen("r").loaded_version == 1
            url = ground.seen("r").url
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
                refused = await client.post("/v1/weights", json=body, headers=ground.headers)
                assert refused.status_code == 409
                assert "version 2 was not wanted in time" in refused.json()["detail"]

    run(work())


def test_a_transfer_that_cannot_be_ended_is_the_last_one(
    ground: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that never comes together: training goes on without it."""
    for name in ("SEND_WITHIN_S", "STANDS_S", "GIVE_UP_WITHIN_S"):
        monkeypatch.setattr(direct_module, name, 0.3)

    async def work() -> None:
        host = MadeUpHost(link := MemoryLink(deaf=True), breaks_off=True)
        async with ground.closing():
            await ground.start("r", host)
            await first_version(ground)
            second = ground.publish(2, "two")
            sender = NcclBroadcaster(ground.driver.client, ground.driver.stack.token, link)
            want(ground, 2)
            assert await sending(sender, second) == []
            assert sender.stuck
            assert await sending(sender, second) == []
            assert len(link.sent) == 1, "it was tried again"
            await ground.until("r", lambda view: view.loaded_version == 2)
            link.over[next(iter(link.sent))].set()

    run(work())


def test_offers_answer_once() -> None:
    """Accepted at the last moment, declined before it was made, or replaced."""

    def offer(version: int) -> WeightOffer:
        parameters = [Parameter(name="a", dtype="float32", shape=[1])]
        return WeightOffer(
            policy_version=version, manifest_digest="d", parameters=parameters, unique_id="id"
        )

    def stored(version: int) -> StoredVersion:
        return StoredVersion(number=version, manifest_digest="d", uri="s3://b/k")

    async def work() -> None:
        offers = Offers()
        first = asyncio.create_task(offers.stand(offer(1)))
        found = await offers.of(stored(1))
        assert found is not None
        assert offers.accept(found, 3)
        assert not offers.accept(found, 3)
        offers.decline(stored(1))
        assert await first == 3
        offers.decline(stored(2))
        assert await offers.stand(offer(2)) == 0
        third = asyncio.create_task(offers.stand(offer(3)))
        await asyncio.sleep(0)
        fourth = asyncio.create_task(offers.stand(offer(4)))
        assert await third == 0
        offers.decline(stored(4))
        assert await fourth == 0

    run(work())


def test_a_group_that_somebody_may_have_joined_is_not_used_again(ground: Field) -> None:
    """No answer is not a refusal."""
    link = MemoryLink()
    report = buffer_wire.ReplicaReport(
        url="http://127.0.0.1:9", state="serving", loaded_version=1, manifest_digest="a" * 64
    )
    ground.driver.client.report_replica("unreachable", report)
    sender = NcclBroadcaster(ground.driver.client, ground.driver.stack.token, link)
    for version in (2, 3):
        assert sender.send(version, "b" * 64, WEIGHTS) == []
    assert len(link.sent) == 2
