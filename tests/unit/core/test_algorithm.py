"""Algorithm 1 agrees with an independent transcription, on random states of all presets."""

from __future__ import annotations

import inspect
import sys
import types
import zlib
from typing import Any

import pytest

from bapo_core import algorithm
from bapo_core.algorithm import StepState
from bapo_core.buffers import BufferChange, find_effective, promoted
from bapo_core.config import RunConfig
from bapo_core.filters import gaussian_filter, range_filter
from bapo_core.response_replay import becomes_mixed
from bapo_core.types import GroupSummary
from tests.unit.core import transcription
from tests.unit.core.random_states import VARIANTS, random_state, small_configs

CONFIGS = dict(small_configs())
CASES = [
    (name, config, random_state(config, zlib.crc32(name.encode()) + number))
    for name, config in CONFIGS.items()
    for number in range(3)
]


def find_difference(module: Any, config: RunConfig, state: StepState) -> str:
    """Describes how a module's decisions on a state differ from the transcription's; "" if not."""
    try:
        composed = module.compose(config, state)
        window = composed.batch.window
        supervised = [entry.group_id for entry in composed.supervised]
        changes = module.settle(config, state, window=window, supervised=supervised)
    except ValueError as error:
        return f"raised {error}"
    members = [
        (member.group.group_id, member.source.value, member.rows, member.joins_previous)
        for member in composed.batch.members
    ]
    expected = transcription.compose(config, state)
    if (members, composed.r_tot) != expected[:2] or window != pytest.approx(expected[2], abs=1e-12):
        return f"batch {members}, {composed.r_tot}, {window}, not {expected}"
    if supervised != transcription.supervised(config, state):
        return f"supervised {supervised}"
    buffers = {"hard": state.hard, "high_quality": state.high}
    settled = {name: apply_changes(buffers[name], in_order) for name, in_order in changes.items()}
    if settled != transcription.settle(config, state, window, supervised):
        return f"buffers {settled}"
    return ""


def apply_changes(
    entries: list[GroupSummary], changes: list[BufferChange]
) -> tuple[list[int], dict[int, str]]:
    gone: dict[int, str] = {}
    for change in changes:
        entries = change.apply(entries)
        gone |= {group.group_id: reason.value for group, reason in change.evicted}
    return [group.group_id for group in entries], gone


def test_every_variant_is_tried_with_most_presets() -> None:
    tried = [name.split(", ")[1] for name in CONFIGS]
    assert all(tried.count(variant) >= 50 for variant in VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_batches_and_buffers_are_those_of_the_transcription(variant: str) -> None:
    for name, config, state in CASES:
        if name.split(", ")[1] == variant:
            difference = find_difference(algorithm, config, state)
            assert not difference, f"{name}, {state}: {difference}"


MUTATIONS = {
    "the filter ignores demonstrations": (
        "demonstrated=group.group_id in joined",
        "demonstrated=False",
    ),
    "the filter ignores replayed responses": (
        'replay.groups == "off" or replay.advantages == "split"',
        'replay.groups == "off" or True',
    ),
    "the Gaussian filter has another seed": ('"filter", state.step', '"filter", state.step + 1'),
    "the uniform filter keeps all": ("fraction=settings.uniform_fraction", "fraction=1.0"),
    "the Gaussian filter has no mean": ("mean=mean", "mean=0.0"),
    "replay has no age": (
        "window=limits, max_age=max_age)",
        "window=limits, max_age=None)",
    ),
    "replay begins a step later": (
        "if not config.replays_at(state.step):",
        "if not config.replays_at(state.step + 1):",
    ),
    "the batch is full too early": (
        "capacity=config.batch_capacity",
        "capacity=config.batch_capacity - 1",
    ),
    "duplicates are found by prompt alone": (
        "dedup=config.batch.dedup,\n    )\n    members",
        'dedup="prompt",\n    )\n    members',
    ),
    "a demonstration takes no place": ("without_first(member, 1)", "without_first(member, 0)"),
    "a demonstration takes the place of a replayed one": (
        "if member.source is Source.FRESH and member",
        "if member.source is Source.REPLAYED and member",
    ),
    "r_tot counts fresh groups as its buffer": (
        "buffer=[*state.hard, *state.high]",
        "buffer=state.fresh",
    ),
    "r_tot forgets B_bad": ("buffer=[*state.hard, *state.high]", "buffer=state.high"),
    "r_tot forgets the step before": ("previous=state.r_tot_before", "previous=None"),
    "the mixed window has all groups": ("1 / size, (size - 1) / size", "0.0, 1.0"),
    "mixed groups are replayed by their accuracy": (
        "limits = None if config.replays_all_mixed else window",
        "limits = window",
    ),
    "mixed groups are stored by their accuracy": (
        "window=None if config.replays_all_mixed else window",
        "window=window",
    ),
    "the distance of the policy does not count": (
        'if config.replay.select == "effective_sample_size":',
        "if False:",
    ),
    "the distance of the policy is never measured": ("decay=state.ess_decay", "decay=None"),
    "the policy may be at any distance": (
        "min_ess_fraction=config.replay.min_ess_fraction",
        "min_ess_fraction=1e-9",
    ),
    "the window does not move": ("settings.direction)", '"fixed")'),
    "promotion is the paper's": ("rule=settings.rule", 'rule="paper"'),
    "promotion compares with the oldest entry": (
        "for entry in state.hard}",
        "for entry in reversed(state.hard)}",
    ),
    "one group too many is revisited": ("rank < revisited", "rank <= revisited"),
    "responses are drawn by step alone": (
        '"responses", state.step, group.prompt_uid',
        '"responses", state.step',
    ),
    "demonstrations join solved groups": ("and correct == 0)", "and correct > 0)"),
    "a demonstration is not needed": (
        "demonstration_joins(config, group.correct) and group.prompt_uid in state.demonstrated",
        "demonstration_joins(config, group.correct)",
    ),
    "supervision has the oldest entries": ("due[-count:]", "due[:count]"),
    "supervision needs one more": ("len(due) >= count", "len(due) > count"),
    "supervision has solved entries": ("if entry.correct == 0 and entry", "if entry"),
    "solved prompts stay": ("evicted=[*solved, *trained]", "evicted=[*trained]"),
    "supervised prompts stay": ("evicted=[*solved, *trained]", "evicted=[*solved]"),
    "kept prompts leave": (" if config.hard_buffer.evict_solved else []", ""),
    "B_bad has no duplicates by prompt": (
        "capacity=config.hard_capacity,\n            dedup=dedup",
        'capacity=config.hard_capacity,\n            dedup="prompt"',
    ),
    "B_bad is admitted before it is emptied": ("leaving.apply(state.hard)", "state.hard"),
    "B_high is kept a step too long": (
        "config.replays_at(state.step + 1):\n        stored",
        "config.replays_at(state.step):\n        stored",
    ),
    "new groups of hard prompts are always stored": (
        "state.reevaluated if config.replays_reevaluated else ()",
        "state.reevaluated",
    ),
    "B_high takes re-evaluated groups first": (
        "[*state.fresh, *stored]",
        "[*stored, *state.fresh]",
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutated_rule_is_found(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = MUTATIONS[mutation]
    source = inspect.getsource(algorithm)
    assert source.count(right) == 1, f"{right!r} is no single place of bapo_core/algorithm.py"
    module = types.ModuleType("mutated_algorithm")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source.replace(right, wrong), module.__name__, "exec"), vars(module))
    assert any(find_difference(module, config, state) for _, config, state in CASES)


CORRECT_AND_WRONG = "0 < {0}.correct < {0}.size"
HELPER_MUTATIONS = {
    "the range filter counts correct responses": (
        range_filter,
        "if group.mixed]",
        f"if {CORRECT_AND_WRONG.format('group')}]",
    ),
    "the Gaussian filter counts correct responses": (
        gaussian_filter,
        "if group.mixed and",
        f"if {CORRECT_AND_WRONG.format('group')} and",
    ),
    "promotion counts correct responses": (
        promoted,
        "c1) and new.mixed",
        "c1) and new.correct < new.size",
    ),
    "improvement counts correct responses": (
        promoted,
        "improved and new.mixed",
        "improved and new.correct < new.size",
    ),
    "a group's distance is that of the step before": (
        find_effective,
        "predict_ess_fraction(entry, step=step,",
        "predict_ess_fraction(entry, step=step - 1,",
    ),
    "a group's policy is that of its step": (
        find_effective,
        "predict_ess_fraction(entry, step=step, decay=decay)",
        "math.exp(-(decay or 0.0) * (step - entry.step))",
    ),
    "correct responses make a group mixed though nothing joins it": (
        becomes_mixed,
        "joining > 0 and ",
        "",
    ),
}


@pytest.mark.parametrize("mutation", HELPER_MUTATIONS)
def test_a_rule_that_takes_correct_responses_for_rewards_is_found(
    mutation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, right, wrong = HELPER_MUTATIONS[mutation]
    source = inspect.getsource(function)
    assert source.count(right) == 1
    context = dict(vars(sys.modules[function.__module__]))
    exec(f"from __future__ import annotations\n{source.replace(right, wrong)}", context)
    monkeypatch.setattr(algorithm, function.__name__, context[function.__name__])
    assert any(find_difference(algorithm, config, state) for _, config, state in CASES)
