"""`bapo prompts` and `bapo prompt`: what a run has recorded about its training prompts."""

from __future__ import annotations

from typing import get_args

import click

from services.buffer.api import wire
from services.cli.options import json_option, limit_option, refuse_options, run_argument
from services.cli.service import connect
from services.cli.tables import show, take, take_last


@click.command
@run_argument
@limit_option
@json_option
@click.option("--bin", type=int, help="Only prompts with this many correct at the last attempt.")
@click.option(
    "--trend",
    type=click.Choice(get_args(wire.Trend)),
    help="Only prompts that changed so since the first attempt.",
)
@click.option(
    "--unlocked-after", type=int, metavar="STEP", help="Only prompts first solved after this step."
)
@click.option(
    "--unlocked-until", type=int, metavar="STEP", help="Only prompts first solved by this step."
)
@click.option("--search", metavar="TEXT", help="Only prompts with this text in uid or payload.")
@click.option(
    "--order",
    type=click.Choice(get_args(wire.Order)),
    help="Order of the prompts; `unlocked` with --unlocked-..., else `stored`, unless given.",
)
def prompts(
    run: str,
    limit: int,
    as_json: bool,
    bin: int | None,
    trend: str | None,
    unlocked_after: int | None,
    unlocked_until: int | None,
    search: str | None,
    order: str | None,
) -> None:
    """List training prompts by difficulty.

    First, last and best are the shares of correct responses in the first, last and best attempt.

    \b
    Examples:
      bapo prompts countdown --order hardest
      bapo prompts countdown --unlocked-after 100 --json
      bapo prompts countdown --trend forgotten --limit 10
    """
    matching = connect(run).all_prompts(
        bin=bin,
        trend=trend,
        unlocked_after=unlocked_after,
        unlocked_until=unlocked_until,
        search=search,
        order=order,
    )
    listed = take(matching, limit)
    rows = [
        (
            prompt.uid,
            prompt.attempts,
            f"{prompt.first_mean:.3f}",
            f"{prompt.last_mean:.3f}",
            f"{prompt.best_mean:.3f}",
            "-" if prompt.first_solved_step is None else prompt.first_solved_step,
            prompt.last_step,
        )
        for prompt in listed
    ]
    columns = ["prompt", "attempts", "first", "last", "best", "first solved", "last step"]
    empty = f"no prompt of run {run!r} was attempted yet, or none is selected"
    show(listed, columns, rows, as_json=as_json, empty=empty)


@click.command
@run_argument
@click.argument("uid", help="Name of the prompt, as `bapo prompts` shows it.")
@limit_option
@json_option
@click.option("--step", type=int, help="Explain why it is, or is not, in the batch of this step.")
def prompt(run: str, uid: str, limit: int, as_json: bool, step: int | None) -> None:
    """Show the attempts at one prompt.

    With --limit, the last attempts are shown.

    With --step, shows why each source (fresh, re-evaluated, replayed) did or did not put the
    prompt into the batch of that step, and why the sampler drew it or did not.

    \b
    Examples:
      bapo prompt countdown UID
      bapo prompt countdown UID --step 40
    """
    if step is not None:
        refuse_options("--limit", why="--step explains one batch")
    client = connect(run)
    if step is not None:
        decision = client.decision(step, uid)
        decisions = [
            (source.source, source.outcome.replace("_", " "), source.reason)
            for source in decision.considered
        ]
        if decision.draw is not None:
            outcome = "drawn" if decision.draw.drawn else "not drawn"
            decisions.insert(
                0, (f"sampler ({decision.draw.sampler})", outcome, decision.draw.reason)
            )
        columns = ["source", "outcome", "why"]
        show(decision, columns, decisions, as_json=as_json, empty="no source considered it")
        return
    history = client.prompt_history(uid)
    rows = [
        (
            attempt.step,
            attempt.kind,
            attempt.policy_version,
            f"{attempt.correct}/{attempt.size}",
            f"{attempt.mean_reward:.3f}",
            ", ".join(map(str, attempt.batches)) or "-",
            attempt.group_id,
        )
        for attempt in take_last(history.attempts, limit)
    ]
    columns = ["step", "kind", "policy", "correct", "reward", "trained at steps", "group"]
    show(history, columns, rows, as_json=as_json, empty=f"{uid} was not attempted yet")
