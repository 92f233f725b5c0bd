"""`bapo run`: trains on this machine."""

from __future__ import annotations

import os
import sys
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bapo_core.config import ConfigChange, RunConfig, flatten, parse_overrides
from bapo_core.errors import BapoError
from bapo_core.reward_files import RewardFunctions
from services.buffer.api.client import BufferClient
from services.buffer.api.wire import EvaluationSetView, RunState
from services.cli.console import plain_console
from services.cli.echo import echo
from services.cli.local_run import (
    REPORTS,
    LocalRun,
    TakenOver,
    execute,
    prepare_new_run,
    take_over_run,
)
from services.cli.options import ConfigArguments, config_arguments, port_option
from services.cli.reward_files import pin_reward
from services.cli.run_lock import RunLock
from services.cli.service import format_addresses, open_local_object_store
from services.common.errors import ServiceError
from services.common.process import stop_on_signals
from services.common.threads import start_detached
from services.datasets import pin_revisions
from services.model.resolve import ensure_model
from services.report.explanations import explain_run
from services.report.scores import has_other_rewards
from services.report.summary import RunHistory
from services.stack.settings import default_home
from services.stack.stack import find_or_start_stack

ONLY_DEFAULTS = (
    "name a configuration, such as examples/countdown.yaml. The defaults alone are the run of the "
    "paper: 471 steps of 256 prompts x 8 responses of up to 8,192 tokens. If you mean that one, "
    "name one of its keys, for example steps=471."
)


@click.command
@config_arguments
@click.option(
    "--resume",
    is_flag=True,
    help="Continue the run from its last checkpoint. KEY=VALUE changes its configuration from the "
    "next step on, as far as that is possible; of FILE, only `name` and `trainer.*` take effect.",
)
@click.option(
    "--take-over",
    is_flag=True,
    help="With --resume: stop the command on this machine that trains the run, and go on here.",
)
@click.option("--new", is_flag=True, help="Take the next free name if the run's name is taken.")
@click.option(
    "--profile",
    type=click.IntRange(min=0),
    metavar="STEPS",
    help="Trace this many steps of the trainer; `bapo profile` exports the traces.",
)
@port_option
def run(
    config: ConfigArguments,
    resume: bool,
    take_over: bool,
    new: bool,
    profile: int | None,
    port: int,
) -> None:
    """Train on this machine.

    The services of `bapo stack` are used, or started for as long as the run lasts. Summary and
    report are written to `runs/NAME`.

    With --resume, these keys may change: steps (also of a run that is finished), learning_rate,
    weight_decay and gradient_clip of optimizer, the intervals of evaluation, and the section
    checkpoint. Each change is recorded. Others need a new run.

    \b
    Examples:
      bapo run examples/countdown.yaml
      bapo run examples/countdown.yaml steps=50 sync.every=1 --new
      bapo run examples/countdown.yaml --resume
      bapo run examples/countdown.yaml --resume steps=200 optimizer.learning_rate=5e-5
    """
    if resume and new:
        raise click.UsageError("--resume continues a run, --new starts one; give one of them.")
    if not (resume or config.file or config.overrides):
        raise click.UsageError(ONLY_DEFAULTS)
    if take_over and not resume:
        raise click.UsageError("--take-over continues a run; give --resume, too.")
    stop_on_signals("stopping")
    console = plain_console()
    home = default_home()
    loaded = config.load(*([f"trainer.profile_steps={profile}"] if profile else []))
    if not resume:
        print_warnings(console, loaded)
    loaded = _pin(loaded, resume=resume)
    imported = start_detached(_import_tokenizers)
    with (
        find_or_start_stack(home, port) as endpoints,
        closing(RunLock(home, loaded.name)) as lock,
    ):
        imported.result()  # Nothing else may import parts of transformers meanwhile.
        addresses = format_addresses(endpoints, home, with_token=console.is_terminal)
        console.print(addresses, soft_wrap=True)
        if resume:
            client = BufferClient(endpoints.buffer_url, endpoints.token, run=loaded.name)
            stored = _continue_run(client, config, lock, take_over, console)
            _note_kept_values(console, config, loaded, stored)
            # `trainer` may change on resume: it says how a step is computed, not what.
            loaded = stored.model_copy(update={"trainer": loaded.trainer})
            print_warnings(console, loaded)
            model = ensure_model(loaded, home, open_store=open_local_object_store)
            local_run = LocalRun(loaded, endpoints, home, REPORTS / loaded.name, console)
        else:
            local_run, model = prepare_new_run(loaded, endpoints, home, console, new=new)
        resume_command = _resume_command(config.file, local_run.config.name)
        history = train_to_end(local_run, model, lock if resume else None, resume_command)
        print_results(console, local_run, history)


def print_warnings(console: Console, config: RunConfig) -> None:
    """Prints the warnings about a configuration."""
    for warning in config.warnings():
        console.print(f"note: {warning}", soft_wrap=True)


def train_to_end(
    run: LocalRun, model: Path, lock: RunLock | None, resume_command: str
) -> RunHistory:
    """Trains a run to its end. Errors name the command that continues it."""
    try:
        return execute(run, model, lock)
    except TakenOver as error:
        # Printed now: this command may have to run the services until the other one ends.
        echo(f"error: {error}", err=True)
        raise SystemExit(1) from error
    except BapoError as error:
        raise BapoError(f"{error}; continue with `{resume_command}`") from error
    except SystemExit:
        echo(f"stopped; continue with `{resume_command}`", err=True)
        raise


def _import_tokenizers() -> None:
    """Imports what reads prompts, which takes seconds, while the services start."""
    from transformers import AutoTokenizer  # noqa: F401


def _pin(config: RunConfig, *, resume: bool) -> RunConfig:
    """Returns the configuration with what its addresses hold now: commits and the reward file.

    A run that is resumed has its own, and needs none of them; the reward file alone is compared, if
    it is still there.
    """
    if not resume:
        return pin_revisions(pin_reward(config))
    with suppress(BapoError):
        return pin_reward(config)
    return config


def _continue_run(
    client: BufferClient,
    arguments: ConfigArguments,
    lock: RunLock,
    may_take_over: bool,
    console: Console,
) -> RunConfig:
    """Acquires the run and records changes of its configuration; returns the configuration.

    Raises `BapoError` when there is no such run, when it is finished and gets no more steps, when
    another command trains it and may not be stopped, and for keys that may not change.
    """
    state, _ = _plan(client, arguments)
    if not lock.acquire():
        _ask_to_take_over(lock.describe(state), may_take_over)
        take_over_run(client, lock)
    # The command that held the lock may have stored a checkpoint, or ended the run, since.
    state, change = _plan(client, arguments)
    if change is not None:
        state = client.change_config(change.new, by="`bapo run --resume`")
        recorded = state.changes[-1]
        console.print(f"from step {recorded.first_step} on: {recorded.describe()}")
    return state.config


def _plan(client: BufferClient, arguments: ConfigArguments) -> tuple[RunState, ConfigChange | None]:
    """Returns the state of the run, and the change that the command line asks for.

    Raises `BapoError` as `_continue_run` does.
    """
    state = _read_state(client)
    checkpoint = client.latest_checkpoint()
    requested = _requested_values(arguments, state.config)
    change = state.history.plan_change(requested, checkpoint.number if checkpoint else 0)
    if state.status == "finished" and change is None:
        raise BapoError(
            f"run {client.run!r} is finished; `bapo report {client.run}` shows it, and --resume "
            f"with steps=N, above {state.steps}, trains it longer"
        )
    return state, change


def _ask_to_take_over(running: str, may_take_over: bool) -> None:
    """Returns if the command that trains the run may be stopped; raises `BapoError` otherwise."""
    if may_take_over:
        return
    if not sys.stdin.isatty():
        raise BapoError(
            f"{running}; --take-over stops that command, and continues the run from its last "
            "checkpoint"
        )
    if not click.confirm(f"{running}. Stop that command, and continue the run here?", err=True):
        raise BapoError("the run was left to the other command")


def _read_state(client: BufferClient) -> RunState:
    """Returns the state of the run. Raises `BapoError` if there is none."""
    try:
        return client.run_state()
    except ServiceError as error:
        raise BapoError(
            f"there is no run {client.run!r} to resume; start it without --resume"
        ) from error


def _requested_values(arguments: ConfigArguments, stored: RunConfig) -> dict[str, Any]:
    """Returns the values of the command line that say what is to be trained, by dotted key."""
    kept = flatten(stored.model_dump(mode="json"))
    return {
        key: value
        for key, value in flatten(parse_overrides(arguments.overrides)).items()
        if key != "name"
        and key.partition(".")[0] != "trainer"
        and not _is_pinned(key, kept.get(key), value)
    }


def _is_pinned(key: str, stored: object, given: object) -> bool:
    """Whether the stored address of a data set, a model or a reward file is the given one.

    It may have a revision or a digest in addition.
    """
    if key == "task.reward":
        return _is_same_reward(given, stored)
    return key.endswith("path") and f"{stored}".startswith(f"{given}")


def _note_kept_values(
    console: Console, arguments: ConfigArguments, given: RunConfig, stored: RunConfig
) -> None:
    """Says which values that were given take no effect, because the run has others."""
    values, kept = (flatten(config.model_dump(mode="json")) for config in (given, stored))
    keys = values.keys() if arguments.file else flatten(parse_overrides(arguments.overrides)).keys()
    different = [
        f"{key}={kept.get(key)} (not {values[key]})"
        for key in keys
        if key in values
        and kept.get(key) != values[key]
        and not key.startswith("trainer.")
        and not _is_pinned(key, kept.get(key), values[key])
    ]
    if different:
        more = f" and {len(different) - 5} more" if len(different) > 5 else ""
        console.print(
            f"note: --resume keeps the configuration of the run, which has "
            f"{', '.join(different[:5])}{more}; of a file, only trainer.* takes effect",
            soft_wrap=True,
        )


def _is_same_reward(given: Any, stored: Any) -> bool:
    """Returns whether a reward is the stored one without its digest: its file is not there now."""
    if given is None or stored is None:
        return False
    functions, kept = RewardFunctions.parse(given), RewardFunctions.parse(stored)
    return functions.digest is None and replace(kept, digest=None) == functions


def _resume_command(file: str | None, name: str) -> str:
    """Returns the command that continues a run of this name."""
    return " ".join(["bapo run", *([file] if file else []), f"name={name}", "--resume"])


def _describe_scores(view: EvaluationSetView, *, named: bool) -> str:
    """Returns the first and the last scores on an evaluation set, on one line."""
    initial, final = view.evaluations[0], view.evaluations[-1]
    of_set = f" on {view.name}" if named else ""
    reward = ""
    if has_other_rewards(view.evaluations):
        reward = f"reward {initial.mean_reward:.3f} -> {final.mean_reward:.3f}, "
    return (
        f"held-out accuracy{of_set} {initial.mean_accuracy:.3f} -> {final.mean_accuracy:.3f}, "
        f"{reward}prompts at 0 correct {initial.bins[0]} -> {final.bins[0]} of {final.prompts}"
    )


def print_results(console: Console, local_run: LocalRun, history: RunHistory) -> None:
    """Prints the first and last scores of a run, and where its report is."""
    scores = "\n".join(
        _describe_scores(view, named=len(history.sets) > 1)
        for view in history.sets
        if view.evaluations
    )
    notes = explain_run(history.steps, history.config, history.state.forked_from)
    scores = "\n".join([scores, *(f"note: {note}" for note in notes)])
    # The services that this command started end with it.
    again = "`bapo stack up`, then " if local_run.endpoints.pid == os.getpid() else ""
    console.print(
        f"\n{scores}\n"
        f"report   {local_run.directory / 'report.html'}\n"
        f"summary  {local_run.directory / 'summary.json'}\n"
        f"queries  {again}`bapo prompts {local_run.config.name}`, or the dashboard",
        soft_wrap=True,
    )
