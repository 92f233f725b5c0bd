"""Environment variables of the pipeline's steps."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic.alias_generators import to_camel
from pydantic_settings import BaseSettings, NoDecode

from services.common.settings import (
    Address,
    BufferClientSettings,
    ObjectStoreClientSettings,
    Settings,
)

USER_ID = 10001
"""User and group of the images."""
JobKindName = Literal["PyTorchJob", "TrainJob"]
"""Kind of the object that stands for a training job."""
LOCAL_JOBS = "BAPO_LOCAL_JOBS"
"""Variable of `LocalJobsSettings.local_jobs`."""


class StepSettings(BufferClientSettings, ObjectStoreClientSettings):
    """Settings of a step of the pipeline, from the connection ConfigMap and the Secrets."""

    remedy: ClassVar[str] = (
        ": the step did not get the connection ConfigMap of the release or one of its Secrets; the "
        "pipeline must be compiled with the names that `helm status` prints (`bapo pipeline "
        "compile --name connection=…`), and run in the release's namespace"
    )

    workflow: str = ""
    """Name of the Argo workflow that the step belongs to."""
    dashboard_url: Address | None = None
    """Address at which people reach the dashboard; unset where the chart exposes none."""

    scratch: Path = Field(default_factory=lambda: Path(tempfile.gettempdir()))
    """Directory for models in transfer."""


class TrainerPod(BaseModel):
    """Settings of the training job's pods, from the section `trainer` of the chart's values."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True
    )

    priority_class_name: str = ""
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[dict[str, Any], ...] = ()
    affinity: dict[str, Any] = Field(default_factory=dict)
    runtime_class_name: str = ""
    scheduler_name: str = ""
    pod_annotations: dict[str, str] = Field(default_factory=dict)
    pod_labels: dict[str, str] = Field(default_factory=dict)
    extra_env: tuple[dict[str, Any], ...] = ()
    extra_volumes: tuple[dict[str, Any], ...] = ()
    extra_volume_mounts: tuple[dict[str, Any], ...] = ()
    extra_resources: dict[str, str] = Field(default_factory=dict)
    """Extended resources besides the GPUs, such as those of RDMA."""
    gpu_resource: str = "nvidia.com/gpu"
    cpu_limit: bool = False
    """Whether the CPU request is a limit, too, as a quota may demand."""
    scratch_size: str = "100Gi"
    shm_size: str = "8Gi"
    tmp_size: str = "10Gi"
    pod_security_context: dict[str, Any] = Field(
        default_factory=lambda: {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    )
    security_context: dict[str, Any] = Field(
        default_factory=lambda: {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
        }
    )


class DeploymentSettings(Settings):
    """Settings of a step that creates the training job, from the connection ConfigMap.

    They are no part of `StepSettings`, where `BAPO_S3_SECRET` would belong to the group `s3`.
    """

    remedy: ClassVar[str] = (
        ": the step did not get the connection ConfigMap of the release "
        "(`<release>-connection`), or got one with invalid values; see docs/deploy.md"
    )

    release: str
    """Name of the chart's release."""
    connection: str
    """Name of the ConfigMap with the services' addresses."""
    token_secret: str
    """Name of the Secret with the services' tokens."""
    trainer_token_key: str = "BAPO_TRAINER_TOKEN"
    """Key of that Secret with the trainer's token."""
    s3_secret: str = ""
    """Name of the Secret with the object store's keys; unset where pods have a cloud identity."""
    ca_bundle: str = ""
    """Name of the ConfigMap with certificates of authorities, which pods mount; none if unset."""
    trainer_image: str
    """Image of the training job."""
    trainer_service_account: str
    """Service account of the training job's pods."""
    trainer_job_kind: JobKindName = "PyTorchJob"
    """Kind of the training job: of the Kubeflow training operator 1.9, or of Kubeflow Trainer 2."""
    trainer_pull_policy: str = "IfNotPresent"
    """When nodes pull the image: `Always`, `IfNotPresent` or `Never`."""
    trainer_pull_secrets: Annotated[tuple[str, ...], NoDecode] = ()
    """Names of the Secrets to pull the image with, separated by commas."""
    trainer_queue: str = ""
    """Kueue's local queue of the training job; none if empty."""
    # NoDecode: pydantic-settings would report wrong JSON with another error, and without its value.
    trainer_pod: Annotated[TrainerPod, NoDecode] = Field(default_factory=TrainerPod)
    """Further settings of the training job's pods: the chart's values `trainer` as JSON."""

    @field_validator("trainer_pull_secrets", mode="before")
    @classmethod
    def _split_names(cls, names: Any) -> Any:
        return tuple(filter(None, names.split(","))) if isinstance(names, str) else names

    @field_validator("trainer_pod", mode="before")
    @classmethod
    def _parse_json(cls, value: Any) -> Any:
        try:
            return json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(f"not valid JSON: {error}") from error


class RetrySettings(BaseSettings):
    """Which of Argo's attempts at a step this one is."""

    kfp_retry_index: int = 0
    """Number of attempts before this one. KFP sets it; a retry by hand begins with 0 again."""


class LocalJobsSettings(Settings):
    """Settings of a pipeline that runs without a cluster (`bapo pipeline run-local`)."""

    local_jobs: Path | None = None
    """Directory of the trainer's jobs, which are processes of this machine; unset in a cluster."""
