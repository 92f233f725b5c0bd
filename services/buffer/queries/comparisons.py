"""Comparison of runs: their curves over what they cost, their variants and configurations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, get_args

from sqlalchemy import Float, func, select
from sqlalchemy.dialects.postgresql import JSONB

from bapo_core.comparison import Curve, cheapest_curve, choose_measure
from bapo_core.config import flatten
from bapo_core.config.rollouts import EvaluationMeasure
from bapo_core.resolution import (
    FEWEST_PAIRS,
    Observation,
    Resolution,
    paired_difference,
    resolve,
)
from services.buffer.api import wire
from services.buffer.queries.committed_steps import sampled_steps
from services.buffer.queries.difficulty import bins_at
from services.buffer.queries.evaluations import list_evaluations
from services.buffer.storage.lineage import of_run
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
    variants = _name_variants(_group_by_variant(runs, configs))
    if len(variants) > wire.MAX_VARIANTS:
        raise bad_request(
            f"the runs are {len(variants)} variants, and a comparison has {wire.MAX_VARIANTS} at "
            "most; leave some out (runs whose configurations differ in the seed alone are one "
            "variant)"
        )
    compared = [_compared(run, points) for run in runs]
    evaluations = [point for run in compared for point in run.evaluations]
    measure = choose_measure(
        [run.config.task.measure for run in runs],
        [point.mean_accuracy for point in evaluations],
        [point.mean_reward for point in evaluations],
    )
    keys = sorted(set().union(*configs) - {"name"})
    values = {key: [config.get(key) for config in configs] for key in keys}
    return wire.RunComparison(
        runs=compared,
        variants=[
            wire.ComparedVariant(
                name=name,
                runs=[member.name for member in members],
                seeds=[member.seed for member in members],
            )
            for name, members in variants.items()
        ],
        measure=measure,
        at_equal=_compare_at_equal_costs(compared, variants, measure),
        differing_config={
            key: found for key, found in values.items() if any(v != found[0] for v in found)
        },
    )


def _compared(run: Run, points: int) -> wire.ComparedRun:
    evaluations = list_evaluations(run)
    sampled = set(sampled_steps(run, 0, points))
    evaluated = {evaluation.version - 1 for evaluation in evaluations}
    fresh = _fresh_points(run, sampled | evaluated)
    # Version v holds the weights after v - 1 steps.
    costs = {point.step: _cost(point) for point in fresh}
    return wire.ComparedRun(
        run=run.name,
        forked_from=run.forked_from,
        step=run.current_step,
        cost=costs.get(run.current_step, wire.Cost()),
        fresh=[point for point in fresh if point.step in sampled],
        evaluations=[
            wire.EvaluationPoint(
                version=evaluation.version,
                mean_accuracy=evaluation.mean_accuracy,
                mean_reward=evaluation.mean_reward,
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


def _name_variants(variants: Sequence[list[Member]]) -> dict[str, list[Member]]:
    """Returns the runs of each variant by a name that no other variant has."""
    shared = Counter(_shared_name(members) for members in variants)
    named = {}
    for members in variants:
        name = _shared_name(members)
        if len(members) > 1 and (name is None or shared[name] > 1):
            name = f"{members[0].name} and {len(members) - 1} more"
        named[name or members[0].name] = members
    return named


def _shared_name(members: Sequence[Member]) -> str | None:
    """Returns what the names have in common up to a hyphen, if anything.

    It is `words-grpo` for `words-grpo-s1-0a1b2c` and `words-grpo-s2-3d4e5f`.
    """
    words = zip(*(member.name.split("-") for member in members), strict=False)
    return "-".join(word for word, *_ in takewhile(lambda each: len(set(each)) == 1, words)) or None


def _compare_at_equal_costs(
    runs: Sequence[wire.ComparedRun],
    variants: Mapping[str, Sequence[Member]],
    measure: EvaluationMeasure,
) -> dict[wire.CostName, wire.EqualCost]:
    """Returns the measure of the runs at equal costs; empty while no run has the evaluations.

    A run takes part from its second evaluation on: the first one is that of the initial model, at
    which no two runs differ.
    """
    trained = [run for run in runs if len(run.evaluations) > 1]
    if not trained:
        return {}
    return {
        cost: _compare_at_equal_cost(
            {run.run: _curve(run.evaluations, measure, cost) for run in trained}, variants
        )
        for cost in get_args(wire.CostName)
    }


def _curve(
    points: Sequence[wire.EvaluationPoint], measure: EvaluationMeasure, cost: wire.CostName
) -> Curve:
    return Curve(
        # Version v holds the weights after v - 1 steps.
        [float(point.version - 1 if cost == "steps" else getattr(point, cost)) for point in points],
        [point.mean_reward if measure == "reward" else point.mean_accuracy for point in points],
    )


def _compare_at_equal_cost(
    curves: Mapping[str, Curve], variants: Mapping[str, Sequence[Member]]
) -> wire.EqualCost:
    cheapest = cheapest_curve(list(curves.values()))
    values = {run: curve.mean_at(cheapest.last_costs) for run, curve in curves.items()}
    resolution = resolve(
        [
            Observation(variant, member.seed, values[member.name])
            for variant, members in variants.items()
            for member in members
            if member.name in values
        ]
    )
    places = {} if resolution is None else resolution.places()
    by_seed = [
        {seed: values[run] for run, seed in members if run in values}
        for members in variants.values()
    ]
    return wire.EqualCost(
        costs=list(cheapest.last_costs),
        cheapest_run=next(run for run, curve in curves.items() if curve is cheapest),
        variants=[
            wire.VariantResult(
                values=[values.get(member.name) for member in members],
                difference=_difference(by_seed[0], by_seed[index]) if index else None,
                places=places.get(variant),
            )
            for index, (variant, members) in enumerate(variants.items())
        ],
        resolution=None if resolution is None else _wire_resolution(resolution),
    )


def _wire_resolution(resolution: Resolution) -> wire.Resolution:
    smallest = resolution.smallest_difference
    return wire.Resolution(
        standard_deviation=resolution.deviation,
        degrees_of_freedom=resolution.degrees_of_freedom,
        # JSON has no infinity.
        smallest_difference=smallest if math.isfinite(smallest) else None,
    )


def _difference(
    first: Mapping[int, float], other: Mapping[int, float]
) -> wire.PairedDifference | None:
    """Returns the difference of the measure by seed; None without a seed that both have."""
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


def _cost(point: wire.FreshPoint) -> wire.Cost:
    return wire.Cost(rollouts=point.rollouts, tokens=point.tokens, seconds=point.seconds)


def _fresh_points(run: Run, steps: set[int]) -> list[wire.FreshPoint]:
    """Returns accuracy and reward of the fresh groups of each of these steps, with the sums of the
    costs of all steps up to it."""
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
            StepRecord.mean_reward,
            func.sum(StepRecord.rollouts).over(order_by=StepRecord.step).label("rollouts"),
            func.sum(StepRecord.tokens).over(order_by=StepRecord.step).label("tokens"),
            func.sum(phases).over(order_by=StepRecord.step).label("seconds"),
        )
        .where(
            of_run(run, StepRecord.run_id, StepRecord.step), StepRecord.committed_at.is_not(None)
        )
        .subquery()
    )
    statement = select(totals).where(totals.c.step.in_(steps)).order_by(totals.c.step)
    return [
        wire.FreshPoint(
            step=row.step,
            accuracy=wire.accuracy(row.bins),
            mean_reward=row.mean_reward,
            rollouts=int(row.rollouts),
            tokens=int(row.tokens),
            seconds=float(row.seconds),
        )
        for row in run.session.execute(statement)
    ]
