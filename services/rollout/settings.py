"""Settings (environment variables) of the replica, its worker nodes, the collector and the run
watcher."""

from __future__ import annotations

import socket
from pathlib import Path

from pydantic import Field

from services.common.settings import (
    Address,
    BufferClientSettings,
    ObjectStoreClientSettings,
    Secret,
    ServerSettings,
    SettingsGroup,
    Token,
)
from services.rollout.api.addresses import ReplicaCallerSettings


class VllmInstallation(SettingsGroup):
    """Where vLLM is installed on a machine."""

    python: str | None = None
    """Interpreter of the environment that has vLLM; `.venv-vllm` beside this environment if it
    exists, else this interpreter."""


class VllmSettings(VllmInstallation):
    """How a replica starts vLLM."""

    nodes: str = ""
    """Addresses of the worker nodes (`services.rollout.worker_node`) over which vLLM shards the
    model together with this node, separated by commas; this node alone unless set."""
    args: str = ""
    """Further arguments of vLLM's server, such as `--tensor-parallel-size 2`."""
    start_within_s: float = Field(2700.0, gt=0.0)
    """Seconds that vLLM may take to start, downloads and compilation included."""


class ReplicaSettings(ServerSettings, BufferClientSettings, ObjectStoreClientSettings):
    """Settings of a rollout replica (`python -m services.rollout.server`).

    The run's configuration (`rollout`) says which engine generates, and how.
    """

    run: str
    """Name of the run that the replica works for."""
    scratch: Path
    """Directory for weights and logs, with room for three versions of the weights."""
    replica: str = Field(default_factory=socket.gethostname)
    """Name of the replica, unique in its run; the machine's host name unless set."""
    model: Path | None = None
    """Directory of the run's initial model, if it is on this machine: the engine is then built
    while the trainer loads the model."""
    advertise: str | None = None
    """Address at which collectors and the trainer reach the replica; `http://<host>:<port>` unless
    set."""
    vllm: VllmSettings = VllmSettings()
    """How vLLM is started on this machine."""


class WorkerNodeSettings(ServerSettings, ObjectStoreClientSettings):
    """Settings of a worker node (`python -m services.rollout.worker_node`).

    The replica, which is its leader node, says what it runs, and with which weights.
    """

    token: Token
    """Bearer token that every request must carry: the one of its replica, of at least 20
    characters."""
    scratch: Path
    """Directory for weights and logs, with room for three versions of the weights."""
    vllm: VllmInstallation = VllmInstallation()
    """Where vLLM is installed on this machine."""


class CollectorSettings(BufferClientSettings, ObjectStoreClientSettings, ReplicaCallerSettings):
    """Settings of the collector (`python -m services.rollout.collector`)."""

    run: str
    """Name of the run that the collector works for."""
    verifier_url: Address
    """Address of the verifier, `http://host:port`."""
    verifier_token: Secret
    """Bearer token of the verifier."""
    scratch: Path
    """Directory for the tokenizer of a model that is in the object store."""
    attempt: int | None = None
    """Attempt of the run to work for; the current attempt, and then each new one, unless set."""
    model: Path | None = None
    """Directory of the initial model on this machine, if it differs from the run's `model.path`."""


class RunWatcherSettings(ServerSettings, BufferClientSettings):
    """Settings of the run watcher (`python -m services.rollout.run_watcher MODULE`)."""
