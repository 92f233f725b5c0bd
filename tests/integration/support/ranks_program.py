"""Trains a few steps on a made-up batch, sharded, as every rank of `test_ranks.py` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from services.trainer import shard
from services.trainer.critic import Critic
from services.trainer.data import Batch, make_plan
from services.trainer.digests import batch_digest, weights_digest
from services.trainer.lora import add_adapters, full_tensor
from services.trainer.phases import PhaseTimer
from services.trainer.policy import Policy
from services.trainer.ranks import Ranks, init_distributed
from services.trainer.shard import load_sharded
from services.trainer.update import Updater
from tests.unit.trainer import test_update as single


def batch_of_rank(batch: Batch, positions: list[int]) -> Batch:
    """Returns the batch of a rank that has these groups."""
    rows = batch.rows_of(positions)
    size = batch.rewards.shape[1]
    return replace(
        batch,
        members=[batch.members[position] for position in positions],
        member=torch.arange(len(positions)).repeat_interleave(size),
        group=torch.arange(len(positions)).repeat_interleave(size),
        tokens=batch.tokens[rows],
        prompt_lengths=batch.prompt_lengths[rows],
        lengths=batch.lengths[rows],
        behavior_logprobs=batch.behavior_logprobs[rows],
        mask=batch.mask[rows],
        rewards=batch.rewards[positions],
        pixels=[batch.pixels[position] for position in positions] if batch.pixels else (),
    )


def full_weights(policy: Policy) -> dict[str, torch.Tensor]:
    """Returns the weights gathered from all ranks, by name. Every rank calls it."""
    return {
        name.replace("_checkpoint_wrapped_module.", ""): full_tensor(parameter)
        for name, parameter in policy.named_parameters()
    }


@dataclass(frozen=True)
class Case:
    tied: bool = False
    """Whether the model's embeddings are tied."""
    overrides: tuple[str, ...] = ()
    half: bool = False
    """Whether several processes compute as GPUs do: in bfloat16, from and to fp32."""


CASES = {
    "saving": Case(overrides=("trainer.offload=true", "trainer.gradient_checkpointing=selective")),
    "adapters": Case(overrides=("lora.rank=4",)),
    "critic": Case(overrides=("advantage.estimator=gae", "advantage.critic.learning_rate=1e-3")),
    "bounds": Case(
        overrides=(
            *("loss.objective=adaptive_clipping", "loss.correction=behavior", "optimizer.epochs=2"),
            *("advantage.scale=batch", "loss.aggregation=seq-mean-token-sum-norm"),
        )
    ),
    "draws": Case(
        overrides=(
            *("loss.objective=clip_cov", "loss.objective={fraction: 0.2, covariances: [0, 9]}"),
            *(
                "advantage.estimator=reinforce_pp",
                "kl.placement=reward",
                "loss.correction.weight_norm=batch",
            ),
        )
    ),
    "tied": Case(tied=True),
    "half": Case(half=True),
}
STEPS = 4


def train(ranks: Ranks, case: Case, models: Path) -> dict[str, Any]:
    """Returns the metrics of each step, the full weights after the last, and digests.

    The digests are that of the initial weights, then those of the batches.
    """
    # Updates have 4 and 2 groups, so of four ranks some have none in the second. The last step has
    # one group in all.
    settings = single.config("kl.reference=initial", "kl.coefficient=0.1", *case.overrides)

    def adapted(policy: Policy) -> Policy:
        add_adapters(policy.model, settings.lora, 7)
        return policy

    model, other = (models / f"{name}-{case.tied}" for name in ("model", "reference"))
    policy = load_sharded(model, ranks, prepare=adapted, settings=settings.trainer)
    reference = load_sharded(other, ranks, prepare=lambda policy: policy)
    critic = None
    if settings.advantage.estimator == "gae":
        critic = load_sharded(model, ranks, prepare=Critic)
    updater = Updater(settings, policy, ranks, reference, critic)
    full_batch = single.batch()
    members = [
        member.model_copy(update={"tokens": int(full_batch.mask[full_batch.group == index].sum())})
        for index, member in enumerate(full_batch.members)
    ]
    metrics, digests = [], [weights_digest(updater.modules, ranks)]
    for step in range(1, STEPS + 1):
        trained = members if step < STEPS else members[2:3]
        plan = make_plan(settings, step, trained, ranks=ranks.size, width=policy.width)
        first = 0 if step < STEPS else 2
        positions = [first + position for position in plan.of_rank(ranks.rank)]
        batch = batch_of_rank(full_batch, positions)
        digests.append(batch_digest(batch, positions, ranks))
        metrics.append(updater.step(step, batch, plan, single.WINDOW, PhaseTimer()).metrics)
    return {"metrics": metrics, "weights": full_weights(policy), "digests": digests}


def train_cases(out: Path, models: Path, cases: Sequence[str]) -> None:
    """Writes rank 0's metrics, digests and full weights, by case, to `out`.

    models: directory of the model directories.
    """
    with init_distributed() as ranks:
        results = {}
        for name in cases:
            shard.MixedPrecisionPolicy = (  # type: ignore[misc, assignment]
                (lambda: shard.HALF) if CASES[name].half else MixedPrecisionPolicy
            )
            results[name] = train(ranks, CASES[name], models)
        if ranks.is_main:
            torch.save(results, out)
