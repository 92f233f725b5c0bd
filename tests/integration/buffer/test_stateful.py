"""Compares the real service, on real Postgres and S3, with a reference model in plain lists.

Faults happen between any two operations: repeated, reordered, concurrent, superseded and aborted
calls, database connections that are cut, and (in the slow tests) processes that are killed.
"""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from bapo_core.config import RunConfig
from services.buffer.api.client import BufferClient
from services.buffer.api.trajectories import TrajectoryGroup, encode_groups
from services.common.errors import ServiceError, Superseded
from services.datasets import load_datasets
from tests.integration.support.breakable import PROCESSES, Breakable, breakable_stack
from tests.integration.support.driver import WINDOW, Driver, small_config, synthetic_group
from tests.integration.support.model import Model

T = TypeVar("T")
names = itertools.count()
faults = st.sampled_from(["none", "none", "none", "twice", "at once", "cut", "aborted"])


class StepProtocol(RuleBasedStateMachine):
    stack: ClassVar[Breakable]
    kills: ClassVar[bool] = False
    sections: ClassVar[dict[str, Any]] = {}
    """Settings of the run that differ from those of the driver."""

    @initialize(seed=st.integers(0, 1000))
    def begin(self, seed: int) -> None:
        config = small_config(
            f"stateful-{next(names)}",
            seed=seed,
            steps=40,
            reevaluate={"max_prompts": 5},
            hard_buffer={"capacity": 5},
            replay={"window": WINDOW, "buffer": {"capacity": 6}},
            **self.sections,
        )
        self.driver = Driver(self.stack.endpoints, config)
        self.client = self.driver.client
        self.model = self.make_model(config)
        self.checkpoint = 0
        self.paused = False
        self.rng = random.Random(seed)

    def make_model(self, config: RunConfig) -> Model:
        return Model(config)

    # ---- faults

    def faulty(self, fault: str, call: Callable[[], T]) -> T:
        """Calls `call` under a fault and returns its first answer."""
        if fault == "cut":
            self.cut_connections()
        if fault == "aborted":
            self.abort_request()
        if fault == "at once":
            with ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(lambda _: call(), range(4)))
            # Exactly one of them had the effect; all answers describe the same state.
            return answers[0]
        answer = call()
        if fault == "twice":
            call()
        return answer

    def cut_connections(self) -> None:
        url = self.stack.endpoints.database_url.replace("postgresql+psycopg", "postgresql")
        with psycopg.connect(url) as connection:
            connection.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where pid <> pg_backend_pid() and backend_type = 'client backend'"
            )

    def abort_request(self) -> None:
        """Sends half of a body of groups and closes the connection."""
        url = urlsplit(self.stack.endpoints.buffer_url)
        step = self.model.current_step + 1
        body = b"\xff\xff\xff\xff half of it"
        with socket.create_connection((url.hostname, url.port)) as connection:
            connection.sendall(
                (
                    f"POST /v1/runs/{self.client.run}/steps/{step}/groups HTTP/1.1\r\n"
                    f"Host: {url.netloc}\r\nContent-Length: 100000\r\n"
                    f"Authorization: Bearer {self.stack.endpoints.token}\r\n"
                    f"X-Bapo-Attempt: {self.client.attempt}\r\n\r\n"
                ).encode()
                + body
            )

    # ---- rules

    def next_step(self, ahead: int) -> int:
        return self.model.current_step + 1 + ahead

    def drawn(self, step: int) -> list[str]:
        if step not in self.model.drawn:
            prompts = self.client.step_prompts(step)
            self.model.drawn[step] = [prompt.uid for prompt in prompts.prompts]
        return self.model.drawn[step]

    def is_decided(self, _: int) -> bool:
        """Whether the groups so far decide the fresh prompts of a step."""
        return True

    def complete_fresh(self, step: int) -> None:
        self.send(step, "fresh", self.drawn(step), "none")

    def send(self, step: int, kind: Any, uids: list[str], fault: str) -> None:
        version = self.model.config.schedule.policy_version(step) if kind == "fresh" else step
        groups = [self.group(uid, version) for uid in uids]
        body = encode_groups(groups)
        expected = self.model.land(step, kind, {g.prompt_uid: g.correct for g in groups})
        accepted = self.faulty(fault, lambda: self.client.post_groups(step, kind, body))
        if fault != "at once":
            assert accepted.accepted == expected
        assert accepted.accepted + accepted.duplicates == len(groups)

    def group(self, uid: str, version: int) -> TrajectoryGroup:
        size = self.model.config.rollout.group_size
        return synthetic_group(uid, version, size=size, rng=self.rng)

    @rule(fault=faults)
    def publish(self, fault: str) -> None:
        """Publishes the version before the next step, as a trainer does."""
        version = self.next_step(0)
        digest = self.model.publish(version)
        self.faulty(fault, lambda: self.client.publish_weights(version, digest))

    @precondition(lambda self: not self.paused)
    @rule(ahead=st.integers(0, 2), share=st.floats(0, 1), fault=faults, order=st.randoms())
    def fresh_groups(self, ahead: int, share: float, fault: str, order: random.Random) -> None:
        """Sends a share of a step's groups in any order, also for steps ahead."""
        step = self.next_step(ahead)
        if self.model.is_set_aside(step, "fresh"):
            assert not self.is_ready(step, "prompts")
            return
        if not self.is_decided(step):
            assert not self.is_ready(step, "prompts")
            return
        uids = list(self.drawn(step))
        order.shuffle(uids)
        self.send(step, "fresh", uids[: max(1, round(share * len(uids)))], fault)

    @precondition(lambda self: not self.paused)
    @rule(fault=faults)
    def reevaluations(self, fault: str) -> None:
        step = self.next_step(0)
        if step % self.model.config.sync.reevaluate_every:
            return
        if self.model.is_set_aside(step, "reevaluation"):
            return
        uids = [p.uid for p in self.client.step_prompts(step, "reevaluation").prompts]
        assert uids == self.model.reevaluated(step)
        if uids:
            self.send(step, "reevaluation", uids, fault)

    @precondition(lambda self: not self.paused)
    @rule(count=st.integers(1, 4), fault=faults)
    def whole_steps(self, count: int, fault: str) -> None:
        """Completes the groups of some steps, builds their batches and commits them."""
        for _ in range(count):
            step = self.next_step(0)
            if step > 39:
                return
            self.publish(fault)
            self.complete_fresh(step)
            self.reevaluations("none")
            self.batch(fault)
            self.commit(fault)

    @precondition(lambda self: not self.paused)
    @rule(fault=faults)
    def batch(self, fault: str) -> None:
        step = self.next_step(0)
        if not self.model.is_set_aside(step, "fresh"):
            self.drawn(step)
        if self.model.missing(step):
            assert not self.is_ready(step, "batch")
            return
        manifest = self.faulty(fault, lambda: self.client.batch(step))
        if step not in self.model.batches:
            self.model.build(step)
        members = [(m.prompt_uid, m.source, m.step) for m in manifest.members]
        assert members == self.model.batches[step]
        assert (manifest.c2, manifest.c3) == pytest.approx(self.model.windows[step])

    def is_ready(self, step: int, call: str) -> bool:
        """Asks for the prompts or the batch of a step without waiting."""
        path = f"/v1/runs/{self.client.run}/steps/{step}/{call}"
        answer = self.client._send("POST", path, params={"wait": 0})
        return bool(answer.json()["ready"])

    @rule(fault=faults)
    def commit(self, fault: str) -> None:
        step = self.next_step(0)
        if step not in self.model.batches:
            with pytest.raises(ServiceError, match="has no batch to commit"):
                self.client.commit(step, {})
            return
        state = self.faulty(fault, lambda: self.client.commit(step, {"loss": float(step)}))
        self.model.commit(step)
        assert state.current_step == step

    @rule(fault=faults)
    def checkpoint_now(self, fault: str) -> None:
        step = self.model.current_step
        if step:
            self.faulty(fault, lambda: self.client.record_checkpoint(step, "c" * 64))
            self.checkpoint = step

    @rule(back=st.integers(0, 5), fault=faults)
    def rewind(self, back: int, fault: str) -> None:
        step = max(self.checkpoint, self.model.current_step - back)
        state = self.faulty(fault, lambda: self.client.rewind(step))
        self.model.rewind(step)
        assert state.current_step == step

    @rule()
    def new_attempt(self) -> None:
        """Begins a new attempt; calls of the superseded one are refused."""
        old = BufferClient(
            self.stack.endpoints.buffer_url,
            self.stack.endpoints.token,
            run=self.client.run,
            attempt=self.client.attempt,
        )
        state = self.client.begin_attempt()
        self.model.rewind(self.checkpoint)
        assert state.status == ("paused" if self.paused else "running")
        assert state.current_step == self.checkpoint
        step = self.next_step(0)
        calls: list[Callable[[], object]] = [
            lambda: old.commit(step, {}),
            lambda: old.rewind(0),
            lambda: old.step_prompts(step),
        ]
        for call in calls:
            with pytest.raises(Superseded):
                call()

    @rule(fault=faults)
    def pause_or_resume(self, fault: str) -> None:
        change = self.client.resume if self.paused else self.client.pause
        self.faulty(fault, change)
        self.paused = not self.paused

    @rule()
    def train_elsewhere(self) -> None:
        """The trainer continues on a machine on which the same steps give other weights."""
        self.new_attempt()
        self.model.machine += 1

    @rule(kind=st.sampled_from(["fresh", "reevaluation"]))
    def groups_that_do_not_belong_here(self, kind: Any) -> None:
        step = self.next_step(0)
        version = self.model.config.schedule.policy_version(step) if kind == "fresh" else step
        stranger = encode_groups([self.group("stranger", version)])
        with pytest.raises(ServiceError):
            self.client.post_groups(step, kind, stranger)
        with pytest.raises(ServiceError, match=r"need version|no re-evaluation"):
            self.client.post_groups(step, kind, encode_groups([self.group("stranger", 99)]))

    @precondition(lambda self: self.kills)
    @rule(process=st.sampled_from(PROCESSES))
    def kill(self, process: str) -> None:
        self.stack.kill(process)
        self.stack.revive(process)

    # ---- invariants between any two operations

    @invariant()
    def current_steps_are_equal(self) -> None:
        assert self.client.run_state().current_step == self.model.current_step

    @invariant()
    def buffers_are_equal(self) -> None:
        step = self.rng.randint(0, self.model.current_step)
        for at in {step, self.model.current_step}:
            state = self.model.states[at]
            hard, high = self.client.buffer("hard", at), self.client.buffer("high_quality", at)
            assert [(i.prompt_uid, i.step) for i in hard] == [
                (g.prompt_uid, g.step) for g in state.hard
            ]
            assert [(i.prompt_uid, i.step) for i in high] == [
                (g.prompt_uid, g.step) for g in state.high
            ]

    @invariant()
    def difficulty_is_equal(self) -> None:
        step = self.rng.randint(0, self.model.current_step)
        last = [correct[-1] for correct in self.model.states[step].attempts.values()]
        bins = self.client.difficulty_bins(step).bins
        assert bins == [last.count(k) for k in range(len(bins))]
        listed = {p.uid: p for p in self.client.all_prompts()}
        attempts = self.model.states[-1].attempts
        assert listed.keys() == attempts.keys()
        for uid, correct in attempts.items():
            prompt = listed[uid]
            assert (prompt.attempts, prompt.bin) == (len(correct), correct[-1])
            assert prompt.best_mean == max(correct) / 4


class DynamicSampling(StepProtocol):
    """The step protocol with dynamic sampling of up to three rounds in a step, whose prompts follow
    from the groups that are recorded so far."""

    sections: ClassVar[dict[str, Any]] = {
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_generation_rounds": 3},
        "task": {"options": {"template": "short"}, "train_prompts": 30, "test_prompts": 4},
    }

    def make_model(self, config: RunConfig) -> Model:
        return Model(config, [prompt.uid for prompt in load_datasets(config)[0].prompts])

    def is_decided(self, step: int) -> bool:
        return self.model.streamed(step) is not None

    def drawn(self, step: int) -> list[str]:
        """Returns the prompts of the rounds that have begun or may begin."""
        uids = self.model.expected_uids(step, "fresh")
        size = self.model.config.rollout.prompts_per_step
        for generation_round in range(len(uids) // size):
            prompts = self.client.step_prompts(step, "fresh", generation_round)
            start = generation_round * size
            assert [prompt.uid for prompt in prompts.prompts] == uids[start : start + size]
            assert prompts.complete == self.model.is_complete(step)
        return uids

    def complete_fresh(self, step: int) -> None:
        while not self.model.is_complete(step):
            self.send(step, "fresh", self.drawn(step), "none")


@pytest.fixture(scope="module")
def breakable() -> Iterator[Breakable]:
    with breakable_stack() as stack:
        StepProtocol.stack = stack
        yield stack


def check(machine: type[StepProtocol], *, examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_service_agrees_with_the_model(breakable: Breakable) -> None:
    check(StepProtocol, examples=12, steps=25)


def test_the_service_agrees_with_the_model_of_dynamic_sampling(breakable: Breakable) -> None:
    check(DynamicSampling, examples=8, steps=25)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_service_agrees_with_the_model_of_dynamic_sampling_for_long(
    breakable: Breakable,
) -> None:
    check(DynamicSampling, examples=60, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_service_agrees_with_the_model_for_long(breakable: Breakable) -> None:
    check(StepProtocol, examples=100, steps=40)


class KilledStepProtocol(StepProtocol):
    kills = True


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_service_agrees_with_the_model_while_processes_are_killed(breakable: Breakable) -> None:
    check(KilledStepProtocol, examples=40, steps=40)
