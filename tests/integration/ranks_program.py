"""What `test_ranks.py` runs under torchrun: a few steps on a made-up batch, sharded.

    torchrun ... ranks_program.py OUT MODELS CASE ...

Writes rank 0's metrics and whole weights, by case, to OUT. MODELS holds model directories.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from services.trainer import shard
from services.trainer.critic import Critic
from services.trainer.data import Batch, make_plan
from services.trainer.lora import add_adapters
from services.trainer.policy import Policy
from services.trainer.ranks import Ranks, joined
from services.trainer.shard import load_sharded
from services.trainer.update import Clock, Updater
from tests.unit.trainer import test_update as single


def part_of(batch: Batch, places: list[int]) -> Batch:
    """The batch of a rank that has these groups."""
    rows = batch.rows_of(places)
    size = batch.rewards.shape[1]
    return replace(
        batch,
        members=[batch.members[place] for place in places],
        group=torch.arange(len(places)).repeat_interleave(size),
        tokens=batch.tokens[rows],
        prompt_lengths=batch.prompt_lengths[rows],
        lengths=batch.lengths[rows],
        behavior=batch.behavior[rows],
        mask=batch.mask[rows],
        rewards=batch.rewards[places],
    )


def whole_weights(policy: Policy) -> dict[str, torch.Tensor]:
    """Every rank must call it."""
    return {
        name.replace("_checkpoint_wrapped_module.", ""): (
            each.full_tensor() if isinstance(each, DTensor) else each
        ).detach()
        for name, each in policy.named_parameters()
    }


@dataclass(frozen=True)
class Case:
    tied: bool = False
    """The model's embeddings."""
    overrides: tuple[str, ...] = ()
    half: bool = False
    """Several processes compute as GPUs do: in bfloat16, from and to fp32."""


CASES = {
    "saving": Case(overrides=("trainer.offload=true", "trainer.gradient_checkpointing=selective")),
    "adapters": Case(overrides=("lora.rank=4",)),
    "critic": Case(overrides=("advantage.estimator=gae", "critic.learning_rate=1e-3")),
    "tied": Case(tied=True),
    "half": Case(half=True),
}
STEPS = 4


def train(ranks: Ranks, case: Case, models: Path) -> dict[str, Any]:
    """(metrics by step, whole weights)."""
    # Updates of 4 and of 2 groups: of four ranks, some have nothing in the second. In the last step
    # there is one group in all.
    settings = single.config("kl.reference=initial", "kl.coefficient=0.1", *case.overrides)

    def adapted(policy: Policy) -> Policy:
        add_adapters(policy.model, settings.lora, 7)
        return policy

    model, other = (models / f"{name}-{case.tied}" for name in ("model", "reference"))
    policy = load_sharded(model, ranks, prepare=adapted, settings=settings.trainer)
    reference = load_sharded(other, ranks, prepare=lambda found: found)
    critic = None
    if settings.advantage.estimator == "gae":
        critic = load_sharded(model, ranks, prepare=Critic)
    updater = Updater(settings, policy, ranks, reference, critic)
    whole = single.batch()
    members = [
        member.model_copy(update={"tokens": int(whole.mask[whole.group == index].sum())})
        for index, member in enumerate(whole.members)
    ]
    found = []
    for step in range(1, STEPS + 1):
        trained = members if step < STEPS else members[2:3]
        plan = make_plan(settings, step, trained, ranks=ranks.size, width=policy.width)
        first = 0 if step < STEPS else 2
        batch = part_of(whole, [first + place for place in plan.of_rank(ranks.rank)])
        found.append(updater.step(step, batch, plan, single.WINDOW, Clock()))
    return {"metrics": found, "weights": whole_weights(policy)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined() as ranks:
        out, models, *cases = sys.argv[1:]
        found = {}
        for name in cases:
            shard.MixedPrecisionPolicy = (  # type: ignore[misc, assignment]
                (lambda: shard.HALF) if CASES[name].half else MixedPrecisionPolicy
            )
            found[name] = train(ranks, CASES[name], Path(models))
        if ranks.speaks:
            torch.save(found, out)
