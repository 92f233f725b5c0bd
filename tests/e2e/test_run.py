"""Tests whole runs of `bapo run`: their results, and that interrupted runs resume exactly.

The uninterrupted run is compared with an independent recomputation of its buffers and batches.
Runs that are killed or interrupted and then resumed are compared with the uninterrupted run.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import psycopg
import pytest
import torch
import yaml
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

from bapo_core.config import PRESETS
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.buffer.api.trajectories import decode_groups
from services.cli.main import main
from services.common.objectstore import ObjectStore
from services.stack.stack import Endpoints
from tests.conftest import CHANCE

G, B, STEPS = 4, 16, 9
TIMEOUT_S = 600.0
"""Limit for operations that take seconds on an idle machine: only failing tests wait so long."""
C1, C2_RANGE, C3_RANGE = 0.25, (0.25, 0.5), (0.5, 0.75)
LEARNING_RATE = 1e-4
"""Keeps the entropy of the policy at its initial value (2.5 nats per token, also after the last
step), so that the responses of a group differ, and with them the verdicts."""


def configuration(name: str, model: Path) -> dict[str, Any]:
    """Returns the config of a run whose batches contain groups of every source.

    Verdicts are pseudo-random (tests/plug_in/), so the numbers of mixed, hard and medium groups do
    not depend on the model or the processor. In a simulation of 300,000 such runs, every run had at
    least 5 re-evaluated and 13 replayed groups in its batches. With the schedule of
    `test_faults.py`, every run had at least one re-evaluated group between two syncs.
    """
    return {
        "name": name,
        "seed": 5,
        "steps": STEPS,
        "model": {"path": str(model)},
        "task": CHANCE,
        "rollout": {
            "prompts_per_step": B,
            "group_size": G,
            "max_prompt_tokens": 32,
            "max_response_tokens": 16,
        },
        "sync": {"every": 3, "reevaluate_every": 3},
        "reevaluate": {"c1": C1, "max_prompts": B},
        "replay": {"window": {"c2_range": list(C2_RANGE), "c3_range": list(C3_RANGE)}},
        "optimizer": {"learning_rate": LEARNING_RATE, "minibatch_prompts": 4, "warmup_steps": 2},
        "evaluation": {"every": 4},
        "checkpoint": {"every": 3},
    }


@dataclass
class Bapo:
    """Starts `bapo` commands in one directory, on the tests' stack."""

    directory: Path
    environment: dict[str, str]
    stack: Endpoints
    model: Path
    configure: Callable[[str, Path], dict[str, Any]] = configuration

    def start(self, name: str, *options: str) -> subprocess.Popen[str]:
        path = self.directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(self.configure(name, self.model)))
        return self.start_command("run", str(path), *options)

    def start_command(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "services.cli", *arguments],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, name: str, *options: str) -> str:
        """Trains a run to its end; returns what it prints, on one line."""
        return _end(self.start(name, *options))

    def run_command(self, *arguments: str) -> str:
        """Runs a command that trains to its end; returns what it prints, on one line."""
        return _end(self.start_command(*arguments))

    def inspect(self, *arguments: str, status: int = 0) -> str:
        """Returns the output of a read-only command that must exit with the given status.

        The command runs in this process, which has imported PyTorch already.
        """
        output, code = io.StringIO(), 0
        variables = self.environment | self.stack.environment()
        with (
            mock.patch.dict(os.environ, variables),
            contextlib.chdir(self.directory),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            try:
                main(arguments)
            except SystemExit as ended:
                code = ended.code
        assert code == status, output.getvalue()
        return output.getvalue()

    def client(self, name: str) -> BufferClient:
        return BufferClient(self.stack.buffer_url, self.stack.token, run=name)


def _end(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output + errors
    return " ".join(output.split())


@pytest.fixture(scope="module")
def bapo(
    tmp_path_factory: pytest.TempPathFactory,
    environment: dict[str, str],
    stack: Endpoints,
    small_model: Path,
) -> Bapo:
    return Bapo(tmp_path_factory.mktemp("runs"), environment, stack, small_model)


@pytest.fixture(scope="module")
def undisturbed(bapo: Bapo) -> str:
    bapo.run("undisturbed")
    return "undisturbed"


def test_the_summary_and_the_report_are_there(bapo: Bapo, undisturbed: str) -> None:
    directory = bapo.directory / "runs" / undisturbed
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["run"] == undisturbed
    assert summary["algorithm"] == "bapo"
    assert summary["seed"] == 5
    assert summary["steps"] == STEPS
    rolled_out = sum(step.rollouts for step in bapo.client(undisturbed).steps())
    assert summary["rollouts"] == rolled_out >= STEPS * B * G
    for stage in ("initial", "final"):
        evaluation = summary["evaluation"][stage]
        assert len(evaluation["bins"]) == G + 1
        assert sum(evaluation["bins"]) == evaluation["prompts"] == 12
        correct = sum(k * count for k, count in enumerate(evaluation["bins"]))
        assert evaluation["mean_accuracy"] == pytest.approx(correct / (12 * G))
    assert 0 <= summary["unlocked_fraction"] <= 1
    assert summary["seconds"]["update"] > 0
    assert summary["trainer_idle"]["windows"] >= 1
    assert 0 < summary["trainer_idle"]["waited_share"] < 1
    assert summary["tokens"]["trained"] > 0
    page = (directory / "report.html").read_text()
    assert page.count("<svg") == 14
    assert "http://" not in page.replace("http://www.w3.org", "").replace(
        "http://purl.org", ""
    ).replace("http://creativecommons.org", "")


def test_every_expected_evaluation_was_made(bapo: Bapo, undisturbed: str) -> None:
    versions = [evaluation.version for evaluation in bapo.client(undisturbed).evaluations()]
    assert versions == [1, 4, 8, STEPS + 1]


def test_rollouts_used_the_scheduled_weights(bapo: Bapo, undisturbed: str) -> None:
    with psycopg.connect(_url(bapo)) as connection:
        rows = connection.execute(
            "select step, kind, policy_version from rollout_group g join run r on r.id = g.run_id "
            "where r.name = %s",
            (undisturbed,),
        ).fetchall()
    versions = {1: 1, 2: 1, 3: 3, 4: 3, 5: 3, 6: 6, 7: 6, 8: 6, 9: 9}
    fresh = {(step, version) for step, kind, version in rows if kind == "fresh"}
    assert fresh == set(versions.items())
    assert all(step == version for step, kind, version in rows if kind != "fresh")


def test_batches_equal_an_independent_recomputation(bapo: Bapo, undisturbed: str) -> None:
    """Recomputes X1, X2, X3, B_bad and B_high in plain lists from the recorded rewards alone."""
    client = bapo.client(undisturbed)
    hard: list[tuple[int, str]] = []  # B_bad: (step, uid), oldest first
    high: list[tuple[int, str, float]] = []  # B_high: (step, uid, accuracy)
    counts = {"reevaluated": 0, "replayed": 0}
    for step in range(1, STEPS + 1):
        fresh, reevaluated = _means(bapo, undisturbed, step)
        r_tot = sum(fresh.values()) / len(fresh)
        c2, c3 = (r_tot * (upper - lower) + lower for lower, upper in (C2_RANGE, C3_RANGE))
        batch = client.recorded_batch(step)
        assert (batch.c2, batch.c3) == (pytest.approx(c2), pytest.approx(c3))
        x1 = [uid for uid, mean in fresh.items() if 0 < mean < 1]
        assert set(reevaluated) == ({uid for _, uid in hard} if step % 3 == 0 else set())
        x2 = [uid for uid, mean in reevaluated.items() if C1 < mean < 1 and uid not in x1]
        x2 = x2[: B - len(x1)]
        eligible = {
            (s, uid)
            for s, uid, mean in high
            if step - 3 <= s <= step - 1
            and c2 - 1e-9 <= mean <= c3 + 1e-9
            and uid not in x1
            and uid not in x2
        }
        uids = {source: _uids(batch, source) for source in ("fresh", "reevaluated", "replayed")}
        assert uids["fresh"] == x1
        assert sorted(uids["reevaluated"]) == sorted(x2)
        replayed = {(m.step, m.prompt_uid) for m in batch.members if m.source == "replayed"}
        assert replayed <= eligible
        assert len(replayed) == min(len(eligible), B - len(x1) - len(x2))
        for source in counts:
            counts[source] += len(uids[source])
        solved = {uid for uid, mean in reevaluated.items() if mean > C1}
        incoming = [uid for uid, mean in fresh.items() if mean <= C1]
        hard = [(s, uid) for s, uid in hard if uid not in solved and uid not in incoming]
        hard = [*hard, *((step, uid) for uid in incoming)][-B:]
        medium = {u: mean for u, mean in fresh.items() if c2 - 1e-9 <= mean <= c3 + 1e-9}
        high = [entry for entry in high if entry[0] >= step - 2 and entry[1] not in medium]
        high += [(step, uid, mean) for uid, mean in medium.items()]
        stored = client.buffer("hard", step)
        assert sorted((item.step, item.prompt_uid) for item in stored) == sorted(hard)
        stored = client.buffer("high_quality", step)
        assert sorted((i.step, i.prompt_uid) for i in stored) == sorted(h[:2] for h in high)
    assert min(counts.values()) > 0, f"the run is too short for groups of every source: {counts}"


def test_stored_objects_agree_with_the_manifests(bapo: Bapo, undisturbed: str) -> None:
    store = ObjectStore(bapo.stack.object_store)
    members_checked = 0
    for step in range(1, STEPS + 1):
        for member in bapo.client(undisturbed).recorded_batch(step).members:
            groups = decode_groups(store.get(member.object_key, member.object_digest))
            group = groups[member.row_start // member.size]
            assert group.prompt_uid == member.prompt_uid
            assert group.policy_version == member.policy_version
            assert (group.correct, len(group.responses)) == (member.correct, member.size)
            members_checked += 1
    assert members_checked > 0


def test_the_trainer_scores_as_the_engine_sampled(bapo: Bapo, undisturbed: str) -> None:
    """Compares the trainer's log-probs with the behaviour log-probs of an on-policy batch."""
    first = bapo.client(undisturbed).steps()[0]
    assert first.metrics["mismatch/logprob_diff_max"] < 1e-4
    assert first.metrics["staleness_max"] == 0


def test_checkpoints_are_listed_verified_and_exported(
    bapo: Bapo, undisturbed: str, tmp_path: Path
) -> None:
    def command(*arguments: str, status: int = 0) -> str:
        return bapo.inspect("checkpoints", undisturbed, *arguments, status=status)

    checkpoints = json.loads(command("--json"))
    assert [checkpoint["step"] for checkpoint in checkpoints] == [9, 8]
    assert "all as recorded" in command("--verify", "--step", "8")
    target = tmp_path / "exported"
    command("--export", str(target))
    # The weights after the last step are the last published version.
    published = bapo.client(undisturbed).weights(STEPS + 1)
    store = ObjectStore(bapo.stack.object_store)
    store.get_directory(published.uri, published.manifest_digest, tmp_path / "published")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (target / name).read_bytes() == (tmp_path / "published" / name).read_bytes(), name
    assert "is not empty" in command("--export", str(target), status=1)
    assert checkpoints[0]["accuracy"] is not None
    assert "the model of step 9 is in" in command("--export", str(tmp_path / "best"), "--best")
    assert "keeps no checkpoint of step 3" in command("--verify", "--step", "3", status=1)
    # --verify reports a damaged checkpoint.
    key = next(key for key in store.keys(f"{checkpoints[1]['uri']}/") if key.endswith(".distcp"))
    data = store._get(key)
    store.put(key, b"x" + data[1:])
    assert "do not have the digest" in command("--verify", "--step", "8", status=1)
    store.put(key, data)


def test_a_run_that_is_killed_twice_resumes_with_the_result_of_an_uninterrupted_run(
    bapo: Bapo, undisturbed: str
) -> None:
    client = bapo.client("killed")
    options: list[str] = []
    for step, victim in ((2, "collector"), (5, "trainer")):
        process = bapo.start("killed", *options)
        # The trainer of the first command may have committed step 5 before that command ended, and
        # the second command has started no process then.
        _wait_until(
            lambda step=step, process=process, victim=victim: (
                _committed(client) >= step and _find_child(process.pid, victim) is not None
            ),
            process,
        )
        if victim == "trainer":
            _assert_no_admin_token(bapo, process.pid)
        os.kill(_child(process.pid, victim), signal.SIGKILL)
        output, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 1, output
        assert errors.strip().startswith(f"error: {victim} was killed by SIGKILL")
        assert len(errors.strip().splitlines()) == 1
        assert _children(process.pid) == []
        assert client.run_state().status == "failed"
        options = ["--resume"]
    bapo.run("killed", "--resume")
    assert _outcome(bapo, "killed") == _outcome(bapo, undisturbed)


def _assert_no_admin_token(bapo: Bapo, pid: int) -> None:
    """Checks that no process that a command has started holds the administrator's token."""
    children = psutil.Process(pid).children(recursive=True)
    assert children
    for child in children:
        assert bapo.stack.token not in child.environ().values(), child.cmdline()


def test_the_processes_of_a_run_have_tokens_that_are_for_their_calls_on_it_alone(
    bapo: Bapo, undisturbed: str
) -> None:
    tokens = [token for token in bapo.client("").tokens() if token.run == undisturbed]
    assert sorted(token.scope for token in tokens) == ["collector", "replica", "trainer"]
    for token in tokens:
        assert token.last_used_at is not None, token.scope
        assert token.revoked_at is not None, "it ends with the command"


@pytest.mark.slow
@pytest.mark.parametrize("as_of", ["sync", "step"])
def test_a_killed_run_of_an_adaptive_sampler_draws_the_same_prompts_again(
    bapo: Bapo, as_of: str
) -> None:
    options = [
        "algorithm=mopps",
        "sync.every=2",
        "sampler.candidates=2",
        f"sampler.posterior_as_of={as_of}",
    ]
    expected, actual = _outcomes_with_and_without_a_kill(bapo, f"mopps-{as_of}", *options)
    assert actual == expected
    prompts = [uid for fresh, _ in expected["prompts"] for uid in fresh]
    assert len(set(prompts[: 3 * B])) < 3 * B, "an epoch of 48 prompts would have no prompt twice"


@pytest.mark.slow
def test_a_killed_run_that_replays_near_groups_replays_the_same_ones_again(bapo: Bapo) -> None:
    """The distances that its trainer measured decide, and some of them are too large."""
    options = ["replay={select: effective_sample_size, min_ess_fraction: 0.999}"]
    expected, actual = _outcomes_with_and_without_a_kill(bapo, "near", *options)
    assert actual == expected
    client = bapo.client("near-killed")
    reasons = [
        client.decision(STEPS, prompt.uid).considered[-1].reason for prompt in client.all_prompts()
    ]
    assert any("too far from the policy, with an effective share" in reason for reason in reasons)
    assert sum(batch.counts["replayed"] for batch in client.batches()) > 0


ALGORITHM_OPTIONS = {
    "dapo": ["rollout.max_generation_rounds=2"],
    "dots": ["sampler.candidates=2", "batch.fresh_fraction=0.5"],
    "exgrpo": ["sampler.revisit_above=0"],
    "mopps": ["sampler.candidates=2"],
    "remix_grpo": ["kl.reset_after=1", "replay.last_step=6"],
    "relift": ["demonstrations.supervise_every=4"],
    "repo": ["response_replay={candidates: 8, min_candidates: 4, count: 4}"],
}
"""Overrides by algorithm, with which 9 steps of 16 prompts, drawn from 48, exercise its method."""


def plain_configuration(name: str, model: Path) -> dict[str, Any]:
    """Returns the configuration without the sections that a preset sets."""
    sections = configuration(name, model)
    dropped = ("sync", "reevaluate", "replay")
    return {key: sections[key] for key in sections if key not in dropped}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", sorted(PRESETS))
def test_a_killed_run_of_every_algorithm_resumes_with_the_same_result(
    bapo: Bapo, algorithm: str
) -> None:
    plain = replace(bapo, configure=plain_configuration)
    options = [f"algorithm={algorithm}", *ALGORITHM_OPTIONS.get(algorithm, [])]
    name = algorithm.replace("_", "-")
    expected, actual = _outcomes_with_and_without_a_kill(plain, name, *options)
    assert actual == expected


def test_a_run_that_is_stopped_from_elsewhere_says_how_to_continue(bapo: Bapo) -> None:
    process = bapo.start("stopped")
    client = bapo.client("stopped")
    _wait_until(lambda: _committed(client) >= 1, process)
    step = client.stop(by="alice", reason="its cores are needed").current_step
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    command = f"bapo run {bapo.directory}/stopped.yaml name=stopped --resume"
    assert errors.splitlines()[-1] == (
        f"error: run 'stopped' was stopped after step {step} by alice: its cores are needed; "
        f"continue with `{command}`"
    )
    assert client.run_state().status == "stopped"
    _, errors = bapo.start("stopped").communicate(timeout=TIMEOUT_S)
    assert errors.startswith("error: run 'stopped' exists; continue it with --resume")


def test_an_interrupted_run_stops_cleanly_and_resumes_with_a_trace(
    bapo: Bapo, undisturbed: str, tmp_path: Path
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    process = bapo.start("interrupted", f"mlflow.tracking_uri={uri}")
    client = bapo.client("interrupted")
    _wait_until(lambda: _committed(client) >= 2, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + signal.SIGINT
    command = f"bapo run {bapo.directory}/interrupted.yaml name=interrupted --resume"
    assert errors.splitlines()[-1] == f"stopped; continue with `{command}`"
    assert _children(process.pid) == []
    assert client.run_state().status == "stopped"
    # Of the keys that were changed in the file since, only those of the trainer apply.
    moved = replace(bapo, model=Path("/does/not/exist"))
    said = moved.run("interrupted", "--resume", "--profile", "2")
    assert f"which has model.path={bapo.model} (not /does/not/exist)" in said
    assert "the checkpoint of step" in said or "no checkpoint was written yet" in said
    mlflow = MlflowClient(uri)
    (run,) = mlflow.search_runs([mlflow.get_experiment_by_name("bapo").experiment_id])
    assert run.info.status == "FINISHED"
    rewards = {p.step: p.value for p in mlflow.get_metric_history(run.info.run_id, "reward")}
    assert rewards == {step.step: step.r_tot for step in client.steps()}
    assert run.data.metrics["evaluation/accuracy"] == client.evaluations()[-1].mean_accuracy
    assert _outcome(bapo, "interrupted") == _outcome(bapo, undisturbed)
    bapo.inspect("profile", "interrupted", "--export", str(tmp_path / "traces"))
    (trace,) = (tmp_path / "traces").iterdir()
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [event["name"] for event in events]
    assert "aten::mm" in names
    assert names.count("commit") == 2, "the trace must show the phases of two steps by name"


def test_steps_that_are_trained_again_give_the_recorded_weights(
    bapo: Bapo, undisturbed: str
) -> None:
    def audit(*arguments: str, status: int = 0) -> str:
        return bapo.inspect("audit", undisturbed, *arguments, status=status)

    assert f"the digest chain of {STEPS} steps is whole" in audit("--chain")
    shown = audit("--steps", f"1:{STEPS}").splitlines()
    assert shown[-STEPS:] == [f"step {step}: the same weights" for step in range(1, STEPS + 1)]
    kept = [view.step for view in bapo.client(undisturbed).checkpoints()]
    assert 4 not in kept
    assert "there is no checkpoint of step 4 to start from; begin at one of 1" in audit(
        "--steps", "5:6", status=1
    )
    assert f"write FIRST:LAST, from 1 to {STEPS}" in audit("--steps", "8:2", status=1)
    with psycopg.connect(_url(bapo)) as connection:
        change = (
            "update step_record set digests = jsonb_set(digests, '{weights_after}', to_jsonb(%s::"
            "text)) from run where run.id = run_id and run.name = %s and step = 2 "
        )
        before = bapo.client(undisturbed).steps()[1].digests
        assert before is not None
        connection.execute(change, ("0" * 64, undisturbed))
        connection.commit()
        assert "the digest chain breaks at step 2" in audit("--chain", status=1)
        connection.execute(change, (before.weights_after, undisturbed))
        connection.commit()
    audit("--chain")


@pytest.mark.slow
def test_one_process_resumes_a_killed_run_of_two(bapo: Bapo, tmp_path: Path) -> None:
    """Compares the run with one of a single process, from which it differs only by rounding.

    Rounding must not change what is sampled, so version 1 samples all responses: without syncs and
    re-evaluations no verdict can differ.
    """
    options = [f"sync.every={STEPS + 1}", "reevaluate.enabled=false"]
    name = "two-processes"
    process = bapo.start(name, *options, "trainer.processes=2")
    client = bapo.client(name)
    _wait_until(lambda: _committed(client) >= 4, process)
    torchrun = psutil.Process(_child(process.pid, "trainer"))
    victim = torchrun.children()[-1]
    victim.kill()
    # torchrun stops the other process at once, which would otherwise wait for half an hour.
    output, errors = process.communicate(timeout=180)
    assert process.returncode == 1, output
    assert errors.startswith("error: trainer ")
    assert _children(process.pid) == []
    bapo.run(name, "--resume")
    bapo.run("one-process", *options)
    expected, actual = (_outcome(bapo, run) for run in ("one-process", name))
    store = ObjectStore(bapo.stack.object_store)
    weights = []
    for run in ("one-process", name):
        published = bapo.client(run).weights(STEPS + 1)
        store.get_directory(published.uri, published.manifest_digest, tmp_path / run)
        weights.append(load_file(tmp_path / run / "model.safetensors"))
    for tensor, weight in weights[0].items():
        # The tolerance is a hundredth of one update at this learning rate: where gradients are
        # nearly 0, rounding is a large part of them, and Adam divides by their magnitude.
        torch.testing.assert_close(weights[1][tensor], weight, atol=LEARNING_RATE / 100, rtol=0)
    for outcome in (expected, actual):
        del outcome["weights"], outcome["digests"]
        # The weights of later evaluations differ in the last bits.
        outcome["evaluations"] = outcome["evaluations"][:1]
    assert actual == expected


def test_the_name_of_an_existing_run_is_refused_with_the_remedy(
    bapo: Bapo, undisturbed: str
) -> None:
    process = bapo.start(undisturbed)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert errors.startswith(
        f"error: run '{undisturbed}' is finished; start another one with --new"
    )


# ---- helpers ------------------------------------------------------------------------------------


def _url(bapo: Bapo) -> str:
    return bapo.stack.database_url.replace("postgresql+psycopg", "postgresql")


def _means(bapo: Bapo, name: str, step: int) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the accuracies (fresh, re-evaluated) by uid, in the order of the prompts."""
    with psycopg.connect(_url(bapo)) as connection:
        rows = connection.execute(
            "select g.kind, p.uid, g.correct::float / g.size from rollout_group g "
            "join run r on r.id = g.run_id join prompt p on p.id = g.prompt_id "
            "where r.name = %s and g.step = %s order by g.position",
            (name, step),
        ).fetchall()
    fresh = {uid: mean for kind, uid, mean in rows if kind == "fresh"}
    return fresh, {uid: mean for kind, uid, mean in rows if kind == "reevaluation"}


def _uids(batch: wire.BatchManifest, source: str) -> list[str]:
    return [member.prompt_uid for member in batch.members if member.source == source]


def _outcome(bapo: Bapo, name: str, steps: int = STEPS) -> dict[str, Any]:
    """Returns what a resumed run must reproduce: rewards, batches, evaluations, final weights."""
    client = bapo.client(name)
    compositions = [
        [(m.source, m.prompt_uid, m.step, m.correct, m.policy_version) for m in batch.members]
        for batch in (client.recorded_batch(step) for step in range(1, steps + 1))
    ]
    return {
        "prompts": [_means(bapo, name, step) for step in range(1, steps + 1)],
        "compositions": compositions,
        "evaluations": client.evaluations(),
        "weights": client.weights(steps + 1).manifest_digest,
        "digests": [
            (step.digests.weights_before, step.digests.batch, step.digests.weights_after)
            for step in client.steps()
            if step.digests is not None
        ],
        "difficulty": list(client.all_prompts()),
        "hard": [(i.prompt_uid, i.inserted_step) for i in client.buffer("hard")],
    }


def _outcomes_with_and_without_a_kill(
    bapo: Bapo, name: str, *options: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the outcomes of an undisturbed run, and of one whose trainer is killed and resumes.

    The trainer is killed once four steps are committed.
    """
    undisturbed, killed = f"{name}-undisturbed", f"{name}-killed"
    bapo.run(undisturbed, *options)
    process = bapo.start(killed, *options)
    client = bapo.client(killed)
    _wait_until(lambda: _committed(client) >= 4, process)
    os.kill(_child(process.pid, "trainer"), signal.SIGKILL)
    process.communicate(timeout=TIMEOUT_S)
    bapo.run(killed, "--resume")
    return _outcome(bapo, undisturbed), _outcome(bapo, killed)


def _committed(client: BufferClient) -> int:
    states = {state.name: state.current_step for state in client.runs()}
    return states.get(client.run, 0)


def _wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None, "the run ended before the condition was met"
        assert time.monotonic() < deadline, f"the condition was not met within {TIMEOUT_S} s"
        time.sleep(0.02)


def _children(pid: int) -> list[int]:
    """Returns the pids of the running children of a process."""
    children = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                children.append(int(entry.name))
    return children


def _find_child(pid: int, name: str) -> int | None:
    """Returns the pid of the collector or the trainer that a process has started, if it runs."""
    modules = {"trainer": "services.trainer.", "collector": "services.rollout.collector"}
    for child in _children(pid):
        try:
            command = Path(f"/proc/{child}/cmdline").read_text()
        except OSError:  # it has ended since
            continue
        if modules[name] in command:
            return child
    return None


def _child(pid: int, name: str) -> int:
    child = _find_child(pid, name)
    assert child is not None, f"process {pid} has no child {name}"
    return child
