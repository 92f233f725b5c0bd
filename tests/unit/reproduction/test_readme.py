"""README and experiments have the figures of the committed results."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from statistics import mean

import pytest

from bapo_core.claims import Judgement, judge_larger
from bapo_core.config import config_from, merge
from bapo_core.resolution import Resolution, resolve
from bapo_core.types import ESS_DECAY
from services.reproduction.declarations import Cost, Declaration, Test, find_items, read_setup
from services.reproduction.plans import plan_runs
from services.reproduction.states import (
    State,
    find_state,
    measure_runs,
    observe,
    read_labelled,
)
from services.reproduction.tables import tabulate

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks/results/reproduction"
README = (ROOT / "README.md").read_text()
METHODS = (ROOT / "docs/choosing-a-method.md").read_text()
(LADDER,) = find_items(["ladder"]).values()


def small_state(name: str) -> State:
    """Returns the state of an experiment at small size, by the committed results."""
    return find_state(find_items([name])[name], "small", RESULTS)


def repeated_states(name: str) -> tuple[State, State]:
    """Returns the states of an experiment with other seeds alone, and with all seeds."""
    item = find_items([name])[name]
    again, pooled = item.repeated(), item.pooled()
    return find_state(again, "small", RESULTS), find_state(pooled, "small", RESULTS)


def test_the_table_is_that_of_the_ladder() -> None:
    heads, rows = tabulate(LADDER, read_labelled(LADDER, "small", RESULTS))
    lines = [heads, ["---"] * len(heads), *rows]
    assert "\n".join(f"| {' | '.join(cells)} |" for cells in lines) in README


EVIDENCE = {
    "r19": "sorting digits ([R19](docs/reproduction.md#r19))",
    "r20": "each digit once ([R20](docs/reproduction.md#r20))",
    "r18": "Countdown ([R18](docs/reproduction.md#r18))",
}


def resolve_accuracy(item: Declaration, cost: Cost) -> Resolution:
    """Returns what the committed results of an experiment decide of accuracies at equal cost."""
    runs = read_labelled(item, "small", RESULTS)
    resolution = resolve(measure_runs("accuracy", cost, runs))
    assert resolution is not None
    return resolution


def judge_each_half(name: str) -> list[Judgement]:
    """Returns the judgements of an experiment with one difference.

    They are made with its declared seeds, with other seeds, and with all of them.
    """
    states = (small_state(name), *repeated_states(name))
    return [judgement for state in states for judgement in state.results[0].judgements]


def format_interval(judgement: Judgement) -> str:
    return f"{abs(judgement.difference):.3f} ± {judgement.threshold:.3f}"


def evidence_of(name: str) -> Declaration:
    """Returns the experiment with all of its seeds if the repetition is complete."""
    (item,) = find_items([name]).values()
    pooled = item.pooled()
    return pooled if find_state(pooled, "small", RESULTS).is_judged else item


def evidence_table() -> str:
    """Returns the README's first table: a column for each task, and its resolution below."""
    rows: dict[str, list[str]] = {}
    ends: dict[str, list[str]] = {"decided above": [], "seeds": []}
    for column, name in enumerate(EVIDENCE):
        item = evidence_of(name)
        records = read_labelled(item, "small", RESULTS)
        heads, cells = tabulate(item, records)
        accuracy = heads.index("accuracy at equal generated tokens")
        for label, *values in cells:
            row = rows.setdefault(label, ["not run"] * len(EVIDENCE))
            row[column] = values[accuracy - 1]
        resolution = resolve_accuracy(item, "generated tokens")
        ends["decided above"].append(f"{resolution.smallest_difference:.3f}")
        ends["seeds"].append(str(len({each.record.seed for each in records})))
    rows["`bapo_on_policy`"] = rows.pop("replays of the last 256 mixed groups")
    lines = [["held-out accuracy at equal generated tokens", *EVIDENCE.values()]]
    lines += [["---"] * len(lines[0])]
    lines += [[label, *cells] for label, cells in (rows | ends).items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def test_the_first_table_is_that_of_the_preset_and_its_baselines() -> None:
    assert evidence_table() in README


def test_the_readme_has_what_is_decided_with_prompts_of_each_seeds_own() -> None:
    text = " ".join(README.split())
    begin = text.index("**With prompts of each seed's own**")
    sorting, other = text[begin:].split(" - **")[0].split("on the other task by")
    for part, name in ((sorting, "r19"), (other, "r20")):
        (result,) = find_state(evidence_of(name), "small", RESULTS).results
        ahead, _, left_open = part.partition("open against")
        assert f"above {result.judgements[0].threshold:.3f}" in part
        for judgement in result.judgements:
            assert judgement.verdict in ("holds", "not decided")
            said = ahead if judgement.verdict == "holds" else left_open
            assert f"{judgement.difference:.3f}" in said, judgement


def test_the_page_of_methods_has_what_is_decided_with_prompts_of_each_seeds_own() -> None:
    for name in ("r19", "r20"):
        (result,) = small_state(name).results
        for judgement in result.judgements:
            (row,) = (
                row
                for row in METHODS.splitlines()
                if f"[{name.upper()}](" in row and f"({judgement.difference:.3f}" in row
            )
            verdict = {"holds": "yes", "not decided": "no"}[judgement.verdict]
            assert row.split(" | ")[-1].startswith(verdict)


def test_the_pages_have_what_other_seeds_and_all_of_them_decide_of_r20() -> None:
    again, pooled = repeated_states("r20")
    assert again.name == pooled.name == "holds"
    _, same_loss, _, _ = again.results[0].judgements
    assert f"yes ({same_loss.difference:.3f} ± {same_loss.threshold:.3f}); all" in METHODS
    grpo, same_loss, second_pass, dapo = pooled.results[0].judgements
    assert f"all eight: yes ({same_loss.difference:.3f} ± {same_loss.threshold:.3f}) |" in METHODS
    assert (
        f"all eight: yes ({grpo.difference:.3f}, {second_pass.difference:.3f} and "
        f"{dapo.difference:.3f} ± {grpo.threshold:.3f}) |"
    ) in METHODS
    _, sorting, _, sorting_dapo = repeated_states("r19")[1].results[0].judgements
    assert (
        f"({sorting.difference:.3f} and {sorting_dapo.difference:.3f} above "
        f"{sorting.threshold:.3f}, and {same_loss.difference:.3f} and {dapo.difference:.3f} above "
        f"{grpo.threshold:.3f})"
    ) in METHODS


def test_the_page_of_methods_has_what_other_seeds_and_all_of_them_decide_of_r19() -> None:
    again, pooled = repeated_states("r19")
    assert again.name == pooled.name == "holds"
    grpo, _, second_pass, _ = again.results[0].judgements
    assert (
        f"yes ({grpo.difference:.3f} and {second_pass.difference:.3f} ± {grpo.threshold:.3f}); all"
    ) in METHODS
    grpo, same_loss, second_pass, dapo = pooled.results[0].judgements
    for first, second in ((same_loss, dapo), (grpo, second_pass)):
        interval = f"{first.difference:.3f} and {second.difference:.3f} ± {first.threshold:.3f}"
        assert f"all eight: yes ({interval}) |" in METHODS


COSTS: dict[str, Cost] = {
    "steps": "training steps",
    "rollouts": "training responses",
    "tokens": "generated tokens",
}
STATEMENTS = [
    cells
    for line in METHODS.splitlines()
    if len(cells := line.strip("| ").split(" | ")) == 4 and cells[1] in COSTS
]


@cache
def find_resolutions(name: str, cost: Cost) -> list[str]:
    """Returns the smallest difference that each test of an experiment at a cost decides.

    Without a test at this cost, it is the smallest difference of accuracies.
    """
    (item,) = find_items([name]).values()
    records = read_labelled(item, "small", RESULTS)
    tests = [test for test in item.tests if test.at == cost]
    tests = tests or [Test(larger="any", than=("other",), at=cost)]
    found = [resolve(observe(test, records)) for test in tests]
    return [f"{each.smallest_difference:.3f}" for each in found if each is not None]


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda cells: cells[0][:50])
def test_a_statement_has_the_resolution_of_its_experiment(statement: list[str]) -> None:
    text, at, smallest, _ = statement
    *_, name = re.findall(r"\(reproduction\.md#([\w-]+)\)", text.split("which generates")[0])
    assert smallest in find_resolutions(name, COSTS[at])


def test_every_statement_that_is_measured_names_an_experiment() -> None:
    rows = METHODS[METHODS.index("## What was measured here") :].splitlines()
    tables = [row for row in rows if "(reproduction.md#" in row and row.startswith("|")]
    assert len(tables) == len(STATEMENTS) > 40


def test_the_sentences_are_what_the_runs_decide() -> None:
    (result,) = find_state(LADDER, "small", RESULTS).results
    resolution = result.resolution
    assert resolution is not None
    assert f"differences above {resolution.smallest_difference:.3f} are decided" in README
    behind = ["grpo", "grpo with BAPO's loss", "dapo with BAPO's loss", "+ filter"]
    means = result.means
    ahead = [means["+ replays"] - means[label] for label in behind]
    assert all(resolution.is_ahead("+ replays", label) for label in behind)
    assert f"by {min(ahead):.3f} to {max(ahead):.3f}" in README
    assert resolution.is_ahead("+ re-evaluations", "bapo")
    assert f"v = 1 it is {means['+ re-evaluations'] - means['bapo']:.3f} ahead" in README
    assert not resolution.is_ahead("+ replays", "+ re-evaluations")
    assert not resolution.is_ahead("+ re-evaluations", "+ replays")
    same_loss, dapo = "grpo with BAPO's loss", "dapo with BAPO's loss"
    assert resolution.is_ahead(same_loss, dapo)
    assert f"GRPO with it ({means[same_loss] - means[dapo]:.3f}; [the ladder]" in METHODS
    assert not resolution.is_ahead("grpo", dapo)
    assert resolution.is_ahead("grpo", "bapo")
    assert f"it is behind GRPO ({means['grpo'] - means['bapo']:.3f}; [the ladder]" in METHODS


def test_the_page_of_methods_has_what_r5_decides_with_each_half_of_the_seeds() -> None:
    (item,) = find_items(["r5"]).values()
    state = small_state("r5")
    again, _ = repeated_states("r5")
    assert state.name == again.name == "holds"
    (bapo,), (grpo,) = ([each.difference for each in test.judgements] for test in state.results)
    (other_bapo,), (other_grpo,) = (test.judgements for test in again.results)
    assert (
        f"costs BAPO ({bapo:.3f}) and GRPO ({grpo:.3f}) accuracy ([R5](reproduction.md#r5)) | "
        f"steps | 0.094 | yes; four other seeds: yes ({other_bapo.difference:.3f} and "
        f"{other_grpo.difference:.3f} ± {other_bapo.threshold:.3f}) |"
    ) in METHODS
    assert f"({bapo:.2f} twice, with four seeds and with four others)" in METHODS
    assert f"{other_bapo.difference:.2f}" == f"{bapo:.2f}"
    result, _ = state.results
    assert result.resolution is not None
    assert result.resolution.is_ahead("bapo", "grpo, v = 5")
    ahead = result.means["bapo"] - result.means["grpo, v = 5"]
    assert f"with that delay BAPO is ahead of GRPO ({ahead:.3f}; [R5]" in METHODS
    open_difference = judge_larger(resolve_accuracy(item, "generated tokens"), "grpo", "bapo")
    assert open_difference.verdict == "not decided"
    interval = format_interval(open_difference)
    assert f"[R5](reproduction.md#r5): no ({interval}); all eight" in METHODS


def test_the_pages_have_what_other_seeds_and_all_of_them_decide_of_r9_and_figure_5() -> None:
    declared, again, pooled = judge_each_half("r9")
    verdicts = [each.verdict for each in (declared, again, pooled)]
    assert verdicts == ["not decided", "does not hold", "not decided"]
    assert declared.difference > 0 > again.difference
    assert pooled.difference > 0
    assert (
        f"no other variant ({declared.difference:.3f}; [R9](reproduction.md#r9)) | steps | "
        f"{declared.threshold:.3f} | no; four other seeds: behind it ({format_interval(again)}); "
        f"all eight: no ({format_interval(pooled)}) |"
    ) in METHODS
    declared, again, pooled = judge_each_half("fig5")
    verdicts = [each.verdict for each in (declared, again, pooled)]
    assert verdicts == ["not decided", "does not hold", "does not hold"]
    assert max(each.difference for each in (declared, again, pooled)) < 0
    assert (
        f"({-declared.difference:.3f}; [Figure 5](reproduction.md#fig5)) | steps | "
        f"{declared.threshold:.3f} | no; four other seeds: yes ({format_interval(again)}); "
        f"all eight: yes ({format_interval(pooled)}) |"
    ) in METHODS
    pooled_item = find_items(["fig5"])["fig5"].pooled()
    ahead = judge_larger(resolve_accuracy(pooled_item, "generated tokens"), "grpo", "bapo")
    assert ahead.verdict == "holds"
    assert f"all eight seeds of these two: yes ({format_interval(ahead)}) |" in METHODS
    assert (
        f"by {ahead.difference:.3f} at equal tokens with eight seeds (above {ahead.threshold:.3f})"
    ) in README


def test_the_page_of_experiments_has_what_a_delay_costs() -> None:
    page = (ROOT / "docs/experiments.md").read_text()
    (delay,) = find_items(["r5"]).values()
    results = read_labelled(delay, "small", RESULTS)
    accuracies = {label: accuracy for label, accuracy, *_ in tabulate(delay, results)[1]}
    for label, every in {"bapo, v = 1": 1, "bapo, v = 2": 2, "bapo": 5, "grpo, v = 5": 5}.items():
        records = [each.record for each in results if each.label == label]
        decay = mean(mean(each.steps[ESS_DECAY][-25:]) for each in records)
        kl = mean(mean(each.steps["divergence/fresh/kl"][-25:]) for each in records)
        share = math.exp(-decay * (every - 1))
        row = f"| {label} | {decay:.3f} | {share:.2f} | {kl:.3f} | {accuracies[label]} |"
        assert row in page, row


def test_the_rule_of_the_preset_is_decided_on_both_tasks() -> None:
    rule = "replays of the last 256 mixed groups"
    others = ["grpo with BAPO's loss", "dapo with BAPO's loss", "grpo with BAPO's loss, two passes"]
    for name in ("r10", "r11"):
        (item,) = find_items([name]).values()
        planned = next(run for run in plan_runs(item, "small") if run.label == rule)
        preset = config_from(
            merge(read_setup(planned.setup), {"algorithm": "bapo_on_policy", "seed": planned.seed}),
            where="preset",
        )
        unnamed = {"name", "algorithm"}
        assert preset.model_dump(exclude=unnamed) == planned.config().model_dump(exclude=unnamed)
        state = find_state(item, "small", RESULTS)
        assert state.name == "holds"
        (result,) = state.results
        means, resolution = result.means, result.resolution
        assert resolution is not None
        ahead = [means[rule] - means[other] for other in others]
        assert f"({ahead[0]:.3f} and {ahead[1]:.3f}; [{name.upper()}]" in METHODS
        assert f"({ahead[2]:.3f}; [{name.upper()}]" in METHODS


def test_the_page_of_methods_has_what_dapo_reaches_at_equal_steps() -> None:
    ahead, thresholds = [], []
    for name in ("r10", "r11", "r18"):
        judgement = judge_larger(
            resolve_accuracy(find_items([name])[name], "training steps"),
            "dapo with BAPO's loss",
            "replays of the last 256 mixed groups",
        )
        assert judgement.verdict == ("not decided" if name == "r18" else "holds")
        ahead.append(f"{judgement.difference:.3f}")
        thresholds.append(f"{judgement.threshold:.3f}")
    assert (
        f"on both tasks ({ahead[0]} and {ahead[1]}, decided above {thresholds[0]} and "
        f"{thresholds[1]})"
    ) in METHODS


def test_the_pages_have_what_r18_decides() -> None:
    (result,) = small_state("r18").results
    means, resolution = result.means, result.resolution
    assert resolution is not None
    rule = "replays of the last 256 mixed groups"
    for other in means:
        assert resolution.is_ahead(rule, other) == (other == "dapo with BAPO's loss"), other
        assert not resolution.is_ahead(other, rule)
    grpo, same_loss, dapo = (
        means[label] for label in ("grpo", "grpo with BAPO's loss", "dapo with BAPO's loss")
    )
    smallest = f"{resolution.smallest_difference:.3f}"
    readme = " ".join(README.split())
    assert (
        f"`bapo_on_policy` has {means[rule]:.3f}, GRPO {grpo:.3f}, and GRPO and DAPO with the same "
        f"loss {same_loss:.3f} and {dapo:.3f}; differences above {smallest} are decided ([R18]"
    ) in readme
    assert f"ahead of DAPO with the same loss ({means[rule] - dapo:.3f}; [R18]" in METHODS
    assert f"it is ahead of GRPO ({means[rule] - grpo:.3f}), or of GRPO" in METHODS
    assert f"with the same loss ({means[rule] - same_loss:.3f}; [R18]" in METHODS
    assert f"against GRPO ({means[rule] - grpo:.3f} ± {smallest})" in METHODS


def test_the_pages_have_what_other_seeds_and_all_of_them_decide_of_r10() -> None:
    again, pooled = repeated_states("r10")
    verdicts = [judgement.verdict for judgement in again.results[0].judgements]
    assert verdicts == ["holds", "not decided", "holds"]
    assert pooled.name == "holds"
    grpo, second_pass, dapo = (each.difference for each in again.results[0].judgements)
    resolutions = [each.results[0].resolution for each in (again, pooled)]
    smallest, smallest_pooled = (each.smallest_difference for each in resolutions if each)
    readme = " ".join(README.split())
    assert f"the second pass on sorting ({second_pass:.3f}, above {smallest:.3f})" in readme
    assert f"four other seeds: no ({second_pass:.3f} ± {smallest:.3f}); all eight" in METHODS
    grpo, second_pass, dapo = (each.difference for each in pooled.results[0].judgements)
    assert (
        f"by {grpo:.3f}, {dapo:.3f} and {second_pass:.3f} on sorting "
        f"([R10](docs/reproduction.md#r10), decided above {smallest_pooled:.3f})"
    ) in readme
    assert f"all eight: yes ({second_pass:.3f} ± {smallest_pooled:.3f})" in METHODS


def test_the_pages_have_what_other_seeds_and_all_of_them_decide_of_r11() -> None:
    again, pooled = repeated_states("r11")
    verdicts = [judgement.verdict for judgement in again.results[0].judgements]
    assert verdicts == ["not decided", "holds", "holds"]
    assert pooled.name == "holds"
    grpo, *_ = again.results[0].judgements
    assert (
        f"GRPO on the other task ({grpo.difference:.3f}, above {grpo.threshold:.3f})"
    ) in " ".join(README.split())
    assert f"not of GRPO ({grpo.difference:.3f} ± {grpo.threshold:.3f}); all eight" in METHODS
    grpo, second_pass, dapo = pooled.results[0].judgements
    assert (
        f"by {grpo.difference:.3f}, {dapo.difference:.3f} and {second_pass.difference:.3f} on the "
        f"other task ([R11](docs/reproduction.md#r11), above {grpo.threshold:.3f})"
    ) in " ".join(README.split())
    assert f"all eight: yes, by {grpo.difference:.3f} and {dapo.difference:.3f} |" in METHODS
    assert f"four other seeds: yes; all eight: yes ({second_pass.difference:.3f}) |" in METHODS
    here_grpo, _, here_dapo = repeated_states("r10")[1].results[0].judgements
    assert (
        f"all eight: yes, by {here_grpo.difference:.3f} and {here_dapo.difference:.3f}" in METHODS
    )
    assert (
        f"by {here_grpo.difference:.3f} and {here_dapo.difference:.3f} on sorting digits, and by "
        f"{grpo.difference:.3f} and {dapo.difference:.3f} on a similar task (eight seeds each, "
        f"decided above {here_grpo.threshold:.3f} and {grpo.threshold:.3f})"
    ) in METHODS


def test_no_other_learning_rate_of_the_baseline_reaches_the_replays() -> None:
    (item,) = find_items(["r12"]).values()
    (result,) = find_state(item, "small", RESULTS).results
    means, resolution = result.means, result.resolution
    assert resolution is not None
    baseline = "grpo with BAPO's loss"
    slow, fast = f"{baseline}, 5e-5", f"{baseline}, 2e-4"
    assert resolution.is_ahead("replays", slow)
    assert resolution.is_ahead("replays", fast)
    assert not resolution.is_ahead("replays", baseline)
    assert f"at 5e-5 ({means['replays'] - means[slow]:.3f})" in METHODS
    assert f"at 2e-4 ({means['replays'] - means[fast]:.3f}," in METHODS
    assert f"beside these runs ({means['replays'] - means[baseline]:.3f}; [R12]" in METHODS


FAMILIES = (
    "grpo",
    "grpo with BAPO's loss",
    "dapo with BAPO's loss",
    "replays of the last 256 mixed groups",
    "bapo",
)


def test_each_method_has_the_learning_rate_that_was_chosen_by_other_prompts_and_runs() -> None:
    chosen, judged = (find_items([name])[name] for name in ("r13", "r14"))
    assert {run.config().task.data_seed for run in plan_runs(chosen, "small")} == {1}
    assert {run.config().task.data_seed for run in plan_runs(judged, "small")} == {0}
    means = find_state(chosen, "small", RESULTS).results[0].means
    best = {
        family: max((means[f"{family}, {rate}"], rate) for rate in ("5e-5", "1e-4", "2e-4"))[1]
        for family in FAMILIES
    }
    variants = judged.variants_at("small")
    assert {label.removesuffix(", 5e-5") for label in variants} == set(best)
    for family, rate in best.items():
        label = f"{family}, {rate}" if rate != "1e-4" else family
        assert variants[label] == chosen.variants_at("small")[f"{family}, {rate}"], family


def test_the_rule_of_the_preset_is_ahead_of_methods_with_their_own_learning_rates() -> None:
    (item,) = find_items(["r14"]).values()
    state = find_state(item, "small", RESULTS)
    assert state.name == "holds"
    (result,) = state.results
    means, resolution = result.means, result.resolution
    assert resolution is not None
    readme = " ".join(README.split())
    grpo, same_loss, dapo, rule, delayed = (means[label] for label in item.variants_at("small"))
    assert (
        f"`bapo_on_policy` has {rule:.3f}, GRPO {grpo:.3f}, GRPO and DAPO with the same" in readme
    )
    assert (
        f"loss {same_loss:.3f} and {dapo:.3f}, and BAPO with the paper's delay {delayed:.3f}"
        in readme
    )
    assert f"Differences above {resolution.smallest_difference:.3f} are decided ([R14]" in readme
    assert f"ahead of GRPO ({rule - grpo:.3f})" in METHODS
    assert f"same loss ({rule - same_loss:.3f} and {rule - dapo:.3f}, in R10's runs)" in METHODS
    assert f"with v = 5 ({rule - delayed:.3f}; [R14]" in METHODS
    again = find_state(item.repeated(), "small", RESULTS)
    assert again.name == "holds"
    ahead = [judgement.difference for judgement in again.results[0].judgements]
    assert f"all of them again, by {min(ahead):.3f} to {max(ahead):.3f}." in readme
    assert "[R14](reproduction.md#r14)) | tokens | 0.047 | yes; four other seeds: yes |" in METHODS


def test_the_page_of_methods_has_what_table_1b_and_figure_9_decide() -> None:
    (table,) = small_state("table1b").results
    means, resolution = table.means, table.resolution
    assert resolution is not None
    assert resolution.is_ahead("dapo", "bapo")
    assert f"behind DAPO ({means['dapo'] - means['bapo']:.3f}; [Table 1b]" in METHODS
    parts = [means["bapo"] - means[f"bapo without X{part}"] for part in (2, 3)]
    assert not any(resolution.is_ahead("bapo", f"bapo without X{part}") for part in (2, 3))
    assert f"re-evaluations ({parts[0]:.3f}) or without replays ({parts[1]:.3f};" in METHODS
    (figure,) = small_state("fig9").results
    assert f"{figure.means['dapo'] / figure.means['bapo']:.1f} times as many responses" in METHODS


def test_the_page_of_methods_has_what_table_1a_decides() -> None:
    (result,) = small_state("table1a").results
    means, resolution = result.means, result.resolution
    assert resolution is not None
    ahead = {
        "ahead of BAPO with v = 5 ({}) and of GRPO": ("remix-grpo", "bapo"),
        "and of GRPO ({}), and BAPO": ("remix-grpo", "grpo"),
        "a delay of five steps ({}; [Table 1a]": ("bapo", "grpo (v=5)"),
    }
    for text, (variant, other) in ahead.items():
        assert resolution.is_ahead(variant, other), text
        assert text.format(f"{means[variant] - means[other]:.3f}") in METHODS, text


def test_the_page_of_methods_has_what_figure_10_decides() -> None:
    state = small_state("fig10")
    assert state.name == "holds"
    (result,) = state.results
    means = result.means
    gaussian, uniform = (means["range"] - means[label] for label in ("gaussian", "uniform"))
    assert f"the Gaussian one ({gaussian:.3f}) and of the uniform one ({uniform:.3f})" in METHODS


def test_the_page_of_methods_has_what_r4_decides() -> None:
    (result,) = small_state("r4").results
    means, resolution = result.means, result.resolution
    assert resolution is not None
    behind = ("falling window", "the authors' window", "replays of the last step alone")
    assert all(resolution.is_ahead("all mixed groups", label) for label in behind)
    falling, authors, last = (means["all mixed groups"] - means[label] for label in behind)
    assert f"a falling window ({falling:.3f}), in the authors' window ({authors:.3f})" in METHODS
    assert f"the last step alone ({last:.3f}; [R4]" in METHODS
    open_labels = ("decoupled", "ratio to the sampler", "falling window")
    for label in open_labels:
        assert not resolution.is_ahead(label, "bapo")
        assert not resolution.is_ahead("bapo", label)
    decoupled, sampler, window = (means[label] - means["bapo"] for label in open_labels)
    assert f"`decoupled` ({decoupled:.3f}), a ratio to the sampler ({sampler:.3f})" in METHODS
    assert f"a falling window (−{-window:.3f})" in METHODS


def test_the_page_of_methods_has_what_figure_6_decides() -> None:
    state = small_state("fig6")
    assert state.name == "does not hold"
    (result,) = state.results
    means, resolution = result.means, result.resolution
    assert resolution is not None
    early, late = "c2 = 1/8, c3 = 2/8", "c2 = 4/8, c3 = 5/8"
    assert resolution.is_ahead(early, "bapo")
    assert resolution.is_ahead(early, late)
    assert f"ahead of the moving one ({means[early] - means['bapo']:.3f})" in METHODS
    assert f"c3 = 5/8 ({means[early] - means[late]:.3f}; [Figure 6]" in METHODS
    for label in ("m = 1", "v = 10"):
        assert not resolution.is_ahead(label, "bapo")
        assert not resolution.is_ahead("bapo", label)
    often, delayed = (means[label] - means["bapo"] for label in ("m = 1", "v = 10"))
    assert f"in each step ({often:.3f}) or a delay of ten steps (−{-delayed:.3f})" in METHODS


def test_the_pages_have_what_r15_decides() -> None:
    (result,) = small_state("r15").results
    means, resolution = result.means, result.resolution
    assert resolution is not None
    rule = "replays of the last 256 mixed groups"
    difference = {label: means[rule] - value for label, value in means.items()}
    behind = ("arpo", "replays, adaptive clipping", "replays, rollouts one step ahead")
    for label in means:
        assert resolution.is_ahead(rule, label) == (label in behind), label
        assert not resolution.is_ahead(label, rule)
    arpo, clipping, ahead = (f"{difference[label]:.3f}" for label in behind)
    assert f"ARPO ({arpo}), and loses by adaptive clipping ({clipping}) and by" in METHODS
    assert f"one step ahead of the trainer ({ahead}; [R15]" in METHODS
    maxrl, remix = f"{difference['maxrl']:.3f}", f"{difference['remix-grpo']:.3f}"
    assert f"ahead of MaxRL ({maxrl}) or of Remix-GRPO ({remix})" in METHODS
    posteriors = -difference["replays, prompts by their posteriors"]
    gains = difference["replays, re-evaluations that count any gain in the window"]
    assert (
        f"choose ({posteriors:.3f}) or by re-evaluations that count any gain (−{gains:.3f};"
        in METHODS
    )
    readme = " ".join(README.split())
    smallest = f"{resolution.smallest_difference:.3f}"
    assert f"({maxrl} and {remix} behind; ARPO is {arpo} behind, and above {smallest}" in readme


def test_the_pages_have_what_r16_and_r17_decide() -> None:
    maxrl, both = "maxrl with BAPO's loss", "replays, MaxRL"
    grpo, rule = "grpo with BAPO's loss", "replays of the last 256 mixed groups"
    gains, additions, smallest = [], [], []
    for name in ("r16", "r17"):
        result, *_ = small_state(name).results
        means, resolution = result.means, result.resolution
        assert resolution is not None
        assert resolution.is_ahead(both, maxrl)
        assert not resolution.is_ahead(both, rule)
        assert not resolution.is_ahead(rule, both)
        assert resolution.is_ahead(maxrl, grpo) == (name == "r16")
        ahead = f"{means[maxrl] - means[grpo]:.3f}".replace("-", "−")
        text = "with the same loss" if name == "r16" else "on the other task they are"
        assert f"{text} ({ahead}; [{name.upper()}]" in METHODS
        if name == "r17":
            assert resolution.is_ahead(rule, maxrl)
            ahead = f"{means[rule] - means[maxrl]:.3f}"
            assert f"ahead of MaxRL with the same loss ({ahead}; [R17]" in METHODS
            assert f"{ahead} ahead of MaxRL with the same loss" in " ".join(README.split())
        gains.append(f"{means[both] - means[maxrl]:.3f}")
        additions.append(means[both] - means[rule])
        smallest.append(f"{resolution.smallest_difference:.3f}")
    assert f"MaxRL's without replays ({gains[0]}; [R16]" in METHODS
    assert f"on the other task they are ({gains[1]}; [R17]" in METHODS
    assert f"ahead of replays with GRPO's ({additions[0]:.3f}; [R16]" in METHODS
    assert f"on the other task they are (−{-additions[1]:.3f}; [R17]" in METHODS
    readme = " ".join(README.split())
    assert f"by {gains[0]} on sorting and by {gains[1]} on the other task" in readme
    assert f"(decided above {smallest[0]} and {smallest[1]}; [R16]" in readme


def test_the_page_of_methods_has_what_the_figures_of_adaptive_clipping_decide() -> None:
    (entropy,) = small_state("ac-fig2").results
    assert entropy.resolution is not None
    once, twice, four = "grpo", "2 passes", "4 passes"
    assert entropy.resolution.is_ahead(once, twice)
    assert entropy.resolution.is_ahead(twice, four)
    means = entropy.means
    assert (
        f"{means[once]:.3f} with one, {means[twice]:.3f} with two, {means[four]:.3f} with four"
        in METHODS
    )
    training, _ = small_state("ac-fig9").results
    assert training.resolution is not None
    assert training.resolution.is_ahead("grpo", "adaptive")
    difference = training.means["grpo"] - training.means["adaptive"]
    assert f"GRPO's fixed range ({difference:.3f}; [Figure 9]" in METHODS
    _, stale = small_state("ac-fig11").results
    assert stale.resolution is not None
    fixed, higher, adaptive = (
        f"{each}, 4 passes" for each in ("fixed", "upper bound 1.28", "adaptive")
    )
    assert stale.resolution.is_ahead(higher, adaptive)
    assert not stale.resolution.is_ahead(fixed, adaptive)
    assert not stale.resolution.is_ahead(adaptive, fixed)
    behind_higher = stale.means[higher] - stale.means[adaptive]
    behind_fixed = stale.means[fixed] - stale.means[adaptive]
    assert f"upper bound of 1.28 ({behind_higher:.3f}; [Figure 11]" in METHODS
    assert f"GRPO's fixed range ({behind_fixed:.3f}; [Figure 11]" in METHODS
    changes = []
    (clipping,) = small_state("ac-table1").results
    bounds, *_ = small_state("ac-fig7").results
    for result, label in (
        (clipping, "adaptive"),
        (bounds, "upper bound 1.28"),
        (bounds, "lower bound 0.6"),
    ):
        assert result.resolution is not None
        assert not result.resolution.is_ahead("grpo", label)
        assert not result.resolution.is_ahead(label, "grpo")
        changes.append(result.means[label] - result.means["grpo"])
    clipped, upper, lower = changes
    assert f"held-out accuracy of GRPO (−{-clipped:.3f}; [Table 1]" in METHODS
    assert f"of 1.28 ({upper:.3f}) or a lower bound of 0.6 (−{-lower:.3f};" in METHODS


def test_the_page_of_methods_has_what_the_experiment_with_a_critic_decides() -> None:
    (result,) = small_state("appendix-ba-ppo").results
    assert result.resolution is not None
    assert result.resolution.is_ahead("ppo", "ba_ppo")
    difference = result.means["ppo"] - result.means["ba_ppo"]
    assert f"their best checkpoints ({difference:.3f}; [A.9]" in METHODS


def test_the_page_of_methods_has_what_table_1c_decides() -> None:
    (result,) = small_state("table1c").results
    means, resolution = result.means, result.resolution
    assert resolution is not None
    ahead = {label: means["bapo"] - value for label, value in means.items() if label != "bapo"}
    for label in ahead:
        assert resolution.is_ahead("bapo", label) == (label == "bapo without X3"), label
        assert not resolution.is_ahead(label, "bapo")
    grpo, fresh, alone = (ahead[each] for each in ("grpo", "bapo without X2", "bapo without X3"))
    smallest = resolution.smallest_difference
    assert f"ahead of itself without replays ({alone:.3f}; [Table 1c]" in METHODS
    assert f"it is ahead of GRPO ({grpo:.3f}), or of itself" in METHODS
    assert f"without re-evaluations ({fresh:.3f}; [Table 1c]" in METHODS
    readme = " ".join(README.split())
    assert f"without replays ({alone:.3f} at equal steps, above {smallest:.3f}; [Table" in readme
    assert f"not decided against GRPO ({grpo:.3f})" in readme


def test_the_page_of_methods_has_what_r1_and_r7_decide() -> None:
    item, (result,) = find_items(["r1"])["r1"], small_state("r1").results
    assert result.resolution is not None
    assert [judgement.verdict for judgement in result.judgements] == ["not decided"]
    behind = result.means["grpo"] - result.means["bapo"]
    assert f"the same accuracy within 0.03 (−{behind:.3f}; [R1]" in METHODS
    tokens = resolve_accuracy(item, "generated tokens")
    assert tokens.is_ahead("grpo", "bapo")
    behind = judge_larger(tokens, "grpo", "bapo").difference
    assert f"GRPO is ahead of BAPO there ({behind:.3f}; [R1]" in METHODS
    smallest = tokens.smallest_difference
    assert f"on Countdown ({behind:.3f} at equal tokens, above {smallest:.3f};" in " ".join(
        README.split()
    )

    (result,) = small_state("r7").results
    means, resolution = result.means, result.resolution
    assert resolution is not None
    assert not resolution.is_ahead("bapo", "grpo")
    assert not resolution.is_ahead("grpo", "bapo")
    behind = means["grpo"] - means["bapo"]
    assert f"than GRPO does (−{behind:.3f} of these prompts; [R7]" in METHODS
