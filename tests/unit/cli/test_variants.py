"""The variants of a comparison are computed from what the user set, and from nothing else."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from bapo_core.config import PRESETS, ConfigError, config_from, flatten, load_config
from services.cli.variants import (
    Variant,
    algorithm_variant,
    algorithm_variants,
    parse_variant,
    plan_runs,
    read_variants,
)

EXAMPLE = "examples/countdown.yaml"


def configs(
    *labels: str, overrides: tuple[str, ...] = (), file: str | Path | None = EXAMPLE
) -> dict[str, dict[str, object]]:
    """Returns the configurations of algorithms by label, without their names."""
    variants = [algorithm_variant(label) for label in labels]
    runs = plan_runs(file, overrides, variants, [1])
    return {run.label: run.config.model_dump(exclude={"name"}) for run in runs}


def test_all_algorithms_are_the_presets() -> None:
    assert [variant.label for variant in algorithm_variants("all")] == list(PRESETS)
    assert [variant.label for variant in algorithm_variants("bapo,repo")] == ["bapo", "repo"]
    with pytest.raises(ConfigError, match="algorithm 'ball' is not one of areal_async"):
        algorithm_variants("ball")
    # Each of them can follow from the example.
    runs = plan_runs(EXAMPLE, ["steps=200"], algorithm_variants("all"), [1])
    assert [run.config.algorithm for run in runs] == list(PRESETS)


@pytest.mark.parametrize("algorithm", sorted(PRESETS))
def test_an_algorithm_is_what_a_run_of_it_is(algorithm: str) -> None:
    alone = load_config(EXAMPLE, [f"algorithm={algorithm}", "seed=1"])
    assert configs(algorithm) == {algorithm: alone.model_dump(exclude={"name"})}


def test_ba_ppo_has_its_critic() -> None:
    (run,) = plan_runs(EXAMPLE, [], [algorithm_variant("ba_ppo")], [1])
    assert run.config.advantage.estimator == "gae"


def test_what_the_user_sets_holds_for_every_variant() -> None:
    overrides = (
        "sync.every=10",
        "sync.reevaluate_every=10",
        "hard_buffer.capacity=48",
        "reevaluate.c1=0.25",
        "loss.correction=behavior",
        "kl.coefficient=0.0",
        "optimizer.learning_rate=1.0e-3",
    )
    for label, config in configs("bapo", "grpo", "dapo", overrides=overrides).items():
        alone = load_config(EXAMPLE, [*overrides, f"algorithm={label}", "seed=1"])
        assert config == alone.model_dump(exclude={"name"})
        assert alone.sync.every == 10
        assert alone.hard_buffer.capacity == 48


def test_what_the_user_sets_of_one_method_does_not_hold_for_variants_of_another() -> None:
    overrides = ("replay.buffer.capacity=512", "replay.window.direction=fixed")
    by_label = configs("bapo", "grpo", "dots", overrides=overrides)
    assert by_label["bapo"]["replay"]["buffer"]["capacity"] == 512
    assert by_label["bapo"]["replay"]["window"]["direction"] == "fixed"
    assert by_label["grpo"]["replay"] == {"select": "off"}
    dots = load_config(EXAMPLE, ["algorithm=dots", "seed=1"])
    assert by_label["dots"] == dots.model_dump(exclude={"name"})


def test_a_variant_changes_its_keys_and_no_other() -> None:
    keys = "sync.every=10 loss.objective.clip_high=0.3"
    variants = [parse_variant("v5:"), parse_variant(f"v10: {keys}")]
    five, ten = plan_runs(EXAMPLE, ["seed=7"], variants, [3])
    assert (five.label, ten.label) == ("v5", "v10")
    changed = {"sync": {"every": 10}, "loss": {"objective": {"clip_high": 0.3}}}
    given = yaml.safe_load(Path(EXAMPLE).read_text())
    expected = config_from({**given, **changed, "seed": 3})
    assert ten.config.model_dump(exclude={"name"}) == expected.model_dump(exclude={"name"})
    assert five.config.sync.every == config_from(given).sync.every


def test_a_variant_wins_over_the_command_line() -> None:
    variants = [Variant("ten", {"sync": {"every": 10}})]
    (run,) = plan_runs(EXAMPLE, ["sync.every=3"], variants, [1])
    assert run.config.sync.every == 10


def test_variants_come_from_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "variants.yaml"
    file.write_text("v5:\nv10: {sync: {every: 10}}\n")
    assert read_variants(str(file)) == [Variant("v5", {}), Variant("v10", {"sync": {"every": 10}})]
    file.write_text("v5: 5\n")
    with pytest.raises(ConfigError, match="v5: must hold keys of the configuration, not 5"):
        read_variants(str(file))


def test_names_differ_with_any_key_and_not_with_the_others() -> None:
    def name(*overrides: str, seed: int = 1) -> str:
        (run,) = plan_runs(EXAMPLE, overrides, [algorithm_variant("bapo")], [seed])
        return run.config.name

    assert name() == name()
    assert name().startswith("countdown-bapo-s1-")
    others = [name("steps=7"), name("optimizer.learning_rate=1e-3"), name(seed=2)]
    assert len({name(), *others}) == 4
    assert name("name=Base".lower()).startswith("base-bapo-s1-")


def test_long_labels_give_valid_names() -> None:
    variant = Variant("Windows (0, 1/4) and " + "x" * 100, {})
    (run,) = plan_runs(EXAMPLE, [], [variant], [1])
    assert len(run.config.name) == 63
    assert load_config(None, [f"name={run.config.name}"]).name == run.config.name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v10", "write LABEL: KEY=VALUE"),
        (": sync.every=10", "write LABEL: KEY=VALUE"),
        ("v10: sync.every", "write key=value"),
        ("v10: a='b", "close the quotation"),
    ],
)
def test_a_malformed_variant_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_variant(text)


def test_a_wrong_key_names_the_variant() -> None:
    with pytest.raises(ConfigError, match=r"variant ten: override sync.evry"):
        plan_runs(EXAMPLE, [], [Variant("ten", {"sync": {"evry": 10}})], [1])


def test_repetitions_are_refused() -> None:
    bapo = algorithm_variant("bapo")
    with pytest.raises(ConfigError, match="the label 'bapo' is given twice"):
        plan_runs(EXAMPLE, [], [bapo, bapo], [1])
    with pytest.raises(ConfigError, match="the seed 1 is given twice"):
        plan_runs(EXAMPLE, [], [bapo], [1, 1])
    with pytest.raises(ConfigError, match="'bapo' and 'same' are the same configuration"):
        plan_runs(EXAMPLE, [], [bapo, Variant("same", {})], [1])
    with pytest.raises(ConfigError, match="algorithm 'sac' is not one of"):
        algorithm_variant("sac")


def full_file(path: Path, algorithm: str) -> Path:
    """Writes a file with every key, as `bapo config show` prints it."""
    config = load_config(EXAMPLE, [f"algorithm={algorithm}"])
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


@pytest.mark.parametrize(("file_has", "asked"), [("bapo", "grpo"), ("grpo", "bapo")])
def test_a_full_file_does_not_relabel_another_algorithm(
    file_has: str, asked: str, tmp_path: Path
) -> None:
    file = full_file(tmp_path / "full.yaml", file_has)
    with pytest.raises(ConfigError, match=f"algorithm={asked} would keep .*sync.every="):
        load_config(file, [f"algorithm={asked}"])
    with pytest.raises(ConfigError, match=f"variant {asked}: algorithm={asked} would keep"):
        configs(asked, file=file)
    # The algorithm that the file has is not touched.
    expected = load_config(EXAMPLE, [f"algorithm={file_has}"])
    assert load_config(file) == load_config(file, [f"algorithm={file_has}"]) == expected


def test_keys_that_contradict_the_algorithm_are_kept_when_given_again(tmp_path: Path) -> None:
    file = tmp_path / "some.yaml"
    file.write_text("sync: {every: 3}\noptimizer: {learning_rate: 1.0e-4}\n")
    with pytest.raises(ConfigError, match=r"algorithm=grpo would keep sync.every=3 of the file"):
        load_config(file, ["algorithm=grpo"])
    config = load_config(file, ["algorithm=grpo", "sync.every=3"])
    assert (config.algorithm, config.sync.every) == ("grpo", 3)
    # No preset sets the learning rate, and bapo_without_x3 does not set sync.every.
    assert load_config(file, ["algorithm=bapo_without_x3"]).sync.every == 3


def test_each_rung_of_the_ladder_turns_one_switch_and_the_last_one_is_bapo() -> None:
    variants = read_variants("examples/variants/ladder.yaml")
    runs = plan_runs("examples/sorting.yaml", [], variants, [1])
    assert [warning for run in runs for warning in run.config.warnings()] == []
    values = [flatten(run.config.model_dump(exclude={"name"})) for run in runs]
    changes = [
        {key for key in {*before, *after} if before.get(key) != after.get(key)}
        for before, after in pairwise(values)
    ]
    loss, *switches = changes
    assert {key.split(".")[0] for key in loss} == {"algorithm", "kl", "loss"}
    assert [{key.split(".")[0] for key in changed} for changed in switches] == [
        {"fresh"},
        {"replay"},
        {"reevaluate"},
        {"sync"},
    ]
    assert runs[0].config == load_config(
        "examples/sorting.yaml", ["algorithm=grpo", "seed=1", f"name={runs[0].config.name}"]
    )
    assert runs[-1].config == load_config(
        "examples/sorting.yaml", ["algorithm=bapo", "seed=1", f"name={runs[-1].config.name}"]
    )
