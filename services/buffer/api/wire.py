"""The shapes that cross the wire of the buffer service."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

Kind = Literal["fresh", "reevaluation", "evaluation"]
Buffer = Literal["hard", "high_quality"]
Status = Literal["created", "running", "paused", "stopped", "finished", "failed", "deleting"]


RUN_NAME = r"^[a-z][a-z0-9-]{0,62}$"
COMPONENT_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$"
"""Of a replica, the trainer or the collector."""
# Postgres cannot hold a NUL.
Uid = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00]+$")]
MetricName = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00]+$")]
DatasetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]
HEARTBEAT_TIMEOUT_S = 10.0
"""Seconds without a report after which a replica counts as lost."""


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptItem(Wire):
    uid: Uid
    task: str = Field(min_length=1, max_length=100)
    payload: dict[str, Any]


class DatasetUpload(Wire):
    """Prompts of a dataset. Repeating an upload changes nothing; a uid keeps its first payload."""

    first_position: int = Field(ge=0, le=2**53)
    prompts: list[PromptItem] = Field(max_length=10_000)


class DatasetState(Wire):
    dataset: str
    prompts: int


class RunCreate(Wire):
    name: str = Field(pattern=RUN_NAME, examples=["countdown"])
    config: dict[str, Any]
    train_dataset: DatasetName
    test_dataset: DatasetName


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
    tokens: int = 0
    """Of all its responses."""
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
    metrics: dict[MetricName, FiniteFloat] = Field(max_length=1000)


class Rewind(Wire):
    step: int = Field(ge=0, le=2**53)


class ManifestDigest(Wire):
    """What a publisher reports: the digest of the manifest it wrote last."""

    manifest_digest: str = Field(pattern=r"^[0-9a-f]{64}$")


class StoredVersion(Wire):
    """A version of the weights, or a checkpoint."""

    number: int
    uri: str
    manifest_digest: str


ReplicaState = Literal["starting", "downloading", "loading", "serving", "failing"]


class ReplicaReport(Wire):
    """What a rollout replica says of itself."""

    url: str = Field(pattern=r"^https?://[^\s/]+$", max_length=300)
    state: ReplicaState
    detail: str = Field("", max_length=1000)
    """What is wrong, while it is failing."""
    loaded_version: int = Field(ge=0, le=2**53)
    """0 before the first load."""
    manifest_digest: str = Field("", pattern=r"^([0-9a-f]{64})?$")
    prompts_per_request: int = Field(0, ge=0, le=2**31)
    """How many prompts it wants in one request; 0 = as many as there are."""


MAX_SPAN_S = 10 * 366 * 86_400.0


class Span(Wire):
    """Something that a part of a run did for a while."""

    key: str = Field(pattern=r"^[0-9a-f]{32}$")
    """Sent again, it is not counted twice."""
    name: str = Field(pattern=r"^[a-z][a-z_ ]{0,49}$", examples=["update"])
    step: int = Field(ge=0, le=2**53)
    """The trainer's step; of a replica, its policy version."""
    seconds: float = Field(ge=0, le=MAX_SPAN_S)
    ended_ago_s: float = Field(ge=0, le=MAX_SPAN_S)
    """Seconds before it is told: the clocks of machines differ."""


class SpanBatch(Wire):
    component: str = Field(pattern=COMPONENT_NAME, examples=["trainer"])
    spans: list[Span] = Field(max_length=1000)


class TargetWeights(Wire):
    """What the rollout replicas of a run should serve."""

    version: int
    """0 while nothing has been asked for."""
    stored: StoredVersion | None
    """Where it is; null until it is published."""
    newest: StoredVersion | None
    """The last version published, which will be wanted next."""
    tag: str
    """Changes with the answer."""


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


Item = TypeVar("Item")


class Page(Wire, Generic[Item]):
    """Part of a list. `next` is the cursor of the part after it; null at the end."""

    items: list[Item]
    next: str | None = None


class DifficultyBins(Wire):
    """Training prompts by k of G correct at their last attempt, after the commit of `step`."""

    step: int
    bins: list[int]
    unseen: int
    """Prompts not attempted by then."""


class DifficultyMigration(Wire):
    """Training prompts by bin at two steps: rows before, columns after."""

    before: int
    after: int
    matrix: list[list[int]]
    newly_attempted: list[int]
    """Prompts attempted in between for the first time, by their bin after."""
    unlocked: int
    """Prompts at 0 of G before and above it after."""
    unlocked_fraction: float
    """... as a share of those at 0 of G before."""


class DifficultyView(Wire):
    """What a run knows of a training prompt."""

    uid: str
    payload: dict[str, Any]
    attempts: int
    first_mean: float
    last_mean: float
    best_mean: float
    first_solved_step: int | None
    last_step: int
    bin: int


class Attempt(Wire):
    """A group of a prompt."""

    group_id: int
    step: int
    kind: Kind
    policy_version: int
    correct: int
    size: int
    mean_reward: float
    tokens: int
    batches: list[int]
    """The steps whose training batch had it."""


class Stay(Wire):
    """A group's time in a buffer."""

    buffer: Buffer
    group_id: int
    mean_reward: float
    inserted_step: int
    evicted_step: int | None
    eviction_reason: str | None


class PromptHistory(Wire):
    """A prompt of a run: every attempt at it and every stay in a buffer, oldest first."""

    uid: str
    dataset: str
    task: str
    payload: dict[str, Any]
    difficulty: DifficultyView | None
    attempts: list[Attempt]
    stays: list[Stay]


class BufferItem(Wire):
    """An entry of a buffer, as seen after the commit of some step."""

    group_id: int
    prompt_uid: str
    step: int
    policy_version: int
    age: int
    """Steps since the group was made."""
    staleness: int
    """Steps since the policy that made it."""
    mean_reward: float
    inserted_step: int
    evicted_step: int | None
    eviction_reason: str | None


class BufferEvent(Wire):
    """An admission or an eviction, and why."""

    step: int
    event: Literal["admitted", "evicted"]
    reason: str
    group_id: int
    prompt_uid: str
    mean_reward: float


class SourceDecision(Wire):
    """What one of the three sources made of a prompt at a step."""

    source: str
    outcome: Literal["used", "not_used", "not_considered"]
    reason: str
    group_id: int | None = None
    mean_reward: float | None = None


class Decision(Wire):
    """Why a prompt is, or is not, in the training batch of a step."""

    step: int
    uid: str
    used: bool
    source: str | None
    c2: float
    c3: float
    c1: float
    capacity: int
    counts: dict[str, int]
    considered: list[SourceDecision]


class BatchSummary(Wire):
    """The composition of a training batch."""

    step: int
    counts: dict[str, int]
    c2: float
    c3: float
    r_tot: float


class ResponseView(Wire):
    text: str
    reward: float
    finish_reason: str
    token_ids: list[int]
    logprobs: list[float]


class GroupView(Wire):
    """A group and its trajectories."""

    group_id: int
    prompt_uid: str
    payload: dict[str, Any]
    step: int
    kind: str
    policy_version: int
    mean_reward: float
    prompt_token_ids: list[int]
    responses: list[ResponseView]


class WeightView(Wire):
    version: int
    uri: str
    manifest_digest: str
    status: str
    created_at: datetime


class CheckpointView(Wire):
    step: int
    uri: str
    manifest_digest: str
    created_at: datetime
    accuracy: float | None
    """Of the evaluation of these weights, if there was one."""


class SpanView(Wire):
    component: str
    name: str
    step: int
    started_at: datetime
    ended_at: datetime


class ReplicaView(ReplicaReport):
    name: str
    last_seen: datetime
    silent_s: float
    """Seconds since it last said anything."""


class RunComparison(Wire):
    """Two runs side by side."""

    runs: tuple[str, str]
    differing_config: dict[str, tuple[Any, Any]]
    """Keys of the configuration that differ, dotted, with both values."""
    steps: tuple[int, int]
    rollouts: tuple[int, int]
    tokens: tuple[int, int]
    difficulty: tuple[DifficultyBins, DifficultyBins]
    evaluations: list[tuple[int, float | None, float | None]]
    """(policy version, accuracy of the first, of the second), for every version of either."""


Scope = Literal["read", "run", "admin"]


class TokenScope(Wire):
    """What the token of the request may do."""

    scope: Scope


class TokenCreate(Wire):
    name: str = Field(min_length=1, max_length=100, examples=["grafana"])
    scope: Scope


class TokenView(Wire):
    id: int
    name: str
    scope: Scope
    created_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None


class TokenCreated(TokenView):
    token: str
    """Shown this once: only its hash is kept."""


class Readiness(Wire):
    """`ready` is false, and the status 503, while something that every request needs is away."""

    ready: bool
    database: str
    object_store: str


class Garbage(Wire):
    """Objects that no row points to, and how many there are under the runs' prefixes in all."""

    orphans: list[str]
    objects: int
    missing: list[str]
    """Objects that a row points to and that are not there. Must be empty."""
    deleted: int
