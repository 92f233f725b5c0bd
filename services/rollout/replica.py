"""A rollout replica: keeps an engine at the target version of its run's weights and generates.

Pull-based and level-triggered: the replica asks the buffer service for the target version, brings
its engine there, and reports the version that it serves. Restarts, additional replicas and lost
messages need no other treatment. Each request names its version by number and digest. Nothing
generates while weights are being loaded, so each request is answered by exactly one version.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Set
from contextlib import suppress
from functools import partial
from pathlib import Path

from bapo_core.errors import BapoError
from services.buffer.api.client import LONG_POLL_S, BufferClient
from services.buffer.api.spans import SpanRecorder
from services.buffer.api.wire import (
    ReplicaHeartbeat,
    ReplicaReport,
    ReplicaState,
    StoredVersion,
    TargetWeights,
)
from services.common.errors import ServiceCallError
from services.common.threads import run_detached
from services.rollout.api.wire import Generated, GenerateRequest
from services.rollout.driver import EngineDriver
from services.rollout.errors import EngineFaulty, EngineLost, WrongVersion
from services.rollout.offers import PendingOffer
from services.rollout.weights import WeightCache

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 2.0
CHECK_INTERVAL_S = 5.0
VERSION_TIMEOUT_S = 60.0
"""Seconds that a request waits for the replica to serve its version."""
DRAIN_TIMEOUT_S = 600.0
"""Seconds that groups in progress may take to finish before other weights are loaded."""
FIRST_RETRY_S, LONGEST_RETRY_S = 0.5, 15.0


class Replica:
    """Serves the target version of its run and generates with it."""

    def __init__(
        self,
        driver: EngineDriver,
        buffer: BufferClient,
        cache: WeightCache,
        *,
        name: str,
        url: str,
        credential: str,
        pending_offer: PendingOffer | None = None,
    ) -> None:
        """Makes a replica, which does nothing until its `background_tasks` run.

        url, credential: address at which it is called, and bearer token that it requires.
        pending_offer: holds the trainer's offers if `sync.transport` is `nccl`; None otherwise.
        """
        self._driver, self._buffer, self._cache = driver, buffer, cache
        self._name, self._url, self._pending_offer = name, url, pending_offer
        self._credential = credential
        self._receives = pending_offer is not None
        """Whether the most recent eligible version arrived by NCCL (then its files need not be
        prefetched)."""
        self._state: ReplicaState = "starting"
        self._detail = ""
        self._target: TargetWeights | None = None
        self._serving: StoredVersion | None = None
        self._changed = asyncio.Condition()
        self._generating: set[asyncio.Task[object]] = set()
        self._cut_off: dict[asyncio.Task[object], BapoError] = {}
        """Generations that end early, and why."""
        self._out_of_date = asyncio.Event()
        """Set when the target or the served version may have changed."""
        self._report_due = asyncio.Event()
        self._spans = SpanRecorder(buffer, name)
        self._busy_since = 0.0

    # -- generation

    async def wait_until_serving(self, request: GenerateRequest) -> None:
        """Waits until the request's version is served.

        Raises `WrongVersion` after `VERSION_TIMEOUT_S`.
        """
        async with self._changed:
            with suppress(TimeoutError):
                async with asyncio.timeout(VERSION_TIMEOUT_S):
                    await self._changed.wait_for(lambda: self._serves(request))
        if not self._serves(request):
            report = self.report()
            raise WrongVersion(
                f"version {request.policy_version} is not served here: the replica is "
                f"{report.state}, with version {report.loaded_version} loaded. {report.detail}"
            )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Generated]:
        """Yields groups as they are completed, and tokens before that.

        Raises `WrongVersion` and `EngineLost`.
        """
        task = asyncio.current_task()
        assert task is not None
        await self.wait_until_serving(request)
        if not self._generating:
            self._busy_since = time.monotonic()
        self._generating.add(task)
        try:
            async for generated in self._driver.generate(request):
                if generated.policy_version != request.policy_version:
                    raise EngineFaulty(
                        f"the engine generated with version {generated.policy_version} instead "
                        f"of {request.policy_version}"
                    )
                yield generated
        except EngineLost as error:
            self._mark_engine_lost(error)
            raise
        except asyncio.CancelledError:
            if task not in self._cut_off:
                raise
            task.uncancel()
            reason = self._cut_off[task]
            raise type(reason)(str(reason)) from reason
        finally:
            self._generating.discard(task)
            self._cut_off.pop(task, None)
            if not self._generating:
                self._spans.record("generate", request.policy_version, self._busy_since)
            async with self._changed:
                self._changed.notify_all()

    def _serves(self, request: GenerateRequest) -> bool:
        return (
            self._serving is not None
            and self._serving.number == request.policy_version
            and self._serving.manifest_digest == request.manifest_digest
        )

    def _mark_engine_lost(self, error: EngineLost) -> None:
        """Cuts off what generates and has the target version loaded again."""
        if self._serving is None:
            return  # marked already
        log.error("engine lost: %s", error)
        self._serving = None
        self._cut_off_tasks(self._generating - {asyncio.current_task()}, error)
        self._set_state("failing", str(error))
        self._out_of_date.set()

    # -- weights

    async def prepare(self, directory: Path) -> None:
        """Has the engine do what loading the first version would do, with the initial model.

        A model that cannot be prepared is no error yet: loading its first version will say so.
        """
        try:
            with self._spans.span("prepare", 0):
                await self._driver.prepare(directory)
        except (BapoError, OSError, RuntimeError) as error:  # RuntimeError: no memory on the device
            log.warning("the engine is not prepared with %s: %s", directory, error)

    def background_tasks(self) -> list[Coroutine[None, None, None]]:
        """Returns the coroutines that must run, each for ever, while the replica does."""
        return [
            self.watch_target_forever(),
            self.follow_target_forever(),
            self.report_forever(),
            self.check_engine_forever(),
        ]

    async def watch_target_forever(self) -> None:
        """Learns the run's target version from the buffer service, by long polls."""
        tag = ""
        while True:
            try:
                target = await run_detached(self._buffer.target_weights, tag, wait=LONG_POLL_S)
            except ServiceCallError as error:
                # The replica itself is sound and goes on serving its version.
                log.warning("%s", error)
                await asyncio.sleep(FIRST_RETRY_S)
                continue
            self._target, tag = target, target.tag
            self._out_of_date.set()

    async def follow_target_forever(self) -> None:
        """Serves the target version, and tries again with growing pauses when that fails."""
        pause = FIRST_RETRY_S
        while True:
            await self._out_of_date.wait()
            self._out_of_date.clear()
            target = self._target
            if target is None:
                continue
            try:
                await self._serve(target)
                pause = FIRST_RETRY_S
            except (BapoError, OSError) as error:  # OSError: a full disk, for example
                self._set_state("failing", str(error))
                log.error("cannot serve version %d: %s", target.version, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_RETRY_S)
                self._out_of_date.set()

    async def _serve(self, target: TargetWeights) -> None:
        desired = self._desired_version(target)
        if desired is not None and desired != self._serving:
            await self._load(desired, target.newest)
        # A version that the trainer broadcasts needs no files.
        prefetched = None if self._receives else target.newest
        if prefetched is not None and not self._cache.holds(prefetched):
            # The newest version is usually the next target.
            with self._spans.span("fetch", prefetched.number):
                await asyncio.to_thread(self._cache.fetch, prefetched)
        kept = [version for version in (target.stored, target.newest, self._serving) if version]
        await asyncio.to_thread(self._cache.prune, kept)
        if self._serving is not None:
            self._set_state("serving")

    def _desired_version(self, target: TargetWeights) -> StoredVersion | None:
        """Returns the target version; while it is not published, the version served or the newest.

        A run that was stopped while its collector was ahead starts again with a target that only
        the trainer can publish. The pipeline creates the training job after every replica serves
        the last segment's weights, so a replica that starts must not wait for that job. Where the
        job runs already, the replica loads weights once more, in time that it would wait.
        """
        if target.stored is not None:
            return target.stored
        if self._serving is not None:
            return self._serving
        newest = target.newest
        return newest if newest is not None and newest.number < target.version else None

    async def _load(self, stored: StoredVersion, newest: StoredVersion | None) -> None:
        started = time.monotonic()
        received = False
        if self._pending_offer is not None and self._serving is not None and stored == newest:
            received = self._receives = await self._receive(stored, self._pending_offer)
        if not received:
            if self._pending_offer is not None:
                self._pending_offer.decline(stored)
            await self._load_files(stored)
        async with self._changed:
            self._serving = stored
            self._changed.notify_all()
        self._set_state("serving")
        seconds = round(time.monotonic() - started, 3)
        extra = {"version": stored.number, "seconds": seconds, "received": received}
        log.info("weights loaded", extra=extra)

    async def _receive(self, stored: StoredVersion, pending_offer: PendingOffer) -> bool:
        """Returns whether the engine has received the weights from the trainer by NCCL."""
        offer = await pending_offer.wait_for(stored)
        if offer is None:
            return False
        with self._spans.span("drain", stored.number):
            await self._drain()
        self._set_state("loading")
        try:
            with self._spans.span("load", stored.number):
                return await self._driver.receive(offer, partial(pending_offer.accept, offer))
        except EngineLost as error:
            log.warning("version %d is loaded from its files: %s", stored.number, error)
            return False

    async def _load_files(self, stored: StoredVersion) -> None:
        # Keep reporting the failure reason until a load succeeds.
        if not self._cache.holds(stored) and self._state != "failing":
            self._set_state("downloading")
        with self._spans.span("fetch", stored.number):
            directory = await asyncio.to_thread(self._cache.fetch, stored)
        with self._spans.span("drain", stored.number):
            await self._drain()
        self._set_state("loading")
        with self._spans.span("load", stored.number):
            await self._driver.load(directory, stored.number)

    async def _drain(self) -> None:
        """Takes no new requests and waits until nothing generates.

        Requests that do not finish within `DRAIN_TIMEOUT_S` are cut off.
        """
        async with self._changed:
            self._serving = None
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_TIMEOUT_S):
                    await self._changed.wait_for(lambda: not self._generating)
            reason = f"other weights have waited for {DRAIN_TIMEOUT_S:.0f} s"
            self._cut_off_tasks(self._generating, WrongVersion(reason))
            await self._changed.wait_for(lambda: not self._generating)

    def _cut_off_tasks(self, tasks: Set[asyncio.Task[object]], error: BapoError) -> None:
        """Ends generations early with `error`; clients ask for the missing groups again."""
        self._cut_off |= dict.fromkeys(tasks, error)
        for task in tasks:
            task.cancel()

    # -- reports and health

    def _set_state(self, state: ReplicaState, detail: str = "") -> None:
        if (state, detail) != (self._state, self._detail):
            self._state, self._detail = state, detail[:1000]
            self._report_due.set()

    def report(self) -> ReplicaReport:
        """Returns the replica's state and the version that it serves."""
        serving = self._serving
        return ReplicaReport(
            url=self._url,
            state=self._state,
            detail=self._detail,
            loaded_version=0 if serving is None else serving.number,
            manifest_digest="" if serving is None else serving.manifest_digest,
            prompts_per_request=self._driver.prompts_per_request,
        )

    def _heartbeat(self) -> ReplicaHeartbeat:
        return ReplicaHeartbeat(**self.report().model_dump(), credential=self._credential)

    async def report_forever(self) -> None:
        """Sends the report on every change, and every `REPORT_INTERVAL_S` as a heartbeat."""
        while True:
            self._report_due.clear()
            try:
                await asyncio.to_thread(self._buffer.report_replica, self._name, self._heartbeat())
                await asyncio.to_thread(self._spans.flush)
            except ServiceCallError as error:
                log.warning("%s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(REPORT_INTERVAL_S):
                    await self._report_due.wait()

    def ready(self) -> bool:
        """Whether the target version is served."""
        target = self._target
        return self._serving is not None and target is not None and self._serving == target.stored

    async def check_engine_forever(self) -> None:
        """Checks the engine every `CHECK_INTERVAL_S`, so that an idle one's loss is noticed too."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                await self.check()
            except EngineLost as error:
                self._mark_engine_lost(error)

    async def check(self) -> None:
        """Raises `EngineLost` unless the engine generates. Does nothing while none is loaded."""
        if self._serving is not None:
            await self._driver.check()
