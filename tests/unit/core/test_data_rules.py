"""Samplers and batch rules of installed packages, without a database; the docs show the same."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bapo_core.algorithm import (
    BatchRule,
    Composition,
    StepState,
    compose,
    find_candidates,
    get_batch_rule,
    settle,
)
from bapo_core.config import ConfigError, RunConfig, config_from
from bapo_core.sampling import SAMPLERS, Draw, DrawContext, GivenResults, Posterior, draw_prompts
from bapo_core.types import BatchMember, GroupSummary, Source
from tests.unit.core.test_plug_ins import write_distribution

ROOT = Path(__file__).parents[3]


def configure(**sections: Any) -> RunConfig:
    rollout = {"prompts_per_step": 4, "group_size": 4}
    optimizer = {"minibatch_prompts": 4}
    return config_from({"name": "rules", "rollout": rollout, "optimizer": optimizer, **sections})


@pytest.fixture(autouse=True)
def _plug_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "plug_in"))


@pytest.mark.parametrize("module", ["bapo_frontier.py", "bapo_nearest.py"])
def test_the_docs_show_the_plug_ins_of_the_tests(module: str) -> None:
    page = (ROOT / "docs" / "adding-a-method.md").read_text()
    shown = re.search(rf"```python\n# {re.escape(module)}\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    code = (ROOT / "tests" / "plug_in" / module).read_text()
    assert shown[1] == code
    assert len(code.splitlines()) <= 40


def test_the_sampler_of_a_plug_in_draws_by_results() -> None:
    config = configure(sampler={"kind": "frontier", "explore": 0.25})
    known = {
        0: Posterior(9.0, 1.0),
        1: Posterior(5.0, 5.0),
        2: Posterior(1.0, 9.0),
        3: Posterior(4.0, 6.0),
        4: Posterior(7.0, 3.0),
    }
    draw = draw_prompts(DrawContext(config, 3, 0, 20, GivenResults(known)))
    assert list(draw.positions[:3]) == [1, 3, 4]
    assert draw.positions[3] not in {1, 3, 4}
    assert draw.explain is not None
    assert "highest learnability: its probability of a correct response is 0.500" in draw.explain(
        1, known[1]
    )
    again = draw_prompts(DrawContext(config, 3, 0, 20, GivenResults(known)))
    assert again.positions == draw.positions


def test_configurations_of_plug_ins_with_the_same_values_are_equal() -> None:
    """With a section of settings of their own, and without one."""
    for sampler in ({"kind": "frontier", "explore": 0.25}, {"kind": "unsound"}):
        config = configure(sampler=sampler, batch={"rule": "nearest"})
        stored = config.model_dump(mode="json")
        assert configure(sampler=sampler, batch={"rule": "nearest"}) == config
        assert RunConfig.model_validate(stored) == config
        assert configure(sampler=sampler) != config
    others = [{"kind": "frontier", "explore": 0.75}, {"kind": "unsound"}, {"kind": "uniform"}]
    configs = [configure(sampler=sampler) for sampler in ({"kind": "frontier"}, *others)]
    assert [configs.index(config) for config in configs] == [0, 1, 2, 3]


@pytest.mark.parametrize("positions", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 20], [-1, 0, 1, 2]])
def test_a_plug_in_must_draw_different_positions_of_the_dataset(
    positions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bapo_frontier.draw", lambda _: Draw(positions))
    config = configure(sampler={"kind": "frontier"})
    with pytest.raises(ConfigError, match=r"it must draw rollout.prompts_per_step = 4 of these"):
        draw_prompts(DrawContext(config, 1, 0, 20, GivenResults()))


@pytest.mark.parametrize("kind", SAMPLERS)
def test_built_in_samplers_draw_without_a_database(kind: str) -> None:
    config = configure(
        sampler={"kind": kind, **({} if kind == "uniform" else {"posterior_as_of": "step"})}
    )
    known = {position: Posterior(1.0 + position % 5, 5.0 - position % 5) for position in range(40)}
    context = DrawContext(config, 5, 0, 64, GivenResults(known, [[0, 0, 1, 2, 1]]))
    draw = draw_prompts(context)
    assert len(set(draw.positions)) == 4
    assert draw_prompts(context).positions == draw.positions
    if draw.explain is not None:
        reasons = {
            draw.explain(position, known.get(position, Posterior())) for position in range(64)
        }
        assert len(reasons) > 2


def test_a_later_round_must_leave_out_what_the_earlier_ones_drew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = configure(sampler={"kind": "frontier"}, batch={"capacity": 8})
    first = draw_prompts(DrawContext(config, 3, 0, 20, GivenResults()))
    context = DrawContext(config, 3, 1, 20, GivenResults(), earlier=frozenset(first.positions))
    assert not set(draw_prompts(context).positions) & set(first.positions)
    monkeypatch.setattr("bapo_frontier.draw", lambda _: first)
    with pytest.raises(ConfigError, match="0 of them different positions below 20 that no earlier"):
        draw_prompts(context)


def test_a_sampler_that_returns_no_draw_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bapo_frontier.draw", lambda _: [0, 1, 2, 3])
    config = configure(sampler={"kind": "frontier"})
    with pytest.raises(ConfigError, match=r"returned \[0, 1, 2, 3\]; return a bapo_core"):
        draw_prompts(DrawContext(config, 1, 0, 20, GivenResults()))


def test_the_code_of_the_page_does_what_its_comments_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / "docs" / "adding-a-method.md").read_text()
    (code,) = re.findall(r"## Try it without a run\n\n```python\n(.*?)```", page, re.DOTALL)
    exec(code, {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "[1, 2]"
    assert printed[1] == "[('prompt:9', 'fresh'), ('prompt:3', 'replayed')]"
    assert "1 candidates are nearer to half" in printed[-1]


def test_the_rule_of_the_page_replays_no_group_twice() -> None:
    page = (ROOT / "docs" / "adding-a-method.md").read_text()
    (code,) = re.findall(r"```python\n(from dataclasses.*?ONCE = .*?)```", page, re.DOTALL)
    module: dict[str, Any] = {}
    exec(code, module)
    config = configure(
        rollout={"prompts_per_step": 4, "group_size": 8},
        replay={"window": {"c2_range": [0, 0], "c3_range": [1, 1]}},
    )
    fresh = [GroupSummary(10, "fresh:10", 3, 4, 8)]
    state = StepState(step=3, fresh=fresh, high=entries(1, 4, 7, 5))
    composition = module["ONCE"].compose(config, state)
    replayed = {m.group.group_id for m in composition.batch.members if m.source is Source.REPLAYED}
    window = composition.batch.window
    held = list(state.high)
    for change in module["ONCE"].settle(config, state, window=window, supervised=())[
        "high_quality"
    ]:
        held = change.apply(held)
    assert len(replayed) == 3
    assert {entry.group_id for entry in held} == {0, 1, 2, 3} - replayed | {10}


@pytest.mark.parametrize(
    ("function", "result", "message"),
    [
        ("compose", lambda *_: None, "compose returned None; return a"),
        ("settle", lambda *_, **__: None, "settle returned None; return {"),
        ("settle", lambda *_, **__: {"high": []}, "settle returned {'high': []}; return {"),
        ("settle", lambda *_, **__: {"hard": [3]}, "settle returned [3] for 'hard'; return {"),
        (
            "draw_reevaluated",
            lambda *_: [GroupSummary(99, "other", 1, 0, 8)],
            "draw_reevaluated must return entries of the hard buffer",
        ),
    ],
)
def test_what_a_batch_rule_returns_wrongly_is_refused(
    function: str, result: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bapo_nearest.RULE", BatchRule(**{function: result}))
    rule = get_batch_rule("nearest")
    state = StepState(step=3, fresh=[GroupSummary(10, "fresh:10", 3, 4, 8)])
    calls = {
        "compose": lambda: rule.compose(configure(), state),
        "settle": lambda: rule.settle(configure(), state, window=(0.0, 1.0), supervised=()),
        "draw_reevaluated": lambda: rule.draw_reevaluated(configure(), 3, entries(0, 1)),
    }
    with pytest.raises(ConfigError, match=re.escape(f"batch rule nearest: {message}")):
        calls[function]()


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([1, 2, 3, 4, 5], "compose returned 5 groups, but the capacity of a batch is 4"),
        ([1, 1], "compose returned a batch that has a group twice"),
        ([77], "compose returned group 77, which is none of the state's"),
    ],
)
def test_a_batch_that_cannot_be_trained_on_is_refused(
    groups: list[int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compose_wrongly(config: RunConfig, state: StepState) -> Composition:
        made = compose(config, state)
        members = [
            BatchMember(GroupSummary(number, f"fresh:{number}", 3, 4, 8), Source.FRESH)
            for number in groups
        ]
        return replace(made, batch=replace(made.batch, members=members))

    monkeypatch.setattr("bapo_nearest.RULE", BatchRule(compose=compose_wrongly))
    fresh = [GroupSummary(number, f"fresh:{number}", 3, 4, 8) for number in range(1, 6)]
    with pytest.raises(ConfigError, match=message):
        get_batch_rule("nearest").compose(configure(), StepState(step=3, fresh=fresh))


def entries(*counts: int) -> list[GroupSummary]:
    return [
        GroupSummary(number, f"stored:{number}", 2, correct, 8)
        for number, correct in enumerate(counts)
    ]


def test_the_batch_rule_of_a_plug_in_replays_the_nearest_entries() -> None:
    config = configure(
        batch={"rule": "nearest", "most": 2},
        rollout={"prompts_per_step": 4, "group_size": 8},
        replay={"window": {"c2_range": [0, 0], "c3_range": [1, 1]}},
    )
    fresh = [GroupSummary(10, "fresh:10", 3, 4, 8)]
    state = StepState(step=3, fresh=fresh, high=entries(1, 4, 7, 5))
    rule = get_batch_rule("nearest")
    composition = rule.compose(config, state)
    replayed = [m.group.group_id for m in composition.batch.members if m.source is Source.REPLAYED]
    assert replayed == [1, 3]
    decision = composition.decisions.on_prompt("stored:0")[Source.REPLAYED]
    assert decision.outcome == "not_used"
    assert decision.reason.startswith("1 of 8 correct at step 2: 2 candidates are nearer to half")
    # What it does not replace, and without its limit all, is Algorithm 1's.
    window = composition.batch.window
    changes = rule.settle(config, state, window=window, supervised=())
    assert changes == settle(config, state, window=window, supervised=())
    unlimited = config.model_copy(update={"batch": config.batch.model_copy(update={"most": 64})})
    assert rule.compose(unlimited, state).batch == compose(unlimited, state).batch


@pytest.mark.parametrize("seed", range(20))
def test_a_rule_that_leaves_entries_out_changes_neither_the_window_nor_other_reasons(
    seed: int,
) -> None:
    rng = random.Random(seed)
    config = configure(
        batch={"rule": "nearest", "most": 2},
        rollout={"prompts_per_step": 4, "group_size": 8},
        replay={"window": {"r_tot": "buffer"}},
    )
    high = [
        GroupSummary(number, f"stored:{number}", rng.randint(1, 8), rng.randint(1, 7), 8)
        for number in range(12)
    ]
    state = StepState(step=9, fresh=[GroupSummary(20, "fresh:20", 9, 4, 8)], high=high)
    candidates = find_candidates(config, state)
    nearest = sorted(candidates, key=lambda entry: abs(entry.correct - 4))[:2]
    composition, expected = get_batch_rule("nearest").compose(config, state), compose(config, state)
    assert (composition.r_tot, composition.batch.window) == (expected.r_tot, expected.batch.window)
    replayed = [m.group for m in composition.batch.members if m.source is Source.REPLAYED]
    assert replayed == sorted(nearest, key=lambda entry: entry.group_id)
    left_out = {entry.prompt_uid for entry in candidates} - {entry.prompt_uid for entry in nearest}
    for entry in high:
        reason = composition.decisions.on_prompt(entry.prompt_uid)[Source.REPLAYED].reason
        if entry.prompt_uid in left_out:
            assert "2 candidates are nearer to half (batch.most)" in reason
        elif entry not in candidates:
            on_prompt = expected.decisions.on_prompt(entry.prompt_uid)
            assert reason == on_prompt[Source.REPLAYED].reason


@pytest.mark.parametrize(
    ("section", "key", "message"),
    [
        ("sampler", "kind", "'frontire' is not one of dots, exgrpo, frontier, "),
        ("batch", "rule", "batch.rule: 'frontire' is not one of algorithm1, nearest"),
    ],
)
def test_an_unknown_rule_is_refused_with_those_that_are_known(
    section: str, key: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        configure(**{section: {key: "frontire"}})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"sampler": {"explore": 0.25}}, "sampler.explore: no such key with sampler.kind=uniform"),
        ({"batch": {"most": 2}}, "batch.most: no such key with batch.rule=algorithm1"),
        (
            {"sampler": {"kind": "frontier", "explor": 0.25}},
            "sampler.explor: no such key; did you mean sampler.explore?",
        ),
        (
            {"batch": {"rule": "nearest", "most": -1}},
            "batch.most: input should be greater than or equal to 0 (got -1)",
        ),
        (
            {"sampler": {"kind": "unsound", "explore": 0.25}},
            "sampler.explore: no such key with sampler.kind=unsound",
        ),
    ],
)
def test_keys_of_a_plug_in_are_checked(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        configure(**sections)


def test_an_entry_point_of_another_kind_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_distribution(
        tmp_path, "bapo-wrong", "wrong = bapo_wrong:RULE", "RULE = 3\n", "bapo.batch_rules"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"names 3; name a bapo_core.algorithm.BatchRule"):
        get_batch_rule("wrong")


def test_a_decision_of_the_same_source_is_not_replaced() -> None:
    config = configure(rollout={"prompts_per_step": 4, "group_size": 8})
    state = StepState(step=3, fresh=[GroupSummary(10, "fresh:10", 3, 4, 8)])
    decisions = compose(config, state).decisions
    first = decisions.on_prompt("fresh:10")[Source.FRESH]
    other = replace(first, reason="another")
    assert decisions.adding({"fresh:10": other}).on_prompt("fresh:10")[Source.FRESH] == first
