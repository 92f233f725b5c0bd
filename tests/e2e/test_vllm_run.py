"""A whole run with two replicas of the real vLLM, through the real command."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from bapo_core.config import RunConfig
from services.buffer.api.client import BufferClient
from services.stack.stack import Endpoints
from tests.e2e.test_run import configuration

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_a_run_on_two_replicas(
    tmp_path: Path, environment: dict[str, str], stack: Endpoints, small_model: Path
) -> None:
    config = configuration("on-vllm", small_model) | {"steps": 6}
    config["rollout"] |= {
        "engine": "vllm",
        "replicas": 2,
        "vllm_args": ["--enforce-eager", "--max-num-seqs", "64"],
    }
    path = tmp_path / "on-vllm.yaml"
    path.write_text(yaml.safe_dump(config))
    before = {process.pid for process in psutil.process_iter()}
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "run", str(path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    client = BufferClient(stack.buffer_url, stack.token, run="on-vllm")
    steps = client.steps()
    assert [step.step for step in steps] == [1, 2, 3, 4, 5, 6]
    schedule = RunConfig.model_validate(config).schedule
    for step in steps:
        manifest = client.recorded_batch(step.step)
        assert all(
            member.policy_version == schedule.policy_version(member.step)
            for member in manifest.members
            if member.source != "reevaluated"
        )
    # Where the weights that generated are those that score, both mean the same by a log-prob.
    fresh = [step for step in steps if step.counts["fresh"] and schedule.syncs_at(step.step)]
    assert fresh
    for step in fresh:
        if not step.counts["replayed"]:
            assert step.metrics["mismatch/logprob_diff_max"] < 1e-4
    replicas = client.replicas()
    assert [replica.name for replica in replicas] == ["engine-0", "engine-1"]
    # The last evaluation may be over before both have loaded its version.
    versions = {replica.loaded_version for replica in replicas}
    assert versions <= {6, 7}
    assert 7 in versions
    assert not [name for name in new_processes(before) if "vllm" in name.lower()]


def new_processes(before: set[int]) -> list[str]:
    """Names and commands of living processes that were not there before."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):  # a zombie is one of these
            if process.pid not in before:
                found.append(" ".join([process.name(), *process.cmdline()]))
    return found
