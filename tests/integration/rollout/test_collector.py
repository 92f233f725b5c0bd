"""The collector generates missing groups only, delivers in time, and follows new attempts."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError, ConfigError
from services.buffer.api.client import BufferClient
from services.buffer.api.trajectories import encode_groups
from services.buffer.api.wire import Rollouts
from services.cli.reward_files import pin_reward, store_reward
from services.common import layout
from services.common.errors import ServiceError, Superseded
from services.common.objectstore import ObjectStore
from services.datasets import DataSources, load_datasets, prepare_run
from services.model.resolve import TINY_MODEL
from services.rollout import collector as collector_module
from services.rollout import jobs as jobs_module
from services.rollout.api.wire import (
    GeneratedGroup,
    GeneratedResponse,
    GeneratedTokens,
    GenerateRequest,
    StartedResponse,
)
from services.rollout.collector import Collector
from services.rollout.delivery import Delivery
from services.rollout.errors import PromptsFailed
from services.rollout.fleet import Fleet
from services.rollout.jobs import ActiveJob
from services.rollout.unfinished import UnfinishedGroups
from services.stack.stack import Endpoints
from services.verifier.api.client import VerifierClient
from services.verifier.api.wire import ItemVerdict, VerifyItem
from tests.integration.support.driver import Driver, small_config

ROOT = Path(__file__).parents[3]


class ScriptedFleet:
    """Answers the first `answers` prompts of a request once `release` is set, then waits."""

    def __init__(self, answers: int, *, held: bool = False) -> None:
        """held: `release` is not set yet."""
        self.answers = answers
        self.asked: list[int] = []
        self.requests = 0
        self.release = asyncio.Event()
        if not held:
            self.release.set()

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        yield

    async def wait_until_served(self, _: GenerateRequest) -> int:
        return 1

    async def generate(
        self,
        request: GenerateRequest,
        on_group: Callable[[GeneratedGroup], None],
        *,
        indices: Collection[int],
        unfinished: UnfinishedGroups,  # noqa: ARG002
    ) -> None:
        self.requests += 1
        self.asked = asked = sorted(indices)
        await self.release.wait()
        for index in asked[: self.answers]:
            response = GeneratedResponse(token_ids=[5], logprobs=[-1.0], finish_reason="stop")
            on_group(
                GeneratedGroup(
                    index=index,
                    policy_version=request.policy_version,
                    responses=[response] * request.group_size,
                )
            )
        if len(asked) > self.answers:
            await asyncio.Event().wait()


class RefusingFleet(ScriptedFleet):
    """Answers some prompts; an engine refuses the next one."""

    async def generate(
        self,
        request: GenerateRequest,
        on_group: Callable[[GeneratedGroup], None],
        *,
        indices: Collection[int],
        unfinished: UnfinishedGroups,
    ) -> None:
        answered = sorted(indices)[: self.answers]
        await super().generate(request, on_group, indices=answered, unfinished=unfinished)
        failed = sorted(indices)[self.answers :]
        raise PromptsFailed(failed, "replica r refuses a prompt: it is too long")


class SlowFleet(ScriptedFleet):
    """Streams one token of each response, then ends none of them until `release` is set."""

    def __init__(self) -> None:
        super().__init__(answers=10**6, held=True)
        self.continued: dict[int, list[StartedResponse]] = {}

    async def generate(
        self,
        request: GenerateRequest,
        on_group: Callable[[GeneratedGroup], None],
        *,
        indices: Collection[int],
        unfinished: UnfinishedGroups,
    ) -> None:
        assert request.stream_every
        self.asked = sorted(indices)
        self.continued = {index: unfinished.started(index) for index in self.asked}
        for index in self.asked:
            for number in range(request.group_size):
                started = self.continued[index]
                tokens = GeneratedTokens(
                    index=index,
                    policy_version=request.policy_version,
                    response=number,
                    start=len(started[number].token_ids) if started else 0,
                    token_ids=[5 + index + number],
                    logprobs=[-0.5],
                )
                unfinished.add(tokens)
        await self.release.wait()
        for index in self.asked:
            responses = [
                GeneratedResponse(**response.model_dump() | {"finish_reason": "stop"})
                for response in unfinished.started(index)
            ]
            on_group(
                GeneratedGroup(
                    index=index, policy_version=request.policy_version, responses=responses
                )
            )


def journal_keys(driver: Driver, step: int = 1) -> list[str]:
    store = ObjectStore(driver.stack.object_store)
    return store.keys(layout.journal(driver.config.name, step, "fresh", 0))


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Makes the reward function fail on the responses for which this list, once filled, is true."""
    fails: list[bool] = []
    verify = VerifierClient.verify

    def failing_verify(
        self: VerifierClient, task: str, options: Mapping[str, Any], items: list[VerifyItem]
    ) -> list[list[ItemVerdict]]:
        crashed = ItemVerdict(reward=0.0, status="crashed", detail="KeyError: 'n' (mine.py:3)")
        verdicts = verify(self, task, options, items)
        turn = itertools.cycle(fails)
        return [[crashed if next(turn) else verdict for verdict in group] for group in verdicts]

    monkeypatch.setattr(VerifierClient, "verify", failing_verify)
    return fails


def test_a_reward_function_that_always_fails_ends_the_run(
    stack: Endpoints, failing: list[bool]
) -> None:
    failing.append(True)
    driver = Driver(stack, small_config("always-failing"))
    driver.client.publish_weights(1, "a" * 64)

    reason = (
        r"the reward function of task countdown failed on all 32 responses so far: KeyError: 'n' "
        r"\(mine.py:3\); fix its `verify`"
    )
    with pytest.raises(BapoError, match=reason):
        asyncio.run(roll_out_first_step(make_collector(driver, ScriptedFleet(answers=8))))
    assert not driver.client.step_prompts(1).recorded


def test_a_reward_function_that_sometimes_fails_is_seen(
    stack: Endpoints, failing: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    failing.extend([True, False, False, False])
    driver = Driver(stack, small_config("sometimes-failing"))
    driver.client.publish_weights(1, "a" * 64)

    asyncio.run(roll_out_first_step(make_collector(driver, ScriptedFleet(answers=8))))
    assert "failed on 8 of 32 responses, which count as wrong: KeyError: 'n'" in caplog.text
    driver.client.batch(1)
    driver.client.commit(1, {})
    (step,) = driver.client.steps()
    assert step.reward_parts["failed"] == 0.25
    groups = [
        driver.client.group(attempt.group_id)
        for prompt in driver.client.all_prompts()
        for attempt in driver.client.prompt_history(prompt.uid).attempts
    ]
    failures = [response.failure for group in groups for response in group.responses]
    assert set(failures) == {None, "KeyError: 'n' (mine.py:3)"}
    assert failures.count(None) == 24


def test_groups_that_ended_before_an_error_are_delivered(stack: Endpoints) -> None:
    driver = Driver(stack, small_config("refusing"))
    driver.client.publish_weights(1, "a" * 64)

    uids = [prompt.uid for prompt in driver.client.step_prompts(1).prompts[3:]]
    named = f"prompts {', '.join(map(repr, uids[:3]))} and {len(uids) - 3} more: "
    with pytest.raises(BapoError, match=f"^{re.escape(named)}replica r refuses a prompt"):
        asyncio.run(roll_out_first_step(make_collector(driver, RefusingFleet(answers=3))))
    assert len(driver.client.step_prompts(1).recorded) == 3


def test_prompts_that_cannot_be_answered_stop_the_run_of_a_deployment(stack: Endpoints) -> None:
    """A collector that Kubernetes starts again would fail again, while the trainer waits for it."""
    driver = Driver(stack, small_config("unanswerable"))
    driver.client.publish_weights(1, "a" * 64)
    collector = make_collector(driver, RefusingFleet(answers=0))
    with pytest.raises(PromptsFailed), collector_module.stop_faulty_run(driver.client):
        asyncio.run(roll_out_first_step(collector))
    state = driver.client.run_state()
    assert state.status == "stopped"
    assert state.stopped is not None
    assert re.match("the collector: prompts .*: replica r refuses a", state.stopped.describe())


def test_a_new_collector_continues_responses_from_the_journal(stack: Endpoints) -> None:
    journalled = {"engine": {"kind": "vllm", "journal_interval_s": 0.05}}
    driver = Driver(
        stack,
        small_config("journalled", rollout={"prompts_per_step": 8, "group_size": 4, **journalled}),
    )
    driver.client.publish_weights(1, "a" * 64)
    fleets = [SlowFleet(), SlowFleet()]
    fleets[1].release.set()

    async def begin() -> None:
        collector = make_collector(driver, fleets[0])
        async with asyncio.timeout(300):
            await collector._run(Rollouts(1, "fresh"))
            while not await asyncio.to_thread(journal_keys, driver):
                await asyncio.sleep(0.02)
            (task,) = collector._active
            task.cancel()
            await asyncio.wait([task])

    asyncio.run(begin())
    asyncio.run(roll_out_first_step(make_collector(driver, fleets[1])))
    assert fleets[1].continued == {
        index: [
            StartedResponse(token_ids=[5 + index + number], logprobs=[-0.5]) for number in range(4)
        ]
        for index in range(8)
    }
    assert driver.client.step_prompts(1).complete
    assert not journal_keys(driver), "the journal of a complete job is deleted"

    ObjectStore(stack.object_store).put(
        f"{layout.journal(driver.config.name, 1, 'fresh', 0)}/request/1/0.arrow", b"left over"
    )
    asyncio.run(roll_out_first_step(make_collector(driver, fleets[1])))
    assert not journal_keys(driver), "what a collector left that died is deleted"


def make_collector(driver: Driver, fleet: Any, **options: Any) -> Collector:
    return Collector(
        driver.config,
        driver.client,
        ObjectStore(driver.stack.object_store),
        fleet,
        VerifierClient(driver.stack.verifier_url, driver.stack.verifier_token),
        AutoTokenizer.from_pretrained(TINY_MODEL),
        **options,
    )


async def roll_out_first_step(collector: Collector) -> None:
    """Runs the first step's rollouts to their end. Raises their error."""
    async with asyncio.timeout(300):
        await collector._run(Rollouts(1, "fresh"))
        await collector._limit_active(0)


def test_only_missing_groups_are_generated(stack: Endpoints) -> None:
    driver = Driver(stack, small_config("only-missing"))
    driver.client.publish_weights(1, "a" * 64)
    groups = driver.groups(1)
    driver.client.post_groups(1, "fresh", encode_groups([groups[n] for n in (0, 2, 3, 6, 7)]))
    fleet = ScriptedFleet(answers=3)
    collector = make_collector(driver, fleet)

    async def work() -> None:
        async with asyncio.timeout(300):
            await collector._run(Rollouts(1, "fresh"))
            await collector._limit_active(0)

    asyncio.run(work())
    assert fleet.asked == [1, 4, 5]
    assert driver.client.step_prompts(1).complete


def test_rewards_are_composed_of_the_verdict_and_the_length(stack: Endpoints) -> None:
    """Wrong answers of DAPO are -1; the one token of each response is the last of two."""
    shaped = {"wrong": -1.0, "weights": {"format": 0.5}, "overlong_share": 1.0}
    driver = Driver(
        stack,
        small_config(
            "shaped",
            reward=shaped | {"overlong_weight": 0.2},
            rollout={"prompts_per_step": 8, "group_size": 4, "max_response_tokens": 2},
        ),
    )
    driver.client.publish_weights(1, "a" * 64)
    collector = make_collector(driver, ScriptedFleet(answers=8))

    async def work() -> None:
        async with asyncio.timeout(300):
            await collector._run(Rollouts(1, "fresh"))
            await collector._limit_active(0)

    asyncio.run(work())
    members = driver.client.batch(1).members
    assert not members, "groups without a correct response have no gradient"
    prompt = driver.client.step_prompts(1).prompts[0]
    (attempt,) = driver.client.prompt_history(prompt.uid).attempts
    group = driver.client.group(attempt.group_id)
    expected = {"answer": 0.0, "format": 1.0, "overlong": -0.5}
    assert group.reward_parts == expected
    for response in group.responses:
        assert not response.correct
        assert (response.status, response.extracted) == ("wrong_numbers", response.text)
        assert response.reward_parts == expected
        assert response.reward == pytest.approx(-1.0 + 0.5 * 1.0 + 0.2 * -0.5)
    assert (group.accuracy, group.mean_reward) == (0.0, pytest.approx(-0.6))


def test_a_weight_that_no_verdict_has_stops_the_run_and_the_collector(stack: Endpoints) -> None:
    driver = Driver(stack, small_config("unknown-part"))
    unknown = small_config("unknown-part", reward={"weights": {"style": 1.0}})
    message = r"reward.weights names 'style', .* countdown have the parts format"
    with pytest.raises(ConfigError, match=message):
        load_datasets(unknown)
    driver.config = unknown
    with pytest.raises(ConfigError, match=message):
        make_collector(driver, ScriptedFleet(answers=1))


def test_of_jobs_that_fail_together_one_is_reported(
    stack: Endpoints, caplog: pytest.LogCaptureFixture
) -> None:
    """The last error in the log is what a supervisor shows."""
    collector = make_collector(Driver(stack, small_config("fail-together")), ScriptedFleet(0))

    async def fail() -> bool:
        raise BapoError("a prompt is wrong")

    async def work() -> None:
        for _ in range(2):
            collector._active[asyncio.create_task(fail())] = ActiveJob(Rollouts(1, "fresh"))
        with pytest.raises(BapoError, match="a prompt is wrong"):
            await collector._limit_active(0)

    asyncio.run(work())
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize(
    ("bundle", "seconds", "answers"),
    [pytest.param(64, 0.05, 1, id="by time"), pytest.param(3, 1e6, 3, id="by number")],
)
def test_finished_groups_are_delivered_while_others_are_generated(
    stack: Endpoints,
    monkeypatch: pytest.MonkeyPatch,
    bundle: int,
    seconds: float,
    answers: int,
) -> None:
    monkeypatch.setattr(jobs_module, "BUNDLE", bundle)
    monkeypatch.setattr(jobs_module, "DELIVER_WITHIN_S", seconds)
    driver = Driver(stack, small_config(f"delivers-{answers}-of-8"))
    driver.client.publish_weights(1, "a" * 64)
    fleet = ScriptedFleet(answers)
    collector = make_collector(driver, fleet)

    async def work() -> None:
        async with asyncio.timeout(300):
            await collector._run(Rollouts(1, "fresh"))
            while len(driver.client.step_prompts(1).recorded) < answers:
                await asyncio.sleep(0.02)
            assert len(collector._active) == 1, "the other groups are still being generated"
            for task in collector._active:
                task.cancel()

    asyncio.run(work())
    assert fleet.asked == list(range(8))
    assert len(driver.client.step_prompts(1).recorded) == answers


def test_groups_in_progress_outlive_the_attempt_that_asked_for_them(stack: Endpoints) -> None:
    driver = Driver(stack, small_config("outlive", evaluation={"every": 12}))
    driver.client.publish_weights(1, "a" * 64)
    other = BufferClient(stack.buffer_url, stack.token, run=driver.client.run)

    async def work() -> None:
        fleet = ScriptedFleet(answers=10**6, held=True)
        collector = make_collector(driver, fleet, follows=True)
        collecting = asyncio.create_task(collector.collect(1))
        async with asyncio.timeout(300):
            while not fleet.requests:
                await asyncio.sleep(0.02)
            state = await asyncio.to_thread(other.begin_attempt)
            while driver.client.attempt < state.attempt:
                await asyncio.sleep(0.02)
            in_progress = fleet.requests
            fleet.release.set()
            while not (await asyncio.to_thread(other.step_prompts, 1)).complete:
                await asyncio.sleep(0.02)
            # The jobs of the window: step 1, and the evaluation of the initial model.
            while not (await asyncio.to_thread(other.step_prompts, 1, "evaluation")).complete:
                await asyncio.sleep(0.02)
            assert fleet.requests == 2, f"{in_progress} requests were in progress"
            collecting.cancel()

    asyncio.run(work())


def test_groups_that_the_new_attempt_refuses_are_generated_again(
    stack: Endpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A re-evaluation whose prompts depend on a step that was undone is refused, for example."""
    driver = Driver(stack, small_config("refused", evaluation={"every": 12}))
    driver.client.publish_weights(1, "a" * 64)
    other = BufferClient(stack.buffer_url, stack.token, run=driver.client.run)
    refusals = [ServiceError(409, "depends on a step that is not committed")]
    deliver = Delivery.deliver

    def refuse_once(self: Delivery, *arguments: Any) -> bool:
        if refusals:
            raise refusals.pop()
        return deliver(self, *arguments)

    monkeypatch.setattr(Delivery, "deliver", refuse_once)

    async def work() -> None:
        fleet = ScriptedFleet(answers=10**6, held=True)
        collecting = asyncio.create_task(make_collector(driver, fleet, follows=True).collect(1))
        async with asyncio.timeout(300):
            while not fleet.requests:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(other.begin_attempt)
            fleet.release.set()
            while not (await asyncio.to_thread(other.step_prompts, 1)).complete:
                assert not collecting.done(), collecting.exception()
                await asyncio.sleep(0.02)
            collecting.cancel()

    asyncio.run(work())
    assert not refusals


def test_a_collector_that_waits_for_weights_is_superseded(stack: Endpoints) -> None:
    driver = Driver(stack, small_config("waits-for-weights"))
    no_tokenizer: Any = None  # never used before there are weights
    collector = Collector(
        driver.config,
        driver.client,
        ObjectStore(stack.object_store),
        Fleet(driver.client, stack.token),
        VerifierClient(stack.verifier_url, stack.verifier_token),
        no_tokenizer,
    )

    async def work() -> None:
        collecting = asyncio.create_task(collector.collect(1))
        async with asyncio.timeout(300):
            # It has its prompts, and waits for a version that is never published.
            while not collector._active:
                await asyncio.sleep(0.05)
            other = BufferClient(stack.buffer_url, stack.token, run=driver.client.run)
            await asyncio.to_thread(other.begin_attempt)
            with pytest.raises(Superseded):
                await collecting

    asyncio.run(work())


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "def score(completions, **columns):\n    return [float(completions[0])]",
            r"rewards.py:score raised ValueError: .* \(rewards.py, line 2\); tried with row 1 ",
        ),
        (
            "import absent_package\ndef score(completions, **columns): ...",
            r".*raised ModuleNotFoundError: No module named 'absent_package' \(rewards.py, line 1",
        ),
    ],
)
def test_a_reward_function_that_cannot_work_stops_the_run_of_a_pipeline(
    stack: Endpoints, source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector of the chart would otherwise be restarted again and again, while the trainer and
    the pipeline wait for rollouts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(source)
    rows = [json.dumps({"prompt": f"{number}+1="}) for number in range(12)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows[:8]))
    (tmp_path / "test.jsonl").write_text("\n".join(rows[8:]))
    paths = {"train_path": "train.jsonl", "test_path": "test.jsonl"}
    name = f"faulty-{'import' if 'import' in source else 'call'}"
    config = pin_reward(small_config(name, task={"reward": "rewards.py:score", **paths}))

    def create(client: BufferClient, config: RunConfig) -> None:
        store_reward(config, client)
        request = prepare_run(config, TINY_MODEL, DataSources(), client, show=lambda _: None)
        client.create_run(request)

    driver = Driver(stack, config, create)
    done = subprocess.run(
        [sys.executable, "-m", "services.rollout.collector"],
        cwd=ROOT,
        env={
            **os.environ,
            **stack.process_environment(stack.token),
            **stack.verifier_environment(),
            "BAPO_RUN": name,
            "BAPO_SCRATCH": str(tmp_path / "scratch"),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    state = driver.client.run_state()
    assert state.status == "stopped", done.stderr
    assert state.stopped is not None
    assert state.stopped.by == "the collector"
    assert re.match(reason, str(state.stopped.reason)), state.stopped.reason


def test_a_run_is_finished_once_it_is_evaluated_and_its_last_checkpoint_is_stored(
    stack: Endpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replicas then serve the next run, also while its pipeline still reports it."""
    driver = Driver(stack, small_config("collected-to-the-end", steps=2, checkpoint={"every": 2}))
    client = driver.client

    def wait(_: float) -> None:
        """Stands in for the time that the trainer takes for the checkpoint."""
        assert client.run_state().status == "running"
        client.record_checkpoint(2, "2" * 64)

    monkeypatch.setattr(collector_module.time, "sleep", wait)
    for step in (1, 2):
        driver.run_step(step)
    collector_module.finish_run(client, driver.config)
    assert client.run_state().status == "finished"
    late = BufferClient(stack.buffer_url, stack.token, run=client.run, attempt=client.attempt)
    client.begin_attempt(reopen=True)
    with pytest.raises(Superseded):
        collector_module.finish_run(late, driver.config)
    assert client.run_state().status == "running"
