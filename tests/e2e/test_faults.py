"""Tests that killed, stalled and damaged components do not change the result of a run.

Processes that fail are restarted with the same arguments, as an operator in a cluster would do. The
rollout engine is deterministic, so results must be bitwise identical.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from bapo_core.config import RunConfig, config_from
from services.buffer.api.client import BufferClient
from services.common.errors import ServiceCallError, ServiceUnavailable
from services.common.objectstore import ObjectStore, ObjectStoreError
from tests.e2e.test_run import Bapo, _outcome, configuration
from tests.integration.support.breakable import Breakable, breakable_stack
from tests.integration.support.driver import create_run

STEPS = 9
REPLICAS = ("engine-0", "engine-1")
SERVICES = ("buffer", "postgres", "s3")
LONGEST_CLOCK_JUMP_S = 600
"""Stays below 15 minutes: S3 refuses requests of clients whose clocks are off by more."""


@pytest.fixture(scope="module")
def breakable() -> Iterator[Breakable]:
    with breakable_stack() as stack:
        yield stack


class Cluster:
    """Runs the processes of one run on the breakable stack and restarts those that fail."""

    def __init__(
        self, breakable: Breakable, name: str, model: Path, scratch: Path, **rollout: Any
    ) -> None:
        """Creates the run and starts its processes. `rollout` overrides keys of that section."""
        self.breakable, self.name = breakable, name
        endpoints = breakable.endpoints
        # Step 3 re-evaluates between two syncs: the replicas load its weights, then those of the
        # last sync again.
        sync = {"every": 2, "reevaluate_every": 3}
        values = configuration(name, model) | {"steps": STEPS, "sync": sync}
        self.config = config_from(values | {"rollout": values["rollout"] | rollout})
        self.client = BufferClient(endpoints.buffer_url, endpoints.token, run=name)
        self.store = ObjectStore(endpoints.object_store)
        create_run(self.client, self.config)
        environment = {
            **endpoints.environment(),
            "BAPO_RUN": name,
            "BAPO_MODEL": str(model),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            **self._fake_clock(scratch / f"{name}.clock"),
        }
        for replica, port in zip(REPLICAS, breakable.reserve_ports(len(REPLICAS)), strict=True):
            variables = {"BAPO_REPLICA": replica, "BAPO_PORT": str(port)}
            variables["BAPO_SCRATCH"] = str(scratch / name / replica)
            breakable.start_python(replica, "services.rollout.server", {**environment, **variables})
        for process, module in (
            ("trainer", "services.trainer.loop"),
            ("collector", "services.rollout.collector"),
        ):
            variables = {"BAPO_SCRATCH": str(scratch / name / process)}
            breakable.start_python(process, module, {**environment, **variables})

    def _fake_clock(self, offset: Path) -> dict[str, str]:
        """Returns variables that shift a process's clock by the seconds in the file `offset`."""
        self._clock = offset
        offset.write_text("+0")
        spec = importlib.util.find_spec("libfaketime")
        assert spec is not None
        assert spec.origin is not None
        library = Path(spec.origin).parent / "vendor/libfaketime/src/libfaketime.so.1"
        return {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(offset),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def finished(self) -> bool:
        """Returns whether trainer and collector have finished, and restarts failed processes."""
        codes = {}
        for name in (*REPLICAS, "trainer", "collector"):
            child = self.breakable._child(name)
            codes[name] = child.process.exit_code
            if codes[name] not in (None, 0):
                # An operator does not restart processes that exit with a permanent error.
                assert not 0 < codes[name] < 128, child.process.log.read_text()[-2000:]
                self.restart(name)
        return codes["trainer"] == 0 and codes["collector"] == 0

    def restart(self, name: str) -> None:
        child = self.breakable._child(name)
        self.breakable._children.remove(child)
        arguments, options = self.breakable._started[name]
        self.breakable.start(name, *arguments, **options)

    def stop(self) -> None:
        self.breakable.stop(*REPLICAS, "trainer", "collector")

    # -- faults

    def inject_fault(self, rng: random.Random) -> str:
        """Injects a fault chosen at random, ends it, and returns its kind.

        `finished` restarts killed processes of the run. A shifted clock stays until the next shift.
        """
        fault = rng.choice(("kill", "kill", "kill", "stall", "service", "damage", "clock"))
        if fault == "kill":
            self._kill(rng.choice((*REPLICAS, "collector", "trainer")))
        elif fault == "stall":
            self._stall(rng.choice(REPLICAS), rng.choice((0.5, 3.0, 12.0)))
        elif fault == "service":
            service = rng.choice(SERVICES)
            self.breakable.kill(service)
            self.breakable.revive(service)
        elif fault == "clock":
            offset = rng.randint(-LONGEST_CLOCK_JUMP_S, LONGEST_CLOCK_JUMP_S)
            new = self._clock.with_suffix(".new")
            new.write_text(f"{offset:+d}")
            new.replace(self._clock)
        else:
            self._damage(rng)
        return fault

    def inject_verifier_fault(self, rng: random.Random) -> str:
        """Kills workers of the verifier, the verifier itself or a replica, and returns which."""
        fault = rng.choice(("workers", "workers", "workers", "verifier", "replica"))
        if fault == "replica":
            self._kill(rng.choice(REPLICAS))
        elif fault == "verifier":
            self.breakable.kill("verifier")
            self.breakable.revive("verifier")
        else:
            verifier = psutil.Process(self.breakable._child("verifier").process.pid)
            for worker in verifier.children():
                with suppress(psutil.NoSuchProcess):
                    worker.kill()
        return fault

    def end_trainer(self, rng: random.Random) -> str:
        """Sends the trainer SIGKILL, as a lack of memory does, or SIGTERM, as a node drain does."""
        signal_number = rng.choice((signal.SIGKILL, signal.SIGTERM))
        process = self.breakable._child("trainer").process
        if process.exit_code is None:
            process.send_signal(signal_number)
            process.wait()
        return signal_number.name

    def _kill(self, name: str) -> None:
        child = self.breakable._child(name)
        if child.process.exit_code is None:
            child.process.send_signal(signal.SIGKILL)
            child.process.wait()

    def _stall(self, name: str, seconds: float) -> None:
        """Stops a process for some seconds, during which its connections stay open."""
        process = self.breakable._child(name).process
        if process.exit_code is None:
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(process.pid, signal.SIGCONT)

    def _damage(self, rng: random.Random) -> None:
        """Truncates or alters the newest weights for up to a second, then restores them."""
        keys = [key for key in self.store.keys(f"runs/{self.name}/weights/") if "safetens" in key]
        if not keys:
            return
        key = max(keys, key=lambda key: int(key.split("/v")[1].split("/")[0]))
        response = self.store._client.get_object(
            bucket_name=self.store.settings.bucket, object_name=key
        )
        data = response.read()
        response.release_conn()
        self.store.put(key, rng.choice((data[: len(data) // 2], b"x" + data[1:])))
        time.sleep(rng.uniform(0.1, 1.0))
        self.store.put(key, data)


FaultInjector = Callable[[Cluster, random.Random], str]


def run_to_end(
    cluster: Cluster,
    *,
    faults: int,
    rng: random.Random,
    inject_fault: FaultInjector = Cluster.inject_fault,
    longest_pause_s: float = 2.0,
) -> int:
    """Runs to the end with at most `faults` faults, and returns the number of injected faults."""
    injected = 0
    pause = threading.Event()
    deadline = time.monotonic() + 1200
    try:
        while not cluster.finished():
            assert time.monotonic() < deadline, "the run has not finished within 1200 s"
            pause.wait(rng.uniform(0.3, longest_pause_s))
            if injected < faults:
                try:
                    inject_fault(cluster, rng)
                except (ServiceCallError, ObjectStoreError):
                    continue  # a fault that could not be injected does not count
                injected += 1
    finally:
        cluster.stop()
    return injected


def results(breakable: Breakable, name: str) -> Any:
    return _outcome(Bapo(Path(), {}, breakable.endpoints, Path()), name, STEPS)


def check_versions(config: RunConfig, compositions: Any) -> None:
    """Asserts that the scheduled policy version sampled every group, also between two syncs."""
    between_syncs = 0
    for members in compositions:
        for source, _, step, _, version in members:
            kind = "reevaluation" if source == "reevaluated" else "fresh"
            assert version == config.rollout_version(step, kind)
            between_syncs += kind == "reevaluation" and not config.schedule.syncs_at(step)
    assert between_syncs > 0


def check_runs_with_faults(
    breakable: Breakable, model: Path, scratch: Path, *, faults: int, seed: int, **options: Any
) -> None:
    """Asserts that runs with this many faults in total have the result of a run without faults."""
    undisturbed = Cluster(breakable, f"calm-{seed}", model, scratch)
    run_to_end(undisturbed, faults=0, rng=random.Random(0))
    expected = results(breakable, f"calm-{seed}")
    check_versions(undisturbed.config, expected["compositions"])
    rng = random.Random(seed)
    total = number = 0
    while total < faults:
        name = f"fire-{seed}-{number}"
        cluster = Cluster(breakable, name, model, scratch)
        total += run_to_end(cluster, faults=faults - total, rng=rng, **options)
        assert results(breakable, name) == expected, f"{name} after {total} faults"
        number += 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_faults_do_not_change_the_result(
    breakable: Breakable, small_model: Path, tmp_path: Path
) -> None:
    check_runs_with_faults(breakable, small_model, tmp_path, faults=5, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills_of_verifier_workers_the_verifier_and_replicas_do_not_change_the_result(
    breakable: Breakable, small_model: Path, tmp_path: Path
) -> None:
    """Kills them all the time: accuracies, batches and weights are the ones of a quiet run."""
    options = {"inject_fault": Cluster.inject_verifier_fault, "longest_pause_s": 0.6}
    check_runs_with_faults(breakable, small_model, tmp_path, faults=60, seed=4, **options)


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_two_hundred_faults_do_not_change_the_result(
    breakable: Breakable, small_model: Path, tmp_path: Path
) -> None:
    check_runs_with_faults(breakable, small_model, tmp_path, faults=200, seed=2)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_killed_replica_ends_its_vllm_and_is_restarted(
    breakable: Breakable, small_model: Path, tmp_path: Path
) -> None:
    arguments = ["--enforce-eager", "--max-num-seqs", "64"]
    cluster = Cluster(
        breakable, "on-vllm", small_model, tmp_path, engine={"kind": "vllm", "args": arguments}
    )
    killed: list[int] = []

    def kill(cluster: Cluster, _: random.Random) -> str:
        """Kills the next replica once the run has reached step 1 or step 4."""
        if cluster.client.run_state().current_step <= 3 * len(killed):
            raise ServiceUnavailable("the run has not reached the step of this fault")
        process = cluster.breakable._child(REPLICAS[len(killed)]).process
        engines = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert engines
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 120
        while any(is_running(engine) for engine in engines):
            assert time.monotonic() < deadline, "vLLM still runs 120 s after its replica was killed"
            time.sleep(0.1)
        killed.append(process.pid)
        return "kill"

    run_to_end(cluster, faults=2, rng=random.Random(0), inject_fault=kill)
    assert len(killed) == 2
    outcome = results(breakable, "on-vllm")
    check_versions(cluster.config, outcome["compositions"])


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_ends_of_the_trainer_do_not_change_the_result(
    breakable: Breakable, small_model: Path, tmp_path: Path
) -> None:
    """Ends the trainer while it loads or trains: its start takes seconds, and pauses vary."""
    options = {"inject_fault": Cluster.end_trainer, "longest_pause_s": 12.0}
    check_runs_with_faults(breakable, small_model, tmp_path, faults=50, seed=3, **options)
