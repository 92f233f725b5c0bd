"""`bapo evaluations`: the scores of a run on its evaluation sets."""

from __future__ import annotations

from itertools import zip_longest

import click

from services.cli.options import json_option, run_argument
from services.cli.service import connect
from services.cli.tables import print_json, show


@click.command
@run_argument
@click.option("--set", "evaluation_set", metavar="NAME", help="Show every version on this set.")
@json_option
def evaluations(run: str, evaluation_set: str | None, as_json: bool) -> None:
    """Show the scores of a run on its evaluation sets.

    Prints mean@n, pass@n and maj@n with 95% confidence intervals, and the accuracy bins: of the
    last evaluation on every set, or of all evaluations on one set.

    \b
    Examples:
      bapo evaluations countdown
      bapo evaluations countdown --set cd-4
    """
    from services.report.scores import COLUMNS, score_rows

    client = connect(run)
    empty = f"run {run!r} was not evaluated yet"
    if evaluation_set is not None:
        evaluations = client.evaluations(evaluation_set)
        rows = [[row.version, *score_rows([row])[0][1:]] for row in evaluations]
        show(evaluations, ["version", *COLUMNS[1:]], rows, as_json=as_json, empty=empty)
        return
    sets = client.evaluation_sets()
    if as_json:
        print_json(sets)
        return
    last = [view.evaluations[-1] for view in sets if view.evaluations]
    versions = [row.version for row in last]
    # The averages of several sets, which come last, have no version.
    rows = [
        [*row, version] for row, version in zip_longest(score_rows(last), versions, fillvalue="")
    ]
    show(sets, [*COLUMNS, "version"], rows, as_json=False, empty=empty)
