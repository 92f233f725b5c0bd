"""Runs `bapo run` with two rollout replicas that use the real vLLM."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from bapo_core.config import RunConfig
from services.buffer.api.client import BufferClient
from services.common.objectstore import ObjectStore
from services.rollout.vllm.worker import WEIGHTS_ROOT
from services.stack.stack import Endpoints
from tests.e2e.test_run import configuration

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


VLLM_ARGUMENTS = ["--enforce-eager", "--max-num-seqs", "64"]


def train(directory: Path, environment: dict[str, str], config: dict[str, Any]) -> None:
    """Runs `bapo run` to its end."""
    path = directory / f"{config['name']}.yaml"
    path.write_text(yaml.safe_dump(config))
    completed = subprocess.run(
        [sys.executable, "-m", "services.cli", "run", str(path)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr


def test_two_vllm_replicas_serve_a_whole_run(
    tmp_path: Path, environment: dict[str, str], stack: Endpoints, small_model: Path
) -> None:
    config = configuration("on-vllm", small_model) | {"steps": 6}
    config["rollout"] |= {
        # The journal is written as with long responses.
        "engine": {"kind": "vllm", "args": VLLM_ARGUMENTS, "journal_interval_s": 0.1},
        "replicas": 2,
    }
    train(tmp_path, environment, config)
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
    # The first batch is on-policy, so the trainer's log-probs equal those of the engine.
    assert steps[0].counts["fresh"]
    assert steps[0].metrics["mismatch/logprob_diff_max"] < 1e-4
    replicas = client.replicas()
    assert [replica.name for replica in replicas] == ["engine-0", "engine-1"]
    # One replica may finish the last evaluation before the other has loaded version 7.
    versions = {replica.loaded_version for replica in replicas}
    assert versions <= {6, 7}
    assert 7 in versions
    store = ObjectStore(stack.object_store)
    assert not store.keys("runs/on-vllm/journal/"), "nothing is unfinished any more"
    assert not vllm_processes(environment["BAPO_HOME"])


def test_new_weights_interrupt_the_rollouts_of_a_run(
    tmp_path: Path, environment: dict[str, str], stack: Endpoints, small_model: Path
) -> None:
    """Sampling up to 96 tokens takes longer than a training step, so the trainer is ahead."""
    config = configuration("interrupted", small_model) | {
        "algorithm": "areal_async",
        "steps": 8,
        "sync": {"lag": 1},
        "evaluation": {"every": 8},
    }
    del config["reevaluate"], config["replay"]
    config["rollout"] |= {
        "engine": {"kind": "vllm", "args": VLLM_ARGUMENTS, "journal_interval_s": 0.1},
        "max_response_tokens": 96,
    }
    train(tmp_path, environment, config)
    client = BufferClient(stack.buffer_url, stack.token, run="interrupted")
    interrupted = 0
    for step in range(1, 9):
        for member in client.recorded_batch(step).members:
            group = client.group(member.group_id)
            assert group.policy_version == max(1, step - 1)
            for response in group.responses:
                places = list(response.interruptions)
                versions = list(response.interruptions.values())
                assert places == sorted(places)
                assert all(0 <= place < len(response.token_ids) for place in places)
                assert versions == sorted(set(versions))
                assert all(group.policy_version < version <= step for version in versions)
                interrupted += bool(versions)
    assert interrupted, "no response has tokens of two versions"
    store = ObjectStore(stack.object_store)
    assert not store.keys("runs/interrupted/journal/"), "nothing is unfinished any more"


def vllm_processes(home: str) -> list[str]:
    """Returns the command lines of the running vLLMs that were started under this BAPO_HOME."""
    found = []
    for process in psutil.process_iter():
        # Zombies do not exist for psutil, and other users' processes are none of these.
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(WEIGHTS_ROOT, "").startswith(home):
                found.append(" ".join(process.cmdline()))
    return found
