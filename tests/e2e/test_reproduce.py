"""An experiment of the user's own is trained, continued and judged by the real program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.buffer.api.client import BufferClient
from services.stack.stack import Endpoints

DECLARATION = """
title: Two filters
claim: GRPO's batches are fuller than BAPO's.
source: this test
variants:
  grpo: {{algorithm: grpo}}
  bapo: {{algorithm: bapo, sync: {{every: 1}}}}
small:
  setup: sorting
  minutes: 1
  seeds: [1, 2]
  overrides:
    steps: 2
    model: {{path: {model}}}
    task: {{train_prompts: 16, test_prompts: 8}}
    rollout: {{prompts_per_step: 8, group_size: 2}}
    optimizer: {{minibatch_prompts: 8}}
    evaluation: {{every: 1, samples: 2}}
paper: none
tests:
  - {{larger: grpo, than: [bapo], measure: metric, metric: groups in the batch}}
panels:
  - {{title: accuracy}}
  - {{title: groups, kind: steps, metric: groups in the batch}}
  - {{title: bins, kind: bins, variants: [grpo]}}
  - {{title: sources, kind: sources, variants: [bapo]}}
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_experiment_is_trained_continued_and_judged(
    tmp_path: Path, environment: dict[str, str], stack: Endpoints, small_model: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(DECLARATION.format(model=small_model))

    def reproduce(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "services.cli", "reproduce", "mine.yaml", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    results = ("--results", "results")
    first = reproduce("--seeds", "1", "--jobs", "2", *results)
    assert "0 of 2 runs have results" in first
    assert "mine: not decided (2 runs)" in first
    # Two commands shared the runs: neither trained both, and each has read the other's result.
    others = (Path(environment["BAPO_HOME"]) / "logs/job-2.log").read_text()
    assert "mine: not decided (2 runs)" in others
    for printed in (first, others):
        assert printed.count("finished already") == 1
    service = BufferClient(stack.buffer_url, stack.token)
    assert {state.attempt for state in service.runs() if state.name.startswith("repro")} == {1}
    # The second seed is missing; the first is not trained again.
    second = reproduce(*results)
    assert "2 of 4 runs have results" in second
    assert "run 1 of 2" in second
    files = sorted((tmp_path / "results").glob("*.json"))
    assert len(files) == 4
    record = json.loads(files[0].read_text())
    assert len(record["evaluations"]) == 3
    assert list(record["sets"]) == ["test"]
    assert record["steps"]["groups in the batch"] != []
    (listed,) = json.loads(reproduce("--list", "--json", *results))
    assert listed["done"] == 4
    assert listed["state"] in second
    assert (tmp_path / "runs/reproduce-mine/mine.html").read_text().count("<svg") == 4
