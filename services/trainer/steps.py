"""Trains one step: from the manifest of its batch to the metrics and the digest of the update."""

from __future__ import annotations

import hashlib
import io
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from bapo_core.config import RunConfig
from services.buffer.api.client import BufferClient
from services.buffer.api.trajectories import encode_proximal
from services.buffer.api.wire import BatchManifest, ManifestMember, StepDigests
from services.common import layout
from services.common.objectstore import ObjectStore
from services.model.vision import load_processor
from services.trainer.critic import Critic
from services.trainer.data import (
    Batch,
    TrajectoryReader,
    make_plan,
    member_cost,
    split_by_group,
    split_groups,
)
from services.trainer.demonstrations import DemonstrationEncoder
from services.trainer.digests import NO_BATCH, batch_digest, step_digests, weights_digest
from services.trainer.load_policy import freeze_vision
from services.trainer.lora import add_adapters
from services.trainer.memory import (
    MemoryPlan,
    ModelSize,
    free_bytes,
    plan_memory,
)
from services.trainer.phases import PhaseTimer
from services.trainer.policy import Policy
from services.trainer.ranks import Ranks, balance_by_cost
from services.trainer.shard import load_sharded
from services.trainer.speed import measure_speed
from services.trainer.update import NonFiniteLoss, Updater

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainerContext:
    """The services and directories that a trainer works with."""

    buffer: BufferClient
    store: ObjectStore
    model_directory: Path
    """Directory of the initial model."""
    scratch: Path
    """Directory of this rank for files in transfer."""
    replica_hosts: str = ""
    """Hosts at which rollout replicas may be, as in `ReplicaCallerSettings`."""
    engine_share: float = 0.0
    """Share of the GPU's memory that an engine on this machine is going to take."""


def make_reader(config: RunConfig, context: TrainerContext) -> TrajectoryReader:
    """Builds the reader of batches, with what their images and demonstrations need."""
    return TrajectoryReader(
        context.store,
        vision=load_processor(context.model_directory),
        encoder=DemonstrationEncoder(config, context.model_directory),
    )


def make_updater(
    config: RunConfig, directory: Path, ranks: Ranks, *, engine_share: float = 0.0
) -> Updater:
    """Loads policy, reference and critic, as far as `config` needs them, from the initial model.

    engine_share: share of the GPU's memory that an engine on this machine is going to take.
    """

    def adapted(policy: Policy) -> Policy:
        add_adapters(policy.model, config.lora, config.seed)
        return frozen(policy)

    def frozen(policy: Policy) -> Policy:
        if config.model.freeze_vision:
            freeze_vision(policy.model)
        return policy

    settings = config.trainer
    available = free_bytes(engine_share)
    plans: list[MemoryPlan] = []

    def plan(size: ModelSize | None) -> MemoryPlan:
        planned = plan_memory(config, size, ranks=ranks.size, available=available)
        # Free memory may differ between the ranks, but they must compute the same passes.
        if ranks.all_reduce_max(int(planned.checkpointing == "full")):
            planned = replace(planned, checkpointing="full")
        plans.append(planned)
        return planned

    policy = load_sharded(directory, ranks, prepare=adapted, settings=settings, plan=plan)
    if ranks.is_main:
        log.info("memory: %s", plans[0])
    settings = settings.model_copy(update={"gradient_checkpointing": plans[0].checkpointing})
    reference = critic = None
    if config.kl.coefficient > 0 and config.kl.reference == "initial":
        reference = load_sharded(directory, ranks, prepare=lambda policy: policy, settings=settings)
    if config.advantage.estimator == "gae":
        critic = load_sharded(
            directory, ranks, prepare=lambda policy: Critic(frozen(policy)), settings=settings
        )
    return Updater(config, policy, ranks, reference, critic, plans[0])


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """The metrics of a step that was trained, and the digest of its batch."""

    metrics: dict[str, float]
    """The step's metrics on rank 0."""
    digest: str
    """Digest of the batch."""

    def digests(self, weights_before: str, updater: Updater) -> StepDigests:
        """Returns the step's link for the digest chain. Every rank calls it."""
        weights_after = weights_digest(updater.modules, updater.ranks)
        return step_digests(weights_before, self.digest, weights_after, updater.ranks)


def train_batch(
    config: RunConfig,
    updater: Updater,
    reader: TrajectoryReader,
    manifest: BatchManifest,
    context: TrainerContext,
    timer: PhaseTimer,
) -> TrainedBatch:
    """Trains on one step's batch; an empty one trains nothing and is committed all the same."""
    metrics = staleness_metrics(manifest)
    recorded: dict[int, LogprobsOfGroup] = {}
    if manifest.record_proximal:
        with timer.phase("proximal"):
            recorded = score_groups(updater, reader, groups_to_score(manifest))
    if manifest.step - 1 == config.kl.reset_after:
        updater.reset_reference()
    digest = NO_BATCH
    if manifest.members:
        outcome, scored = train_groups(config, updater, reader, manifest, context, timer)
        metrics, digest = metrics | outcome.metrics, outcome.digest
        recorded |= scored
    if manifest.record_proximal:
        with timer.phase("proximal"):
            record_proximal(recorded, manifest, updater.ranks, context)
    if manifest.supervised:
        outcome = supervise(updater, reader, manifest, context, timer)
        metrics |= outcome.metrics
        digest = hashlib.sha256((digest + outcome.digest).encode()).hexdigest()
    return TrainedBatch(metrics, digest)


def train_groups(
    config: RunConfig,
    updater: Updater,
    reader: TrajectoryReader,
    manifest: BatchManifest,
    context: TrainerContext,
    timer: PhaseTimer,
) -> tuple[TrainedBatch, dict[int, LogprobsOfGroup]]:
    """Trains on the groups of one step's batch, which is not empty.

    Returns also the log-probs under theta_t of the whole groups that this rank has trained on.
    """
    ranks, step = updater.ranks, manifest.step
    with timer.phase("read"):
        plan = make_plan(
            config, step, manifest.members, ranks=ranks.size, width=updater.policy.width
        )
        positions = plan.of_rank(ranks.rank)
        groups = split_groups(manifest.members)
        members = [member for position in positions for member in groups[position]]
        batch = reader.batch(members, with_storage=config.loss.correction.kind == "decoupled")
        digest = batch_digest(batch, positions, ranks)
    started = time.monotonic()
    try:
        outcome = updater.step(step, batch, plan, (manifest.c2, manifest.c3), timer)
    except NonFiniteLoss as error:
        store_evidence(step, error, context, ranks)
        raise
    seconds = time.monotonic() - started
    metrics = outcome.metrics | measure_speed(
        updater.policy,
        batch.packed_tokens,
        seconds,
        ranks,
        epochs=config.optimizer.epochs,
    )
    return TrainedBatch(metrics, digest), logprobs_by_group(batch, outcome.targets.current_logprobs)


def supervise(
    updater: Updater,
    reader: TrajectoryReader,
    manifest: BatchManifest,
    context: TrainerContext,
    timer: PhaseTimer,
) -> TrainedBatch:
    """Makes the supervised update of a step, on the demonstrations of unsolved prompts."""
    ranks = updater.ranks
    costs = [member_cost(member, updater.policy.width) for member in manifest.supervised]
    with timer.phase("read"):
        positions = sorted(balance_by_cost(costs, ranks.size)[ranks.rank])
        batch = reader.batch([manifest.supervised[position] for position in positions])
        digest = batch_digest(batch, positions, ranks)
    with timer.phase("update"):
        try:
            metrics = updater.supervise(manifest.step, batch)
        except NonFiniteLoss as error:
            store_evidence(manifest.step, error, context, ranks)
            raise
    metrics["supervised/prompts"] = float(len(manifest.supervised))
    return TrainedBatch(metrics, digest)


def store_evidence(step: int, error: NonFiniteLoss, context: TrainerContext, ranks: Ranks) -> None:
    """Stores what this rank trained on when the loss was not finite, as `as_plain` has it."""
    data = io.BytesIO()
    torch.save(as_plain(error.evidence), data)
    key = layout.failure(context.buffer.run, step, ranks.rank)
    context.store.put(key, data.getvalue())
    log.error("batch and targets of the failed update are in %s", key, extra={"step": step})


def as_plain(value: Any) -> Any:
    """Returns a value as dicts, lists, tensors and simple values.

    `torch.load` reads these with `weights_only`, which runs no code of whoever wrote the file.
    """
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: as_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    return value


LogprobsOfGroup = list[list[float]]
"""Log-probs of a group's tokens, a list for each response."""


def groups_to_score(manifest: BatchManifest) -> list[ManifestMember]:
    """Returns the groups whose log-probs a step stores and which its batch does not have whole.

    Those of the batch have been scored when the step is trained.
    """
    trained = {member.group_id for member in manifest.members if is_whole(member)}
    return [member for member in manifest.record_proximal if member.group_id not in trained]


def score_groups(
    updater: Updater, reader: TrajectoryReader, members: Sequence[ManifestMember]
) -> dict[int, LogprobsOfGroup]:
    """Returns the log-probs under the current policy of this rank's share of groups, by group."""
    ranks = updater.ranks
    costs = [member_cost(member, updater.policy.width) for member in members]
    positions = balance_by_cost(costs, ranks.size)[ranks.rank]
    batch = reader.batch([members[position] for position in positions])
    return logprobs_by_group(batch, updater.score(batch))


def logprobs_by_group(batch: Batch, logprobs: Tensor) -> dict[int, LogprobsOfGroup]:
    """Returns log-probs (N, R) of a batch by group, without groups of which it has some rows."""
    by_member = split_by_group(batch, logprobs)
    return {
        member.group_id: rows
        for member, rows in zip(batch.members, by_member, strict=True)
        if is_whole(member)
    }


def is_whole(member: ManifestMember) -> bool:
    """Returns whether a member of a batch has all responses of its group, and no others."""
    return member.rows is None and member.demonstration is None


def record_proximal(
    logprobs: Mapping[int, LogprobsOfGroup],
    manifest: BatchManifest,
    ranks: Ranks,
    context: TrainerContext,
) -> None:
    """Stores log-probs under theta_t, of groups that may be replayed later. Every rank calls it.

    logprobs: of groups that this rank has scored.
    """
    wanted = {member.group_id for member in manifest.record_proximal}
    of_rank = {group_id: rows for group_id, rows in logprobs.items() if group_id in wanted}
    by_rank = ranks.gather_to_main(of_rank)
    if ranks.is_main:
        by_group = {group_id: rows for groups in by_rank for group_id, rows in groups.items()}
        context.buffer.post_proximal(manifest.step, encode_proximal(by_group))


def staleness_metrics(manifest: BatchManifest) -> dict[str, float]:
    """Returns mean and maximum of trainer step minus policy version, over the batch's groups.

    A batch without groups has neither.
    """
    staleness = [manifest.step - member.policy_version for member in manifest.members]
    if not staleness:
        return {}
    return {
        "staleness_mean": sum(staleness) / len(staleness),
        "staleness_max": float(max(staleness)),
    }
