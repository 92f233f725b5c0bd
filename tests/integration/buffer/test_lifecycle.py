"""The life of a run from pause to deletion; garbage collection; tokens; limits and errors."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import httpx
import psycopg
import pytest
from sqlalchemy import create_engine

from services.buffer.api.client import BufferClient
from services.buffer.api.trajectories import encode_groups
from services.buffer.service import Service
from services.buffer.storage.garbage import collect_garbage
from services.common import layout
from services.common.errors import ServiceError, Superseded
from services.common.objectstore import ObjectStore, StoredObject
from services.model.stored import fetch_model, store_model
from services.rollout.run_watcher import REPLICA, RunWatcher
from services.stack.stack import Endpoints
from tests.integration.support.driver import Driver, create_run, small_config, stop_open_runs


@pytest.fixture
def driver(stack: Endpoints, request: pytest.FixtureRequest) -> Driver:
    return Driver(stack, small_config(request.node.name.replace("_", "-")[:60]))


# ---- pause, stop, delete ------------------------------------------------------------------------


def test_a_paused_run_continues_after_it_is_resumed(driver: Driver) -> None:
    driver.run_step(1)
    assert driver.client.pause().status == "paused"
    assert driver.client.pause().status == "paused"
    waiting = threading.Thread(target=driver.run_step, args=(2,))
    waiting.start()
    # Pausing again answers only after the waiting request could have been served.
    assert driver.client.pause().current_step == 1
    assert waiting.is_alive()
    assert driver.client.resume().status == "running"
    waiting.join(timeout=300)
    assert driver.client.run_state().current_step == 2


def test_a_paused_run_gives_no_prompts_and_no_batch(driver: Driver, stack: Endpoints) -> None:
    driver.roll_out(1)
    driver.client.pause()
    headers = {
        "Authorization": f"Bearer {stack.token}",
        "X-Bapo-Attempt": str(driver.client.attempt),
    }
    base = f"{stack.buffer_url}/v1/runs/{driver.config.name}/steps/1"
    prompts = httpx.post(f"{base}/prompts", headers=headers).json()
    assert (prompts["ready"], prompts["prompts"]) == (False, [])
    batch = httpx.post(f"{base}/batch", headers=headers).json()
    assert (batch["ready"], batch["members"]) == (False, [])
    assert "is paused" in batch["missing"]
    driver.client.resume()
    assert httpx.post(f"{base}/batch", headers=headers).json()["ready"]


def test_a_stopped_run_refuses_its_processes_until_a_new_attempt(driver: Driver) -> None:
    driver.run_step(1)
    assert driver.client.stop().status == "stopped"
    assert driver.client.stop().status == "stopped"
    with pytest.raises(
        Superseded, match="was stopped by token 'from the environment'; continue it with `bapo run"
    ):
        driver.client.step_prompts(2)
    with pytest.raises(ServiceError, match="is stopped, not paused"):
        driver.client.resume()
    with pytest.raises(ServiceError, match=r"is stopped by .*; continue it with `bapo run"):
        driver.client.begin_attempt()
    state = driver.client.begin_attempt(reopen=True)
    assert (state.status, state.current_step) == ("running", 0), "there was no checkpoint"
    driver.run_step(1)


def test_a_run_knows_who_stopped_it_and_why_until_it_goes_on(driver: Driver) -> None:
    assert driver.client.run_state().stopped is None
    driver.client.stop(by="alice", reason="its GPUs are needed")
    driver.client.stop(by="bob", reason="too late")
    stopped = driver.client.run_state().stopped
    assert stopped is not None
    assert stopped.describe() == "alice: its GPUs are needed"
    with pytest.raises(Superseded, match="was stopped by alice: its GPUs are needed; continue it"):
        driver.client.step_prompts(1)
    assert driver.client.begin_attempt(reopen=True).stopped is None
    driver.client.stop(by="alice")
    stop_open_runs(driver.stack.buffer_url, driver.stack.token)
    assert driver.client.take_turn(reopen=True).granted
    assert driver.client.run_state().stopped is None


def test_a_trainer_that_starts_again_ends_neither_a_pause_nor_a_stop(driver: Driver) -> None:
    driver.client.pause()
    before = driver.client.attempt
    state = driver.client.begin_attempt()
    assert (state.status, state.attempt) == ("paused", before + 1)
    assert driver.client.begin_attempt(reopen=True).status == "running"
    driver.client.set_status("failed")
    with pytest.raises(ServiceError, match="is failed; continue it with"):
        driver.client.begin_attempt()
    assert driver.client.run_state().status == "failed"


# ---- the queue ----------------------------------------------------------------------------------


@pytest.fixture
def waiting(stack: Endpoints, request: pytest.FixtureRequest) -> Iterator[list[BufferClient]]:
    """Creates three runs, none of which has begun, on a stack where no other run is active."""
    stop_open_runs(stack.buffer_url, stack.token)
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name)[:58].strip("-")
    clients = []
    for number in range(3):
        config = small_config(f"{name}-{number}")
        client = BufferClient(stack.buffer_url, stack.token, run=config.name)
        create_run(client, config)
        clients.append(client)
    yield clients
    for client in clients:
        client.stop()


def statuses(clients: list[BufferClient]) -> list[str]:
    return [client.run_state().status for client in clients]


def test_runs_take_their_turn_in_the_order_of_their_creation(waiting: list[BufferClient]) -> None:
    first, second, third = waiting
    assert second.take_turn().granted, "no other run is active or queued"
    turn = third.take_turn()
    assert (turn.granted, turn.in_front, turn.current_step, turn.steps) == (
        False,
        second.run,
        0,
        12,
    )
    assert first.take_turn().in_front == second.run
    assert statuses(waiting) == ["queued", "running", "queued"]
    assert second.take_turn().granted, "a turn is kept until the run ends"
    second.pause()
    assert first.take_turn().in_front == second.run, "a paused run keeps its place"
    second.stop()
    assert third.take_turn().in_front == first.run, "the older run waits, too"
    assert first.take_turn().granted
    first.begin_attempt()
    first.set_status("finished")
    assert third.take_turn().granted
    assert first.take_turn().granted, "a finished run needs no turn"
    assert statuses(waiting) == ["finished", "stopped", "running"]


def test_a_queued_run_that_stops_asking_loses_its_place(
    waiting: list[BufferClient], stack: Endpoints
) -> None:
    first, second, third = waiting
    assert second.take_turn().granted
    assert not first.take_turn().granted
    second.stop()
    assert not third.take_turn().granted
    url = stack.database_url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "update run set queued_at = now() - interval '61 s' where name = %s", (first.run,)
        )
    assert third.take_turn().granted


def test_two_runs_never_take_the_same_turn(waiting: list[BufferClient]) -> None:
    for _ in range(10):
        with ThreadPoolExecutor(len(waiting)) as pool:
            turns = list(pool.map(lambda client: client.take_turn(reopen=True), waiting))
        assert [turn.granted for turn in turns].count(True) == 1
        for client in waiting:
            client.stop()


def test_a_stopped_run_is_taken_up_only_if_asked(waiting: list[BufferClient]) -> None:
    run = waiting[0]
    run.take_turn(workflow="team/bapo-1")
    attempt = run.stop(by="alice").attempt
    with pytest.raises(
        ServiceError, match="is stopped by alice; continue it by starting its pipeline"
    ):
        run.take_turn()
    assert run.take_turn(reopen=True, workflow="team/bapo-2").granted
    state = run.run_state()
    assert (state.status, state.workflow) == ("running", "team/bapo-2")
    assert state.attempt == attempt + 1, (
        "replicas and collectors that have left an attempt wait for another one"
    )


@pytest.mark.timeout(60)
def test_a_run_watcher_takes_up_a_run_that_it_has_left_once_it_is_reopened(
    waiting: list[BufferClient], stack: Endpoints
) -> None:
    """It remembers the attempt that it has left, and waited for an hour with the pipeline."""
    run = waiting[0]
    run.take_turn()
    run.begin_attempt()
    done = (run.run, run.stop().attempt)
    buffer = BufferClient(stack.buffer_url, stack.token)
    watcher = RunWatcher(buffer, REPLICA, Mock())
    found: list[str] = []

    def wait() -> None:
        found.append(watcher._wait_for_run(done).name)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert run.take_turn(reopen=True).granted
    thread.join(30)
    assert found == [run.run]


def test_a_run_that_is_reopened_and_queued_begins_its_attempt_with_its_turn(
    waiting: list[BufferClient],
) -> None:
    first, second, _ = waiting
    second.begin_attempt()
    attempt = second.stop().attempt
    first.take_turn()
    assert second.take_turn(reopen=True).in_front == first.run
    assert second.run_state().attempt == attempt
    first.stop()
    assert second.take_turn().granted
    assert second.run_state().attempt == attempt + 1
    assert second.take_turn().granted
    assert second.run_state().attempt == attempt + 1, "repeating the call begins no other attempt"


@pytest.mark.parametrize("status", ["queued", "running", "paused"])
def test_the_run_of_a_workflow_is_refused_to_another_one(
    waiting: list[BufferClient], status: str
) -> None:
    first, second, _ = waiting
    if status == "queued":
        second.take_turn()
    first.take_turn(workflow="team/bapo-1")
    if status == "paused":
        first.pause()
    before = first.run_state()
    assert before.status == status
    message = f"is {status}, and workflow team/bapo-1 trains it; give bapo_run another name"
    for instead_of in (None, "team/bapo-3"):
        with pytest.raises(ServiceError, match=message):
            first.take_turn(reopen=True, workflow="team/bapo-2", instead_of=instead_of)
    with pytest.raises(ServiceError, match=r"team/bapo-1 trains run .*, not team/bapo-2, so that"):
        first.stop(workflow="team/bapo-2")
    assert first.run_state() == before
    granted = first.take_turn(workflow="team/bapo-2", instead_of="team/bapo-1").granted
    assert granted == (status != "queued")
    assert first.run_state().workflow == "team/bapo-2"
    assert first.stop(workflow="team/bapo-2").status == "stopped"


def test_a_run_that_has_ended_may_be_continued_by_another_workflow(
    waiting: list[BufferClient],
) -> None:
    run = waiting[0]
    run.take_turn(workflow="team/bapo-1")
    run.stop(workflow="team/bapo-1")
    assert run.take_turn(reopen=True, workflow="team/bapo-2").granted
    run.begin_attempt()
    run.set_status("finished")
    assert run.take_turn(workflow="team/bapo-3").granted
    assert run.run_state().workflow == "team/bapo-2", "nothing is left to train"


def test_a_queued_run_can_be_stopped_and_deleted(waiting: list[BufferClient]) -> None:
    first, second, _ = waiting
    first.take_turn()
    second.take_turn()
    assert second.stop().status == "stopped"
    first.stop()
    second.delete_run()
    with pytest.raises(ServiceError, match="lists them"):
        second.run_state()
    create_run(second, small_config(second.run))


def test_deleting_a_run_deletes_its_rows_and_objects(driver: Driver, stack: Endpoints) -> None:
    store = ObjectStore(stack.object_store)
    name = driver.config.name
    for step in (1, 2):
        driver.run_step(step)
    assert store.keys(f"runs/{name}/")
    with pytest.raises(ServiceError, match="is running; stop it before deleting it") as caught:
        driver.client.delete_run()
    assert caught.value.status == 409
    assert driver.client.run_state().current_step == 2
    driver.client.stop()
    driver.client.delete_run()
    assert store.keys(f"runs/{name}/") == []
    with pytest.raises(ServiceError, match="there is no run"):
        driver.client.run_state()
    recreated = Driver(stack, driver.config)
    assert recreated.client.run_state().current_step == 0
    recreated.run_step(1)


def test_a_dataset_in_use_does_not_change(driver: Driver, stack: Endpoints) -> None:
    dataset = driver.client.run_state().train_dataset
    extra = {"uid": "another", "task": "countdown", "payload": {}}
    for position, detail in [
        (0, "has another prompt at one of the positions 0..0"),
        (24, "is used"),
    ]:
        upload = {"first_position": position, "prompts": [extra]}
        answer = send(stack, "POST", f"/v1/datasets/{dataset}", json=upload)
        assert (answer.status_code, detail in answer.json()["detail"]) == (409, True), answer.text
    assert send(stack, "GET", f"/v1/datasets/{dataset}").json()["prompts"] == 24


# ---- garbage ------------------------------------------------------------------------------------


def test_garbage_is_every_object_without_a_row(driver: Driver, stack: Endpoints) -> None:
    store = ObjectStore(stack.object_store)
    driver.run_step(1)
    orphan = f"runs/{driver.config.name}/trajectories/step=1/fresh-0000.arrow"
    store.put(orphan, b"an object without a row")
    failure = f"runs/{driver.config.name}/failures/step-1-rank-0.pt"
    store.put(failure, b"inputs of a non-finite loss")
    journal = f"{layout.journal(driver.config.name, 2, 'fresh', 0)}/request/1/0.arrow"
    store.put(journal, b"unfinished responses")
    late = f"{layout.journal('a-deleted-run', 2, 'fresh', 0)}/request/1/0.arrow"
    store.put(late, b"written by a collector that had not noticed the end of its run yet")
    garbage = driver.client.collect_garbage()
    assert {orphan, late} <= set(garbage.orphans)
    assert {failure, journal}.isdisjoint(garbage.orphans)
    store.delete([late])
    assert not [key for key in garbage.missing if key.startswith(f"runs/{driver.config.name}/")]
    assert garbage.deleted == 0
    referenced = {member.object_key for member in driver.client.recorded_batch(1).members}
    assert referenced
    assert referenced.isdisjoint(garbage.orphans)
    deleted = driver.client.collect_garbage(dry_run=False)
    assert orphan not in deleted.orphans, "a young object may still get its row"
    assert orphan in store.keys(f"runs/{driver.config.name}/")


def test_initial_models_are_kept_as_long_as_a_run_names_them(
    stack: Endpoints, tmp_path: Path
) -> None:
    store = ObjectStore(stack.object_store)
    (tmp_path / "config.json").write_text('{"of": "this test"}')
    path = store_model(store, tmp_path)
    key = f"{path.removeprefix('store://').partition('#')[0]}/config.json"
    assert key in Driver(stack, small_config("without")).client.collect_garbage().orphans
    driver = Driver(stack, small_config("with-a-stored-model", model={"path": path}))
    assert key not in driver.client.collect_garbage().orphans
    driver.client.stop()
    driver.client.delete_run()
    assert key in Driver(stack, small_config("without")).client.collect_garbage().orphans
    assert fetch_model(path, store, tmp_path / "again").joinpath("config.json").is_file()


def test_what_is_delivered_during_the_listing_is_not_missing(
    driver: Driver, stack: Endpoints
) -> None:
    class Listing(ObjectStore):
        def listing(self, prefix: str) -> list[StoredObject]:
            listed = super().listing(prefix)
            if prefix == "runs/":
                driver.run_step(1)
            return listed

    engine = create_engine(stack.database_url)
    garbage = collect_garbage(Service(engine, Listing(stack.object_store)), dry_run=True)
    engine.dispose()
    mine = f"runs/{driver.config.name}/"
    assert driver.client.recorded_batch(1).members
    assert not [key for key in garbage.missing + garbage.orphans if key.startswith(mine)]


def test_a_lost_object_is_reported(driver: Driver, stack: Endpoints) -> None:
    driver.run_step(1)
    key = driver.client.recorded_batch(1).members[0].object_key
    ObjectStore(stack.object_store).delete([key])
    assert key in driver.client.collect_garbage().missing
    driver.client.stop()
    driver.client.delete_run()


# ---- tokens -------------------------------------------------------------------------------------


def test_tokens_are_made_used_and_revoked(driver: Driver, stack: Endpoints) -> None:
    made = driver.client.create_token("a reader", "read")
    assert made.token.startswith("bapo_")
    reader = BufferClient(stack.buffer_url, made.token, run=driver.config.name)
    assert reader.run_state().name == driver.config.name
    with pytest.raises(ServiceError, match="needs scope 'run', the token has 'read'") as caught:
        reader.pause()
    assert caught.value.status == 403
    with pytest.raises(ServiceError, match="needs scope 'admin'"):
        reader.tokens()
    with pytest.raises(ServiceError, match="names the service's own token"):
        driver.client.create_token("from the environment", "read")
    listed = {token.id: token for token in driver.client.tokens()}
    assert listed[made.id].name == "a reader"
    assert listed[made.id].last_used_at is not None
    assert made.token not in listed[made.id].model_dump_json()
    assert driver.client.revoke_token(made.id).revoked_at is not None
    with pytest.raises(ServiceError, match="not known here, was revoked, or has expired") as caught:
        reader.run_state()
    assert caught.value.status == 401


def test_too_many_bad_tokens_are_slowed_down_and_good_ones_are_not(
    driver: Driver, stack: Endpoints
) -> None:
    url = f"{stack.buffer_url}/v1/runs"
    # An address of its own, because the other tests use unknown tokens too.
    transport = httpx.HTTPTransport(local_address="127.0.0.4")
    with httpx.Client(transport=transport) as client:
        answers = [
            client.get(url, headers={"Authorization": f"Bearer guess-{n}"}) for n in range(40)
        ]
    assert {answer.status_code for answer in answers} == {401, 429}
    assert answers[-1].status_code == 429
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 61
    assert driver.client.runs()


def test_runs_are_listed_newest_first_page_by_page(stack: Endpoints) -> None:
    names = [f"paged-{n}" for n in range(3)]
    for name in names:
        Driver(stack, small_config(name))
    pages, cursor = [], ""
    while cursor is not None:
        page = send(stack, "GET", f"/v1/runs?search=paged-&limit=2{cursor}").json()
        pages.append([run["name"] for run in page["items"]])
        cursor = None if page["next"] is None else f"&cursor={page['next']}"
    assert pages == [["paged-2", "paged-1"], ["paged-0"]]


# ---- limits and errors --------------------------------------------------------------------------


def send(stack: Endpoints, method: str, path: str, **arguments: object) -> httpx.Response:
    headers = {"Authorization": f"Bearer {stack.token}", "X-Bapo-Attempt": "1"}
    answer = httpx.request(
        method, f"{stack.buffer_url}{path}", headers=headers, timeout=300, **arguments
    )
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json().keys() == {"type", "title", "status", "detail"}
        assert answer.json()["status"] == answer.status_code
    return answer


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "detail"),
    [
        ("GET", "/v1/nothing", None, 404, "there is no route /v1/nothing"),
        ("PUT", "/v1/runs", None, 405, ""),
        (
            "GET",
            "/v1/runs/UPPER",
            None,
            422,
            "path.name is 'UPPER': a name has lower-case letters, digits and hyphens, begins with "
            "a letter, and has at most 63 characters",
        ),
        ("GET", "/v1/runs?limit=0", None, 422, "query.limit"),
        ("GET", "/v1/runs?status=dancing", None, 422, "query.status"),
        ("POST", "/v1/runs", {"name": "x"}, 422, "body.config: Field required"),
        ("POST", "/v1/datasets/a%20b", {"first_position": 0, "prompts": []}, 422, "path.dataset"),
        ("POST", "/v1/tokens", {"name": "x", "scope": "god"}, 422, "body.scope"),
        ("GET", f"/v1/runs/x/steps/{2**70}/decision?uid=a", None, 422, "path.step"),
        (
            "POST",
            "/v1/datasets/nul",
            {"first_position": 0, "prompts": [{"uid": "a\0", "task": "t", "payload": {}}]},
            422,
            "body.prompts.0.uid",
        ),
        (
            "POST",
            "/v1/datasets/nul",
            {"first_position": 0, "prompts": [{"uid": "a", "task": "t", "payload": {"a": "\0"}}]},
            422,
            "cannot hold it",
        ),
    ],
)
def test_bad_requests_name_the_field(
    stack: Endpoints, method: str, path: str, body: object, status: int, detail: str
) -> None:
    answer = send(stack, method, path, json=body)
    assert answer.status_code == status, answer.text
    assert detail in answer.json()["detail"]


def test_a_body_that_is_too_large_is_not_read(stack: Endpoints) -> None:
    answer = send(stack, "POST", "/v1/tokens", content=b" " * (2 << 20))
    assert answer.status_code == 413
    assert "larger than 1048576 bytes" in answer.json()["detail"]

    def endless() -> object:
        for _ in range(20):
            yield b" " * (1 << 20)

    streamed = send(stack, "POST", "/v1/tokens", content=endless())
    assert streamed.status_code == 413


def test_refused_groups_leave_no_trace(driver: Driver, stack: Endpoints) -> None:
    name = driver.config.name
    path = f"/v1/runs/{name}/steps/1/groups"
    good = encode_groups(driver.groups(1))
    groups = driver.groups(1)
    short = [dataclasses.replace(groups[0], responses=groups[0].responses[:-1])]
    stale = [dataclasses.replace(groups[0], policy_version=7)]
    for body, detail in [
        (b"", "not an Arrow IPC stream"),
        (good[: len(good) // 2], "the body is refused"),
        (b"\0" * 100, "not an Arrow IPC stream"),
        (encode_groups(short), "has 3 responses, not 4"),
        (encode_groups(stale), "made by policy version 7"),
        (encode_groups([groups[0], groups[0]]), "more than one group"),
    ]:
        answer = send(stack, "POST", path, content=body)
        assert answer.status_code == 400, answer.text
        assert detail in answer.json()["detail"]
    answer = send(stack, "POST", f"/v1/runs/{name}/steps/13/groups", content=good)
    assert (answer.status_code, "not in 1..12" in answer.text) == (400, True)
    assert not ObjectStore(stack.object_store).keys(f"runs/{name}/")
    assert driver.client.post_groups(1, "fresh", good).accepted == 8


def test_readyz_of_a_healthy_service(stack: Endpoints) -> None:
    answer = httpx.get(f"{stack.buffer_url}/readyz")
    assert answer.status_code == 200
    assert answer.json() == {"ready": True, "database": "ok", "object_store": "ok"}
