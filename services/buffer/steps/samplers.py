"""Draws the prompts of a step by the run's sampler, and keeps the posteriors that it draws by.

The samplers are `bapo_core.sampling`'s. An adaptive one draws candidates as positions in the
dataset, and only their posteriors are read. Every commit appends the posteriors of the prompts it
has fresh groups of, so those of any step can be read, and a draw can be computed again for as long
as the run exists.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import TextClause, delete, select, text

from bapo_core.config.samplers import AdaptiveConfig
from bapo_core.errors import ConfigError
from bapo_core.plug_ins import report_failures
from bapo_core.sampling import SAMPLERS, Draw, DrawContext, Posterior, draw_prompts
from services.buffer.api import wire
from services.buffer.storage.bulk import insert_columns
from services.buffer.storage.datasets import dataset_size
from services.buffer.storage.lineage import lineage_parameters, of_run
from services.buffer.storage.stored_groups import groups_of
from services.buffer.storage.tables import (
    PromptRow,
    RolloutGroup,
    Run,
    SamplerPosterior,
    StepRecord,
)
from services.common.problems import bad_request

# Three aggregated arrays are read faster than thousands of rows.
_NEWEST = text("""
    select array_agg(candidate.position),
        array_agg(1 + (newest.a - 1) * newest.weight),
        array_agg(1 + (newest.b - 1) * newest.weight)
    from unnest(cast(:positions as bigint[])) as candidate (position)
    cross join lateral (
        select a, b, power(cast(:fading as float8), cast(:step as bigint) - step) as weight
        from unnest(cast(:run_ids as bigint[]), cast(:last_steps as bigint[]))
            with ordinality as ancestor (run_id, last_step, age)
        cross join lateral (
            select a, b, step from sampler_posterior
            where run_id = ancestor.run_id and position = candidate.position
                and step <= least(cast(:step as bigint), ancestor.last_step)
            order by step desc limit 1
        ) as of_ancestor
        order by age limit 1
    ) as newest
""")
_NEWEST_OF_ALL = text("""
    select array_agg(position),
        array_agg(1 + (a - 1) * weight),
        array_agg(1 + (b - 1) * weight)
    from (
        select distinct on (position) position, a, b,
            power(cast(:fading as float8), cast(:step as bigint) - step) as weight
        from sampler_posterior
        join unnest(cast(:run_ids as bigint[]), cast(:last_steps as bigint[]))
            as ancestor (run_id, last_step) using (run_id)
        where run_id = any(cast(:run_ids as bigint[]))
            and step <= least(cast(:step as bigint), last_step)
        order by position, step desc
    ) as newest
""")
_COPY_PRIOR = text("""
    insert into sampler_posterior (run_id, position, step, a, b)
    select :run_id, prompt.position, :step,
        1 + sum(correct * power(cast(:decay as float8), newer)),
        1 + sum((size - correct) * power(cast(:decay as float8), newer))
    from (
        select prompt_id, correct, size,
            row_number() over (partition by prompt_id order by step desc) - 1 as newer
        from rollout_group
        join unnest(cast(:run_ids as bigint[]), cast(:last_steps as bigint[]))
            as ancestor (run_id, last_step) using (run_id)
        where run_id = any(cast(:run_ids as bigint[])) and kind = 'fresh'
            and step between 1 and least(cast(:last as bigint), last_step)
    ) as result
    join prompt on prompt.id = result.prompt_id
    group by prompt.position
""")


class _RecentDraws:
    """The draws of recent steps of all runs, which never change."""

    def __init__(self, keep: int) -> None:
        self._keep, self._lock = keep, threading.Lock()
        self._draws: OrderedDict[Hashable, Draw] = OrderedDict()

    def get(self, key: Hashable, compute: Callable[[], Draw]) -> Draw:
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


class StoredResults:
    """The recorded results of a run after the commit of `step` (`bapo_core.sampling.Results`).

    Results fade from the step of their group to this one (`sampler.half_life`).
    """

    def __init__(self, run: Run, step: int) -> None:
        self._run, self._step = run, step
        fading = run.config.sampler.fading
        self._parameters = {"step": step, "fading": fading, **lineage_parameters(run)}

    def posteriors(self, positions: Sequence[int]) -> list[Posterior]:
        by_position = self._read(_NEWEST, {"positions": sorted(positions)})
        return [by_position.get(position, Posterior()) for position in positions]

    def all_posteriors(self) -> dict[int, Posterior]:
        return self._read(_NEWEST_OF_ALL, {})

    def step_bins(self) -> list[list[int]]:
        return list(
            self._run.session.scalars(
                select(StepRecord.bins).where(
                    of_run(self._run, StepRecord.run_id, StepRecord.step),
                    StepRecord.step <= self._step,
                )
            )
        )

    def _read(self, query: TextClause, parameters: dict[str, Any]) -> dict[int, Posterior]:
        columns = self._run.session.execute(query, {**self._parameters, **parameters}).one()
        return {
            position: Posterior(a, b)
            for position, a, b in zip(*(column or () for column in columns), strict=True)
        }


@contextmanager
def refuse_errors() -> Iterator[None]:
    """Raises 400 for what the sampler or the batch rule of a plug-in does wrong."""
    try:
        yield
    except ConfigError as error:
        raise bad_request(str(error)) from error


def draw_round(run: Run, step: int, generation_round: int, first: int = 0) -> Draw:
    """Returns the draw of a step's generation round.

    first: number in the stream of the step's first prompt, with `config.draws_from_stream`.

    The commit of `config.sampled_as_of(step)` must have happened. Raises 400 if the sampler of a
    plug-in cannot be loaded, or draws what cannot be rolled out.
    """
    as_of = run.config.sampled_as_of(step)
    earlier: frozenset[int] = frozenset()
    if run.config.sampler.kind not in SAMPLERS:
        rounds = [draw_round(run, step, n) for n in range(generation_round)]
        earlier = frozenset(position for draw in rounds for position in draw.positions)

    def compute() -> Draw:
        size = dataset_size(run.session, run.train_dataset)
        results = StoredResults(run, as_of)
        with refuse_errors():
            return draw_prompts(
                DrawContext(run.config, step, generation_round, size, results, first, earlier)
            )

    if not run.config.sampler.is_adaptive:
        return compute()
    # Every delivery of the step asks for its prompts, and reading results takes long. They change
    # only if the commit of `as_of` is undone and made again.
    committed_at = run.session.scalar(
        select(StepRecord.committed_at).where(
            StepRecord.run_id == run.of_step(as_of).id, StepRecord.step == as_of
        )
    )
    if as_of > 0 and committed_at is None:
        return compute()
    return _DRAWS.get((run.id, step, generation_round, as_of, committed_at), compute)


# ---- commits and rewinds ------------------------------------------------------------------------


def update(run: Run, step: int) -> dict[str, float]:
    """Appends the posteriors after the fresh groups of `step`, at its commit.

    Returns metrics of how well the sampler predicted the step: the accuracy of its prompts that the
    posteriors of their draw predicted, and the realised one. A uniform sampler has none.
    """
    if not run.config.sampler.is_adaptive:
        return {}
    rows = run.session.execute(
        select(PromptRow.position, RolloutGroup.correct, RolloutGroup.size)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(groups_of(run, step, "fresh"))
        .order_by(RolloutGroup.position)
    ).all()
    positions = [row.position for row in rows]
    as_of = run.config.sampled_as_of(step)
    drawn_by = StoredResults(run, as_of).posteriors(positions)
    # The results of earlier steps, faded to this one, which has no posterior yet.
    before = StoredResults(run, step).posteriors(positions)
    updated = [
        posterior.updated(row.correct, row.size, decay=run.config.sampler.posterior_decay)
        for row, posterior in zip(rows, before, strict=True)
    ]
    insert_columns(
        run.session,
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


def forget(run: Run, step: int) -> None:
    """Removes the posteriors of commits after `step`, which a rewind undoes."""
    run.session.execute(
        delete(SamplerPosterior).where(
            SamplerPosterior.run_id == run.id, SamplerPosterior.step > step
        )
    )


def copy_prior(run: Run) -> None:
    """Copies the results of `sampler.prior_run` as of now, when a run is created.

    Raises 400 if there is no such run, if its training prompts are others, if it has no committed
    step, or if the sampler compares counts of correct responses and its groups have another size.
    """
    name = run.config.sampler.prior_run if isinstance(run.config.sampler, AdaptiveConfig) else None
    if name is None:
        return
    prior = run.session.scalar(select(Run).where(Run.name == name))
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
    sizes = [prior.config_json["rollout"]["group_size"], run.config.rollout.group_size]
    if run.config.sampler.kind == "exgrpo" and sizes[0] != sizes[1]:
        raise bad_request(
            f"sampler.prior_run: run {name!r} has groups of {sizes[0]} responses, but this run has "
            f"groups of {sizes[1]}, and sampler.kind=exgrpo compares how many of them are correct; "
            "name another run, or remove the key"
        )
    _derive_posteriors(run, 0, prior, prior.current_step)


def continue_results(run: Run, step: int) -> None:
    """Derives the posteriors that an adaptive sampler draws by, after step `step` of a fork whose
    parent has none, from the groups of its past."""
    past = run.of_step(step)
    if run.config.sampler.is_adaptive and not past.config_at(step).sampler.is_adaptive:
        _derive_posteriors(run, step, past, step)


def _derive_posteriors(run: Run, step: int, source: Run, last: int) -> None:
    """Stores the posteriors after the fresh groups of steps 1..last of `source`, as of `step`."""
    run.session.execute(
        _COPY_PRIOR,
        {
            "run_id": run.id,
            "step": step,
            "last": last,
            "decay": run.config.sampler.posterior_decay,
            **lineage_parameters(source),
        },
    )


# ---- explanations -------------------------------------------------------------------------------


def explain_draw(run: Run, step: int, prompt: PromptRow) -> wire.PromptDraw | None:
    """Returns how an adaptive sampler decided on a training prompt at a step.

    None with the uniform sampler, and for held-out prompts.
    """
    if not run.config.sampler.is_adaptive or prompt.dataset != run.train_dataset:
        return None
    position, kind, as_of = prompt.position, run.config.sampler.kind, run.config.sampled_as_of(step)
    (posterior,) = StoredResults(run, as_of).posteriors([position])
    draws = [
        draw_round(run, step, number) for number in range(run.config.rollout.max_generation_rounds)
    ]
    drawn = [number for number, draw in enumerate(draws) if position in draw.positions]
    ranked = [number for number, draw in enumerate(draws) if position in draw.ranking]
    number = next(iter([*drawn, *ranked]), None)
    draw = draws[number or 0]
    rank = draw.ranking.get(position)
    if draw.explain is not None:
        with refuse_errors(), report_failures("sampler", kind, ConfigError):
            reason = str(draw.explain(position, posterior))
    elif drawn:
        reason = f"drawn by the sampler {kind}"
    else:
        reason = f"the sampler {kind} drew other prompts"
    return wire.PromptDraw(
        sampler=kind,
        drawn=bool(drawn),
        as_of_step=as_of,
        a=posterior.a,
        b=posterior.b,
        mean=posterior.mean,
        candidates=run.config.candidates_per_round,
        prompts_per_round=run.config.rollout.prompts_per_step,
        generation_round=number,
        rank=None if rank is None else rank.rank,
        draw=None if rank is None else rank.number,
        reason=reason,
    )


def current_posterior(run: Run, prompt: PromptRow) -> wire.PromptPosterior | None:
    """Returns the posterior of a training prompt as of the last commit; None as `explain_draw`."""
    if not run.config.sampler.is_adaptive or prompt.dataset != run.train_dataset:
        return None
    as_of = run.current_step
    (posterior,) = StoredResults(run, as_of).posteriors([prompt.position])
    return wire.PromptPosterior(as_of_step=as_of, a=posterior.a, b=posterior.b, mean=posterior.mean)
