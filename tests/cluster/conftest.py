"""A release of the chart on the cluster that `KUBECONFIG` names, for `make test-cluster`."""

from __future__ import annotations

import base64
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from sqlalchemy import create_engine, make_url, text

from services.buffer.api.client import BufferClient
from services.cli.main import main
from services.stack.stack import Endpoints
from tests.cluster.argo import SERVICE_ACCOUNT
from tests.cluster.kubectl import Namespace, helm, kubectl, wait_until
from tests.forwarder import Forwarder
from tests.integration.support.driver import stop_open_runs

ROOT = Path(__file__).parents[2]
REGISTRY = os.environ.get("BAPO_TEST_REGISTRY", "localhost")
"""Registry of the images `bapo/service`, `bapo/trainer` and `bapo/rollout` of this version."""
HOST = os.environ.get("BAPO_TEST_HOST", "")
"""Address at which pods reach this machine, whose Postgres and S3 the release uses then. If empty,
it uses the chart's own, whose images come from Docker Hub."""
INSTALL_TIMEOUT = "5m"


@dataclass
class Release:
    """A release of the chart, with the values for a trial."""

    namespace: Namespace
    package: Path
    """The compiled pipeline with the release's images."""
    sets: list[str]
    """Values that differ."""
    registry: str = REGISTRY
    buffer_url: str = ""
    token: str = ""
    _forward: subprocess.Popen[str] | None = None

    def install(self) -> None:
        self._helm("install", wait=True)

    def upgrade(self, *sets: str, wait: bool = True) -> None:
        """Upgrades the release with further values."""
        self._helm("upgrade", *sets, wait=wait)

    def _helm(self, verb: str, *sets: str, wait: bool) -> None:
        helm(
            *(verb, "bapo", str(ROOT / "charts/bapo"), "-n", self.namespace.name),
            *("-f", str(ROOT / "charts/bapo/values-dev.yaml"), "--timeout", INSTALL_TIMEOUT),
            *(argument for value in (*self.sets, *sets) for argument in ("--set", value)),
            *(["--wait"] if wait else []),
        )

    def connect(self) -> None:
        """Reads the token, and forwards a port of this machine to the buffer service.

        A port-forward ends with the pod that it leads to.
        """
        self.disconnect()
        data = (self.namespace.get("secret", "bapo-token") or {})["data"]
        self.token = base64.b64decode(data["BAPO_TOKEN"]).decode()
        ready = ["wait", "--for=condition=available", "deployment/bapo-buffer", "--timeout=300s"]
        self.namespace.kubectl(*ready)
        self._forward = subprocess.Popen(
            ["kubectl", "-n", self.namespace.name, "port-forward", "service/bapo-buffer", ":8700"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._forward.stdout is not None
        found = re.search(r"127\.0\.0\.1:(\d+)", self._forward.stdout.readline())
        assert found is not None, "kubectl port-forward did not start"
        self.buffer_url = f"http://127.0.0.1:{found[1]}"

    def disconnect(self) -> None:
        if self._forward is not None:
            self._forward.terminate()
            self._forward.wait()

    def jobs(self) -> set[str]:
        """Returns the names of the training jobs, with the runtimes of TrainJobs."""
        return self.namespace.names("pytorchjobs,trainjobs,trainingruntimes")

    def client(self, run: str) -> BufferClient:
        return BufferClient(self.buffer_url, self.token, run=run)


@pytest.fixture(scope="session")
def namespace() -> Namespace:
    """Creates a namespace with a quota, as Kubeflow's profiles have one.

    It is kept, so that one can look at what failed.
    """
    name = "bapo-test"
    kubectl("delete", "namespace", name, "--ignore-not-found", "--wait", "--timeout=120s")
    kubectl("create", "namespace", name)
    # KFP's own containers would not be admitted as restricted ones.
    kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=baseline")
    created = Namespace(name)
    created.kubectl("create", "serviceaccount", SERVICE_ACCOUNT)
    # With a quota of these, Kubernetes refuses pods that do not request them.
    created.kubectl("create", "quota", "profile", "--hard=requests.cpu=64,requests.memory=256Gi")
    kubectl("apply", "-f", str(Path(__file__).parent / "workflow-crd.yaml"))
    crds = kubectl("get", "crd", "-o", "name")
    for kind, operator in (
        ("pytorchjobs.kubeflow.org", "the Kubeflow training operator 1.9"),
        ("trainjobs.trainer.kubeflow.org", "Kubeflow Trainer 2.3"),
    ):
        assert kind in crds, f"install {operator} first"
    return created


@pytest.fixture(scope="session")
def external(stack: Endpoints) -> Iterator[list[str]]:
    """Yields the values of Postgres and S3: those of this machine, or the chart's own."""
    if not HOST:
        yield []
        return
    url = make_url(stack.database_url)
    with create_engine(url, isolation_level="AUTOCOMMIT").connect() as connection:
        connection.execute(text("CREATE DATABASE cluster"))
    socket = Path(str(url.query["host"])) / ".s.PGSQL.5432"
    s3_port = urlsplit(stack.s3_endpoint).port
    assert s3_port is not None
    with Forwarder(str(socket)) as database, Forwarder(s3_port) as s3:
        yield [
            "database.bundled.enabled=false",
            f"database.url=postgresql+psycopg://postgres:none@{HOST}:{database.port}/cluster",
            f"networkPolicy.externalDatabase.port={database.port}",
            "s3.bundled.enabled=false",
            f"s3.endpoint=http://{HOST}:{s3.port}",
            "s3.bucket=cluster",
            f"s3.accessKey={stack.s3_access_key}",
            f"s3.secretKey={stack.s3_secret_key}",
            f"networkPolicy.externalS3.port={s3.port}",
        ]


@pytest.fixture(scope="session")
def release(
    namespace: Namespace, external: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Release]:
    """Installs the chart, and reaches it through a port-forward."""
    sets = [f"image.registry={REGISTRY}", "trainer.scratchSize=2Gi", *external]
    package = tmp_path_factory.mktemp("pipeline") / "bapo.yaml"
    images = [f"{REGISTRY}/bapo/{name}:0.3.0" for name in ("service", "trainer")]
    compile_pipeline = ["pipeline", "compile", "--output", str(package), "--segments", "2"]
    main([*compile_pipeline, "--service-image", images[0], "--trainer-image", images[1]])
    installed = Release(namespace, package, sets)
    installed.install()
    installed.connect()
    yield installed
    installed.disconnect()


@pytest.fixture
def no_run(release: Release) -> None:
    """Stops the runs of other tests."""
    stop_open_runs(release.buffer_url, release.token)
    wait_until(lambda: not release.jobs(), "deletion of the jobs", 120)
