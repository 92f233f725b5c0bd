"""A rollout replica: an engine that serves the version of the weights which its run wants.

Pull-based and level-triggered: the replica asks the buffer service what is wanted, makes it so, and
says what it serves. Restarts, new replicas and lost messages need no other treatment. Requests name
the version they want, number and digest; nothing generates while weights are being loaded, so a
group is by one version or does not exist.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Set
from contextlib import suppress
from functools import partial

from bapo_core.errors import BapoError
from services.buffer.api.client import LONG_POLL_S, BufferClient
from services.buffer.api.spans import SpanRecorder
from services.buffer.api.wire import ReplicaReport, ReplicaState, StoredVersion, TargetWeights
from services.common.errors import ServiceCallError
from services.common.threads import run_detached
from services.rollout.api.wire import GeneratedGroup, GenerateRequest
from services.rollout.driver import EngineDriver, EngineLost
from services.rollout.engine import WrongVersion
from services.rollout.offers import Offers
from services.rollout.weights import WeightCache

log = logging.getLogger(__name__)

REPORT_EVERY_S = 2.0
CHECK_EVERY_S = 5.0
WAIT_FOR_VERSION_S = 60.0
"""How long a request waits for the version it wants."""
DRAIN_S = 600.0
"""How long the groups under way may take to end before other weights are loaded."""
FIRST_RETRY_S, LONGEST_RETRY_S = 0.5, 15.0


class Replica:
    """Follows what its run wants; generates by what it serves."""

    def __init__(
        self,
        host: EngineDriver,
        buffer: BufferClient,
        cache: WeightCache,
        *,
        name: str,
        url: str,
        offers: Offers | None = None,
    ) -> None:
        """`offers`: where the trainer's come in, if it makes any (`sync.transport`)."""
        self._driver, self._buffer, self._cache = host, buffer, cache
        self._name, self._url, self._offers = name, url, offers
        self._receives = offers is not None
        """The last version that could, came from the trainer itself."""
        self._state: ReplicaState = "starting"
        self._detail = ""
        self._wanted: TargetWeights | None = None
        self._serving: StoredVersion | None = None
        self._changed = asyncio.Condition()
        self._under_way: set[asyncio.Task[object]] = set()
        self._cut_off: set[asyncio.Task[object]] = set()
        self._to_do = asyncio.Event()
        """What is wanted may have changed, or what is served."""
        self._to_report = asyncio.Event()
        self._spans = SpanRecorder(buffer, name)
        self._busy_since = 0.0

    # -- generation

    async def until_serving(self, request: GenerateRequest) -> None:
        """Returns once the version that `request` wants is served. Raises `WrongVersion`."""
        async with self._changed:
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT_FOR_VERSION_S):
                    await self._changed.wait_for(lambda: self._serves(request))
        if not self._serves(request):
            report = self.report()
            raise WrongVersion(
                f"version {request.policy_version} is not served here: the replica is "
                f"{report.state}, with version {report.loaded_version} loaded. {report.detail}"
            )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GeneratedGroup]:
        """Groups as they are finished. Raises `WrongVersion` and `EngineLost`."""
        task = asyncio.current_task()
        assert task is not None
        await self.until_serving(request)
        if not self._under_way:
            self._busy_since = time.monotonic()
        self._under_way.add(task)
        try:
            async for group in self._driver.generate(request):
                if group.policy_version != request.policy_version:
                    raise EngineLost(
                        f"the engine generated with version {group.policy_version} instead "
                        f"of {request.policy_version}"
                    )
                yield group
        except EngineLost as error:
            self._lose(error)
            raise
        except asyncio.CancelledError:
            if task not in self._cut_off:
                raise
            task.uncancel()
            raise EngineLost("the engine was lost, or other weights could not wait") from None
        finally:
            self._under_way.discard(task)
            self._cut_off.discard(task)
            if not self._under_way:
                self._spans.record("generate", request.policy_version, self._busy_since)
            async with self._changed:
                self._changed.notify_all()

    def _serves(self, request: GenerateRequest) -> bool:
        return (
            self._serving is not None
            and self._serving.number == request.policy_version
            and self._serving.manifest_digest == request.manifest_digest
        )

    def _lose(self, error: BapoError) -> None:
        """The engine is of no use any more: what is wanted has to be loaded again."""
        if self._serving is None:
            return  # known already
        log.error("engine lost: %s", error)
        self._serving = None
        self._cut(self._under_way - {asyncio.current_task()})
        self._say("failing", str(error))
        self._to_do.set()

    # -- what is wanted

    def tasks(self) -> list[Coroutine[None, None, None]]:
        """What goes on for as long as the replica lives."""
        return [self.watch(), self.follow(), self.tell(), self.supervise()]

    async def watch(self) -> None:
        """Learns what the run wants, for ever."""
        tag = ""
        while True:
            try:
                wanted = await run_detached(self._buffer.target_weights, tag, wait=LONG_POLL_S)
            except ServiceCallError as error:
                # It serves what it served; nothing is wrong with the replica itself.
                log.warning("%s", error)
                await asyncio.sleep(FIRST_RETRY_S)
                continue
            self._wanted, tag = wanted, wanted.tag
            self._to_do.set()

    async def follow(self) -> None:
        """Serves what the run wants, for ever."""
        pause = FIRST_RETRY_S
        while True:
            await self._to_do.wait()
            self._to_do.clear()
            if self._wanted is None:
                continue
            try:
                await self._serve(self._wanted)
                pause = FIRST_RETRY_S
            except (BapoError, OSError) as error:  # a full disk, for example
                self._say("failing", str(error))
                log.error("cannot serve what is wanted: %s", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_RETRY_S)
                self._to_do.set()

    async def _serve(self, wanted: TargetWeights) -> None:
        if wanted.stored is not None and wanted.stored != self._serving:
            await self._load(wanted.stored, wanted.newest)
        # What the trainer sends needs no files.
        ahead = None if self._receives else wanted.newest
        if ahead is not None and not self._cache.holds(ahead):
            # It will be wanted next: then it is here already.
            with self._spans.span("fetch", ahead.number):
                await asyncio.to_thread(self._cache.fetch, ahead)
        kept = [v for v in (wanted.stored, wanted.newest, self._serving) if v]
        await asyncio.to_thread(self._cache.prune, kept)
        if self._serving is not None:
            self._say("serving")

    async def _load(self, stored: StoredVersion, newest: StoredVersion | None) -> None:
        started = time.monotonic()
        received = False
        if self._offers is not None and self._serving is not None and stored == newest:
            received = self._receives = await self._receive(stored, self._offers)
        if not received:
            if self._offers is not None:
                self._offers.decline(stored)
            await self._load_files(stored)
        async with self._changed:
            self._serving = stored
            self._changed.notify_all()
        self._say("serving")
        seconds = round(time.monotonic() - started, 3)
        extra = {"version": stored.number, "seconds": seconds, "received": received}
        log.info("weights loaded", extra=extra)

    async def _receive(self, stored: StoredVersion, offers: Offers) -> bool:
        """Whether the engine has got the weights from the trainer itself."""
        offer = await offers.of(stored)
        if offer is None:
            return False
        with self._spans.span("drain", stored.number):
            await self._drain()
        self._say("loading")
        try:
            with self._spans.span("load", stored.number):
                return await self._driver.receive(offer, partial(offers.accept, offer))
        except EngineLost as error:
            log.warning("version %d is loaded from its files: %s", stored.number, error)
            return False

    async def _load_files(self, stored: StoredVersion) -> None:
        # What failed shows its reason until it has worked.
        if not self._cache.holds(stored) and self._state != "failing":
            self._say("downloading")
        with self._spans.span("fetch", stored.number):
            directory = await asyncio.to_thread(self._cache.fetch, stored)
        with self._spans.span("drain", stored.number):
            await self._drain()
        self._say("loading")
        with self._spans.span("load", stored.number):
            await self._driver.load(directory, stored.number)

    async def _drain(self) -> None:
        """From here on nothing generates. What does not end in time is cut off."""
        async with self._changed:
            self._serving = None
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    await self._changed.wait_for(lambda: not self._under_way)
            self._cut(self._under_way)
            await self._changed.wait_for(lambda: not self._under_way)

    def _cut(self, tasks: Set[asyncio.Task[object]]) -> None:
        """Ends generations; their clients ask for what is missing again."""
        self._cut_off |= tasks
        for task in tasks:
            task.cancel()

    # -- what it says

    def _say(self, state: ReplicaState, detail: str = "") -> None:
        if (state, detail) != (self._state, self._detail):
            self._state, self._detail = state, detail[:1000]
            self._to_report.set()

    def report(self) -> ReplicaReport:
        serving = self._serving
        return ReplicaReport(
            url=self._url,
            state=self._state,
            detail=self._detail,
            loaded_version=0 if serving is None else serving.number,
            manifest_digest="" if serving is None else serving.manifest_digest,
            prompts_per_request=self._driver.prompts_per_request,
        )

    async def tell(self) -> None:
        """Says what it serves, on every change and every few seconds, for ever."""
        while True:
            self._to_report.clear()
            try:
                await asyncio.to_thread(self._buffer.report_replica, self._name, self.report())
                await asyncio.to_thread(self._spans.flush)
            except ServiceCallError as error:
                log.warning("%s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(REPORT_EVERY_S):
                    await self._to_report.wait()

    def ready(self) -> bool:
        """Whether it serves what is wanted."""
        wanted = self._wanted
        return self._serving is not None and wanted is not None and self._serving == wanted.stored

    async def supervise(self) -> None:
        """Notices when the engine is lost while nobody asks for anything, for ever."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            try:
                await self.check()
            except EngineLost as error:
                self._lose(error)

    async def check(self) -> None:
        """Raises `EngineLost` unless the engine generates."""
        if self._serving is not None:
            await self._driver.check()
