"""`bapo reproduce`: runs the experiments that answer what the papers claim, and lists them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bapo_core.errors import BapoError
from services.cli.console import plain_console
from services.cli.echo import echo
from services.cli.local_run import REPORTS
from services.cli.options import jobs_option, json_option, port_option
from services.common.process import stop_on_signals
from services.reproduction.declarations import SIZES, Declaration, Size, find_items
from services.reproduction.listing import list_values, render_list
from services.reproduction.plans import DeclaredRun, plan_runs, total_minutes
from services.reproduction.records import (
    RESULTS,
    read_records,
    record_run,
    unknown_files,
    write_record,
)
from services.reproduction.states import describe_result, describe_state, find_state, read_labelled
from services.stack.settings import default_home

if TYPE_CHECKING:
    from rich.console import Console

FAILURES_IN_A_ROW = 2
"""Failed runs after which the command ends: what they fail of is not their own."""


@click.command
@click.argument(
    "names",
    nargs=-1,
    metavar="[NAME]...",
    help="Experiments, such as fig6 or ladder; the path of a declaration of your own; or `all`.",
)
@click.option("--list", "listed", is_flag=True, help="List the experiments and their states.")
@click.option("--size", type=click.Choice(SIZES), default="small", help="Size of the experiment.")
@click.option(
    "--seeds", metavar="LIST", help="Seeds in place of the declared ones, separated by commas."
)
@click.option(
    "--repeat",
    is_flag=True,
    help="Repeat with as many other seeds, which follow on the declared ones.",
)
@click.option(
    "--results",
    type=click.Path(path_type=Path, file_okay=False),
    default=RESULTS,
    metavar="DIRECTORY",
    help="Directory with the result of each run.",
)
@json_option
@port_option
@jobs_option
def reproduce(
    names: tuple[str, ...],
    listed: bool,
    size: Size,
    seeds: str | None,
    repeat: bool,
    results: Path,
    as_json: bool,
    port: int,
    jobs: int,
) -> None:
    """Run experiments of the papers, and judge what they claim.

    An experiment is a table or a figure of a paper, or a question of this project: variants that
    are trained with several seeds, and tests that decide its claim. `--list` shows each with its
    claim, what it needs, and its state: it holds, it does not hold, it is not decided, or it was
    not run.

    At small size, what is missing is trained on this machine, with `--jobs 2` two runs at a time.
    The same command goes on where it was stopped. The result of each run is a file in `--results`,
    written when the run ends; experiments that need the same run share it. When all runs of an
    experiment have results, its claim is judged by their resolution, as `bapo compare` does, and
    `runs/reproduce-NAME/NAME.html` draws them beside the paper's numbers. `--repeat` does the same
    with as many other seeds, which judge the claim once more; `--list` shows this state and the one
    of all seeds together.

    At the paper's size, configurations and the commands that submit them to Kubeflow are written to
    `runs/reproduce-NAME-paper`; nothing is trained. With `BAPO_BUFFER_URL` and `BAPO_TOKEN`, the
    same command reads the results of the runs that have finished there.

    \b
    Examples:
      bapo reproduce --list
      bapo reproduce --list fig6 r5
      bapo reproduce ladder --jobs 2
      bapo reproduce fig6 --repeat --jobs 2
      bapo reproduce table1b --size paper
    """
    if not names and not listed:
        raise click.UsageError(
            "name an experiment, or `all` of them; `bapo reproduce --list` shows them"
        )
    chosen = _parse_seeds(seeds)
    if chosen is not None and repeat:
        raise click.UsageError("--repeat chooses the seeds; give it or --seeds, not both")
    if listed and (chosen is not None or repeat):
        raise click.UsageError(
            "--list shows the states with the declared seeds, of the repetitions, and with all of "
            "these seeds; leave --seeds and --repeat out"
        )
    items = find_items(names)
    if listed:
        echo(json.dumps(list_values(items, results)) if as_json else render_list(items, results))
        _warn_of_unknown_files(names, items, results)
        return
    suffix = ""
    if chosen is not None:
        items = {name: each.with_seeds(chosen) for name, each in items.items()}
        suffix = f"-seeds-{'-'.join(map(str, chosen))}"
    elif repeat:
        items = {name: each.repeated() for name, each in items.items()}
        suffix = "-repeat"
    for name, declaration in items.items():
        _refuse_missing_size(name, declaration, size, several=len(items) > 1)
    if size == "paper":
        _run_on_a_cluster(items, suffix, results, plain_console())
        return
    stop_on_signals("stopping; the same command continues")
    _run_small(items, suffix, results, plain_console(), port, jobs)


def _parse_seeds(seeds: str | None) -> list[int] | None:
    if seeds is None:
        return None
    try:
        numbers = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise click.BadParameter(f"{seeds!r} are not whole numbers", param_hint="--seeds") from None
    if len(set(numbers)) < len(numbers):
        raise click.BadParameter(
            f"{seeds!r} has a seed twice; give each once", param_hint="--seeds"
        )
    return numbers


def _refuse_missing_size(name: str, declaration: Declaration, size: Size, *, several: bool) -> None:
    """Raises `BapoError` for an experiment without this size, unless it is one of several."""
    if declaration.plan_at(size) is None and not several:
        reason = declaration.small if size == "small" else declaration.paper
        raise BapoError(f"{name} has no experiment at {size} size: {reason}")


def _warn_of_unknown_files(
    names: Sequence[str], items: Mapping[str, Declaration], results: Path
) -> None:
    """Says which results no declaration asks for, once all declarations are known."""
    if names:
        return
    declared = [
        run
        for each in items.values()
        for declaration in (each, each.repeated())
        for size in SIZES
        for run in plan_runs(declaration, size)
    ]
    unknown = unknown_files(declared, results)
    if unknown:
        echo(
            f"note: {len(unknown)} files of {results} belong to no declared run, such as "
            f"{unknown[0].name}: their declarations have changed; remove them",
            err=True,
        )


# -- small size


def _run_small(
    items: Mapping[str, Declaration],
    suffix: str,
    results: Path,
    console: Console,
    port: int,
    jobs: int,
) -> None:
    """Trains the runs without results, and judges each experiment when its runs have them."""
    from services.cli.shared_runs import share_cores, train_runs
    from services.cli.variants import PlannedRun

    declared = {
        run.name: run for declaration in items.values() for run in plan_runs(declaration, "small")
    }
    missing = {
        name: run for name, run in declared.items() if name not in read_records([run], results)
    }
    console.print(
        f"{len(declared) - len(missing)} of {len(declared)} runs have results; the others take "
        f"about {total_minutes(missing.values()):.0f} min on two idle cores, one at a time",
        soft_wrap=True,
    )
    finished = _finish(items, suffix, "small", set(), results, console)
    if not missing:
        return
    share_cores(jobs)
    failed: list[str] = []
    in_a_row = 0
    planned = [PlannedRun(run.label, run.config()) for run in missing.values()]
    training = train_runs(planned, home=default_home(), console=console, port=port, jobs=jobs)
    with closing(training):
        for ended in training:
            run, error = missing[ended.planned.config.name], ended.error
            if error is not None or ended.result is None:
                # One run that fails must not keep an unattended night of others from being trained.
                in_a_row += 1
                failed.append(run.name)
                console.print(
                    f"{run.name} ({run.label}) failed: {error}", soft_wrap=True, markup=False
                )
                if in_a_row == FAILURES_IN_A_ROW:
                    raise BapoError(
                        f"{in_a_row} runs in a row failed, the last one with: {error}; the same "
                        "command continues"
                    ) from error
                continue
            in_a_row = 0
            path = write_record(record_run(run, ended.result), results)
            console.print(f"result: {path}", soft_wrap=True)
            finished = _finish(items, suffix, "small", finished, results, console)
    if failed:
        raise BapoError(f"runs without a result, because they failed: {', '.join(failed)}")


def _finish(
    items: Mapping[str, Declaration],
    suffix: str,
    size: Size,
    finished: set[str],
    results: Path,
    console: Console,
) -> set[str]:
    """Prints the states of experiments whose runs all have results, and writes their pages.

    suffix: ends the names of the pages' directories; pages with other seeds are kept apart.
    finished: names of experiments that are left as they are. Returns them with the names that were
    added.
    """
    from services.reproduction.page import write_page  # imports matplotlib

    for name, declaration in items.items():
        if name in finished:
            continue
        state = find_state(declaration, size, results)
        if not state.is_judged:
            continue
        path = REPORTS / f"reproduce-{name}{suffix}" / f"{name}.html"
        records = read_labelled(declaration, size, results)
        write_page(name, declaration, size, records, state, path)
        console.print(f"{name}: {declaration.claim}", soft_wrap=True, markup=False)
        console.print(f"{name}: {describe_state(state)}", soft_wrap=True)
        for result in state.results:
            for line in describe_result(result):
                console.print(f"  {line}", soft_wrap=True, markup=False)
        console.print(f"page: {path}", soft_wrap=True)
        finished = finished | {name}
    return finished


# -- the paper's size


def _run_on_a_cluster(
    items: Mapping[str, Declaration],
    suffix: str,
    results: Path,
    console: Console,
) -> None:
    """Keeps the results of runs that have finished, judges, and writes what is left to submit."""
    for name, declaration in items.items():
        runs = plan_runs(declaration, "paper")
        _collect([run for run in runs if run.name not in read_records([run], results)], results)
        missing = [run for run in runs if run.name not in read_records([run], results)]
        if missing:
            console.print(
                f"{name}: {len(runs) - len(missing)} of {len(runs)} runs have results; the others "
                f"are submitted by {_write_cluster_runs(name, declaration, missing)}",
                soft_wrap=True,
            )
    _finish(items, suffix, "paper", set(), results, console)


def _collect(runs: Sequence[DeclaredRun], results: Path) -> None:
    """Keeps the results of those runs that have finished at the service of the environment."""
    from services.cli.service import connect_to_named

    service = connect_to_named("")
    if service is None or not runs:
        return
    from services.report.comparison import RunResult  # imports matplotlib

    finished = {state.name for state in service.runs() if state.status == "finished"}
    for run in runs:
        client = connect_to_named(run.name) if run.name in finished else None
        if client is not None:
            write_record(record_run(run, RunResult.read(client, run.label)), results)


def _write_cluster_runs(name: str, declaration: Declaration, runs: Sequence[DeclaredRun]) -> Path:
    """Writes the configuration of each run, and a script that submits all of them.

    Each is read back through the loader of configurations and as the parameters of the pipeline.
    """
    import yaml

    from bapo_core.config import config_from, merge
    from pipelines.parameters import parameters_of
    from services.reproduction.declarations import read_setup

    plan = declaration.plan_at("paper")
    assert plan is not None
    directory = REPORTS / f"reproduce-{name}-paper"
    directory.mkdir(parents=True, exist_ok=True)
    lines = [
        "#!/bin/sh",
        f"# {declaration.title}",
        f"# {declaration.claim}",
        "# Submits each run to Kubeflow: sh submit.sh --namespace TEAM",
        "set -e",
        'cd "$(dirname "$0")"',
    ]
    for run in runs:
        config = run.config()
        values = {"name": run.name, "seed": run.seed, **merge(read_setup(run.setup), run.changes)}
        path = directory / f"{run.name}.yaml"
        text = yaml.safe_dump(values, sort_keys=False)
        path.write_text(f"# {run.label}, seed {run.seed}\n{text}", encoding="utf-8")
        if config_from(yaml.safe_load(text), where=str(path)) != config:
            raise BapoError(f"{path}: is another configuration than the declared one; report this")
        arguments = [f"{key}={value}" for key, value in plan.pipeline.items()]
        parameters_of(str(path), arguments)
        lines.append(f'bapo pipeline submit {path.name} {" ".join(arguments)} "$@"')
    script = directory / "submit.sh"
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return script
