"""Trains a model that reads images, sharded, as every rank of `test_vision_ranks.py` does."""

from __future__ import annotations

from pathlib import Path

import torch

from services.trainer.data import make_plan
from services.trainer.phases import PhaseTimer
from services.trainer.ranks import init_distributed
from services.trainer.shard import load_sharded
from services.trainer.update import Updater
from tests.integration.support.ranks_program import batch_of_rank, full_weights
from tests.unit.trainer.test_vision_training import sampled_batch, settings


def train(out: Path, model: Path) -> None:
    """Writes the metrics of each step and the full weights after the last one to `out`.

    Updates have one group for each of two ranks, and one group has no image.
    """
    with init_distributed() as ranks:
        config = settings(optimizer={"minibatch_prompts": 2, "microbatch_tokens": 256})
        policy = load_sharded(model, ranks, prepare=lambda policy: policy)
        updater = Updater(config, policy, ranks)
        full_batch = sampled_batch(model)
        metrics = []
        for step in range(1, 3):
            plan = make_plan(config, step, full_batch.members, ranks=ranks.size, width=policy.width)
            batch = batch_of_rank(full_batch, plan.of_rank(ranks.rank))
            metrics.append(updater.step(step, batch, plan, (0.25, 0.75), PhaseTimer()).metrics)
        weights = full_weights(policy)
        if ranks.is_main:
            torch.save({"metrics": metrics, "weights": weights}, out)
