"""Re-trains recorded steps and prints their digests: `python -m services.trainer.audit FIRST LAST`.

Starts from the checkpoint before step FIRST (the initial model before step 1), trains the recorded
batches up to step LAST, and prints the digests of each step as a line of JSON. It reads from the
services and changes nothing there; `bapo audit` compares the digests with the recorded ones.
"""

from __future__ import annotations

import sys
from functools import partial

from bapo_core.config import ConfigHistory, RunConfig
from bapo_core.errors import BapoError
from services.buffer.api.wire import BatchManifest, CheckpointView, StepDigests, StoredVersion
from services.trainer.checkpoint import load_checkpoint
from services.trainer.digests import weights_digest
from services.trainer.loop import (
    TrainerContext,
    make_reader,
    make_updater,
    run_rank,
    train_batch,
)
from services.trainer.phases import PhaseTimer
from services.trainer.ranks import Ranks
from services.trainer.update import Updater


def retrain(
    config: RunConfig, context: TrainerContext, ranks: Ranks, first: int, last: int
) -> None:
    """Re-trains the steps on their recorded batches and prints their digests. Every rank calls it.

    Raises `BapoError` without a checkpoint before the first step.
    """
    history = ConfigHistory(config, context.buffer.run_state().changes)
    updater = restore_before(first, config, context, ranks)
    reader = make_reader(config, context)
    weights = weights_digest(updater.modules, ranks)
    for step in range(first, last + 1):
        updater.config = history.at(step)
        manifest = ranks.model_from_main(
            BatchManifest, partial(context.buffer.recorded_batch, step)
        )
        assert manifest is not None
        # The log-probs of groups that may be replayed are recorded already.
        manifest = manifest.model_copy(update={"record_proximal": []})
        outcome = train_batch(updater.config, updater, reader, manifest, context, PhaseTimer())
        digests = outcome.digests(weights, updater)
        weights = digests.weights_after
        if ranks.is_main:
            print_digests(digests)


def print_digests(digests: StepDigests) -> None:
    """Prints the digests where the command that started this process reads them."""
    sys.stdout.write(f"{digests.model_dump_json()}\n")
    sys.stdout.flush()


def restore_before(step: int, config: RunConfig, context: TrainerContext, ranks: Ranks) -> Updater:
    """Restores the trained modules as they were before a step."""
    updater = make_updater(config, context.model_directory, ranks)
    if step == 1:
        return updater

    def find_checkpoint() -> CheckpointView | None:
        views = context.buffer.checkpoints()
        return next((view for view in views if view.step == step - 1), None)

    stored = ranks.model_from_main(CheckpointView, find_checkpoint)
    if stored is None:
        raise BapoError(f"there is no checkpoint of step {step - 1} any more")
    load_checkpoint(
        StoredVersion(number=stored.step, uri=stored.uri, manifest_digest=stored.manifest_digest),
        updater.modules_to_save(step - 1),
        store=context.store,
        scratch=context.scratch,
    )
    return updater


def main() -> None:
    first, last = map(int, sys.argv[1:])
    run_rank("audit", partial(retrain, first=first, last=last), in_attempt=False)


if __name__ == "__main__":
    main()
