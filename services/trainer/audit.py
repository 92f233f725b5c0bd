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
from services.buffer.api.wire import StepDigests, StoredVersion
from services.trainer.loop import run_rank
from services.trainer.ranks import Ranks
from services.trainer.replay import restore_from, retrain
from services.trainer.steps import TrainerContext


def print_retrained(
    config: RunConfig, context: TrainerContext, ranks: Ranks, first: int, last: int
) -> None:
    """Re-trains the steps on their recorded batches and prints their digests. Every rank calls it.

    Raises `BapoError` without a checkpoint before the first step.
    """
    history = ConfigHistory(config, context.buffer.run_state().changes)
    stored = ranks.model_from_main(StoredVersion, partial(find_checkpoint, context, first - 1))
    updater = restore_from(stored, config, context, ranks)
    read_batch = context.buffer.recorded_batch
    for digests in retrain(updater, history, context, ranks, first, last, read_batch):
        if ranks.is_main:
            print_digests(digests)


def find_checkpoint(context: TrainerContext, step: int) -> StoredVersion | None:
    """Returns the checkpoint of a step; None for step 0. Raises `BapoError` if it is not kept."""
    if step == 0:
        return None
    for view in context.buffer.checkpoints():
        if view.step == step:
            return StoredVersion(number=step, uri=view.uri, manifest_digest=view.manifest_digest)
    raise BapoError(f"there is no checkpoint of step {step} any more")


def print_digests(digests: StepDigests) -> None:
    """Prints the digests where the command that started this process reads them."""
    sys.stdout.write(f"{digests.model_dump_json()}\n")
    sys.stdout.flush()


def main() -> None:
    first, last = map(int, sys.argv[1:])
    run_rank("audit", partial(print_retrained, first=first, last=last), in_attempt=False)


if __name__ == "__main__":
    main()
