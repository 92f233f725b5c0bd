"""`bapo`: the command line. Imports what a command needs only when it runs, so help is instant."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from services.common.scopes import SCOPES

if TYPE_CHECKING:
    from bapo_core.config import RunConfig
    from services.buffer.api.client import BufferClient
    from services.stack.stack import Endpoints

DEFAULT_PORT = 8700

DESCRIPTION = """\
Off-policy reinforcement learning from verifiable rewards (BAPO, arXiv 2602.20722).

  bapo run examples/countdown.yaml               train on this machine, with live progress
  bapo run examples/countdown.yaml steps=50      the same, with a key of the configuration changed
  bapo run examples/countdown.yaml --resume      continue a run that was interrupted
  bapo report countdown                          write runs/countdown/report.html again
  bapo compare examples/countdown.yaml           BAPO against GRPO and DAPO, several seeds
  bapo stack up                                  keep Postgres, S3 and the REST API running
  bapo prompts countdown --order hardest         what the run knows of its prompts
  bapo prompt countdown UID --step 40            why a prompt was, or was not, trained at step 40
  bapo pipeline run-local examples/countdown.yaml    the Kubeflow pipeline, on this machine
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command. An error is one line on standard error, and exit status 1."""
    parsed = _parse(arguments)
    command: Callable[[argparse.Namespace], None] = parsed.command
    from bapo_core.config import ConfigError

    # The rest of what can go wrong is imported late: it brings the web framework with it.
    try:
        command(parsed)
    except ConfigError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        _fail("interrupted; continue with `bapo run --resume`", 130)
    except Exception as error:
        from bapo_core.errors import BapoError

        if not isinstance(error, BapoError | OSError):
            raise
        _fail(str(error))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand anywhere, also after options, and without a file."""
    parser = _parser()
    parsed, rest = parser.parse_known_args(arguments)
    given = next((name for name in ("overrides", "parameters") if hasattr(parsed, name)), None)
    if rest and not (given and all(_is_override(each) for each in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if given:
        setattr(parsed, given, [*getattr(parsed, given), *rest])
    if given == "overrides" and parsed.config is not None and _is_override(parsed.config):
        parsed.config, parsed.overrides = None, [parsed.config, *parsed.overrides]
    return parsed


def _is_override(argument: str) -> bool:
    return "=" in argument and not argument.startswith("-")


def _fail(message: str, status: int = 1) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)


# ---- the commands -------------------------------------------------------------------------------


def _run(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from services.cli.local_run import LocalRun, create, execute, next_free_name
    from services.common.process import stop_on_signals
    from services.model.resolve import ensure_model
    from services.stack.stack import any_stack, default_home

    stop_on_signals(
        "stopping; `bapo run --resume` continues it, with name=... if --new has named it"
    )
    console = Console()
    home = default_home()
    if arguments.profile:
        arguments.overrides.append(f"trainer.profile_steps={arguments.profile}")
    config = _config(arguments)
    for warning in config.warnings():
        console.print(f"note: {warning}", highlight=False)
    model = ensure_model(config, home, console)
    with any_stack(home, arguments.port) as endpoints:
        client = _client(endpoints, config.name)
        if arguments.new:
            config = config.model_copy(update={"name": next_free_name(client, config.name)})
        if arguments.resume:
            stored = _stored_config(client, config.name)
            # Not what is computed, but where.
            config = stored.model_copy(update={"trainer": config.trainer})
        _announce(console, endpoints, home)
        run = LocalRun(config, endpoints, home, Path("runs") / config.name, console)
        if not arguments.resume:
            create(run)
        history = execute(run, model)
        initial, final = history.evaluations[0], history.evaluations[-1]
        console.print(
            f"\nheld-out accuracy {initial.mean_accuracy:.3f} -> {final.mean_accuracy:.3f}, "
            f"prompts at 0 correct {initial.bins[0]} -> {final.bins[0]} of {final.prompts}\n"
            f"report   {run.directory / 'report.html'}\n"
            f"summary  {run.directory / 'summary.json'}\n"
            "query    `bapo stack up` keeps the REST API running after this",
            highlight=False,
        )


def _announce(console: object, endpoints: Endpoints, home: Path) -> None:
    from rich.console import Console

    assert isinstance(console, Console)
    console.print(
        f"REST API  {endpoints.buffer_url}/docs  (token: in {home / 'stack.json'})\n"
        f"logs      {home / 'logs'}",
        highlight=False,
    )


def _stored_config(client: BufferClient, name: str) -> RunConfig:
    """A run is resumed with the configuration that it was started with."""
    from bapo_core.errors import BapoError
    from services.common.errors import ServiceError

    client.run = name
    try:
        state = client.run_state()
    except ServiceError as error:
        raise BapoError(f"there is no run {name!r} to resume; start it without --resume") from error
    if state.status == "finished":
        raise BapoError(f"run {name!r} is finished; `bapo report {name}` shows it")
    return state.config


def _config(arguments: argparse.Namespace) -> RunConfig:
    from bapo_core.config import load_config

    return load_config(arguments.config, arguments.overrides)


def _client(endpoints: Endpoints, run: str) -> BufferClient:
    from services.buffer.api.client import BufferClient

    return BufferClient(endpoints.buffer_url, endpoints.token, run=run)


def _eval(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from services.cli.evaluate import evaluate_directory, show
    from services.model.resolve import ensure_model
    from services.stack.stack import default_home

    config = _config(arguments)
    console = Console()
    if arguments.model == "tiny":
        model = ensure_model(config, default_home(), console)
    else:
        model = Path(arguments.model)
    result = evaluate_directory(config, model)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        show(console, result)


def _doctor_rollout(arguments: argparse.Namespace) -> None:
    from dataclasses import asdict

    from rich.console import Console

    from services.cli.doctor import measure_parity, show
    from services.model.resolve import ensure_model
    from services.stack.stack import default_home

    config = _config(arguments)
    console = Console()
    model = ensure_model(config, default_home(), console)
    parity = measure_parity(config, model, prompts=arguments.prompts)
    if arguments.json:
        print(json.dumps(asdict(parity) | {"failures": parity.failures()}, indent=2))
    else:
        show(console, config, parity)
    if parity.failures():
        _fail(
            f"out of tolerance: {', '.join(parity.failures())}; engine and trainer disagree, see "
            "docs/rollout.md for what makes them"
        )


def _report(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from services.cli.local_run import LocalRun, write_outputs
    from services.report.summary import read_history
    from services.stack.stack import any_stack, default_home

    home = default_home()
    with any_stack(home, 0) as endpoints:
        history = read_history(_client(endpoints, arguments.name))
    config = history.config
    directory = Path("runs") / arguments.name
    write_outputs(LocalRun(config, endpoints, home, directory, Console()), history)
    print(directory / "report.html")


def _compare(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from services.cli.compare import compare
    from services.common.process import stop_on_signals
    from services.stack.stack import default_home

    stop_on_signals()
    config = _config(arguments)
    page = compare(
        config,
        algorithms=arguments.algorithms.split(","),
        seeds=[int(seed) for seed in arguments.seeds.split(",")],
        home=default_home(),
        console=Console(),
        port=arguments.port,
    )
    print(page)


def _checkpoints(arguments: argparse.Namespace) -> None:
    from services.cli.checkpoints import checkpoints

    checkpoints(arguments)


def _profile(arguments: argparse.Namespace) -> None:
    from services.cli.profiles import profiles

    profiles(arguments)


def _model_tiny(_: argparse.Namespace) -> None:
    from rich.console import Console

    from bapo_core.config import RunConfig
    from services.model.resolve import ensure_model
    from services.stack.stack import default_home

    print(ensure_model(RunConfig(), default_home(), Console()))


def _config_show(arguments: argparse.Namespace) -> None:
    import yaml

    config = _config(arguments).model_dump(mode="json")
    print(yaml.safe_dump(config, sort_keys=False), end="")


def _config_check(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    for warning in config.warnings():
        print(f"note: {warning}")
    print(f"{arguments.config or 'the default configuration'} is valid")


def _stack_up(arguments: argparse.Namespace) -> None:
    from services.stack.stack import default_home, stack_up

    home = default_home()
    endpoints = stack_up(home, arguments.port)
    print(f"REST API  {endpoints.buffer_url}/docs")
    print(f"token     {home / 'stack.json'}")


def _stack_down(_: argparse.Namespace) -> None:
    from services.stack.stack import default_home, stack_down

    print("stopped" if stack_down(default_home()) else "no stack is running")


# ---- their arguments ----------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bapo",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    run = _command(commands, "run", _run, "train on this machine")
    _configurable(run)
    run.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    run.add_argument("--new", action="store_true", help="take the next free name if it is taken")
    run.add_argument(
        "--profile", type=int, metavar="STEPS", help="trace so many steps; see `bapo profile`"
    )
    _with_port(run)

    evaluate = _command(commands, "eval", _eval, "accuracy of a model directory, held-out prompts")
    evaluate.add_argument("model", help="a Hugging Face directory, or `tiny`")
    _configurable(evaluate)
    evaluate.add_argument("--json", action="store_true", help="for programs")

    report = _command(commands, "report", _report, "write the report of a run again")
    report.add_argument("name", help="the run's name")

    comparing = _command(commands, "compare", _compare, "train several algorithms, several seeds")
    _configurable(comparing)
    comparing.add_argument("--algorithms", default="bapo,grpo,dapo", help="(default: %(default)s)")
    comparing.add_argument("--seeds", default="1,2,3", help="(default: %(default)s)")
    _with_port(comparing)

    doctor = _group(commands, "doctor", "find out what is wrong")
    parity = _command(
        doctor, "rollout", _doctor_rollout, "compare the engine's log-probs with the trainer's"
    )
    _configurable(parity)
    parity.add_argument("--prompts", type=int, default=32, help="(default: %(default)s)")
    parity.add_argument("--json", action="store_true", help="for programs")

    model = _group(commands, "model", "models that come with bapo")
    _command(model, "tiny", _model_tiny, "build the tiny base model; print its directory")

    config = _group(commands, "config", "look at a configuration")
    _configurable(_command(config, "show", _config_show, "every key, with presets applied"))
    _configurable(_command(config, "check", _config_check, "say what is wrong with it, or slow"))

    _questions(commands)
    _pipeline(commands)

    stack = _group(commands, "stack", "Postgres, S3, buffer service and verifier, kept running")
    _with_port(_command(stack, "up", _stack_up, "start it; it stays until `bapo stack down`"))
    _command(stack, "down", _stack_down, "stop it")
    return parser


def _questions(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Commands that ask a running service; `services/cli/inspect.py` has them."""
    _asking(_command(commands, "runs", _ask("runs"), "the runs of the service"))
    for name, summary in {
        "pause": "let a run's processes wait",
        "resume": "end a pause",
        "stop": "turn a run's processes away; `bapo run --resume` continues it",
        "delete": "delete a run with its objects; there is no way back",
    }.items():
        changing = _command(commands, name, _ask("change"), summary)
        changing.add_argument("run", help="the run's name")
        changing.set_defaults(change=name)

    prompts = _about_run(commands, "prompts", "training prompts by difficulty")
    prompts.add_argument("--bin", type=int, help="k of G correct at the last attempt")
    prompts.add_argument("--trend", choices=TRENDS, help="how it changed since the first attempt")
    prompts.add_argument("--unlocked-after", type=int, metavar="STEP", help="first solved after it")
    prompts.add_argument("--unlocked-until", type=int, metavar="STEP", help="first solved by then")
    prompts.add_argument("--search", help="part of the uid or the payload")
    prompts.add_argument(
        "--order", choices=ORDERS, help="(default: unlocked, if asked for; stored)"
    )

    prompt = _about_run(commands, "prompt", "one prompt: its attempts, or why it was used or not")
    prompt.add_argument("uid", help="as `bapo prompts` shows it")
    prompt.add_argument("--step", type=int, help="why it is or is not in the batch of this step")

    buffer = _about_run(commands, "buffer", "what a buffer holds, now or as of a step")
    buffer.add_argument("buffer", choices=("hard", "high_quality"))
    buffer.add_argument("--step", type=int, help="as of this step (default: now)")
    buffer.add_argument("--events", action="store_true", help="admissions and evictions instead")
    buffer.add_argument("--after", type=int, default=0, metavar="STEP", help="events after it")

    metrics = _about_run(commands, "metrics", "what is measured at each step; for TensorBoard too")
    metrics.add_argument(
        "--tensorboard", type=Path, metavar="DIRECTORY", help="write all of them there as events"
    )
    metrics.add_argument("--mlflow", metavar="URI", help="write all of them to this MLflow")
    metrics.add_argument("--experiment", default="bapo", help="of MLflow (default: %(default)s)")
    metrics.add_argument("--follow", action="store_true", help="go on until the run has ended")

    batches = _about_run(commands, "batches", "the composition of the batches, or one of them")
    batches.add_argument("--step", type=int, help="the members of this step's batch")

    checkpoints = _asking(
        _command(commands, "checkpoints", _checkpoints, "the checkpoints that a run keeps")
    )
    checkpoints.add_argument("run", help="the run's name")
    which = checkpoints.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="this one (default: all; the newest)")
    which.add_argument("--best", action="store_true", help="the one with the best evaluation")
    checkpoints.add_argument("--verify", action="store_true", help="read them, check every digest")
    checkpoints.add_argument(
        "--export",
        type=Path,
        metavar="DIRECTORY",
        help="write its model as a Hugging Face directory",
    )

    profile = _asking(
        _command(commands, "profile", _profile, "the trainer's traces of a run with --profile")
    )
    profile.add_argument("run", help="the run's name")
    profile.add_argument(
        "--export", type=Path, metavar="DIRECTORY", help="write them there, for ui.perfetto.dev"
    )

    token = _group(commands, "token", "tokens for the REST API")
    create = _asking(_command(token, "create", _ask("token_create"), "make one; it is shown once"))
    create.add_argument("name", help="what it is for")
    create.add_argument("--scope", choices=SCOPES, default="read")
    _asking(_command(token, "list", _ask("token_list"), "all of them, without their secrets"))
    revoke = _command(token, "revoke", _ask("token_revoke"), "make one invalid, at once")
    revoke.add_argument("id", type=int, help="as `bapo token list` shows it")

    gc = _asking(_command(commands, "gc", _ask("gc"), "delete objects that no row points to"))
    gc.add_argument("--dry-run", action="store_true", help="only list them")


def _pipeline(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The Kubeflow pipeline; `pipelines/commands.py` has what they do."""
    pipeline = _group(commands, "pipeline", "the Kubeflow pipeline: compile, submit, try it here")

    compiling = _command(
        pipeline, "compile", _of_pipeline("compile_pipeline"), "write it as Kubeflow takes it"
    )
    compiling.add_argument("--output", type=Path, default=COMPILED, help="(default: %(default)s)")
    for image in ("service", "trainer"):
        compiling.add_argument(
            f"--{image}-image",
            metavar="IMAGE",
            dest=image,
            default=f"bapo/{image}:{VERSION}",
            help="where you have pushed it (default: %(default)s)",
        )

    submitting = _command(pipeline, "submit", _of_pipeline("submit"), "start it on a Kubeflow")
    _with_parameters(submitting)
    submitting.add_argument("--host", help="of the KFP API (default: as `kfp` finds it)")
    submitting.add_argument("--namespace", help="the Kubeflow profile to run in")
    submitting.add_argument("--experiment", default="bapo", help="(default: %(default)s)")
    submitting.add_argument("--package", type=Path, default=COMPILED, help="(default: %(default)s)")

    running = _command(
        pipeline,
        "run-local",
        _of_pipeline("run_local"),
        "run it on this machine: real services, rollouts and torchrun, no cluster",
    )
    _with_parameters(running)
    running.add_argument("--replicas", type=int, default=1, help="of the rollouts (default: 1)")
    running.add_argument(
        "--output",
        type=Path,
        default=Path("runs/pipeline"),
        help="for what the steps write (default: %(default)s)",
    )

    reaping = _command(pipeline, "reap", _of_pipeline("reap"), "list jobs whose run is not at work")
    reaping.add_argument("--namespace", default="default", help="(default: %(default)s)")
    reaping.add_argument("--release", default="bapo", help="of the chart (default: %(default)s)")
    reaping.add_argument("--delete", action="store_true", help="remove them")


VERSION = "0.2.0"
COMPILED = Path("pipelines/bapo_pipeline.yaml")


def _of_pipeline(name: str) -> Callable[[argparse.Namespace], None]:
    def command(arguments: argparse.Namespace) -> None:
        from pipelines import commands

        getattr(commands, name)(arguments)

    return command


def _with_parameters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", help="a YAML file (see examples/)")
    parser.add_argument(
        "parameters",
        nargs="*",
        metavar="parameter=value",
        help="of the pipeline, for example run=mine steps_per_segment=20; others are keys of the "
        "configuration, for example rollout.group_size=16",
    )


TRENDS = ("improving", "worsening", "steady", "forgotten", "never_solved")
ORDERS = ("stored", "hardest", "most_improved", "unlocked")


def _ask(name: str) -> Callable[[argparse.Namespace], None]:
    """A function of `services.cli.inspect`, imported when it is called."""

    def command(arguments: argparse.Namespace) -> None:
        from services.cli import inspect as ask

        getattr(ask, name)(arguments)

    return command


def _about_run(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str
) -> argparse.ArgumentParser:
    parser = _asking(_command(commands, name, _ask(name), summary))
    parser.add_argument("run", help="the run's name")
    parser.add_argument("--limit", type=int, default=50, help="rows at most (default: %(default)s)")
    return parser


def _asking(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    function: Callable[[argparse.Namespace], None],
    summary: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=summary)
    parser.set_defaults(command=function)
    return parser


def _group(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str
) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    parser = commands.add_parser(name, help=summary, description=summary)
    return parser.add_subparsers(title="commands", metavar="COMMAND", required=True)


def _configurable(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", help="a YAML file (see examples/)")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="keys of the configuration, for example sync.every=3",
    )


def _with_port(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="of the REST API (default: %(default)s)"
    )


if __name__ == "__main__":
    main()
