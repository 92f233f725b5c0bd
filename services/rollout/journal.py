"""The journal: unfinished responses in the object store, from which a new collector continues them.

A journal belongs to one request. It consists of segments, objects whose rows hold the tokens that
responses got since the segment before. The first segment of a *generation* holds all tokens so far,
so that earlier generations can be deleted: a collector begins a new generation when it starts, when
a write has failed, and after `SEGMENTS` segments. The key of a segment ends with the SHA-256 of its
bytes, so that one that was cut short is recognised.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from itertools import groupby

import pyarrow as pa

from services.buffer.api.trajectories import read_table, write_table
from services.common.objectstore import (
    ObjectStore,
    ObjectStoreError,
    ObjectStoreUnavailable,
    digest_of,
    discard,
)
from services.common.threads import run_detached
from services.rollout.api.wire import GeneratedTokens, GenerateRequest
from services.rollout.unfinished import UnfinishedGroups

log = logging.getLogger(__name__)

SCHEMA = pa.schema(
    [
        ("index", pa.int32()),
        ("response", pa.int32()),
        ("start", pa.int32()),
        ("policy_version", pa.int64()),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("finish_reason", pa.string()),
    ]
)
"""Columns of a segment, as in `GeneratedTokens`; `finish_reason` is empty before the end."""

SEGMENTS = 64
"""Segments of a generation; reading it takes as many requests to the object store."""
READERS = 8


class Journal:
    """The journal of the unfinished responses to one request."""

    def __init__(self, store: ObjectStore, prefix: str, request: GenerateRequest) -> None:
        """Makes a journal; nothing is read or written yet.

        prefix: of all journals of the same step, kind and round (`layout.journal`).
        """
        self._store, self._parent, self._request = store, prefix, request
        self._prefix = f"{prefix}/{request.digest()[:16]}"
        self._generation = ""
        """Name of the generation that is being written; empty if the next segment begins one."""
        self._segment = 0
        """Number of its next segment."""
        self._written: dict[tuple[int, int], int] = {}
        """Number of tokens that it holds, by (prompt, response)."""
        self._voided = 0
        """`UnfinishedGroups.voided` as of its beginning."""
        self._superseded: set[str] = set()
        """Generations that were read or written, and have to go once it has begun."""

    @asynccontextmanager
    async def kept(self, interval_s: float) -> AsyncIterator[UnfinishedGroups]:
        """Yields what the journal holds; what is added is written while the context lasts.

        interval_s: seconds between two writes.

        Deletes the journal when the context ends, but writes the rest if it ends by an exception.
        The log reports failures of the object store, on which generation does not depend.
        """
        unfinished = await run_detached(self._read)
        ended = asyncio.Event()
        writing = asyncio.create_task(self._write_until(ended, unfinished, interval_s))
        try:
            yield unfinished
            unfinished.keep([])
        finally:
            ended.set()
            await writing
        await asyncio.to_thread(delete_journals, self._store, self._parent)

    # -- reading

    def _read(self) -> UnfinishedGroups:
        """Returns the responses that the journal holds.

        What is damaged or missing is left out, which the log reports.
        """
        try:
            keys = self._store.keys(f"{self._parent}/")
            own = sorted(key for key in keys if key.startswith(f"{self._prefix}/"))
            if len(own) < len(keys):
                log.warning(
                    "unfinished responses in %s are generated anew: they are of other weights, "
                    "prompts or settings than the run has now",
                    self._parent,
                )
            self._superseded = set(map(_generation_of, own))
            generations = [list(keys) for _, keys in groupby(own, _generation_of)]
            for segments in reversed(generations):
                unfinished = self._read_generation(segments)
                if unfinished.token_count:
                    return unfinished
        except ObjectStoreError as error:
            log.warning(
                "unfinished responses in %s are generated anew, because their journal cannot be "
                "read: %s",
                self._parent,
                error,
            )
        return UnfinishedGroups(self._request.group_size)

    def _read_generation(self, keys: Sequence[str]) -> UnfinishedGroups:
        """Returns the responses of a generation, up to the first segment that cannot be read."""
        unfinished = UnfinishedGroups(self._request.group_size)
        with ThreadPoolExecutor(READERS) as pool:
            segments = [pool.submit(self._read_segment, key) for key in keys]
        for number, (key, segment) in enumerate(zip(keys, segments, strict=True)):
            try:
                if _segment_of(key) != number:
                    raise ValueError(f"segment {number} is missing")
                for tokens in segment.result():
                    unfinished.add(tokens)
            except ObjectStoreUnavailable:
                raise
            except (ValueError, ObjectStoreError) as error:
                log.warning(
                    "the journal of unfinished responses is used up to segment %d only, and later "
                    "tokens are generated anew: %s: %s",
                    number,
                    key,
                    error,
                )
                break
        return unfinished

    def _read_segment(self, key: str) -> list[GeneratedTokens]:
        digest = key.split("-")[-1].removesuffix(".arrow")
        table = read_table(self._store.get(key, digest), SCHEMA)
        return [
            GeneratedTokens(**row | {"finish_reason": row["finish_reason"] or None})
            for row in table.to_pylist()
        ]

    # -- writing

    async def _write_until(
        self, ended: asyncio.Event, unfinished: UnfinishedGroups, interval_s: float
    ) -> None:
        """Writes new tokens every `interval_s` until `ended` is set, and once more then."""
        while not ended.is_set():
            await self._write(unfinished)
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await ended.wait()
        await self._write(unfinished)

    async def _write(self, unfinished: UnfinishedGroups) -> None:
        """Writes the tokens that the journal does not hold yet as a segment.

        A failure is only logged, because a run does not depend on its journal.
        """
        if self._segment == SEGMENTS or self._voided != unfinished.voided:
            self._generation = ""
        if not self._generation:
            self._segment, self._written, self._voided = 0, {}, unfinished.voided
        table = self._new_tokens(unfinished)
        if not table.num_rows:
            return
        try:
            await asyncio.to_thread(self._put, table)
        except ObjectStoreError as error:
            self._generation = ""  # the segment may be there or not
            log.warning(
                "the journal of unfinished responses cannot be written; what a crash cuts off now "
                "is generated anew: %s",
                error,
            )

    def _new_tokens(self, unfinished: UnfinishedGroups) -> pa.Table:
        """Returns, as a table of `SCHEMA`, the tokens that this generation does not hold yet."""
        rows = []
        for index, number, response in unfinished:
            length = len(response.token_ids)
            for start, end, version in response.runs(self._written.get((index, number), 0)):
                ended = response.finish_reason if end == length else None
                rows.append(
                    {
                        "index": index,
                        "response": number,
                        "start": start,
                        "policy_version": version,
                        "token_ids": response.token_ids[start:end],
                        "logprobs": response.logprobs[start:end],
                        "finish_reason": ended or "",
                    }
                )
            self._written[index, number] = length
        return pa.Table.from_pylist(rows, schema=SCHEMA)

    def _put(self, table: pa.Table) -> None:
        """Stores the next segment; if it begins a generation, deletes those that it replaces."""
        data = write_table(table)
        begins = not self._generation
        if begins:
            self._generation = self._next_generation()
        key = f"{self._prefix}/{self._generation}/{self._segment:06d}-{digest_of(data)}.arrow"
        self._store.put(key, data)
        self._segment += 1
        if begins:
            # Only those: another collector may have begun one, which then stays the newest.
            discard(self._store, [f"{self._prefix}/{name}" for name in self._superseded])
            self._superseded = {self._generation}

    def _next_generation(self) -> str:
        """Returns the name of a new generation, which is sorted after all that exist."""
        names = map(_generation_of, self._store.keys(f"{self._prefix}/"))
        newest = max((int(name.split("-")[0]) for name in names), default=0)
        # Two collectors, of which one is about to end, may count alike.
        return f"{newest + 1:06d}-{secrets.token_hex(4)}"


def delete_journals(store: ObjectStore, prefix: str) -> None:
    """Deletes all journals below a prefix (`layout.journal`); a failure is only logged."""
    discard(store, [prefix])


def _generation_of(key: str) -> str:
    return key.split("/")[-2]


def _segment_of(key: str) -> int:
    return int(key.split("/")[-1].split("-")[0])
