"""Trains recorded steps again, on their recorded batches, and yields the digests of each.

`services.trainer.audit` compares the digests. A fork at a step without a checkpoint begins so: the
steps from the checkpoint before it on are trained again, as they were, with no rollouts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial

from bapo_core.config import ConfigHistory, RunConfig
from services.buffer.api.wire import BatchManifest, ForkOrigin, StepDigests, StoredVersion
from services.trainer.checkpoint import Checkpointer, load_checkpoint
from services.trainer.digests import weights_digest
from services.trainer.phases import PhaseTimer
from services.trainer.ranks import Ranks
from services.trainer.steps import TrainerContext, make_reader, make_updater, train_batch
from services.trainer.update import Updater

log = logging.getLogger(__name__)


def retrain(
    updater: Updater,
    history: ConfigHistory,
    context: TrainerContext,
    ranks: Ranks,
    first: int,
    last: int,
    read_batch: Callable[[int], BatchManifest],
) -> Iterator[StepDigests]:
    """Trains the recorded batches of steps first..last again; yields the digests of each step.

    updater: with the state before step `first`. read_batch: reads the batch of a step, which rank 0
    calls. Every rank calls this function.
    """
    reader = make_reader(history.current, context)
    weights = weights_digest(updater.modules, ranks)
    for step in range(first, last + 1):
        updater.config = history.at(step)
        manifest = ranks.model_from_main(BatchManifest, partial(read_batch, step))
        assert manifest is not None
        # The log-probs of groups that may be replayed are recorded already.
        manifest = manifest.model_copy(update={"record_proximal": []})
        outcome = train_batch(updater.config, updater, reader, manifest, context, PhaseTimer())
        digests = outcome.digests(weights, updater)
        weights = digests.weights_after
        yield digests


def restore_from(
    stored: StoredVersion | None, config: RunConfig, context: TrainerContext, ranks: Ranks
) -> Updater:
    """Restores the trained modules from a checkpoint, or from the initial model without one."""
    updater = make_updater(config, context.model_directory, ranks)
    if stored is not None:
        modules = updater.modules_to_save(stored.number)
        load_checkpoint(stored, modules, store=context.store, scratch=context.scratch)
    return updater


def begin_fork(
    origin: ForkOrigin,
    history: ConfigHistory,
    context: TrainerContext,
    checkpointer: Checkpointer,
    ranks: Ranks,
) -> None:
    """Stores the checkpoint of the step of a fork, if there is none. Every rank calls it.

    The steps after the parent's checkpoint are trained again with the configuration that they had.
    """
    latest = ranks.model_from_main(StoredVersion, context.buffer.latest_checkpoint)
    found = 0 if latest is None else latest.number
    if found >= origin.step:
        return
    if ranks.is_main:
        log.info(
            "the fork of %s begins at the checkpoint of step %d: steps %d to %d are trained again",
            origin.describe(),
            found,
            found + 1,
            origin.step,
        )
    recorded = ranks.from_main(lambda: _recorded_weights(context, found, origin.step))
    updater = restore_from(latest, history.at(origin.step), context, ranks)
    first, last = found + 1, origin.step
    steps = retrain(updater, history, context, ranks, first, last, context.buffer.batch)
    for step, digests in enumerate(steps, first):
        if ranks.is_main and recorded.get(step) not in (None, digests.weights_after):
            log.warning(
                "step %d, trained again, has other weights than it had in run %s: this machine "
                "does not repeat the sums bit for bit; the fork goes on with its own weights",
                step,
                origin.run,
            )
    checkpointer.save(origin.step, updater.modules_to_save(origin.step))
    ranks.wait_for_all(checkpointer.settle)


def _recorded_weights(context: TrainerContext, after: int, last: int) -> dict[int, str]:
    views = context.buffer.steps(after=after)
    return {
        view.step: view.digests.weights_after
        for view in views
        if view.digests is not None and view.step <= last
    }
