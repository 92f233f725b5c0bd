"""Tests the images, the chart and the pipeline together in containers, without a cluster.

Needs podman, OpenSSL, and the images for machines without GPUs (`make images VARIANT=cpu`). Ports
8700 to 8703 and 23456 must be free.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from services.buffer.api.client import BufferClient
from services.stack.stack import Endpoints
from tests.charts.helm import Case, Object, of_kind, one, pod_of, render
from tests.forwarder import Forwarder
from tests.images.node import Node, node, podman
from tests.images.operator import operator
from tests.integration.support.fake_kubernetes import fake_kubernetes

pytestmark = [pytest.mark.images, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
IMAGES = {target: f"localhost/bapo/{target}:0.3.0" for target in ("service", "trainer", "rollout")}
NAMESPACE = "ml"
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
TOKEN = "pod-token"
READY_WITHIN_S = 180.0
RUN, STEPS = "images", 6


@pytest.fixture(scope="session")
def database(stack: Endpoints) -> Iterator[str]:
    """Creates a database in the tests' Postgres; yields its URL for another user's processes."""
    url = make_url(stack.database_url)
    with create_engine(url, isolation_level="AUTOCOMMIT").connect() as connection:
        connection.execute(text("CREATE DATABASE images"))
    with Forwarder(str(Path(str(url.query["host"])) / ".s.PGSQL.5432")) as forwarder:
        yield f"postgresql+psycopg://postgres:none@127.0.0.1:{forwarder.port}/images"


@pytest.fixture(scope="session")
def release(stack: Endpoints, database: str) -> list[Object]:
    """The objects of the chart, with a database and a bucket in the tests' Postgres and S3."""
    sets = {
        "image.registry": "localhost",
        "database.bundled.enabled": False,
        "database.url": database,
        "s3.bundled.enabled": False,
        "s3.endpoint": stack.s3_endpoint,
        "s3.bucket": "images",
        "s3.accessKey": stack.s3_access_key,
        "s3.secretKey": stack.s3_secret_key,
    }
    return render(Case(("dev",), sets))


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Creates a certificate for the Kubernetes API; returns the files of it and of its key."""
    directory = tmp_path_factory.mktemp("certificate")
    files = directory / "ca.crt", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=kubernetes", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-out", str(files[0]), "-keyout", str(files[1])]
    subprocess.run(command, check=True, capture_output=True)
    return files


@pytest.fixture(scope="session")
def machine(release: list[Object], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Runs the release until it is ready."""
    services = [manifest["metadata"]["name"] for manifest in of_kind(release, "Service")]
    names = [f"{name}.{NAMESPACE}.svc" for name in services]
    names += [f"bapo-rollout-0.bapo-rollout.{NAMESPACE}.svc", f"bapo-{RUN}-worker-0"]
    with node(release, tmp_path_factory.mktemp("node"), names) as running:
        code, log = running.finish(
            "bapo-migrate", pod_of(one(release, "Job", "bapo-migrate"))["spec"]
        )
        assert code == 0, log
        for workload in of_kind(release, "Deployment", "StatefulSet"):
            running.start(pod_name(workload), pod_of(workload)["spec"])
        for workload in of_kind(release, "Deployment", "StatefulSet"):
            await_probe(running, workload, "startupProbe")
        yield running


def pod_name(workload: Object) -> str:
    """Returns the name of a workload's first pod, which has a number in a StatefulSet."""
    name: str = workload["metadata"]["name"]
    return f"{name}-0" if workload["kind"] == "StatefulSet" else name


def await_probe(machine: Node, workload: Object, probe: str) -> None:
    """Waits until a pod's probe succeeds."""
    (container,) = pod_of(workload)["spec"]["containers"]
    (port,) = (port["containerPort"] for port in container["ports"])
    url = f"http://127.0.0.1:{port}{container[probe]['httpGet']['path']}"
    deadline = time.monotonic() + READY_WITHIN_S
    while True:
        try:
            if httpx.get(url, timeout=5).is_success:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        name = pod_name(workload)
        assert time.monotonic() < deadline, f"{name} does not answer: {machine.log(name)[-2000:]}"
        time.sleep(0.5)


def test_the_release_passes_its_own_test(release: list[Object], machine: Node) -> None:
    for name in ("bapo-buffer", "bapo-verifier"):
        await_probe(machine, one(release, "Deployment", name), "readinessProbe")
    code, log = machine.finish("bapo-test", one(release, "Pod", "bapo-test")["spec"])
    assert code == 0, log


@pytest.mark.parametrize("target", IMAGES)
def test_an_image_has_its_requirements_and_no_build_tools(target: str) -> None:
    (image,) = json.loads(podman("image", "inspect", IMAGES[target]))
    assert image["Config"]["User"] == "10001:10001"
    run = ["run", "--rm", "--read-only", "--network=none", "--tmpfs=/tmp", IMAGES[target]]
    assert podman(*run, "python", "-m", "pip", "check") == "No broken requirements found."
    tools = "for tool in cc gcc g++ make; do command -v $tool; done; echo none"
    assert podman(*run, "sh", "-c", tools) == "none"
    has_torch = podman(
        *run, "python", "-c", "import importlib.util as u; print(u.find_spec('torch'))"
    )
    assert (has_torch != "None") == (target == "trainer")


@pytest.fixture
def account(certificate: tuple[Path, Path], tmp_path: Path) -> Path:
    """The files that Kubernetes mounts into a pod with a token of its service account."""
    directory = tmp_path / "account"
    directory.mkdir()
    (directory / "token").write_text(TOKEN)
    (directory / "namespace").write_text(NAMESPACE)
    (directory / "ca.crt").write_bytes(certificate[0].read_bytes())
    return directory


@pytest.fixture(scope="session")
def containers() -> Iterator[str]:
    """Serves podman as Docker's API, which KFP's runner calls."""
    with tempfile.TemporaryDirectory(prefix="bapo-podman-") as directory:
        url = f"unix://{directory}/socket"
        process = subprocess.Popen(["podman", "system", "service", "--time=0", url])
        yield url
        process.terminate()
        process.wait()


def small_run() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / "examples/countdown-vllm.yaml").read_text())
    config["steps"] = STEPS
    config["rollout"] |= {"prompts_per_step": 8, "group_size": 4}
    config["optimizer"] |= {"minibatch_prompts": 8}
    config["evaluation"] = {"every": STEPS}
    return config


def test_the_pipeline_trains_a_run_in_containers(
    machine: Node,
    certificate: tuple[Path, Path],
    account: Path,
    containers: str,
    tmp_path: Path,
) -> None:
    """Runs every step in its image and the job's pod as the operator starts it, while weights go
    from the trainer's container to vLLM's, and groups back."""
    package, root = tmp_path / "bapo.yaml", tmp_path / "outputs"
    command = [sys.executable, "-m", "services.cli", "pipeline", "compile", "--output", package]
    command += ["--service-image", IMAGES["service"], "--trainer-image", IMAGES["trainer"]]
    subprocess.run(command, check=True, cwd=ROOT)
    root.mkdir()
    root.chmod(0o777)
    with (
        fake_kubernetes(certificate, namespace=NAMESPACE, token=TOKEN) as kubernetes,
        operator(kubernetes, machine),
    ):
        api = urlsplit(kubernetes.url)
        request = {
            "package": str(package),
            "root": str(root),
            "mounts": [
                {"source": str(account), "target": ACCOUNT, "type": "bind", "read_only": True}
            ],
            "container": {
                "environment": {
                    **machine.data("ConfigMap", "bapo-connection"),
                    "BAPO_TOKEN": machine.data("Secret", "bapo-token")["BAPO_PIPELINE_TOKEN"],
                    **machine.data("Secret", "bapo-s3"),
                    "KUBERNETES_SERVICE_HOST": api.hostname,
                    "KUBERNETES_SERVICE_PORT": str(api.port),
                },
                "network_mode": "host",
                "extra_hosts": dict.fromkeys(machine.names, "127.0.0.1"),
                # It runs as the image's user; KFP leaves the root file system writable.
                "cap_drop": ["ALL"],
            },
            "arguments": {
                "bapo_run": RUN,
                "config": small_run(),
                "gpus_per_worker": 0,
                "cpu_per_worker": "1",
                "memory_per_worker": "4Gi",
            },
        }
        (tmp_path / "request.json").write_text(json.dumps(request))
        done = subprocess.run(
            [sys.executable, "-m", "tests.images.pipeline", tmp_path / "request.json"],
            cwd=ROOT,
            env={**os.environ, "DOCKER_HOST": containers},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert not kubernetes.objects["pytorchjobs"], "the job was not deleted"
    assert done.returncode == 0, done.stdout[-6000:]
    token = machine.data("Secret", "bapo-token")["BAPO_TOKEN"]
    client = BufferClient("http://127.0.0.1:8700", token, run=RUN)
    state = client.run_state()
    assert (state.status, state.current_step) == ("finished", STEPS)
    assert [replica.name for replica in client.replicas()] == ["bapo-rollout-0"]
    assert client.evaluations()[-1].version == STEPS + 1
    (model,) = root.glob("*/evaluate-and-export/model")
    assert (model / "model.safetensors").stat().st_size > 0
