"""README and experiments have the figures of the committed results."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import mean

from bapo_core.claims import judge_larger
from bapo_core.config import config_from, merge
from bapo_core.types import ESS_DECAY
from docs.generate.__main__ import PAGES
from docs.generate.readme import find_evidence, resolve_accuracy
from services.reproduction.declarations import find_items, read_setup
from services.reproduction.plans import plan_runs
from services.reproduction.states import (
    State,
    find_state,
    read_labelled,
)
from services.reproduction.tables import tabulate

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks/results/reproduction"
README = (ROOT / "README.md").read_text()
METHODS = (ROOT / "docs/choosing-a-method.md").read_text()
LADDER = find_evidence("ladder", RESULTS)


def small_state(name: str) -> State:
    """Returns the state of an experiment at small size, by the committed results."""
    return find_state(find_items([name])[name], "small", RESULTS)


def repeated_states(name: str) -> tuple[State, State]:
    """Returns the states of an experiment with other seeds alone, and with all seeds."""
    item = find_items([name])[name]
    again, pooled = item.repeated(), item.pooled()
    return find_state(again, "small", RESULTS), find_state(pooled, "small", RESULTS)


def test_the_tables_are_current() -> None:
    assert PAGES["README.md"]() == README, "run `make docs`"


def test_the_readme_has_what_is_decided_with_prompts_of_each_seeds_own() -> None:
    text = " ".join(README.split())
    begin = text.index("**With prompts of each seed's own**")
    sorting, other = text[begin:].split(" - **")[0].split("on the other task by")
    for part, name in ((sorting, "r19"), (other, "r20")):
        (result,) = find_state(find_evidence(name, RESULTS), "small", RESULTS).results
        ahead, _, left_open = part.partition("open against")
        assert f"above {result.judgements[0].threshold:.3f}" in part
        for judgement in result.judgements:
            assert judgement.verdict in ("holds", "not decided")
            said = ahead if judgement.verdict == "holds" else left_open
            assert f"{judgement.difference:.3f}" in said, judgement


def test_the_page_of_methods_has_what_all_seeds_decide_of_r19_and_r20() -> None:
    for name in ("r19", "r20"):
        assert [state.name for state in repeated_states(name)] == ["holds", "holds"]
    _, sorting, _, sorting_dapo = repeated_states("r19")[1].results[0].judgements
    _, other, _, other_dapo = repeated_states("r20")[1].results[0].judgements
    assert (
        f"({sorting.difference:.3f} and {sorting_dapo.difference:.3f} above "
        f"{sorting.threshold:.3f}, and {other.difference:.3f} and {other_dapo.difference:.3f} "
        f"above {other.threshold:.3f})"
    ) in METHODS


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
    assert resolution.is_ahead("grpo", dapo)
    text = " ".join(README.split())
    assert (
        f"GRPO with the same loss ({means[same_loss] - means[dapo]:.3f}) and, with all eight "
        f"seeds, behind GRPO ({means['grpo'] - means[dapo]:.3f})"
    ) in text


def test_the_results_have_what_the_ladder_decides() -> None:
    (result,) = find_state(LADDER, "small", RESULTS).results
    means, resolution = result.means, result.resolution
    assert resolution is not None
    page = (ROOT / "docs/results.md").read_text()
    assert f"differ by {resolution.deviation:.3f} ({resolution.degrees_of_freedom} degrees" in page
    assert f"differences above {resolution.smallest_difference:.3f} are decided" in page
    grpo, dapo = "grpo with BAPO's loss", "dapo with BAPO's loss"
    rungs = ("+ re-evaluations", "+ replays")
    (above_dapo, replays_above_dapo), (above_grpo, replays_above_grpo) = (
        [f"(+{means[rung] - means[other]:.3f}" for rung in rungs] for other in (dapo, grpo)
    )
    assert f"same loss {above_dapo}), and not of GRPO with it {above_grpo})" in page
    assert f"both {replays_above_dapo}, {replays_above_grpo[1:]})" in page
    assert f"loss is {means[grpo] - means['grpo']:.3f} ahead of GRPO: not decided" in page
    states = [small_state("ladder").name, *(state.name for state in repeated_states("ladder"))]
    assert states == ["not decided"] * 3
    again, pooled = (state.results[0].judgements[0] for state in repeated_states("r9"))
    assert f"{-again.difference:.3f} behind (above {again.threshold:.3f})" in page
    assert pooled.verdict == "not decided"


def test_each_half_of_the_ladders_seeds_decides_the_same() -> None:
    (item,) = find_items(["ladder"]).values()
    ahead = [
        (variant, other)
        for variant in ("+ replays", "+ re-evaluations")
        for other in ("grpo", "grpo with BAPO's loss", "dapo with BAPO's loss", "+ filter", "bapo")
    ]
    for half in (item, item.repeated()):
        (result,) = find_state(half, "small", RESULTS).results
        resolution = result.resolution
        assert resolution is not None
        decided = {pair for pair in ahead if resolution.is_ahead(*pair)}
        assert {pair for pair in ahead if pair[0] == "+ replays"} <= decided
        assert ("+ re-evaluations", "bapo") in decided
        assert resolution.is_ahead("grpo with BAPO's loss", "dapo with BAPO's loss")
        assert resolution.is_ahead("grpo", "bapo")


def test_the_pages_have_what_a_delay_costs_with_each_half_of_the_seeds() -> None:
    halves = (small_state("r5"), repeated_states("r5")[0])
    assert [state.name for state in halves] == ["holds", "holds"]
    bapo, other_bapo = (f"{state.results[0].judgements[0].difference:.2f}" for state in halves)
    assert bapo == other_bapo
    assert f"({bapo} twice, with four seeds and with four others)" in METHODS
    pooled = find_items(["fig5"])["fig5"].pooled()
    ahead = judge_larger(resolve_accuracy(pooled, "generated tokens", RESULTS), "grpo", "bapo")
    assert ahead.verdict == "holds"
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


def test_the_page_of_methods_has_what_dapo_reaches_at_equal_steps() -> None:
    ahead, thresholds = [], []
    for name in ("r10", "r11", "r18"):
        judgement = judge_larger(
            resolve_accuracy(find_items([name])[name], "training steps", RESULTS),
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
    grpo, second_pass, dapo = (each.difference for each in pooled.results[0].judgements)
    assert (
        f"by {grpo:.3f}, {dapo:.3f} and {second_pass:.3f} on sorting "
        f"([R10](docs/reproduction.md#r10), decided above {smallest_pooled:.3f})"
    ) in readme


def test_the_pages_have_what_other_seeds_and_all_of_them_decide_of_r11() -> None:
    again, pooled = repeated_states("r11")
    verdicts = [judgement.verdict for judgement in again.results[0].judgements]
    assert verdicts == ["not decided", "holds", "holds"]
    assert pooled.name == "holds"
    grpo, *_ = again.results[0].judgements
    assert (
        f"GRPO on the other task ({grpo.difference:.3f}, above {grpo.threshold:.3f})"
    ) in " ".join(README.split())
    grpo, second_pass, dapo = pooled.results[0].judgements
    assert (
        f"by {grpo.difference:.3f}, {dapo.difference:.3f} and {second_pass.difference:.3f} on the "
        f"other task ([R11](docs/reproduction.md#r11), above {grpo.threshold:.3f})"
    ) in " ".join(README.split())
    here_grpo, _, here_dapo = repeated_states("r10")[1].results[0].judgements
    assert (
        f"by {here_grpo.difference:.3f} and {here_dapo.difference:.3f} on sorting digits, and by "
        f"{grpo.difference:.3f} and {dapo.difference:.3f} on a similar task (eight seeds each, "
        f"decided above {here_grpo.threshold:.3f} and {grpo.threshold:.3f})"
    ) in METHODS


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
    again = find_state(item.repeated(), "small", RESULTS)
    assert again.name == "holds"
    ahead = [judgement.difference for judgement in again.results[0].judgements]
    assert f"all of them again, by {min(ahead):.3f} to {max(ahead):.3f}." in readme


def test_the_readme_has_what_r15_decides() -> None:
    (result,) = small_state("r15").results
    means, resolution = result.means, result.resolution
    assert resolution is not None
    rule = "replays of the last 256 mixed groups"
    for label in ("maxrl", "remix-grpo"):
        assert not resolution.is_ahead(rule, label)
        assert not resolution.is_ahead(label, rule)
    assert resolution.is_ahead(rule, "arpo")
    maxrl, remix, arpo = (
        f"{means[rule] - means[label]:.3f}" for label in ("maxrl", "remix-grpo", "arpo")
    )
    smallest = f"{resolution.smallest_difference:.3f}"
    assert (
        f"({maxrl} and {remix} behind; ARPO is {arpo} behind, and above {smallest}"
    ) in " ".join(README.split())


def test_the_readme_has_what_r16_and_r17_decide() -> None:
    maxrl, both = "maxrl with BAPO's loss", "replays, MaxRL"
    rule = "replays of the last 256 mixed groups"
    readme = " ".join(README.split())
    gains, smallest = [], []
    for name in ("r16", "r17"):
        result, *_ = small_state(name).results
        means, resolution = result.means, result.resolution
        assert resolution is not None
        assert resolution.is_ahead(both, maxrl)
        assert not resolution.is_ahead(both, rule)
        assert not resolution.is_ahead(rule, both)
        if name == "r17":
            assert resolution.is_ahead(rule, maxrl)
            assert f"{means[rule] - means[maxrl]:.3f} ahead of MaxRL with the same loss" in readme
        gains.append(f"{means[both] - means[maxrl]:.3f}")
        smallest.append(f"{resolution.smallest_difference:.3f}")
    assert f"by {gains[0]} on sorting and by {gains[1]} on the other task" in readme
    assert f"(decided above {smallest[0]} and {smallest[1]}; [R16]" in readme


def test_the_readme_has_what_table_1c_decides() -> None:
    (result,) = small_state("table1c").results
    means, resolution = result.means, result.resolution
    assert resolution is not None
    assert resolution.is_ahead("bapo", "bapo without X3")
    assert not resolution.is_ahead("bapo", "grpo")
    assert not resolution.is_ahead("grpo", "bapo")
    alone, grpo = (means["bapo"] - means[label] for label in ("bapo without X3", "grpo"))
    readme = " ".join(README.split())
    assert (
        f"without replays ({alone:.3f} at equal steps, above {resolution.smallest_difference:.3f}; "
        "[Table"
    ) in readme
    assert f"not decided against GRPO ({grpo:.3f})" in readme


def test_the_readme_has_what_r1_decides() -> None:
    verdicts = [judgement.verdict for judgement in small_state("r1").results[0].judgements]
    assert verdicts == ["not decided"]
    tokens = resolve_accuracy(find_items(["r1"])["r1"], "generated tokens", RESULTS)
    assert tokens.is_ahead("grpo", "bapo")
    behind = judge_larger(tokens, "grpo", "bapo").difference
    assert (
        f"on Countdown ({behind:.3f} at equal tokens, above {tokens.smallest_difference:.3f};"
    ) in " ".join(README.split())


def test_the_readme_has_what_paired_runs_leave_open() -> None:
    readme = " ".join(README.split())
    for name in ("r10", "r11", "r14", "r19", "r20"):
        _, pooled = repeated_states(name)
        assert pooled.name == "holds"
        for judgement in pooled.results[0].paired:
            second_pass = judgement.other.endswith("two passes")
            is_open = second_pass and name in ("r10", "r19")
            assert judgement.verdict == ("not decided" if is_open else "holds"), (name, judgement)
            if is_open:
                interval = f"{judgement.difference:.3f} ± {judgement.threshold:.3f}"
                assert f"{interval} ({name.upper()})" in readme


def test_the_readme_has_what_replays_bring_under_the_delay() -> None:
    again, pooled = repeated_states("table1b")
    for state in (again, pooled):
        *_, replays = state.results[0].judgements
        assert (replays.other, replays.verdict) == ("bapo without X3", "holds")
    assert (
        f"{replays.difference:.3f} at equal steps (eight seeds, above {replays.threshold:.3f};"
    ) in " ".join(README.split())
