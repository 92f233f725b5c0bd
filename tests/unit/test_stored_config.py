"""A loaded run has its validated configuration and the session that loaded it."""

from __future__ import annotations

import pytest

from bapo_core.config import RunConfig
from services.buffer.storage.tables import Run


def test_a_row_is_validated_once() -> None:
    run = Run(name="a", config_json=RunConfig(seed=1).model_dump(mode="json"))
    assert run.config.seed == 1
    assert run.config is run.config


def test_a_run_whose_session_has_ended_asks_to_be_loaded_again() -> None:
    with pytest.raises(RuntimeError, match="session of run 'a' has ended; load the run again"):
        Run(name="a").session  # noqa: B018
