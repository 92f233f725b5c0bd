"""Tests how long after they were stored new weights are served by every replica of a release.

`make test-cluster-all` runs it. It needs `BAPO_TEST_HOST`, because it publishes the weights from
this machine.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from benchmarks.rollouts import (
    DEFAULT_WORKLOAD,
    commit_made_up_step,
    config,
    make_model,
    upload_raw,
)
from benchmarks.runs import begin_run
from services.buffer.api.client import BufferClient, none_if_missing
from services.common.objectstore import ObjectStore
from services.stack.stack import Endpoints
from services.trainer.export import as_saved, model_files, write_files
from services.trainer.publish import WeightPublisher
from services.trainer.ranks import Ranks
from tests.cluster.conftest import HOST, Release
from tests.cluster.kubectl import wait_until
from tests.cluster.test_cluster import WAIT_S

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

REPLICAS = 2
REPEATS = 5
LONGEST_RATIO = 1.3
POLL_INTERVAL_S = 0.1
RAW_PREFIX = "raw"

COPY_AND_LOAD = f"""
import asyncio, json, pathlib, shutil, sys, time
from services.common.objectstore import ObjectStore
from services.common.settings import ObjectStoreClientSettings
from services.rollout.vllm.api import VllmApi

def find_socket():
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode().split("\\0")
        except OSError:
            continue
        if "--uds" in words:
            return pathlib.Path(words[words.index("--uds") + 1])
    sys.exit("no vLLM runs here")

async def load(api):
    await api.load(str(target))

settings = ObjectStoreClientSettings.load().s3
client = ObjectStore(settings)._client
target = pathlib.Path("/scratch/{RAW_PREFIX}")
shutil.rmtree(target, ignore_errors=True)
names = [item.object_name for item in client.list_objects(settings.bucket, "{RAW_PREFIX}/")]
started = time.perf_counter()
for name in names:
    client.fget_object(settings.bucket, name, str(target / pathlib.Path(name).name))
copied = time.perf_counter()
asyncio.run(load(VllmApi(find_socket())))
print(json.dumps([copied - started, time.perf_counter() - copied]))
"""
"""Copies the files below `RAW_PREFIX` to the disk of a replica's pod and has vLLM load them, with
nothing of this project but the addresses; prints the seconds of both."""


@pytest.fixture
def release_without_collector(release: Release, no_run: None) -> Iterator[Release]:
    """Gives the release two replicas, and no collector, whose rollouts would take time as well."""
    release.upgrade(f"rollout.replicas={REPLICAS}")
    scale = ["scale", "deployment/bapo-collector"]
    release.namespace.kubectl(*scale, "--replicas=0")
    yield release
    release.namespace.kubectl(*scale, "--replicas=1")
    release.upgrade()


def test_weights_are_served_in_little_more_than_the_time_to_copy_and_load_them(
    release_without_collector: Release, stack: Endpoints, tmp_path: Path
) -> None:
    assert HOST, "set BAPO_TEST_HOST: the weights are published from this machine"
    release = release_without_collector
    source = make_model(tmp_path / "model", "large")
    store = ObjectStore(stack.object_store.model_copy(update={"bucket": "cluster"}))
    model = AutoModelForCausalLM.from_pretrained(source)
    files = tmp_path / "files"
    write_files(model_files(model, as_saved(model, dict(model.state_dict())), source), files)
    upload_raw(store, files)
    name = "sync"
    client = release.client(name)
    begin_run(client, config(name, REPLICAS, 1, DEFAULT_WORKLOAD))
    publisher = WeightPublisher(client, store, source=source, dtype=None, ranks=Ranks(0, 1))
    publisher.publish(1, model)
    publisher.settle()
    client.step_prompts(1)
    first = client.weights(1).manifest_digest
    wait_until(lambda: are_served(client, first), "the first weights", WAIT_S)

    needed, whole = [], []
    for version in range(2, REPEATS + 2):
        needed.append(max(sum(seconds) for seconds in copy_and_load(release)))
        commit_made_up_step(client, version - 1)
        client.step_prompts(version)  # sets the target version, as the collector does
        with torch.no_grad():
            next(model.parameters()).add_(0.001)
        publisher.publish(version, model)
        while (weights := none_if_missing(partial(client.weights, version, wait=10))) is None:
            pass
        stored = time.perf_counter()
        # This process also forwards what the replicas download.
        while not are_served(client, weights.manifest_digest):
            time.sleep(POLL_INTERVAL_S)
        whole.append(time.perf_counter() - stored)
        publisher.settle()
    ratio = statistics.median(whole) / statistics.median(needed)
    Console().print({"copy and load": needed, "stored to served": whole, "ratio": ratio})
    client.stop()
    assert ratio <= LONGEST_RATIO, (needed, whole)


def are_served(client: BufferClient, digest: str) -> bool:
    """Returns whether every replica serves the version with this digest of its manifest."""
    served = [replica.manifest_digest == digest for replica in client.replicas()]
    return len(served) == REPLICAS and all(served)


def copy_and_load(release: Release) -> list[list[float]]:
    """Returns the seconds to copy and to load weights of every replica, all at the same time."""
    pods = [f"bapo-rollout-{number}" for number in range(REPLICAS)]
    seconds: list[list[float]] = []

    def run(pod: str) -> None:
        command = ["kubectl", "-n", release.namespace.name, "exec", pod, "--", "python", "-c"]
        done = subprocess.run(
            [*command, COPY_AND_LOAD], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        seconds.append(json.loads(done.stdout))

    threads = [threading.Thread(target=run, args=[pod]) for pod in pods]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seconds) == REPLICAS, "a pod failed to copy or load"
    return seconds
