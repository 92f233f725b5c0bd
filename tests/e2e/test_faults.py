"""A run under fire: whatever dies, stalls or is damaged, its result is the same.

As in a cluster, what has died is started again by somebody who knows nothing of the run. The engine
is the deterministic one, so that not a bit of the result may change.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bapo_core.config import RunConfig, config_from
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.common.errors import ServiceCallError, ServiceUnavailable
from services.common.objectstore import ObjectStore, ObjectStoreError
from services.datasets import load_datasets
from services.stack.supervisor import free_ports
from tests.e2e.test_run import Bapo, _outcome, configuration
from tests.integration.breakable import Breakable, breakable_stack

STEPS = 9
REPLICAS = ("engine-0", "engine-1")
SERVICES = ("buffer", "postgres", "s3")
LONGEST_CLOCK_JUMP_S = 600
"""S3 refuses requests by clocks that are off by a quarter of an hour."""


@pytest.fixture(scope="module")
def breakable() -> Iterator[Breakable]:
    with breakable_stack() as stack:
        yield stack


class Cluster:
    """A run's processes on the breakable stack; those that end with an error are started again."""

    def __init__(
        self, breakable: Breakable, name: str, model: Path, scratch: Path, **rollout: Any
    ) -> None:
        """rollout: of the configuration."""
        self.breakable, self.name = breakable, name
        endpoints = breakable.endpoints
        # Re-evaluations between syncs: the replicas change weights for them, and back.
        sync = {"every": 2, "reevaluate_every": 3}
        values = configuration(name, model) | {"steps": STEPS, "sync": sync}
        self.config = config_from(values | {"rollout": values["rollout"] | rollout})
        self.client = BufferClient(endpoints.buffer_url, endpoints.token, run=name)
        self.store = ObjectStore(endpoints.object_store)
        create(self.client, self.config)
        environment = {
            **endpoints.environment(),
            "BAPO_RUN": name,
            "BAPO_MODEL": str(model),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            **self._jumping_clock(scratch / f"{name}.clock"),
        }
        for replica, port in zip(REPLICAS, free_ports(len(REPLICAS)), strict=True):
            own = {"BAPO_REPLICA": replica, "BAPO_PORT": str(port)}
            own["BAPO_SCRATCH"] = str(scratch / name / replica)
            breakable.start_python(replica, "services.rollout.server", {**environment, **own})
        for part, module in (
            ("trainer", "services.trainer.loop"),
            ("collector", "services.rollout.collector"),
        ):
            own = {"BAPO_SCRATCH": str(scratch / name / part)}
            breakable.start_python(part, module, {**environment, **own})

    def _jumping_clock(self, offset: Path) -> dict[str, str]:
        """The variables for processes whose wall clock is off by what the file `offset` says."""
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
        """Whether trainer and collector are done; starts again what has failed."""
        codes = {}
        for part in (*REPLICAS, "trainer", "collector"):
            child = self.breakable._child(part)
            codes[part] = child.process.exit_code
            if codes[part] not in (None, 0):
                # An operator gives up on what says that starting it again is of no use.
                assert not 0 < codes[part] < 128, child.process.log.read_text()[-2000:]
                self.restart(part)
        return codes["trainer"] == 0 and codes["collector"] == 0

    def restart(self, part: str) -> None:
        child = self.breakable._child(part)
        self.breakable._children.remove(child)
        arguments, options = self.breakable._started[part]
        self.breakable.start(part, *arguments, **options)

    def stop(self) -> None:
        self.breakable.stop(*REPLICAS, "trainer", "collector")

    # -- faults

    def strike(self, rng: random.Random) -> str:
        """One fault, with what ends it; says which."""
        fault = rng.choice(("kill", "kill", "kill", "stall", "service", "damage", "clock"))
        if fault == "kill":
            self._kill(rng.choice((*REPLICAS, "collector", "trainer")))
        elif fault == "stall":
            self._stall(rng.choice(REPLICAS), rng.choice((0.5, 3.0, 12.0)))
        elif fault == "service":
            part = rng.choice(SERVICES)
            self.breakable.kill(part)
            self.breakable.revive(part)
        elif fault == "clock":
            offset = rng.randint(-LONGEST_CLOCK_JUMP_S, LONGEST_CLOCK_JUMP_S)
            new = self._clock.with_suffix(".new")
            new.write_text(f"{offset:+d}")
            new.replace(self._clock)
        else:
            self._damage(rng)
        return fault

    def end_trainer(self, rng: random.Random) -> str:
        """Killed, as by a lack of memory, or told to end, as by a node that is drained."""
        number = rng.choice((signal.SIGKILL, signal.SIGTERM))
        process = self.breakable._child("trainer").process
        if process.exit_code is None:
            process.send_signal(number)
            process.wait()
        return number.name

    def _kill(self, part: str) -> None:
        child = self.breakable._child(part)
        if child.process.exit_code is None:
            child.process.send_signal(signal.SIGKILL)
            child.process.wait()

    def _stall(self, part: str, seconds: float) -> None:
        """Alive, connected, and silent."""
        process = self.breakable._child(part).process
        if process.exit_code is None:
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(process.pid, signal.SIGCONT)

    def _damage(self, rng: random.Random) -> None:
        """The newest weights are cut short or changed for a moment."""
        keys = [key for key in self.store.keys(f"runs/{self.name}/weights/") if "safetens" in key]
        if not keys:
            return
        key = max(keys, key=lambda each: int(each.split("/v")[1].split("/")[0]))
        response = self.store._client.get_object(
            bucket_name=self.store.settings.bucket, object_name=key
        )
        whole = response.read()
        response.release_conn()
        self.store.put(key, rng.choice((whole[: len(whole) // 2], b"x" + whole[1:])))
        time.sleep(rng.uniform(0.1, 1.0))
        self.store.put(key, whole)


def create(client: BufferClient, config: RunConfig) -> None:
    train, test = load_datasets(config)
    for dataset in (train, test):
        client.upload_dataset(dataset.name, dataset.prompts)
    client.create_run(
        wire.RunCreate(
            name=config.name,
            config=config.model_dump(mode="json"),
            train_dataset=train.name,
            test_dataset=test.name,
        )
    )


Strike = Callable[[Cluster, random.Random], str]


def run_through(
    cluster: Cluster,
    *,
    faults: int,
    rng: random.Random,
    strike: Strike = Cluster.strike,
    longest_calm_s: float = 2.0,
) -> int:
    """Runs to the end under at most so many faults; how many there were."""
    struck = 0
    calm = threading.Event()
    deadline = time.monotonic() + 1200
    try:
        while not cluster.finished():
            assert time.monotonic() < deadline, "the run does not come to its end"
            calm.wait(rng.uniform(0.3, longest_calm_s))
            if struck < faults:
                try:
                    strike(cluster, rng)
                except (ServiceCallError, ObjectStoreError):
                    continue  # this one found nothing to strike
                struck += 1
    finally:
        cluster.stop()
    return struck


def results(breakable: Breakable, name: str) -> Any:
    return _outcome(Bapo(Path(), {}, breakable.endpoints, Path()), name, STEPS)


def check_versions(config: RunConfig, compositions: Any) -> None:
    """Every group is by the policy that its step asks for, also between two syncs."""
    between = 0
    for members in compositions:
        for source, _, step, _, version in members:
            kind = "reevaluation" if source == "reevaluated" else "fresh"
            assert version == config.rollout_version(step, kind)
            between += kind == "reevaluation" and not config.schedule.syncs_at(step)
    assert between > 0


def under_fire(
    breakable: Breakable, model: Path, scratch: Path, *, faults: int, seed: int, **how: Any
) -> None:
    calm = Cluster(breakable, f"calm-{seed}", model, scratch)
    run_through(calm, faults=0, rng=random.Random(0))
    expected = results(breakable, f"calm-{seed}")
    check_versions(calm.config, expected["compositions"])
    rng = random.Random(seed)
    total = number = 0
    while total < faults:
        name = f"fire-{seed}-{number}"
        cluster = Cluster(breakable, name, model, scratch)
        total += run_through(cluster, faults=faults - total, rng=rng, **how)
        assert results(breakable, name) == expected, f"{name} after {total} faults"
        number += 1


@pytest.mark.timeout(1800)
def test_a_run_under_fire(breakable: Breakable, small_model: Path, tmp_path: Path) -> None:
    under_fire(breakable, small_model, tmp_path, faults=5, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_two_hundred_faults(breakable: Breakable, small_model: Path, tmp_path: Path) -> None:
    under_fire(breakable, small_model, tmp_path, faults=200, seed=2)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_killed_replica_takes_its_vllm_along_and_comes_back(
    breakable: Breakable, small_model: Path, tmp_path: Path
) -> None:
    arguments = ["--enforce-eager", "--max-num-seqs", "64"]
    cluster = Cluster(
        breakable, "on-vllm", small_model, tmp_path, engine="vllm", vllm_args=arguments
    )
    killed: list[int] = []

    def kill(each: Cluster, _: random.Random) -> str:
        """Both replicas, in turn, when the run has come a step further."""
        if each.client.run_state().current_step <= 3 * len(killed):
            raise ServiceUnavailable("not yet")
        process = each.breakable._child(REPLICAS[len(killed)]).process
        engines = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert engines
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 120
        while any(alive(engine) for engine in engines):
            assert time.monotonic() < deadline, "vLLM outlived its replica"
            time.sleep(0.1)
        killed.append(process.pid)
        return "kill"

    run_through(cluster, faults=2, rng=random.Random(0), strike=kill)
    assert len(killed) == 2
    found = results(breakable, "on-vllm")
    check_versions(cluster.config, found["compositions"])


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_ends_of_the_trainer(breakable: Breakable, small_model: Path, tmp_path: Path) -> None:
    """It takes seconds to start, so that some come while it loads and some while it trains."""
    how = {"strike": Cluster.end_trainer, "longest_calm_s": 12.0}
    under_fire(breakable, small_model, tmp_path, faults=50, seed=3, **how)
