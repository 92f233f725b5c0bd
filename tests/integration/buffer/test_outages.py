"""Processes of the stack are killed at any moment: no acknowledged write is lost or torn."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import httpx
import psycopg
import pytest

from services.buffer.api.trajectories import decode_groups
from services.common.errors import ServiceUnavailable
from services.common.objectstore import ObjectStore
from tests.integration.support.breakable import PROCESSES, Breakable, breakable_stack
from tests.integration.support.driver import Driver, small_config, snapshot


@pytest.fixture(scope="module")
def breakable() -> Iterator[Breakable]:
    with breakable_stack() as stack:
        yield stack


@pytest.mark.parametrize(("part", "field"), [("postgres", "database"), ("s3", "object_store")])
def test_an_outage_shows_and_calls_are_retried(breakable: Breakable, part: str, field: str) -> None:
    driver = Driver(breakable.endpoints, small_config(f"outage-{part}"))
    driver.run_step(1)
    breakable.kill(part)
    answer = httpx.get(f"{breakable.endpoints.buffer_url}/readyz", timeout=120)
    assert answer.status_code == 503
    assert answer.json()["ready"] is False
    assert answer.json()[field] != "ok"
    assert httpx.get(f"{breakable.endpoints.buffer_url}/health").status_code == 200
    step = threading.Thread(target=driver.run_step, args=(2,))
    step.start()
    breakable.revive(part)
    step.join(timeout=300)
    assert driver.client.run_state().current_step == 2
    check_objects(driver)


def test_the_buffer_service_starts_without_an_object_store(
    breakable: Breakable,
) -> None:
    """In a cluster it would restart again and again, and answer nothing meanwhile."""
    driver = Driver(breakable.endpoints, small_config("starts-without-s3"))
    breakable.kill("s3")
    breakable.kill("buffer")
    breakable.restart("buffer")
    deadline = time.monotonic() + 300
    while breakable.readiness() == 0:
        assert time.monotonic() < deadline, "it does not answer"
        time.sleep(0.05)
    assert breakable.readiness() == 503
    assert driver.client.run_state().current_step == 0
    breakable.revive("s3")
    driver.run_step(1)
    check_objects(driver)


FEWEST_STEPS = 10
"""Steps to run at least: on a slow machine few of them end while processes are being killed."""


def steps_under_fire(breakable: Breakable, name: str, *, kills: int, seed: int) -> None:
    """Trains while processes are killed, and compares the run with an undisturbed one."""
    rng = random.Random(seed)
    config = small_config(name, steps=100_000)
    driver = Driver(breakable.endpoints, config)
    enough = threading.Event()
    failures: list[BaseException] = []
    done = 0

    def work() -> None:
        nonlocal done
        try:
            while not enough.is_set() or done < FEWEST_STEPS:
                # A call may meet one outage after another for as long as its client repeats it.
                with suppress(ServiceUnavailable):
                    driver.run_step(done + 1)
                    done += 1
        except BaseException as error:
            failures.append(error)
            raise

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for _ in range(kills):
            # Random, so that a kill may meet any moment of a step.
            enough.wait(rng.uniform(0.02, 0.6))
            part = rng.choice(PROCESSES)
            breakable.kill(part)
            breakable.revive(part)
            assert not failures
    finally:
        enough.set()
        worker.join(timeout=300)
    assert not failures
    assert driver.client.run_state().current_step == done
    undisturbed = Driver(
        breakable.endpoints, config.model_copy(update={"name": f"{name}-undisturbed"})
    )
    for step in range(1, done + 1):
        undisturbed.run_step(step)
    assert snapshot(driver) == snapshot(undisturbed)
    check_objects(driver)


def check_objects(driver: Driver) -> None:
    """Checks that every row has its whole object, and that objects without a row are garbage."""
    store = ObjectStore(driver.stack.object_store)
    url = driver.stack.database_url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "select g.object_key, g.object_digest, g.row_start, g.row_count, g.correct, p.uid"
            " from rollout_group g join prompt p on p.id = g.prompt_id"
            " join run r on r.id = g.run_id where r.name = %s",
            [driver.config.name],
        ).fetchall()
    objects = {}
    for key, digest, start, count, correct, uid in rows:
        if key not in objects:
            groups = decode_groups(store.get(key, digest))
            starts = [sum(len(g.responses) for g in groups[:i]) for i in range(len(groups))]
            objects[key] = dict(zip(starts, groups, strict=True))
        group = objects[key][start]
        assert (group.prompt_uid, len(group.responses), group.correct) == (uid, count, correct)
    garbage = driver.client.collect_garbage()
    assert not [key for key in garbage.missing if key.startswith(f"runs/{driver.config.name}/")]
    prefix = f"runs/{driver.config.name}/trajectories/"
    stored = set(store.keys(prefix))
    assert {key for key in garbage.orphans if key.startswith(prefix)} == stored - objects.keys()


def test_killed_at_any_moment(breakable: Breakable) -> None:
    steps_under_fire(breakable, "under-fire", kills=8, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_two_hundred_times(breakable: Breakable) -> None:
    steps_under_fire(breakable, "under-long-fire", kills=200, seed=2)
