"""The trainer's main loop (design section 8)."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from bapo_core.config import RunConfig
from bapo_core.schedule import SyncSchedule
from services.buffer.client import BufferClient
from services.buffer.timeline import Timeline
from services.buffer.trajectories import encode_proximal
from services.buffer.wire import BatchManifest
from services.common.errors import BapoError
from services.common.objectstore import ObjectStore
from services.trainer.checkpoint import load_checkpoint, save_checkpoint
from services.trainer.data import TrajectoryReader
from services.trainer.policy import load_model
from services.trainer.publish import WeightPublisher
from services.trainer.update import Clock, Updater, group_rows

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the trainer reads from and writes to."""

    buffer: BufferClient
    store: ObjectStore
    model_directory: Path
    """The initial model."""
    scratch: Path


def train(config: RunConfig, around: Surroundings) -> None:
    """Trains from the last checkpoint to the last step."""
    updater, done = restore(config, around)
    publisher = make_publisher(config, around)
    reader = TrajectoryReader(around.store)
    timeline = Timeline(around.buffer, "trainer")
    clock = Clock(timeline)
    for clock.step in range(done + 1, config.steps + 1):
        step = clock.step
        if config.publishes_at(step):
            with clock.phase("publish"):
                publisher.publish(step, updater.model)
        with clock.phase("wait"):
            manifest = around.buffer.batch(step, meanwhile=publisher.check)
        metrics = train_batch(config, updater, reader, manifest, around, clock)
        with clock.phase("commit"):
            around.buffer.commit(step, metrics | clock.take())
        if config.checkpoints_after(step):
            with clock.phase("checkpoint"):
                checkpoint(updater, step, around)
        timeline.tell()
        log.info("step committed", extra={"step": step})
    publisher.publish(config.steps + 1, updater.model)
    publisher.settle()


def make_publisher(config: RunConfig, around: Surroundings) -> WeightPublisher:
    dtype = config.sync.weights_dtype
    return WeightPublisher(
        around.buffer,
        around.store,
        source=around.model_directory,
        dtype=None if dtype == "as_trained" else getattr(torch, dtype),
    )


def restore(config: RunConfig, around: Surroundings) -> tuple[Updater, int]:
    """The model as of the last checkpoint, or the initial one, and the last step it has seen."""
    model = load_model(around.model_directory)
    needs_reference = config.kl.coefficient > 0 and config.kl.reference == "initial"
    reference = load_model(around.model_directory) if needs_reference else None
    updater = Updater(config, model, reference)
    done = around.buffer.run_state().current_step
    stored = around.buffer.latest_checkpoint()
    if stored is None and done == 0:
        return updater, 0
    if stored is None or stored.number != done:
        raise BapoError(
            f"the run stands at step {done} but its last checkpoint is "
            f"{'missing' if stored is None else f'of step {stored.number}'}: another trainer is "
            "at work, or this one was not started through a new attempt"
        )
    load_checkpoint(
        stored.uri,
        stored.manifest_digest,
        model,
        updater.optimizer,
        store=around.store,
        scratch=around.scratch,
    )
    return updater, done


def train_batch(
    config: RunConfig,
    updater: Updater,
    reader: TrajectoryReader,
    manifest: BatchManifest,
    around: Surroundings,
    clock: Clock,
) -> dict[str, float]:
    """One step's batch; an empty one trains nothing and is committed all the same."""
    metrics = staleness_metrics(config.schedule, manifest)
    if manifest.record_proximal:
        with clock.phase("proximal"):
            stored = reader.batch(manifest.record_proximal)
            scores = group_rows(stored, updater.score(stored))
            by_group = {
                member.group_id: values
                for member, values in zip(stored.members, scores, strict=True)
            }
            around.buffer.post_proximal(manifest.step, encode_proximal(by_group))
    if not manifest.members:
        return metrics
    with clock.phase("read"):
        batch = reader.batch(manifest.members, proximal=config.loss.ratio == "decoupled")
    metrics["trained_tokens"] = float(batch.mask.sum())
    metrics["response_length"] = float(batch.mask.sum(dim=1).float().mean())
    return metrics | updater.step(manifest.step, batch, (manifest.c2, manifest.c3), clock)


def staleness_metrics(schedule: SyncSchedule, manifest: BatchManifest) -> dict[str, float]:
    """Trainer step minus policy version, over the groups of the batch."""
    ages = [manifest.step - member.policy_version for member in manifest.members]
    mean = sum(ages) / len(ages) if ages else float(schedule.staleness(manifest.step))
    return {"staleness_mean": mean, "staleness_max": float(max(ages, default=0))}


def checkpoint(updater: Updater, step: int, around: Surroundings) -> None:
    save_checkpoint(
        step,
        updater.model,
        updater.optimizer,
        buffer=around.buffer,
        store=around.store,
        scratch=around.scratch,
    )


@contextmanager
def process_group() -> Iterator[None]:
    """torchrun's process group, or one of a single process."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        if dist.get_world_size() > 1:
            raise BapoError(
                f"the trainer was started with {dist.get_world_size()} processes; it runs in one "
                "for now: start it without torchrun, or with --nproc-per-node 1"
            )
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    from services.common.logs import configure_logs
    from services.common.process import run_until_error
    from services.common.settings import ObjectStoreSettings, require

    configure_logs("trainer")

    def start() -> None:
        buffer = BufferClient(
            require("BAPO_BUFFER_URL"),
            require("BAPO_TOKEN"),
            run=require("BAPO_RUN"),
            attempt=int(require("BAPO_ATTEMPT")),
        )
        config = RunConfig.model_validate(buffer.run_state().config)
        scratch = Path(require("BAPO_SCRATCH"))
        scratch.mkdir(parents=True, exist_ok=True)
        with process_group():
            train(
                config,
                Surroundings(
                    buffer,
                    ObjectStore(ObjectStoreSettings.from_environment()),
                    Path(require("BAPO_MODEL")),
                    scratch,
                ),
            )

    run_until_error(start)


if __name__ == "__main__":
    main()
