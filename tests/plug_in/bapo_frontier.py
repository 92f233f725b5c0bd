"""A sampler of prompts at the frontier of what the policy can do.

Half of the prompts of a round are those of highest learnability p (1 - p), where p is the mean of a
prompt's posterior; the other half explores the dataset at random.
"""

from __future__ import annotations

from bapo_core.sampling import Draw, DrawContext, Posterior
from bapo_core.seeding import derive_rng


def draw(context: DrawContext) -> Draw:
    config, count = context.config, context.config.rollout.prompts_per_step
    explored = round(config.sampler.options.get("explore", 0.5) * count)
    known = context.results.all_posteriors()

    def learnability(position: int) -> float:
        mean = known[position].mean
        return mean * (1 - mean)

    # Equal prompts come in the order of the dataset, so that the draw is a function of its inputs.
    left = [position for position in sorted(known) if position not in context.earlier]
    best = sorted(left, key=learnability, reverse=True)[: count - explored]
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
