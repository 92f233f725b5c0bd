"""The journal of unfinished responses on the real object store: what is written is continued."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from services.common import layout
from services.common.objectstore import ObjectStore, ObjectStoreError
from services.rollout import journal as journal_module
from services.rollout.api.wire import (
    FinishReason,
    GeneratedTokens,
    GenerateRequest,
    PromptRequest,
    StartedResponse,
)
from services.rollout.journal import Journal
from services.rollout.unfinished import UnfinishedGroups
from services.stack.stack import Endpoints

G = 2


@pytest.fixture
def store(stack: Endpoints) -> ObjectStore:
    return ObjectStore(stack.object_store)


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return layout.journal(request.node.name.replace("_", "-").split("[")[0], 3, "fresh", 0)


def make_request(*, weights: str = "a" * 64, prompts: int = 3) -> GenerateRequest:
    return GenerateRequest(
        policy_version=7,
        manifest_digest=weights,
        temperature=1.0,
        max_tokens=4096,
        group_size=G,
        prompts=[PromptRequest(prompt_token_ids=[2, 3], seed=n) for n in range(prompts)],
    )


def add(
    unfinished: UnfinishedGroups,
    index: int,
    response: int,
    count: int,
    finish_reason: FinishReason | None = None,
    *,
    version: int = 7,
) -> None:
    """Appends `count` tokens, which encode their place."""
    started = unfinished.started(index)
    start = len(started[response].token_ids) if started else 0
    places = range(start, start + count)
    unfinished.add(
        GeneratedTokens(
            index=index,
            policy_version=version,
            response=response,
            start=start,
            token_ids=[1000 * index + 100 * response + place for place in places],
            logprobs=[-place / 64 for place in places],
            finish_reason=finish_reason,
        )
    )


def contents(unfinished: UnfinishedGroups) -> dict[int, list[StartedResponse]]:
    return {index: unfinished.started(index) for index, _, _ in unfinished}


def read(store: ObjectStore, prefix: str, request: GenerateRequest) -> UnfinishedGroups:
    return Journal(store, prefix, request)._read()


async def until_journalled(store: ObjectStore, prefix: str, unfinished: UnfinishedGroups) -> None:
    async with asyncio.timeout(100):
        while contents(await asyncio.to_thread(read, store, prefix, make_request())) != contents(
            unfinished
        ):
            await asyncio.sleep(0.02)


def write(store: ObjectStore, prefix: str, segments: int = 3) -> UnfinishedGroups:
    """Writes a journal of `segments` segments, and returns the responses in it."""
    journal, unfinished = Journal(store, prefix, make_request()), UnfinishedGroups(G)

    async def work() -> None:
        for _ in range(segments):
            add(unfinished, 0, 1, 2)
            add(unfinished, 2, 0, 1)
            await journal._write(unfinished)

    asyncio.run(work())
    return unfinished


def test_what_was_written_is_read(store: ObjectStore, prefix: str) -> None:
    written = write(store, prefix)
    assert contents(read(store, prefix, make_request())) == contents(written)
    assert written.token_count == 9


def test_the_end_of_a_response_is_kept(store: ObjectStore, prefix: str) -> None:
    journal, unfinished = Journal(store, prefix, make_request()), UnfinishedGroups(G)
    add(unfinished, 0, 0, 3)
    asyncio.run(journal._write(unfinished))
    add(unfinished, 0, 0, 1, "length")
    asyncio.run(journal._write(unfinished))
    (response, other) = read(store, prefix, make_request()).started(0)
    assert response == StartedResponse(
        token_ids=[0, 1, 2, 3], logprobs=[0, -1 / 64, -2 / 64, -3 / 64], finish_reason="length"
    )
    assert other == StartedResponse(token_ids=[], logprobs=[])


def test_the_versions_that_sampled_a_response_are_kept(store: ObjectStore, prefix: str) -> None:
    journal, unfinished = Journal(store, prefix, make_request()), UnfinishedGroups(G)
    add(unfinished, 0, 0, 3)
    asyncio.run(journal._write(unfinished))
    add(unfinished, 0, 0, 1)
    add(unfinished, 0, 0, 2, version=8)
    add(unfinished, 0, 0, 1, "stop", version=9)
    add(unfinished, 0, 1, 4, version=8)
    asyncio.run(journal._write(unfinished))
    continued = read(store, prefix, make_request())
    assert contents(continued) == contents(unfinished)
    assert continued.interruptions(0, 7) == [{4: 8, 6: 9}, {0: 8}]
    assert continued.interruptions(1, 7) == [], "no token of this prompt was streamed"


def test_what_is_added_is_written_while_the_context_lasts(store: ObjectStore, prefix: str) -> None:
    async def work() -> None:
        async with Journal(store, prefix, make_request()).kept(0.02) as unfinished:
            for count in (1, 2, 3):
                add(unfinished, 1, 0, count)
                await until_journalled(store, prefix, unfinished)
        assert not store.keys(prefix), "a journal that has served its purpose is deleted"

    asyncio.run(work())


def test_the_rest_is_written_when_a_job_is_broken_off(store: ObjectStore, prefix: str) -> None:
    async def work() -> None:
        async with Journal(store, prefix, make_request()).kept(1e6) as unfinished:
            add(unfinished, 1, 1, 5)
            raise ConnectionError

    with pytest.raises(ConnectionError):
        asyncio.run(work())
    assert read(store, prefix, make_request()).token_count == 5


def test_a_new_generation_replaces_earlier_ones(
    store: ObjectStore, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SEGMENTS", 4)
    written = write(store, prefix, segments=10)
    keys = store.keys(prefix)
    assert {journal_module._generation_of(key).split("-")[0] for key in keys} == {"000003"}
    assert len(keys) == 2, "the 9th segment begins the generation, and the 10th is its second"
    assert contents(read(store, prefix, make_request())) == contents(written)


def test_a_collector_that_goes_on_begins_a_generation(
    store: ObjectStore, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector before may still write its own, and even begin others; that does no harm."""
    monkeypatch.setattr(journal_module, "SEGMENTS", 2)
    earlier, request = Journal(store, prefix, make_request()), make_request()
    unfinished = UnfinishedGroups(G)
    add(unfinished, 0, 0, 2)
    asyncio.run(earlier._write(unfinished))

    later = Journal(store, prefix, request)
    continued = later._read()
    add(continued, 0, 0, 4)
    asyncio.run(later._write(continued))
    add(unfinished, 0, 0, 1)
    asyncio.run(earlier._write(unfinished))
    assert contents(read(store, prefix, request)) == contents(continued)

    add(unfinished, 0, 0, 1)
    asyncio.run(earlier._write(unfinished))  # begins a generation
    for _ in range(2):
        add(continued, 0, 0, 1)
        asyncio.run(later._write(continued))  # the second write begins a generation
    assert contents(read(store, prefix, request)) == contents(continued)


def test_tokens_that_became_void_are_not_read(store: ObjectStore, prefix: str) -> None:
    journal, unfinished = Journal(store, prefix, make_request()), UnfinishedGroups(G)
    add(unfinished, 0, 0, 3)
    add(unfinished, 1, 0, 3)
    asyncio.run(journal._write(unfinished))
    unfinished.void(0)
    asyncio.run(journal._write(unfinished))
    assert contents(read(store, prefix, make_request())).keys() == {1}
    add(unfinished, 0, 1, 2)
    asyncio.run(journal._write(unfinished))
    assert contents(read(store, prefix, make_request())) == contents(unfinished)


@pytest.mark.parametrize(
    ("tokens", "logprobs", "message"),
    [
        ([5, -1], [-1.0, -1.0], "negative"),
        ([5, 1 << 31], [-1.0, -1.0], "more than 31 bits"),
        ([5, 6], [-1.0, float("nan")], "not finite"),
        ([5, 6], [-1.0], "2 tokens have 1 log-probs"),
    ],
)
def test_tokens_that_cannot_be_are_refused(
    tokens: list[int], logprobs: list[float], message: str
) -> None:
    unfinished = UnfinishedGroups(G)
    with pytest.raises(ValueError, match=message):
        unfinished.add(
            GeneratedTokens(
                index=0, policy_version=1, response=0, start=0, token_ids=tokens, logprobs=logprobs
            )
        )
    assert unfinished.started(0) == []


def test_without_an_object_store_responses_are_generated_all_the_same(
    stack: Endpoints, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = stack.object_store.model_copy(update={"endpoint": "http://127.0.0.1:9"})
    store = ObjectStore(elsewhere, retries=0)

    async def work() -> None:
        async with Journal(store, prefix, make_request()).kept(0.02) as unfinished:
            add(unfinished, 1, 0, 1)
            await asyncio.sleep(0)

    asyncio.run(work())
    messages = [record.getMessage() for record in caplog.records]
    assert any("their journal cannot be read" in message for message in messages)
    assert any("cannot be deleted" in message for message in messages)


@pytest.mark.parametrize(
    ("damaged", "readable"), [(0, 0), (1, 1), (2, 2)], ids=["first", "middle", "last"]
)
@pytest.mark.parametrize("how", ["cut short", "missing"])
def test_a_journal_is_used_up_to_its_damage(
    store: ObjectStore,
    prefix: str,
    caplog: pytest.LogCaptureFixture,
    how: str,
    damaged: int,
    readable: int,
) -> None:
    write(store, prefix)
    key = sorted(store.keys(prefix))[damaged]
    if how == "cut short":
        store.put(key, store._get(key)[:-9])
    else:
        store.delete([key])
    assert read(store, prefix, make_request()).token_count == 3 * readable
    if how == "cut short" or damaged < 2:
        (message,) = (record.getMessage() for record in caplog.records)
        assert f"used up to segment {readable} only" in message
        assert "generated anew" in message
    store.delete(store.keys(prefix))


def test_an_earlier_generation_serves_while_the_new_one_cannot_be_read(
    store: ObjectStore, prefix: str
) -> None:
    """The collector died after it had begun a generation and before it deleted the earlier one."""
    written = write(store, prefix)
    (key, *_) = sorted(store.keys(prefix))
    generation = journal_module._generation_of(key)
    store.put(key.replace(generation, "000009-beefbeef"), b"cut short")
    later = Journal(store, prefix, make_request())
    continued = later._read()
    assert contents(continued) == contents(written)
    asyncio.run(later._write(continued))
    (key,) = store.keys(prefix)
    assert journal_module._generation_of(key).startswith("000010-")


@pytest.mark.parametrize("changes", [{"weights": "b" * 64}, {"prompts": 2}])
def test_a_journal_of_another_request_is_not_used(
    store: ObjectStore, prefix: str, caplog: pytest.LogCaptureFixture, changes: dict[str, object]
) -> None:
    """After a rewind the run may have other weights, whose responses must not be mixed."""
    write(store, prefix)
    request = make_request(**changes)  # type: ignore[arg-type]
    assert read(store, prefix, request).token_count == 0
    (message,) = (record.getMessage() for record in caplog.records)
    assert "they are of other weights, prompts or settings" in message


def test_progress_is_not_part_of_a_requests_digest() -> None:
    request = make_request()
    started = [StartedResponse(token_ids=[1], logprobs=[-1.0])] * G
    prompts = [prompt.model_copy(update={"started": started}) for prompt in request.prompts]
    changed = request.model_copy(update={"prompts": prompts, "stream_every": 5})
    assert changed.digest() == request.digest()
    assert make_request(weights="b" * 64).digest() != request.digest()


class Failing:
    """An object store whose first write of a segment fails after the bytes have arrived."""

    def __init__(self, store: ObjectStore) -> None:
        self._store, self.failures = store, 1

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def put(self, key: str, data: bytes) -> None:
        self._store.put(key, data)
        if self.failures:
            self.failures -= 1
            raise ObjectStoreError("the connection broke")


def test_a_write_that_fails_is_made_good_by_the_next(
    store: ObjectStore, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(Failing(store), prefix, make_request())  # type: ignore[arg-type]
    unfinished = UnfinishedGroups(G)
    with caplog.at_level(logging.WARNING):
        for count in (3, 2):
            add(unfinished, 0, 0, count)
            asyncio.run(journal._write(unfinished))
    assert "the journal of unfinished responses cannot be written" in caplog.text
    assert contents(read(store, prefix, make_request())) == contents(unfinished)


@pytest.fixture(autouse=True)
def clean(store: ObjectStore, prefix: str) -> Iterator[None]:
    yield
    store.delete(store.keys(prefix))
