"""The data frames of the Python API are the answers of the REST API."""

from __future__ import annotations

from pathlib import Path

import pandas
import pytest

from bapo.run import Run
from services.buffer.api import wire
from services.common.errors import ServiceError
from services.exporters.curves import curves
from services.stack.stack import Endpoints
from tests.integration.support.driver import Driver, small_config


@pytest.fixture(scope="module")
def driver(stack: Endpoints) -> Driver:
    driver = Driver(stack, small_config("framed"))
    for step in range(1, 5):
        driver.run_step(step)
    return driver


@pytest.fixture
def run(driver: Driver, stack: Endpoints, tmp_path: Path) -> Run:
    return Run("framed", stack, tmp_path)


def test_metrics_have_a_row_for_each_step(run: Run, driver: Driver) -> None:
    frame = run.metrics()
    steps = driver.client.steps()
    assert list(frame.index) == [step.step for step in steps] == [1, 2, 3, 4]
    for step in steps:
        assert frame.loc[step.step, "reward"] == pytest.approx(step.mean_reward)
        assert set(curves(step)) <= set(frame.columns)


def test_a_fork_names_the_run_that_it_comes_from(
    run: Run, driver: Driver, stack: Endpoints, tmp_path: Path
) -> None:
    state = driver.client.fork_run(wire.ForkRequest(name="framed-fork", step=0))
    origin = wire.ForkOrigin(run="framed", step=0, checkpoint=0)
    assert Run(state.name, stack, tmp_path).forked_from == origin
    assert run.forked_from is None


def test_batches_have_their_sources(run: Run, driver: Driver) -> None:
    frame = run.batches()
    for batch in driver.client.batches():
        assert frame.loc[batch.step, "fresh"] == batch.counts["fresh"]
        assert frame.loc[batch.step, "c2"] == batch.c2


def test_a_prompt_leads_to_its_groups_responses_and_reasons(run: Run, driver: Driver) -> None:
    prompts = run.prompts(order="hardest")
    assert list(prompts.index) == [
        prompt.uid for prompt in driver.client.all_prompts(order="hardest")
    ]
    assert len(run.prompts(limit=2)) == 2
    uid = prompts.index[0]
    attempts = run.attempts(uid)
    assert len(attempts) == prompts.loc[uid, "attempts"]
    group = run.group(int(attempts.index[0]))
    assert len(group) == driver.config.rollout.group_size
    assert {"text", "reward", "correct"} <= set(group.columns)
    why = run.why(uid, int(attempts["step"].iloc[0]))
    assert list(why.index) == ["fresh", "reevaluated", "replayed"]
    assert why["reason"].str.len().min() > 0


def test_a_notebook_shows_status_plot_and_address(
    run: Run, driver: Driver, stack: Endpoints
) -> None:
    shown = run._repr_html_()
    assert f"step 4 of {driver.config.steps}" in shown
    assert f"{driver.client.url}/#/runs/framed" in shown
    assert "<svg" in shown
    assert "stack.json" in shown, "where the token is"
    assert stack.token not in shown, "notebooks are stored"


@pytest.mark.parametrize("reward", [None, "rewards.py:score"])
def test_the_plot_has_what_runs_of_the_task_are_compared_by(
    run: Run, driver: Driver, monkeypatch: pytest.MonkeyPatch, reward: str | None
) -> None:
    state = driver.client.run_state()
    task = state.config.task.model_copy(update={"reward": reward})
    config = state.config.model_copy(update={"task": task})
    changed = state.model_copy(update={"config": config})
    monkeypatch.setattr(Run, "state", property(lambda _: changed))
    evaluations = pandas.DataFrame({"accuracy": [0.0, 0.0], "reward": [0.1, 0.7]})
    monkeypatch.setattr(Run, "evaluations", lambda _: evaluations)
    (axes,) = run.plot().axes
    measure = "accuracy" if reward is None else "reward"
    (line,) = [line for line in axes.lines if line.get_label() == f"held-out {measure}"]
    assert list(line.get_ydata()) == list(evaluations[measure])


def test_a_run_that_is_not_there_says_so(stack: Endpoints, tmp_path: Path) -> None:
    missing = Run("no-such-run", stack, tmp_path)
    with pytest.raises(ServiceError, match="no-such-run"):
        _ = missing.status
    assert "no-such-run" in missing._repr_html_()
