"""A sampler of prompts at the frontier of what the policy can do: those whose learnability
p (1 - p) is highest, where p is the mean of a prompt's posterior, and random ones.
"""

from __future__ import annotations

from pydantic import Field

from bapo_core.config.samplers import PlugInSamplerConfig
from bapo_core.sampling import Draw, DrawContext, Posterior
from bapo_core.seeding import derive_rng


class FrontierConfig(PlugInSamplerConfig):
    explore: float = Field(0.5, ge=0, le=1)
    """Share of a round's prompts that are drawn at random."""


def draw(context: DrawContext) -> Draw:
    config, count = context.config, context.config.rollout.prompts_per_step
    assert isinstance(config.sampler, FrontierConfig)
    known = context.results.all_posteriors()
    learnability = {position: p.mean * (1 - p.mean) for position, p in known.items()}
    # Equal prompts come in the order of the dataset, so that the draw is a function of its inputs.
    left = [position for position in sorted(known) if position not in context.earlier]
    left.sort(key=learnability.__getitem__, reverse=True)
    best = left[: count - round(config.sampler.explore * count)]
    rng = derive_rng(config.seed, "frontier", context.step, context.generation_round)
    others = set(range(context.dataset_size)) - context.earlier - set(best)
    random = rng.sample(sorted(others), count - len(best))

    def explain(position: int, posterior: Posterior) -> str:
        chance = f"its probability of a correct response is {posterior.mean:.3f}"
        if position in best:
            return f"it is among the {len(best)} prompts of highest learnability: {chance}"
        if position in random:
            return f"it is one of {len(random)} prompts that explore the dataset: {chance}"
        return f"others have a higher learnability: {chance}"

    return Draw([*best, *random], explain=explain)
