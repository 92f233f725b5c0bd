"""The step protocol against the real service, on real Postgres and S3."""

from __future__ import annotations

import dataclasses
import random
import re
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.buffer.api.trajectories import TrajectoryGroup, encode_groups
from services.common import layout
from services.common.errors import ServiceError, ServiceUnavailable, Superseded
from services.common.objectstore import ObjectStore, ObjectStoreError
from services.stack.stack import Endpoints
from tests.integration.support.driver import Driver, small_config, snapshot, synthetic_group


@pytest.fixture
def drive(stack: Endpoints, request: pytest.FixtureRequest) -> Callable[..., Driver]:
    """Returns a function that creates a run named after the test."""

    def make(**sections: Any) -> Driver:
        name = re.sub("[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:60]
        return Driver(stack, small_config(name, **sections))

    return make


def test_every_call_repeated_gives_the_first_answer(drive: Callable[..., Driver]) -> None:
    driver = drive()
    first = driver.client.step_prompts(1)
    body = encode_groups(driver.groups(1))
    accepted = driver.client.post_groups(1, "fresh", body)
    assert (accepted.accepted, accepted.duplicates, accepted.complete) == (8, 0, True)
    repeated = driver.client.post_groups(1, "fresh", body)
    assert (repeated.accepted, repeated.duplicates, repeated.complete) == (0, 8, True)
    manifest = driver.client.batch(1)
    assert driver.client.batch(1) == manifest
    driver.client.commit(1, {"loss": 1.0})
    before = snapshot(driver)
    driver.client.commit(1, {"loss": 2.0})
    assert snapshot(driver) == before
    assert driver.client.batch(1) == manifest
    assert driver.client.step_prompts(1).prompts == first.prompts


def test_a_group_is_recorded_once_even_if_other_content_is_sent_for_it(
    drive: Callable[..., Driver],
) -> None:
    driver = drive()
    groups = driver.groups(1)
    driver.client.post_groups(1, "fresh", encode_groups(groups))
    rivals = [
        dataclasses.replace(
            group,
            responses=[dataclasses.replace(r, correct=not r.correct) for r in group.responses],
        )
        for group in groups
    ]
    before = snapshot(driver)
    answer = driver.client.post_groups(1, "fresh", encode_groups(rivals))
    assert answer.accepted == 0
    assert snapshot(driver) == before


def test_difficulty_counts_correct_responses_whatever_their_rewards(
    drive: Callable[..., Driver],
) -> None:
    """Rewards of +1 and -1 with a part each: k/G, filter and window are those of 1 and 0."""
    plain = drive(reevaluate={"enabled": False})
    shaped = Driver(plain.stack, small_config("shaped-rewards", reevaluate={"enabled": False}))
    for step in (1, 2, 3):
        for driver in (plain, shaped):
            groups = driver.groups(step)
            if driver is shaped:
                groups = [shape(group) for group in groups]
            driver.client.post_groups(step, "fresh", encode_groups(groups))
            driver.client.batch(step)
            driver.client.commit(step, {"loss": 0.0})
    for expected, actual in zip(plain.client.steps(), shaped.client.steps(), strict=True):
        assert (actual.bins, actual.counts, actual.r_tot) == (
            expected.bins,
            expected.counts,
            expected.r_tot,
        )
        assert actual.accuracy == expected.accuracy == pytest.approx(expected.mean_reward)
        assert expected.reward_parts == {"answer": pytest.approx(expected.accuracy)}
        assert actual.mean_reward == pytest.approx(2 * expected.accuracy - 1)
        assert actual.reward_parts == {"answer": pytest.approx(expected.accuracy), "length": -0.5}
    member = shaped.client.recorded_batch(3).members[0]
    view = shaped.client.group(member.group_id)
    assert view.mean_reward == pytest.approx(2 * view.accuracy - 1)
    assert [response.reward for response in view.responses] == [
        1.0 if response.correct else -1.0 for response in view.responses
    ]
    assert {response.reward_parts["length"] for response in view.responses} == {-0.5}
    (attempt,) = shaped.client.prompt_history(view.prompt_uid).attempts
    assert (attempt.accuracy, attempt.mean_reward) == (view.accuracy, view.mean_reward)
    assert attempt.reward_parts == view.reward_parts


def shape(group: TrajectoryGroup) -> TrajectoryGroup:
    """Returns the group with rewards of +1 and -1, and a part that no reward depends on."""
    responses = [
        dataclasses.replace(
            response,
            reward=2 * response.reward - 1,
            reward_parts={"answer": response.reward, "length": -0.5},
        )
        for response in group.responses
    ]
    return dataclasses.replace(group, responses=responses)


def test_a_superseded_attempt_is_refused_everywhere(drive: Callable[..., Driver]) -> None:
    driver = drive()
    body = encode_groups(driver.groups(1))
    old = driver.client
    new = BufferClient(driver.stack.buffer_url, driver.stack.token, run=driver.config.name)
    assert new.begin_attempt().attempt == old.attempt + 1
    calls: list[Callable[[], object]] = [
        lambda: old.step_prompts(1),
        lambda: old.post_groups(1, "fresh", body),
        lambda: old.batch(1),
        lambda: old.commit(1, {}),
        lambda: old.rewind(0),
        lambda: old.publish_weights(1, "0" * 64),
        lambda: old.record_checkpoint(1, "0" * 64),
        lambda: old.set_status("failed"),
    ]
    for call in calls:
        with pytest.raises(Superseded, match="superseded by attempt 2"):
            call()
    assert new.post_groups(1, "fresh", body).accepted == 8


def test_groups_that_do_not_belong_are_refused_and_leave_nothing(
    drive: Callable[..., Driver],
) -> None:
    driver = drive()
    good = driver.groups(1)
    short = dataclasses.replace(good[0], responses=good[0].responses[:3])
    stale = dataclasses.replace(good[0], policy_version=2)
    stranger = dataclasses.replace(good[0], prompt_uid="countdown:unknown")
    for groups, message in (
        ([short], "groups are whole or absent"),
        ([stale], "need version 1"),
        ([stranger], "not a fresh prompt of step 1"),
        ([good[0], good[0]], "more than one group"),
    ):
        with pytest.raises(ServiceError, match=message) as caught:
            driver.client.post_groups(1, "fresh", encode_groups(groups))
        assert caught.value.status == 400
    with pytest.raises(ServiceError, match="not an Arrow IPC stream"):
        driver.client.post_groups(1, "fresh", b"not arrow")
    assert snapshot(driver)["rollout_group"] == []


def test_the_batch_waits_for_all_groups(drive: Callable[..., Driver]) -> None:
    driver = drive()
    groups = driver.groups(1)
    driver.client.post_groups(1, "fresh", encode_groups(groups[:5]))
    response = _post(driver, "steps/1/batch")
    assert response.json()["ready"] is False
    assert "5 of up to 8 fresh groups" in response.json()["missing"]
    driver.client.post_groups(1, "fresh", encode_groups(groups[5:]))
    assert driver.client.batch(1).ready


def test_reevaluations_wait_for_the_step_before(drive: Callable[..., Driver]) -> None:
    driver = drive()
    response = _post(driver, "steps/2/prompts?kind=reevaluation")
    assert response.json()["ready"] is False
    driver.run_step(1)
    assert driver.client.step_prompts(2, "reevaluation").ready


def test_steps_are_committed_in_order_and_once(drive: Callable[..., Driver]) -> None:
    driver = drive()
    with pytest.raises(ServiceError, match="no batch to commit"):
        driver.client.commit(1, {})
    driver.roll_out(1)
    with pytest.raises(ServiceError, match="cannot be built"):
        driver.client.batch(3)
    driver.client.batch(1)
    driver.client.commit(1, {})
    late = encode_groups(driver.groups(1)[:1])
    assert driver.client.post_groups(1, "fresh", late).duplicates == 1
    assert driver.client.run_state().current_step == 1


def test_a_rewind_undoes_everything_after_a_step_exactly(drive: Callable[..., Driver]) -> None:
    driver = drive()
    for step in range(1, 6):
        driver.run_step(step)
    before = snapshot(driver)
    manifests = [driver.run_step(step) for step in range(6, 10)]
    assert snapshot(driver) != before
    driver.client.rewind(5)
    assert snapshot(driver) == before
    repeated = [driver.run_step(step) for step in range(6, 10)]
    assert list(map(_composition, repeated)) == list(map(_composition, manifests))


def evaluate(driver: Driver, version: int, correct: int = 2) -> None:
    """Posts the evaluation of a version, with so many correct responses to each prompt."""
    rng = random.Random(0)
    groups = []
    for prompt in driver.client.step_prompts(version, "evaluation").prompts:
        group = synthetic_group(prompt.uid, version, size=4, rng=rng)
        groups.append(with_correct(group, correct))
    driver.client.post_groups(version, "evaluation", encode_groups(groups))


def with_correct(group: TrajectoryGroup, correct: int) -> TrajectoryGroup:
    """Returns the group with its first `correct` responses correct, and no others."""
    responses = [
        dataclasses.replace(response, correct=index < correct)
        for index, response in enumerate(group.responses)
    ]
    return dataclasses.replace(group, responses=responses)


def recorded(driver: Driver, step: int, kind: wire.Kind = "fresh") -> int:
    """Returns the number of groups of a step that the service has."""
    prompts = driver.client.step_prompts(step, kind)
    assert prompts.complete == (len(prompts.recorded) == len(prompts.prompts))
    return len(prompts.recorded)


def test_a_rewind_keeps_groups_of_the_weights_that_the_checkpoint_holds(
    drive: Callable[..., Driver],
) -> None:
    driver = drive()
    for step in range(1, 10):
        driver.run_step(step)
    driver.client.rewind(5)
    # The rollout policies are: 6 at the steps 6 and 7, 8 at the steps 8 and 9.
    assert [recorded(driver, step) for step in (6, 7, 8, 9)] == [8, 8, 0, 0]
    assert recorded(driver, 6, "reevaluation") > 0
    assert driver.client.begin_attempt().current_step == 0
    assert [recorded(driver, step) for step in (1, 2, 6, 7)] == [8, 0, 0, 0]


def publish(driver: Driver, version: int, letter: str = "a") -> None:
    driver.client.publish_weights(version, letter * 64)


def weight_statuses(driver: Driver) -> dict[int, str]:
    answer = driver.client._send("GET", f"/v1/runs/{driver.client.run}/weights").json()
    return {weights["version"]: weights["status"] for weights in answer}


def run_steps_with_weights(driver: Driver, steps: range) -> list[Any]:
    """Runs steps, publishing the weights before each as a trainer does; returns the batches."""
    compositions = []
    for step in steps:
        publish(driver, step)
        compositions.append(_composition(driver.run_step(step)))
    return compositions


def is_ready(driver: Driver, step: int, call: str) -> bool:
    """Asks for the prompts or the batch of a step without waiting."""
    path = f"/v1/runs/{driver.client.run}/steps/{step}/{call}"
    return bool(driver.client._send("POST", path, params={"wait": 0}).json()["ready"])


def test_groups_of_later_weights_count_again_once_the_same_weights_are_published(
    drive: Callable[..., Driver],
) -> None:
    """A trainer on the same machine trains the same weights again, bit for bit."""
    driver = drive()
    batches = run_steps_with_weights(driver, range(1, 10))
    evaluate(driver, 8)
    groups = driver.groups(9)
    before = snapshot(driver)
    driver.client.rewind(5)
    assert weight_statuses(driver) == dict.fromkeys(range(1, 7), "published") | dict.fromkeys(
        range(7, 10), "set_aside"
    )
    assert driver.client.evaluations() == []
    for step in (6, 7):
        publish(driver, step)
        assert _composition(driver.client.batch(step)) == batches[step - 1]
        driver.client.commit(step, {"loss": 0.5})
    assert not is_ready(driver, 8, "prompts")
    assert not is_ready(driver, 8, "batch"), "version 8 may become another one"
    publish(driver, 8)
    assert [evaluation.version for evaluation in driver.client.evaluations()] == [8]
    assert recorded(driver, 9) == 8
    for step in (8, 9):
        publish(driver, step)
        assert _composition(driver.client.batch(step)) == batches[step - 1]
        driver.client.commit(step, {"loss": 0.5})
    assert driver.client.post_groups(9, "fresh", encode_groups(groups)).accepted == 0
    assert snapshot(driver) == before, "nothing was generated again"


@pytest.mark.parametrize(("letter", "evaluated"), [("a", [8]), ("b", [])])
def test_an_evaluation_that_ends_while_its_weights_are_set_aside_counts_once_they_are_back(
    drive: Callable[..., Driver], letter: str, evaluated: list[int]
) -> None:
    driver = drive()
    run_steps_with_weights(driver, range(1, 10))
    groups = driver.groups(8, "evaluation")
    driver.client.post_groups(8, "evaluation", encode_groups(groups[:3]))
    driver.client.rewind(5)
    last = encode_groups(groups[3:])
    assert driver.client.post_groups(8, "evaluation", last, weights="a" * 64).complete
    assert driver.client.evaluations() == []
    run_steps_with_weights(driver, range(6, 8))
    publish(driver, 8, letter)
    assert [evaluation.version for evaluation in driver.client.evaluations()] == evaluated


def await_deletion(store: ObjectStore, prefix: str) -> None:
    """Waits until nothing is left below a prefix, which is deleted after the answer."""
    deadline = time.monotonic() + 60
    while store.keys(f"{prefix}/"):
        assert time.monotonic() < deadline, f"{prefix} is not deleted"
        time.sleep(0.05)


def test_no_attempt_writes_over_the_weights_of_another(
    drive: Callable[..., Driver], stack: Endpoints
) -> None:
    driver = drive()
    store = ObjectStore(stack.object_store)

    def upload(version: int, letter: str) -> tuple[str, wire.StoredVersion]:
        prefix = layout.weights(driver.client.run, version, driver.client.attempt)
        store.put(f"{prefix}/model", b"")
        return prefix, driver.client.publish_weights(version, letter * 64)

    first = {}
    for version in (1, 2, 3):
        first[version], stored = upload(version, "a")
        assert stored.uri == first[version]
        driver.run_step(version)
    assert driver.client.begin_attempt().current_step == 0
    # The same weights again: those that replicas may be fetching stay, and the others go.
    again, stored = upload(1, "a")
    assert again != stored.uri == first[1]
    await_deletion(store, again)
    assert len(store.keys(f"{first[1]}/")) == 1
    driver.run_step(1)
    # Other weights: those of the attempt before go, and so do the ones that were trained from them.
    other, stored = upload(2, "b")
    assert other == stored.uri != first[2]
    assert store.keys(f"{other}/") == [f"{other}/model"]
    await_deletion(store, first[2])
    await_deletion(store, first[3])


def test_groups_of_later_weights_are_deleted_when_other_weights_are_published(
    drive: Callable[..., Driver],
) -> None:
    driver = drive()
    run_steps_with_weights(driver, range(1, 10))
    evaluate(driver, 8)
    driver.client.rewind(5)
    run_steps_with_weights(driver, range(6, 8))
    publish(driver, 8, "b")
    assert weight_statuses(driver) == dict.fromkeys(range(1, 9), "published")
    assert [recorded(driver, step) for step in (8, 9)] == [0, 0]
    assert recorded(driver, 8, "evaluation") == 0
    assert driver.client.evaluations() == []
    with pytest.raises(ServiceError, match="published with other weights"):
        publish(driver, 8, "a")


@pytest.mark.parametrize(
    "sections",
    [{}, {"sampler": {"kind": "mopps", "candidates": 2}, "reevaluate": {"enabled": False}}],
    ids=["reevaluated", "sampled"],
)
def test_groups_that_follow_from_deleted_ones_are_deleted(
    drive: Callable[..., Driver], sections: dict[str, Any]
) -> None:
    """The groups of version 8 decide which prompts version 10 re-evaluates, or draws."""
    driver = drive(**sections)
    for step in range(1, 13):
        if step != 8:
            publish(driver, step)
        driver.run_step(step)
    driver.client.rewind(5)
    for step in (6, 7):
        publish(driver, step)
        driver.client.batch(step)
        driver.client.commit(step, {"loss": 0.5})
    publish(driver, 8)
    for step in (8, 9):
        groups = [with_correct(group, 0) for group in driver.groups(step)]
        driver.client.post_groups(step, "fresh", encode_groups(groups))
        driver.run_step(step)
    for step in range(10, 13):
        publish(driver, step)
        driver.run_step(step)


def test_groups_of_other_weights_than_the_published_ones_are_refused(
    drive: Callable[..., Driver],
) -> None:
    driver = drive()
    body = encode_groups(driver.groups(1))

    def send(letter: str) -> int:
        return driver.client.post_groups(1, "fresh", body, weights=letter * 64).accepted

    with pytest.raises(ServiceError, match="version 1 of the weights was trained again"):
        send("a")
    publish(driver, 1, "a")
    with pytest.raises(ServiceError, match="version 1 of the weights was trained again"):
        send("b")
    assert send("a") == 8


def test_a_new_attempt_starts_from_the_last_checkpoint(drive: Callable[..., Driver]) -> None:
    driver = drive()
    for step in range(1, 4):
        driver.run_step(step)
        if step == 1:
            driver.client.record_checkpoint(1, "a" * 64)
            before = snapshot(driver)
    assert driver.client.begin_attempt().current_step == 1
    assert snapshot(driver) == before


def test_the_best_checkpoints_are_kept_besides_the_latest(drive: Callable[..., Driver]) -> None:
    driver = drive(evaluation={"every": 2}, checkpoint={"every": 2, "keep": 1, "keep_best": 1})

    def kept() -> dict[int, float | None]:
        return {view.step: view.accuracy for view in driver.client.checkpoints()}

    for step in range(1, 9):
        driver.run_step(step)
        if step % 2:
            driver.client.record_checkpoint(step, "a" * 64)
        match step:
            case 3:
                assert kept() == {3: None, 1: None}, "the evaluation of version 2 is not complete"
                evaluate(driver, 2, correct=1)
                evaluate(driver, 4, correct=3)
            case 5:
                assert kept() == {5: None, 3: 0.75}
                evaluate(driver, 6, correct=2)
            case 7:
                assert kept() == {7: None, 3: 0.75}
    assert driver.client.begin_attempt().current_step == 7, "the latest checkpoint"


def test_no_group_is_replayed_in_the_step_that_made_it(drive: Callable[..., Driver]) -> None:
    driver = drive()
    replayed = 0
    for step in range(1, 13):
        for member in driver.run_step(step).members:
            if member.source == "replayed":
                replayed += 1
                assert step - 3 <= member.step <= step - 1
            else:
                assert member.step == step
    assert replayed > 0


def test_dynamic_sampling_continues_until_enough_groups_are_mixed(
    drive: Callable[..., Driver],
) -> None:
    driver = drive(
        algorithm="dapo",
        rollout={"prompts_per_step": 8, "group_size": 4, "max_generation_rounds": 3},
    )
    uids: list[str] = []
    for generation_round in range(3):
        prompts = driver.client.step_prompts(1, "fresh", generation_round)
        uids += [prompt.uid for prompt in prompts.prompts]
    assert len(set(uids)) == 24
    groups = {group.prompt_uid: group for group in driver.groups(1)}
    first = driver.client.post_groups(1, "fresh", encode_groups(list(groups.values())))
    mixed = sum(1 for group in groups.values() if 0 < group.correct < 4)
    assert mixed < 8
    assert not first.complete
    second = [
        dataclasses.replace(next(iter(groups.values())), prompt_uid=uid) for uid in uids[8:16]
    ]
    mixed_responses = [
        dataclasses.replace(response, correct=index % 2 == 1)
        for index, response in enumerate(second[0].responses)
    ]
    second = [dataclasses.replace(group, responses=mixed_responses) for group in second]
    assert driver.client.post_groups(1, "fresh", encode_groups(second)).complete
    manifest = driver.client.batch(1)
    assert len(manifest.members) == 8
    assert all(0 < member.correct < member.size for member in manifest.members)


def test_decoupled_runs_keep_the_log_probs_of_the_storage_step(
    drive: Callable[..., Driver],
) -> None:
    from services.buffer.api.trajectories import encode_proximal

    driver = drive(loss={"correction": "decoupled"})
    replayed = 0
    for step in range(1, 6):
        driver.roll_out(step)
        manifest = driver.client.batch(step)
        if manifest.record_proximal:
            scores = {m.group_id: [[-1.0]] * m.size for m in manifest.record_proximal}
            driver.client.post_proximal(step, encode_proximal(scores))
        driver.client.commit(step, {})
        for member in manifest.members:
            if member.source == "replayed":
                replayed += 1
                assert member.proximal_key is not None
    assert replayed > 0


def test_log_probs_of_groups_of_another_step_are_refused(drive: Callable[..., Driver]) -> None:
    from services.buffer.api.trajectories import encode_proximal

    driver = drive(loss={"correction": "decoupled"})
    driver.roll_out(1)
    member = driver.client.batch(1).record_proximal[0]
    body = encode_proximal({id_: [[-1.0]] * member.size for id_ in (member.group_id, 10**12)})
    with pytest.raises(ServiceError, match="no group 1000000000000 among those of step 1"):
        driver.client.post_proximal(1, body)
    unchanged = driver.client.batch(1).record_proximal[0]
    assert (unchanged.group_id, unchanged.proximal_key) == (member.group_id, None)


def test_difficulty_is_derived_from_the_groups(drive: Callable[..., Driver]) -> None:
    driver = drive()
    means: dict[str, list[float]] = {}
    for step in range(1, 7):
        for kind in ("fresh", "reevaluation"):
            if kind == "reevaluation" and step % 2:
                continue
            for group in driver.groups(step, kind):
                means.setdefault(group.prompt_uid, []).append(group.correct / 4)
        driver.run_step(step)
    prompts = list(driver.client.all_prompts())
    assert {prompt.uid for prompt in prompts} == set(means)
    for prompt in prompts:
        history = means[prompt.uid]
        assert prompt.attempts == len(history)
        assert (prompt.first_mean, prompt.last_mean) == (history[0], history[-1])
        assert prompt.best_mean == max(history)
        assert prompt.bin == round(history[-1] * 4)
    assert sum(driver.client.difficulty_bins().bins) == len(means)


def test_published_weights_cannot_change(drive: Callable[..., Driver]) -> None:
    driver = drive()
    stored = driver.client.publish_weights(1, "a" * 64)
    assert driver.client.publish_weights(1, "a" * 64) == stored
    with pytest.raises(ServiceError, match="published with other weights"):
        driver.client.publish_weights(1, "b" * 64)
    with pytest.raises(ServiceError, match="does not exist yet"):
        driver.client.publish_weights(5, "a" * 64)


def test_damaged_objects_are_detected(drive: Callable[..., Driver]) -> None:
    driver = drive()
    member = driver.run_step(1).members[0]
    store = ObjectStore(driver.stack.object_store)
    assert store.get(member.object_key, member.object_digest)
    store.put(member.object_key, b"something else")
    with pytest.raises(ObjectStoreError, match="damaged or replaced"):
        store.get(member.object_key, member.object_digest)


def test_the_object_store_refuses_wrong_credentials(stack: Endpoints) -> None:
    settings = stack.object_store.model_copy(update={"secret_key": SecretStr("wrong")})
    with pytest.raises(ObjectStoreError, match="accepts the credentials"):
        ObjectStore(settings, retries=0).put("key", b"data")


def test_a_run_exists_once(drive: Callable[..., Driver]) -> None:
    driver = drive()
    with pytest.raises(ServiceError, match="exists with another config"):
        Driver(driver.stack, driver.config.model_copy(update={"seed": 7}))


@pytest.mark.parametrize(
    ("headers", "statuses"),
    [
        ({}, {401}),
        ({"Authorization": "Basic x"}, {401}),
        # 429 after many wrong tokens from one address.
        ({"Authorization": "Bearer unknown"}, {401, 429}),
    ],
)
def test_every_route_but_health_requires_a_token(
    stack: Endpoints, headers: dict[str, str], statuses: set[int]
) -> None:
    # An address of its own, because other tests would get 429 after so many unknown tokens.
    transport = httpx.HTTPTransport(local_address="127.0.0.7")
    with httpx.Client(transport=transport, headers=headers) as client:
        response = client.get(f"{stack.buffer_url}/v1/runs")
        assert response.status_code in statuses
        assert response.headers["content-type"] == "application/problem+json"
        assert client.get(f"{stack.buffer_url}/health").status_code == 200
        assert client.post(f"{stack.verifier_url}/v1/verify").status_code in statuses
        schema = client.get(f"{stack.buffer_url}/openapi.json").json()
        for path, methods in schema["paths"].items():
            if path.startswith("/v1/"):
                for method in methods:
                    url = stack.buffer_url + path.format(
                        dataset="d",
                        digest="0" * 64,
                        name="n",
                        step=1,
                        version=1,
                        replica="r",
                        buffer="hard",
                        group_id=1,
                        token_id=1,
                    )
                    answer = client.request(method, url)
                    assert answer.status_code in statuses, (method, path)


def test_errors_name_the_resource_and_the_field(stack: Endpoints) -> None:
    client = BufferClient(stack.buffer_url, stack.token, run="unknown")
    with pytest.raises(ServiceError, match="there is no run 'unknown'") as caught:
        client.run_state()
    assert caught.value.status == 404
    headers = {"Authorization": f"Bearer {stack.token}"}
    response = httpx.post(f"{stack.buffer_url}/v1/runs", headers=headers, json={"name": "Bad Name"})
    assert response.status_code == 422
    assert "name" in response.json()["detail"]


def test_a_service_that_does_not_answer_is_one_clear_error() -> None:
    client = BufferClient("http://127.0.0.1:9", "token", run="r", give_up_s=0.1)
    with pytest.raises(
        ServiceUnavailable, match=r"127\.0\.0\.1:9 has not served the call .* see its log"
    ):
        client.run_state()


def _post(driver: Driver, path: str) -> httpx.Response:
    return httpx.post(
        f"{driver.stack.buffer_url}/v1/runs/{driver.config.name}/{path}",
        headers={
            "Authorization": f"Bearer {driver.stack.token}",
            "X-Bapo-Attempt": str(driver.client.attempt),
        },
    )


def _composition(manifest: Any) -> list[tuple[str, str, int, int]]:
    return [(m.source, m.prompt_uid, m.step, m.correct) for m in manifest.members]
