"""Draws the prompts of a step by the run's sampler, and keeps the posteriors that it draws by.

The samplers are `bapo_core.sampling`'s. An adaptive one draws candidates as positions in the
dataset, and only their posteriors are read. Every commit appends the posteriors of the prompts it
has fresh groups of, so those of any step can be read, and a draw can be computed again for as long
as the run exists.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from sqlalchemy import delete, select, text
from sqlalchemy.orm import Session

from bapo_core.config import RunConfig
from bapo_core.sampling import (
    Posterior,
    RankedCandidate,
    candidate_positions,
    prompt_positions,
    rank_candidates,
    revisit_prompts,
    stream_positions,
)
from bapo_core.seeding import derive_rng
from services.buffer.api import wire
from services.buffer.bulk import insert_columns
from services.buffer.datasets import dataset_size
from services.buffer.tables import PromptRow, RolloutGroup, Run, SamplerPosterior, StepRecord
from services.common.problems import bad_request

# Three aggregated arrays are read faster than thousands of rows.
_NEWEST = text("""
    select array_agg(candidate.position),
        array_agg(1 + (newest.a - 1) * newest.weight),
        array_agg(1 + (newest.b - 1) * newest.weight)
    from unnest(cast(:positions as bigint[])) as candidate (position)
    cross join lateral (
        select a, b, power(cast(:fading as float8), cast(:step as bigint) - step) as weight
        from sampler_posterior
        where run_id = :run_id and position = candidate.position and step <= :step
        order by step desc limit 1
    ) as newest
""")
_LAST_RESULTS = text("""
    select array_agg(position), array_agg(a)
    from (
        select distinct on (position) position, a from sampler_posterior
        where run_id = :run_id and step <= :step
        order by position, step desc
    ) as newest
""")
_COPY_PRIOR = text("""
    insert into sampler_posterior (run_id, position, step, a, b)
    select :run_id, prompt.position, 0,
        1 + sum(correct * power(cast(:decay as float8), newer)),
        1 + sum((size - correct) * power(cast(:decay as float8), newer))
    from (
        select prompt_id, correct, size,
            row_number() over (partition by prompt_id order by step desc) - 1 as newer
        from rollout_group
        where run_id = :prior_id and kind = 'fresh' and step between 1 and :last
    ) as result
    join prompt on prompt.id = result.prompt_id
    group by prompt.position
""")


class _RecentDraws:
    """The draws of recent steps of all runs, which never change."""

    def __init__(self, keep: int) -> None:
        self._keep, self._lock = keep, threading.Lock()
        self._draws: OrderedDict[Hashable, tuple[list[int], list[int]]] = OrderedDict()

    def get(
        self, key: Hashable, compute: Callable[[], tuple[list[int], list[int]]]
    ) -> tuple[list[int], list[int]]:
        """Returns the draw of this key, computed if it is none of the recent ones."""
        with self._lock:
            draw = self._draws.get(key)
        if draw is None:
            draw = compute()
            with self._lock:
                self._draws[key] = draw
                if len(self._draws) > self._keep:
                    self._draws.popitem(last=False)
        return draw


_DRAWS = _RecentDraws(keep=64)


@dataclass(frozen=True, slots=True)
class _Round:
    """The candidates of a generation round, and their order."""

    positions: Sequence[int]
    """Positions in the dataset of the candidates, in the order in which they were drawn."""
    posteriors: list[Posterior]
    ranked: list[RankedCandidate]
    """All candidates, best first; the first B are rolled out."""


def draw_positions(
    session: Session,
    run: Run,
    config: RunConfig,
    step: int,
    generation_round: int,
    first: int,
) -> Sequence[int]:
    """Returns the positions in the dataset of the B prompts of a step's generation round.

    first: number in the stream of the step's first prompt, with `config.draws_from_stream`.

    The commit of `config.sampled_as_of(step)` must have happened.
    """
    per_round = config.rollout.prompts_per_step
    if config.sampler.kind == "exgrpo":
        revisited, others = _draw_revisited(session, run, config, step)
        return [*revisited, *others]
    if config.draws_from_stream:
        return stream_positions(
            config.seed,
            first + generation_round * per_round,
            per_round,
            dataset_size=dataset_size(session, run.train_dataset),
            distinct=config.prompts_needed,
        )
    if not config.sampler.selects_candidates:
        return _epoch_positions(session, run, config, step)
    candidates = _rank_round(session, run, config, step, generation_round)
    taken = candidates.ranked[:per_round]
    return [candidates.positions[ranked.candidate] for ranked in taken]


def _epoch_positions(session: Session, run: Run, config: RunConfig, step: int) -> Sequence[int]:
    """Returns the positions that the epoch's permutation has for a step of one round."""
    return prompt_positions(
        config.seed,
        step,
        dataset_size=dataset_size(session, run.train_dataset),
        prompts_per_step=config.rollout.prompts_per_step,
    )


def count_revisited(session: Session, run: Run, config: RunConfig, step: int) -> int:
    """Returns how many of a step's prompts, the first ones, were drawn for their past successes."""
    if config.sampler.kind != "exgrpo":
        return 0
    revisited, _ = _draw_revisited(session, run, config, step)
    return len(revisited)


def _draw_revisited(
    session: Session, run: Run, config: RunConfig, step: int
) -> tuple[list[int], list[int]]:
    """Returns the positions of the prompts that a step revisits, and those of its others.

    The others are those of the epoch's permutation, without revisited and, as far as there are
    enough, without retired prompts.
    """
    as_of = config.sampled_as_of(step)
    # Every delivery of the step asks for its prompts, and reading all results takes long. They
    # change only if the commit of `as_of` is undone and made again.
    committed_at = session.scalar(
        select(StepRecord.committed_at).where(StepRecord.run_id == run.id, StepRecord.step == as_of)
    )
    if as_of > 0 and committed_at is None:
        return _compute_revisited(session, run, config, step)
    return _DRAWS.get(
        (run.id, step, as_of, committed_at),
        lambda: _compute_revisited(session, run, config, step),
    )


def _compute_revisited(
    session: Session, run: Run, config: RunConfig, step: int
) -> tuple[list[int], list[int]]:
    as_of, size = config.sampled_as_of(step), config.rollout.group_size
    in_epoch = _epoch_positions(session, run, config, step)
    if not _has_reached(session, run, config.sampler.revisit_above, as_of):
        return [], list(in_epoch)
    parameters = {"run_id": run.id, "step": as_of}
    columns = session.execute(_LAST_RESULTS, parameters).one()
    correct = {
        position: round(a) - 1
        for position, a in zip(*(column or () for column in columns), strict=True)
    }
    revisited = revisit_prompts(
        correct,
        count=int(config.sampler.revisited_share * len(in_epoch)),
        group_size=size,
        rng=derive_rng(config.seed, "revisit", step),
    )
    taken = set(revisited)
    others = [position for position in in_epoch if position not in taken]
    others.sort(key=lambda position: correct.get(position) == size)  # retired ones last
    return revisited, others[: len(in_epoch) - len(revisited)]


def _has_reached(session: Session, run: Run, accuracy: float, step: int) -> bool:
    """Returns whether the fresh groups of any step up to `step` had a higher mean accuracy."""
    bins = session.scalars(
        select(StepRecord.bins).where(StepRecord.run_id == run.id, StepRecord.step <= step)
    )
    return any(
        sum(k * groups for k, groups in enumerate(counts))
        > accuracy * (len(counts) - 1) * sum(counts)
        for counts in bins
    )


def _rank_round(
    session: Session, run: Run, config: RunConfig, step: int, generation_round: int
) -> _Round:
    positions = candidate_positions(
        config.seed,
        step,
        generation_round,
        dataset_size=dataset_size(session, run.train_dataset),
        candidates_per_round=config.candidates_per_round,
        max_rounds=config.rollout.max_generation_rounds,
    )
    posteriors = _read_posteriors(session, run, config, positions, config.sampled_as_of(step))
    ranked = rank_candidates(
        config.sampler,
        posteriors,
        seed=config.seed,
        step=step,
        generation_round=generation_round,
    )
    return _Round(positions, posteriors, ranked)


def _read_posteriors(
    session: Session, run: Run, config: RunConfig, positions: Sequence[int], step: int
) -> list[Posterior]:
    """Returns the posteriors of the prompts at these positions after the commit of `step`.

    Results fade from the step of their group to this one (`sampler.half_life`).
    """
    parameters = {
        "run_id": run.id,
        "positions": sorted(positions),
        "step": step,
        "fading": config.sampler.fading,
    }
    columns = session.execute(_NEWEST, parameters).one()
    by_position = {
        position: Posterior(a, b)
        for position, a, b in zip(*(column or () for column in columns), strict=True)
    }
    return [by_position.get(position, Posterior()) for position in positions]


# ---- commits and rewinds ------------------------------------------------------------------------


def update(session: Session, run: Run, config: RunConfig, step: int) -> dict[str, float]:
    """Appends the posteriors after the fresh groups of `step`, at its commit.

    Returns metrics of how well the sampler predicted the step: the accuracy of its prompts that the
    posteriors of their draw predicted, and the realised one. A uniform sampler has none.
    """
    if not config.sampler.is_adaptive:
        return {}
    rows = session.execute(
        select(PromptRow.position, RolloutGroup.correct, RolloutGroup.size)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(
            RolloutGroup.run_id == run.id, RolloutGroup.step == step, RolloutGroup.kind == "fresh"
        )
        .order_by(RolloutGroup.position)
    ).all()
    positions = [row.position for row in rows]
    drawn_by = _read_posteriors(session, run, config, positions, config.sampled_as_of(step))
    # The results of earlier steps, faded to this one, which has no posterior yet.
    before = _read_posteriors(session, run, config, positions, step)
    updated = [
        posterior.updated(row.correct, row.size, decay=config.sampler.posterior_decay)
        for row, posterior in zip(rows, before, strict=True)
    ]
    insert_columns(
        session,
        SamplerPosterior,
        {"run_id": run.id, "step": step},
        {
            "position": positions,
            "a": [posterior.a for posterior in updated],
            "b": [posterior.b for posterior in updated],
        },
    )
    return {
        "sampler/predicted_success": sum(posterior.mean for posterior in drawn_by) / len(rows),
        "sampler/realised_success": sum(row.correct / row.size for row in rows) / len(rows),
    }


def forget(session: Session, run: Run, step: int) -> None:
    """Removes the posteriors of commits after `step`, which a rewind undoes."""
    session.execute(
        delete(SamplerPosterior).where(
            SamplerPosterior.run_id == run.id, SamplerPosterior.step > step
        )
    )


def copy_prior(session: Session, run: Run, config: RunConfig) -> None:
    """Copies the results of `sampler.prior_run` as of now, when a run is created.

    Raises 400 if there is no such run, if its training prompts are others, if it has no committed
    step, or if the sampler compares counts of correct responses and its groups have another size.
    """
    name = config.sampler.prior_run
    if name is None or not config.sampler.is_adaptive:
        return
    prior = session.scalar(select(Run).where(Run.name == name))
    if prior is None:
        raise bad_request(f"sampler.prior_run: there is no run {name!r}; `bapo runs` lists them")
    if prior.train_dataset != run.train_dataset:
        raise bad_request(
            f"sampler.prior_run: run {name!r} has the training dataset {prior.train_dataset!r}, "
            f"not {run.train_dataset!r}; name a run on the same prompts"
        )
    if prior.current_step == 0:
        raise bad_request(
            f"sampler.prior_run: run {name!r} has no committed step, so it has no results; name "
            "another run, or remove the key"
        )
    sizes = [prior.config["rollout"]["group_size"], config.rollout.group_size]
    if config.sampler.kind == "exgrpo" and sizes[0] != sizes[1]:
        raise bad_request(
            f"sampler.prior_run: run {name!r} has groups of {sizes[0]} responses, but this run has "
            f"groups of {sizes[1]}, and sampler.kind=exgrpo compares how many of them are correct; "
            "name another run, or remove the key"
        )
    session.execute(
        _COPY_PRIOR,
        {
            "run_id": run.id,
            "prior_id": prior.id,
            "last": prior.current_step,
            "decay": config.sampler.posterior_decay,
        },
    )


# ---- explanations -------------------------------------------------------------------------------


def explain_draw(
    session: Session, run: Run, config: RunConfig, step: int, prompt: PromptRow
) -> wire.PromptDraw | None:
    """Returns how an adaptive sampler decided on a training prompt at a step.

    None with the uniform sampler, and for held-out prompts.
    """
    if not config.sampler.is_adaptive or prompt.dataset != run.train_dataset:
        return None
    as_of = config.sampled_as_of(step)
    (posterior,) = _read_posteriors(session, run, config, [prompt.position], as_of)
    draw = wire.PromptDraw(
        sampler=config.sampler.kind,
        as_of_step=as_of,
        a=posterior.a,
        b=posterior.b,
        mean=posterior.mean,
        candidates=config.candidates_per_round,
        prompts_per_round=config.rollout.prompts_per_step,
        reason="",
    )
    if config.sampler.kind == "exgrpo":
        draw.reason = _describe_revisit(session, run, config, step, prompt, posterior)
        return draw
    for generation_round in range(config.rollout.max_generation_rounds):
        candidates = _rank_round(session, run, config, step, generation_round)
        if prompt.position in candidates.positions:
            index = candidates.positions.index(prompt.position)
            rank = [ranked.candidate for ranked in candidates.ranked].index(index)
            draw.generation_round, draw.rank = generation_round, rank + 1
            draw.draw = candidates.ranked[rank].draw
            break
    draw.reason = _describe_draw(draw, config)
    return draw


def _describe_revisit(
    session: Session, run: Run, config: RunConfig, step: int, prompt: PromptRow, last: Posterior
) -> str:
    """Describes whether a step revisits a prompt, and its last result before that step."""
    size = config.rollout.group_size
    revisited, others = _draw_revisited(session, run, config, step)
    k = round(last.a) - 1
    result = (
        f"{k} of {size} correct in its last group as of step {config.sampled_as_of(step)}"
        if last != Posterior()
        else f"no group as of step {config.sampled_as_of(step)}"
    )
    if prompt.position in revisited:
        return f"it is one of the {len(revisited)} prompts that this step revisits: {result}"
    if prompt.position in others:
        return f"it is one of the {len(others)} prompts of the epoch's permutation: {result}"
    if k == size:
        return f"it is retired, or not in this step's part of the epoch's permutation: {result}"
    return f"it was not drawn to be revisited, nor by the epoch's permutation: {result}"


def _describe_draw(draw: wire.PromptDraw, config: RunConfig) -> str:
    """Describes the rank of a prompt among the candidates, and what it follows from."""
    posterior = f"posterior Beta({draw.a:.4g}, {draw.b:.4g}) as of step {draw.as_of_step}"
    if draw.rank is None:
        candidates = draw.candidates * config.rollout.max_generation_rounds
        return (
            f"it is not among the {candidates} candidates of this step, which are drawn uniformly; "
            f"{posterior}"
        )
    number = (
        f"Thompson draw g = {draw.draw:.3f}"
        if draw.sampler == "mopps"
        else f"log-weight with Gumbel noise = {draw.draw:.4g}"
    )
    return (
        f"rank {draw.rank} of the {draw.candidates} candidates of round {draw.generation_round}, "
        f"of which {draw.prompts_per_round} are rolled out: {number}, target "
        f"{config.sampler.target:g}, {posterior}"
    )


def current_posterior(
    session: Session, run: Run, config: RunConfig, prompt: PromptRow
) -> wire.PromptPosterior | None:
    """Returns the posterior of a training prompt as of the last commit; None as `explain_draw`."""
    if not config.sampler.is_adaptive or prompt.dataset != run.train_dataset:
        return None
    (posterior,) = _read_posteriors(session, run, config, [prompt.position], run.current_step)
    return wire.PromptPosterior(
        as_of_step=run.current_step, a=posterior.a, b=posterior.b, mean=posterior.mean
    )
