"""`bapo compare`: trains several variants with several seeds, and compares them on one page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING

import click
from rich.console import Console

from services.buffer.api.client import BufferClient
from services.cli.console import plain_console
from services.cli.echo import echo
from services.cli.local_run import REPORTS
from services.cli.options import ConfigArguments, config_arguments, jobs_option, port_option
from services.cli.shared_runs import EndedRun, share_cores, train_runs
from services.cli.variants import (
    PlannedRun,
    Variant,
    algorithm_variants,
    parse_variant,
    plan_forks,
    plan_runs,
    read_variants,
)
from services.common.process import stop_on_signals
from services.stack.settings import default_home
from services.stack.stack import find_or_start_stack

if TYPE_CHECKING:
    from services.report.comparison import RunResult

DEFAULT_ALGORITHMS = "bapo,grpo,dapo"
PROMPTS = 500
"""Held-out prompts that a comparison should have: fewer stand badly for others like them."""


@click.command
@config_arguments
@click.option(
    "--algorithms",
    metavar="LIST",
    help=f"Algorithms to compare, separated by commas, or `all` of them: {DEFAULT_ALGORITHMS} "
    "unless variants are given.",
)
@click.option(
    "--variant",
    "variant_texts",
    multiple=True,
    metavar="'LABEL: KEY=VALUE ...'",
    help="A variant to compare: its label, and the keys that it changes. Repeat it for more.",
)
@click.option(
    "--variants",
    "variants_file",
    type=click.Path(),
    metavar="FILE",
    help="A YAML file of variants: labels, and under each the keys that it changes.",
)
@click.option("--seeds", default="1,2,3", metavar="LIST", help="Seeds, separated by commas.")
@click.option(
    "--fork-of",
    metavar="RUN",
    help="Fork all variants from this run, in place of training each from its first step.",
)
@click.option(
    "--at",
    type=click.IntRange(min=0),
    metavar="STEP",
    help="With --fork-of: their last common step.",
)
@port_option
@jobs_option
def compare(
    config: ConfigArguments,
    algorithms: str | None,
    variant_texts: tuple[str, ...],
    variants_file: str | None,
    seeds: str,
    fork_of: str | None,
    at: int | None,
    port: int,
    jobs: int,
) -> None:
    """Train several variants and compare them.

    Each is trained with several seeds. A variant is an algorithm, or any set of keys under a label.
    Everything else is the same for all: what the file and the command line set. The runs follow
    one another, with `--jobs 2` two at a time. One that is finished with exactly this configuration
    is not trained again, and one that was interrupted goes on. The page with the comparison is
    written to `runs/NAME-comparison` after each run.

    It states which differences this many seeds decide, at equal steps and at equal generated
    tokens, and gives each variant the places that its runs leave open: two variants whose
    difference is not decided share them. With one seed there are no places.

    \b
    Examples:
      bapo compare examples/countdown.yaml
      bapo compare examples/countdown.yaml steps=25 --algorithms bapo,grpo --seeds 1
      bapo compare examples/countdown.yaml --algorithms all --seeds 1
      bapo compare examples/countdown.yaml --variant 'v5:' --variant 'v10: sync.every=10'
      bapo compare --fork-of countdown --at 60 --algorithms bapo,grpo --seeds 1,2
    """
    if (fork_of is None) != (at is None):
        raise click.UsageError("--fork-of and --at belong together; give both.")
    if fork_of is not None and config.file is not None:
        raise click.UsageError(
            "forks have the configuration of the run that --fork-of names; leave the file out, and "
            "give KEY=VALUE for what all variants change."
        )
    try:
        numbers = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise click.BadParameter(f"{seeds!r} are not whole numbers", param_hint="--seeds") from None
    stop_on_signals("stopping; the same command continues")
    share_cores(jobs)
    variants = _variants(algorithms, variant_texts, variants_file)
    console, home = plain_console(), default_home()

    def compare_runs(runs: Sequence[PlannedRun], name: str) -> None:
        for warning in [*_list_warnings(runs), *_warn_of_few_prompts(runs)]:
            console.print(f"note: {warning}", soft_wrap=True)
        directory = REPORTS / f"{name}-comparison"
        page = train_and_compare(
            runs, directory=directory, home=home, console=console, port=port, jobs=jobs
        )
        echo(page)

    if fork_of is None or at is None:
        runs = plan_runs(config.file, config.overrides, variants, numbers)
        compare_runs(runs, config.load().name)
        return
    with find_or_start_stack(home, port) as endpoints:
        client = BufferClient(endpoints.buffer_url, endpoints.token, run=fork_of)
        runs = plan_forks(client.run_state(), at, config.overrides, variants, numbers)
        compare_runs(runs, f"{fork_of}-{at}")


def _variants(algorithms: str | None, texts: Sequence[str], file: str | None) -> list[Variant]:
    if algorithms is None and not texts and file is None:
        algorithms = DEFAULT_ALGORITHMS
    return [
        *(algorithm_variants(algorithms) if algorithms else ()),
        *(read_variants(file) if file else ()),
        *map(parse_variant, texts),
    ]


def _list_warnings(runs: Sequence[PlannedRun]) -> list[str]:
    """Returns each warning about the configurations once, with the variants that it is about
    unless it is about all of them."""
    labels = list(dict.fromkeys(planned.label for planned in runs))
    warned: dict[str, list[str]] = {}
    for planned in runs:
        for warning in planned.config.warnings():
            warned.setdefault(warning, []).append(planned.label)
    return [
        warning if set(of) == set(labels) else f"{', '.join(dict.fromkeys(of))}: {warning}"
        for warning, of in warned.items()
    ]


def _warn_of_few_prompts(runs: Sequence[PlannedRun]) -> Iterator[str]:
    """Yields a warning if the variants are evaluated on fewer held-out prompts than `PROMPTS`."""
    configs = [planned.config for planned in runs]
    fewest = min(config.evaluation_sets[config.primary_set].prompts for config in configs)
    if fewest < PROMPTS:
        # An accuracy of 0.5, with prompts that are always solved or never, varies most.
        quantile = NormalDist().inv_cdf(0.975)
        interval, narrower = (quantile * 0.5 / math.sqrt(count) for count in (fewest, PROMPTS))
        yield (
            f"evaluations have at most {fewest} held-out prompts: on other prompts like them an "
            f"accuracy differs by up to ± {interval:.3f} (95%), and with task.test_prompts="
            f"{PROMPTS}, if the task has as many, by up to ± {narrower:.3f}"
        )


def train_and_compare(
    runs: Sequence[PlannedRun],
    *,
    directory: Path,
    home: Path,
    console: Console,
    port: int,
    jobs: int = 1,
) -> Path:
    """Trains the runs that are not finished; returns the page that compares them all.

    directory: where the page is written, anew after each run. jobs: as in `train_runs`.

    Raises `BapoError` when a run fails.
    """
    from services.report.comparison import write_comparison  # imports matplotlib

    ended: list[EndedRun] = []
    results: list[RunResult] = []
    training = train_runs(runs, home=home, console=console, port=port, jobs=jobs)
    with closing(training):
        for run in training:
            if run.error is not None:
                raise run.error
            ended.append(run)
            if run.was_trained or len(ended) == len(runs):
                # A comparison can take hours. The page of the finished runs exists while the others
                # are trained, and stays if the command is stopped or a run fails.
                results = _in_order(ended, runs)
                page = write_comparison(results, directory)
                console.print(f"{len(results)} of {len(runs)} runs compared: {page}")
    _print_table(results, console)
    return page


def _in_order(ended: Sequence[EndedRun], runs: Sequence[PlannedRun]) -> list[RunResult]:
    """Returns the results of runs in the order in which the runs were planned."""
    by_name = {run.planned.config.name: run.result for run in ended}
    found = [by_name.get(planned.config.name) for planned in runs]
    return [result for result in found if result is not None]


def _print_table(results: Sequence[RunResult], console: Console) -> None:
    from services.report.comparison import (  # imports matplotlib
        comparison_table,
        decide,
        explain_decision,
        explained_scores_of,
        group_by_label,
        show_places,
    )

    variants = group_by_label(results)
    width = max(map(len, variants))
    scores = explained_scores_of(results)
    decisions = decide(variants, [score for score, _ in scores])
    for score, best in scores:
        table = comparison_table(variants, [score, best])
        decision = decisions[score.name]
        heading = f"{score.name}, the mean of the last evaluations, and best checkpoint:"
        console.print(heading, soft_wrap=True)
        for label, runs in variants.items():
            spread = table[label][score.name]
            console.print(
                f"{label:{width}}  {spread['mean']:.3f} (lowest {spread['lowest']:.3f}, highest "
                f"{spread['highest']:.3f}, of {len(runs)} seeds), best "
                f"{table[label][best.name]['mean']:.3f}, place {show_places(decision, label)}",
                soft_wrap=True,
            )
        if decision is not None:
            console.print(explain_decision(decision), soft_wrap=True)
    if not any(decisions.values()):
        console.print(explain_decision(None), soft_wrap=True)
