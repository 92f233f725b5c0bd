"""The trainer's main loop."""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bapo_core.config import RunConfig, TrainerConfig
from bapo_core.errors import BapoError
from bapo_core.schedule import SyncSchedule
from services.buffer.api.client import BufferClient
from services.buffer.api.spans import SpanRecorder
from services.buffer.api.trajectories import encode_proximal
from services.buffer.api.wire import BatchManifest
from services.common import layout
from services.common.objectstore import ObjectStore
from services.model.stored import fetch_model, model_on_disk
from services.trainer.checkpoint import Checkpointer, load_checkpoint
from services.trainer.critic import Critic
from services.trainer.data import TrajectoryReader, group_cost, make_plan
from services.trainer.lora import add_adapters
from services.trainer.nccl import NcclLink
from services.trainer.nccl_broadcast import NcclBroadcaster
from services.trainer.policy import Policy
from services.trainer.profile import profiled
from services.trainer.publish import WeightPublisher
from services.trainer.ranks import Ranks, joined, shares
from services.trainer.settings import TrainerSettings
from services.trainer.shard import load_sharded
from services.trainer.speed import speed_of
from services.trainer.update import Clock, NonFiniteLoss, Updater, group_rows

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the trainer reads from and writes to."""

    buffer: BufferClient
    store: ObjectStore
    model_directory: Path
    """The initial model."""
    scratch: Path
    token: str = field(repr=False)
    """Bearer token of the rollout replicas."""


def train(config: RunConfig, around: Surroundings, ranks: Ranks) -> None:
    """Trains from the last checkpoint to the last step. Every rank calls it."""
    publisher = make_publisher(config, around, ranks)
    checkpointer = Checkpointer(around.buffer, around.store, scratch=around.scratch, ranks=ranks)
    reader = TrajectoryReader(around.store)
    recorder = SpanRecorder(around.buffer, "trainer")
    clock = Clock(recorder if ranks.speaks else None)
    updater, done = restore(config, around, ranks)
    with profiling(config, around, ranks) as step_done:
        for clock.step in range(done + 1, config.steps + 1):
            step = clock.step
            if config.publishes_at(step):
                with clock.phase("publish"):
                    publisher.publish(step, updater.policy.model)
            with clock.phase("wait"):
                manifest = next_batch(step, around, ranks, publisher)
            metrics = train_batch(config, updater, reader, manifest, around, clock)
            with clock.phase("commit"):
                if ranks.speaks:
                    around.buffer.commit(step, metrics | clock.take())
            if config.checkpoints_after(step):
                with clock.phase("checkpoint"):
                    checkpointer.save(step, updater.trained)
            checkpointer.check()
            if ranks.speaks:
                recorder.flush()
                log.info("step committed", extra={"step": step})
            step_done(step)
    publisher.publish(config.steps + 1, updater.policy.model)
    publisher.settle()
    checkpointer.settle()
    # A worker that ends well ends the whole job well: none may while another still sends.
    ranks.largest(0)


def profiling(
    config: RunConfig, around: Surroundings, ranks: Ranks
) -> AbstractContextManager[Callable[[int], None]]:
    """Of some steps, if that is asked for."""
    return profiled(
        config.trainer.profile_steps,
        around.store,
        run=around.buffer.run,
        rank=ranks.rank,
        scratch=around.scratch,
    )


def next_batch(
    step: int, around: Surroundings, ranks: Ranks, publisher: WeightPublisher
) -> BatchManifest:
    """Waits for the step's groups; rank 0 asks."""
    return ranks.shared(lambda: around.buffer.batch(step, meanwhile=publisher.check))


def make_publisher(config: RunConfig, around: Surroundings, ranks: Ranks) -> WeightPublisher:
    dtype = config.sync.weights_dtype
    directly = config.sync.transport == "nccl" and ranks.speaks
    return WeightPublisher(
        around.buffer,
        around.store,
        source=around.model_directory,
        dtype=None if dtype == "as_trained" else getattr(torch, dtype),
        ranks=ranks,
        direct=NcclBroadcaster(around.buffer, around.token, NcclLink()) if directly else None,
    )


def restore(config: RunConfig, around: Surroundings, ranks: Ranks) -> tuple[Updater, int]:
    """The model as of the last checkpoint, or the initial one, and the last step it has seen."""
    updater = make_updater(config, around.model_directory, ranks)
    done, stored = ranks.shared(
        lambda: (around.buffer.run_state().current_step, around.buffer.latest_checkpoint())
    )
    if stored is None and done == 0:
        return updater, 0
    if stored is None or stored.number != done:
        raise BapoError(
            f"the run stands at step {done} but its last checkpoint is "
            f"{'missing' if stored is None else f'of step {stored.number}'}: another trainer is "
            "at work, or this one was not started through a new attempt"
        )
    load_checkpoint(stored, updater.trained, store=around.store, scratch=around.scratch)
    return updater, done


def make_updater(config: RunConfig, directory: Path, ranks: Ranks) -> Updater:
    """All models start as the initial one."""

    def adapted(policy: Policy) -> Policy:
        add_adapters(policy.model, config.lora, config.seed)
        return policy

    settings = config.trainer
    policy = load_sharded(directory, ranks, prepare=adapted, settings=settings)
    reference = critic = None
    if config.kl.coefficient > 0 and config.kl.reference == "initial":
        reference = load_sharded(directory, ranks, prepare=lambda found: found, settings=settings)
    if config.advantage.estimator == "gae":
        critic = load_sharded(directory, ranks, prepare=Critic, settings=settings)
    return Updater(config, policy, ranks, reference, critic)


def train_batch(
    config: RunConfig,
    updater: Updater,
    reader: TrajectoryReader,
    manifest: BatchManifest,
    around: Surroundings,
    clock: Clock,
) -> dict[str, float]:
    """One step's batch; an empty one trains nothing and is committed all the same.

    What there is to know about it, on rank 0.
    """
    ranks, step = updater.ranks, manifest.step
    metrics = staleness_metrics(config.schedule, manifest)
    if manifest.record_proximal:
        with clock.phase("proximal"):
            record_proximal(updater, reader, manifest, around)
    if not manifest.members:
        return metrics
    with clock.phase("read"):
        plan = make_plan(
            config, step, manifest.members, ranks=ranks.size, width=updater.policy.width
        )
        mine = [manifest.members[place] for place in plan.of_rank(ranks.rank)]
        batch = reader.batch(mine, proximal=config.loss.ratio == "decoupled")
    started = time.monotonic()
    try:
        found = updater.step(step, batch, plan, (manifest.c2, manifest.c3), clock)
    except NonFiniteLoss as error:
        keep_evidence(step, error, around, ranks)
        raise
    spent = time.monotonic() - started
    return metrics | found | speed_of(updater.policy, int(batch.lengths.sum()), spent, ranks)


def keep_evidence(step: int, error: NonFiniteLoss, around: Surroundings, ranks: Ranks) -> None:
    """Stores what led to a loss that is not a number; `torch.load` reads it."""
    data = io.BytesIO()
    torch.save(error.evidence, data)
    key = layout.failure(around.buffer.run, step, ranks.rank)
    around.store.put(key, data.getvalue())
    log.error("what led to it is in the object store: %s", key, extra={"step": step})


def record_proximal(
    updater: Updater, reader: TrajectoryReader, manifest: BatchManifest, around: Surroundings
) -> None:
    """Stores the log-probs, as of now, of groups that may be replayed later."""
    ranks, members = updater.ranks, manifest.record_proximal
    costs = [group_cost(member, updater.policy.width) for member in members]
    batch = reader.batch([members[place] for place in shares(costs, ranks.size)[ranks.rank]])
    scores = group_rows(batch, updater.score(batch))
    own = {member.group_id: values for member, values in zip(batch.members, scores, strict=True)}
    gathered = ranks.gathered(own)
    if ranks.speaks:
        by_group = {group: values for each in gathered for group, values in each.items()}
        around.buffer.post_proximal(manifest.step, encode_proximal(by_group))


def staleness_metrics(schedule: SyncSchedule, manifest: BatchManifest) -> dict[str, float]:
    """Trainer step minus policy version, over the groups of the batch."""
    ages = [manifest.step - member.policy_version for member in manifest.members]
    mean = sum(ages) / len(ages) if ages else float(schedule.staleness(manifest.step))
    return {"staleness_mean": mean, "staleness_max": float(max(ages, default=0))}


def initial_model(path: str, store: ObjectStore, ranks: Ranks, settings: TrainerSettings) -> Path:
    """The directory of the initial model; fetched once on each machine if it is a stored one."""
    found = model_on_disk(path, settings.model)
    if found is not None:
        return found
    place = settings.scratch / "model"
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        fetch_model(path, store, place)
    ranks.largest(0)  # nobody reads it before it is whole
    return place


def attempt_of(buffer: BufferClient, ranks: Ranks, given: int | None) -> int:
    """The attempt that somebody has begun for us (`BAPO_ATTEMPT`), or one of our own: it takes the
    run back to its last checkpoint, and collectors follow."""
    if given is not None:
        return given
    return ranks.shared(lambda: buffer.begin_attempt().attempt)


@contextmanager
def memory_explained() -> Iterator[None]:
    """What there is to do about a lack of memory, which starting again does not mend."""
    try:
        yield
    except RuntimeError as error:
        lacking = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if not lacking:
            raise
        reason = str(error).splitlines()[0]
        raise BapoError(
            f"out of memory ({reason}): lower optimizer.microbatch_tokens, set "
            "trainer.gradient_checkpointing or trainer.offload, or train with more processes; "
            "docs/scaling.md says what takes how much"
        ) from error


def config_of(buffer: BufferClient, override: str | None) -> RunConfig:
    """The run's; how it is computed here may be said anew each time (`BAPO_TRAINER`, as JSON)."""
    config = RunConfig.model_validate(buffer.run_state().config)
    if override is None:
        return config
    return config.model_copy(update={"trainer": TrainerConfig.model_validate_json(override)})


def main() -> None:
    from services.common.logs import configure_logs
    from services.common.process import end_with_parent, run_until_error

    configure_logs("trainer")
    end_with_parent()  # torchrun, which may be killed without a chance to end its processes

    def start() -> None:
        # Ranks on one machine must not write over each other.
        settings = TrainerSettings.load()
        token = settings.token.get_secret_value()
        scratch = settings.scratch / os.environ.get("RANK", "0")
        scratch.mkdir(parents=True, exist_ok=True)
        with joined() as ranks, memory_explained():
            buffer = BufferClient(settings.buffer_url, token, run=settings.run)
            buffer.attempt = attempt_of(buffer, ranks, settings.attempt)
            config = config_of(buffer, settings.trainer)
            store = ObjectStore(settings.s3)
            model = initial_model(config.model.path, store, ranks, settings)
            train(config, Surroundings(buffer, store, model, scratch, token), ranks)

    run_until_error(start)


if __name__ == "__main__":
    main()
