"""Reads the recorded groups of a run, and applies other data rules to them."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import pyarrow as pa

from bapo_core.backtest import (
    BackTest,
    EffectiveShares,
    GroupLength,
    RecordedStep,
    refuse_other_rollouts,
    refuse_unanswerable,
)
from bapo_core.config import ConfigError, RunConfig, override_config
from bapo_core.errors import BapoError
from bapo_core.sampler_backtest import SamplerTest
from bapo_core.types import ESS_DECAY, GroupSummary, Source, TrainingBatch
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.cli.variants import Variant
from services.report.backtest_table import OWN_RULES, RunBackTest

GROUPS_AT_ONCE = 50_000
"""About as many groups are in memory at a time."""


def recorded_steps(client: BufferClient, config: RunConfig, last: int) -> Iterator[RecordedStep]:
    """Yields the groups of steps 1 to `last`."""
    at_once = max(1, GROUPS_AT_ONCE // config.prompts_needed)
    for first in range(1, last + 1, at_once):
        yield from split_into_steps(client.groups_arrow(first, min(last, first + at_once - 1)))


def split_into_steps(content: bytes) -> Iterator[RecordedStep]:
    """Yields the steps of an Arrow stream of groups, as `BufferClient.groups_arrow` returns it."""
    for step, of_step in groupby(_rows(content), key=lambda row: row.group.step):
        rows = list(of_step)
        yield RecordedStep(
            step=step,
            fresh=[row.group for row in rows if row.kind == "fresh"],
            reevaluated=[row.group for row in rows if row.kind == "reevaluation"],
            lengths={row.group.group_id: row.length for row in rows},
            positions={row.group.prompt_uid: row.position for row in rows},
        )


class _Row(NamedTuple):
    """A recorded group of the stream."""

    group: GroupSummary
    kind: str
    length: GroupLength
    position: int
    """Position of the group's prompt in the dataset."""


def _rows(content: bytes) -> Iterator[_Row]:
    with pa.ipc.open_stream(io.BytesIO(content)) as reader:
        for batch in reader:
            columns = [column.to_pylist() for column in batch.columns]
            for *summary, kind, tokens, cut_off, position in zip(*columns, strict=True):
                yield _Row(GroupSummary(*summary), kind, GroupLength(tokens, cut_off), position)


@dataclass(frozen=True, slots=True)
class Rules:
    """The configurations of a run under each set of rules, by label; the run's own comes first."""

    data: Mapping[str, RunConfig]
    """Of rules that change which groups are trained on; empty if all rules change the sampler."""
    samplers: Mapping[str, RunConfig]
    """Of rules that change which prompts are drawn; empty if there is none but the run's own."""


def rules_of(
    config: RunConfig, stored: Mapping[str, Any], variants: Sequence[Variant], where: str
) -> Rules:
    """Returns the configurations of a run under each set of rules.

    Raises `ConfigError` for rules that recorded groups cannot answer, and for a label given twice.
    """
    data, samplers = {OWN_RULES: config}, {OWN_RULES: config}
    for variant in variants:
        name = f"{where}: {variant.label}"
        if variant.label in (data | samplers):
            raise ConfigError(f"{name}: the label is given twice; give each once")
        changed = override_config(stored, variant.values, where=name)
        refuse_other_rollouts(config, changed, name)
        (data if changed.sampler == config.sampler else samplers)[variant.label] = changed
    if len(samplers) > 1 and len(data) == 1:
        return Rules({}, samplers)
    refuse_unanswerable(config)
    return Rules(data, samplers if len(samplers) > 1 else {})


def back_test(
    client: BufferClient, variants: Sequence[Variant], *, first: int, last: int | None, where: str
) -> RunBackTest:
    """Applies each set of rules to the committed steps of a run, from its first step on.

    first, last: the steps that the results count; last is the last committed step by default.
    Raises `BapoError` for steps that are not committed.
    """
    state = client.run_state()
    last = state.current_step if last is None else last
    if state.current_step == 0:
        raise BapoError(
            f"run {client.run!r} has committed no step yet, so there are no groups to back-test; "
            "repeat the command after its first commit"
        )
    if not 1 <= first <= last <= state.current_step:
        raise BapoError(
            f"steps {first}:{last} of run {client.run!r} are not all committed; it has committed "
            f"{state.current_step}"
        )
    rules = rules_of(state.config, client.stored_config(), variants, where)
    shares = EffectiveShares({step.step: step.metrics for step in client.steps()})
    _refuse_without_decays(rules.data, shares, client.run, where)
    tests = {
        label: BackTest(config, first=first, shares=shares) for label, config in rules.data.items()
    }
    size = client.dataset(state.train_dataset).prompts
    samplers = {
        label: SamplerTest(config, size, first=first, where=f"{where}: {label}")
        for label, config in rules.samplers.items()
    }
    recorded = client.batches()
    difference = other_draw = None
    for step in recorded_steps(client, state.config, last):
        batches = {label: test.add(step) for label, test in tests.items()}
        if tests and difference is None and not is_recorded(batches[OWN_RULES], next(recorded)):
            difference = step.step
        draws = {label: test.add(step) for label, test in samplers.items()}
        if samplers and other_draw is None and not is_recorded_draw(draws[OWN_RULES], step):
            other_draw = step.step
    results = {label: test.result() for label, test in tests.items()}
    for label, config in rules.data.items():
        changed = config.loss.mask_truncated != state.config.loss.mask_truncated
        if changed and results[label].cut_off is None:
            raise ConfigError(
                f"{where}: {label}: loss.mask_truncated={config.loss.mask_truncated}: run "
                f"{client.run!r} has groups of a version that did not count the responses that "
                "were cut off, so nothing says which of them would have a loss; leave it out"
            )
    return RunBackTest(
        run=client.run,
        last_step=last,
        results=results,
        samplers={label: test.result() for label, test in samplers.items()},
        first_difference=difference,
        first_other_draw=other_draw,
        changed_at=sorted({change.first_step for change in state.changes}),
    )


def _refuse_without_decays(
    rules: Mapping[str, RunConfig], shares: EffectiveShares, run: str, where: str
) -> None:
    """Raises `ConfigError` if a rule other than the run's own predicts by decays and has none."""
    for label, config in rules.items():
        predicts = config.replay.select == "effective_sample_size" and label != OWN_RULES
        if predicts and not shares.knows_decay:
            raise ConfigError(
                f"{where}: {label}: replay.select is effective_sample_size, which predicts by the "
                f"metric {ESS_DECAY}, and no step of run {run!r} has it: an earlier version "
                "recorded the run, or it trained on no groups of an earlier policy; leave the rule "
                "out"
            )


def is_recorded_draw(positions: Sequence[int], step: RecordedStep) -> bool:
    """Whether these are the positions of the prompts that the run rolled out at a step."""
    return list(positions) == [step.positions[group.prompt_uid] for group in step.fresh]


def is_recorded(batch: TrainingBatch, recorded: wire.BatchSummary) -> bool:
    """Whether a batch has the window and the counts of a recorded one."""
    counts = {source: recorded.counts.get(source.value, 0) for source in Source}
    return batch.window == (recorded.c2, recorded.c3) and batch.counts == counts
