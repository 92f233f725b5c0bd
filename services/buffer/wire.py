"""The shapes that cross the wire of the buffer service."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Kind = Literal["fresh", "reevaluation", "evaluation"]
Buffer = Literal["hard", "high_quality"]


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptItem(Wire):
    uid: str = Field(min_length=1, max_length=512)
    task: str
    payload: dict[str, Any]


class DatasetUpload(Wire):
    """Prompts of a dataset. Repeating an upload changes nothing; a uid keeps its first payload."""

    first_position: int = Field(ge=0)
    prompts: list[PromptItem] = Field(max_length=10_000)


class DatasetState(Wire):
    dataset: str
    prompts: int


class RunCreate(Wire):
    name: str = Field(pattern=r"^[a-z][a-z0-9-]{0,62}$")
    config: dict[str, Any]
    train_dataset: str
    test_dataset: str


class RunPatch(Wire):
    status: Literal["finished", "failed"]


class RunState(Wire):
    name: str
    status: str
    config: dict[str, Any]
    train_dataset: str
    test_dataset: str
    current_step: int
    attempt: int
    created_at: datetime


class StepPrompts(Wire):
    """The prompts of a step. Not `ready` while they depend on a step not committed yet."""

    ready: bool
    policy_version: int
    prompts: list[PromptItem]
    complete: bool = False
    """Whether all groups of this step and kind have landed already."""


class GroupsAccepted(Wire):
    accepted: int
    duplicates: int
    complete: bool
    """Whether the step needs no further groups of this kind (dynamic sampling may)."""


class ManifestMember(Wire):
    """A group of the batch and where its rows are."""

    group_id: int
    source: str
    prompt_uid: str
    step: int
    policy_version: int
    correct: int
    size: int
    object_key: str
    object_digest: str
    row_start: int
    row_count: int
    proximal_key: str | None = None
    proximal_digest: str | None = None


class BatchManifest(Wire):
    """The training batch of a step. Not `ready` while groups are missing."""

    ready: bool
    step: int
    members: list[ManifestMember]
    record_proximal: list[ManifestMember] = []
    """Under ratio=decoupled: groups that may be replayed later, whose log-probs under the trainer
    of this step must be stored."""
    r_tot: float = 0.0
    c2: float = 0.0
    c3: float = 0.0
    counts: dict[str, int] = {}
    missing: str = ""


class Commit(Wire):
    metrics: dict[str, float]


class Rewind(Wire):
    step: int = Field(ge=0)


class Manifested(Wire):
    """What a publisher reports: the digest of the manifest it wrote last."""

    manifest_digest: str = Field(pattern=r"^[0-9a-f]{64}$")


class StoredVersion(Wire):
    """A version of the weights, or a checkpoint."""

    number: int
    uri: str
    manifest_digest: str


class ReplicaReport(Wire):
    loaded_version: int


class StepView(Wire):
    step: int
    r_tot: float
    c2: float
    c3: float
    counts: dict[str, int]
    rollouts: int
    tokens: int
    metrics: dict[str, float]
    bins: list[int]
    """Fresh groups by k of G correct."""
    committed_at: datetime


class Evaluation(Wire):
    """Policy version `version` on the held-out prompts."""

    version: int
    mean_accuracy: float
    bins: list[int]
    prompts: int
    tokens: int


class Migration(Wire):
    """Held-out prompts by bin at two versions: rows before, columns after."""

    before: int
    after: int
    matrix: list[list[int]]
    unlocked_fraction: float


class DifficultyView(Wire):
    uid: str
    payload: dict[str, Any]
    attempts: int
    first_mean: float
    last_mean: float
    best_mean: float
    first_solved_step: int | None
    last_step: int
    bin: int


class DifficultyPage(Wire):
    prompts: list[DifficultyView]
    next_after: str | None


class BufferItem(Wire):
    group_id: int
    prompt_uid: str
    step: int
    mean_reward: float
    inserted_step: int
    evicted_step: int | None
    eviction_reason: str | None


class GroupView(Wire):
    """A group and its trajectories."""

    group_id: int
    prompt_uid: str
    payload: dict[str, Any]
    step: int
    kind: str
    policy_version: int
    mean_reward: float
    responses: list[dict[str, Any]]
