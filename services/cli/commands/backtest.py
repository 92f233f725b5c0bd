"""`bapo backtest`: the batches that other data rules make of the groups of recorded runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from bapo_core.errors import BapoError
from services.cli.echo import echo
from services.cli.options import json_option
from services.cli.recorded_groups import back_test
from services.cli.service import connect
from services.cli.tables import table_console
from services.cli.variants import parse_variant, read_variants
from services.report.backtest_table import (
    CAVEAT,
    OWN_RULES,
    RunBackTest,
    Table,
    tables_of,
)


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
@click.option(
    "--page",
    is_flag=True,
    help="Also write a page with pictures and all values to `runs/NAME-backtest`; NAME is the "
    "first run.",
)
@json_option
def backtest(
    runs: Sequence[str],
    file: str | None,
    texts: Sequence[str],
    steps: str | None,
    page: bool,
    as_json: bool,
) -> None:
    """Apply other data rules to the groups of recorded runs.

    Nothing is trained or generated: the rules choose from the recorded fresh and re-evaluated
    groups, step by step, with buffers of their own. Sections that may change are fresh, reevaluate,
    hard_buffer, replay and batch. The first row has the rules of the run itself, and counts are per
    step; with several runs, rows are means over them. `signal` is the sum of mu (1 - mu) over a
    batch. Re-evaluations that a rule asks for and the run did not make are missing from its
    batches, and the last column estimates how many would have been promoted, from all responses to
    their prompts so far.

    Rules of the section sampler have a table of their own: which prompts the sampler would have
    drawn, how many of them the run rolled out, and an estimate of the others.

    \b
    Examples:
      bapo backtest countdown --rules examples/variants/rules.yaml
      bapo backtest countdown --rule 'old: replay.buffer.max_age=10' --steps 50:100
      bapo backtest seed-1 seed-2 --rules examples/variants/rules.yaml --page
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
    refuse_different_tables(found)
    for test in found:
        for warning in test.warnings():
            echo(warning, err=True)
    path = write_page(found) if page else None
    if as_json:
        echo(json.dumps([test.as_json() for test in found], indent=2))
        return
    echo(CAVEAT)
    for table in tables_of(found):
        if table.note:
            echo(table.note)
        _print_table(table)
    if path is not None:
        echo(path)


def write_page(tests: Sequence[RunBackTest]) -> Path:
    """Writes the page of a back-test beside the reports of its runs; returns its path."""
    from services.cli.local_run import REPORTS
    from services.report.backtest_page import write_backtest  # imports matplotlib

    return write_backtest(tests, REPORTS / f"{tests[0].run}-backtest")


def refuse_different_tables(found: Sequence[RunBackTest]) -> None:
    """Raises `BapoError` if a rule changes the sampler of one run, and not of another one."""
    first = found[0]
    for test in found[1:]:
        labels = {*first.samplers} ^ {*test.samplers}
        for label in sorted(labels - {OWN_RULES}):
            one, other = (first, test) if label in first.samplers else (test, first)
            raise BapoError(
                f"{label}: the rule changes the sampler of run {one.run!r}, and not of run "
                f"{other.run!r}, so there is no mean over them; back-test these runs one by one"
            )


def parse_steps(text: str | None) -> tuple[int, int | None]:
    """Returns the first and the last step of FIRST:LAST, either of which may be left out.

    Raises `BapoError` for anything else.
    """
    if text is None:
        return 1, None
    first, colon, last = text.partition(":")
    if not colon or not all(part.isdecimal() or not part for part in (first, last)):
        raise BapoError(f"--steps {text}: write FIRST:LAST, for example 50:100")
    of_steps = int(first or 1), int(last) if last else None
    if of_steps[0] < 1 or (of_steps[1] is not None and of_steps[1] < of_steps[0]):
        raise BapoError(
            f"--steps {text}: no step is in this range; steps count from 1, and the first is not "
            "after the last"
        )
    return of_steps


def _print_table(table: Table) -> None:
    from rich.table import Table as RichTable

    shown = RichTable("rules", box=None, header_style="bold", pad_edge=False)
    for heading in table.headings:
        shown.add_column(heading, justify="right")
    for label, cells in table.rows.items():
        shown.add_row(label, *cells)
    table_console().print(shown)
