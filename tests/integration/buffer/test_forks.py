"""Forks of a run in the buffer service: their past is the parent's, and what follows is their own.

The reference is a run that was not forked: a fork without changes must go on exactly as its parent
did, in every table, under every algorithm.
"""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import httpx
import psycopg
import pytest

from bapo_core.config import PRESETS
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.buffer.api.digest_chain import check_changes
from services.buffer.api.trajectories import encode_groups
from services.common.errors import ServiceError
from services.common.objectstore import ObjectStore
from services.stack.stack import Endpoints
from tests.integration.support.driver import Driver, small_config, snapshot, synthetic_group

_NUMBERS = count()
STEPS = 10


def name_run(kind: str = "past") -> str:
    return f"{kind}-{next(_NUMBERS)}"


class Trained(Driver):
    """A run that is driven with weights, checkpoints and evaluations."""

    def run_step(self, step: int) -> wire.BatchManifest:
        self.publish(step)
        manifest = super().run_step(step)
        if self.config.checkpoints_after(step):
            self.client.record_checkpoint(step, digest_of("checkpoint", step))
        return manifest

    def publish(self, version: int) -> None:
        if not self.config.publishes_at(version):
            return
        self.client.publish_weights(version, digest_of("weights", version))
        for name in self.config.evaluation_sets_at(version):
            prompts = self.client.step_prompts(version, "evaluation", evaluation_set=name)
            if prompts.complete:
                continue
            groups = [
                synthetic_group(
                    prompt.uid,
                    version,
                    size=self.config.evaluation_sets[name].samples,
                    rng=random.Random(f"{version} {prompt.uid}"),
                )
                for prompt in prompts.prompts
            ]
            self.client.post_groups(
                version, "evaluation", encode_groups(groups), evaluation_set=name
            )

    def run_steps(self, first: int, last: int) -> list[wire.BatchManifest]:
        return [self.run_step(step) for step in range(first, last + 1)]


def digest_of(kind: str, number: int) -> str:
    return f"{number:02d}{kind.encode().hex()}".ljust(64, "0")[:64]


def trained(stack: Endpoints, steps: int = STEPS, **sections: Any) -> Trained:
    """Returns a run that has trained all of its steps."""
    checkpoint = {"every": 1, "keep": 100}
    driver = Trained(stack, small_config(name_run(), checkpoint=checkpoint, **sections))
    driver.run_steps(1, steps)
    return driver


def fork(driver: Driver, step: int, name: str | None = None, **values: Any) -> Trained:
    """Makes a fork, and returns it with an attempt that has begun."""
    request = wire.ForkRequest(name=name or name_run("fork"), step=step, values=values)
    state = driver.client.fork_run(request)
    return Trained(driver.stack, state.config, create=lambda _client, _config: None)


def essence(manifest: wire.BatchManifest) -> dict[str, Any]:
    """Returns all of a batch but the ids of its groups and the places of its objects."""
    hidden = {"group_id", "object_key", "object_digest", "row_start", "proximal_key"}
    values = json.loads(manifest.model_dump_json())
    for members in (values["members"], values["supervised"], values["record_proximal"]):
        for member in members:
            for key in hidden & member.keys():
                del member[key]
    return values


def algorithms_by_state() -> list[str]:
    """Returns one algorithm for each kind of state that a step depends on and a fork must have."""
    algorithms: dict[Any, str] = {}
    for algorithm in sorted(PRESETS):
        config = small_config("any", **sections_of(algorithm))
        state = (
            config.replay.select,
            config.response_replay.groups,
            config.sampler.kind,
            config.demonstrations.enabled,
            config.reevaluate.enabled,
            config.draws_from_stream,
            config.loss.correction.kind == "decoupled",
        )
        algorithms.setdefault(state, algorithm)
    return list(algorithms.values())


def sections_of(algorithm: str) -> dict[str, Any]:
    task = {"options": {"template": "short"}, "train_prompts": 96, "test_prompts": 4}
    return {"algorithm": algorithm, "steps": STEPS, "task": task}


@pytest.mark.parametrize("algorithm", algorithms_by_state())
def test_a_fork_without_changes_goes_on_as_its_parent(stack: Endpoints, algorithm: str) -> None:
    at = random.Random(algorithm).randrange(1, STEPS - 1)
    checkpoint = {"every": 1, "keep": 100}
    sections = sections_of(algorithm)
    parent = Trained(stack, small_config(name_run(), checkpoint=checkpoint, **sections))
    manifests = parent.run_steps(1, STEPS)
    child = fork(parent, at)
    assert child.config == parent.config.model_copy(update={"name": child.config.name})
    repeated = child.run_steps(at + 1, STEPS)
    assert [*map(essence, repeated)] == [*map(essence, manifests[at:])]
    assert_same_history(parent, child)


def assert_same_history(parent: Driver, child: Driver) -> None:
    """Compares everything that can be asked of two runs with one history."""
    one, other = parent.client, child.client
    assert other.run_state().current_step == one.run_state().current_step
    assert plain(other.steps()) == plain(one.steps())
    assert other.evaluations() == one.evaluations()
    for step in range(STEPS + 1):
        for buffer in ("hard", "high_quality"):
            listings = [
                [
                    (item.prompt_uid, item.step, item.inserted_step, item.accuracy)
                    for item in client.buffer(buffer, step)
                ]
                for client in (one, other)
            ]
            assert listings[0] == listings[1], f"{buffer} after step {step}"
    assert other.difficulty_history() == one.difficulty_history()
    assert difficulty_rows(child) == difficulty_rows(parent)
    assert posteriors(child) == posteriors(parent)
    for view in list(one.all_prompts())[:6]:
        histories = [client.prompt_history(view.uid) for client in (one, other)]
        attempts = [
            [(each.step, each.kind, each.correct, each.batches) for each in history.attempts]
            for history in histories
        ]
        assert attempts[0] == attempts[1]
        stays = [
            [(each.buffer, each.inserted_step, each.evicted_step) for each in history.stays]
            for history in histories
        ]
        assert sorted(stays[0], key=str) == sorted(stays[1], key=str)
    uids = {member.prompt_uid for member in one.batch(STEPS).members}
    for uid in sorted(uids)[:3]:
        for step in (2, STEPS):
            decisions = [
                json.loads(client.decision(step, uid).model_dump_json()) for client in (one, other)
            ]
            for decision in decisions:
                for considered in decision["considered"]:
                    considered.pop("group_id", None)
            assert decisions[0] == decisions[1]


def plain(steps: list[wire.StepView]) -> list[dict[str, Any]]:
    return [view.model_dump(exclude={"committed_at", "digests"}) for view in steps]


def difficulty_rows(driver: Driver) -> list[Any]:
    return snapshot(driver)["prompt_difficulty"]


def posteriors(driver: Driver) -> list[tuple[Any, ...]]:
    """Returns the last posterior of each prompt, through the lineage."""
    url = driver.stack.database_url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(url) as connection:
        return connection.execute(
            """
            select distinct on (position) position, step, a, b from sampler_posterior as row
            join run as owner on owner.id = row.run_id, run as asked
            where asked.name = %s and (owner.id = asked.id
                or owner.id = asked.parent_id and row.step <= asked.fork_step)
            order by position, step desc
            """,
            (driver.config.name,),
        ).fetchall()


def test_the_forks_of_a_run_are_listed(stack: Endpoints) -> None:
    parent = trained(stack, steps=4)
    forks = [fork(parent, step) for step in (1, 3)]
    forks[1].run_steps(4, 4)
    grandchild = fork(forks[1], 4)
    listed = httpx.get(
        f"{stack.buffer_url}/v1/runs",
        params={"parent": parent.config.name},
        headers={"Authorization": f"Bearer {stack.token}"},
    ).json()["items"]
    assert [run["name"] for run in listed] == [forks[1].config.name, forks[0].config.name]
    assert [run["forked_from"]["step"] for run in listed] == [3, 1]
    compared = parent.client.compare(grandchild.config.name).runs
    assert [run.forked_from for run in compared] == [
        None,
        wire.ForkOrigin(run=forks[1].config.name, step=4, checkpoint=4),
    ]


def test_a_fork_changes_nothing_of_its_parent(stack: Endpoints) -> None:
    parent = trained(stack)
    before = snapshot(parent)
    child = fork(parent, 6, fresh={"filter": "none"}, replay={"buffer": {"capacity": 2}})
    child.run_steps(7, 12)
    assert snapshot(parent) == before


def test_the_values_of_a_fork_hold_from_the_step_after_it_on(stack: Endpoints) -> None:
    parent = trained(stack)
    child = fork(
        parent, 6, sampler={"kind": "mopps", "candidates": 2}, optimizer={"learning_rate": 1e-5}
    )
    state = child.client.run_state()
    assert state.forked_from == wire.ForkOrigin(run=parent.config.name, step=6, checkpoint=6)
    assert (state.status, state.current_step, state.attempt) == ("running", 6, 1)
    assert state.history.at(6) == parent.config
    assert state.history.at(7).sampler.kind == "mopps"
    (change,) = state.changes
    assert change.first_step == 7
    assert change.old["sampler.kind"] == "uniform"
    check_changes(child.client.stored_config(), state.changes)
    assert parent.client.run_state().forked_from is None


def test_an_adaptive_sampler_that_begins_with_a_fork_knows_the_results_of_its_past(
    stack: Endpoints,
) -> None:
    parent = trained(stack)
    child = fork(parent, 6, sampler={"kind": "mopps", "decay": 1.0, "candidates": 2})
    uid = next(parent.client.all_prompts()).uid
    groups = [
        attempt
        for attempt in child.client.prompt_history(uid).attempts
        if attempt.kind == "fresh" and attempt.step <= 6
    ]
    posterior = child.client.prompt_history(uid).posterior
    assert posterior is not None
    assert posterior.a == 1 + sum(group.correct for group in groups)
    assert posterior.b == 1 + sum(group.size - group.correct for group in groups)


def test_the_fork_of_a_fork_has_the_past_of_both(stack: Endpoints) -> None:
    first = trained(stack)
    second = fork(first, 4, name_run("fork"))
    second.run_steps(5, STEPS)
    third = fork(second, 7)
    third.run_steps(8, STEPS)
    origin = third.client.run_state().forked_from
    assert origin is not None
    assert origin.run == second.config.name
    assert plain(third.client.steps()) == plain(first.client.steps())
    assert third.client.difficulty_history() == first.client.difficulty_history()
    # Up to step 4 the rows are the first run's, whichever run is named.
    fourth = fork(second, 3)
    origin = fourth.client.run_state().forked_from
    assert origin is not None
    assert (origin.run, origin.step) == (first.config.name, 3)
    fourth.run_steps(4, STEPS)
    assert plain(fourth.client.steps()) == plain(first.client.steps())


def test_the_evaluation_of_the_weights_of_the_fork_is_not_repeated(stack: Endpoints) -> None:
    parent = trained(stack, evaluation={"every": 3})
    child = fork(parent, 5)  # theta_6 has been evaluated
    assert child.client.evaluations() == parent.client.evaluations()[:3]
    assert child.client.step_prompts(6, "evaluation").complete
    assert not child.client.progress().open_evaluations


# ---- what a fork needs is kept -------------------------------------------------------------------


def test_a_parent_cannot_be_deleted_before_its_forks(stack: Endpoints) -> None:
    parent = trained(stack)
    child = fork(parent, 6)
    parent.client.stop()
    with pytest.raises(ServiceError, match=rf"past of its forks {child.config.name}; delete these"):
        parent.client.delete_run()
    assert parent.client.run_state().status == "stopped"
    child.client.stop()
    child.client.delete_run()
    assert plain(parent.client.steps())
    parent.client.delete_run()


def test_retention_deletes_no_object_that_another_run_needs(
    stack: Endpoints,
) -> None:
    object_store = ObjectStore(stack.object_store)
    parent = Trained(stack, small_config(name_run(), checkpoint={"every": 1, "keep": 2}))
    parent.run_steps(1, 6)
    shared = parent.client.checkpoints()[0]
    object_store.put(f"{shared.uri}/file", b"state")
    child = fork(parent, 6)
    # The parent drops the checkpoint, and the fork still has it.
    parent.run_steps(7, STEPS)
    assert shared.step not in {view.step for view in parent.client.checkpoints()}
    assert child.client.latest_checkpoint() == wire.StoredVersion(
        number=6, uri=shared.uri, manifest_digest=shared.manifest_digest
    )
    assert object_store.keys(f"{shared.uri}/file")
    # Garbage collection finds what no row points to, and nothing that the fork has.
    stray = f"{shared.uri}-stray/file"
    object_store.put(stray, b"state")
    orphans = parent.client.collect_garbage(dry_run=True).orphans
    assert stray in orphans
    assert not [key for key in orphans if key.startswith(f"{shared.uri}/")]
    object_store.delete([stray])
    # With the last row that points to it, it goes.
    child.run_steps(7, STEPS)
    assert shared.step not in {view.step for view in child.client.checkpoints()}
    wait_until_gone(object_store, f"{shared.uri}/file")


def wait_until_gone(store: ObjectStore, key: str) -> None:
    for _ in range(200):
        if key not in store.keys(key):
            return
        time.sleep(0.05)
    raise AssertionError(f"{key} is still there")


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ({"rollout": {"group_size": 8}}, r"rollout.group_size=8 cannot change .* from step 1 on"),
        ({"model": {"path": "tiny-sorting"}}, "model.path=tiny-sorting cannot change"),
        ({"task": {"train_prompts": 48}}, "task.train_prompts=48 cannot change"),
        ({"evaluation": {"samples": 2}}, "evaluation.samples=2 cannot change"),
        ({"advantage": {"estimator": "gae"}}, "the checkpoint that it begins with was written"),
        ({"steps": 6}, "no step left to train after step 6, because steps is 6"),
        ({"sync": {"evry": 2}}, "sync.evry"),
        ({"sync": {"every": 0}}, "sync.every"),
    ],
)
def test_values_that_the_past_depends_on_are_refused(
    driver: Trained, values: dict[str, Any], refused: str
) -> None:
    with pytest.raises(ServiceError, match=refused):
        fork(driver, 6, **values)


@pytest.fixture(scope="module")
def driver(stack: Endpoints) -> Trained:
    return trained(stack)


def test_a_step_that_may_be_trained_again_is_refused(stack: Endpoints) -> None:
    parent = Trained(stack, small_config(name_run(), checkpoint={"every": 4}))
    parent.run_steps(1, 5)
    with pytest.raises(ServiceError, match=r"the last checkpoint .* is of step 3.*fork at step 3"):
        fork(parent, 4)
    with pytest.raises(ServiceError, match=r"step 9 of run .* is not committed"):
        fork(parent, 9)
    fresh = Trained(stack, small_config(name_run(), checkpoint={"every": 9}))
    fresh.run_steps(1, 2)
    with pytest.raises(ServiceError, match=r"is not written yet.*wait for the next checkpoint"):
        fork(fresh, 2)


def test_a_step_without_a_checkpoint_begins_at_the_one_before(stack: Endpoints) -> None:
    parent = Trained(stack, small_config(name_run(), checkpoint={"every": 4, "keep": 9}))
    parent.run_steps(1, 8)
    child = fork(parent, 5)
    state = child.client.run_state()
    assert state.forked_from is not None
    assert state.forked_from.checkpoint == 3
    assert state.current_step == 5, "an attempt does not go back behind the fork"
    latest = child.client.latest_checkpoint()
    assert latest is not None
    assert latest.number == 3
    batch = child.client.recorded_batch(4)
    assert batch is not None
    assert essence(batch) == essence(parent.client.batch(4))
    child.run_step(6)


def test_weights_that_are_pruned_are_named(stack: Endpoints) -> None:
    parent = Trained(
        stack,
        small_config(
            name_run(), checkpoint={"every": 1, "keep": 1}, sync={"every": 4, "reevaluate_every": 4}
        ),
    )
    parent.run_steps(1, STEPS)
    with pytest.raises(ServiceError, match=r"version 4 of the weights.*fork at step 3.*sync.every"):
        fork(parent, 5)
    fork(parent, 5, sync={"every": 1, "reevaluate_every": 1}).run_step(6)
    fork(parent, 3).run_step(4)


def test_the_same_request_returns_the_same_fork(stack: Endpoints, driver: Trained) -> None:
    request = wire.ForkRequest(name=name_run("fork"), step=6, values={"steps": 20})
    state = driver.client.fork_run(request)
    assert driver.client.fork_run(request) == state
    for other in (
        request.model_copy(update={"step": 5}),
        request.model_copy(update={"values": {"steps": 21}}),
        request.model_copy(update={"name": driver.config.name}),
    ):
        with pytest.raises(ServiceError, match="exists, and is not this fork"):
            driver.client.fork_run(other)


def test_the_token_of_a_run_makes_no_run_of_another_name(stack: Endpoints, driver: Trained) -> None:
    admin = BufferClient(stack.buffer_url, stack.token)
    created = admin.create_token("bound", "run", run=driver.client.run)
    bound = BufferClient(stack.buffer_url, created.token, run=driver.client.run)
    with pytest.raises(ServiceError, match="this token is for run"):
        bound.fork_run(wire.ForkRequest(name=name_run("fork"), step=6))


def test_a_correction_that_needs_stored_logprobs_begins_with_empty_buffers_alone(
    stack: Endpoints, driver: Trained
) -> None:
    with pytest.raises(ServiceError, match=r"loss.correction.kind=decoupled cannot begin"):
        fork(driver, 6, loss={"correction": {"kind": "decoupled"}})


def test_a_run_that_is_being_deleted_has_no_past_to_share(stack: Endpoints) -> None:
    parent = trained(stack, steps=2)
    url = stack.database_url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(url) as connection:
        connection.execute(
            "update run set status = 'deleting' where name = %s", (parent.config.name,)
        )
    with pytest.raises(ServiceError, match=r"is being deleted; its past cannot be shared"):
        fork(parent, 2)


def test_forks_made_at_once_are_one_fork(stack: Endpoints, driver: Trained) -> None:
    request = wire.ForkRequest(name=name_run("fork"), step=6)
    with ThreadPoolExecutor(4) as pool:
        states = list(pool.map(lambda _: driver.client.fork_run(request), range(4)))
    assert states == [states[0]] * 4


# ---- recorded rollouts ---------------------------------------------------------------------------


def recorded(driver: Driver, first: int, last: int, **values: Any) -> Trained:
    """Makes a run that is trained on the rollouts of steps first..last of another run."""
    request = wire.ForkRequest(
        name=name_run("recorded"),
        step=first - 1,
        rollouts_until=last,
        values={"steps": last, **values},
    )
    state = driver.client.fork_run(request)
    return Trained(driver.stack, state.config, create=lambda _client, _config: None)


def train_recorded(driver: Trained, first: int, last: int) -> list[wire.BatchManifest]:
    manifests = []
    for step in range(first, last + 1):
        driver.publish(step)
        prompts = driver.client.step_prompts(step)
        assert (prompts.complete, prompts.prompts) == (True, [])
        manifests.append(driver.client.batch(step))
        driver.client.commit(step, {"loss": 0.5})
    return manifests


@pytest.mark.parametrize("first", [1, 5])
def test_recorded_rollouts_make_the_recorded_batches_under_the_same_rules(
    driver: Trained, first: int
) -> None:
    child = recorded(driver, first, STEPS)
    batches = train_recorded(child, first, STEPS)
    expected = [driver.client.recorded_batch(step) for step in range(first, STEPS + 1)]
    assert [*map(essence, batches)] == [*map(essence, expected)]
    assert child.client.difficulty_history() == driver.client.difficulty_history()
    assert difficulty_rows(child) == difficulty_rows(driver)
    origin = child.client.run_state().forked_from
    assert origin is not None
    assert origin.describe() == (
        f"{driver.config.name} at step {first - 1}, on its rollouts to step {STEPS}"
    )


def test_other_rules_compose_other_batches_of_the_recorded_rollouts(
    stack: Endpoints, driver: Trained
) -> None:
    """They are those of a run that was rolled out under these rules: no prompt and no response of a
    step depends on the filter or on replays here."""
    rules = {"fresh": {"filter": "none"}, "replay": {"select": "off"}}
    rolled_out = trained(stack, steps=STEPS, reevaluate={"enabled": False}, **rules)
    child = recorded(driver, 1, STEPS, reevaluate={"enabled": False}, **rules)
    batches = train_recorded(child, 1, STEPS)
    expected = [rolled_out.client.recorded_batch(step) for step in range(1, STEPS + 1)]
    assert [*map(essence, batches)] == [*map(essence, expected)]


def test_re_evaluations_that_other_rules_do_not_ask_for_are_left_out(driver: Trained) -> None:
    child = recorded(driver, 1, STEPS, reevaluate={"max_prompts": 1})
    for manifest in train_recorded(child, 1, STEPS):
        assert manifest.counts["reevaluated_total"] <= 1


def test_the_rollouts_of_a_fork_are_those_of_its_past_and_its_own(
    driver: Trained,
) -> None:
    for at in (0, 4):
        child = fork(driver, at)
        child.run_steps(at + 1, STEPS)
        again = recorded(child, 1 if at == 0 else 3, STEPS)
        batches = train_recorded(again, 1 if at == 0 else 3, STEPS)
        assert essence(batches[-1]) == essence(driver.client.recorded_batch(STEPS))


def test_after_the_recorded_rollouts_a_run_rolls_out_its_own(driver: Trained) -> None:
    child = recorded(driver, 1, 6, steps=8)
    train_recorded(child, 1, 6)
    child.run_step(7)
    assert child.client.steps()[-1].rollouts > 0


def test_no_group_is_accepted_for_a_step_with_recorded_rollouts(driver: Trained) -> None:
    child = recorded(driver, 1, STEPS)
    uid = next(driver.client.all_prompts()).uid
    group = synthetic_group(uid, 1, size=4, rng=random.Random(0))
    with pytest.raises(ServiceError, match=r"no group can be added|is not a fresh prompt"):
        child.client.post_groups(1, "fresh", encode_groups([group]))


def test_rollouts_that_are_not_recorded_are_refused(driver: Trained) -> None:
    with pytest.raises(ServiceError, match="has rollouts of all its steps to 10 only, not to 12"):
        recorded(driver, 1, 12)
    with pytest.raises(ServiceError, match="steps 6 to 5 are none"):
        recorded(driver, 6, 5)
