"""Does what the training operator does for a job: runs its workers as pods of a `Node`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipelines.local_jobs import RETRYABLE_FROM, injected_variables
from pipelines.training_job import RENDEZVOUS_PORT
from tests.images.node import Node
from tests.integration.support.fake_kubernetes import FakeKubernetes

POLL_INTERVAL_S = 0.5


@contextmanager
def operator(kubernetes: FakeKubernetes, node: Node) -> Iterator[None]:
    """Runs the jobs that are created, and stops those that are deleted."""
    stopped = threading.Event()
    thread = threading.Thread(target=_operate, args=(kubernetes, node, stopped))
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _operate(kubernetes: FakeKubernetes, node: Node, stopped: threading.Event) -> None:
    workers: dict[str, list[str]] = {}
    while not stopped.wait(POLL_INTERVAL_S):
        jobs = dict(kubernetes.objects["pytorchjobs"])
        for name, job in jobs.items():
            if name not in workers:
                workers[name] = _start(node, name, job)
                kubernetes.condition(name, "Running")
            _update(kubernetes, node, name, workers)
        for name in workers.keys() - jobs.keys():
            for worker in workers.pop(name):
                node.stop(worker)


def _start(node: Node, name: str, job: dict[str, Any]) -> list[str]:
    replicas = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    variables = injected_variables(job, f"{name}-worker-0:{RENDEZVOUS_PORT}")
    return [
        node.start(f"{name}-worker-{number}", replicas["template"]["spec"], variables)
        for number in range(replicas["replicas"])
    ]


def _update(
    kubernetes: FakeKubernetes, node: Node, name: str, workers: dict[str, list[str]]
) -> None:
    """Applies `restartPolicy: ExitCode` to the workers that have ended."""
    job = kubernetes.objects["pytorchjobs"].get(name)
    if job is None or job["status"]["conditions"][-1]["type"] != "Running":
        return
    codes = [code for pod in workers[name] if (code := node.exit_code(pod)) is not None]
    if any(code >= RETRYABLE_FROM for code in codes):
        workers[name] = _start(node, name, job)
    elif any(codes):
        log = node.log(workers[name][0])
        kubernetes.condition(
            name, "Failed", "PyTorchJobFailed", f"exited with {codes}: {log[-500:]}"
        )
    elif codes:
        kubernetes.condition(name, "Succeeded")
