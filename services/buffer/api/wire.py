"""Models of the JSON that the buffer service reads and writes.

Every field has a docstring: it is the description in `/docs` and `/openapi.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapSerializer,
    field_validator,
)

from bapo_core.config import ConfigChange, ConfigHistory, RunConfig
from bapo_core.config.evaluation import SetName
from bapo_core.config.messages import explain_validation_error
from bapo_core.config.rollouts import EvaluationMeasure
from bapo_core.errors import ConfigError
from bapo_core.outcomes import Outcome
from bapo_core.reward_files import LARGEST_FILE
from bapo_core.types import Source
from services.common.scopes import Scope

Kind = Literal["fresh", "reevaluation", "evaluation"]
"""Purpose of a rollout: X1, the generation for X2, or an evaluation on the held-out prompts."""


class Rollouts(NamedTuple):
    """Rollouts of one kind for one step, or the evaluation of one version on one set."""

    step: int
    """The step, or the version of an evaluation."""
    kind: Kind
    evaluation_set: str | None = None
    """Name of the set of an evaluation; None is the primary one."""


BufferName = Literal["hard", "high_quality"]
"""The hard buffer (B_bad) or the high-quality buffer (B_high)."""
Order = Literal["stored", "hardest", "most_improved", "unlocked"]
"""Order of a list of prompts."""
Trend = Literal["improving", "worsening", "steady", "forgotten", "never_solved"]
"""Change of a prompt's accuracy since its first attempt."""
Status = Literal[
    "created", "queued", "running", "paused", "stopped", "finished", "failed", "deleting"
]

FinalStatus = Literal["finished", "failed", "stopped"]
ACTIVE_STATUSES: tuple[Status, ...] = ("running", "paused")
"""Statuses of the runs that rollout replicas and collectors work for."""
OPEN_STATUSES: tuple[Status, ...] = ("queued", *ACTIVE_STATUSES)
"""Statuses of the runs that have a place in the queue for the rollout replicas."""
UNFINISHED_STATUSES: tuple[Status, ...] = ("created", *OPEN_STATUSES)
"""Statuses of the runs that their workflow is about to train, or trains."""
RUN_NAME = r"^[a-z][a-z0-9-]{0,62}$"
RUN_NAME_RULE = (
    "a name has lower-case letters, digits and hyphens, begins with a letter, and has at most 63 "
    "characters"
)
"""The rule of `RUN_NAME`, as messages state it."""
COMPONENT_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$"
"""Name of a component of a run: the trainer, the collector, or a rollout replica."""
LONGEST_REASON = 2000
"""Characters of the reason for which a run is stopped."""
HEARTBEAT_TIMEOUT_S = 10.0
"""Seconds without a heartbeat after which a replica counts as unreachable (`silent_s`)."""
# Postgres cannot hold a NUL.
Uid = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00]+$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
MetricName = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00]+$")]
DATASET_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$"
DatasetName = Annotated[str, Field(pattern=DATASET_NAME)]


class Wire(BaseModel):
    """Base of the wire models. Unknown fields are refused; field docstrings are descriptions."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


# ---- datasets and runs --------------------------------------------------------------------------


class PromptItem(Wire):
    """A prompt of a dataset."""

    uid: Uid
    """Identifier of the prompt, unique within its dataset and the same in every run."""
    task: str = Field(min_length=1, max_length=100)
    """Name of the task that renders the prompt and verifies its responses."""
    payload: dict[str, Any]
    """The problem in the task's own format, from which the prompt's text is rendered. Its images,
    if it has any, are the list `images` of {digest, width, height}."""


class ImageDigests(Wire):
    """Names images by the SHA-256 of their files."""

    digests: list[Digest] = Field(max_length=10_000)
    """SHA-256 of each file, 64 hexadecimal digits."""


class RewardFile(Wire):
    """A file of reward functions."""

    text: str = Field(max_length=LARGEST_FILE)
    """The Python file, of at most 1 MiB."""


class DatasetUpload(Wire):
    """Prompts of a dataset. Repeating an upload changes nothing; a uid keeps its first payload."""

    first_position: int = Field(ge=0, le=2**53)
    """Position of the first of these prompts in the dataset, from 0 on."""
    prompts: list[PromptItem] = Field(max_length=10_000)
    """Prompts at consecutive positions."""
    digest: Digest | None = None
    """SHA-256 of all prompts of the dataset, the same in all of its uploads: a dataset with another
    digest, or without one, refuses them. Null declares none."""
    source: str | None = Field(
        default=None,
        max_length=2000,
        pattern=r"^[^\x00]+$",
        examples=["s3://data/sums.jsonl"],
    )
    """Address that the prompts were read from at the first upload."""


class DatasetState(Wire):
    """A dataset without its prompts."""

    dataset: str
    """Name of the dataset."""
    prompts: int
    """Number of prompts that the dataset holds; 0 for a dataset that does not exist."""
    task: str | None = None
    """Task of its first prompt; null for a dataset without prompts."""
    digest: Digest | None = None
    """SHA-256 of all its prompts, as its uploader declared it; null if nothing was declared. While
    an upload is incomplete, the prompts have another digest."""
    source: str | None = None
    """Address that the prompts were read from; null if the uploader did not say."""


class ConfigUpload(Wire):
    """A configuration to store."""

    text: str = Field(max_length=1_000_000, examples=["steps: 120\nmodel: {path: tiny}\n"])
    """The configuration as YAML, as in a file that `bapo run` takes."""


class NamedConfig(Wire):
    """A stored configuration."""

    name: str
    """Name by which pipelines refer to it."""
    text: str
    """The configuration as YAML."""
    stored_at: datetime
    """Time at which it was stored."""


Workflow = Annotated[
    str, Field(max_length=512, pattern=r"^[^\x00]*$", examples=["team/bapo-x7k2p"])
]
"""Argo workflow, as `namespace/name`."""


class RunCreate(Wire):
    """A run to create."""

    name: str = Field(pattern=RUN_NAME, examples=["countdown"])
    """Name of the run, unique in the service."""
    config: dict[str, Any]
    """Configuration of the run. It may be partial: the service lays it over the preset that its
    `algorithm` names, and over the defaults."""
    train_dataset: DatasetName
    """Dataset of the training prompts, uploaded before."""
    test_datasets: dict[SetName, DatasetName]
    """Dataset of the held-out prompts of each evaluation set, uploaded before, by the set's name:
    each of `evaluation.sets`, or `test` without any."""
    workflow: Workflow | None = None
    """Argo workflow that is about to train the run."""


class RunPatch(Wire):
    """How a run ended."""

    status: FinalStatus
    """Final status of the run; stopped if a person interrupted it, or for the given reason."""
    by: str | None = Field(default=None, max_length=512, pattern=r"^[^\x00]*$")
    """Which process stops the run; null if it is not to be recorded."""
    reason: str | None = Field(default=None, max_length=LONGEST_REASON, pattern=r"^[^\x00]*$")
    """Why it is stopped."""


class WorkflowClaim(Wire):
    """The workflow of a request that only the workflow of the run may make.

    A run that is created, queued, running or paused is refused to any other workflow than its own.
    """

    workflow: Workflow | None = None
    """Argo workflow that asks, as `namespace/name`; null outside a cluster."""
    instead_of: Workflow | None = None
    """Workflow from which the asking one takes the run over, because it has ended."""


class TurnRequest(WorkflowClaim):
    """A pipeline's request to train its run."""

    reopen: bool = False
    """Whether to continue a run that was stopped or has failed, instead of refusing it."""


class StopRequest(Wire):
    """Who stops a run, and why."""

    by: str | None = Field(default=None, max_length=512, pattern=r"^[^\x00]*$")
    """Who stops it; the name of the request's token if not given."""
    reason: str | None = Field(default=None, max_length=LONGEST_REASON, pattern=r"^[^\x00]*$")
    """Why it is stopped."""
    workflow: Workflow | None = None
    """Stop the run only if this workflow trains it, and answer 409 otherwise."""


class Stop(Wire):
    """How a run was stopped."""

    by: str
    """Who stopped it."""
    reason: str | None
    """Why it was stopped; null if nobody said so."""
    at: datetime
    """When it was stopped."""

    def describe(self) -> str:
        """Returns who stopped it, and why if that was said."""
        return f"{self.by}: {self.reason}" if self.reason else self.by


class ChangeRequest(WorkflowClaim):
    """Keys of a run's configuration that get other values."""

    values: dict[str, Any] = Field(
        min_length=1, max_length=100, examples=[{"steps": 400, "optimizer.learning_rate": 5e-7}]
    )
    """New values by dotted key."""
    by: str | None = Field(default=None, max_length=512, pattern=r"^[^\x00]*$")
    """Who changes them; the name of the request's token if not given."""


class RecordedChange(ConfigChange):
    """A change of a run's configuration, which every step from its first one on is trained with."""

    attempt: int
    """Fencing number that the change began."""
    by: str
    """Who made it."""
    at: datetime
    """When it was made."""
    digest: Digest
    """SHA-256 of the change before, or of the initial configuration, and of this change."""


class Turn(Wire):
    """Whether a run may train now. The rollout replicas of a release work for one run at a time."""

    granted: bool
    """Whether the run may train, or has finished."""
    in_front: str | None = None
    """Name of the run that has to end first; null when the turn is granted."""
    current_step: int | None = None
    """Last committed step of the run in front."""
    steps: int | None = None
    """Number of training steps of the run in front."""


class UnreadableConfig:
    """A stored configuration that this version cannot read: using it raises `ConfigError`.

    It stands for the configuration, so that the run can still be listed, stopped and deleted.
    """

    def __init__(self, stored: Any, error: ConfigError) -> None:
        """Initialises it with the stored values, and the error that a use raises."""
        self.stored, self.error = stored, error

    def __eq__(self, other: object) -> bool:
        """Compares the stored values, so that a run that did not change equals itself."""
        return isinstance(other, UnreadableConfig) and self.stored == other.stored

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks objects for what they may lack.
            raise AttributeError(name)
        raise self.error


def _serialize_config(config: Any, serialize: SerializerFunctionWrapHandler) -> Any:
    # The service sends a stored configuration as it is, without validating it.
    if isinstance(config, UnreadableConfig):
        return config.stored
    return config if isinstance(config, dict) else serialize(config)


# A lambda, because a return type would become the schema.
StoredConfig = Annotated[
    RunConfig, WrapSerializer(lambda config, serialize: _serialize_config(config, serialize))
]


class ForkOrigin(Wire):
    """The run, and its step, that another run is a fork of."""

    run: str
    """Name of the run whose steps up to `step` are the fork's past."""
    step: int
    """Last step that both runs share."""
    checkpoint: int
    """Step of the checkpoint that the fork began with; 0 is the initial model. The steps after it,
    up to `step`, were trained again on their recorded batches."""
    rollouts_until: int | None = None
    """Last step that is trained on groups of `run`, in place of rollouts of its own; null if the
    fork rolls out all steps after `step`."""

    def describe(self) -> str:
        """Returns the run and the step, and the steps with its rollouts."""
        origin = f"{self.run} at step {self.step}"
        if self.rollouts_until is None:
            return origin
        return f"{origin}, on its rollouts to step {self.rollouts_until}"

    def was_trained_again(self, step: int) -> bool:
        """Whether a step is the last one of a fork's past, and was trained again when the fork
        began: a machine that sums in another order gives it other weights than the parent has."""
        return self.checkpoint < self.step == step


class ForkRequest(Wire):
    """A new run that shares the past of another run."""

    name: str = Field(pattern=RUN_NAME)
    """Name of the new run."""
    step: int = Field(ge=0)
    """Last step of the past; 0 shares the prompts alone."""
    rollouts_until: int | None = Field(None, ge=1)
    """Last step that is trained on the recorded groups of the run, in place of rollouts: batches
    are composed of them by the fork's own rules. Null rolls out all steps after `step`."""
    values: dict[str, Any] = {}
    """Values of the configuration that are others from the next step on, by section as in a file.
    If they name an algorithm, the values of its preset hold where the run had its own preset's."""
    workflow: Workflow | None = None
    """Argo workflow that is about to train the new run."""


class RunState(Wire):
    """A run: its configuration, its status, and how far it has come."""

    name: str
    """Name of the run."""
    status: str
    """created, queued, running, paused, stopped, finished, failed or deleting."""
    config: StoredConfig
    """The whole configuration, with its preset, its defaults and all changes."""
    changes: list[RecordedChange] = []
    """Changes of the configuration since the run was created, in the order in which they were
    made."""
    train_dataset: str
    """Dataset of the training prompts."""
    test_datasets: dict[str, str]
    """Dataset of the held-out prompts of each evaluation set, by the set's name."""
    current_step: int
    """Last committed step; 0 before the first."""
    attempt: int
    """Fencing number: increases when an attempt begins, when the configuration is changed, and when
    the run is stopped or deleted; 0 before the first attempt."""
    attempt_began_at: datetime | None = None
    """When the last attempt began; null before the first one, and where it was not recorded."""
    created_at: datetime
    """Time at which the run was created."""
    workflow: str | None = None
    """Argo workflow that trains the run, as `namespace/name`; null outside a cluster."""
    stopped: Stop | None = None
    """Who stopped the run, and why; null unless it is stopped, and where that was not recorded."""
    forked_from: ForkOrigin | None = None
    """The run and the step that this run was forked from; null for a run that began at step 1."""

    @field_validator("config", mode="wrap")
    @classmethod
    def _explain_invalid_config(
        cls, config: Any, validate: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> Any:
        """Returns an `UnreadableConfig` for a configuration that this version cannot read."""
        try:
            return validate(config)
        except ValidationError as error:
            name = info.data.get("name")
            explanation = explain_validation_error(error, config)
            unreadable = ConfigError(
                f"run {name!r} has a stored configuration that cannot be read here: {explanation}; "
                "install the package again that the run needs, continue it with the version of "
                f"bapo that created it, or delete it with `bapo delete {name}`"
            )
            unreadable.__cause__ = error
            return UnreadableConfig(config, unreadable)

    @property
    def history(self) -> ConfigHistory:
        """The configuration at each step."""
        return ConfigHistory(self.config, self.changes)

    @property
    def steps(self) -> int | None:
        """The number of training steps; None if the configuration cannot be read."""
        config: Any = self.config
        return None if isinstance(config, UnreadableConfig) else self.config.steps


# ---- the step protocol --------------------------------------------------------------------------


class StepPrompts(Wire):
    """The prompts of a step. Not `ready` while they depend on a step not committed yet, on weights
    that a rewind set aside, or, with dynamic sampling, on a step that lacks fresh groups."""

    ready: bool
    """Whether the prompts can be rolled out; false while the run is paused, too."""
    policy_version: int
    """Policy version that must generate the responses."""
    prompts: list[PromptItem]
    """Prompts to roll out, in the order in which they were drawn; empty while not ready."""
    recorded: list[Uid] = []
    """Those of the prompts whose groups the service has already."""
    complete: bool = False
    """Whether the service has all groups of this step and kind already."""


class GroupsAccepted(Wire):
    """Counts the groups of a request that were recorded and those that were known already."""

    accepted: int
    """Number of groups recorded by this call."""
    duplicates: int
    """Number of groups that were recorded before and are left as they are."""
    complete: bool
    """Whether the step needs no further groups of this kind. Dynamic sampling may need several
    generation rounds of fresh ones."""


class ManifestMember(Wire):
    """A group of a training batch, and where its rows are in the object store."""

    group_id: int
    """Identifier of the group, unique in the service."""
    source: str
    """fresh (X1), reevaluated (X2) or replayed (X3) for a member of a batch; otherwise the kind of
    the rollout, fresh or reevaluation."""
    prompt_uid: str
    """Identifier of the prompt."""
    step: int
    """Training step at which the group was generated."""
    policy_version: int
    """Policy version that generated the group."""
    correct: int
    """k: number of correct responses, from 0 to `size`."""
    size: int
    """G: number of responses."""
    object_key: str
    """Key of the Arrow file in the object store."""
    object_digest: str
    """SHA-256 of the Arrow file, 64 hexadecimal digits."""
    row_start: int
    """Index of the group's first row in the Arrow file, from 0 on."""
    row_count: int
    """Number of the group's rows in the Arrow file, one for each response."""
    tokens: int = 0
    """Number of response tokens of all responses together."""
    proximal_key: str | None = None
    """Key of the file with the trainer's log-probs at the storage step; null unless
    `loss.correction` is decoupled and the group may be replayed."""
    proximal_digest: str | None = None
    """SHA-256 of the file at `proximal_key`; null without one."""
    images: list[str] = []
    """Digests of the prompt's images, in their order; empty for a prompt without images."""
    rows: list[int] | None = None
    """Indexes of the responses that are in the batch, ascending from 0 on; null for all."""
    joins_previous: bool = False
    """Whether the responses are compared with those of the member before, for their advantages;
    otherwise the member begins a group of its own."""
    demonstration: str | None = None
    """Text of the prompt's demonstration, which joins these responses as the last one, in place of
    the first; null for none."""

    @property
    def response_count(self) -> int:
        """Number of responses that are in the batch, with the demonstration."""
        sampled = self.row_count if self.rows is None else len(self.rows)
        return sampled + (self.demonstration is not None)


class BatchManifest(Wire):
    """The training batch of a step. Not `ready` while groups are missing."""

    ready: bool
    """Whether the batch has been built."""
    step: int
    """Training step of the batch."""
    members: list[ManifestMember]
    """Groups of the batch, fresh ones first, then re-evaluated, then replayed ones."""
    supervised: list[ManifestMember] = []
    """Demonstrations of unsolved prompts for a supervised update after the others
    (`demonstrations.supervise_every`); their sampled responses are not in it. Empty if none is
    due."""
    record_proximal: list[ManifestMember] = []
    """Groups that may be replayed later and whose log-probs under the trainer of this step must be
    stored; empty unless `loss.correction` is decoupled."""
    r_tot: float = 0.0
    """r_tot of Eq. 8: the accuracy that moves the replay window, from 0 to 1."""
    c2: float = 0.0
    """c2: lower bound of the replay window of accuracies, from 0 to 1."""
    c3: float = 0.0
    """c3: upper bound of the replay window of accuracies, from 0 to 1."""
    counts: dict[str, int] = {}
    """Number of groups by source (fresh, reevaluated, replayed), and of all groups generated
    before filter and promotion (rolled_out, of which `mixed` have rewards that differ, and
    reevaluated_total); empty while not ready."""
    missing: str = ""
    """Describes the groups that are still missing; empty once the batch is ready."""


class StepDigests(Wire):
    """Digests of a step's inputs, code and result, which allow it to be verified later."""

    weights_before: Digest
    """Digest of all trained weights before the step."""
    batch: Digest
    """Digest of the batch's tokens, log-probs and rewards, in the order of the manifest."""
    weights_after: Digest
    """Digest of all trained weights after the step."""
    code: str = Field(max_length=200)
    """Version of bapo and digest of the sources that compute a step."""
    processes: int = Field(ge=1, le=2**31)
    """Number of the trainer's processes, which determines the order of summation."""
    platform: str = Field(max_length=200)
    """Device and version of PyTorch."""


class ChainLink(StepDigests):
    """A link of the digest chain of a run."""

    chain: Digest
    """SHA-256 of the link before, the step, its digests but the platform, and the configuration."""


class Commit(Wire):
    """The trainer's record of a step."""

    metrics: dict[MetricName, FiniteFloat] = Field(max_length=1000)
    """Metrics of the step by name, such as `loss`."""
    digests: StepDigests | None = None
    """Digests of the step's inputs, code and result; null leaves a gap in the digest chain."""


class Rewind(Wire):
    """The step to go back to."""

    step: int = Field(ge=0, le=2**53)
    """Last step to keep; 0 undoes all steps."""


# ---- weights, checkpoints, replicas, spans ------------------------------------------------------


class ManifestDigest(Wire):
    """The digest of the manifest that a publisher has written last."""

    manifest_digest: Digest
    """SHA-256 of the manifest, 64 hexadecimal digits."""


class StoredVersion(Wire):
    """A policy version or a checkpoint in the object store."""

    number: int
    """Policy version of weights; step of a checkpoint."""
    uri: str
    """Prefix of the files in the object store."""
    manifest_digest: str
    """SHA-256 of the manifest, which holds the SHA-256 of every file."""


REPLICA_URL = r"^https?://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?$"
"""An address that is a host and a port, without what programs read differently."""
ReplicaState = Literal["starting", "downloading", "loading", "serving", "failing"]


class ReplicaReport(Wire):
    """The state of a rollout replica, as it describes it itself."""

    url: str = Field(pattern=REPLICA_URL, max_length=300)
    """Address at which the replica accepts generation requests."""
    state: ReplicaState
    """Present state of the replica."""
    detail: str = Field("", max_length=1000)
    """Reason of the failure while `state` is failing; otherwise empty."""
    loaded_version: int = Field(ge=0, le=2**53)
    """Policy version that the engine has loaded; 0 before the first."""
    manifest_digest: str = Field("", pattern=r"^([0-9a-f]{64})?$")
    """Manifest digest of the loaded weights; empty before the first."""
    prompts_per_request: int = Field(0, ge=0, le=2**31)
    """Largest number of prompts to send in one request; 0 = no limit."""


class ReplicaHeartbeat(ReplicaReport):
    """What a rollout replica reports every two seconds."""

    credential: str = Field("", max_length=100, pattern=r"^[\w-]*$")
    """Bearer token that its callers must send, which its process has made up."""


MAX_SPAN_S = 10 * 366 * 86_400.0


class Span(Wire):
    """A period during which a component of a run worked on one thing."""

    key: str = Field(pattern=r"^[0-9a-f]{32}$")
    """Random dedup key: a span that is sent again is recorded once."""
    name: str = Field(pattern=r"^[a-z][a-z_ ]{0,49}$", examples=["update"])
    """Name of the work, such as wait, update, generate or load."""
    step: int = Field(ge=0, le=2**53)
    """Training step; for a replica, its policy version."""
    seconds: float = Field(ge=0, le=MAX_SPAN_S)
    """Duration in seconds."""
    ended_ago_s: float = Field(ge=0, le=MAX_SPAN_S)
    """Seconds from the span's end to this request. Relative, because clocks of machines differ."""


class SpanBatch(Wire):
    """Spans of one component."""

    component: str = Field(pattern=COMPONENT_NAME, examples=["trainer"])
    """trainer, collector, or the name of a replica."""
    spans: list[Span] = Field(max_length=1000)
    """Spans that have ended, in any order."""


class TargetWeights(Wire):
    """The weights that the rollout replicas of a run should serve."""

    version: int
    """Target policy version; 0 before the first prompts are handed out."""
    stored: StoredVersion | None
    """Files of the target version; null until it is published."""
    newest: StoredVersion | None
    """Newest published version, which is usually the next target; null before the first."""
    tag: str
    """Opaque value that changes whenever another field does; pass it as `known` to wait for a
    change."""


# ---- queries ------------------------------------------------------------------------------------


class StepView(Wire):
    """A committed step."""

    step: int
    """Training step, from 1 on."""
    r_tot: float
    """r_tot of Eq. 8: the accuracy that moves the replay window, from 0 to 1."""
    c2: float
    """c2: lower bound of the replay window of accuracies, from 0 to 1."""
    c3: float
    """c3: upper bound of the replay window of accuracies, from 0 to 1."""
    counts: dict[str, int]
    """Number of groups in the batch by source (fresh, reevaluated, replayed), and of all groups
    generated before filter and promotion (rolled_out, of which `mixed` have rewards that differ,
    and reevaluated_total)."""
    rollouts: int
    """Number of training responses generated at this step, filtered ones included."""
    tokens: int
    """Number of tokens of these responses."""
    metrics: dict[str, float]
    """The trainer's metrics of the step by name."""
    bins: list[int]
    """Number of fresh groups by correct responses. It has G + 1 entries: index k = groups with k
    of G correct."""
    mean_reward: float
    """Mean reward of the fresh groups, any number; the accuracy while rewards are 0 or 1."""
    reward_parts: dict[str, float]
    """Mean of each part of their reward by name, without weights."""
    committed_at: datetime
    """Time of the commit."""
    digests: ChainLink | None = None
    """The step's link of the digest chain; null if the trainer sent none."""

    @property
    def mixed(self) -> int:
        """Number of fresh groups whose rewards differ, before any filter.

        Of steps of versions before 0.3, it is the number with correct and wrong responses.
        """
        return self.counts.get("mixed", sum(self.bins[1:-1]))

    @property
    def trained(self) -> bool:
        """Whether the step's batch had any group."""
        return any(self.counts.get(source.value, 0) for source in Source)

    @property
    def accuracy(self) -> float:
        """Accuracy of the step's fresh groups, before any filter; 0 without groups.

        It is r_tot only where `replay.window.r_tot` is `batch`.
        """
        return accuracy(self.bins)


def accuracy(bins: Sequence[int]) -> float:
    """Returns the accuracy of groups by their bins, k of G correct for k = 0..G; 0 of none."""
    responses = (len(bins) - 1) * sum(bins)
    correct = sum(k * groups for k, groups in enumerate(bins))
    return correct / responses if responses else 0.0


class RolloutProgress(Wire):
    """How many groups of one kind are recorded, and for how many a run waits."""

    kind: Kind
    """Purpose of the rollouts: fresh, reevaluation or evaluation."""
    step: int
    """Training step; for an evaluation, the policy version."""
    evaluation_set: str | None = None
    """Name of the set of an evaluation; null for other kinds."""
    groups: int
    """Number of groups that are recorded."""
    expected: int
    """Number of groups that complete them. Dynamic sampling may begin further generation rounds of
    fresh groups, which raises it."""


class RunProgress(Wire):
    """What a run works at, between two commits."""

    step: int
    """The step after the last committed one; `steps` + 1 once all are committed."""
    has_batch: bool
    """Whether the batch of this step is built, so that the trainer trains on it."""
    newest_version: int
    """Newest published policy version; 0 before the initial weights are published."""
    rollouts: list[RolloutProgress]
    """Groups of this step, until its batch is built; then the evaluations of policy versions up to
    `step` that are not complete, the oldest first."""

    @property
    def open_evaluations(self) -> list[Rollouts]:
        """The evaluations that are not complete."""
        return [
            Rollouts(rollouts.step, rollouts.kind, rollouts.evaluation_set)
            for rollouts in self.rollouts
            if rollouts.kind == "evaluation"
        ]


class Score(Wire):
    """A metric of an evaluation: its mean over the prompts, with a 95% confidence interval."""

    metric: Literal["mean", "pass", "maj"]
    """mean@k: share of correct responses; pass@k: probability that k responses include a correct
    one; maj@k: share of blocks of k responses whose most frequent answer is correct."""
    k: int
    """Number of responses that the metric takes."""
    value: float
    """Mean over the prompts, from 0 to 1."""
    low: float
    """Lower end of the interval, mean - 1.96 s / sqrt(N) with the sample standard deviation s of
    the values of N prompts, at least 0."""
    high: float
    """Upper end of the interval, at most 1."""


class Evaluation(Wire):
    """The accuracy of a policy version on an evaluation set."""

    version: int
    """Policy version; version t holds the weights after t - 1 steps, 1 is the initial model."""
    evaluation_set: str
    """Name of the evaluation set."""
    mean_accuracy: float
    """Share of correct responses over all prompts of the set, from 0 to 1."""
    mean_reward: float
    """Mean reward of all responses, any number; the accuracy while rewards are 0 or 1."""
    bins: list[int]
    """Number of prompts by correct responses. It has n + 1 entries for n responses per prompt
    (`evaluation.samples`): index k = prompts with k of n correct."""
    prompts: int
    """Number of prompts of the set."""
    tokens: int
    """Number of tokens of all responses."""
    scores: list[Score]
    """mean@n, then pass@k and maj@k for k = 2, 4, 8, ... and n; no maj@k if no response has
    an answer, and for evaluations of an older version, which did not record answers."""

    @property
    def samples(self) -> int:
        """n, the number of responses to each prompt."""
        return len(self.bins) - 1


class EvaluationSetView(Wire):
    """An evaluation set of a run, and every evaluation on it."""

    name: str
    """Name of the set."""
    primary: bool
    """Whether the set stands for the run in lists and comparisons, and selects checkpoints."""
    dataset: str
    """Dataset of its prompts."""
    samples: int
    """Responses sampled for each prompt."""
    temperature: float
    """Sampling temperature."""
    top_p: float
    """Nucleus sampling; 1 is off."""
    every: int
    """Steps between two evaluations."""
    evaluations: list[Evaluation]
    """Every complete evaluation, by policy version."""


class Migration(Wire):
    """How the prompts of a set moved between bins from one policy version to another."""

    before: int
    """Earlier policy version."""
    after: int
    """Later policy version."""
    matrix: list[list[int]]
    """Number of prompts by bin at `before` (row) and at `after` (column); n + 1 rows and columns
    for n responses per prompt."""
    unlocked_fraction: float
    """Share of the prompts with 0 correct at `before` that have some correct at `after`, from 0
    to 1; 0 when there were none."""


Item = TypeVar("Item")


class Page(Wire, Generic[Item]):
    """A page of a list."""

    items: list[Item]
    """Items of this page, in the order of the list."""
    next: str | None = None
    """Cursor of the next page; null on the last one."""


class DifficultyBins(Wire):
    """Training prompts by correct responses in their last group, after the commit of a step."""

    step: int
    """Committed step; 0 = before the first."""
    bins: list[int]
    """Number of attempted prompts by correct responses. It has G + 1 entries: index k = prompts
    with k of G correct."""
    unseen: int
    """Number of prompts that had not been attempted by then."""


class DifficultyMigration(Wire):
    """How the training prompts moved between bins from one step to another."""

    before: int
    """Earlier step."""
    after: int
    """Later step."""
    matrix: list[list[int]]
    """Number of prompts by bin at `before` (row) and at `after` (column), of those attempted by
    then; G + 1 rows and columns."""
    newly_attempted: list[int]
    """Number of prompts first attempted between the two steps, by their bin at `after`; G + 1
    entries."""
    unlocked: int
    """Number of prompts with 0 of G correct at `before` and some correct at `after`."""
    unlocked_fraction: float
    """`unlocked` as a share of the prompts with 0 of G correct at `before`, from 0 to 1; 0 when
    there were none."""


class DifficultyView(Wire):
    """Difficulty of a training prompt, from the run's attempts at it."""

    uid: str
    """Identifier of the prompt."""
    payload: dict[str, Any]
    """The problem in the task's own format."""
    attempts: int
    """Number of groups generated for the prompt, fresh and re-evaluated."""
    first_mean: float
    """Accuracy of the first group, from 0 to 1."""
    last_mean: float
    """Accuracy of the last group, from 0 to 1."""
    best_mean: float
    """Largest accuracy of any group, from 0 to 1."""
    first_solved_step: int | None
    """First step with a correct response; null until there is one."""
    last_step: int
    """Step of the last group."""
    bin: int
    """k of G correct in the last group, from 0 to G."""


class PromptAttempt(Wire):
    """A group that was generated for a prompt."""

    group_id: int
    """Identifier of the group."""
    step: int
    """Training step at which the group was generated; for an evaluation, the policy version."""
    kind: Kind
    """Purpose of the rollout: fresh, reevaluation or evaluation."""
    policy_version: int
    """Policy version that generated the group."""
    correct: int
    """k: number of correct responses, from 0 to `size`."""
    size: int
    """Number of responses: G, or `evaluation.samples`."""
    accuracy: float
    """k / G, from 0 to 1."""
    mean_reward: float
    """Mean reward of the responses, any number; the accuracy while rewards are 0 or 1."""
    reward_parts: dict[str, float]
    """Mean of each part of the reward by name, without weights: `answer`, which is the verdict's
    own reward, the task's further parts, and `overlong`."""
    tokens: int
    """Number of response tokens of all responses together."""
    batches: list[int]
    """Steps whose training batch has the group; several if it was replayed."""


class Residency(Wire):
    """The time of a group in a buffer."""

    buffer: BufferName
    """hard (B_bad) or high_quality (B_high)."""
    group_id: int
    """Identifier of the group."""
    accuracy: float
    """Accuracy of the group, from 0 to 1."""
    inserted_step: int
    """Step after whose update the group was inserted."""
    evicted_step: int | None
    """Step after whose update the group was evicted; null while it is in the buffer."""
    eviction_reason: str | None
    """capacity, expired, replaced or solved; null while it is in the buffer."""


class PromptPosterior(Wire):
    """Beta(a, b), the distribution of a prompt's probability of a correct response."""

    as_of_step: int
    """Step whose commit it includes; 0 for none but the results of `sampler.prior_run`."""
    a: float
    """a: 1 plus the correct responses of the prompt's fresh groups, weighted by `sampler.decay`."""
    b: float
    """b: 1 plus the wrong responses of the same groups, with the same weights."""
    mean: float
    """a / (a + b): estimated probability of a correct response, from 0 to 1."""


class PromptDraw(PromptPosterior):
    """How an adaptive sampler decided on a prompt at a step, by its posterior at that time."""

    sampler: str
    """The run's `sampler.kind`."""
    drawn: bool = False
    """Whether the step draws the prompt."""
    candidates: int
    """Number of candidates of a generation round, drawn uniformly from the dataset."""
    prompts_per_round: int
    """Number of candidates that are rolled out, from the first rank on."""
    generation_round: int | None = None
    """Generation round, from 0, that drew the prompt or that it was a candidate of; null if it was
    of none."""
    rank: int | None = None
    """Rank of the prompt among the candidates, from 1; null if it was no candidate."""
    draw: float | None = None
    """Number that candidates are ranked by: with mopps the Thompson draw g, whose distance from
    `sampler.target` counts; with dots the log-weight plus Gumbel noise, largest first."""
    reason: str
    """Explanation of the rank, or of why the prompt was no candidate, with the values."""


class PromptHistory(Wire):
    """Every group generated for a prompt and its time in the buffers, oldest first."""

    uid: str
    """Identifier of the prompt."""
    dataset: str
    """Dataset of the prompt."""
    task: str
    """Name of the task."""
    payload: dict[str, Any]
    """The problem in the task's own format."""
    difficulty: DifficultyView | None
    """Difficulty as of the last commit; null for held-out prompts and before the first attempt."""
    posterior: PromptPosterior | None = None
    """Posterior as of the last commit; null with `sampler.kind: uniform` and for held-out
    prompts."""
    attempts: list[PromptAttempt]
    """Groups generated for the prompt."""
    stays: list[Residency]
    """Times of these groups in the hard and in the high-quality buffer."""


class BufferItem(Wire):
    """An entry of a buffer after the commit of some step t."""

    group_id: int
    """Identifier of the group."""
    prompt_uid: str
    """Identifier of the prompt."""
    step: int
    """Training step at which the group was generated."""
    policy_version: int
    """Policy version that generated the group."""
    age: int
    """Steps from the generation of the group to t."""
    staleness: int
    """t minus the policy version that generated the group, in steps."""
    accuracy: float
    """Accuracy of the group, from 0 to 1."""
    inserted_step: int
    """Step after whose update the group was inserted."""
    evicted_step: int | None
    """Step after whose update the group was evicted, later than t; null while it is in the
    buffer."""
    eviction_reason: str | None
    """capacity, expired, replaced or solved; null while it is in the buffer."""


class BufferSummary(Wire):
    """How much a buffer holds after the commit of some step t, and how old that is."""

    buffer: BufferName
    """hard or high_quality."""
    step: int
    """t."""
    entries: int
    """Number of groups in the buffer."""
    capacity: int
    """Largest number of groups that it holds."""
    mean_accuracy: float | None
    """Mean accuracy of the groups, from 0 to 1; null for an empty buffer, as are the others
    below."""
    mean_age: float | None
    """Mean number of steps from the generation of a group to t."""
    max_age: int | None
    """Age of the oldest group, in steps."""
    mean_staleness: float | None
    """Mean of t minus the policy version that generated a group, in steps."""
    max_staleness: int | None
    """Largest staleness of a group, in steps."""


class BufferEvent(Wire):
    """An admission to a buffer or an eviction from it."""

    step: int
    """Step after whose update it happened."""
    event: Literal["admitted", "evicted"]
    """Whether the group was admitted or evicted."""
    reason: str
    """Rule that admitted the group; for an eviction capacity, expired, replaced or solved."""
    group_id: int
    """Identifier of the group."""
    prompt_uid: str
    """Identifier of the prompt."""
    accuracy: float
    """Accuracy of the group, from 0 to 1."""


class SourceDecision(Wire):
    """How one source of the batch decided on a prompt at a step."""

    source: str
    """fresh (X1), reevaluated (X2) or replayed (X3)."""
    outcome: Literal["used", "not_used", "not_considered"]
    """Whether the source put the prompt into the batch; not_considered = it had no group of it."""
    reason: str
    """Explanation of the outcome, with the values and the limits that it rests on."""
    group_id: int | None = None
    """Group that the source considered; null without one."""
    accuracy: float | None = None
    """Accuracy of that group, from 0 to 1; null without one."""


class Decision(Wire):
    """Why a prompt is, or is not, in the training batch of a step."""

    step: int
    """Training step of the batch."""
    uid: str
    """Identifier of the prompt."""
    used: bool
    """Whether the prompt is in the batch."""
    source: str | None
    """Source that put the prompt into the batch: fresh, reevaluated or replayed; null if none."""
    c2: float
    """c2: lower bound of the replay window of accuracies at this step."""
    c3: float
    """c3: upper bound of the replay window of accuracies at this step."""
    c1: float
    """c1: groups with at most this accuracy enter the hard buffer."""
    capacity: int
    """Largest number of groups in a batch."""
    counts: dict[str, int]
    """Number of groups in the batch by source (fresh, reevaluated, replayed), and of all groups
    generated before filter and promotion (rolled_out, of which `mixed` have rewards that differ,
    and reevaluated_total)."""
    considered: list[SourceDecision]
    """Decisions of X1, X2 and X3, in this order."""
    draw: PromptDraw | None = None
    """Draw of the step's fresh prompts; null with `sampler.kind: uniform` and for held-out
    prompts."""


class BatchSummary(Wire):
    """The composition of a training batch."""

    step: int
    """Training step of the batch."""
    counts: dict[str, int]
    """Number of groups in the batch by source (fresh, reevaluated, replayed), and of all groups
    generated before filter and promotion (rolled_out, of which `mixed` have rewards that differ,
    and reevaluated_total)."""
    c2: float
    """c2: lower bound of the replay window of accuracies, from 0 to 1."""
    c3: float
    """c3: upper bound of the replay window of accuracies, from 0 to 1."""
    r_tot: float
    """r_tot of Eq. 8: the accuracy that moves the replay window, from 0 to 1."""


class Response(Wire):
    """A response and its verdict, without its tokens."""

    text: str
    """Decoded text of the response."""
    reward: float
    """Reward with which the response is trained, any number."""
    correct: bool
    """Whether the response counts as correct for the difficulty of its prompt."""
    reward_parts: dict[str, float]
    """Parts of the reward by name, without weights."""
    finish_reason: str
    """stop, or length when the response was cut at its largest number of tokens."""
    outcome: Outcome
    """What happened to the response: scored, or timed_out or crashed, which count as wrong
    answers."""
    status: str | None
    """The verifier's status, such as ok, no_answer or wrong_value; null for responses of an older
    version, which did not record it."""
    extracted: str | None
    """The answer that the verifier read in the response; null if it read none, or if `status` is
    null."""
    failure: str | None
    """Why the reward function gave no verdict, such as the exception that it raised; null if it
    gave one, or if `status` is null."""


class ResponseView(Response):
    """A response of a group."""

    token_ids: list[int]
    """Token ids of the response, without the prompt's."""
    tokens: list[str] | None = None
    """Text of each token, if it was asked for; bytes of a part of a character as in `<0xE2>`. null
    while the tokenizer is not known: before the first version of the weights is published, and for
    models without a tokenizer.json."""
    logprobs: list[float]
    """Log-probs of the tokens under the policy that sampled them, one for each token."""
    interruptions: dict[int, int]
    """Where other weights went on with the response (sync.interrupt_rollouts): the index of the
    first token that each of them sampled, and their policy version."""
    repeated: dict[str, int]
    """How often it was sampled or scored again, by the outcome that was the cause."""


class ListedResponse(Response):
    """A response in a list of responses of several groups."""

    group_id: int
    """Identifier of its group."""
    index: int
    """Index in its group, from 0."""
    prompt_uid: str
    """Identifier of the prompt."""
    payload: dict[str, Any]
    """The problem in the task's own format."""
    kind: Kind
    """Purpose of the rollout: fresh, reevaluation or evaluation."""
    step: int
    """Training step at which the group was generated; for an evaluation, the policy version."""
    policy_version: int
    """Policy version that generated the group."""
    tokens: int
    """Number of its tokens."""


class GroupView(Wire):
    """A group with its trajectories."""

    group_id: int
    """Identifier of the group."""
    prompt_uid: str
    """Identifier of the prompt."""
    payload: dict[str, Any]
    """The problem in the task's own format."""
    step: int
    """Training step at which the group was generated; for an evaluation, the policy version."""
    kind: str
    """Purpose of the rollout: fresh, reevaluation or evaluation."""
    policy_version: int
    """Policy version that generated the group."""
    accuracy: float
    """Accuracy of the group, from 0 to 1."""
    mean_reward: float
    """Mean reward of the responses, any number; the accuracy while rewards are 0 or 1."""
    reward_parts: dict[str, float]
    """Mean of each part of the reward by name, without weights: `answer`, which is the verdict's
    own reward, the task's further parts, and `overlong`."""
    prompt_token_ids: list[int]
    """Token ids of the rendered prompt."""
    responses: list[ResponseView]
    """The G responses, in the order in which they were sampled."""


class WeightView(Wire):
    """A policy version that was published."""

    version: int
    """Policy version; version t holds the weights after t - 1 steps, 1 is the initial model."""
    uri: str
    """Prefix of the files in the object store."""
    manifest_digest: str
    """SHA-256 of the manifest, 64 hexadecimal digits."""
    status: str
    """published; set_aside from a rewind until the trainer publishes the version again; pruned once
    its files have been deleted."""
    created_at: datetime
    """Time of the publication."""


class CheckpointView(Wire):
    """A checkpoint of the trainer."""

    step: int
    """Step after which the checkpoint was written."""
    uri: str
    """Prefix of the files in the object store."""
    manifest_digest: str
    """SHA-256 of the manifest, 64 hexadecimal digits."""
    created_at: datetime
    """Time at which the checkpoint was recorded."""
    accuracy: float | None
    """Mean accuracy of these weights on the held-out prompts, from 0 to 1; null if they were not
    evaluated."""
    reward: float | None = None
    """Mean reward of their responses to the held-out prompts; null if they were not evaluated."""


class SpanView(Wire):
    """A span by the database's clock."""

    component: str
    """trainer, collector, or the name of a replica."""
    name: str
    """Name of the work, such as wait, update, generate or load."""
    step: int
    """Training step; for a replica, its policy version."""
    started_at: datetime
    """Time of the span's beginning."""
    ended_at: datetime
    """Time of the span's end."""


class ReplicaView(ReplicaReport):
    """A rollout replica and its last report."""

    name: str
    """Name of the replica, unique in the run."""
    last_seen: datetime
    """Time of the last report."""
    silent_s: float
    """Seconds since the last report."""


class CallableReplica(ReplicaView):
    """A rollout replica, for those who call it."""

    credential: str
    """Bearer token that the replica requires; empty if it has reported none."""


MAX_COMPARED = 24
"""Most runs in a comparison."""
MAX_VARIANTS = 8
"""Most variants in a comparison: a chart has so many colours that readers can distinguish."""


class Cost(Wire):
    """Cumulative cost of a run up to a step, re-evaluated and discarded responses included."""

    rollouts: int = 0
    """Number of training responses generated so far."""
    tokens: int = 0
    """Number of tokens of these responses."""
    seconds: float = 0.0
    """Seconds of the trainer's phases so far, waiting for rollouts included."""


class FreshPoint(Cost):
    """Accuracy and reward of a committed step's fresh groups, and the run's cumulative cost up to
    it."""

    step: int
    """Training step, from 1 on."""
    accuracy: float
    """Accuracy of the step's fresh groups, before any filter; 0 without groups."""
    mean_reward: float
    """Mean reward of the step's fresh groups, before any filter."""


class EvaluationPoint(Cost):
    """Accuracy and reward of a policy version, and the cumulative cost of training it."""

    version: int
    """Policy version; version t holds the weights after t - 1 steps."""
    mean_accuracy: float
    """Share of correct responses to the held-out prompts, from 0 to 1."""
    mean_reward: float
    """Mean reward of the responses to the held-out prompts."""


class ComparedRun(Wire):
    """A run in a comparison."""

    run: str
    """Name of the run."""
    forked_from: ForkOrigin | None = None
    """The run and the step that this run was forked from; null for a run that began at step 1."""
    step: int
    """Its last committed step."""
    cost: Cost
    """Cumulative cost of the run up to its last committed step."""
    fresh: list[FreshPoint]
    """Accuracy and reward of the fresh groups of steps, evenly spaced, with the last one."""
    evaluations: list[EvaluationPoint]
    """Every complete evaluation on the primary set, by policy version."""
    difficulty: DifficultyBins
    """Its training prompts by bin, as of its last committed step."""


class PairedDifference(Wire):
    """How a variant differs from the first one, in runs of equal seeds."""

    mean: float
    """Mean of the differences between runs with the same seed."""
    seeds: int
    """Number of the seeds that both variants have."""
    half_width: float | None
    """Half of the 95% confidence interval of the mean, by Student's t; null for fewer than 3
    seeds, whose interval tells nothing."""


class ComparedVariant(Wire):
    """Runs whose configurations are equal but for the seed."""

    name: str
    """Common beginning of the names of the runs; for a single run, its whole name."""
    runs: list[str]
    """Names of the runs."""
    seeds: list[int]
    """Seed of each run."""


CostName = Literal["steps", "rollouts", "tokens", "seconds"]
"""Costs at which runs are compared: training steps, and the fields of `Cost`."""


class VariantResult(Wire):
    """The measure of a variant at an equal cost, and its places among the variants."""

    values: list[float | None]
    """Measure of each run of the variant; null for a run with fewer than two evaluations."""
    difference: PairedDifference | None
    """Difference of these values from the first variant's; null for the first variant, and for one
    without a seed in common with it."""
    places: tuple[int, int] | None
    """Best and worst place that the variant may have, from 1 on: variants whose difference the
    seeds do not decide share them. Null where nothing is decided."""


class Resolution(Wire):
    """Which differences of the measure the seeds decide."""

    standard_deviation: float
    """Standard deviation of repetitions of one run."""
    degrees_of_freedom: int
    """Degrees of freedom of its estimate."""
    smallest_difference: float | None
    """Smallest difference that is decided for every pair of variants, with 95% for all pairs
    together; null where two variants have no seed in common."""


class EqualCost(Wire):
    """The measure of all variants at the same cost."""

    costs: list[float]
    """Costs of the last evaluations, at most 4, of the run that costs least. The measure is the
    mean of its values at these costs, interpolated linearly between evaluations."""
    cheapest_run: str
    """Name of that run."""
    variants: list[VariantResult]
    """Results in the order of `RunComparison.variants`."""
    resolution: Resolution | None
    """Differences that are decided; null with one variant, or with one seed each, where nothing
    shows how far repetitions of a run differ."""


class RunComparison(Wire):
    """Several runs side by side."""

    runs: list[ComparedRun]
    """The runs in the order of the request."""
    variants: list[ComparedVariant]
    """The runs by variant, in the order of their first runs."""
    measure: EvaluationMeasure
    """Measure of the compared evaluations: the accuracy, or the mean reward where all tasks are
    reward functions without `task.solved_at`, or where accuracies do not differ."""
    at_equal: dict[CostName, EqualCost]
    """The measure at equal costs of each kind; empty until a run has two evaluations."""
    differing_config: dict[str, list[Any]]
    """Values of the runs, in their order, by dotted key of the configuration, where any two
    differ, the name left out; null where a run does not have the key."""


# ---- tokens, health, garbage --------------------------------------------------------------------


class TokenScope(Wire):
    """The scope of the request's token."""

    scope: Scope
    """What the token permits."""
    run: str | None = None
    """Name of the only run that the token is for; null for all runs."""


class TokenCreate(Wire):
    """A token to create."""

    name: str = Field(
        min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$", examples=["grafana"]
    )
    """Name that says what the token is for."""
    scope: Scope
    """read, run (includes read) or admin (includes all); or replica, collector, trainer or
    pipeline, which permit the calls of that process."""
    run: str | None = Field(None, pattern=RUN_NAME)
    """Name of the only run that the token is for, which need not exist yet; null for all runs."""
    days: float | None = Field(None, gt=0, le=3660)
    """Days after which the token expires; null for never."""


class TokenView(Wire):
    """A token without its secret."""

    id: int
    """Identifier of the token."""
    name: str
    """Name that says what the token is for."""
    scope: Scope
    """What the token permits."""
    run: str | None = None
    """Name of the only run that the token is for; null for all runs."""
    created_at: datetime
    """Time at which the token was created."""
    expires_at: datetime | None = None
    """Time at which the token expires; null for never."""
    last_used_at: datetime | None
    """Time of the last request, to the minute; null before the first."""
    revoked_at: datetime | None
    """Time at which the token was revoked; null while it is valid."""


class TokenCreated(TokenView):
    """A new token with its secret."""

    token: str
    """The bearer token. It is shown only in this response: the service keeps its hash."""


class Readiness(Wire):
    """Whether the service can answer requests. The status is 503 while `ready` is false."""

    ready: bool
    """Whether Postgres and the object store both answer."""
    database: str
    """ok, or why Postgres does not answer."""
    object_store: str
    """ok, or why the object store does not answer."""


class Garbage(Wire):
    """Objects without a row, and rows without their object."""

    orphans: list[str]
    """Keys of objects that no row refers to; with `dry_run=false`, of the deleted objects."""
    objects: int
    """Number of objects of all runs and models."""
    missing: list[str]
    """Keys of objects that a row refers to and that are not stored. Must be empty."""
    deleted: int
    """Number of objects deleted; 0 with `dry_run=true`."""
