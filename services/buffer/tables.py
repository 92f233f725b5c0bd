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
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

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
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (
        CheckConstraint("current_step >= 0", name="current_step"),
        CheckConstraint("status in ('created','running','finished','failed')", name="status"),
    )


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

    __table_args__ = (Index(None, "run_id", "bin"),)


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
    metrics: Mapped[dict[str, Any] | None]
    committed_at: Mapped[datetime | None]


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
    """A rollout engine and what it has loaded."""

    __tablename__ = "replica"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    loaded_version: Mapped[int]
    last_seen: Mapped[datetime] = mapped_column(server_default=func.now())


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
    hash: Mapped[str] = mapped_column(unique=True)
    scope: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    last_used_at: Mapped[datetime | None]

    __table_args__ = (CheckConstraint("scope in ('read','run','admin')", name="scope"),)
