"""`bapo backtest`: the batches that other data rules make of the groups of recorded runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import click

from bapo_core.backtest import BackTestResult
from bapo_core.errors import BapoError
from services.cli.echo import echo
from services.cli.options import json_option
from services.cli.recorded_groups import RunBackTest, back_test
from services.cli.service import connect
from services.cli.tables import table_console
from services.cli.variants import parse_variant, read_variants

CAVEAT = (
    "The recorded policy answered: these figures say what a rule would have trained on, not what "
    "it would have learned. How well they predict that has not been measured."
)
COLUMNS: dict[str, Callable[[BackTestResult], tuple[float, str]]] = {
    "fresh": lambda result: (result.fresh / result.steps, ".1f"),
    "re-evaluated": lambda result: (result.reevaluated / result.steps, ".1f"),
    "replayed": lambda result: (result.replayed / result.steps, ".1f"),
    "full": lambda result: (result.fill, ".0%"),
    "no signal": lambda result: (result.no_signal, ".1%"),
    "signal": lambda result: (result.signal_per_step, ".2f"),
    "policy age": lambda result: (result.policy_age, ".1f"),
    "replay age": lambda result: (result.replay_age, ".1f"),
    "trained before": lambda result: (result.trained_before, ".0%"),
    "rollouts": lambda result: (result.rollouts / result.steps, ".0f"),
    "missing": lambda result: (result.missing / result.steps, ".1f"),
    "of these promoted": lambda result: (result.missing_promoted / result.steps, ".1f"),
}
"""Values of the table by heading, and how each is printed; counts are per step."""


@click.command
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", help="Names of the runs.")
@click.option(
    "--rules",
    "file",
    type=click.Path(),
    metavar="FILE",
    help="A YAML file of rules: labels, and under each the keys that it changes.",
)
@click.option(
    "--rule",
    "texts",
    multiple=True,
    metavar="'LABEL: KEY=VALUE ...'",
    help="A rule: its label, and the keys that it changes. Repeat it for more.",
)
@click.option(
    "--steps", metavar="FIRST:LAST", help="The steps that are counted; by default all committed."
)
@json_option
def backtest(
    runs: Sequence[str], file: str | None, texts: Sequence[str], steps: str | None, as_json: bool
) -> None:
    """Apply other data rules to the groups of recorded runs.

    Nothing is trained or generated: the rules choose from the recorded fresh and re-evaluated
    groups, step by step, with buffers of their own. Sections that may change are fresh, reevaluate,
    hard_buffer, replay and batch. The first row has the rules of the run itself, and counts are per
    step; with several runs, rows are means over them. `signal` is the sum of mu (1 - mu) over a
    batch. Re-evaluations that a rule asks for and the run did not make are missing from its
    batches, and the last column estimates how many would have been promoted, from all responses to
    their prompts so far.

    \b
    Examples:
      bapo backtest countdown --rules examples/variants/rules.yaml
      bapo backtest countdown --rule 'old: replay.buffer.max_age=10' --steps 50:100
      bapo backtest seed-1 seed-2 --rules examples/variants/rules.yaml --json
    """
    variants = [*(read_variants(file) if file else ()), *map(parse_variant, texts)]
    if not variants:
        raise click.UsageError(
            "there is no rule to test; give --rules FILE (examples/variants/rules.yaml has many) "
            "or --rule 'LABEL: KEY=VALUE ...'"
        )
    first, last = parse_steps(steps)
    where = file or "--rule"
    found = [back_test(connect(run), variants, first=first, last=last, where=where) for run in runs]
    for test in found:
        if test.first_difference is not None:
            echo(
                f"{test.run}: the batch of step {test.first_difference} by the run's own rules is "
                "not the recorded one, so another version of the rules composed it",
                err=True,
            )
    if as_json:
        echo(json.dumps([_values(test) for test in found], indent=2))
        return
    echo(CAVEAT)
    _print_table(found)


def parse_steps(text: str | None) -> tuple[int, int | None]:
    """Returns the first and the last step of FIRST:LAST, either of which may be left out.

    Raises `BapoError` for anything else.
    """
    if text is None:
        return 1, None
    first, colon, last = text.partition(":")
    if not colon or not all(part.isdecimal() or not part for part in (first, last)):
        raise BapoError(f"--steps {text}: write FIRST:LAST, for example 50:100")
    return int(first or 1), int(last) if last else None


def _values(test: RunBackTest) -> dict[str, Any]:
    return {
        "run": test.run,
        "last_step": test.last_step,
        "reproduces_recorded_batches": test.first_difference is None,
        "first_difference": test.first_difference,
        "rules": {label: asdict(result) for label, result in test.results.items()},
    }


def _print_table(found: Sequence[RunBackTest]) -> None:
    from rich.table import Table

    table = Table("rules", box=None, header_style="bold", pad_edge=False)
    for heading in COLUMNS:
        table.add_column(heading, justify="right")
    for label in found[0].results:
        cells = []
        for column in COLUMNS.values():
            values = [column(test.results[label]) for test in found]
            cells.append(format(statistics.fmean(value for value, _ in values), values[0][1]))
        table.add_row(label, *cells)
    table_console().print(table)
