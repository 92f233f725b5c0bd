"""Describes experiments in the terminal."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.reproduction.declarations import Declaration, PaperNumbers, last_question
from services.reproduction.plans import TIME_OF_TWO_AT_A_TIME, plan_runs, total_minutes
from services.reproduction.repetitions import (
    ExperimentStates,
    compare_states,
    describe_agreement,
    find_states,
)
from services.reproduction.states import (
    State,
    describe_check,
    describe_judgement,
    describe_result,
    describe_state,
)

WIDTH = 100
STATES = {
    "holds": "all differences of the claim are decided, 95% for all pairs of variants together",
    "does not hold": "one of them is decided the other way",
    "not decided": "all runs have results, which leave a difference open",
    "not run": "runs are missing; nothing is judged before all of them have results",
    "nothing to run": "no experiment at this size; the item says why",
}
"""Meaning of each state."""


def render_list(items: Mapping[str, Declaration], results: Path) -> str:
    """Returns the list of experiments for the terminal."""
    minutes = total_minutes(run for each in items.values() for run in plan_runs(each, "small"))
    states = find_states(items, results)
    agreement = compare_states(items, states)
    counts = Counter(each.declared["small"].name for each in states.values())
    lines = [
        "Tables and figures of arXiv 2602.20722 (BAPO) and 2510.18927 (ac-: adaptive clipping), "
        f"and questions of this project (ladder, r1 to {last_question()}).",
        "",
        "States at small size:",
        *(f"{counts[name]:4} {name:15} {meaning}" for name, meaning in STATES.items()),
        "",
        *textwrap.wrap(describe_agreement(agreement), WIDTH),
        "",
    ]
    for name, declaration in items.items():
        lines += _describe_item(name, declaration, states[name])
    lines += [
        f"All of these at small size: about {minutes / 60:.1f} h on two idle cores, with "
        f"`--jobs 2` {minutes * TIME_OF_TWO_AT_A_TIME / 60:.1f} h. Everything: "
        "`make reproduce-small`; with as many other seeds, and as long: `make repeat-small`.",
        "One of them: `bapo reproduce NAME`; with `--size paper`, its runs for a cluster.",
        "What it claims and trains: services/reproduction/items/NAME.yaml.",
        f"Results: {len(list(results.glob('*.json')))} files in {results}.",
    ]
    return "\n".join(lines)


def _describe_item(name: str, declaration: Declaration, states: ExperimentStates) -> list[str]:
    lines = [f"{name}: {declaration.title}", *_indented("claim", declaration.claim)]
    if declaration.numbers is None:
        lines += _indented("source", declaration.source)
    else:
        lines += _indented("paper", _numbers_text(declaration.numbers))
    if declaration.needs is not None:
        lines += _indented("needs", describe_needs(declaration))
    lines += _indented("small", describe_small(declaration))
    if isinstance(declaration.paper, str):
        lines += _indented("full", declaration.paper)
    for size, state in states.declared.items():
        if size == "paper" and not state.done:
            continue
        lines += _indented("state", f"{describe_state(state)} at {size} size")
        for result in state.results:
            for line in describe_result(result):
                lines += _indented("", line)
    for label, (heading, differences) in describe_repetition(declaration, states).items():
        lines += _indented(label, heading)
        for line in differences:
            lines += _indented("", line)
    return [*lines, ""]


def list_values(items: Mapping[str, Declaration], results: Path) -> list[dict[str, Any]]:
    """Returns the list of experiments as values of JSON."""
    values = []
    for name, states in find_states(items, results).items():
        declaration, state = items[name], states.declared["small"]
        runs = plan_runs(declaration, "small")
        values.append(
            {
                "name": name,
                "title": declaration.title,
                "claim": declaration.claim,
                "state": state.name,
                "runs": state.runs,
                "done": state.done,
                "minutes": total_minutes(runs),
                "results": [describe_result(result) for result in state.results],
                "repeat": _repetition_values(states.repeat),
                "pooled": _repetition_values(states.pooled),
            }
        )
    return values


def _repetition_values(state: State) -> dict[str, Any]:
    return {
        "state": state.name,
        "done": state.done,
        "results": [describe_result(result) for result in state.results],
    }


def describe_repetition(
    declaration: Declaration, states: ExperimentStates
) -> dict[str, tuple[str, list[str]]]:
    """Says the states with other seeds alone (`again`) and with all seeds (`pooled`).

    Each has the differences that its tests are about, a line each, and with all seeds what paired
    runs decide of them, too: other seeds alone are too few for it. A state that is not judged is
    left out.
    """
    plan = declaration.plan_at("small")
    if plan is None:
        return {}
    described = {}
    for label, state, seeds in (
        ("again", states.repeat, plan.repeat_seeds),
        ("pooled", states.pooled, plan.pooled_seeds),
    ):
        if not state.is_judged:
            continue
        heading = f"{describe_state(state)} with seeds {', '.join(map(str, seeds))}"
        lines: list[str] = []
        for result in state.results:
            lines += (
                describe_check(result)
                if label == "pooled"
                else map(describe_judgement, result.judgements)
            )
        described[label] = heading, lines
    return described


def describe_needs(declaration: Declaration) -> str:
    """Says what an experiment takes at the paper's size."""
    needs = declaration.needs
    assert needs is not None
    return f"{needs.models}; {needs.data}; GPUs: {needs.gpus}; hours: {needs.hours}"


def describe_small(declaration: Declaration) -> str:
    """Says what an experiment takes at small size, or why there is none."""
    plan = declaration.plan_at("small")
    if plan is None:
        return str(declaration.small)
    runs = plan_runs(declaration, "small")
    variants = len(declaration.variants_at("small"))
    return (
        f"{plan.setup}: {variants} variants, {len(plan.seeds)} seeds, about "
        f"{total_minutes(runs):.0f} minutes on two idle cores; runs are shared between experiments"
    )


def _indented(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"  {label:7}",
        subsequent_indent=" " * 9,
        break_long_words=False,
    )


def _numbers_text(numbers: PaperNumbers) -> str:
    rows = (
        f"{label} " + " / ".join("-" if value is None else f"{value:g}" for value in row)
        for label, row in numbers.rows.items()
    )
    return f"{' / '.join(numbers.columns)}: {', '.join(rows)}. {numbers.note}".rstrip()
