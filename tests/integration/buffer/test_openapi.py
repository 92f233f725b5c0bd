"""The API conforms to its OpenAPI document, for valid and for invalid requests."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from services.stack.stack import Endpoints
from tests.integration.support.driver import Driver, small_config

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
RUN = "fuzzed"


@schemathesis.serializer("application/vnd.apache.arrow.stream")
def raw_bytes(_: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode(errors="replace")


@pytest.fixture(scope="module")
def driver(stack: Endpoints) -> Driver:
    """A run with committed steps, so that queries return data."""
    driver = Driver(stack, small_config(RUN))
    for step in range(1, 5):
        driver.run_step(step)
    driver.roll_out(5)
    return driver


def fuzz(driver: Driver, *, examples: int) -> int:
    """Sends `examples` random requests to each operation; returns how many were sent in all."""
    document = f"{driver.stack.buffer_url}/openapi.json"
    sent = 0
    for result in schemathesis.openapi.from_url(document).get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=examples,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=any_case(operation), existing=st.booleans())
        def send(case: Any, existing: bool) -> None:
            nonlocal sent
            make_harmless(case, driver, existing=existing)
            case.call_and_validate(
                checks=CHECKS, headers={"Authorization": f"Bearer {driver.stack.token}"}
            )
            sent += 1

        send()
    return sent


def any_case(operation: Any) -> st.SearchStrategy[Any]:
    """Requests that conform to the document, and for operations with parameters also others."""
    valid = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    has_no_input = not (operation.path_parameters or operation.query or operation.body)
    if has_no_input:
        return valid
    return st.one_of(valid, operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))


def make_harmless(case: Any, driver: Driver, *, existing: bool) -> None:
    """Keeps a request from waiting and from revoking the test's own token.

    existing: makes it address the run, its attempt and its steps.
    """
    path, query = case.path_parameters or {}, case.query or {}
    if existing and "name" in path:
        path["name"] = RUN
    if existing and case.headers and "X-Bapo-Attempt" in case.headers:
        case.headers["X-Bapo-Attempt"] = str(driver.client.run_state().attempt)
    if existing and "step" in path:
        path["step"] = 1 + int(path["step"]) % 6 if str(path["step"]).isdigit() else 5
    if "wait" in query:
        query["wait"] = 0
    if case.method.upper() == "DELETE" and "token_id" in path:
        # The first token is the one that this test uses.
        with suppress(ValueError, OverflowError):
            path["token_id"] = int(float(path["token_id"])) + 1000


def test_the_api_conforms_to_its_document(driver: Driver) -> None:
    assert fuzz(driver, examples=10) > 300


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_api_conforms_to_its_document_at_length(driver: Driver) -> None:
    assert fuzz(driver, examples=260) > 10_000
