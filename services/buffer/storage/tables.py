"""The tables of the buffer service. Rows that hold history are never overwritten.

docs/architecture.md shows which component writes them; docs/concepts.md explains the terms.
"""

from __future__ import annotations

from datetime import datetime
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from pydantic import ValidationError
from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    ForeignKey,
    Index,
    MetaData,
    PrimaryKeyConstraint,
    UniqueConstraint,
    false,
    func,
    literal_column,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, object_session

from bapo_core.config import ConfigHistory, RunConfig
from bapo_core.config.changes import values_at
from bapo_core.config.messages import explain_validation_error
from services.buffer.api import wire
from services.common.problems import conflict
from services.common.scopes import SCOPES

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class Ancestor(NamedTuple):
    """A run of the lineage of a run."""

    run_id: int
    first_step: int
    """First step whose rows are of this run."""
    last_step: int | None
    """Last step whose rows are of this run; None for the newest run of the lineage."""


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        dict[str, Any]: JSONB,
        list[Any]: JSONB,
        datetime: DateTime(timezone=True),
        int: BigInteger,
    }


def _key() -> Mapped[int]:
    return mapped_column(primary_key=True, autoincrement=True)


def _run() -> Mapped[int]:
    return mapped_column(ForeignKey("run.id", ondelete="CASCADE"))


class Run(Base):
    """A training run and its fencing counter, with the session that it was loaded in.

    Functions take a run alone, and read and change its rows in `run.session`.
    """

    __tablename__ = "run"

    id: Mapped[int] = _key()
    name: Mapped[str] = mapped_column(unique=True)
    config_json: Mapped[dict[str, Any]] = mapped_column("config")
    """The whole `RunConfig` as JSON, defaults included; never changed after creation."""
    changes_json: Mapped[list[Any]] = mapped_column("config_changes", server_default=text("'[]'"))
    """The changes of the configuration (`wire.RecordedChange`), in the order in which they were
    made. They are in the row of the run because whoever reads its configuration needs them all."""
    train_dataset: Mapped[str]
    test_datasets: Mapped[dict[str, Any]]
    """Dataset of the held-out prompts of each evaluation set, by the set's name. Each set has its
    own, so the dataset of a prompt tells the set of its groups."""
    status: Mapped[str] = mapped_column(default="created")
    current_step: Mapped[int] = mapped_column(default=0)
    """The last committed step; 0 before the first commit."""
    attempt: Mapped[int] = mapped_column(default=0)
    """Fencing number: requests of processes of an older attempt are refused."""
    attempt_began_at: Mapped[datetime | None]
    """When the attempt began; null before the first one, and for an attempt that began before this
    was recorded."""
    target_version: Mapped[int] = mapped_column(server_default="0")
    """Policy version that rollout replicas should serve: that of the prompts handed out last;
    0 before any."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    workflow: Mapped[str | None]
    """Argo workflow that trains the run, as `namespace/name`; null outside a cluster."""
    queued_at: Mapped[datetime | None]
    """When the run asked for its turn last; null before the first time."""
    stopped_by: Mapped[str | None]
    """Who stopped the run; null unless it is stopped, and for runs that were stopped before this
    was recorded. The same holds for the next two columns."""
    stop_reason: Mapped[str | None]
    """Why the run was stopped; null if nobody said so."""
    stopped_at: Mapped[datetime | None]
    parent_id: Mapped[int | None] = mapped_column(ForeignKey("run.id"))
    """Run that this one is a fork of: the rows of steps up to `fork_step` are the parent's. Null
    for a run that began at step 1, as are the next two columns."""
    fork_step: Mapped[int | None]
    """Last step that the fork shares with its parent; 0 shares none."""
    fork_checkpoint: Mapped[int | None]
    """Step of the parent's checkpoint that the fork began with; 0 is the initial model. Steps after
    it, up to `fork_step`, are trained again on their recorded batches."""
    rollouts_until: Mapped[int | None]
    """Last step whose groups are copies of the parent's, so that nothing is rolled out for it; null
    for a run that rolls out all of its steps."""

    __table_args__ = (
        Index("ix_run_parent_id", "parent_id", postgresql_where=text("parent_id is not null")),
        CheckConstraint("current_step >= 0", name="current_step"),
        CheckConstraint(
            "(parent_id is null) = (fork_step is null) and fork_step between 0 and current_step "
            "and fork_checkpoint between 0 and fork_step and rollouts_until > fork_step",
            name="fork",
        ),
        CheckConstraint(
            "status in ('created','queued','running','paused','stopped','finished','failed',"
            "'deleting')",
            name="status",
        ),
    )

    @property
    def session(self) -> Session:
        """The session that the run was loaded in; raises RuntimeError after its end."""
        session = object_session(self)
        if session is None:
            raise RuntimeError(f"the session of run {self.name!r} has ended; load the run again")
        return session

    @property
    def parent(self) -> Run | None:
        """The run that this one is a fork of."""
        return None if self.parent_id is None else self.session.get_one(Run, self.parent_id)

    def of_step(self, step: int) -> Run:
        """Returns the run whose rows are those of a step, or a policy version: this one or, up to
        the step of a fork, the run that it is a fork of."""
        run = self
        while run.fork_step is not None and step <= run.fork_step:
            assert run.parent is not None
            run = run.parent
        return run

    @property
    def lineage(self) -> list[Ancestor]:
        """The run and the runs that it is a fork of, the newest first, with the steps of each."""
        run, last = self, None
        lineage = [Ancestor(run.id, (run.fork_step or 0) + 1, last)]
        while run.parent is not None:
            run, last = run.parent, run.fork_step
            lineage.append(Ancestor(run.id, (run.fork_step or 0) + 1, last))
        return lineage

    @property
    def forked_from(self) -> wire.ForkOrigin | None:
        """Run and step that this run was forked from; None for a run that began at step 1."""
        if self.parent is None:
            return None
        assert self.fork_step is not None
        assert self.fork_checkpoint is not None
        return wire.ForkOrigin(
            run=self.parent.name,
            step=self.fork_step,
            checkpoint=self.fork_checkpoint,
            rollouts_until=self.rollouts_until,
        )

    def has_recorded_rollouts(self, step: int) -> bool:
        """Whether the groups of a step are copies of the parent's (`rollouts_until`)."""
        return self.rollouts_until is not None and step <= self.rollouts_until

    @property
    def changes(self) -> list[wire.RecordedChange]:
        """The changes of the configuration, in the order in which they were made."""
        return [wire.RecordedChange.model_validate(change) for change in self.changes_json or ()]

    @property
    def values(self) -> dict[str, Any]:
        """The configuration after all changes, as JSON."""
        return values_at(self.config_json, self.changes, None)

    @cached_property
    def config(self) -> RunConfig:
        """The configuration after all changes, validated once.

        Raises 409 if this version cannot read it.
        """
        values = self.values
        try:
            return RunConfig.model_validate(values)
        except ValidationError as error:
            raise conflict(
                f"run {self.name!r} has a stored configuration that the service cannot read: "
                f"{explain_validation_error(error, values)}; install the package again "
                "that the run needs where the service runs, or delete the run"
            ) from error

    def config_at(self, step: int) -> RunConfig:
        """Returns the configuration of a step (`ConfigHistory.at`); raises 409 as `config` does."""
        return ConfigHistory(self.config, self.changes).at(step)


class StoredConfig(Base):
    """A configuration that pipelines can be started with; a run keeps a copy of its own."""

    __tablename__ = "stored_config"

    name: Mapped[str] = mapped_column(primary_key=True)
    text: Mapped[str]
    """The YAML file, with its comments."""
    stored_at: Mapped[datetime] = mapped_column(server_default=func.now())


class RewardFile(Base):
    """A file of reward functions, which configurations name by its digest (`task.reward`)."""

    __tablename__ = "reward_file"

    digest: Mapped[str] = mapped_column(primary_key=True)
    """SHA-256 of the text."""
    text: Mapped[str]
    stored_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Dataset(Base):
    """A dataset and its number of prompts, because counting a million of them takes too long."""

    __tablename__ = "dataset"

    name: Mapped[str] = mapped_column(primary_key=True)
    size: Mapped[int]
    digest: Mapped[str | None]
    """SHA-256 of all its prompts, as its uploader declared it; null if nothing was declared."""
    source: Mapped[str | None]
    """Address that the prompts were read from."""


class PromptRow(Base):
    """A prompt of a dataset, shared by all runs that use the dataset."""

    __tablename__ = "prompt"

    id: Mapped[int] = _key()
    dataset: Mapped[str]
    uid: Mapped[str]
    """Name of the prompt, stable across runs and machines."""
    position: Mapped[int]
    """Index in the dataset, from 0, by which samplers draw prompts."""
    task: Mapped[str]
    """Name of the task that formats and verifies it (`bapo_core.tasks`)."""
    payload: Mapped[dict[str, Any]]
    """The task's data of this prompt, for example numbers and target of a Countdown."""

    __table_args__ = (
        UniqueConstraint("dataset", "uid"),
        UniqueConstraint("dataset", "position"),
        # Answers thousands of positions at a time from the index alone.
        Index("ix_prompt_place", "id", postgresql_include=["position"]),
        # Must be the expression that `prompts._matches` searches.
        Index(
            "ix_prompt_search",
            literal_column("(uid::text || ' '::text) || payload::text").label("searched"),
            postgresql_using="gin",
            postgresql_ops={"searched": "gin_trgm_ops"},
        ),
    )


class PromptDifficulty(Base):
    """A training prompt's results in a run as of the last commit; derived from `rollout_group`."""

    __tablename__ = "prompt_difficulty"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    prompt_id: Mapped[int] = mapped_column(ForeignKey("prompt.id"), primary_key=True)
    attempts: Mapped[int]
    """Number of its groups, fresh and re-evaluated."""
    first_mean: Mapped[float]
    """Accuracy of its first group."""
    last_mean: Mapped[float]
    """Accuracy of its last group."""
    best_mean: Mapped[float]
    """Highest accuracy of its groups."""
    first_solved_step: Mapped[int | None]
    """First step with a correct response; null while it is unsolved."""
    last_step: Mapped[int]
    """Step of its last group."""
    bin: Mapped[int]
    """Correct responses k of G in its last group."""

    # One index for each order and filter that a listing offers; each ends in the tie-breaker.
    __table_args__ = (
        Index("ix_prompt_difficulty_bin", "run_id", "bin", "prompt_id"),
        Index(
            "ix_prompt_difficulty_hardest", "run_id", "best_mean", text("(-attempts)"), "prompt_id"
        ),
        Index(
            "ix_prompt_difficulty_improved",
            "run_id",
            text("(first_mean - last_mean)"),
            "prompt_id",
        ),
        Index(
            "ix_prompt_difficulty_unlocked",
            "run_id",
            "first_solved_step",
            "prompt_id",
            postgresql_where=text("first_mean = 0"),
        ),
        Index(
            "ix_prompt_difficulty_forgotten",
            "run_id",
            "prompt_id",
            postgresql_where=text("bin = 0 and best_mean > 0"),
        ),
    )


class DifficultySnapshot(Base):
    """The bin of every training prompt after every 32nd commit (`difficulty.SNAPSHOT_EVERY`)."""

    __tablename__ = "difficulty_snapshot"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    bins: Mapped[bytes]
    """One byte for each prompt of the dataset, by position: its bin, or 255 if not attempted."""


class SamplerPosterior(Base):
    """Beta(a, b) of a prompt after a commit that had a fresh group of it (`sampler.kind: mopps`).

    Adaptive samplers read the newest row up to a step. Runs with the uniform sampler have no rows.
    """

    __tablename__ = "sampler_posterior"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"))
    position: Mapped[int]
    """Position of the prompt in the run's training dataset, by which candidates are drawn."""
    step: Mapped[int]
    """Step of the group; 0 for the results of an earlier run (`sampler.prior_run`)."""
    a: Mapped[float]
    """a = 1 + sum_i lambda^(n-i) s_i, over the prompt's n fresh groups with s_i of k_i correct."""
    b: Mapped[float]
    """b = 1 + sum_i lambda^(n-i) (k_i - s_i)."""

    # The index alone answers for the thousands of candidates of a draw.
    __table_args__ = (
        PrimaryKeyConstraint("run_id", "position", "step", postgresql_include=["a", "b"]),
    )


class RolloutGroup(Base):
    """The G responses to a prompt by one policy version: their rewards and their location."""

    __tablename__ = "rollout_group"

    id: Mapped[int] = _key()
    run_id: Mapped[int] = _run()
    step: Mapped[int]
    """Trainer step that asked for it; of an evaluation, the evaluated policy version."""
    kind: Mapped[str]
    prompt_id: Mapped[int] = mapped_column(ForeignKey("prompt.id"))
    position: Mapped[int]
    """Rank among the groups of its step and kind, in the order in which prompts were drawn."""
    policy_version: Mapped[int]
    """Version t (theta_t) of the weights that generated the responses."""
    correct: Mapped[int]
    """k: correct responses."""
    size: Mapped[int]
    """G: responses."""
    accuracy: Mapped[float]
    """mu = k / G."""
    mean_reward: Mapped[float]
    """Mean reward of the responses, any number; the accuracy while rewards are 0 or 1."""
    lowest_reward: Mapped[float | None]
    """Lowest reward of the responses, without the punishment of length; null in groups of versions
    before 0.3, whose rewards count as 1 for correct responses and 0 for others."""
    highest_reward: Mapped[float | None]
    """Highest reward of the responses, without the punishment of length; null as above."""
    reward_parts: Mapped[dict[str, Any]]
    """Mean of each part of the reward, by name and without weights (`bapo_core.rewards`)."""
    outcomes: Mapped[dict[str, Any]]
    """Number of responses of each outcome (`bapo_core.outcomes`)."""
    repeated: Mapped[dict[str, Any]]
    """How often responses were sampled or scored again, by the outcome that was the cause."""
    cut_off: Mapped[int | None]
    """Number of responses that reached the largest number of tokens; null if it is not known."""
    object_key: Mapped[str]
    """Arrow object with the trajectories of this and other groups (`layout.trajectories`)."""
    object_digest: Mapped[str]
    """SHA-256 of the object, in hexadecimal."""
    row_start: Mapped[int]
    """First row of the group in the object; a row is a response."""
    row_count: Mapped[int]
    token_count: Mapped[int]
    """Response tokens of the group."""
    majority: Mapped[dict[str, Any] | None]
    """maj@k of an evaluation by k (`bapo_core.metrics.majority_at_k`); empty if no response has an
    answer, and null for other kinds, and if the answers of the responses were not recorded."""
    responses: Mapped[dict[str, Any] | None]
    """`rewards`, `correct` and `logprobs` (the mean over tokens) of each response, as lists; null
    unless the run has `response_replay`, which chooses responses by them."""
    proximal_key: Mapped[str | None]
    """Object with the trainer's log-probs at the storage step (`loss.correction: decoupled`)."""
    proximal_digest: Mapped[str | None]
    """SHA-256 of that object, in hexadecimal."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (
        UniqueConstraint("run_id", "step", "kind", "prompt_id"),
        CheckConstraint("kind in ('fresh','reevaluation','evaluation')", name="kind"),
        CheckConstraint("correct between 0 and size", name="correct"),
        Index(None, "run_id", "prompt_id", "step"),
    )


class BufferEntry(Base):
    """Residency of a group in a buffer: it is there after step s iff inserted_step <= s and
    (evicted_step is null or evicted_step > s)."""

    __tablename__ = "buffer_entry"

    id: Mapped[int] = _key()
    run_id: Mapped[int] = _run()
    buffer: Mapped[str]
    group_id: Mapped[int] = mapped_column(ForeignKey("rollout_group.id", ondelete="CASCADE"))
    accuracy: Mapped[float]
    """mu of the group, repeated here so that listings need no join."""
    inserted_step: Mapped[int]
    """Step whose commit admitted the group."""
    evicted_step: Mapped[int | None]
    """Step whose commit evicted the group; null while it is in the buffer."""
    eviction_reason: Mapped[str | None]
    """A value of `bapo_core.buffers.EvictionReason`."""

    __table_args__ = (
        CheckConstraint("buffer in ('hard','high_quality')", name="buffer"),
        CheckConstraint("(evicted_step is null) = (eviction_reason is null)", name="eviction"),
        UniqueConstraint("run_id", "buffer", "group_id"),
        Index("ix_buffer_entry_live", "run_id", "buffer", postgresql_where="evicted_step is null"),
        Index("ix_buffer_entry_inserted", "run_id", "buffer", "inserted_step", "id"),
        Index("ix_buffer_entry_evicted", "run_id", "buffer", "evicted_step", "id"),
        Index("ix_buffer_entry_group_id", "group_id"),
        # Finds the contents at a step: the residencies that contain it.
        Index(
            "ix_buffer_entry_stay",
            "run_id",
            text("int8range(inserted_step, evicted_step)"),
            postgresql_using="gist",
        ),
    )


class BatchMemberRow(Base):
    """A group, or some of its responses, in the training batch of a step."""

    __tablename__ = "batch_member"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    """Index in the batch, from 0: X1, then X2, then X3. Replayed responses follow the fresh group
    of their prompt."""
    group_id: Mapped[int] = mapped_column(ForeignKey("rollout_group.id", ondelete="CASCADE"))
    source: Mapped[str]
    rows: Mapped[list[Any] | None]
    """Indexes of the group's responses that are in the batch; null for all."""
    joins_previous: Mapped[bool] = mapped_column(server_default=false())
    """Whether they are compared with those of the member before, for their advantages."""

    __table_args__ = (
        UniqueConstraint("run_id", "step", "group_id"),
        Index("ix_batch_member_group_id", "group_id"),
        CheckConstraint("source in ('fresh','reevaluated','replayed')", name="source"),
    )


class StepRecord(Base):
    """A step of the trainer: written with its batch, completed by its commit."""

    __tablename__ = "step_record"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    r_tot: Mapped[float]
    """Running accuracy, in [0, 1], that moves the replay window (Eq. 8); the setting
    `replay.window.r_tot` chooses the groups that it averages."""
    c2: Mapped[float]
    """Lower end of the replay window of this step: Eq. 8 applied to `replay.window.c2_range`."""
    c3: Mapped[float]
    """Upper end of the replay window of this step: Eq. 8 applied to `replay.window.c3_range`.
    Groups with c2 <= mu <= c3 may be replayed (Eq. 7)."""
    counts: Mapped[dict[str, Any]]
    """Groups in the batch by source (`fresh`, `reevaluated`, `replayed`), and groups generated:
    `rolled_out` (fresh, before the filter), `mixed` (of these, with rewards that differ) and
    `reevaluated_total` (before promotion)."""
    supervised: Mapped[list[Any] | None]
    """Groups of the hard buffer (`group_id`, `prompt_uid`) whose demonstrations the step has a
    supervised update on; null in batches of versions before 0.3."""
    decisions: Mapped[dict[str, Any] | None] = mapped_column(deferred=True)
    """Why each prompt is, or is not, in the batch (`step_state.dump_decisions`); null in batches of
    versions before 0.3. Read for single prompts alone."""
    rollouts: Mapped[int]
    """Training responses generated at this step, including those not in the batch."""
    tokens: Mapped[int]
    """Tokens of these responses."""
    bins: Mapped[list[Any]]
    """Number of the step's fresh groups with k of G correct, for k = 0..G."""
    mean_reward: Mapped[float]
    """Mean reward of the step's fresh groups, before any filter."""
    reward_parts: Mapped[dict[str, Any]]
    """Mean of each part of their reward, by name and without weights."""
    difficulty_bins: Mapped[list[Any] | None]
    """Number of all attempted training prompts with k of G correct in their last group, for
    k = 0..G; null before the commit."""
    metrics: Mapped[dict[str, Any] | None]
    """The trainer's metrics by name; null before the commit."""
    digests: Mapped[dict[str, Any] | None]
    """The step's link of the digest chain (`wire.ChainLink`); null before the commit."""
    committed_at: Mapped[datetime | None]
    """Time of the commit; null before it."""


class EvaluationRecord(Base):
    """A complete evaluation of a policy version on a set; derived from `rollout_group`."""

    __tablename__ = "evaluation"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    evaluation_set: Mapped[str] = mapped_column(primary_key=True)
    """Name of the set, a key of `run.test_datasets`."""
    mean_accuracy: Mapped[float]
    """Share of correct responses over all prompts of the set."""
    mean_reward: Mapped[float]
    """Mean reward of all responses, any number; the accuracy while rewards are 0 or 1."""
    bins: Mapped[list[Any]]
    """Number of prompts with k correct responses, for k = 0..n with n samples."""
    prompts: Mapped[int]
    tokens: Mapped[int]
    """Response tokens of the evaluation."""
    majority: Mapped[list[Any] | None]
    """The scores maj@k (`wire.Score`); null if the answers of a group were not recorded, or if no
    response of the evaluation has an answer."""


class WeightVersion(Base):
    """A published version of the weights; its objects are complete once the row exists."""

    __tablename__ = "weight_version"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    """Version t is theta_t, the weights before update t; the base model is 1."""
    uri: Mapped[str]
    """Prefix of its objects (`layout.weights`)."""
    manifest_digest: Mapped[str]
    """SHA-256 of the manifest, which holds the digests of all files."""
    status: Mapped[str] = mapped_column(default="published")
    """`set_aside` from a rewind to an earlier step until the version is published again; `pruned`
    once its files have been deleted."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (
        CheckConstraint("status in ('published','set_aside','pruned')", name="status"),
    )


class Replica(Base):
    """The last heartbeat of a rollout replica: address, state, loaded weights."""

    __tablename__ = "replica"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    url: Mapped[str]
    state: Mapped[str]
    detail: Mapped[str]
    """The error, while `state` is failing."""
    loaded_version: Mapped[int]
    """Policy version that it serves; 0 before the first load."""
    manifest_digest: Mapped[str]
    """Digest of the manifest of the loaded weights; empty before the first load."""
    prompts_per_request: Mapped[int]
    """Most prompts that it accepts in one request; 0 = no limit."""
    credential: Mapped[str] = mapped_column(server_default="")
    """Token that its process has made up, and that its callers send; it ends with the process."""
    last_seen: Mapped[datetime] = mapped_column(server_default=func.now())
    """Time of the last heartbeat, on the database's clock."""


class SpanRow(Base):
    """A span of a component of the run, with its times on the database's clock."""

    __tablename__ = "span"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    """Chosen by the sender, so that a span that is sent again is recorded once."""
    component: Mapped[str]
    """`trainer`, `collector`, or the name of a replica."""
    name: Mapped[str]
    step: Mapped[int]
    """Trainer step; of a replica, its policy version."""
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime]

    __table_args__ = (
        Index("ix_span_run_id_component_step", "run_id", "component", "step"),
        Index("ix_span_run_id_ended_at", "run_id", "ended_at"),
    )


class Checkpoint(Base):
    """The trainer's state after a step; its objects are complete once the row exists."""

    __tablename__ = "checkpoint"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    uri: Mapped[str]
    """Prefix of its objects (`layout.checkpoint`)."""
    manifest_digest: Mapped[str]
    """SHA-256 of the manifest, which holds the digests of all files."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class ApiToken(Base):
    """A bearer token. Only its hash is stored."""

    __tablename__ = "api_token"

    id: Mapped[int] = _key()
    name: Mapped[str]
    """Chosen by its creator, to recognize it in the list."""
    hash: Mapped[str] = mapped_column(unique=True)
    """SHA-256 of the token, in hexadecimal."""
    scope: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    run: Mapped[str | None]
    """Name of the only run that it is for, which need not exist yet; None for all runs."""
    expires_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    """Time of the last use, to the minute."""
    revoked_at: Mapped[datetime | None]

    __table_args__ = (CheckConstraint(f"scope in ({','.join(map(repr, SCOPES))})", name="scope"),)
