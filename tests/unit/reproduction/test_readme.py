"""README and experiments have the figures of the committed results."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import mean

from bapo_core.claims import judge_larger
from bapo_core.config import config_from, merge
from bapo_core.resolution import Resolution, decide_pairwise, paired_difference, resolve
from bapo_core.types import ESS_DECAY
from docs.generate.__main__ import PAGES
from docs.generate.readme import find_evidence
from services.reproduction.declarations import Cost, Declaration, find_items, read_setup
from services.reproduction.plans import plan_runs
from services.reproduction.states import (
    State,
    find_state,
    measure_runs,
    read_labelled,
)
from services.reproduction.tables import tabulate

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks/results/reproduction"
README = (ROOT / "README.md").read_text()
README_TEXT = " ".join(README.split())
RESULTS_PAGE = (ROOT / "docs/results.md").read_text()
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


def resolve_accuracy(item: Declaration, cost: Cost) -> Resolution:
    """Returns what the committed results of an experiment decide of accuracies at equal cost."""
    resolution = resolve(measure_runs("accuracy", cost, read_labelled(item, "small", RESULTS)))
    assert resolution is not None
    return resolution


def test_the_tables_are_current() -> None:
    assert PAGES["README.md"]() == README, "run `make docs`"


def test_the_readme_has_what_is_decided_with_prompts_of_each_seeds_own() -> None:
    for name, left_open in (("r19", ("grpo", "two passes")), ("r20", ("grpo with BAPO's loss",))):
        again, pooled = repeated_states(name)
        assert again.name == pooled.name == "holds"
        for judgement in small_state(name).results[0].judgements:
            is_open = judgement.other.endswith(left_open)
            assert judgement.verdict == ("not decided" if is_open else "holds"), judgement
    assert (
        "leave open GRPO and the second pass on sorting, and GRPO with BAPO's loss on `distinct`"
    ) in README_TEXT
    assert "the other four alone decide all eight differences." in README_TEXT


def find_differences(name: str, *others: str) -> tuple[list[str], str]:
    """Returns by how much the preset is ahead with all seeds, and the resolution, as text."""
    (_, pooled) = repeated_states(name)
    (result,) = pooled.results
    found = {judgement.other: judgement for judgement in result.judgements}
    chosen = [found[other] for other in others or found]
    assert {judgement.verdict for judgement in chosen} == {"holds"}
    return [f"{each.difference:.3f}" for each in chosen], f"{chosen[0].threshold:.3f}"


def test_the_page_of_methods_has_what_all_seeds_decide_of_the_preset() -> None:
    others = ("grpo with BAPO's loss", "dapo with BAPO's loss")
    for names, text in (
        (
            ("r10", "r11"),
            "by {} and {} (± {}) on sorting digits and by {} and {} (± {}) on `distinct`, with "
            "eight seeds each",
        ),
        (("r19", "r20"), "({} and {} ± {}, {} and {} ± {})"),
    ):
        (sorting, near), (distinct, near_distinct) = (
            find_differences(name, *others) for name in names
        )
        assert text.format(*sorting, near, *distinct, near_distinct) in METHODS
    ((grpo,), _), ((grpo_distinct,), _) = (
        find_differences(name, "grpo") for name in ("r19", "r20")
    )
    assert f"ahead of `grpo` itself ({grpo} and {grpo_distinct})" in METHODS


def test_the_page_of_methods_has_what_all_seeds_decide_of_the_default() -> None:
    (result,) = find_state(LADDER, "small", RESULTS).results
    assert result.resolution is not None
    behind = judge_larger(result.resolution, "grpo", "bapo")
    (item,) = find_items(["r5"]).values()
    delayed = judge_larger(resolve_accuracy(item.pooled(), "training steps"), "bapo", "grpo, v = 5")
    assert behind.verdict == delayed.verdict == "holds"
    text = " ".join(METHODS.split())
    assert f"without a delay ({behind.difference:.3f} ± {behind.threshold:.3f})" in text
    assert f"the same delay ({delayed.difference:.3f} ± {delayed.threshold:.3f})" in text


def test_the_sentences_are_what_the_runs_decide() -> None:
    (result,) = find_state(LADDER, "small", RESULTS).results
    resolution = result.resolution
    assert resolution is not None
    assert f"differences above {resolution.smallest_difference:.3f} are decided" in README
    behind = ["grpo", "grpo with BAPO's loss", "dapo with BAPO's loss", "+ filter"]
    means = result.means
    ahead = [means["+ replays"] - means[label] for label in behind]
    assert all(resolution.is_ahead("+ replays", label) for label in behind)
    smallest = f"(± {resolution.smallest_difference:.3f})"
    assert f"by {min(ahead):.3f} to {max(ahead):.3f} {smallest}" in README
    assert resolution.is_ahead("+ re-evaluations", "bapo")
    v1_ahead = means["+ re-evaluations"] - means["bapo"]
    assert f"v = 1 it is {v1_ahead:.3f} ahead {smallest}" in README_TEXT
    assert not resolution.is_ahead("+ replays", "+ re-evaluations")
    assert not resolution.is_ahead("+ re-evaluations", "+ replays")
    same_loss, dapo = "grpo with BAPO's loss", "dapo with BAPO's loss"
    assert resolution.is_ahead(same_loss, dapo)
    assert resolution.is_ahead("grpo", dapo)
    assert (
        f"GRPO with BAPO's loss ({means[same_loss] - means[dapo]:.3f}) and behind GRPO "
        f"({means['grpo'] - means[dapo]:.3f}; the first four seeds leave it open"
    ) in README_TEXT
    assert f"At equal tokens {smallest} it is behind" in README_TEXT
    assert f"by {means['grpo'] - means['bapo']:.3f} at equal tokens {smallest}" in README_TEXT
    behind = means["+ replays"] - means["+ re-evaluations"]
    assert f"are {behind:.3f} behind at equal ones, which is not decided {smallest}" in README_TEXT
    assert f"{means['grpo'] - means[dapo]:.3f} open by paired runs" in METHODS


def test_the_readme_has_what_the_ladder_decides_at_equal_steps() -> None:
    resolution = resolve_accuracy(LADDER, "training steps")
    smallest = f"± {resolution.smallest_difference:.3f}"
    dapo = "dapo with BAPO's loss"
    assert all(resolution.is_ahead(dapo, each) for each in resolution.variants if each != dapo)
    assert f"above all others at equal steps ({smallest})" in README_TEXT
    replays = judge_larger(resolution, "+ replays", "+ re-evaluations")
    assert replays.verdict == "not decided"
    assert f"decided either ({replays.difference:.3f} {smallest})" in README_TEXT
    delayed = judge_larger(
        resolve_accuracy(find_evidence("r5", RESULTS), "training steps"), "bapo", "grpo, v = 5"
    )
    assert delayed.verdict == "holds"
    interval = f"{delayed.difference:.3f} ± {delayed.threshold:.3f}"
    assert f"GRPO with the same delay ({interval}; [R5]" in README_TEXT


def test_the_results_have_what_the_ladder_decides() -> None:
    (result,) = find_state(LADDER, "small", RESULTS).results
    means, resolution = result.means, result.resolution
    assert resolution is not None
    page = " ".join((ROOT / "docs/results.md").read_text().split())
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
    assert f"{-again.difference:.3f} behind (± {again.threshold:.3f}, by a spread" in page
    assert pooled.verdict == "not decided"
    assert f"leave it open (± {pooled.threshold:.3f})" in page


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


def test_the_page_of_experiments_has_what_a_delay_costs() -> None:
    page = (ROOT / "docs/experiments.md").read_text()
    delay = find_evidence("r5", RESULTS)
    results = read_labelled(delay, "small", RESULTS)
    accuracies = {label: accuracy for label, accuracy, *_ in tabulate(delay, results)[1]}
    for label, every in {"bapo, v = 1": 1, "bapo, v = 2": 2, "bapo": 5, "grpo, v = 5": 5}.items():
        records = [each.record for each in results if each.label == label]
        decay = mean(mean(each.steps[ESS_DECAY][-25:]) for each in records)
        kl = mean(mean(each.steps["divergence/fresh/kl"][-25:]) for each in records)
        share = math.exp(-decay * (every - 1))
        row = f"| {label} | {decay:.3f} | {share:.2f} | {kl:.3f} | {accuracies[label]} |"
        assert row in page, row
    bapo, grpo = find_state(delay, "small", RESULTS).results
    assert bapo.resolution is not None
    costs = [result.judgements[0].difference for result in (bapo, grpo)]
    assert f"costs BAPO {costs[0]:.2f} and GRPO {costs[1]:.2f} of accuracy" in page
    assert f"above {bapo.resolution.smallest_difference:.3f} are decided" in " ".join(page.split())
    near = judge_larger(bapo.resolution, "bapo, v = 1", "bapo, v = 2")
    paired = judge_larger(
        decide_pairwise(measure_runs("accuracy", "training steps", results)),
        near.variant,
        near.other,
    )
    assert (near.verdict, paired.verdict) == ("not decided", "holds")
    assert (
        f"decided ({near.difference:.3f}; the paired runs of these two alone decide it, ± "
        f"{paired.threshold:.3f};"
    ) in " ".join(page.split())
    ahead = bapo.means["bapo"] - bapo.means["grpo, v = 5"]
    assert f"BAPO is {ahead:.2f} ahead of GRPO" in " ".join(page.split())


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
    found = {
        name: judge_larger(
            resolve_accuracy(find_evidence(name, RESULTS), "training steps"),
            "dapo with BAPO's loss",
            "replays of the last 256 mixed groups",
        )
        for name in ("r10", "r11", "r18", "r19", "r20")
    }
    shown = {
        name: (f"{each.difference:.3f}", f"{each.threshold:.3f}") for name, each in found.items()
    }
    decided = {name for name, each in found.items() if each.verdict == "holds"}
    assert decided == {"r10", "r11", "r20"}
    (sorting, near), (distinct, near_distinct) = shown["r10"], shown["r11"]
    assert f"by {sorting} (± {near}) on sorting and {distinct} (± {near_distinct}) on" in METHODS
    (open_sorting, near), (distinct, near_distinct) = shown["r19"], shown["r20"]
    assert (
        f"on `distinct` ({distinct} ± {near_distinct}), and open on sorting ({open_sorting} ± "
        f"{near})"
    ) in METHODS


def test_the_pages_have_what_r18_decides() -> None:
    rule = "replays of the last 256 mixed groups"
    for state in (small_state("r18"), *repeated_states("r18")):
        (result,) = state.results
        means, resolution = result.means, result.resolution
        assert resolution is not None
        for other in means:
            assert resolution.is_ahead(rule, other) == (other == "dapo with BAPO's loss"), other
            assert not resolution.is_ahead(other, rule)
    paired = {judgement.other: judgement.verdict for judgement in result.paired}
    assert paired.pop("dapo with BAPO's loss") == "holds"
    assert set(paired.values()) == {"not decided"}
    grpo, same_loss, dapo = (
        means[label] for label in ("grpo", "grpo with BAPO's loss", "dapo with BAPO's loss")
    )
    smallest = f"{resolution.smallest_difference:.3f}"
    ahead_of_grpo, ahead_of_same_loss = (
        f"{means[rule] - grpo:.3f}",
        f"{means[rule] - same_loss:.3f}",
    )
    assert (
        f"ahead of DAPO with BAPO's loss ({means[rule] - dapo:.3f} ± {smallest}), and decide "
        f"nothing against GRPO and GRPO with BAPO's loss ({ahead_of_grpo} and {ahead_of_same_loss})"
    ) in README_TEXT
    assert f"against GRPO ({means[rule] - grpo:.3f} ± {smallest}, eight seeds)" in METHODS


def test_the_readme_has_what_all_seeds_decide_with_one_set_of_prompts() -> None:
    for name, task, others in (
        ("r10", "sorting", ["holds", "not decided", "holds"]),
        ("r11", "`distinct`", ["not decided", "holds", "holds"]),
    ):
        again, pooled = repeated_states(name)
        assert [judgement.verdict for judgement in again.results[0].judgements] == others
        assert pooled.name == "holds"
        grpo, second_pass, dapo = pooled.results[0].judgements
        assert (
            f"{grpo.difference:.3f}, {dapo.difference:.3f} and {second_pass.difference:.3f} "
            f"(± {grpo.threshold:.3f}) on {task} ([{name.upper()}](docs/reproduction.md#{name}))"
        ) in README_TEXT


def test_the_readme_has_the_places_of_the_rules_of_replay() -> None:
    (result,) = repeated_states("r10")[1].results
    assert result.resolution is not None
    places = result.resolution.places()
    rules = [places[label] for label in places if label.startswith("replays")]
    assert rules == [(1, 4)] * 4
    assert "four rules share the places 1 to 4" in README_TEXT
    assert {
        planned.config().replay.select
        for planned in plan_runs(find_items(["r10"])["r10"], "small")
        if planned.label == "replays of groups near the policy"
    } == {"effective_sample_size"}


FAMILIES = (
    "grpo",
    "grpo with BAPO's loss",
    "dapo with BAPO's loss",
    "replays of the last 256 mixed groups",
    "bapo",
)
RATES = ("5e-5", "1e-4", "2e-4")


def find_best_rate(state: State, family: str) -> str:
    """Returns the learning rate that has the highest mean accuracy of the method in R13."""
    means = state.results[0].means
    return max(RATES, key=lambda rate: means[f"{family}, {rate}"])


def test_each_method_has_the_learning_rate_that_was_chosen_by_other_prompts_and_runs() -> None:
    chosen, judged = (find_items([name])[name] for name in ("r13", "r14"))
    assert {run.config().task.data_seed for run in plan_runs(chosen, "small")} == {1}
    assert {run.config().task.data_seed for run in plan_runs(judged, "small")} == {0}
    best = {family: find_best_rate(small_state("r13"), family) for family in FAMILIES}
    variants = judged.variants_at("small")
    assert {label.removesuffix(", 5e-5") for label in variants} == set(best)
    for family, rate in best.items():
        label = f"{family}, {rate}" if rate != "1e-4" else family
        assert variants[label] == chosen.variants_at("small")[f"{family}, {rate}"], family


def test_two_further_runs_choose_the_same_learning_rates_but_for_grpo() -> None:
    states = [small_state("r13"), *repeated_states("r13")]
    best = {family: [find_best_rate(state, family) for state in states] for family in FAMILIES}
    assert [family for family, rates in best.items() if len(set(rates)) > 1] == ["grpo"]
    assert best["grpo"] == ["5e-5", "1e-4", "1e-4"]
    assert set(best["bapo"]) == {RATES[0]}
    (against, _) = states[2].results[0].judgements
    assert abs(against.difference) < against.threshold
    smallest = f"{against.threshold:.3f}"
    assert f"from 1e-4 ({against.difference:.3f} ± {smallest}), and it is behind" in README_TEXT
    resolution = states[2].results[0].resolution
    assert resolution is not None
    for rate in ("5e-5", "1e-4"):
        assert resolution.is_ahead("replays of the last 256 mixed groups, 1e-4", f"grpo, {rate}")


def test_the_rule_of_the_preset_is_ahead_of_methods_with_their_own_learning_rates() -> None:
    again, pooled = repeated_states("r14")
    assert small_state("r14").name == again.name == pooled.name == "holds"
    *ahead, last = [f"{each.difference:.3f}" for each in pooled.results[0].judgements]
    smallest = f"{pooled.results[0].judgements[0].threshold:.3f}"
    assert f"delay by {', '.join(ahead)} and {last} (± {smallest})" in README_TEXT


def test_no_learning_rate_of_three_brings_the_baseline_to_the_replays() -> None:
    again, pooled = repeated_states("r12")
    assert again.name == pooled.name == "holds"
    shown = [f"{judgement.difference:.3f}" for judgement in pooled.results[0].judgements]
    smallest = f"{pooled.results[0].judgements[0].threshold:.3f}"
    assert f"yes: {', '.join(shown)} (± {smallest})" in METHODS


def test_the_readme_has_what_r15_decides() -> None:
    (result,) = repeated_states("r15")[1].results
    means, resolution = result.means, result.resolution
    assert resolution is not None
    rule = "replays of the last 256 mixed groups"
    for label in ("maxrl", "remix-grpo"):
        assert not resolution.is_ahead(rule, label)
        assert not resolution.is_ahead(label, rule)
    assert resolution.is_ahead(rule, "arpo")
    maxrl, remix = (f"{means[rule] - means[label]:.3f}" for label in ("maxrl", "remix-grpo"))
    smallest = f"{resolution.smallest_difference:.3f}"
    assert (
        f"Remix-GRPO ({maxrl} and {remix} behind, ± {smallest}; [R15](docs/reproduction.md#r15))"
    ) in README_TEXT


def test_the_readme_has_what_replays_bring_with_the_advantages_of_maxrl() -> None:
    maxrl = "maxrl with BAPO's loss"
    rule = "replays of the last 256 mixed groups"
    halves = {name: (small_state(name), *repeated_states(name)) for name in ("r16", "r17")}
    texts = {
        "r16": "by {} (± {}, eight seeds) on sorting ([R16]",
        "r17": "by {} (± {}) on `distinct` ([R17]",
    }
    # By the declared seeds, by the other ones, and by all of them.
    for name, other, verdicts in (
        ("r16", maxrl, ["holds", "holds", "holds"]),
        ("r17", maxrl, ["holds", "not decided", "holds"]),
        ("r16", rule, ["not decided", "not decided", "holds"]),
        ("r17", rule, ["not decided", "not decided", "not decided"]),
    ):
        results = [state.results[0] for state in halves[name]]
        index = [judgement.other for judgement in results[0].judgements].index(other)
        assert [result.judgements[index].verdict for result in results] == verdicts
        pooled = results[-1].judgements[index]
        if other == maxrl:
            shown = (f"{value:.3f}" for value in (pooled.difference, pooled.threshold))
            assert texts[name].format(*shown) in README_TEXT
        elif name == "r16":
            assert results[-1].paired[index].verdict == "not decided"
    ahead = [
        judge_larger(result.resolution, rule, maxrl)
        for state in halves["r17"]
        if (result := state.results[0]).resolution is not None
    ]
    assert [each.verdict for each in ahead] == ["holds"] * 3
    interval = f"{ahead[-1].difference:.3f} ± {ahead[-1].threshold:.3f}"
    assert f"ahead of MaxRL with BAPO's loss ({interval})." in README_TEXT


def test_the_readme_has_what_table_1c_decides() -> None:
    (result,) = repeated_states("table1c")[1].results
    means, resolution = result.means, result.resolution
    assert resolution is not None
    paired = {judgement.other: judgement for judgement in result.paired}
    assert resolution.is_ahead("bapo", "bapo without X3")
    assert paired["bapo without X3"].verdict == "holds"
    alone = f"{means['bapo'] - means['bapo without X3']:.3f}"
    assert f"{alone} (± {resolution.smallest_difference:.3f} at equal steps, eight" in README_TEXT
    assert resolution.is_ahead("bapo", "grpo")
    assert paired["grpo"].verdict == "not decided"
    ahead = f"{means['bapo'] - means['grpo']:.3f}"
    assert f"GRPO as well ({ahead}), which paired runs and equal tokens leave open" in README_TEXT
    tokens = resolve_accuracy(find_items(["table1c"])["table1c"].pooled(), "generated tokens")
    assert tokens.is_ahead("bapo", "bapo without X3")
    assert not tokens.is_ahead("bapo", "grpo")
    assert f"by {ahead} ± {resolution.smallest_difference:.3f}" in RESULTS_PAGE


def test_the_results_have_what_training_on_diagrams_leaves_unsolved() -> None:
    results = read_labelled(find_evidence("table1c", RESULTS), "small", RESULTS)
    shown = []
    for label in ("bapo", "grpo"):
        shares = [
            [evaluation.bins[0] / sum(evaluation.bins) for evaluation in each.record.evaluations]
            for each in results
            if each.label == label
        ]
        more = paired_difference([share[-1] - share[0] for share in shares])
        assert more["seeds"] == 8
        assert more["mean"] > more["half_width"]
        shown += [f"{more['mean']:.3f}", f"{more['half_width']:.3f}"]
    text = "Table 1c by {} ± {} (BAPO) and {} ± {} (GRPO; 95% for each alone"
    assert text.format(*shown) in " ".join(RESULTS_PAGE.split())


def test_the_readme_has_what_r1_decides() -> None:
    (item,) = find_items(["r1"]).values()
    halves = item, item.repeated(), item.pooled()
    states = [find_state(each, "small", RESULTS) for each in halves]
    assert [state.name for state in states] == ["not decided", "holds", "holds"]
    ((pooled,), (paired,)) = (states[2].results[0].judgements, states[2].results[0].paired)
    assert paired.verdict == "holds"
    equal = f"{pooled.difference:.3f} ± {pooled.threshold:.3f}".replace("-", "−")
    assert f"within 0.03 ({equal}, which [R1]" in README_TEXT
    at_tokens = [
        judge_larger(resolve_accuracy(each, "generated tokens"), "grpo", "bapo") for each in halves
    ]
    assert [each.verdict for each in at_tokens] == ["holds", "not decided", "holds"]
    tokens = at_tokens[2]
    assert (
        f"on Countdown by {tokens.difference:.3f} (± {tokens.threshold:.3f}, eight seeds; seeds 5 "
        "to 8 alone leave it open)"
    ) in README_TEXT
    observations = measure_runs(
        "unsolved", "training steps", read_labelled(item.pooled(), "small", RESULTS)
    )
    unsolved = resolve(observations)
    assert unsolved is not None
    assert unsolved.is_ahead("grpo", "bapo")  # It leaves more of them.
    bapo, grpo = (
        mean(each.value for each in observations if each.variant == variant)
        for variant in ("bapo", "grpo")
    )
    assert (
        f"({bapo:.3f} instead of {grpo:.3f}, ± {unsolved.smallest_difference:.3f})"
    ) in README_TEXT


def test_the_readme_has_what_r7_decides() -> None:
    (item,) = find_items(["r7"]).values()
    again, pooled = repeated_states("r7")
    assert [small_state("r7").name, again.name, pooled.name] == ["not decided"] * 3
    (unlocked,) = pooled.results[0].judgements
    ahead = []
    for cost in ("training steps", "generated tokens"):
        first = judge_larger(resolve_accuracy(item, cost), "grpo", "bapo")
        judgement = judge_larger(resolve_accuracy(item.pooled(), cost), "grpo", "bapo")
        assert (first.verdict, judgement.verdict) == ("not decided", "holds")
        ahead.append(f"{judgement.difference:.3f} ± {judgement.threshold:.3f}")
    unlocks = f"{unlocked.difference:.3f} ± {unlocked.threshold:.3f}".replace("-", "−")
    assert (
        f"GRPO is ahead with eight seeds ({ahead[0]} at equal steps, {ahead[1]} at equal tokens; "
        "the first four leave both open), and it is not decided who solves more of the prompts "
        f"that the base model never solves ({unlocks}; [R7]"
    ) in README_TEXT


def test_the_pages_have_what_replays_by_measured_divergence_bring_under_a_delay() -> None:
    (item,) = find_items(["r21"]).values()
    near, mixed, undelayed = "groups near the policy", "all mixed groups", "bapo, v = 1"
    for half in (item, item.repeated(), item.pooled()):
        resolution = resolve_accuracy(half, "generated tokens")
        behind = [judge_larger(resolution, other, near) for other in (mixed, undelayed)]
        assert {each.verdict for each in behind} == {"holds"}
    results = read_labelled(item.pooled(), "small", RESULTS)
    paired = decide_pairwise(measure_runs("accuracy", "generated tokens", results))
    assert paired.is_ahead(mixed, near)
    assert paired.is_ahead(undelayed, near)
    by_mixed, by_undelayed = (f"{each.difference:.3f}" for each in behind)
    smallest = f"{behind[0].threshold:.3f}"
    assert (
        f"alone is {by_mixed} behind replaying all mixed groups and {by_undelayed} behind v = 1 "
        f"(± {smallest}, and alike with each half of eight seeds;"
    ) in README_TEXT
    experiments, decision = (
        " ".join((ROOT / "docs" / page).read_text().split())
        for page in ("experiments.md", "decisions/0023-delay.md")
    )
    assert (
        f"it is {by_undelayed} behind v = 1, and {by_mixed} behind replays of all mixed groups "
        f"(± {smallest};"
    ) in experiments
    replayed = {
        label: [each.record.steps["replayed"] for each in results if each.label == label]
        for label in (near, mixed)
    }
    shown = {label: f"{mean(map(mean, runs)):.1f}" for label, runs in replayed.items()}
    share = mean(mean(float(count > 0) for count in run) for run in replayed[near])
    assert f"{share:.0%} of the steps have replays" in decision
    assert (
        f"a step has {shown[near]} replayed groups instead of the {shown[mixed]} of all mixed "
        f"groups, which are {by_mixed} ahead (± {smallest};"
    ) in decision
    assert f"v = 1 is {by_undelayed} ahead." in decision
    undelayed_rules = resolve_accuracy(find_items(["r10"])["r10"].pooled(), "generated tokens")
    rule = "replays of groups near the policy"
    grpo = judge_larger(undelayed_rules, rule, "grpo with BAPO's loss")
    newest = judge_larger(undelayed_rules, "replays of the last 256 mixed groups", rule)
    assert (grpo.verdict, newest.verdict) == ("holds", "not decided")
    assert (
        f"{grpo.difference:.3f} ahead of GRPO with BAPO's loss, and not separated from the last "
        f"256 mixed groups ({newest.difference:.3f} behind, ± {newest.threshold:.3f};"
    ) in decision


def test_the_readme_has_what_paired_runs_leave_open() -> None:
    for name in ("r10", "r11", "r14", "r19", "r20"):
        _, pooled = repeated_states(name)
        assert pooled.name == "holds"
        for judgement in pooled.results[0].paired:
            second_pass = judgement.other.endswith("two passes")
            is_open = second_pass and name in ("r10", "r19")
            assert judgement.verdict == ("not decided" if is_open else "holds"), (name, judgement)
            if is_open and name == "r19":
                interval = f"{judgement.difference:.3f} ± {judgement.threshold:.3f}"
                assert f"but for the second pass on sorting ({interval})." in README_TEXT
    assert "By paired runs, the second pass on sorting is open here, too." in README_TEXT


def test_the_readme_has_what_replays_bring_under_the_delay() -> None:
    *_, declared = small_state("table1b").results[0].judgements
    assert (declared.other, declared.verdict) == ("bapo without X3", "not decided")
    again, pooled = repeated_states("table1b")
    for state in (again, pooled):
        *_, replays = state.results[0].judgements
        assert (replays.other, replays.verdict) == ("bapo without X3", "holds")
    assert (f"{replays.difference:.3f} at equal steps (± {replays.threshold:.3f};") in README_TEXT
