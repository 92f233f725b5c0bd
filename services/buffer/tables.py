"""The tables (design section 5). Rows are never overwritten where history matters."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    ForeignKey,
    Index,
    MetaData,
    UniqueConstraint,
    func,
    literal_column,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from services.common.scopes import SCOPES

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


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
    """A training run and its fencing counter."""

    __tablename__ = "run"

    id: Mapped[int] = _key()
    name: Mapped[str] = mapped_column(unique=True)
    config: Mapped[dict[str, Any]]
    train_dataset: Mapped[str]
    test_dataset: Mapped[str]
    status: Mapped[str] = mapped_column(default="created")
    current_step: Mapped[int] = mapped_column(default=0)
    """The last committed step."""
    attempt: Mapped[int] = mapped_column(default=0)
    target_version: Mapped[int] = mapped_column(server_default="0")
    """The policy version of the prompts handed out last: what rollout replicas should serve."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (
        CheckConstraint("current_step >= 0", name="current_step"),
        CheckConstraint(
            "status in ('created','running','paused','stopped','finished','failed','deleting')",
            name="status",
        ),
    )


class Dataset(Base):
    """How many prompts a dataset has: counting a million takes longer than a whole request."""

    __tablename__ = "dataset"

    name: Mapped[str] = mapped_column(primary_key=True)
    size: Mapped[int]


class PromptRow(Base):
    """A prompt of a dataset, whatever run uses it. `position` is its place in the dataset."""

    __tablename__ = "prompt"

    id: Mapped[int] = _key()
    dataset: Mapped[str]
    uid: Mapped[str]
    position: Mapped[int]
    task: Mapped[str]
    payload: Mapped[dict[str, Any]]

    __table_args__ = (
        UniqueConstraint("dataset", "uid"),
        UniqueConstraint("dataset", "position"),
        # Thousands of positions at a time, without a look at the rows.
        Index("ix_prompt_place", "id", postgresql_include=["position"]),
        # What a search matches. The expression is `queries.searched`'s.
        Index(
            "ix_prompt_search",
            literal_column("(uid::text || ' '::text) || payload::text").label("searched"),
            postgresql_using="gin",
            postgresql_ops={"searched": "gin_trgm_ops"},
        ),
    )


class PromptDifficulty(Base):
    """What a run knows of a training prompt; derived from `rollout_group`."""

    __tablename__ = "prompt_difficulty"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    prompt_id: Mapped[int] = mapped_column(ForeignKey("prompt.id"), primary_key=True)
    attempts: Mapped[int]
    first_mean: Mapped[float]
    last_mean: Mapped[float]
    best_mean: Mapped[float]
    first_solved_step: Mapped[int | None]
    last_step: Mapped[int]
    bin: Mapped[int]
    """k of G correct, at the last attempt."""

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
    """The bin of every training prompt after a step, so that any step is a short way from one.

    `bins` has a byte for each prompt of the dataset, by position; 255: not attempted yet.
    """

    __tablename__ = "difficulty_snapshot"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    bins: Mapped[bytes]


class RolloutGroup(Base):
    """A whole group: where its trajectories are and what they scored."""

    __tablename__ = "rollout_group"

    id: Mapped[int] = _key()
    run_id: Mapped[int] = _run()
    step: Mapped[int]
    kind: Mapped[str]
    prompt_id: Mapped[int] = mapped_column(ForeignKey("prompt.id"))
    position: Mapped[int]
    """Its place among the groups of the step and kind: the order in which prompts were drawn."""
    policy_version: Mapped[int]
    correct: Mapped[int]
    size: Mapped[int]
    mean_reward: Mapped[float]
    object_key: Mapped[str]
    object_digest: Mapped[str]
    row_start: Mapped[int]
    row_count: Mapped[int]
    token_count: Mapped[int]
    proximal_key: Mapped[str | None]
    """Object with the trainer's log-probs of the storage step (ratio=decoupled)."""
    proximal_digest: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (
        UniqueConstraint("run_id", "step", "kind", "prompt_id"),
        CheckConstraint("kind in ('fresh','reevaluation','evaluation')", name="kind"),
        CheckConstraint("correct between 0 and size", name="correct"),
        Index(None, "run_id", "prompt_id", "step"),
    )


class BufferEntry(Base):
    """A group's stay in a buffer: in it as of step s iff inserted <= s and not evicted by s."""

    __tablename__ = "buffer_entry"

    id: Mapped[int] = _key()
    run_id: Mapped[int] = _run()
    buffer: Mapped[str]
    group_id: Mapped[int] = mapped_column(ForeignKey("rollout_group.id", ondelete="CASCADE"))
    mean_reward: Mapped[float]
    inserted_step: Mapped[int]
    evicted_step: Mapped[int | None]
    eviction_reason: Mapped[str | None]

    __table_args__ = (
        CheckConstraint("buffer in ('hard','high_quality')", name="buffer"),
        CheckConstraint("(evicted_step is null) = (eviction_reason is null)", name="eviction"),
        UniqueConstraint("run_id", "buffer", "group_id"),
        Index("ix_buffer_entry_live", "run_id", "buffer", postgresql_where="evicted_step is null"),
        Index("ix_buffer_entry_inserted", "run_id", "buffer", "inserted_step", "id"),
        Index("ix_buffer_entry_evicted", "run_id", "buffer", "evicted_step", "id"),
        Index("ix_buffer_entry_group_id", "group_id"),
        # Who was in the buffer at a step: the stays that contain it.
        Index(
            "ix_buffer_entry_stay",
            "run_id",
            text("int8range(inserted_step, evicted_step)"),
            postgresql_using="gist",
        ),
    )


class BatchMemberRow(Base):
    """A group's place in the training batch of a step."""

    __tablename__ = "batch_member"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    group_id: Mapped[int] = mapped_column(ForeignKey("rollout_group.id", ondelete="CASCADE"))
    source: Mapped[str]

    __table_args__ = (
        UniqueConstraint("run_id", "step", "group_id"),
        Index("ix_batch_member_group_id", "group_id"),
        CheckConstraint("source in ('fresh','reevaluated','replayed')", name="source"),
    )


class StepRecord(Base):
    """What happened at a step: written with its batch, closed by its commit."""

    __tablename__ = "step_record"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    r_tot: Mapped[float]
    c2: Mapped[float]
    c3: Mapped[float]
    counts: Mapped[dict[str, Any]]
    """Groups by source, and how many were rolled out and passed the filters."""
    rollouts: Mapped[int]
    """Training responses generated at this step, discarded and re-evaluated ones included."""
    tokens: Mapped[int]
    bins: Mapped[list[Any]]
    """The step's fresh groups by k of G correct."""
    difficulty_bins: Mapped[list[Any] | None]
    """All training prompts attempted so far, by k of G at their last attempt: of a commit."""
    metrics: Mapped[dict[str, Any] | None]
    committed_at: Mapped[datetime | None]


class EvaluationRecord(Base):
    """A complete evaluation of a policy version; derived from `rollout_group`."""

    __tablename__ = "evaluation"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    mean_accuracy: Mapped[float]
    bins: Mapped[list[Any]]
    prompts: Mapped[int]
    tokens: Mapped[int]


class WeightVersion(Base):
    """A published version of the weights: exists once its row does."""

    __tablename__ = "weight_version"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    uri: Mapped[str]
    manifest_digest: Mapped[str]
    status: Mapped[str] = mapped_column(default="published")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (CheckConstraint("status in ('published','pruned')", name="status"),)


class Replica(Base):
    """A rollout engine: where it is, what it has loaded, how it is."""

    __tablename__ = "replica"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    url: Mapped[str]
    state: Mapped[str]
    detail: Mapped[str]
    """What is wrong, while `state` is failing."""
    loaded_version: Mapped[int]
    """0 before the first load."""
    manifest_digest: Mapped[str]
    prompts_per_request: Mapped[int]
    """How many it wants in one request; 0 = as many as there are."""
    last_seen: Mapped[datetime] = mapped_column(server_default=func.now())


class SpanRow(Base):
    """Something that a part of the run did for a while, by the database's clock."""

    __tablename__ = "span"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    component: Mapped[str]
    name: Mapped[str]
    step: Mapped[int]
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime]

    __table_args__ = (
        Index("ix_span_run_id_component_step", "run_id", "component", "step"),
        Index("ix_span_run_id_ended_at", "run_id", "ended_at"),
    )


class Checkpoint(Base):
    """The trainer's state after a step."""

    __tablename__ = "checkpoint"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    uri: Mapped[str]
    manifest_digest: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class ApiToken(Base):
    """A bearer token, as its hash."""

    __tablename__ = "api_token"

    id: Mapped[int] = _key()
    name: Mapped[str]
    hash: Mapped[str] = mapped_column(unique=True)
    scope: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    last_used_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]

    __table_args__ = (CheckConstraint(f"scope in ({','.join(map(repr, SCOPES))})", name="scope"),)
