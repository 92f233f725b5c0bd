"""Comparison of runs: their curves over what they cost, their variants and configurations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from sqlalchemy import Float, func, select
from sqlalchemy.dialects.postgresql import JSONB

from bapo_core.config import flatten
from bapo_core.resolution import FEWEST_PAIRS, paired_difference
from services.buffer.api import wire
from services.buffer.queries.committed_steps import sampled_steps
from services.buffer.queries.difficulty import bins_at
from services.buffer.queries.evaluations import list_evaluations
from services.buffer.storage.tables import Run, StepRecord
from services.common.problems import bad_request

Config = dict[str, Any]
"""Values of a configuration by dotted key."""


class Member(NamedTuple):
    """A run of a variant."""

    name: str
    seed: int


def compare_runs(runs: Sequence[Run], points: int) -> wire.RunComparison:
    """Returns the curves of runs, of at most `points` steps each, and differing configuration.

    Raises 400 for runs of more than `MAX_VARIANTS` variants.
    """
    configs = [flatten(run.values) for run in runs]
    variants = _group_by_variant(runs, configs)
    if len(variants) > wire.MAX_VARIANTS:
        raise bad_request(
            f"the runs are {len(variants)} variants, and a comparison has {wire.MAX_VARIANTS} at "
            "most; leave some out (runs whose configurations differ in the seed alone are one "
            "variant)"
        )
    compared = [_compared(run, points) for run in runs]
    version, accuracies = _accuracies_at_equal_steps(compared)
    keys = sorted(set().union(*configs) - {"name"})
    values = {key: [config.get(key) for config in configs] for key in keys}
    return wire.RunComparison(
        runs=compared,
        variants=_describe_variants(variants, accuracies),
        version=version,
        differing_config={
            key: found for key, found in values.items() if any(v != found[0] for v in found)
        },
    )


def _compared(run: Run, points: int) -> wire.ComparedRun:
    evaluations = list_evaluations(run)
    sampled = set(sampled_steps(run, 0, points))
    evaluated = {evaluation.version - 1 for evaluation in evaluations}
    fresh = _fresh_accuracy(run, sampled | evaluated)
    # Version v holds the weights after v - 1 steps.
    costs = {point.step: _cost(point) for point in fresh}
    return wire.ComparedRun(
        run=run.name,
        step=run.current_step,
        cost=costs.get(run.current_step, wire.Cost()),
        fresh=[point for point in fresh if point.step in sampled],
        evaluations=[
            wire.AccuracyPoint(
                version=evaluation.version,
                mean_accuracy=evaluation.mean_accuracy,
                **costs.get(evaluation.version - 1, wire.Cost()).model_dump(),
            )
            for evaluation in evaluations
        ],
        difficulty=bins_at(run, run.current_step),
    )


def _group_by_variant(runs: Sequence[Run], configs: Sequence[Config]) -> list[list[Member]]:
    """Returns the runs by variant: runs of one differ in the name and the seed alone."""
    groups: list[tuple[Config, list[Member]]] = []
    for run, config in zip(runs, configs, strict=True):
        others = {key: value for key, value in config.items() if key not in ("name", "seed")}
        members = next((members for known, members in groups if known == others), None)
        if members is None:
            groups.append((others, members := []))
        members.append(Member(run.name, config["seed"]))
    return [members for _, members in groups]


def _accuracies_at_equal_steps(
    runs: Sequence[wire.ComparedRun],
) -> tuple[int | None, dict[str, float]]:
    """Returns the last version that every run with evaluations has evaluated, and the accuracy of
    these runs at that version."""
    by_version = {
        run.run: {point.version: point.mean_accuracy for point in run.evaluations}
        for run in runs
        if run.evaluations
    }
    if not by_version:
        return None, {}
    version = max(set.intersection(*map(set, by_version.values())), default=None)
    if version is None:
        return None, {}
    return version, {run: accuracies[version] for run, accuracies in by_version.items()}


def _describe_variants(
    variants: Sequence[Sequence[Member]], accuracies: Mapping[str, float]
) -> list[wire.ComparedVariant]:
    shared = Counter(_shared_name(members) for members in variants)
    by_seed = [
        {seed: accuracies[name] for name, seed in members if name in accuracies}
        for members in variants
    ]
    described = []
    for index, members in enumerate(variants):
        name = _shared_name(members)
        if len(members) > 1 and (name is None or shared[name] > 1):
            name = f"{members[0].name} and {len(members) - 1} more"
        described.append(
            wire.ComparedVariant(
                name=name or members[0].name,
                runs=[member.name for member in members],
                seeds=[member.seed for member in members],
                accuracies=[accuracies.get(member.name) for member in members],
                difference=_difference(by_seed[0], by_seed[index]) if index else None,
            )
        )
    return described


def _shared_name(members: Sequence[Member]) -> str | None:
    """Returns what the names have in common up to a hyphen, if anything.

    It is `words-grpo` for `words-grpo-s1-0a1b2c` and `words-grpo-s2-3d4e5f`.
    """
    words = zip(*(member.name.split("-") for member in members), strict=False)
    return "-".join(word for word, *_ in takewhile(lambda each: len(set(each)) == 1, words)) or None


def _difference(
    first: Mapping[int, float], other: Mapping[int, float]
) -> wire.PairedDifference | None:
    """Returns the difference of accuracies by seed; None without a seed that both have."""
    differences = [other[seed] - first[seed] for seed in other if seed in first]
    if not differences:
        return None
    found = paired_difference(differences)
    enough = len(differences) >= FEWEST_PAIRS
    return wire.PairedDifference(
        mean=found["mean"],
        seeds=len(differences),
        half_width=found["half_width"] if enough else None,
    )


def _cost(point: wire.FreshAccuracyPoint) -> wire.Cost:
    return wire.Cost(rollouts=point.rollouts, tokens=point.tokens, seconds=point.seconds)


def _fresh_accuracy(run: Run, steps: set[int]) -> list[wire.FreshAccuracyPoint]:
    """Returns the fresh accuracy of each of these steps, with the sums over all steps up to it."""
    metric = func.jsonb_each_text(StepRecord.metrics.cast(JSONB)).table_valued("key", "value")
    phases = (
        select(func.coalesce(func.sum(metric.c.value.cast(Float)), 0.0))
        .where(metric.c.key.like("seconds/%"))
        .scalar_subquery()
    )
    totals = (
        select(
            StepRecord.step,
            StepRecord.bins,
            func.sum(StepRecord.rollouts).over(order_by=StepRecord.step).label("rollouts"),
            func.sum(StepRecord.tokens).over(order_by=StepRecord.step).label("tokens"),
            func.sum(phases).over(order_by=StepRecord.step).label("seconds"),
        )
        .where(StepRecord.run_id == run.id, StepRecord.committed_at.is_not(None))
        .subquery()
    )
    statement = select(totals).where(totals.c.step.in_(steps)).order_by(totals.c.step)
    return [
        wire.FreshAccuracyPoint(
            step=row.step,
            accuracy=wire.accuracy(row.bins),
            rollouts=int(row.rollouts),
            tokens=int(row.tokens),
            seconds=float(row.seconds),
        )
        for row in run.session.execute(statement)
    ]
