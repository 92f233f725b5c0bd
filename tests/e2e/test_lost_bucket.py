"""Deletes the bucket of the object store while a run trains."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from bapo_core.errors import BapoError
from pipelines import steps
from tests.e2e.test_continue import END, WAIT_S, Pipeline, pipeline

__all__ = ["pipeline"]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("pipeline", [1], indirect=True)
@pytest.mark.parametrize(
    "has_come_far",
    [
        # The trainer fails to read its next batch.
        lambda run: run.context.buffer.run_state().current_step > 3,
        # The collector fails to deliver its first groups, for which the trainer waits.
        lambda run: bool(run.context.buffer.replicas()),
    ],
    ids=["while it trains", "before its first rollouts"],
)
def test_a_bucket_that_is_gone_ends_the_step_with_its_name(
    pipeline: Pipeline, has_come_far: Callable[[Pipeline], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "BUCKET_CHECK_INTERVAL_S", 5.0)
    pipeline.last_step(8 * END)
    pipeline.prepare()
    errors = []

    def train() -> None:
        try:
            pipeline.train(8 * END)
        except BapoError as error:
            errors.append(str(error))

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    pipeline.wait_until(lambda: has_come_far(pipeline), "the run")
    store = pipeline.context.store
    bucket = store.settings.bucket
    store._client.remove_bucket(bucket_name=bucket)
    thread.join(WAIT_S)
    assert not thread.is_alive(), pipeline.lines
    (error,) = errors
    assert f"object store {store.settings.endpoint}: " in error
    assert f"there is no bucket {bucket}; check its name, or restore it from a backup" in error
