"""Every declaration is complete, and plans valid configurations at each of its sizes."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from bapo_core.config import RunConfig, read_values
from bapo_core.errors import BapoError
from pipelines.configuration import read_config
from services.reproduction import plans
from services.reproduction.declarations import (
    ITEMS,
    SETUPS,
    SIZES,
    Declaration,
    Size,
    SizePlan,
    find_items,
    read_declaration,
    read_items,
    read_setup,
)
from services.reproduction.plans import TIME_OF_TWO_AT_A_TIME, plan_runs, total_minutes
from services.reproduction.states import describe_test

ROOT = Path(__file__).parents[3]
NAMES = sorted(path.stem for path in ITEMS.glob("*.yaml"))
EXAMPLES = {"sorting": {}, "distinct": {}, "countdown": {"steps": 200}, "geometry": {}}
MOST_HOURS = 12
"""Hours that the whole small size may take on two idle cores."""


def declared(name: str) -> Declaration:
    return read_declaration(ITEMS / f"{name}.yaml")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_a_declaration_plans_valid_configurations(name: str, size: Size) -> None:
    runs = plan_runs(declared(name), size)
    if declared(name).plan_at(size) is None:
        assert runs == []
        return
    configs = [run.config() for run in runs]
    assert [config.seed for config in configs] == [run.seed for run in runs]
    # No two variants are the same experiment, and no two runs share a name.
    assert len({config.model_dump_json(exclude={"name"}) for config in configs}) == len(runs)
    assert len({config.name for config in configs}) == len(runs)


def test_every_setup_of_the_papers_size_is_a_configuration_of_the_pipeline() -> None:
    for path in SETUPS.glob("*-paper.yaml"):
        config = read_config("run", read_values(path), None, [], {})
        assert isinstance(config, RunConfig)
        assert config.rollout.engine.kind == "vllm"


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_small_setup_is_the_example_of_its_task(name: str) -> None:
    example = read_values(ROOT / f"examples/{name}.yaml") | EXAMPLES[name]
    setup = {**read_setup(name)}
    for values in (example, setup):
        del values["seed"]
        values.pop("name", None)
    if name == "countdown":
        # More held-out prompts and evaluations than the example, which is for a first run.
        example["task"] |= {"test_prompts": 500}
        example["evaluation"] = {"every": 10}
    assert setup == example


def test_the_list_has_every_table_and_figure_and_question() -> None:
    expected = {f"fig{number}" for number in (1, *range(4, 17))}
    expected |= {"table1a", "table1b", "table1c", "table2", "table3", "table4", "ladder"}
    expected |= {f"r{number}" for number in range(1, 13)}
    assert expected <= set(NAMES)
    assert list(read_items())[:3] == ["ladder", "r1", "r2"]
    figures = [name for name in read_items() if name.startswith("fig")]
    assert figures == [f"fig{number}" for number in (1, *range(4, 17))]


def test_the_ladder_has_the_rungs_of_the_example() -> None:
    rungs = read_values(ROOT / "examples/variants/ladder.yaml")
    assert {**declared("ladder").variants, **rungs} == declared("ladder").variants


def test_the_whole_small_size_takes_at_most_twelve_hours() -> None:
    runs = [run for each in read_items().values() for run in plan_runs(each, "small")]
    assert all(run.minutes > 0 for run in runs)
    assert total_minutes(runs) * TIME_OF_TWO_AT_A_TIME <= 60 * MOST_HOURS
    # Experiments share runs: each counts once.
    assert len({run.name for run in runs}) < len(runs)


def test_a_run_is_shared_whatever_its_label() -> None:
    ladder, delay = (plan_runs(declared(name), "small") for name in ("ladder", "r5"))
    names = {run.label: run.name for run in ladder if run.seed == 1}
    assert names["+ re-evaluations"] == next(
        run.name for run in delay if run.label == "bapo, v = 1" and run.seed == 1
    )


def test_what_is_declared_of_a_run_determines_its_name() -> None:
    (run, *_) = plan_runs(declared("fig5"), "small")
    assert run.name.startswith("reproduce-sorting-s1-")
    assert len(run.name) <= 63
    other = declared("fig5").model_copy(
        update={"variants": {"bapo": {"algorithm": "bapo", "sync": {"every": 4}}, "grpo": {}}}
    )
    assert plan_runs(other, "small")[0].name != run.name


def test_other_weights_of_a_bundled_model_are_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run, *_) = plan_runs(declared("fig5"), "small")
    before = run.name
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    monkeypatch.setitem(plans.BUNDLED_MODELS, "tiny-sorting", tmp_path)
    plans._digest_weights.cache_clear()
    try:
        assert run.name != before
    finally:
        plans._digest_weights.cache_clear()


def test_table_3_has_the_defaults() -> None:
    """Table 3 of arXiv 2602.20722, transcribed."""
    config = RunConfig()
    assert (config.rollout.group_size, config.rollout.prompts_per_step) == (8, 256)
    assert (config.rollout.max_prompt_tokens, config.rollout.max_response_tokens) == (2048, 8192)
    assert (config.optimizer.learning_rate, config.optimizer.minibatch_prompts) == (1e-6, 64)
    assert (config.sync.every, config.sync.reevaluate_every) == (5, 5)
    assert (config.kl.coefficient, config.loss.entropy_coefficient) == (0.001, 0.001)
    assert (config.reevaluate.c1, config.seed) == (1 / 8, 42)


@pytest.mark.parametrize("name", NAMES)
def test_a_repetition_is_the_experiment_with_as_many_other_seeds(name: str) -> None:
    declaration = declared(name)
    repeated = declaration.repeated()
    for size in SIZES:
        runs, others = plan_runs(declaration, size), plan_runs(repeated, size)
        assert [run.label for run in others] == [run.label for run in runs]
        assert {run.seed for run in others}.isdisjoint({run.seed for run in runs})
        plan = declaration.plan_at(size)
        if plan is None or not plan.own_prompts:
            assert [run.changes for run in others] == [run.changes for run in runs]
        if plan is not None:
            assert len({run.seed for run in others}) == len(plan.seeds)
            assert repeated.with_seeds(plan.seeds).plan_at(size) == plan
        names = {run.name for run in runs} | {run.name for run in others}
        assert {run.name for run in plan_runs(declaration.pooled(), size)} == names


def test_each_seed_of_an_experiment_with_own_prompts_has_prompts_that_no_other_run_has() -> None:
    own, shared = set(), set()
    for declaration in map(declared, NAMES):
        plan = declaration.plan_at("small")
        if plan is None:
            continue
        for run in plan_runs(declaration.pooled(), "small"):
            data_seed = run.config().task.data_seed
            if plan.own_prompts:
                assert data_seed == run.seed
            (own if plan.own_prompts else shared).add((run.setup, data_seed))
    assert own
    assert own.isdisjoint(shared)


def test_the_seeds_of_a_repetition_follow_on_the_declared_ones() -> None:
    rng = random.Random(0)
    for _ in range(100):
        seeds = tuple(rng.sample(range(1000), rng.randint(1, 6)))
        plan = SizePlan(setup="sorting", seeds=seeds)
        assert plan.repeat_seeds == tuple(max(seeds) + 1 + index for index in range(len(seeds)))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


VALID = """
title: Mine
claim: v = 5 is ahead of v = 10.
source: me
variants:
  v5: {}
  v10: {sync: {every: 10}}
small: {setup: sorting, seeds: [1, 2], minutes: 1}
paper: none
tests:
  - {larger: v5, than: [v10]}
"""


def test_a_path_is_a_declaration_of_the_users_own(tmp_path: Path) -> None:
    path = write(tmp_path, VALID)
    ((name, declaration),) = find_items([str(path)]).items()
    assert name == "mine"
    assert len(plan_runs(declaration, "small")) == 4
    assert describe_test(declaration.tests[0]) == "accuracy at equal training steps: v5 above v10"


def test_the_example_of_the_documentation_is_a_declaration(tmp_path: Path) -> None:
    (example,) = re.findall(
        r"```yaml\n(# delay.yaml.*?)```", (ROOT / "docs/experiments.md").read_text(), re.DOTALL
    )
    declaration = read_declaration(write(tmp_path, example))
    assert [run.config().steps for run in plan_runs(declaration, "small")] == [60] * 8


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("than: [v10]", "than: [v11]", "'v11' is no variant; there are base model, v10, v5"),
        ("larger: v5, than: [v10]", "larger: v5", "`larger` needs `than`"),
        ("larger: v5, than: [v10]", "equal: [v5, v10]", "`equal` needs `within`"),
        ("than: [v10]", "than: [v10], measure: speed", "measure: Input should be 'accuracy'"),
        ("than: [v10]", "than: [v10], measure: metric", "belong together"),
        ("claim:", "claims:", "claim: Field required; claims: Extra inputs"),
        ("  - {larger: v5, than: [v10]}", "  []", "one that judges it"),
        ("seeds: [1, 2]", "seeds: []", "seeds: "),
    ],
)
def test_a_wrong_declaration_is_refused_with_its_key(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = write(tmp_path, VALID.replace(old, new))
    with pytest.raises(BapoError) as refused:
        read_declaration(path)
    assert str(path) in str(refused.value)
    assert message in str(refused.value)


def test_an_unknown_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(BapoError, match=r"'fig66' is no experiment; did you mean fig6\?"):
        find_items(["fig66"])
    with pytest.raises(BapoError, match="setup 'sortin' is not one of countdown, countdown-paper"):
        read_setup("sortin")
