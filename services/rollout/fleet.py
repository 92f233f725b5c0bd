"""The collector's view of a run's replicas: discovery, load balancing, and retries after losses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field

import httpx

from bapo_core.errors import BapoError
from services.buffer.api import wire as buffer_wire
from services.buffer.api.client import LONG_POLL_S, BufferClient
from services.buffer.api.wire import HEARTBEAT_TIMEOUT_S
from services.common.http_options import direct_options
from services.common.threads import run_detached
from services.rollout.api.addresses import ReplicaHosts
from services.rollout.api.wire import (
    Generated,
    GeneratedGroup,
    GeneratedTokens,
    GenerateRequest,
)
from services.rollout.client import ReplicaClient
from services.rollout.errors import EngineDied, EngineFailed, PromptsFailed, ReplicaFailed
from services.rollout.unfinished import UnfinishedGroups

log = logging.getLogger(__name__)

PROMPTS_IN_FLIGHT = 128
"""Most prompts outstanding on one replica: enough to keep it busy, few enough to share the rest."""
POLL_INTERVAL_S = 1.0
FAILURES_TO_GIVE_UP = 3
"""Times that engines may fail on prompts in a row with the same error."""
ANY_FAILURES_TO_GIVE_UP = 6
"""Times that engines may fail on prompts in a row with whatever errors, or die on them alone: a
message may name a replica's device or an address in its memory."""
DEATHS_TO_ISOLATE = 2
"""Engines that may die in a row while they generate prompts, before the prompts are tried alone.
Most die of something else, and only once: then all prompts are retried at once."""
WARNING_INTERVAL_S = 10.0


@dataclass(eq=False)
class _Replica:
    name: str
    client: ReplicaClient
    view: buffer_wire.CallableReplica
    heartbeat_at: float = 0.0
    """Time of its last report, by this process's monotonic clock."""
    failed_at: float = float("-inf")
    prompts: int = 0
    """Prompts outstanding on this replica."""
    tokens: int = 0
    """Upper bound on the response tokens outstanding on this replica."""
    requests: set[asyncio.Task[None]] = field(default_factory=set)

    def serves(self, request: GenerateRequest) -> bool:
        """Whether the replica reported the request's version recently and has not failed since."""
        return (
            self.view.loaded_version == request.policy_version
            and self.view.manifest_digest == request.manifest_digest
            and self.heartbeat_at > self.failed_at
            and time.monotonic() - self.heartbeat_at < HEARTBEAT_TIMEOUT_S
        )

    def has_room(self) -> bool:
        return self.prompts < PROMPTS_IN_FLIGHT

    def is_empty(self) -> bool:
        return self.prompts == 0

    def add(self, chunk: _Chunk) -> None:
        """Counts the missing prompts of a chunk as outstanding."""
        self.prompts += len(chunk.missing)
        self.tokens += len(chunk.missing) * _max_tokens(chunk.request)

    def remove(self, chunk: _Chunk) -> None:
        """Counts the missing prompts of a chunk as outstanding no longer."""
        self.prompts -= len(chunk.missing)
        self.tokens -= len(chunk.missing) * _max_tokens(chunk.request)


@dataclass(eq=False)
class _Chunk:
    """Prompts of a request that go to a replica together."""

    request: GenerateRequest
    missing: list[int]
    """Indices of the prompts that are not answered yet."""
    on_group: Callable[[GeneratedGroup], None]
    unfinished: UnfinishedGroups
    failures: list[str] = field(default_factory=list)
    """Errors that engines raised on it since one of them last answered a prompt."""
    deaths: int = 0
    """Engines that died in a row while they generated it."""


@dataclass(eq=False)
class _Trial:
    """A chunk that engines died on is generated alone, to find out whether that is its fault."""

    request: GenerateRequest
    replica: _Replica | None = None
    """Where it is generated; None while it waits for a replica."""
    deaths: Counter[str] = field(default_factory=Counter)
    """Engines that died in it, by replica."""


class Fleet:
    """Spreads prompts over the replicas that serve the requested version of the weights."""

    def __init__(self, buffer: BufferClient, hosts: ReplicaHosts) -> None:
        """hosts: where replicas may be; those that report other addresses are not called."""
        self._buffer, self._hosts = buffer, hosts
        self._replicas: dict[str, _Replica] = {}
        self._changed = asyncio.Condition()
        self._awaited_digest = ""
        """Manifest digest of the weights that a request waits for."""
        self._poll_now = asyncio.Event()
        self._trials = asyncio.Lock()
        """Held by the trial in progress: another one at the same time would only cost a replica."""
        self._trial: _Trial | None = None
        self._false_suspicions = 0
        """Engines that died on prompts, alone in them, which were generated afterwards."""

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Discovers replicas and follows their heartbeats while the context lasts."""
        limits = httpx.Limits(
            max_connections=None,
            max_keepalive_connections=PROMPTS_IN_FLIGHT,
            # Below uvicorn's keep-alive time-out of 5 seconds: a request on a connection that the
            # server closes at that moment would fail.
            keepalive_expiry=2.0,
        )
        async with httpx.AsyncClient(limits=limits, **direct_options()) as self._http:
            watching = asyncio.create_task(self._watch())
            try:
                yield
            finally:
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching

    async def generate(
        self,
        request: GenerateRequest,
        on_group: Callable[[GeneratedGroup], None],
        *,
        indices: Collection[int],
        unfinished: UnfinishedGroups,
    ) -> None:
        """Calls `on_group` once for every prompt of these indices, when its group is complete.

        unfinished: responses to continue. It gets the tokens that replicas stream, so that another
            replica continues what one has begun.

        Prompts that a replica takes in one request go together, even if only some of them have
        indices: an engine that generates a request as a whole gives the same groups for the same
        request, but not for a part of it.

        Waits while there is no replica. Raises `PromptsFailed` for a prompt that an engine refuses,
        and for prompts on which engines keep failing or dying.
        """
        count = len(request.prompts)
        chunk_size = await self.wait_until_served(request) or count

        def on_any_group(group: GeneratedGroup) -> None:
            if group.index in indices:
                on_group(group)

        try:
            async with asyncio.TaskGroup() as tasks:
                for start in range(0, count, chunk_size):
                    chunk = list(range(start, min(start + chunk_size, count)))
                    if any(index in indices for index in chunk):
                        tasks.create_task(
                            self._generate_chunk(_Chunk(request, chunk, on_any_group, unfinished))
                        )
        except* BapoError as errors:
            raise errors.exceptions[0] from errors

    async def wait_until_served(self, request: GenerateRequest) -> int:
        """Waits for a replica that serves the version; returns its `prompts_per_request`."""
        async with self._changed:
            return (await self._wait_for_free_replica(request)).view.prompts_per_request

    async def _generate_chunk(self, chunk: _Chunk) -> None:
        """Generates the prompts that are missing, on as many replicas as it takes.

        Raises `PromptsFailed` when engines fail or die on them again and again.
        """
        while chunk.missing:
            if chunk.deaths < DEATHS_TO_ISOLATE:
                await self._attempt(await self._reserve(chunk), chunk)
            else:
                await self._try_alone(chunk)

    async def _try_alone(self, chunk: _Chunk) -> None:
        """Generates the chunk alone until each response has another token, or has ended.

        What made engines die on the chunk before was then something else, and the chunk goes on
        beside others. Each attempt is on the replica whose engines died least often in the trial,
        because a broken device is not the fault of the prompts. The loss of a replica or of the
        network proves nothing, and the attempt is repeated.

        Raises `PromptsFailed` when engines die on the chunk too often in a row.
        """
        async with self._trials:
            trial = self._trial = _Trial(chunk.request)
            try:
                while True:
                    replica = await self._reserve_alone(chunk, trial)
                    error = await self._attempt(replica, chunk, alone=True)
                    if error is None:
                        break
                    if isinstance(error, EngineDied):
                        trial.deaths[replica.name] += 1
                        self._blame(chunk, trial, error)
            finally:
                async with self._changed:
                    self._trial = None
                    self._changed.notify_all()
            self._false_suspicions += trial.deaths.total()
            chunk.deaths = 0

    def _blame(self, chunk: _Chunk, trial: _Trial, error: EngineDied) -> None:
        """Raises `PromptsFailed` if the deaths of engines in a trial prove the chunk's fault.

        Engines that die at random may die on the same prompt several times in a row. Such engines
        have also died on prompts, alone in them, that were generated afterwards. Each of those
        deaths raises the number of deaths that are a proof by one.
        """
        alone = trial.deaths.total()
        if alone < ANY_FAILURES_TO_GIVE_UP + self._false_suspicions:
            return
        prompts = [chunk.request.prompts[index].prompt_token_ids for index in chunk.missing[:3]]
        lengths = ", ".join(str(len(token_ids)) for token_ids in prompts)
        raise PromptsFailed(
            chunk.missing,
            f"engines died {chunk.deaths} times in a row while they generated responses "
            f"({lengths} tokens of prompt), {alone} times with no other prompt in them (replicas: "
            f"{', '.join(sorted(trial.deaths))}). Their last error: {error}. Mend what it names, "
            "or leave the prompt out of the data",
        )

    async def _attempt(
        self, replica: _Replica, chunk: _Chunk, *, alone: bool = False
    ) -> ReplicaFailed | None:
        """Generates the chunk on a replica that is reserved for it; returns why that failed.

        alone: as in `_stream`.

        Raises `PromptsFailed` when engines have failed on the chunk too often in a row.
        """
        missing, count = chunk.missing, len(chunk.missing)
        stream = asyncio.create_task(self._stream(replica, chunk, alone=alone))
        replica.requests.add(stream)
        try:
            await stream
        except asyncio.CancelledError:
            if not stream.cancelled() or _being_cancelled():
                stream.cancel()
                raise
            error = ReplicaFailed(f"no heartbeat for {HEARTBEAT_TIMEOUT_S:.0f} s")
        except ReplicaFailed as failure:
            error = failure
            replica.failed_at = time.monotonic()
        else:
            return None
        finally:
            replica.requests.discard(stream)
            await self._release(replica, chunk)
        if len(missing) < count:
            chunk.failures, chunk.deaths = [], 0
        if isinstance(error, EngineFailed):
            chunk.failures.append(str(error))
            _give_up_on(missing, chunk.failures)
        if isinstance(error, EngineDied):
            chunk.deaths += 1
        chunk.unfinished.lost.update(missing)
        log.warning(
            "replica %s failed: %s; %d prompts are retried", replica.name, error, len(missing)
        )
        return error

    async def _stream(self, replica: _Replica, chunk: _Chunk, *, alone: bool) -> None:
        """Generates on one replica and removes from `missing` the prompts that it answers.

        alone: whether to end as soon as each response has another token.

        Raises `ReplicaFailed` unless it answers all of them.
        """
        request, missing, unfinished = chunk.request, chunk.missing, chunk.unfinished
        indices = list(missing)
        lengths = {index: unfinished.open_lengths(index) for index in indices}
        prompts = [
            request.prompts[index].model_copy(update={"started": unfinished.started(index)})
            for index in indices
        ]
        # With every token streamed, a trial begins with the very token on which an engine died.
        stream_every = 1 if chunk.deaths else request.stream_every
        part = request.model_copy(update={"prompts": prompts, "stream_every": stream_every})
        async with aclosing(replica.client.generate(part)) as stream:
            async for generated in stream:
                if not _matches(request, generated, len(indices)):
                    raise ReplicaFailed(f"sent what does not match the request: {generated!r:.500}")
                index = indices[generated.index]
                if isinstance(generated, GeneratedGroup):
                    _take_group(replica, chunk, index, generated)
                elif isinstance(generated, GeneratedTokens):
                    _add_tokens(generated, index, unfinished)
                else:
                    log.warning(
                        "replica %s makes tokens of unfinished responses void: %s",
                        replica.name,
                        generated.discarded,
                    )
                    unfinished.void(index)
                if alone and all(
                    _all_longer(lengths[index], unfinished.open_lengths(index)) for index in missing
                ):
                    return
        if missing:
            raise ReplicaFailed(f"the response ended with {len(missing)} groups missing")

    # -- load balancing

    async def _reserve(self, chunk: _Chunk) -> _Replica:
        """Waits for replicas that serve the version; takes that with the fewest tokens to come."""
        async with self._changed:
            replica = await self._wait_for_free_replica(chunk.request)
            replica.add(chunk)
            return replica

    async def _reserve_alone(self, chunk: _Chunk, trial: _Trial) -> _Replica:
        """Waits for the replica of the trial to be empty, and keeps it so until the trial ends."""
        async with self._changed:
            trial.replica = None
            replica = trial.replica = await self._wait_for_free_replica(chunk.request, trial)
            replica.add(chunk)
            return replica

    async def _release(self, replica: _Replica, chunk: _Chunk) -> None:
        async with self._changed:
            replica.remove(chunk)
            self._changed.notify_all()

    async def _wait_for_free_replica(
        self, request: GenerateRequest, trial: _Trial | None = None
    ) -> _Replica:
        """Waits, with `_changed` held, for a replica that has room and serves the version.

        trial: the trial for which the replica must be empty, if it is for one.
        """
        warned_at = time.monotonic()
        while True:
            serving = [r for r in self._replicas.values() if r.serves(request)]
            kept = self._replica_kept_for_trial()
            if trial is None:
                free = [r for r in serving if r.has_room() and r is not kept]
            else:
                free = [kept] if kept is not None and kept.is_empty() else []
            if free:
                return min(free, key=lambda replica: replica.tokens)
            if not serving:
                self._awaited_digest = request.manifest_digest
                self._poll_now.set()
                if time.monotonic() - warned_at > WARNING_INTERVAL_S:
                    warned_at = time.monotonic()
                    log.warning(
                        "no replica serves version %d: %s",
                        request.policy_version,
                        self.describe_replicas(),
                    )
            with suppress(TimeoutError):
                async with asyncio.timeout(WARNING_INTERVAL_S):
                    await self._changed.wait()

    def _replica_kept_for_trial(self) -> _Replica | None:
        """Returns the replica that takes no other prompts, because a trial runs or will run there.

        It serves the version of the trial, and has the fewest failures in it, then the fewest
        prompts.
        """
        trial = self._trial
        if trial is None:
            return None
        if trial.replica is not None:
            return trial.replica
        serving = [r for r in self._replicas.values() if r.serves(trial.request)]
        return min(serving, key=lambda r: (trial.deaths[r.name], r.prompts), default=None)

    def describe_replicas(self) -> str:
        """Returns the last report of every replica, for people."""
        return (
            "; ".join(
                f"{replica.name} is {replica.view.state} with version {replica.view.loaded_version}"
                f" (reported {time.monotonic() - replica.heartbeat_at:.0f} s ago)"
                f" {replica.view.detail}".rstrip()
                for replica in self._replicas.values()
            )
            or "none has reported yet"
        )

    # -- discovery

    async def _watch(self) -> None:
        polled, polled_at = "", 0.0
        while True:
            digest = self._awaited_digest
            if digest and digest == polled:
                # Requests still wait for it: what serves it is lost, has failed, or is full.
                await asyncio.sleep(polled_at + POLL_INTERVAL_S - time.monotonic())
            polled, polled_at = digest, time.monotonic()
            try:
                views = await run_detached(
                    self._buffer.replica_credentials,
                    serving=digest,
                    wait=LONG_POLL_S if digest else 0.0,
                )
            except BapoError as error:
                log.warning("%s", error)
                await asyncio.sleep(POLL_INTERVAL_S)
                continue
            async with self._changed:
                self._update(views)
                if any(view.manifest_digest == digest for view in views):
                    self._awaited_digest = ""
                self._changed.notify_all()
            self._poll_now.clear()
            if not self._awaited_digest:
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_INTERVAL_S):
                        await self._poll_now.wait()

    def _update(self, views: list[buffer_wire.CallableReplica]) -> None:
        now = time.monotonic()
        for view in views:
            if not self._hosts.admit(view.name, view.url):
                continue
            replica = self._replicas.get(view.name)
            address = view.url, view.credential
            if replica is None or (replica.view.url, replica.view.credential) != address:
                client = ReplicaClient(view.url, self._http, view.credential)
                replica = self._replicas[view.name] = _Replica(view.name, client, view)
            replica.view, replica.heartbeat_at = view, now - view.silent_s
            if view.silent_s >= HEARTBEAT_TIMEOUT_S:
                for request in replica.requests:
                    request.cancel()


def _give_up_on(missing: Sequence[int], failures: Sequence[str]) -> None:
    """Raises `PromptsFailed` if engines have failed on these prompts too often in a row.

    failures: errors of the engines since one of them last answered a prompt.
    """
    latest = failures[-FAILURES_TO_GIVE_UP:]
    is_same = len(latest) == FAILURES_TO_GIVE_UP and len(set(latest)) == 1
    if is_same or len(failures) >= ANY_FAILURES_TO_GIVE_UP:
        raise PromptsFailed(
            missing,
            f"the engine failed {len(failures)} times in a row: {failures[-1]}; the model cannot "
            "take these prompts, or its directory is damaged",
        )


def _matches(request: GenerateRequest, generated: Generated, prompts: int) -> bool:
    return 0 <= generated.index < prompts and generated.policy_version == request.policy_version


def _take_group(replica: _Replica, chunk: _Chunk, index: int, group: GeneratedGroup) -> None:
    """Hands over the group of the prompt `index`, which is missing no longer."""
    request = chunk.request
    if group.failed:
        raise EngineFailed(group.failed)
    if group.refused:
        raise PromptsFailed([index], f"replica {replica.name} refuses a prompt: {group.refused}")
    if len(group.responses) != request.group_size:
        raise ReplicaFailed(
            f"sent {len(group.responses)} responses instead of {request.group_size}"
        )
    if index not in chunk.missing:
        raise ReplicaFailed(f"sent two groups for prompt {index}")
    chunk.missing.remove(index)
    replica.prompts -= 1
    replica.tokens -= _max_tokens(request)
    chunk.on_group(group.model_copy(update={"index": index}))


def _add_tokens(tokens: GeneratedTokens, index: int, unfinished: UnfinishedGroups) -> None:
    try:
        unfinished.add(tokens.model_copy(update={"index": index}))
    except ValueError as error:
        raise ReplicaFailed(f"sent tokens out of place: {error}") from error


def _all_longer(before: Mapping[int, int], now: Mapping[int, int]) -> bool:
    """Returns whether every response has more tokens than before, or has ended."""
    return all(now[number] > length for number, length in before.items() if number in now)


def _max_tokens(request: GenerateRequest) -> int:
    """Returns the most tokens that the responses to one prompt may have."""
    return request.group_size * request.max_tokens


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
