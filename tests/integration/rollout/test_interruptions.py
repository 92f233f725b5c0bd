"""New weights interrupt rollouts (`sync.interrupt_rollouts`), and nothing else is held up by it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import pytest

from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.buffer.api.trajectories import encode_groups
from services.buffer.api.wire import Rollouts
from services.rollout import collector as collector_module
from services.rollout.api.wire import GeneratedGroup, GenerateRequest
from services.rollout.collector import Collector
from services.rollout.unfinished import UnfinishedGroups
from services.stack.stack import Endpoints
from tests.integration.rollout.test_collector import SlowFleet, make_collector
from tests.integration.support.driver import Driver, small_config

POLL_INTERVAL_S = 0.02


class TargetFleet(SlowFleet):
    """A replica that serves the run's target version, and notes what it generates.

    Each request gets a token of each response at once, and the rest when `release` is set.
    """

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        stack = driver.stack
        self._client = BufferClient(stack.buffer_url, stack.token, run=driver.client.run)
        self.log: list[str] = []
        self.begun = asyncio.Event()
        self.loading = 0
        """Version that takes for ever to load; 0 for none."""

    async def wait_until_served(self, request: GenerateRequest) -> int:
        while not await asyncio.to_thread(self._serves, request):
            await asyncio.sleep(POLL_INTERVAL_S)
        return 1

    def _serves(self, request: GenerateRequest) -> bool:
        target = self._client.target_weights("").stored
        return (
            target is not None
            and (target.number, target.manifest_digest)
            == (request.policy_version, request.manifest_digest)
            and target.number != self.loading
        )

    async def generate(
        self,
        request: GenerateRequest,
        on_group: Callable[[GeneratedGroup], None],
        *,
        indices: Collection[int],
        unfinished: UnfinishedGroups,
    ) -> None:
        what = f"{len(request.prompts)} prompts by version {request.policy_version}"
        self.log.append(f"{what} from token {unfinished.token_count // len(indices)}")
        self.begun.set()
        await super().generate(request, on_group, indices=indices, unfinished=unfinished)
        self.log.append(f"{what} end")


def make_driver(stack: Endpoints, name: str, lag: int = 1, **sections: Any) -> Driver:
    """Returns the driver of a run whose first `lag` steps are committed, on version 1."""
    settings = {
        "rollout": {"prompts_per_step": 8, "group_size": 4, "engine": "vllm"},
        "sync": {"every": 1, "lag": lag, "interrupt_rollouts": True},
        "reevaluate": {"enabled": False},
        "evaluation": {"every": 1, "samples": 4},
    }
    driver = Driver(stack, small_config(name, **settings | sections))
    publish(driver, 1)
    for step in range(1, lag + 1):
        driver.run_step(step)
    return driver


def publish(driver: Driver, version: int) -> None:
    driver.client.publish_weights(version, f"{version:064x}")


def notice_prompts(collector: Collector, step: int) -> asyncio.Event:
    """Returns an event that is set when the collector asks for the prompts of a step."""
    asked, loop = asyncio.Event(), asyncio.get_running_loop()
    original = collector._buffer.step_prompts

    def step_prompts(number: int, *arguments: Any, **options: Any) -> wire.StepPrompts:
        if number == step:
            loop.call_soon_threadsafe(asked.set)
        return original(number, *arguments, **options)

    collector._buffer.step_prompts = step_prompts  # type: ignore[method-assign]
    return asked


async def run_beside(
    collector: Collector, fleet: TargetFleet, job: Rollouts, following: Rollouts
) -> None:
    """Begins `job`, runs `following`, for which nothing is generated, and then ends `job`."""
    async with asyncio.timeout(60):
        await collector._run(job)
        await fleet.begun.wait()
        await collector._run(following)
        fleet.release.set()
        await collector._limit_active(0)


def is_complete(driver: Driver, step: int) -> bool:
    return driver.client.step_prompts(step).complete


def test_new_weights_go_on_with_responses_that_have_not_ended(stack: Endpoints) -> None:
    driver = make_driver(stack, "interrupted-rollouts")
    fleet = TargetFleet(driver)
    collector = make_collector(driver, fleet)

    async def work() -> None:
        async with asyncio.timeout(300):
            await collector._run(Rollouts(2, "fresh"))
            await fleet.begun.wait()
            await asyncio.gather(
                collector._run(Rollouts(3, "fresh")), asyncio.to_thread(publish, driver, 2)
            )
            fleet.release.set()
            await collector._limit_active(0)

    asyncio.run(work())
    # Step 2, the rest of it, whose 4 responses to each prompt have a token, and step 3.
    assert sorted(fleet.log) == [
        "8 prompts by version 1 from token 0",
        "8 prompts by version 2 end",
        "8 prompts by version 2 end",
        "8 prompts by version 2 from token 0",
        "8 prompts by version 2 from token 4",
    ]
    for step, interruptions in ((2, {1: 2}), (3, {})):
        prompts = driver.client.step_prompts(step)
        assert prompts.complete
        for prompt in prompts.prompts:
            attempts = driver.client.prompt_history(prompt.uid).attempts
            (attempt,) = [attempt for attempt in attempts if attempt.step == step]
            group = driver.client.group(attempt.group_id)
            assert group.policy_version == step - 1
            for response in group.responses:
                assert response.interruptions == interruptions
                assert len(response.token_ids) == 1 + len(interruptions)


def test_an_evaluation_is_not_interrupted(stack: Endpoints) -> None:
    driver = make_driver(stack, "evaluated")
    publish(driver, 2)
    fleet = TargetFleet(driver)
    collector = make_collector(driver, fleet)

    async def work() -> None:
        async with asyncio.timeout(300):
            await collector._run(Rollouts(1, "evaluation", "test"))
            await fleet.begun.wait()
            going_on = asyncio.create_task(collector._run(Rollouts(3, "fresh")))
            asyncio.get_running_loop().call_later(0.2, fleet.release.set)
            await going_on
            await collector._limit_active(0)

    asyncio.run(work())
    assert fleet.log == [
        "4 prompts by version 1 from token 0",
        "4 prompts by version 1 end",
        "8 prompts by version 2 from token 0",
        "8 prompts by version 2 end",
    ]


def test_a_reevaluation_without_prompts_interrupts_nothing(stack: Endpoints) -> None:
    """It makes no version the target, so no replica would serve what goes on with the rollouts."""
    driver = make_driver(
        stack,
        "nothing-hard",
        lag=0,
        sync={"every": 1, "lag": 2, "interrupt_rollouts": True, "reevaluate_every": 4},
        reevaluate={"c1": 0.25},
        task={"options": {"template": "short"}, "train_prompts": 64, "test_prompts": 4},
    )
    for step in (1, 2, 3):
        solved = [
            dataclasses.replace(
                group,
                responses=[
                    dataclasses.replace(r, reward=1.0, correct=True, reward_parts={"answer": 1.0})
                    for r in group.responses
                ],
            )
            for group in driver.groups(step)
        ]
        driver.client.post_groups(step, "fresh", encode_groups(solved))
        driver.client.batch(step)
        driver.client.commit(step, {"loss": 0.5})
        publish(driver, step + 1)
    fleet = TargetFleet(driver)
    collector = make_collector(driver, fleet)

    asyncio.run(run_beside(collector, fleet, Rollouts(4, "fresh"), Rollouts(4, "reevaluation")))
    assert is_complete(driver, 4)
    assert fleet.log == ["8 prompts by version 2 from token 0", "8 prompts by version 2 end"]


def test_rollouts_whose_successors_wait_for_them_are_not_interrupted(stack: Endpoints) -> None:
    """The prompts of a step depend on the commit of the step before."""
    driver = make_driver(
        stack, "as-of-step", sampler={"kind": "mopps", "posterior_as_of": "step", "candidates": 2}
    )
    publish(driver, 2)
    fleet = TargetFleet(driver)
    collector = make_collector(driver, fleet)

    async def work() -> None:
        async with asyncio.timeout(60):
            asked = notice_prompts(collector, 3)
            await collector._run(Rollouts(2, "fresh"))
            await fleet.begun.wait()
            (running,) = collector._active
            following = asyncio.create_task(collector._run(Rollouts(3, "fresh")))
            await asked.wait()
            fleet.release.set()
            await running
            following.cancel()

    asyncio.run(work())
    assert is_complete(driver, 2)


def test_a_complete_step_interrupts_nothing(stack: Endpoints) -> None:
    """A collector that was restarted may find the step complete that follows an open one."""
    driver = make_driver(stack, "following-complete")
    publish(driver, 2)
    driver.client.post_groups(3, "fresh", encode_groups(driver.groups(3)))
    fleet = TargetFleet(driver)
    collector = make_collector(driver, fleet)

    asyncio.run(run_beside(collector, fleet, Rollouts(2, "fresh"), Rollouts(3, "fresh")))
    assert is_complete(driver, 2)


def test_a_new_attempt_does_not_wait_for_weights_that_may_never_come(
    stack: Endpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rewind may undo the weights that were to go on with the rollouts."""
    monkeypatch.setattr(collector_module, "FINISH_WITHIN_S", 1e6)
    driver = make_driver(stack, "rewound", checkpoint={"every": 12})
    evaluation = driver.groups(1, "evaluation")
    driver.client.post_groups(1, "evaluation", encode_groups(evaluation))
    fleet = TargetFleet(driver)
    fleet.loading = 2
    collector = make_collector(driver, fleet, follows=True)
    client = BufferClient(stack.buffer_url, stack.token, run=driver.client.run)

    async def until(is_true: Callable[[], bool]) -> None:
        while not is_true():
            await asyncio.sleep(POLL_INTERVAL_S)

    async def work() -> None:
        async with asyncio.timeout(120):
            collecting = asyncio.create_task(collector.collect(2))
            await fleet.begun.wait()
            await asyncio.to_thread(publish, driver, 2)
            await until(lambda: any(r.weights is not None for r in collector._active.values()))
            before = len(fleet.log)
            state = await asyncio.to_thread(client.begin_attempt)
            assert state.current_step == 0, "there is no checkpoint yet"
            await until(lambda: len(fleet.log) > before)
            collecting.cancel()
            await asyncio.wait({collecting})

    asyncio.run(work())
