"""The state of an experiment follows from the results of its runs and their resolution."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bapo_core.claims import judge_larger
from bapo_core.errors import BapoError
from bapo_core.resolution import Observation, resolve
from docs.generate.__main__ import PAGES
from docs.generate.reproduction import render_page
from services.reproduction.declarations import (
    SIZES,
    Declaration,
    find_items,
    read_declaration,
    read_items,
)
from services.reproduction.listing import list_values, render_list
from services.reproduction.page import write_page
from services.reproduction.plans import DeclaredRun, plan_runs
from services.reproduction.records import (
    RecordedEvaluation,
    RecordedRun,
    read_records,
    unknown_files,
    write_record,
)
from services.reproduction.states import (
    LabelledRecord,
    describe_judgement,
    describe_result,
    find_state,
    judge,
    read_labelled,
)
from services.reproduction.tables import tabulate

ROOT = Path(__file__).parents[3]
COMMITTED = ROOT / "benchmarks/results/reproduction"
TEXT = """
title: Figure 0
claim: The new rule is ahead of the old one.
source: the paper
numbers: {columns: [accuracy], rows: {new: [12.5]}}
variants:
  new: {algorithm: bapo}
  old: {algorithm: grpo}
small: {setup: sorting, minutes: 1}
paper: none
tests:
  - {larger: new, than: [old], at: generated tokens}
panels:
  - {title: accuracy}
  - {title: entropy, kind: steps, metric: entropy}
  - {title: bins, kind: bins, variants: [new]}
  - {title: sources, kind: sources, variants: [new]}
"""


@pytest.fixture
def declaration(tmp_path: Path) -> Declaration:
    path = tmp_path / "fig0.yaml"
    path.write_text(TEXT)
    return read_declaration(path)


def record(
    run: DeclaredRun,
    accuracies: list[float],
    *,
    tokens: int = 100,
    unsolved: int = 4,
    entropy: float = 1.0,
) -> RecordedRun:
    """Builds the results of a run of ten steps with an evaluation after every second one."""
    return RecordedRun(
        run=run.name,
        setup=run.setup,
        seed=run.seed,
        changes=dict(run.changes),
        version="0.0",
        evaluations=tuple(
            RecordedEvaluation(
                accuracy=accuracy,
                reward=accuracy,
                bins=(8 if index == 0 else unsolved, 2),
                costs={
                    "training steps": 2.0 * index,
                    "training responses": 16.0 * index,
                    "generated tokens": float(tokens * index),
                    "seconds of the trainer": 1.0 * index,
                },
            )
            for index, accuracy in enumerate(accuracies)
        ),
        sets={"test": accuracies[-1], "other": 0.25},
        migration=((unsolved, 8 - unsolved), (0, 2)),
        unlocked=(8 - unsolved) / 8,
        steps={
            "training accuracy": tuple(np.linspace(0, 1, 10).tolist()),
            "groups in the batch": (8.0,) * 10,
            "fresh": (6.0,) * 10,
            "replayed": (2.0,) * 10,
            "entropy": (0.0,) * 7 + (entropy,) * 3,
        },
    )


def write_results(
    declaration: Declaration,
    directory: Path,
    final: Callable[[DeclaredRun, float], float],
    *,
    noise: float = 0.0,
) -> None:
    rng = np.random.default_rng(0)
    for run in plan_runs(declaration, "small"):
        value = final(run, rng.normal(0, noise) if noise else 0.0)
        write_record(record(run, [0.1, *[value] * 5]), directory)


def ahead(run: DeclaredRun, noise: float) -> float:
    return (0.5 if run.label == "new" else 0.4) + 0.01 * run.seed + noise


def test_an_experiment_without_results_is_not_run(declaration: Declaration, tmp_path: Path) -> None:
    state = find_state(declaration, "small", tmp_path / "results")
    assert (state.name, state.done, state.runs) == ("not run", 0, 8)


def test_nothing_is_judged_before_all_runs_have_results(
    declaration: Declaration, tmp_path: Path
) -> None:
    write_results(declaration, tmp_path, ahead, noise=0.001)
    *_, last = plan_runs(declaration, "small")
    (tmp_path / f"{last.name}.json").unlink()
    state = find_state(declaration, "small", tmp_path)
    assert (state.name, state.done, state.results) == ("not run", 7, ())
    # The seeds that are complete are an experiment of their own.
    assert find_state(declaration.with_seeds([1, 2, 3]), "small", tmp_path).name == "holds"


@pytest.mark.parametrize(
    ("difference", "noise", "name"),
    [
        (0.1, 0.001, "holds"),
        (-0.1, 0.001, "does not hold"),
        (0.02, 0.05, "not decided"),
    ],
)
def test_a_claim_is_judged_by_decided_differences(
    declaration: Declaration, tmp_path: Path, difference: float, noise: float, name: str
) -> None:
    def final(run: DeclaredRun, error: float) -> float:
        return 0.4 + (difference if run.label == "new" else 0.0) + error

    write_results(declaration, tmp_path, final, noise=noise)
    state = find_state(declaration, "small", tmp_path)
    assert state.name == name
    (result,) = state.results
    (judgement,) = result.judgements
    assert judgement.difference == pytest.approx(difference, abs=3 * noise)
    assert result.means["new"] - result.means["old"] == pytest.approx(judgement.difference)
    assert name in describe_result(result)[1]
    assert "differences above" in describe_result(result)[-1]


def test_one_seed_decides_nothing(declaration: Declaration, tmp_path: Path) -> None:
    write_results(declaration, tmp_path, ahead)
    state = find_state(declaration.with_seeds([1]), "small", tmp_path)
    assert state.name == "not decided"
    assert "one seed" in describe_result(state.results[0])[-1]


def test_accuracies_are_compared_at_the_cost_that_all_runs_have_reached(
    declaration: Declaration, tmp_path: Path
) -> None:
    """The new rule's runs generate twice the tokens: they count up to the middle of the curve."""
    rng = np.random.default_rng(0)
    rising = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    for run in plan_runs(declaration, "small"):
        accuracies = [value + rng.normal(0, 1e-4) for value in rising]
        write_record(record(run, accuracies, tokens=200 if run.label == "new" else 100), tmp_path)
    state = find_state(declaration, "small", tmp_path)
    # The means of the last four: of the old rule at 200 to 500 tokens, and of the new one there.
    assert state.results[0].means["old"] == pytest.approx(0.35, abs=1e-3)
    assert state.results[0].means["new"] == pytest.approx(0.175, abs=1e-3)
    assert state.name == "does not hold"


def judged(declaration: Declaration, test: str, results: Path) -> str:
    text = TEXT.replace("{larger: new, than: [old], at: generated tokens}", test)
    path = results / "other.yaml"
    path.write_text(text)
    return judge(read_declaration(path), read_labelled(declaration, "small", results)).name


def test_other_measures_have_their_own_values(declaration: Declaration, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for run in plan_runs(declaration, "small"):
        new = run.label == "new"
        entropy = (2.0 if new else 1.0) + rng.normal(0, 0.01)
        unsolved = 1 if new else 4
        accuracies = [0.1, 0.9 if new else 0.2, *[0.3 + rng.normal(0, 1e-3)] * 4]
        write_record(record(run, accuracies, unsolved=unsolved, entropy=entropy), tmp_path)
    entropy_test = "{larger: new, than: [old], measure: metric, metric: entropy}"
    assert judged(declaration, entropy_test, tmp_path) == "holds"
    assert judged(declaration, "{larger: new, than: [old], measure: best}", tmp_path) == "holds"
    assert judged(declaration, "{larger: old, than: [new], measure: unsolved}", tmp_path) == "holds"
    assert judged(declaration, "{larger: new, than: [old], measure: unlocked}", tmp_path) == "holds"
    equal = "{equal: [new, old], within: 0.02, measure: accuracy}"
    assert judged(declaration, equal, tmp_path) == "holds"
    base = "{equal: [old, base model], within: 0.05, measure: unsolved}"
    assert judged(declaration, base, tmp_path) == "does not hold"
    missing = "{larger: new, than: [old], measure: metric, metric: speed}"
    with pytest.raises(BapoError, match="no 'speed' of its steps; there are training accuracy"):
        judged(declaration, missing, tmp_path)


def test_the_result_of_another_declaration_is_refused(
    declaration: Declaration, tmp_path: Path
) -> None:
    first, second, *_ = plan_runs(declaration, "small")
    path = write_record(record(first, [0.1, 0.2]), tmp_path)
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"changes": {"algorithm": "dapo"}}))
    with pytest.raises(BapoError, match=r"another declaration: changes is \{'algorithm': 'dapo'\}"):
        read_records([first], tmp_path)
    path.write_text(json.dumps(values | {"run": second.name}))
    with pytest.raises(BapoError, match="another declaration: run is"):
        read_records([first], tmp_path)
    path.write_text('{"run": 1')
    with pytest.raises(BapoError, match="is no result of a run"):
        read_records([first], tmp_path)


def test_results_that_no_declaration_asks_for_are_found(
    declaration: Declaration, tmp_path: Path
) -> None:
    runs = plan_runs(declaration, "small")
    kept = write_record(record(runs[0], [0.1, 0.2]), tmp_path)
    stale = write_record(record(runs[1], [0.1, 0.2]), tmp_path)
    assert unknown_files(runs, tmp_path) == []
    assert unknown_files(runs[:1], tmp_path) == [stale]
    assert kept.is_file()


def test_the_page_draws_every_panel_beside_the_papers_numbers(
    declaration: Declaration, tmp_path: Path
) -> None:
    write_results(declaration, tmp_path, ahead, noise=0.001)
    results = read_labelled(declaration, "small", tmp_path)
    path = tmp_path / "page.html"
    state = find_state(declaration, "small", tmp_path)
    write_page("fig0", declaration, "small", results, state, path)
    text = path.read_text()
    assert text.count("<svg") == 4
    assert "<td>12.5</td>" in text
    # The means over the seeds of each set, 0.5 + 0.01 seed, stand beside it.
    assert re.search(r"<td>new</td><td>52\.\d+</td><td>25</td>", text)
    assert "holds (8 runs)" in text


@pytest.mark.parametrize("lacking", [("old",), ("new", "old")])
def test_the_page_names_variants_whose_steps_have_no_value(
    declaration: Declaration, tmp_path: Path, lacking: tuple[str, ...]
) -> None:
    write_results(declaration, tmp_path, ahead)
    results = [
        LabelledRecord(
            each.label,
            each.record.model_copy(
                update={"steps": {k: v for k, v in each.record.steps.items() if k != "entropy"}}
            )
            if each.label in lacking
            else each.record,
        )
        for each in read_labelled(declaration, "small", tmp_path)
    ]
    path = tmp_path / "page.html"
    write_page("fig0", declaration, "small", results, judge(declaration, results), path)
    text = path.read_text()
    assert f"No step of these has a value: {'; '.join(lacking)}." in text
    assert text.count("<svg") == 4 - (len(lacking) == 2)


@pytest.mark.parametrize("name", read_items())
@pytest.mark.parametrize("seeds", [None, (1,)])
def test_the_page_of_every_experiment_is_drawn_from_the_committed_results(
    name: str, seeds: tuple[int, ...] | None, tmp_path: Path
) -> None:
    declaration = read_items()[name]
    if seeds is not None:
        declaration = declaration.with_seeds(seeds)
    results = read_labelled(declaration, "small", COMMITTED)
    state = find_state(declaration, "small", COMMITTED)
    write_page(name, declaration, "small", results, state, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    drawn = {each.label for each in results}
    for panel in declaration.panels:
        expected = bool(drawn.intersection(panel.variants) if panel.variants else drawn)
        assert (f"<h2>{html.escape(panel.title)}</h2>" in text) == expected


def test_lists_have_the_state_and_its_numbers(declaration: Declaration, tmp_path: Path) -> None:
    write_results(declaration, tmp_path, ahead, noise=0.001)
    items = {"fig0": declaration}
    listed = render_list(items, tmp_path)
    assert "state  holds (8 runs) at small size" in listed
    assert "new - old = +0.1" in listed
    assert "accuracy: new 12.5" in listed
    (values,) = list_values(items, tmp_path)
    assert (values["state"], values["done"], values["minutes"]) == ("holds", 8, 8)
    page = render_page(items, tmp_path)
    assert "| [fig0](#fig0) | The new rule is ahead of the old one. | 8 runs, 8 min | holds" in page


@pytest.mark.parametrize(
    ("again", "verdict", "counted"),
    [
        (0.1, "holds", "1 of these alike and 0 the other way, and leave 0 open"),
        (-0.1, "does not hold", "0 of these alike and 1 the other way, and leave 0 open"),
        (0.0, "not decided", "0 of these alike and 0 the other way, and leave 1 open"),
    ],
)
def test_a_repetition_is_judged_by_its_own_runs(
    declaration: Declaration, tmp_path: Path, again: float, verdict: str, counted: str
) -> None:
    items = {"fig0": declaration}
    write_results(declaration, tmp_path, ahead, noise=0.001)
    assert "No experiment has been repeated" in render_list(items, tmp_path)
    assert "| holds (8 runs) | not run | not run |" in render_page(items, tmp_path)

    def final(run: DeclaredRun, error: float) -> float:
        return 0.4 + (again if run.label == "new" else 0.0) + error

    write_results(declaration.repeated(), tmp_path, final, noise=0.01)
    listed = render_list(items, tmp_path)
    page = render_page(items, tmp_path)
    assert "state  holds (8 runs) at small size" in listed
    assert f"again  {verdict} (8 runs) with seeds 5, 6, 7, 8" in listed
    assert counted in " ".join(listed.split())
    assert counted in page
    assert f"with the same state: {int(verdict == 'holds')}." in page
    assert f"| holds (8 runs) | {verdict} |" in page
    assert f"**{verdict} (8 runs) with seeds 5, 6, 7, 8**" in page
    (values,) = list_values(items, tmp_path)
    assert (values["state"], values["repeat"]["state"]) == ("holds", verdict)
    # A run less, and the repetition is judged no longer.
    *_, last = plan_runs(declaration.repeated(), "small")
    (tmp_path / f"{last.name}.json").unlink()
    assert "No experiment has been repeated" in render_list(items, tmp_path)
    assert list_values(items, tmp_path)[0]["repeat"]["done"] == 7


def test_a_difference_between_the_same_runs_counts_once(
    declaration: Declaration, tmp_path: Path
) -> None:
    write_results(declaration.pooled(), tmp_path, ahead, noise=0.001)
    renamed = {"improved": declaration.variants["new"], "former": declaration.variants["old"]}
    test = {"larger": "improved", "than": ("former",)}
    (declared,) = declaration.tests
    twin = declaration.model_copy(
        update={
            "variants": renamed,
            "tests": (declared.model_copy(update=test),),
            "panels": (),
        }
    )
    by_more = twin.model_copy(update={"tests": (declared.model_copy(update=test | {"by": 0.01}),)})
    for others, decided in ({}, 1), ({"twin": twin}, 1), ({"twin": twin, "by": by_more}, 2):
        page = " ".join(render_page({"fig0": declaration} | others, tmp_path).split())
        assert f"with as many other seeds: {1 + len(others)}; with the same" in page
        assert f"the declared seeds decide {decided}; the others decide {decided} of" in page


def test_all_seeds_together_decide_what_each_half_leaves_open(
    declaration: Declaration, tmp_path: Path
) -> None:
    def final(run: DeclaredRun, _: float) -> float:
        # Differences of 0.015 and 0.105: t = 2.3 with 3 degrees of freedom, and 3.5 with 7.
        return 0.46 + 0.045 * (-1) ** run.seed if run.label == "new" else 0.4

    items = {"fig0": declaration}
    write_results(declaration, tmp_path, final)
    assert "pooled" not in render_list(items, tmp_path)
    (values,) = list_values(items, tmp_path)
    assert (values["pooled"]["state"], values["pooled"]["done"]) == ("not run", 8)
    write_results(declaration.repeated(), tmp_path, final)
    listed, page = render_list(items, tmp_path), render_page(items, tmp_path)
    assert "state  not decided (8 runs) at small size" in listed
    assert "again  not decided (8 runs) with seeds 5, 6, 7, 8" in listed
    assert "pooled holds (16 runs) with seeds 1, 2, 3, 4, 5, 6, 7, 8" in listed
    (values,) = list_values(items, tmp_path)
    assert (values["pooled"]["state"], values["pooled"]["done"]) == ("holds", 16)
    assert "| not decided (8 runs) | not decided | holds |" in page
    assert "- Pooled at small size: **holds (16 runs) with seeds 1, 2, 3, 4, 5, 6, 7, 8**" in page
    assert "leave 1 open; all seeds together decide 1 of these." in page
    assert "At small size, seeds 1, 2, 3, 4, 5, 6, 7, 8: mean ± standard deviation" in page
    (result,) = find_state(declaration.pooled(), "small", tmp_path).results
    (judgement,) = result.judgements
    # Two variants alone have the same interval by their paired runs.
    assert (
        f"{describe_judgement(judgement)}; by paired runs ± {judgement.threshold:.3f}: holds"
        in page
    )
    assert (
        "decide 1 differences; of these, the paired runs of the two variants alone decide 1."
        in page
    )


def test_one_seed_and_another_decide_together(declaration: Declaration, tmp_path: Path) -> None:
    one = declaration.with_seeds([1])
    write_results(one.pooled(), tmp_path, ahead, noise=0.0001)
    page = render_page({"fig0": one}, tmp_path)
    assert "| not decided (2 runs) | not decided | holds |" in page
    assert "leave 1 open; all seeds together decide 1 of these." in page


def test_two_looks_decide_9_of_100_differences_that_do_not_exist(
    declaration: Declaration,
) -> None:
    """The page of the experiments states this share."""
    rng = np.random.default_rng(0)
    trials = 2000
    decided = 0
    for _ in range(trials):
        values = rng.normal(size=(2, 8)) + rng.normal(size=8)
        for seeds in (4, 8):  # the declared ones, and all of them
            resolution = resolve(
                [
                    Observation(variant, seed, values[row, seed])
                    for row, variant in enumerate(("new", "old"))
                    for seed in range(seeds)
                ]
            )
            assert resolution is not None
            if judge_larger(resolution, "new", "old").verdict != "not decided":
                decided += 1
                break
    assert decided / trials == pytest.approx(0.088, abs=0.015)
    assert "9 instead of 5 of 100 cases" in render_page({"fig0": declaration}, COMMITTED)


def test_a_table_has_the_means_the_spread_and_the_places(
    declaration: Declaration, tmp_path: Path
) -> None:
    write_results(declaration, tmp_path, ahead)
    heads, rows = tabulate(declaration, read_labelled(declaration, "small", tmp_path))
    assert heads == [
        "variant",
        "accuracy at equal training steps",
        "accuracy at equal generated tokens",
        "best checkpoint",
        "held-out prompts at 0",
        "generated tokens",
    ]
    # 0.5 + 0.01 seed: mean and standard deviation of four seeds. Both leave 4 of 6 prompts at 0.
    accuracy = "0.525 ± 0.013 (1)"
    assert rows[0] == ["new", accuracy, accuracy, accuracy, "0.667 ± 0.000 (1-2)", "500"]
    assert rows[1][1] == "0.425 ± 0.013 (2)"
    # The seeds differ alike in both variants, so that repetitions do not differ.
    assert rows[2:] == [["decided above", "0.000", "0.000", "0.000", "0.000", ""]]
    assert f"| new | {accuracy} |" in render_page({"fig0": declaration}, tmp_path)
    one = [each for each in read_labelled(declaration, "small", tmp_path) if each.record.seed == 1]
    assert [row[1] for row in tabulate(declaration, one)[1]] == ["0.510", "0.410"]


def test_the_committed_results_belong_to_declared_runs() -> None:
    declared = [
        run
        for each in read_items().values()
        for declaration in (each, each.repeated())
        for size in SIZES
        for run in plan_runs(declaration, size)
    ]
    assert unknown_files(declared, COMMITTED) == []
    read_records(declared, COMMITTED)


def test_the_page_of_the_documentation_is_current() -> None:
    render = PAGES["docs/reproduction.md"]
    assert (ROOT / "docs/reproduction.md").read_text() == render(), "run `make docs`"
    assert find_items(["all"]).keys() == read_items().keys()
