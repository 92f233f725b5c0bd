"""The configuration of a stored run is validated once for each loaded row."""

from __future__ import annotations

from bapo_core.config import RunConfig
from services.buffer.runs.runs import run_config
from services.buffer.storage.tables import Run


def test_a_row_is_validated_once() -> None:
    run = Run(name="a", config=RunConfig(seed=1).model_dump(mode="json"))
    assert run_config(run).seed == 1
    assert run_config(run) is run_config(run)


def test_a_row_that_is_read_again_is_validated_again() -> None:
    run = Run(name="a", config=RunConfig(seed=1).model_dump(mode="json"))
    assert run_config(run).seed == 1
    run.config = RunConfig(seed=2).model_dump(mode="json")
    assert run_config(run).seed == 2
