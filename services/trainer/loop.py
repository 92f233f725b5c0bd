"""The trainer's main loop."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from bapo_core.config import ConfigHistory, RunConfig
from bapo_core.config.training import TrainerConfig
from bapo_core.errors import BapoError
from services.buffer.api.client import BufferClient
from services.buffer.api.spans import SpanRecorder
from services.buffer.api.trajectories import encode_proximal
from services.buffer.api.wire import BatchManifest, ManifestMember, StepDigests, StoredVersion
from services.common import layout
from services.common.errors import first_line
from services.common.objectstore import ObjectStore
from services.model.stored import fetch_model, model_on_disk
from services.model.vision import load_processor
from services.rollout.api.addresses import ReplicaHosts
from services.trainer.background import Background
from services.trainer.checkpoint import Checkpointer, load_checkpoint
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
    out_of_memory_remedy,
    plan_memory,
)
from services.trainer.nccl import NcclCommunicator
from services.trainer.nccl_broadcast import NcclBroadcaster
from services.trainer.phases import PhaseTimer
from services.trainer.policy import Policy
from services.trainer.profile import trace_steps
from services.trainer.publish import WeightPublisher
from services.trainer.ranks import Ranks, balance_by_cost, init_distributed
from services.trainer.settings import TrainerSettings
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


def train(config: RunConfig, context: TrainerContext, ranks: Ranks) -> None:
    """Trains from the last checkpoint to the last step. Every rank calls it."""
    history = ConfigHistory(config, context.buffer.run_state().changes)
    publisher = make_publisher(config, context, ranks)
    checkpointer = Checkpointer(context.buffer, context.store, scratch=context.scratch, ranks=ranks)
    reader = make_reader(config, context)
    recorder = SpanRecorder(context.buffer, "trainer")
    timer = PhaseTimer(recorder if ranks.is_main else None)
    updater, last_step = restore(config, context, ranks)
    weights = weights_digest(updater.modules, ranks)
    refuse_other_weights(last_step, weights, context, ranks)
    with trace(config, context, ranks) as step_done:
        for timer.step in range(last_step + 1, history.current.steps + 1):
            step = timer.step
            updater.config = history.at(step)
            if updater.config.publishes_at(step):
                with timer.phase("publish"):
                    publisher.publish(step, updater.policy.model)
            with timer.phase("wait"):
                manifest = wait_for_batch(step, context, ranks, publisher)
            with explain_out_of_memory(lambda: out_of_memory_remedy(config, updater.memory)):
                outcome = train_batch(updater.config, updater, reader, manifest, context, timer)
            with timer.phase("commit"):
                digests = outcome.digests(weights, updater)
                weights = digests.weights_after
                if ranks.is_main:
                    context.buffer.commit(step, outcome.metrics | timer.pop(), digests)
            if updater.config.checkpoints_after(step):
                with timer.phase("checkpoint"):
                    # After a resume from this checkpoint, earlier versions are never published
                    # again, so they must be recorded first.
                    publisher.wait_until_recorded()
                    checkpointer.save(step, updater.modules_to_save(step))
            checkpointer.check()
            if ranks.is_main:
                recorder.flush()
                log.info("step committed", extra={"step": step})
            step_done(step)
    publisher.publish(history.current.steps + 1, updater.policy.model)
    # The job succeeds as soon as one worker exits 0, so all ranks wait here until uploads are done.
    ranks.wait_for_all(lambda: settle(publisher, checkpointer))


def settle(*tasks: Background) -> None:
    """Waits for what runs in the background. Raises its error."""
    for task in tasks:
        task.settle()


def trace(
    config: RunConfig, context: TrainerContext, ranks: Ranks
) -> AbstractContextManager[Callable[[int], None]]:
    """Traces `trainer.profile_steps` steps; yields a function to call with each finished step."""
    return trace_steps(
        config.trainer.profile_steps,
        context.store,
        run=context.buffer.run,
        rank=ranks.rank,
        scratch=context.scratch,
    )


def wait_for_batch(
    step: int, context: TrainerContext, ranks: Ranks, publisher: WeightPublisher
) -> BatchManifest:
    """Returns the step's batch once its groups have arrived; rank 0 asks for it.

    Raises the publisher's error if publishing fails meanwhile: no groups would ever come.
    """
    manifest = ranks.model_from_main(
        BatchManifest, lambda: context.buffer.batch(step, meanwhile=publisher.check)
    )
    assert manifest is not None
    return manifest


def make_publisher(config: RunConfig, context: TrainerContext, ranks: Ranks) -> WeightPublisher:
    """Builds the publisher, with a broadcaster on rank 0 if `sync.transport` is nccl."""
    dtype = config.sync.weights_dtype
    broadcaster = None
    if config.sync.transport == "nccl" and ranks.is_main:
        broadcaster = NcclBroadcaster(
            context.buffer, ReplicaHosts(context.replica_hosts), NcclCommunicator()
        )
    return WeightPublisher(
        context.buffer,
        context.store,
        source=context.model_directory,
        dtype=None if dtype == "as_trained" else getattr(torch, dtype),
        ranks=ranks,
        broadcaster=broadcaster,
    )


def restore(config: RunConfig, context: TrainerContext, ranks: Ranks) -> tuple[Updater, int]:
    """Restores the run's last checkpoint; returns the updater and the last step that it has seen.

    Without a committed step, they are those of the initial model and 0. Raises `BapoError` when the
    last checkpoint is not that of the run's current step.
    """
    updater = make_updater(
        config, context.model_directory, ranks, engine_share=context.engine_share
    )
    last_step = ranks.from_main(lambda: context.buffer.run_state().current_step)
    stored = ranks.model_from_main(StoredVersion, context.buffer.latest_checkpoint)
    if stored is None and last_step == 0:
        return updater, 0
    if stored is None or stored.number != last_step:
        raise BapoError(
            f"the run is at step {last_step}, but its last checkpoint is "
            f"{'missing' if stored is None else f'of step {stored.number}'}: another trainer is "
            "running, or this one was started without a new attempt; continue the run with "
            "`bapo run --resume`"
        )
    modules = updater.modules_to_save(last_step)
    load_checkpoint(stored, modules, store=context.store, scratch=context.scratch)
    return updater, last_step


def refuse_other_weights(step: int, weights: str, context: TrainerContext, ranks: Ranks) -> None:
    """Raises `BapoError` if restored weights are not those with which their step was committed.

    weights: digest of the restored weights. Whoever has a token of scope run can record a
    checkpoint of a step that has none, but the digests of a committed step do not change. A step
    that was committed without digests is not checked.
    """

    def find_recorded() -> str | None:
        views = context.buffer.steps(after=step - 1) if step else []
        return views[0].digests.weights_after if views and views[0].digests else None

    recorded = ranks.from_main(find_recorded)
    if recorded not in (None, weights):
        run = context.buffer.run
        raise BapoError(
            f"the checkpoint of step {step} of run {run!r} does not have the weights with which "
            "the step was committed: its trainer has not written it, or it was replaced; find out "
            "who has a token of scope run or admin and the keys of the bucket, and go on in a new "
            f"run, with model.path from `bapo checkpoints {run} --step STEP --export DIRECTORY` of "
            "an earlier step"
        )


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


def initial_model(path: str, store: ObjectStore, ranks: Ranks, settings: TrainerSettings) -> Path:
    """Returns the directory of the initial model, fetched once a machine if it is a stored one."""
    directory = model_on_disk(path, settings.model)
    if directory is not None:
        return directory
    directory = settings.scratch / "model"

    def fetch_once() -> None:
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            fetch_model(path, store, directory)

    ranks.wait_for_all(fetch_once)  # no rank reads a model that is not complete
    return directory


def resolve_attempt(buffer: BufferClient, ranks: Ranks, attempt: int | None) -> int:
    """Returns the attempt of the run to work for: `BAPO_ATTEMPT`, or else a new one.

    A new attempt takes the run back to its last checkpoint, and collectors follow it.
    """
    if attempt is not None:
        return attempt
    return ranks.from_main(lambda: buffer.begin_attempt().attempt)


@contextmanager
def explain_out_of_memory(remedy: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Turns a lack of memory into a `BapoError` with the remedies: a restart would not help.

    remedy: returns what to change.
    """
    try:
        yield
    except RuntimeError as error:
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        if not (out_of_memory or "can't allocate memory" in str(error)):
            raise
        reason = first_line(error)
        advice = remedy() or (
            "set trainer.gradient_checkpointing=full or trainer.offload=true, or train with more "
            "processes (trainer.processes), then resume; a new run may also have a lower "
            "optimizer.microbatch_tokens"
        )
        raise BapoError(
            f"out of memory ({reason}): {advice}. docs/scaling.md lists how much memory each part "
            "takes"
        ) from error


def load_run_config(buffer: BufferClient, override: str | None) -> RunConfig:
    """Returns the run's configuration; `override` is its `trainer` section anew, as JSON.

    `trainer.*` affects how a step is computed and not its result, so it may differ from the stored
    one (`BAPO_TRAINER`).
    """
    config = buffer.run_state().config
    if override is None:
        return config
    return config.model_copy(update={"trainer": TrainerConfig.model_validate_json(override)})


def run_rank(
    component: str, work: Callable[[RunConfig, TrainerContext, Ranks], None], *, in_attempt: bool
) -> None:
    """Calls `work` in this rank of a trainer of the run named by `BAPO_RUN`, until its end.

    component: its name in the logs. in_attempt: whether it works for an attempt of the run.
    """
    from services.common.logs import configure_logs
    from services.common.process import end_with_parent, run_until_error

    configure_logs(component)
    # Freed memory of one size then serves for another; micro-batches have many sizes. It is read
    # when the first tensor of a GPU is made.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    end_with_parent()  # torchrun may be killed without a chance to end its ranks

    def start() -> None:
        settings = TrainerSettings.load()
        token = settings.token.get_secret_value()
        # Ranks on one machine must not overwrite each other's files.
        scratch = settings.scratch / os.environ.get("RANK", "0")
        scratch.mkdir(parents=True, exist_ok=True)
        with init_distributed() as ranks, explain_out_of_memory():
            buffer = BufferClient(settings.buffer_url, token, run=settings.run)
            if in_attempt:
                buffer.attempt = resolve_attempt(buffer, ranks, settings.attempt)
            config = load_run_config(buffer, settings.trainer)
            store = ObjectStore(settings.s3)
            model = initial_model(config.model.path, store, ranks, settings)
            context = TrainerContext(
                buffer, store, model, scratch, settings.replica_hosts, settings.engine_share
            )
            work(config, context, ranks)

    run_until_error(start)


def main() -> None:
    """Runs this rank of the trainer of the run named by `BAPO_RUN`."""
    run_rank("trainer", train, in_attempt=True)


if __name__ == "__main__":
    main()
