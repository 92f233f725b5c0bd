"""Trains a model that reads images, sharded; `test_vision_ranks.py` runs it by torchrun.

    torchrun ... vision_ranks_program.py OUT MODEL

Writes the metrics of each step and the full weights after the last one to OUT. Updates have one
group for each of two ranks, and one group has no image.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from services.trainer.data import make_plan
from services.trainer.phases import PhaseTimer
from services.trainer.ranks import init_distributed
from services.trainer.shard import load_sharded
from services.trainer.update import Updater
from tests.integration.ranks_program import batch_of_rank, full_weights
from tests.unit.trainer.test_vision_training import sampled_batch, settings

if __name__ == "__main__":
    torch.set_num_threads(1)
    with init_distributed() as ranks:
        out, model = sys.argv[1:]
        config = settings(optimizer={"minibatch_prompts": 2, "microbatch_tokens": 256})
        policy = load_sharded(Path(model), ranks, prepare=lambda policy: policy)
        updater = Updater(config, policy, ranks)
        full_batch = sampled_batch(Path(model))
        metrics = []
        for step in range(1, 3):
            plan = make_plan(config, step, full_batch.members, ranks=ranks.size, width=policy.width)
            batch = batch_of_rank(full_batch, plan.of_rank(ranks.rank))
            metrics.append(updater.step(step, batch, plan, (0.25, 0.75), PhaseTimer()))
        weights = full_weights(policy)
        if ranks.is_main:
            torch.save({"metrics": metrics, "weights": weights}, out)
