"""Fills the tables of README.md that have results of experiments."""

from __future__ import annotations

from pathlib import Path

from services.reproduction.declarations import Declaration, find_items
from services.reproduction.records import RESULTS
from services.reproduction.states import find_state, read_labelled
from services.reproduction.tables import DECIDED_ABOVE, tabulate

ROOT = Path(__file__).resolve().parents[2]
PRESET = "replays of the last 256 mixed groups"
"""The variant of the experiments that is `algorithm=bapo_on_policy`."""
EVIDENCE = {
    "r19": "sorting digits ([R19](docs/reproduction.md#r19))",
    "r20": "each digit once ([R20](docs/reproduction.md#r20))",
    "r18": "Countdown ([R18](docs/reproduction.md#r18))",
}
"""Heads of the columns of the first table, by their experiments."""


def render() -> str:
    """Returns README.md with the tables by the committed results."""
    results = ROOT / RESULTS
    ladder = find_evidence("ladder", results)
    heads, rows = tabulate(ladder, read_labelled(ladder, "small", results))
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    page = fill(page, "preset", preset_table(results))
    return fill(page, "ladder", [heads, ["---"] * len(heads), *rows])


def fill(page: str, name: str, rows: list[list[str]]) -> str:
    """Returns the page with other rows between the marks `<!-- name -->` and `<!-- /name -->`.

    Raises `ValueError` if the page lacks one of the marks.
    """
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    before, after = page.index(start) + len(start), page.index(end)
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in rows)
    return page[:before] + table + page[after:]


def preset_table(results: Path) -> list[list[str]]:
    """Returns the table of the preset and its baselines: a column for each task.

    Two rows below the variants have the resolution of each column and its number of seeds.
    """
    rows: dict[str, list[str]] = {}
    seeds = ["seeds"]
    for column, name in enumerate(EVIDENCE):
        item = find_evidence(name, results)
        heads, cells = tabulate(item, read_labelled(item, "small", results))
        accuracy = heads.index("accuracy at equal generated tokens")
        for label, *values in cells:
            row = rows.setdefault(label, ["not run"] * len(EVIDENCE))
            row[column] = values[accuracy - 1]
        plan = item.plan_at("small")
        assert plan is not None
        seeds.append(str(len(plan.seeds)))
    preset = ["`bapo_on_policy`", *rows.pop(PRESET)]
    smallest = [DECIDED_ABOVE, *rows.pop(DECIDED_ABOVE)]
    head = ["held-out accuracy at equal generated tokens", *EVIDENCE.values()]
    variants = [[label, *cells] for label, cells in rows.items()]
    return [head, ["---"] * len(head), *variants, preset, smallest, seeds]


def find_evidence(name: str, results: Path) -> Declaration:
    """Returns an experiment with all of its seeds if its repetition is complete."""
    (item,) = find_items([name]).values()
    pooled = item.pooled()
    return pooled if find_state(pooled, "small", results).is_judged else item
