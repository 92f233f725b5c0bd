"""All replicas of a run, as the collector sees them: finds them, spreads work, forgives losses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import httpx

from bapo_core.errors import BapoError
from services.buffer.api import wire as buffer_wire
from services.buffer.api.client import LONG_POLL_S, BufferClient
from services.common.threads import run_detached
from services.rollout.api.wire import GeneratedGroup, GenerateRequest
from services.rollout.client import ReplicaClient, ReplicaFailed

log = logging.getLogger(__name__)

PROMPTS_IN_FLIGHT = 128
"""Given to a replica at a time: enough for it to be busy, few enough to leave some for others."""
SILENT_S = 10.0
"""A replica that has said nothing for so long is lost, and what it held is asked for elsewhere."""
LOOK_EVERY_S = 1.0
COMPLAIN_EVERY_S = 10.0


@dataclass(eq=False)
class _Replica:
    name: str
    client: ReplicaClient
    view: buffer_wire.ReplicaView
    heard_at: float = 0.0
    """When it last said something, by our clock."""
    failed_at: float = float("-inf")
    prompts: int = 0
    tokens: int = 0
    """At most so many are still to come of what it was asked for."""
    requests: set[asyncio.Task[None]] = field(default_factory=set)

    def serves(self, request: GenerateRequest) -> bool:
        """By what it has said since it last failed us."""
        return (
            self.view.loaded_version == request.policy_version
            and self.view.manifest_digest == request.manifest_digest
            and self.heard_at > self.failed_at
            and time.monotonic() - self.heard_at < SILENT_S
        )

    def has_room(self) -> bool:
        return self.prompts < PROMPTS_IN_FLIGHT


class Fleet:
    """Spreads prompts over the replicas that serve the version asked for."""

    def __init__(self, buffer: BufferClient, token: str) -> None:
        self._buffer, self._token = buffer, token
        self._replicas: dict[str, _Replica] = {}
        self._changed = asyncio.Condition()
        self._awaited = ""
        """The digest of the weights that somebody waits for."""
        self._look = asyncio.Event()

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """While it lasts, replicas come and go."""
        limits = httpx.Limits(
            max_connections=None,
            max_keepalive_connections=PROMPTS_IN_FLIGHT,
            # Below the 5 seconds after which replicas hang up.
            keepalive_expiry=2.0,
        )
        async with httpx.AsyncClient(limits=limits) as self._http:
            watching = asyncio.create_task(self._watch())
            try:
                yield
            finally:
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching

    async def generate(
        self, request: GenerateRequest, on_group: Callable[[GeneratedGroup], None]
    ) -> None:
        """Calls `on_group` once for every prompt, as soon as its group is whole.

        Waits for replicas as long as there are none. Raises `BapoError` for a prompt that no
        replica can answer.
        """
        size = await self.until_served(request) or len(request.prompts)
        everything = range(len(request.prompts))
        try:
            async with asyncio.TaskGroup() as tasks:
                for start in range(0, len(everything), size):
                    chunk = list(everything[start : start + size])
                    tasks.create_task(self._until_done(request, chunk, on_group))
        except* BapoError as errors:
            raise errors.exceptions[0] from errors

    async def until_served(self, request: GenerateRequest) -> int:
        """Waits for a replica that serves the version; how many prompts it wants at a time."""
        async with self._changed:
            return (await self._free(request)).view.prompts_per_request

    async def _until_done(
        self,
        request: GenerateRequest,
        chunk: list[int],
        on_group: Callable[[GeneratedGroup], None],
    ) -> None:
        """The groups of these prompts, however many replicas it takes."""
        while chunk:
            replica = await self._take(request, len(chunk))
            asking = asyncio.create_task(self._ask(replica, request, chunk, on_group))
            replica.requests.add(asking)
            try:
                await asking
            except asyncio.CancelledError:
                if not asking.cancelled() or _being_cancelled():
                    asking.cancel()
                    raise
                log.warning(
                    "replica %s is silent; %d prompts go elsewhere", replica.name, len(chunk)
                )
            except ReplicaFailed as error:
                replica.failed_at = time.monotonic()
                log.warning(
                    "replica %s: %s; %d prompts are asked for again",
                    replica.name,
                    error,
                    len(chunk),
                )
            finally:
                replica.requests.discard(asking)
                await self._give_back(replica, request, len(chunk))

    async def _ask(
        self,
        replica: _Replica,
        request: GenerateRequest,
        chunk: list[int],
        on_group: Callable[[GeneratedGroup], None],
    ) -> None:
        """Takes from `chunk` what the replica answers. Raises `ReplicaFailed`."""
        asked = list(chunk)
        part = request.model_copy(update={"prompts": [request.prompts[index] for index in asked]})
        async for group in replica.client.generate(part):
            if group.refused:
                raise BapoError(f"replica {replica.name} refuses a prompt: {group.refused}")
            if not _as_asked(request, group, len(asked)):
                raise ReplicaFailed("a group that is not what was asked for")
            index = asked[group.index]
            if index not in chunk:
                raise ReplicaFailed(f"two groups for prompt {index}")
            chunk.remove(index)
            replica.prompts -= 1
            replica.tokens -= _cost(request)
            on_group(group.model_copy(update={"index": index}))
        if chunk:
            raise ReplicaFailed(f"the answer ended {len(chunk)} groups early")

    # -- who takes what

    async def _take(self, request: GenerateRequest, prompts: int) -> _Replica:
        """The replica with the fewest tokens to come, once one serves the version."""
        async with self._changed:
            replica = await self._free(request)
            replica.prompts += prompts
            replica.tokens += prompts * _cost(request)
            return replica

    async def _give_back(self, replica: _Replica, request: GenerateRequest, prompts: int) -> None:
        async with self._changed:
            replica.prompts -= prompts
            replica.tokens -= prompts * _cost(request)
            self._changed.notify_all()

    async def _free(self, request: GenerateRequest) -> _Replica:
        """Waits, with `_changed` held, for a replica that has room and serves the version."""
        complained = time.monotonic()
        while True:
            serving = [r for r in self._replicas.values() if r.serves(request)]
            free = [replica for replica in serving if replica.has_room()]
            if free:
                return min(free, key=lambda replica: replica.tokens)
            if not serving:
                self._awaited = request.manifest_digest
                self._look.set()
                if time.monotonic() - complained > COMPLAIN_EVERY_S:
                    complained = time.monotonic()
                    log.warning(
                        "no replica serves version %d: %s", request.policy_version, self.states()
                    )
            with suppress(TimeoutError):
                async with asyncio.timeout(COMPLAIN_EVERY_S):
                    await self._changed.wait()

    def states(self) -> str:
        """What every replica last said, for people."""
        return (
            "; ".join(
                f"{replica.name} is {replica.view.state} with version {replica.view.loaded_version}"
                f" ({time.monotonic() - replica.heard_at:.0f} s ago) {replica.view.detail}".rstrip()
                for replica in self._replicas.values()
            )
            or "none has reported yet"
        )

    # -- who is there

    async def _watch(self) -> None:
        while True:
            awaited = self._awaited
            try:
                views = await run_detached(
                    self._buffer.replicas, serving=awaited, wait=LONG_POLL_S if awaited else 0.0
                )
            except BapoError as error:
                log.warning("%s", error)
                await asyncio.sleep(LOOK_EVERY_S)
                continue
            async with self._changed:
                self._learn(views)
                if any(view.manifest_digest == awaited for view in views):
                    self._awaited = ""
                self._changed.notify_all()
            self._look.clear()
            if not self._awaited:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._look.wait()

    def _learn(self, views: list[buffer_wire.ReplicaView]) -> None:
        now = time.monotonic()
        for view in views:
            known = self._replicas.get(view.name)
            if known is None or known.view.url != view.url:
                client = ReplicaClient(view.url, self._http, self._token)
                known = self._replicas[view.name] = _Replica(view.name, client, view)
            known.view, known.heard_at = view, now - view.silent_s
            if view.silent_s >= SILENT_S:
                for request in known.requests:
                    request.cancel()


def _as_asked(request: GenerateRequest, group: GeneratedGroup, prompts: int) -> bool:
    return (
        0 <= group.index < prompts
        and group.policy_version == request.policy_version
        and len(group.responses) == request.group_size
    )


def _cost(request: GenerateRequest) -> int:
    """Tokens that a prompt may take."""
    return request.group_size * request.max_tokens


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
