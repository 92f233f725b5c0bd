"""Reads the recorded groups of a run, and applies other data rules to them."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow as pa

from bapo_core.backtest import (
    BackTest,
    BackTestResult,
    RecordedStep,
    refuse_other_rollouts,
    refuse_unanswerable,
)
from bapo_core.config import ConfigError, RunConfig, override_config
from bapo_core.errors import BapoError
from bapo_core.types import GroupSummary, Source, TrainingBatch
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.cli.variants import Variant

OWN_RULES = "own rules"
"""Label of the rules that a run was recorded with."""
GROUPS_AT_ONCE = 50_000
"""About as many groups are in memory at a time."""


@dataclass(frozen=True, slots=True)
class RunBackTest:
    """The back-tests of one run."""

    run: str
    last_step: int
    results: Mapping[str, BackTestResult]
    """Results by the label of the rules; the run's own rules are the first."""
    first_difference: int | None
    """First step whose batch by the run's own rules is not the recorded one; None if all are."""


def recorded_steps(client: BufferClient, config: RunConfig, last: int) -> Iterator[RecordedStep]:
    """Yields the groups of steps 1 to `last`."""
    at_once = max(1, GROUPS_AT_ONCE // config.prompts_needed)
    for first in range(1, last + 1, at_once):
        yield from split_into_steps(client.groups_arrow(first, min(last, first + at_once - 1)))


def split_into_steps(content: bytes) -> Iterator[RecordedStep]:
    """Yields the steps of an Arrow stream of groups, as `BufferClient.groups_arrow` returns it."""
    for step, of_step in groupby(_rows(content), key=lambda row: row[0].step):
        groups = list(of_step)
        yield RecordedStep(
            step=step,
            fresh=[group for group, kind, _ in groups if kind == "fresh"],
            reevaluated=[group for group, kind, _ in groups if kind == "reevaluation"],
            tokens={group.group_id: tokens for group, _, tokens in groups},
        )


def _rows(content: bytes) -> Iterator[tuple[GroupSummary, str, int]]:
    with pa.ipc.open_stream(io.BytesIO(content)) as reader:
        for batch in reader:
            columns = [column.to_pylist() for column in batch.columns]
            for *summary, kind, tokens in zip(*columns, strict=True):
                yield GroupSummary(*summary), kind, tokens


def rules_of(
    config: RunConfig, stored: Mapping[str, Any], variants: Sequence[Variant], where: str
) -> dict[str, RunConfig]:
    """Returns the configurations of a run under each set of rules, its own first.

    Raises `ConfigError` for rules that recorded groups cannot answer, and for a label given twice.
    """
    refuse_unanswerable(config)
    rules = {OWN_RULES: config}
    for variant in variants:
        name = f"{where}: {variant.label}"
        if variant.label in rules:
            raise ConfigError(f"{name}: the label is given twice; give each once")
        changed = override_config(stored, variant.values, where=name)
        refuse_other_rollouts(config, changed, name)
        rules[variant.label] = changed
    return rules


def back_test(
    client: BufferClient, variants: Sequence[Variant], *, first: int, last: int | None, where: str
) -> RunBackTest:
    """Applies each set of rules to the committed steps of a run, from its first step on.

    first, last: the steps that the results count; last is the last committed step by default.
    Raises `BapoError` for steps that are not committed.
    """
    state = client.run_state()
    last = state.current_step if last is None else last
    if not 1 <= first <= last <= state.current_step:
        raise BapoError(
            f"steps {first}:{last} of run {client.run!r} are not all committed; it has committed "
            f"{state.current_step}"
        )
    rules = rules_of(state.config, client.stored_config(), variants, where)
    tests = {label: BackTest(config, first=first) for label, config in rules.items()}
    recorded = client.batches()
    difference = None
    for step in recorded_steps(client, state.config, last):
        batches = {label: test.add(step) for label, test in tests.items()}
        if difference is None and not is_recorded(batches[OWN_RULES], next(recorded)):
            difference = step.step
    results = {label: test.result() for label, test in tests.items()}
    return RunBackTest(client.run, last, results, difference)


def is_recorded(batch: TrainingBatch, recorded: wire.BatchSummary) -> bool:
    """Whether a batch has the window and the counts of a recorded one."""
    counts = {source: recorded.counts.get(source.value, 0) for source in Source}
    return batch.window == (recorded.c2, recorded.c3) and batch.counts == counts
