"""Renders docs/choosing-a-method.md, whose tables have what the runs decide of each statement."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from pydantic import TypeAdapter

from bapo_core.claims import Judgement
from bapo_core.config import read_values
from services.reproduction.declarations import Cost, Declaration, Test, read_items
from services.reproduction.plans import plan_runs
from services.reproduction.records import RESULTS
from services.reproduction.states import TestResult, judge_test, measure_runs, read_labelled

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = Path(__file__).with_suffix(".md")
STATEMENTS = Path(__file__).with_suffix(".yaml")
HEADS = ("statement", "at equal", "declared seeds", "other seeds", "all seeds")
COSTS: dict[Cost, str] = {
    "training steps": "steps",
    "training responses": "rollouts",
    "generated tokens": "tokens",
    "seconds of the trainer": "seconds",
}


class Statement(Test):
    """A sentence about variants of an experiment, and the differences that decide it."""

    text: str
    experiment: str
    """Name of the experiment whose runs it is about."""


def read_statements() -> dict[str, list[Statement]]:
    """Returns the statements of each table. Raises `pydantic.ValidationError`."""
    return TypeAdapter(dict[str, list[Statement]]).validate_python(read_values(STATEMENTS))


def render() -> str:
    """Returns the page, from the statements and the committed results."""
    items, results = read_items(), ROOT / RESULTS
    page = TEMPLATE.read_text(encoding="utf-8")
    for name, statements in read_statements().items():
        page = page.replace(f"{{{name}}}", render_table(statements, items, results))
    return page.replace("{rollouts}", f"{_rollouts_of_dapo(items['fig9'], results):.1f}")


def render_table(
    statements: Sequence[Statement], items: Mapping[str, Declaration], results: Path
) -> str:
    """Returns a table with a row for each statement.

    Raises `ValueError` if the declared seeds decide the opposite of a statement.
    """
    rows = [list(HEADS), ["---"] * len(HEADS)]
    rows += [_row(each, items[each.experiment], results) for each in statements]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _row(statement: Statement, item: Declaration, results: Path) -> list[str]:
    declared, again, pooled = (
        judge_statement(statement, each, results) for each in (item, item.repeated(), item.pooled())
    )
    if declared and any(each.verdict == "does not hold" for each in declared.judgements):
        raise ValueError(f"{statement.text!r}: the declared seeds decide the opposite; reword it")
    name, *_ = re.split(r":| of 2", item.title)
    source = f"[{name.replace('The ', 'the ')}](reproduction.md#{statement.experiment})"
    cells = [describe_decisions(each.judgements) if each else "" for each in (declared, again)]
    cells.append(describe_decisions(pooled.judgements, pooled.paired) if pooled else "")
    return [f"{statement.text} ({source})", COSTS[statement.at], *cells]


def judge_statement(
    statement: Statement, declaration: Declaration, results: Path
) -> TestResult | None:
    """Returns what the runs of an experiment decide of a statement; None if runs are missing."""
    records = read_labelled(declaration, "small", results)
    if len(records) < len(plan_runs(declaration, "small")):
        return None
    return judge_test(statement, records)


def describe_decisions(judgements: Sequence[Judgement], paired: Sequence[Judgement] = ()) -> str:
    """Says which differences are decided, such as `yes: 0.089, 0.165 (± 0.073)`.

    If only some of them are, each has its own word: `0.120 yes, 0.032 no (± 0.040)`.

    paired: what paired runs decide of the same differences; it is said which they leave open.
    """
    words = {"holds": "yes", "not decided": "no", "does not hold": "the opposite"}
    said = [words[each.verdict] for each in judgements]
    numbers = [f"{each.difference:.3f}".replace("-", "−") for each in judgements]
    if len(set(said)) == 1:
        listed = f"{said[0]}: {', '.join(numbers)}"
    else:
        listed = ", ".join(f"{number} {word}" for number, word in zip(numbers, said, strict=True))
    left_open = [
        number
        for number, each, check in zip(numbers, judgements, paired, strict=False)
        if each.verdict != "not decided" and check.verdict == "not decided"
    ]
    without = f"; {', '.join(left_open)} open by paired runs" if left_open else ""
    return f"{listed} (± {max(each.threshold for each in judgements):.3f}{without})"


def _rollouts_of_dapo(figure: Declaration, results: Path) -> float:
    """Returns how many times as many responses DAPO generates as BAPO, in Figure 9's runs."""
    found = measure_runs("rollouts", "training steps", read_labelled(figure, "small", results))
    dapo, bapo = (
        mean(each.value for each in found if each.variant == variant)
        for variant in ("dapo", "bapo")
    )
    return dapo / bapo
