"""What the model wrote is listed with its verdicts, and searched, in bounded pages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import create_engine

from services.buffer.api import wire
from services.buffer.api.trajectories import TrajectoryGroup, encode_groups
from services.buffer.queries import responses
from services.buffer.service import Service
from services.common.errors import ServiceError
from services.common.objectstore import ObjectStore
from services.stack.stack import Endpoints
from tests.integration.support.driver import Driver, small_config, synthetic_group

SETS: dict[str, Any] = {
    "cd-34": {"prompts": 5, "samples": 4},
    "cd-4": {"options": {"template": "short", "numbers": [4]}, "prompts": 3, "samples": 2},
}


def named(group: TrajectoryGroup, label: str) -> TrajectoryGroup:
    """Returns the group with a text that tells each response from all others."""
    texts = [f"{label} {group.prompt_uid} #{index}" for index in range(len(group.responses))]
    return replace(
        group,
        responses=[
            replace(response, text=text)
            for response, text in zip(group.responses, texts, strict=True)
        ],
    )


@pytest.fixture(scope="module")
def driver(stack: Endpoints) -> Driver:
    """A run of two steps and a base evaluation, each group of a step in a delivery of its own."""
    config = small_config(
        "written",
        evaluation={"every": 6, "sets": SETS},
        sync={"every": 2, "reevaluate_every": 4},
    )
    driver = Driver(stack, config)
    for name, settings in config.evaluation_sets.items():
        prompts = driver.client.step_prompts(1, "evaluation", evaluation_set=name).prompts
        rng = random.Random(name)
        groups = [
            named(synthetic_group(item.uid, 1, size=settings.samples, rng=rng), f"Base {name}")
            for item in prompts
        ]
        driver.client.post_groups(1, "evaluation", encode_groups(groups), evaluation_set=name)
    for step in (1, 2):
        for group in driver.groups(step):
            driver.client.post_groups(step, "fresh", encode_groups([named(group, f"S{step}")]))
        driver.client.batch(step)
        driver.client.commit(step, {})
    return driver


def texts(driver: Driver, **filters: Any) -> list[str]:
    return [response.text for response in driver.client.responses(**filters)]


def test_the_newest_step_is_listed_by_default(driver: Driver) -> None:
    listed = list(driver.client.responses())
    assert len({response.text for response in listed}) == 8 * 4
    assert {(response.kind, response.step) for response in listed} == {("fresh", 2)}
    for response in listed:
        group = driver.client.group(response.group_id)
        assert (group.prompt_uid, group.payload) == (response.prompt_uid, response.payload)
        view = group.responses[response.index].model_dump()
        assert response.tokens == len(view["token_ids"])
        shared = set(wire.Response.model_fields)
        assert response.model_dump(include=shared) == {name: view[name] for name in shared}


def test_responses_of_an_evaluation_set_are_listed(driver: Driver) -> None:
    listed = list(driver.client.responses(evaluation_set="cd-4"))
    assert len(listed) == 3 * 2
    assert all(response.text.startswith("Base cd-4 ") for response in listed)
    wrong = list(driver.client.responses(evaluation_set="cd-34", correct=False))
    right = list(driver.client.responses(evaluation_set="cd-34", correct=True))
    assert len(wrong) + len(right) == 5 * 4
    assert {response.status for response in wrong} == {"wrong_value"}
    assert {response.correct for response in right} == {True}


def test_a_range_of_steps_is_searched_for_text_in_any_case(driver: Driver) -> None:
    assert len(texts(driver, first=1)) == 2 * 8 * 4
    assert all(text.startswith("S1 ") for text in texts(driver, first=1, last=1))
    assert len(texts(driver, first=1, contains="s1 ")) == 8 * 4
    assert len(texts(driver, first=1, contains="#3")) == 2 * 8
    # Characters that are special in patterns stand for themselves.
    assert texts(driver, first=1, contains=".*") == []
    assert texts(driver, contains="S1 ") == [], "step 2 alone is searched unless a range is given"


@pytest.fixture
def service(driver: Driver) -> Iterator[Service]:
    engine = create_engine(driver.stack.database_url)
    yield Service(engine, ObjectStore(driver.stack.object_store))
    engine.dispose()


@pytest.mark.parametrize("limit", [1, 3, 200])
@pytest.mark.parametrize("most_groups", [1, 5, 256])
@pytest.mark.parametrize(
    "filter_",
    [
        responses.Filter(first=1),
        responses.Filter(first=1, contains="#2"),
        responses.Filter(first=1, correct=False),
        responses.Filter(),
    ],
)
def test_pages_hold_every_response_once(
    driver: Driver,
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    most_groups: int,
    filter_: responses.Filter,
) -> None:
    monkeypatch.setattr(responses, "MOST_GROUPS", most_groups)
    listed: list[wire.ListedResponse] = []
    cursor = None
    while True:
        page = responses.list_responses(service, driver.config.name, filter_, cursor, limit)
        assert len(page.items) <= limit
        listed += page.items
        if (cursor := page.next) is None:
            break
    whole = texts(driver, first=filter_.first, contains=filter_.contains, correct=filter_.correct)
    assert [response.text for response in listed] == whole
    assert len(set(whole)) == len(whole) > 0


@pytest.mark.parametrize(
    ("filters", "status", "message"),
    [
        ({"evaluation_set": "other"}, 404, "whose sets are cd-34, cd-4"),
        ({"first": 2, "last": 1}, 400, "first: 2 is after last: 1"),
    ],
)
def test_a_list_that_cannot_be_is_refused(
    driver: Driver, filters: dict[str, Any], status: int, message: str
) -> None:
    with pytest.raises(ServiceError, match=message) as refused:
        texts(driver, **filters)
    assert refused.value.status == status
