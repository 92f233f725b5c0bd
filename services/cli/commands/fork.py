"""`bapo fork` and `bapo train`: new runs from a step, or from the rollouts, of another run."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.console import Console

from bapo_core.config import parse_overrides
from bapo_core.errors import BapoError
from services.buffer.api import wire
from services.buffer.api.client import BufferClient, none_if_missing
from services.cli.commands.run import print_results, print_warnings, train_to_end
from services.cli.console import plain_console
from services.cli.echo import echo
from services.cli.local_run import REPORTS, LocalRun, next_free_name
from services.cli.options import port_option, run_argument
from services.cli.service import connect, format_addresses, open_local_object_store
from services.common.process import stop_on_signals
from services.model.resolve import ensure_model
from services.stack.settings import default_home
from services.stack.stack import find_or_start_stack
from services.trainer.code_version import code_version

values_argument = click.argument(
    "values",
    nargs=-1,
    metavar="[KEY=VALUE]...",
    help="Keys of the configuration that are others from the next step on.",
)
name_option = click.option(
    "--name", metavar="NEW", help="Name of the new run; by default the next free one of its kind."
)
no_train_option = click.option(
    "--no-train", is_flag=True, help="Make the run, and do not train it."
)


@click.command
@run_argument
@click.option(
    "--at",
    type=click.IntRange(min=0),
    required=True,
    metavar="STEP",
    help="Last step that both runs share.",
)
@values_argument
@name_option
@no_train_option
@port_option
def fork(
    run: str, at: int, values: Sequence[str], name: str | None, no_train: bool, port: int
) -> None:
    """Make a new run that shares the past of a run, and train it.

    The past, up to a step, is the run's: prompts, groups, batches, difficulty, buffers and weights.
    Nothing of it is generated or stored again. KEY=VALUE changes the configuration from the next
    step on. Keys that the past depends on (model, lora, task, reward, group size, evaluation sets)
    cannot change. If the step has no checkpoint, the steps since the one before it are trained
    again on their recorded batches. Without KEY=VALUE the fork repeats the run, bit for bit on the
    same kind of CPU.

    \b
    Examples:
      bapo fork countdown --at 60 replay.select=off
      bapo fork countdown --at 60 algorithm=grpo --name grpo-from-60
      bapo fork countdown --at 60 seed=2 steps=200 --no-train
    """
    _make(run, wire.ForkRequest(name="any", step=at, values=_parse(values)), name, no_train, port)


@click.command
@click.option(
    "--from-run", "run", required=True, metavar="RUN", help="The run whose rollouts are recorded."
)
@click.option(
    "--steps",
    required=True,
    metavar="FIRST:LAST",
    help="The steps whose rollouts are trained on, from the weights before the first of them.",
)
@values_argument
@name_option
@click.option(
    "--no-engine",
    is_flag=True,
    help="Start no rollout engine, so that the new weights are not evaluated.",
)
@no_train_option
@port_option
def train(
    run: str,
    steps: str,
    values: Sequence[str],
    name: str | None,
    no_engine: bool,
    no_train: bool,
    port: int,
) -> None:
    """Train a new run on the recorded rollouts of a run.

    The new run begins with the weights before step FIRST, and composes its batches by its own
    rules of the groups that RUN rolled out, so that KEY=VALUE can change the loss, the optimizer
    and the data rules at no cost of rollouts. The groups stay those of RUN's policy, which the new
    one moves away from: the metrics divergence/... say how far. With the rules of RUN the batches
    are RUN's. Re-evaluations that other rules ask for and RUN did not make are missing.

    \b
    Examples:
      bapo train --from-run countdown --steps 1:120 optimizer.learning_rate=3e-5
      bapo train --from-run countdown --steps 61:120 loss.entropy_coefficient=0.01 --name bonus
      bapo train --from-run countdown --steps 1:120 fresh.filter=none --no-engine
    """
    first, last = _parse_steps(steps)
    parsed = _parse(values)
    if "steps" not in parsed:
        parsed["steps"] = last
    elif isinstance(parsed["steps"], int) and parsed["steps"] > last and no_engine:
        raise click.UsageError(
            f"steps={parsed['steps']} goes on with rollouts after step {last}, for which there is "
            "no engine; leave --no-engine or steps out."
        )
    request = wire.ForkRequest(name="any", step=first - 1, rollouts_until=last, values=parsed)
    _make(run, request, name, no_train, port, engines=not no_engine)


def _parse(values: Sequence[str]) -> dict[str, object]:
    """Returns the values by section; raises `click.UsageError` for a configuration file."""
    files = [value for value in values if "=" not in value]
    if files:
        raise click.UsageError(
            f"{files[0]}: the new run has the configuration of the run that it comes from; give "
            "KEY=VALUE for what is to change."
        )
    parsed = parse_overrides(values)
    if "name" in parsed:
        raise click.UsageError("name= names a run of its own; give it as --name.")
    return parsed


def _parse_steps(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not (colon and first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise click.BadParameter(
            f"{text!r}: write FIRST:LAST, for example 1:60", param_hint="--steps"
        )
    return int(first), int(last)


def _make(
    run: str,
    request: wire.ForkRequest,
    name: str | None,
    no_train: bool,
    port: int,
    *,
    engines: bool = True,
) -> None:
    console = plain_console()
    if no_train:
        state = _create(connect(run), request, name, console)
        echo(f"train it with `bapo run name={state.name} --resume`")
        return
    stop_on_signals("stopping")
    home = default_home()
    with find_or_start_stack(home, port) as endpoints:
        addresses = format_addresses(endpoints, home, with_token=console.is_terminal)
        console.print(addresses, soft_wrap=True)
        client = BufferClient(endpoints.buffer_url, endpoints.token, run=run)
        state = _create(client, request, name, console)
        config = state.config
        print_warnings(console, config)
        model = ensure_model(config, home, open_store=open_local_object_store)
        local_run = LocalRun(
            config, endpoints, home, REPORTS / config.name, console, engines=engines
        )
        resume = f"bapo run name={config.name} --resume"
        print_results(console, local_run, train_to_end(local_run, model, None, resume))


def _create(
    client: BufferClient, request: wire.ForkRequest, name: str | None, console: Console
) -> wire.RunState:
    """Makes the fork and says what it is. Raises `BapoError` if there is no such run."""
    if none_if_missing(client.run_state) is None:
        raise BapoError(f"there is no run {client.run!r}; `bapo runs` lists them")
    if name is None:
        kind = "fork" if request.rollouts_until is None else "recorded"
        base = f"{client.run[: 63 - len(kind) - 12]}-{kind}-{request.step}"
        name = next_free_name(client, base, REPORTS)
    state = client.fork_run(request.model_copy(update={"name": name}))
    origin = state.forked_from
    assert origin is not None
    console.print(f"{state.name} is a fork of {origin.describe()}", soft_wrap=True)
    if state.changes and state.changes[-1].first_step == origin.step + 1:
        changes = state.changes[-1]
        console.print(f"from step {changes.first_step} on: {changes.describe()}", soft_wrap=True)
    last = next(iter(client.steps(after=origin.step - 1)), None) if origin.step else None
    if last is not None and last.digests is not None and last.digests.code != code_version():
        console.print(
            f"note: step {origin.step} was trained by other code ({last.digests.code}) than the "
            f"steps after it will be ({code_version()}), so that {state.name} may differ from "
            f"{client.run} although its configuration does not",
            soft_wrap=True,
        )
    if origin.checkpoint < origin.step:
        console.print(
            f"step {origin.step} has no checkpoint: steps {origin.checkpoint + 1} to {origin.step} "
            "are trained again first, on their recorded batches",
            soft_wrap=True,
        )
    return state
