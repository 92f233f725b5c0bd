"""Trains one run on this machine, from its configuration to its report."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import yaml
from rich.console import Console

from bapo_core.config import RunConfig
from bapo_core.config.rollouts import RolloutConfig
from bapo_core.errors import BapoError
from bapo_core.reward_files import stored_digest
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.cli.process_tokens import process_tokens
from services.cli.progress import RunDisplay
from services.cli.reward_files import store_reward
from services.cli.run_lock import RunLock
from services.cli.service import data_sources, open_local_object_store
from services.common.errors import ServiceUnavailable
from services.common.process import python_command
from services.common.scopes import Scope
from services.datasets import Dataset, prepare_run
from services.exporters.mlflow import mirror_to_mlflow
from services.model.resolve import ensure_model, pin_model
from services.report.summary import RunHistory, read_history, summarise
from services.stack.stack import Endpoints
from services.stack.supervisor import ProcessFailed, Supervisor, bind_port
from services.verifier.api.client import VerifierClient
from services.verifier.api.trial import try_functions

REPORTS = Path("runs")
"""Where summaries and reports are written, each in the directory of its run."""
POLL_INTERVAL_S = 0.5
TAKE_OVER = "`bapo run --resume --take-over`"
"""Begins the name under which a command stops the run of another one."""
VLLM_MEMORY_SHARE = 0.9
"""Share of a GPU that vLLM takes unless `--gpu-memory-utilization` says otherwise."""
GIVE_UP_AFTER_S = 15.0
"""Seconds of failing calls after which a service of this machine counts as lost: nothing restarts
it."""


class TakenOver(BapoError):
    """Another command trains the run now."""


@dataclass(frozen=True, slots=True)
class LocalRun:
    """A run on the local stack, and where its files are written."""

    config: RunConfig
    endpoints: Endpoints
    home: Path
    directory: Path
    """Summary and report are written here, `runs/<name>`."""
    console: Console
    engines: bool = True
    """Whether rollout engines and the collector run, without which nothing is evaluated."""

    @property
    def client(self) -> BufferClient:
        return BufferClient(
            self.endpoints.buffer_url,
            self.endpoints.token,
            run=self.config.name,
            give_up_s=GIVE_UP_AFTER_S,
        )


def prepare_new_run(
    config: RunConfig, endpoints: Endpoints, home: Path, console: Console, *, new: bool
) -> tuple[LocalRun, Path]:
    """Creates a run with its model and its data; returns it, and the directory of its model.

    config: with the commits of its data sets and its reward file (`pin_revisions`, `pin_reward`).
    new: whether to take the next free name if the run's name is taken.

    Raises `BapoError` if the name is taken, and when data or model cannot be read.
    """
    if new:
        client = BufferClient(endpoints.buffer_url, endpoints.token, run=config.name)
        name = next_free_name(client, config.name, REPORTS)
        config = config.model_copy(update={"name": name})
    config = pin_model(config, home, open_store=open_local_object_store)
    model = ensure_model(config, home, open_store=open_local_object_store)
    run = LocalRun(config, endpoints, home, REPORTS / config.name, console)
    create_run(run, model)
    return run, model


def create_run(run: LocalRun, model: Path) -> None:
    """Uploads the prompts, tries the reward functions, and creates the run.

    model: directory of the initial model. Raises `BapoError` when the run's name is taken, and as
    `store_reward`, `prepare_run` and `try_functions` do.
    """
    client = run.client
    status = {state.name: state.status for state in client.runs()}.get(run.config.name)
    if status == "finished":
        raise BapoError(
            f"run {run.config.name!r} is finished; start another one with --new, or with a name of "
            "its own (name=...)"
        )
    if status is not None:
        raise BapoError(
            f"run {run.config.name!r} exists; continue it with --resume, or take another name "
            "(name=...) or the next free one (--new)"
        )

    def show(dataset: Dataset) -> None:
        if dataset.notes:
            run.console.print(f"note: {dataset.name}: {dataset.summary}", soft_wrap=True)

    sources = data_sources(lambda: client)
    store_reward(run.config, client)
    request = prepare_run(run.config, model, sources, client, show=show)
    functions = run.config.task.functions
    if functions is not None:
        prompts = client.dataset_prompts(request.train_dataset)
        try_functions(
            functions,
            client.reward_file(stored_digest(functions)),
            (prompt.payload for prompt in prompts),
            VerifierClient(run.endpoints.verifier_url, run.endpoints.verifier_token).verify,
        )
    client.create_run(request)


def execute(run: LocalRun, model: Path, lock: RunLock | None = None) -> RunHistory:
    """Trains from the last checkpoint to the end; writes the summary and the report.

    model: directory of the initial model. lock: the lock of the run, if it is acquired already.

    Raises `BapoError` when a process fails; the run is then marked as failed. One that a person
    interrupts is marked as stopped. Raises `BapoError`, too, when a person stops it from elsewhere,
    and when another command on this machine trains it; and `TakenOver` when one has taken it over.
    """
    with (lock or RunLock(run.home, run.config.name)).held():
        return _execute(run, model)


def take_over_run(client: BufferClient, lock: RunLock) -> None:
    """Makes the command that trains a run on this machine stop, and acquires the run's lock.

    The command keeps its logs and its temporary files until it has ended. Raises `BapoError` if it
    does not end.
    """
    client.stop(by=f"{TAKE_OVER} (process {os.getpid()})")
    lock.wait()


def _execute(run: LocalRun, model: Path) -> RunHistory:
    started = time.monotonic()
    run.directory.mkdir(parents=True, exist_ok=True)
    config_text = yaml.safe_dump(run.config.model_dump(mode="json"), sort_keys=False)
    (run.directory / "config.yaml").write_text(config_text)
    client = run.client
    state = client.begin_attempt(reopen=True)
    if state.attempt > 1:
        run.console.print(_describe_start(state))
    scratch = _make_scratch(run)
    try:
        with mirror_to_mlflow(run.config, client):
            with (
                process_tokens(client, bound=("replica", "collector", "trainer")) as tokens,
                Supervisor(run.home / "logs" / run.config.name) as supervisor,
            ):
                _start_processes(run, supervisor, state, model, scratch, tokens)
                _show_progress(run, supervisor, client, state)
            client.set_status("finished")
    except ProcessFailed as error:
        _raise_if_stopped(client, state.attempt, error)
        _record_end(client, "failed")
        raise
    except ServiceUnavailable:
        raise  # the buffer service cannot be told either, and --resume needs no mark
    except (KeyboardInterrupt, SystemExit):
        _record_end(client, "stopped")
        raise
    except BaseException:
        _record_end(client, "failed")
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    history = read_history(client)
    write_outputs(run.directory, history, time.monotonic() - started)
    return history


def _describe_start(state: wire.RunState) -> str:
    if state.current_step == 0:
        return "no checkpoint was written yet: the run starts again from the initial model"
    return f"continuing from the checkpoint of step {state.current_step}"


def _make_scratch(run: LocalRun) -> Path:
    """Makes the directory of an attempt's files in transfer.

    Those of earlier attempts are deleted: one that is killed leaves it.
    """
    directory = run.home / "scratch"
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob(f"{run.config.name}.*"):  # A name has no full stop.
        shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{run.config.name}.", dir=directory))


def _start_processes(
    run: LocalRun,
    supervisor: Supervisor,
    state: wire.RunState,
    model: Path,
    scratch: Path,
    tokens: Mapping[Scope, str],
) -> None:
    """Starts the engines, the collector and the trainer of an attempt, each with its own token."""
    settings = {
        "BAPO_RUN": run.config.name,
        "BAPO_ATTEMPT": str(state.attempt),
        "BAPO_MODEL": str(model),
        "BAPO_TRAINER": run.config.trainer.model_dump_json(),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **_threads(),
    }
    for name in _engines(run):
        with bind_port() as listener:
            replica = {
                **run.endpoints.process_environment(tokens["replica"]),
                "BAPO_REPLICA": name,
                "BAPO_PORT": str(listener.getsockname()[1]),
                "BAPO_SCRATCH": str(scratch / name),
                **engine_threads(run.config.rollout),
            }
            variables = settings | replica
            supervisor.start_python(name, "services.rollout.server", variables, listener=listener)
    if run.engines:
        collector = {
            **run.endpoints.process_environment(tokens["collector"]),
            **run.endpoints.verifier_environment(),
            "BAPO_SCRATCH": str(scratch / "collector"),
        }
        supervisor.start_python("collector", "services.rollout.collector", settings | collector)
    trainer = {
        **run.endpoints.process_environment(tokens["trainer"]),
        "BAPO_SCRATCH": str(scratch / "trainer"),
        "BAPO_ENGINE_SHARE": str(engine_share(run.config.rollout)),
    }
    command = trainer_command(run.config.trainer.processes, "services.trainer.loop")
    supervisor.start("trainer", command, environment=settings | trainer)


def trainer_command(processes: int, module: str, *arguments: str) -> list[str]:
    """Returns the command of a trainer's module, which is that of a PyTorchJob's workers."""
    if processes == 1:
        return python_command(module, *arguments)
    launch = python_command("services.trainer.launch", "--standalone")
    return [*launch, "--nproc-per-node", str(processes), "-m", module, *arguments]


def engine_share(rollout: RolloutConfig) -> float:
    """Returns the share of a GPU that the engines of a local run will take from the trainer's.

    vLLM takes `--gpu-memory-utilization` of the memory when it starts, which is after the trainer
    has planned with what is free. The engine `transformers` has started by then.
    """
    engine = rollout.engine
    if engine.kind != "vllm":
        return 0.0
    share = VLLM_MEMORY_SHARE
    arguments = [part for argument in engine.args for part in argument.split("=", 1)]
    for name, value in pairwise(arguments):
        if name == "--gpu-memory-utilization":
            share = float(value)
    return min(share * rollout.replicas, 1.0)


def _engines(run: LocalRun) -> list[str]:
    return [f"engine-{number}" for number in range(run.config.rollout.replicas * run.engines)]


def count_threads() -> int:
    """Returns the threads of a process: `OMP_NUM_THREADS` if a person has set it, or all cores."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdecimal() and int(threads) else os.cpu_count() or 1


def _threads() -> dict[str, str]:
    """Returns variables that let every process use all cores, without spinning while it waits.

    The engine and the trainer take turns more than they overlap, and spinning threads of one would
    occupy the cores that the other needs: a step then took twice as long.
    """
    return {
        "OMP_NUM_THREADS": str(count_threads()),
        "OMP_WAIT_POLICY": "PASSIVE",
        # vLLM pins its threads to cores, two vLLMs theirs to the same ones.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def engine_threads(rollout: RolloutConfig) -> dict[str, str]:
    """Returns variables that divide the cores of this machine among the replicas.

    With more threads than cores, the threads wait for each other: two vLLMs on two cores then
    generated a quarter of the tokens.
    """
    if rollout.engine.kind == "transformers":
        return {}  # Engine and trainer take turns, as `_threads` explains.
    return {"OMP_NUM_THREADS": str(max(1, count_threads() // rollout.replicas))}


def _show_progress(
    run: LocalRun, supervisor: Supervisor, client: BufferClient, state: wire.RunState
) -> None:
    """Returns when the trainer and the collector are done; shows progress until then.

    Raises `BapoError` when a process fails.
    """
    done = state.current_step
    config = run.config
    solved_at = config.task.solved_at
    display = RunDisplay(run.console, config.name, config.steps, done, solved_at=solved_at)
    evaluations: list[wire.Evaluation] = []
    open_now: list[wire.Rollouts] = []
    with display.shown():
        while True:
            finished = supervisor.finished("trainer") and (
                not run.engines or supervisor.finished("collector")
            )
            if any(supervisor.finished(engine) for engine in _engines(run)):
                raise BapoError("a rollout engine ended before the trainer")
            steps = client.steps(after=done)
            if steps:
                done = steps[-1].step
            progress = client.progress()
            open_before, open_now = open_now, progress.open_evaluations
            if steps or finished or open_now != open_before:
                # An evaluation may be complete before the first step, or after the last one.
                evaluations = client.evaluations()
            display.update(steps, evaluations, client.replicas(), progress)
            if finished:
                return
            time.sleep(POLL_INTERVAL_S)


def _raise_if_stopped(client: BufferClient, attempt: int, error: ProcessFailed) -> None:
    """Raises an error if a process has ended because the run was stopped, or was taken over.

    attempt: of the process. Raises `TakenOver` or another `BapoError`.
    """
    try:
        state = client.run_state()
    except BapoError:
        return  # The service may be what failed. The error to show is that of the process.
    stop = state.stopped
    if state.status == "stopped" and stop is not None and stop.by.startswith(TAKE_OVER):
        raise TakenOver(_describe_take_over(state, stop.at, f", by {stop.by}")) from error
    if state.status != "stopped" and state.attempt != attempt:
        raise TakenOver(_describe_take_over(state, state.attempt_began_at)) from error
    if state.status == "stopped":
        by = f" by {state.stopped.describe()}" if state.stopped is not None else ""
        raise BapoError(
            f"run {state.name!r} was stopped after step {state.current_step}{by}"
        ) from error


def _describe_take_over(state: wire.RunState, at: datetime | None, by: str = "") -> str:
    when = f" at {at.astimezone():%H:%M:%S}" if at is not None else ""
    return (
        f"another command took over run {state.name!r}{when}{by}; the processes of this one are "
        "stopped"
    )


def _record_end(client: BufferClient, status: wire.FinalStatus) -> None:
    try:
        client.set_status(status)
    except BapoError:
        # The service may be what failed. The error to show is the one that led here.
        return


def write_outputs(directory: Path, history: RunHistory, wall_seconds: float | None = None) -> None:
    """Writes `summary.json` and `report.html` to `directory`."""
    from services.report.html import write_report  # imports matplotlib

    directory.mkdir(parents=True, exist_ok=True)
    summary = summarise(history, wall_seconds)
    (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    write_report(history, summary, directory / "report.html")


def next_free_name(client: BufferClient, name: str, reports: Path) -> str:
    """Returns `name`, or the first of `name-2`, `name-3`, ... that is free.

    reports: directory of the reports, in which those of deleted runs stay.
    """
    taken = {state.name for state in client.runs()}
    if reports.is_dir():
        taken.update(path.name for path in reports.iterdir())
    number = 1
    candidate = name
    while candidate in taken:
        number += 1
        candidate = f"{name}-{number}"
    return candidate
