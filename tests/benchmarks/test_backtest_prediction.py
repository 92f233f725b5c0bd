"""The rank correlations between back-tests and training are computed from runs and back-tests."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_core.backtest import BackTest
from bapo_core.config import config_from
from benchmarks import backtest_prediction
from benchmarks.backtest_prediction import (
    FIGURES,
    RULES,
    SEEDS,
    accuracies_at,
    analyse,
    correlate,
    decided_pairs,
    planned_longer_runs,
    planned_runs,
    predict_others,
    sentence,
    spearman,
    table_rows,
)
from services.report.backtest_table import OWN_RULES, PREDICTION


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backtest_prediction, "RESAMPLES", 100)


QUALITY = {label: number / 100 for number, label in enumerate(RULES)}


def run(label: str, seed: int, accuracy: float) -> dict[str, Any]:
    curve = {"steps": [0, 10, 20], "rollouts": [0, 100, 200], "accuracy": [0.1, accuracy, accuracy]}
    return {"rules": label, "seed": seed, **curve}


def back_test(signal: float) -> dict[str, float]:
    none = asdict(BackTest(config_from({"name": "none"})).result())
    return none | {"steps": 1, "signal_per_step": signal}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 31], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 2, 3], [1, 3, 2, 4], 0.9486832980505138),  # Equal values share a rank.
        ([1, 1, 1, 1], [1, 2, 3, 4], 0.0),
    ],
)
def test_the_rank_correlation_is_spearmans(
    first: list[float], second: list[float], expected: float
) -> None:
    assert spearman(np.array(first, float), np.array(second, float)) == pytest.approx(expected)


def test_a_figure_is_compared_with_the_training_of_other_seeds_alone() -> None:
    rising, falling = np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])
    figures = {1: rising, 2: falling}
    assert predict_others(figures, {1: rising, 2: falling}, [1, 2]) == -1.0
    assert predict_others(figures, {1: falling, 2: rising}, [1, 2]) == 1.0
    assert predict_others(figures, {1: rising}, [1, 2]) == -1.0
    assert predict_others({1: rising}, {1: rising}, [1]) is None


def test_figures_that_order_the_rules_as_training_did_have_a_rank_correlation_of_1() -> None:
    runs = [run(label, seed, quality) for seed in SEEDS for label, quality in QUALITY.items()]
    tests = {
        str(seed): {label: back_test(10 * quality) for label, quality in QUALITY.items()}
        for seed in SEEDS
    }
    found = analyse(runs, tests)
    assert (found["trained_seeds"], found["rule_sets"]) == (list(SEEDS), len(RULES))
    for cost in ("at_equal_steps", "at_equal_rollouts"):
        assert found[cost]["noise_ceiling"]["value"] == pytest.approx(1.0)
        assert found[cost]["figures"]["signal"]["other_seeds"]["value"] == pytest.approx(1.0)
        assert found[cost]["figures"]["policy age"]["other_seeds"]["value"] == 0.0


def test_pages_get_a_sentence_and_rows_of_the_results() -> None:
    runs = [run(label, seed, quality) for seed in SEEDS for label, quality in QUALITY.items()]
    tests = {
        str(seed): {label: back_test(10 * quality) for label, quality in QUALITY.items()}
        for seed in SEEDS
    }
    result = {"analysis": analyse(runs, tests)}
    assert sentence(result) == (
        f"Over {len(RULES)} rule sets that were also trained, with 3 seeds on one small task, the "
        "column signal ranked the accuracies of other seeds with a correlation of 1.00 (1.00 to "
        "1.00); the accuracy of one seed itself ranks them with 1.00."
    )
    first, second, *others = table_rows(result)
    assert first == "| training itself | 1.00 (1.00 to 1.00) | - | 1.00 (1.00 to 1.00) | - |"
    assert second.startswith("| signal | 1.00 (1.00 to 1.00) | 1.00 (1.00 to 1.00) |")
    assert len(others) == len(FIGURES) - 1


def test_seeds_that_are_not_trained_completely_are_left_out() -> None:
    runs = [run(label, seed, quality) for seed in SEEDS for label, quality in QUALITY.items()]
    tests = {str(seed): {label: back_test(1.0) for label in RULES} for seed in SEEDS}
    assert analyse(runs[:-1], tests)["trained_seeds"] == list(SEEDS[:2])
    assert "at_equal_steps" not in analyse(runs[: len(RULES) - 1], tests)


def test_one_trained_seed_is_compared_with_the_back_tests_of_others_without_a_ceiling() -> None:
    runs = [run(label, 1, quality) for label, quality in QUALITY.items()]
    tests = {"2": {label: back_test(quality) for label, quality in QUALITY.items()}}
    found = analyse(runs, tests)["at_equal_steps"]
    assert found["noise_ceiling"] is None
    assert found["figures"]["signal"]["same_seed"] is None
    assert found["figures"]["signal"]["other_seeds"]["value"] == pytest.approx(1.0)


def test_unrelated_figures_have_an_interval_that_includes_0() -> None:
    draw = np.random.default_rng(1)
    trained = {seed: draw.random(16) for seed in SEEDS}
    figures = {seed: draw.random(16) for seed in SEEDS}
    found = correlate(figures, trained, predict_others)
    assert found is not None
    assert found["low"] < 0 < found["high"]
    assert found["low"] <= found["value"] <= found["high"]


def test_pairs_that_training_decides_are_counted_by_the_order_of_the_figure() -> None:
    rows = [[0.1, 0.5, 0.9], [0.11, 0.5, 0.9], [0.1, 0.51, 0.9]]
    trained = {seed: np.array(row) for seed, row in zip(SEEDS, rows, strict=True)}
    figures = {seed: np.array([1.0, 3.0, 2.0]) for seed in SEEDS}
    assert decided_pairs(["a", "b", "c"], figures, trained) == {
        "decided": 3,
        "ordered_as_trained": 2,
    }


def test_every_rule_set_is_trained_with_every_seed() -> None:
    runs = planned_runs()
    assert Counter(planned.label for planned in runs) == dict.fromkeys(RULES, len(SEEDS))
    assert len({planned.config.name for planned in runs}) == len(runs)
    assert {planned.label for planned in runs[: len(SEEDS)]} == {OWN_RULES}
    assert [planned.config.seed for planned in runs if planned.label == OWN_RULES] == list(SEEDS)
    longer = planned_longer_runs()
    assert len({planned.config.name for planned in [*runs, *longer]}) == len(runs) + len(longer)
    assert {planned.label for planned in longer} <= set(RULES)
    assert len(RULES) > 12
    assert next(iter(FIGURES)) == "signal"


# ---- the committed results ----------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "benchmarks/results/backtest_prediction.json").read_text())
BACK_TESTS = RESULT["back_tests"].values()
PAGE = (ROOT / "docs/experiments.md").read_text()


def test_the_first_line_of_a_back_test_has_the_committed_figures() -> None:
    assert sentence(RESULT) == PREDICTION
    assert PREDICTION in " ".join(PAGE.split())


@pytest.mark.parametrize("number", range(1 + len(FIGURES)))
def test_the_documentation_has_the_committed_figures(number: int) -> None:
    assert table_rows(RESULT)[number] in PAGE


def test_the_examples_of_the_documentation_are_in_the_committed_results() -> None:
    accuracy = RESULT["analysis"]["at_equal_steps"]["accuracy"]
    words = " ".join(PAGE.split())
    assert f"from {min(accuracy.values()):.3f} to {max(accuracy.values()):.3f}" in words
    signals, no_signals = (
        {label: np.mean([tests[label][key] for tests in BACK_TESTS]) for label in RULES}
        for key in ("signal_per_step", "no_signal")
    )
    falls, own = "window falls", OWN_RULES
    assert signals[falls] > signals[own]
    assert accuracy[falls] < accuracy[own]
    assert f"({signals[falls]:.1f} and {signals[own]:.1f})" in words
    assert f"({accuracy[falls]:.3f} and {accuracy[own]:.3f})" in words
    assert no_signals["no filter"] == pytest.approx(2 / 3, abs=0.05)
    first, most = (
        set(sorted(RULES, key=values.__getitem__)[-5:]) for values in (accuracy, signals)
    )
    assert first == most


def test_the_committed_analysis_is_of_the_committed_runs() -> None:
    trained = RESULT["analysis"]["trained_seeds"]
    complete = [run for run in RESULT["runs"] if run["seed"] in trained]
    assert Counter(run["seed"] for run in complete) == dict.fromkeys(trained, len(RULES))
    accuracy = accuracies_at(complete, "steps")
    for label, mean in RESULT["analysis"]["at_equal_steps"]["accuracy"].items():
        assert np.mean([accuracy[seed, label] for seed in trained]) == pytest.approx(mean)
    assert RESULT["rules"] == json.loads(json.dumps(RULES))


def test_estimated_effective_shares_are_near_to_the_measured_ones() -> None:
    for share in RESULT["effective_shares"].values():
        assert share["estimated"] == pytest.approx(share["measured"], abs=0.02)
