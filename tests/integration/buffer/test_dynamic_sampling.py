"""Dynamic sampling draws on from the stream of prompts, through the real service.

What the service draws is compared with the stream that the test reads for itself: the concatenation
of what all steps drew, whatever happened in between, must be its beginning.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from bapo_core.sampling import stream_positions
from services.buffer.api import wire
from services.buffer.api.trajectories import TrajectoryGroup, encode_groups
from services.common.errors import ServiceError
from services.datasets import load_datasets
from services.rollout.api.wire import GeneratedGroup, GenerateRequest
from services.rollout.unfinished import UnfinishedGroups
from services.stack.stack import Endpoints
from tests.integration.rollout.test_collector import ScriptedFleet, make_collector
from tests.integration.support.driver import Driver, small_config

B, G, ROUNDS, PROMPTS = 4, 4, 3, 22
"""The dataset has no whole number of rounds, and less than two steps of three rounds each."""
TASK = {"options": {"template": "short"}, "train_prompts": PROMPTS, "test_prompts": 2}
Drive = Callable[..., "Stream"]


class Stream:
    """A run with dynamic sampling, and the prompts of its stream."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.client = driver, driver.client
        self.uids = [prompt.uid for prompt in load_datasets(driver.config)[0].prompts]

    def prompts(self, first: int, count: int) -> list[str]:
        """Returns the uids of these prompts of the stream."""
        positions = stream_positions(
            self.driver.config.seed, first, count, dataset_size=PROMPTS, distinct=B * ROUNDS
        )
        return [self.uids[position] for position in positions]

    def ask(self, step: int, generation_round: int = 0) -> wire.StepPrompts:
        """Asks for the prompts of a round without waiting."""
        path = f"/v1/runs/{self.client.run}/steps/{step}/prompts"
        parameters = {"wait": 0, "generation_round": generation_round}
        answer = self.client._send("POST", path, params=parameters)
        return wire.StepPrompts.model_validate(answer.json())

    def drawn(self, step: int, generation_round: int = 0) -> list[str]:
        prompts = self.ask(step, generation_round)
        assert prompts.ready
        return [prompt.uid for prompt in prompts.prompts]

    def groups(self, step: int, generation_round: int, *, mixed: int) -> list[TrajectoryGroup]:
        """Returns the groups of a round: the first `mixed` have mixed rewards, the others none."""
        groups = self.driver.groups(step, generation_round=generation_round)
        return [
            with_correct(group, 1 if index < mixed else 0) for index, group in enumerate(groups)
        ]

    def post(self, step: int, groups: Sequence[TrajectoryGroup]) -> wire.GroupsAccepted:
        return self.client.post_groups(step, "fresh", encode_groups(list(groups)))

    def roll_out(self, step: int, *, rounds: int) -> list[str]:
        """Completes the fresh groups of a step after so many rounds; returns their prompts."""
        drawn = []
        for generation_round in range(rounds):
            last = generation_round == rounds - 1
            groups = self.groups(step, generation_round, mixed=B if last else 0)
            assert self.post(step, groups).complete == last
            drawn += [group.prompt_uid for group in groups]
        return drawn

    def commit(self, step: int) -> None:
        assert self.client.batch(step).ready
        self.client.commit(step, {})


def with_correct(group: TrajectoryGroup, correct: int) -> TrajectoryGroup:
    """Returns the group with so many correct responses."""
    responses = [
        dataclasses.replace(
            response,
            correct=index < correct,
            reward=float(index < correct),
            reward_parts={"answer": float(index < correct)},
        )
        for index, response in enumerate(group.responses)
    ]
    return dataclasses.replace(group, responses=responses)


@pytest.fixture
def drive(stack: Endpoints, request: pytest.FixtureRequest) -> Drive:
    """Returns a function that creates a run named after the test."""

    def make(suffix: str = "", **sections: Any) -> Stream:
        name = request.node.name.split("[")[0].replace("_", "-")[5:55] + suffix
        rollout = {"prompts_per_step": B, "group_size": G, "max_generation_rounds": ROUNDS}
        settings = {"algorithm": "dapo", "task": TASK, "rollout": rollout, "steps": 40}
        return Stream(Driver(stack, small_config(name, **settings, **sections)))

    return make


def test_a_step_draws_the_prompts_after_those_of_the_step_before(drive: Drive) -> None:
    run = drive()
    drawn: list[str] = []
    for step, rounds in enumerate([1, 1, 3, 2, 1, 3, 3, 1, 2, 2, 3, 1], start=1):
        step_drew = run.roll_out(step, rounds=rounds)
        assert len(set(step_drew)) == len(step_drew) == B * rounds
        run.commit(step)
        drawn += step_drew
    assert drawn == run.prompts(0, len(drawn))
    epochs = len(drawn) // PROMPTS
    assert epochs == 4
    counts = Counter(drawn[: epochs * PROMPTS])
    assert set(counts.values()) == {epochs}, "an epoch has every prompt once"


def test_the_prompts_of_a_step_are_known_once_the_steps_before_are_rolled_out(
    drive: Drive,
) -> None:
    run = drive(sync={"every": 5})
    assert not run.ask(2).ready
    first = run.groups(1, 0, mixed=B)
    run.post(1, first[:3])
    assert not run.ask(2).ready
    with pytest.raises(ServiceError, match="the steps before step 2 lack fresh groups"):
        run.post(2, [dataclasses.replace(first[0], prompt_uid=uid) for uid in run.prompts(B, 1)])
    assert run.post(1, first[3:]).complete
    assert run.drawn(2) == run.prompts(B, B), "the commit of step 1 is not waited for"
    assert not run.ask(3).ready
    drawn = [group.prompt_uid for group in first]
    for step, rounds in ((2, 2), (3, 3), (4, 1)):
        drawn += run.roll_out(step, rounds=rounds)
    assert drawn == run.prompts(0, len(drawn))
    for step in range(1, 5):
        run.commit(step)
        assert run.drawn(5) == run.prompts(len(drawn), B)


def test_a_step_takes_no_prompts_of_the_next_one(drive: Drive) -> None:
    run = drive()
    stranger = run.groups(1, 0, mixed=0)[0]
    second = [dataclasses.replace(stranger, prompt_uid=uid) for uid in run.drawn(1, 1)]
    with pytest.raises(ServiceError, match="is not a fresh prompt of step 1"):
        run.post(1, second)  # The first round is not complete.
    run.roll_out(1, rounds=1)
    with pytest.raises(ServiceError, match="is not a fresh prompt of step 1"):
        run.post(1, second)  # The step is.
    assert run.drawn(2) == [group.prompt_uid for group in second]


def test_a_round_that_the_run_does_not_have_is_refused(drive: Drive) -> None:
    run = drive()
    with pytest.raises(ServiceError, match=r"generation_round: 3 is not in 0\.\.2"):
        run.ask(1, ROUNDS)


@pytest.mark.parametrize("every", [1, 5])
def test_a_resumed_run_draws_the_same_prompts(drive: Drive, every: int) -> None:
    run = drive(f"-{every}", sync={"every": every})
    rounds = {1: 2, 2: 1, 3: 3, 4: 1, 5: 2, 6: 1, 7: 3}
    drawn: dict[int, list[str]] = {}
    for step in range(1, 6):
        publish(run, step)
        drawn[step] = run.roll_out(step, rounds=rounds[step])
        run.commit(step)
        if step == 3:
            run.client.record_checkpoint(3, "c" * 64)
    publish(run, 6)
    run.post(6, run.groups(6, 0, mixed=B)[:2])
    begun = run.ask(6)
    # The collector and the trainer die; the trainer begins again at step 4.
    assert run.client.begin_attempt().current_step == 3
    for step in range(4, 7):
        publish(run, step)
        prompts = run.ask(step)
        if step < 6:
            assert prompts.complete, "its groups are kept, for their weights are the same"
            assert [prompt.uid for prompt in prompts.prompts] == drawn[step][:B]
            run.commit(step)
    assert run.ask(6) == begun
    assert len(begun.recorded) == 2
    drawn[6] = run.roll_out(6, rounds=1)
    run.commit(6)
    publish(run, 7)
    drawn[7] = run.roll_out(7, rounds=rounds[7])
    everything = [uid for step in range(1, 8) for uid in drawn[step]]
    assert everything == run.prompts(0, len(everything))


def test_steps_that_are_rolled_out_anew_go_on_from_what_is_kept(drive: Drive) -> None:
    """Other weights make other groups, and so other numbers of rounds."""
    run = drive(sync={"every": 1})
    for step in range(1, 6):
        publish(run, step)
        run.roll_out(step, rounds=2)
        run.commit(step)
    run.client.rewind(1)
    assert run.ask(2).complete, "version 2 is that of the checkpoint"
    run.commit(2)
    publish(run, 3, letter="b")
    drawn = run.roll_out(3, rounds=1)
    run.commit(3)
    publish(run, 4, letter="b")
    drawn += run.roll_out(4, rounds=3)
    assert drawn == run.prompts(4 * B, 4 * B)


def test_groups_that_follow_deleted_ones_are_not_kept(drive: Drive) -> None:
    """The step in between may draw another number of prompts when it is rolled out again."""
    run = drive(sync={"every": 1})
    for step in range(1, 5):
        if step != 3:
            publish(run, step)
        run.roll_out(step, rounds=2)
        run.commit(step)
    run.client.rewind(1)
    run.commit(2)
    publish(run, 3)
    drawn = run.roll_out(3, rounds=1)
    run.commit(3)
    publish(run, 4)
    assert not run.ask(4).complete
    drawn += run.roll_out(4, rounds=2)
    assert drawn == run.prompts(4 * B, 3 * B)


def publish(run: Stream, version: int, letter: str = "a") -> None:
    """Publishes a version of the weights, if it is one that the rollouts use."""
    if run.driver.config.publishes_at(version):
        run.client.publish_weights(version, letter * 64)


class ExhaustedFleet(ScriptedFleet):
    """Answers so many prompts of all requests together, then none. All answers are wrong."""

    async def generate(
        self,
        request: GenerateRequest,
        on_group: Callable[[GeneratedGroup], None],
        *,
        indices: Collection[int],
        unfinished: UnfinishedGroups,
    ) -> None:
        await super().generate(request, on_group, indices=indices, unfinished=unfinished)
        self.answers -= len(indices)


def test_killed_collectors_leave_no_gap_in_the_stream(drive: Drive) -> None:
    run = drive(sync={"every": 5})
    run.client.publish_weights(1, "a" * 64)
    steps = range(1, 5)
    """The window before the first sync. Without a mixed group, each step has all of its rounds."""

    def recorded() -> list[str]:
        rounds = [run.ask(step, number) for step in steps for number in range(ROUNDS)]
        return [uid for prompts in rounds for uid in prompts.recorded]

    async def collect(answers: int) -> None:
        """Runs a collector until its replicas have answered so many prompts, and kills it."""
        expected = len(recorded()) + answers
        fleet = ExhaustedFleet(answers)
        collector = asyncio.create_task(make_collector(run.driver, fleet).collect(1))
        async with asyncio.timeout(60):
            while len(await asyncio.to_thread(recorded)) < expected:
                assert not collector.done()
                await asyncio.sleep(0.02)
        collector.cancel()
        await asyncio.wait([collector])

    total = len(steps) * ROUNDS * B
    for answers in (2, 5, 7, B * ROUNDS - 1, total - B * ROUNDS - 13):
        asyncio.run(collect(answers))
    assert recorded() == run.prompts(0, total)
