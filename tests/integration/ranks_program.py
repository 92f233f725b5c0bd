"""What `test_ranks.py` runs under torchrun: a few steps on a made-up batch, sharded.

    torchrun ... ranks_program.py OUT STEPS RANK ESTIMATOR SAVING MODEL REFERENCE

Writes rank 0's metrics and whole weights to OUT. MODEL and REFERENCE are model directories, RANK
is that of the adapters, 0 for none, SAVING 1 to save memory.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

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


def train(
    ranks: Ranks, out: Path, steps: int, rank: int, estimator: str, saving: bool, models: list[Path]
) -> None:
    # Updates of 4 and of 2 groups: of four ranks, some have nothing in the second. In the last step
    # there is one group in all.
    settings = single.config(
        "kl.reference=initial",
        "kl.coefficient=0.1",
        f"lora.rank={rank}",
        f"advantage.estimator={estimator}",
        "critic.learning_rate=1e-3",
        f"trainer.offload={saving}",
        f"trainer.gradient_checkpointing={'selective' if saving else 'none'}",
    )

    def adapted(policy: Policy) -> Policy:
        add_adapters(policy.model, settings.lora, 7)
        return policy

    policy = load_sharded(models[0], ranks, prepare=adapted, settings=settings.trainer)
    reference = load_sharded(models[1], ranks, prepare=lambda found: found)
    critic = load_sharded(models[0], ranks, prepare=Critic) if estimator == "gae" else None
    updater = Updater(settings, policy, ranks, reference, critic)
    whole = single.batch()
    members = [
        member.model_copy(update={"tokens": int(whole.mask[whole.group == index].sum())})
        for index, member in enumerate(whole.members)
    ]
    found = []
    for step in range(1, steps + 1):
        trained = members if step < steps else members[2:3]
        plan = make_plan(settings, step, trained, ranks=ranks.size, width=policy.width)
        first = 0 if step < steps else 2
        batch = part_of(whole, [first + place for place in plan.of_rank(ranks.rank)])
        found.append(updater.step(step, batch, plan, single.WINDOW, Clock()))
    weights = whole_weights(policy)
    if ranks.speaks:
        torch.save({"metrics": found, "weights": weights}, out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined() as ranks:
        out, steps, rank, estimator, saving, *models = sys.argv[1:]
        train(
            ranks,
            Path(out),
            int(steps),
            int(rank),
            estimator,
            saving == "1",
            [Path(model) for model in models],
        )
