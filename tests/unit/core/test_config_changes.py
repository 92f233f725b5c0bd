"""Tests which keys of a run's configuration may change, and what is in force at a step."""

from __future__ import annotations

import re
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bapo_core.config import (
    PRESETS,
    ConfigChange,
    ConfigError,
    ConfigHistory,
    RunConfig,
    config_from,
    flatten,
    load_config,
    override_config,
)
from bapo_core.config.changes import CHANGEABLE, values_at, values_of_user
from bapo_core.config.loader import merge, nest

INITIAL = config_from(
    {
        "name": "words",
        "steps": 12,
        "optimizer": {"learning_rate": 1e-4},
        "evaluation": {"every": 5, "sets": {"easy": {"every": 4}, "hard": {}}},
    }
)


def history(*requests: tuple[int, dict[str, Any]]) -> ConfigHistory:
    """Returns the configuration of a run that was changed after steps, in this order."""
    changes: list[ConfigChange] = []
    for trained, values in requests:
        change = ConfigHistory(INITIAL, changes).plan_change(values, trained)
        assert change is not None
        changes.append(change)
    return ConfigHistory(INITIAL, changes)


def rates(configs: ConfigHistory, *steps: int) -> list[float]:
    return [configs.at(step).optimizer.learning_rate for step in steps]


def test_a_change_holds_from_its_step_on() -> None:
    configs = history((4, {"optimizer.learning_rate": 1e-5}), (8, {"steps": 20}))
    assert rates(configs, 1, 4, 5, 20) == [1e-4, 1e-4, 1e-5, 1e-5]
    assert [configs.at(step).steps for step in (1, 8, 9)] == [12, 12, 20]
    assert configs.current == configs.at(20)
    assert configs.at(0) == INITIAL


def test_a_run_without_changes_has_its_configuration_at_every_step() -> None:
    assert ConfigHistory(INITIAL).at(3) is INITIAL
    assert ConfigHistory(INITIAL).current is INITIAL


def test_a_step_that_is_repeated_has_the_values_that_it_had() -> None:
    """A run that went back to step 4 knows of the change after step 8, which holds from 9 on."""
    configs = history((8, {"optimizer.learning_rate": 1e-5}))
    assert rates(configs, 5, 8, 9) == [1e-4, 1e-4, 1e-5]


def test_the_last_change_of_a_key_holds_although_an_earlier_one_begins_later() -> None:
    configs = history(
        (8, {"optimizer.learning_rate": 1e-5}), (4, {"optimizer.learning_rate": 1e-6})
    )
    assert rates(configs, 4, 5, 9) == [1e-4, 1e-6, 1e-6]
    back = history((8, {"optimizer.learning_rate": 1e-5}), (4, {"optimizer.learning_rate": 1e-4}))
    assert rates(back, 4, 5, 9) == [1e-4, 1e-4, 1e-4]


@given(
    requests=st.lists(
        st.tuples(
            st.integers(0, 11),
            st.fixed_dictionaries(
                {"optimizer.learning_rate": st.floats(1e-7, 1e-3)},
                optional={"checkpoint.every": st.integers(1, 9), "steps": st.integers(12, 40)},
            ),
        ),
        max_size=5,
    ),
    step=st.integers(0, 40),
)
def test_the_values_of_a_step_are_the_same_from_whichever_values_they_are_computed(
    requests: list[tuple[int, dict[str, Any]]], step: int
) -> None:
    changes: list[ConfigChange] = []
    for trained, values in requests:
        change = ConfigHistory(INITIAL, changes).plan_change(values, trained)
        changes += [] if change is None else [change]
    initial = INITIAL.model_dump(mode="json")
    current = values_at(initial, changes, None)
    assert values_at(current, changes, step) == values_at(initial, changes, step)
    assert values_at(current, changes, 0) == initial


def test_a_change_names_the_values_before_and_after_it() -> None:
    change = ConfigHistory(INITIAL).plan_change(
        {"steps": 20, "optimizer.learning_rate": 1e-5, "checkpoint.every": 5}, 12
    )
    assert change == ConfigChange(
        first_step=13,
        old={"steps": 12, "optimizer.learning_rate": 1e-4},
        new={"steps": 20, "optimizer.learning_rate": 1e-5},
    )
    assert change.describe() == "optimizer.learning_rate 0.0001 -> 1e-05, steps 12 -> 20"
    assert change.describe(2) == change.describe()
    assert change.describe(1) == "optimizer.learning_rate 0.0001 -> 1e-05, 1 more"


def test_values_that_the_run_has_already_change_nothing() -> None:
    assert ConfigHistory(INITIAL).plan_change({"steps": 12, "seed": 42}, 12) is None


def test_an_evaluation_set_may_get_an_interval_of_its_own() -> None:
    configs = history((2, {"evaluation.sets.hard.every": 3, "evaluation.sets.easy.every": None}))
    sets = configs.at(3).evaluation_sets
    assert (sets["hard"].every, sets["easy"].every) == (3, 5)
    assert configs.at(2).evaluation_sets["hard"].every == 5


@pytest.mark.parametrize(
    ("values", "trained", "message"),
    [
        ({"seed": 7}, 4, "run 'words' cannot change seed=7: "),
        ({"steps": 20, "sync.every": 2}, 4, "cannot change sync.every=2: "),
        ({"algorithm": "grpo"}, 4, "cannot change algorithm=grpo: "),
        ({"kl.coefficient": 0.1, "seed": 7}, 4, "cannot change kl.coefficient=0.1, seed=7: "),
        ({"evaluation.sets.hard.samples": 2}, 4, "cannot change evaluation.sets.hard.samples=2"),
        ({"steps": 3}, 4, "steps=3 is below the 4 steps that run 'words' has trained; give at "),
        ({"optimizer.learning_rate": 1e-5}, 12, "would change nothing: run 'words' has trained 12"),
        ({"steps": 0}, 4, "steps: input should be greater than or equal to 1"),
        ({"optimizer.learnin_rate": 1}, 4, "learnin_rate"),
        ({"checkpoint.keep_best": 2}, 4, "checkpoint.keep_best is 2, which needs a checkpoint of"),
    ],
)
def test_what_may_not_change_is_refused_with_the_remedy(
    values: dict[str, Any], trained: int, message: str
) -> None:
    config = load_config(None, ["name=words", "steps=12", "evaluation.every=4"])
    if "evaluation.sets.hard.samples" in values:
        config = INITIAL
    with pytest.raises(ConfigError, match=re.escape(message)):
        ConfigHistory(config).plan_change(values, trained)


@pytest.mark.parametrize(
    ("values", "of_methods", "of_evaluations"),
    [
        ({"sync.every": 2}, True, False),
        ({"evaluation.samples": 2}, False, True),
        ({"evaluation.temperature": 0.5, "steps": 13}, False, True),
        ({"task.test_prompts": 8}, False, True),
        ({"evaluation.samples": 2, "sync.every": 2}, True, True),
    ],
    ids=str,
)
def test_a_refused_change_says_what_it_would_make_incomparable(
    values: dict[str, Any], of_methods: bool, of_evaluations: bool
) -> None:
    configs = ConfigHistory(load_config(None, ["name=words", "steps=12", "evaluation.every=4"]))
    with pytest.raises(ConfigError, match="run 'words' cannot change") as refusal:
        configs.plan_change(values, 4)
    message = str(refusal.value)
    assert ("its steps would be of two methods or of two tasks" in message) is of_methods
    assert (
        "the accuracies of its evaluations before and after the change could not be compared"
        in message
    ) is of_evaluations


@pytest.mark.parametrize(
    "values",
    [
        {"rollout.group_size": 4},
        {"rollout.max_prompt_tokens": 64},
        {"lora.rank": 8},
        {"model.path": "other"},
        {"task.train_path": "other.jsonl"},
        {"reward.correct": 2.0},
        {"evaluation.samples": 2},
        {"sync.every": 2, "rollout.group_size": 4},
        {"sync.every": 2},
        {"seed": 7},
        {"rollout.prompts_per_step": 64},
        {"rollout.max_response_tokens": 64},
        {"fresh.filter": "none"},
    ],
    ids=str,
)
def test_a_fork_is_recommended_for_what_a_fork_may_change_alone(values: dict[str, Any]) -> None:
    configs = ConfigHistory(load_config(None, ["name=words", "steps=12", "evaluation.every=4"]))
    with pytest.raises(ConfigError, match="run 'words' cannot change") as refusal:
        configs.plan_change(values, 4)
    requested: dict[str, Any] = {}
    for key, value in values.items():
        requested = merge(requested, nest(key, value))
    try:
        configs.plan_fork(requested, 4, "fork")
    except ConfigError as error:
        assert "`bapo fork" not in str(refusal.value)
        for message in (str(refusal.value), str(error)):
            assert "start a new run with `bapo run`" in message
            assert "`bapo checkpoints RUN --export DIR` and model.path=DIR" in message
    else:
        assert f"`bapo fork words --at STEP {next(iter(values))}=" in str(refusal.value)


def test_a_run_may_end_with_the_step_that_it_is_at() -> None:
    change = ConfigHistory(INITIAL).plan_change({"steps": 4}, 4)
    assert change is not None
    config = ConfigHistory(INITIAL, [change]).at(5)
    assert config.evaluation_sets_at(5) == ["easy", "hard"], "the final weights are evaluated"


@given(
    v=st.integers(1, 9),
    lag=st.integers(0, 6),
    phase=st.sampled_from(["algorithm1", "first_step"]),
    steps=st.integers(1, 20),
)
def test_a_run_that_gets_more_steps_finds_all_weights_that_its_rollouts_need(
    v: int, lag: int, phase: str, steps: int
) -> None:
    config = load_config(
        None, [f"steps={steps}", f"sync.every={v}", f"sync.lag={lag}", f"sync.phase={phase}"]
    )
    change = ConfigHistory(config).plan_change({"steps": 30}, steps)
    assert change is not None
    configs = ConfigHistory(config, [change])
    for t in range(1, 31):
        version = config.schedule.policy_version(t)
        assert configs.at(version).publishes_at(version)


def test_every_key_that_may_change_exists_and_is_documented() -> None:
    keys = flatten(INITIAL.model_dump(mode="json"))
    page = Path("docs/concepts.md").read_text()
    for pattern in CHANGEABLE:
        assert [key for key in keys if fnmatchcase(key, pattern)], pattern
        assert f"`{pattern}`" in page, pattern


def test_the_default_configuration_has_no_schedule_that_depends_on_the_number_of_steps() -> None:
    """So a run that gets more steps is the run that had them from the start."""
    short, long = RunConfig(steps=10), RunConfig(steps=40)
    for t in range(1, 11):
        assert short.publishes_at(t) == long.publishes_at(t)
        assert short.rollout_version(t, "fresh") == long.rollout_version(t, "fresh")
        assert short.replays_at(t) == long.replays_at(t)


# ---- forks --------------------------------------------------------------------------------------

ALGORITHMS = st.sampled_from(sorted(PRESETS))
USER_VALUES: list[dict[str, Any]] = [
    {"optimizer": {"learning_rate": 3e-5}},
    {"sampler": {"kind": "mopps", "candidates": 2}},
    {"task": {"options": {"template": "short"}, "train_prompts": 1500}},
    {"rollout": {"engine": {"kind": "vllm", "args": ["--enforce-eager"]}}},
    {"evaluation": {"sets": {"easy": {"every": 4}, "hard": {}}}},
    {"loss": {"by_source": {"replayed": {"coefficient": 0.5}}}},
]
STEPS = 12
BY_PAST = (
    "advantage.estimator=",
    "demonstrations.supervise_every=",
    "kl.reset_after=",
    "reward.overlong_share=",
)
"""Begins the keys of presets that may not change in a fork."""


def configure(algorithm: str, name: str = "words", **values: Any) -> RunConfig:
    return config_from({"algorithm": algorithm, "name": name, "steps": STEPS, **values})


def fork_to(
    configs: ConfigHistory, values: dict[str, Any], step: int, name: str
) -> ConfigChange | None:
    """Returns the change of a fork; None if a key of the algorithm may not change in one."""
    try:
        return configs.plan_fork(values, step, name)
    except ConfigError as error:
        if any(f": {key}" in str(error) for key in BY_PAST):
            return None
        raise


def assert_values(
    initial: RunConfig, changes: list[ConfigChange], expected: dict[int, RunConfig]
) -> None:
    """Compares the values at steps, from whichever values they are computed, key by key."""
    values = initial.model_dump(mode="json")
    starts = [values, *(values_at(values, changes, step) for step in (*expected, None))]
    for start in starts:
        for step, config in expected.items():
            assert values_at(start, changes, step) == config.model_dump(mode="json")


def valid_configs() -> list[RunConfig]:
    """Returns each preset alone and with values of a user, as far as its algorithm takes them."""
    configs = [configure(algorithm) for algorithm in sorted(PRESETS)]
    for values in USER_VALUES:
        configs.append(configure("bapo", **values))
        for algorithm in sorted(PRESETS):
            with suppress(ConfigError):
                configs.append(configure(algorithm, **values))
    return configs


def test_the_values_of_the_user_give_the_configuration_again() -> None:
    for config in valid_configs():
        written = values_of_user(config)
        assert override_config(written) == config
        assert values_of_user(override_config(written)) == written


@settings(max_examples=60, deadline=None)
@given(before=ALGORITHMS, after=ALGORITHMS, rate=st.floats(1e-7, 1e-3))
def test_a_fork_has_the_configuration_of_either_algorithm_on_its_own_side(
    before: str, after: str, rate: float
) -> None:
    values = {"optimizer": {"learning_rate": rate}}
    initial = configure(before)
    change = fork_to(ConfigHistory(initial), {"algorithm": after, **values}, 5, "fork")
    if change is not None:
        own = configure(after, "fork", **values)
        assert_values(initial, [change], {0: initial, 5: initial, 6: own, STEPS: own})


@pytest.mark.parametrize("after", ["remix_grpo", "luffy", "exgrpo"])
@pytest.mark.parametrize("swapped", [False, True])
def test_sections_that_are_empty_or_null_on_one_side_of_a_fork_are_kept(
    after: str, swapped: bool
) -> None:
    """`kl.convex` and `loss.by_source` of BAPO have no keys, and those of these presets have."""
    before, after = (after, "bapo") if swapped else ("bapo", after)
    initial = configure(before)
    change = fork_to(ConfigHistory(initial), {"algorithm": after}, 5, "fork")
    assert change is not None
    assert_values(initial, [change], {5: initial, 6: configure(after, "fork")})


@settings(max_examples=60, deadline=None)
@given(
    algorithms=st.tuples(ALGORITHMS, ALGORITHMS, ALGORITHMS),
    first=st.integers(0, STEPS - 2),
    second=st.integers(0, STEPS - 2),
)
@example(algorithms=("bapo", "grpo", "exgrpo"), first=8, second=3)
@example(algorithms=("bapo", "exgrpo", "grpo"), first=8, second=3)
def test_the_fork_of_a_fork_has_the_configurations_of_its_whole_lineage(
    algorithms: tuple[str, str, str], first: int, second: int
) -> None:
    """The second fork may be at a step that the first one shares with its parent."""
    initial = configure(algorithms[0])
    one = fork_to(ConfigHistory(initial), {"algorithm": algorithms[1]}, first, "one")
    if one is None:
        return
    two = fork_to(ConfigHistory(initial, [one]), {"algorithm": algorithms[2]}, second, "two")
    if two is None:
        return
    expected = {
        step: configure(algorithms[2], "two")
        if step > second
        else configure(algorithms[1], "one")
        if step > first
        else initial
        for step in {0, first, first + 1, second, second + 1, STEPS}
    }
    assert_values(initial, [one, two], expected)


def test_a_fork_before_a_change_of_its_run_keeps_the_change_for_the_keys_that_it_leaves() -> None:
    initial = configure("bapo")
    resumed = ConfigHistory(initial).plan_change({"optimizer.learning_rate": 1e-5}, 8)
    assert resumed is not None
    configs = ConfigHistory(initial, [resumed])
    (seed, rate) = (
        ConfigHistory(initial, [resumed, configs.plan_fork(values, 4, "fork")])
        for values in ({"seed": 7}, {"optimizer": {"learning_rate": 1e-6}})
    )
    assert rates(seed, 4, 5, 8, 9) == [initial.optimizer.learning_rate] * 3 + [1e-5]
    assert [seed.at(step).seed for step in (4, 5, 9)] == [initial.seed, 7, 7]
    assert rates(rate, 4, 5, 9) == [initial.optimizer.learning_rate, 1e-6, 1e-6]


def test_a_kind_of_a_section_that_a_later_fork_has_too_holds_from_the_earlier_fork_on() -> None:
    initial = configure("bapo")
    sampler: dict[str, Any] = {"sampler": {"kind": "mopps", "candidates": 2, "decay": 0.5}}
    one = ConfigHistory(initial).plan_fork(sampler, 8, "one")
    two = ConfigHistory(initial, [one]).plan_fork({"sampler": {"kind": "mopps"}}, 3, "two")
    configs = ConfigHistory(initial, [one, two])
    assert configs.at(4).sampler == configs.at(9).sampler == configure("bapo", **sampler).sampler
    assert configs.at(3) == initial
