"""Runs the pipeline on this machine.

Only the cluster is replaced: the pipeline is the compiled one's source, its components run as
processes, and the services, the rollouts and the trainer's command under torchrun are real.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bapo_core.config.rollouts import RolloutConfig
from bapo_core.errors import BapoError
from pipelines.parameters import FORK, RUN, check_imports, config_of, is_fork, run_of
from pipelines.settings import LOCAL_JOBS
from pipelines.steps import LAST_ERROR, PipelineContext, TrainerJobs, cancel
from services.cli.echo import echo
from services.cli.local_run import engine_threads
from services.cli.process_tokens import process_tokens
from services.cli.reward_files import store_parameters
from services.cli.run_lock import RunLock
from services.cli.service import client_of, format_addresses
from services.common.process import end_with_parent, python_command
from services.common.scopes import Scope
from services.stack.stack import Endpoints, find_or_start_stack
from services.stack.supervisor import Supervisor

RELEASE = "bapo"
STOP_ROLLOUTS_WITHIN_S = 40.0
"""Seconds that a replica may take to stop: a run watcher stops vLLM first."""


def run_pipeline(
    parameters: Mapping[str, Any],
    *,
    home: Path,
    output: Path,
    replicas: int,
    segments: int,
    imports: Collection[str] = (),
) -> Path:
    """Runs the pipeline to its end; returns the directory that its steps have written.

    Raises `BapoError` when a step fails; run again, it continues the run.
    """
    check_imports(imports, parameters)
    last_error = home / "jobs" / LAST_ERROR
    last_error.unlink(missing_ok=True)
    run = run_of(parameters)
    with (
        find_or_start_stack(home) as endpoints,
        RunLock(home, run).held(),
        process_tokens(
            client_of(endpoints, run),
            bound=("replica", "collector", "trainer"),
            unbound=("pipeline",),  # a step stores data sets, which are no run's
        ) as tokens,
        rollouts(
            home, endpoints, rollout_of(parameters, endpoints, replicas), tokens
        ) as environment,
    ):
        os.environ.update(environment)
        parameters = store_parameters(parameters, lambda: client_of(endpoints, run))
        echo(format_addresses(endpoints, home, with_token=sys.stdout.isatty()))
        resources = {"gpus_per_worker": 0, "cpu_per_worker": str(os.cpu_count())}
        name = {RUN: run}
        code = _execute({**resources, **parameters, **name}, output, segments, imports)
    if code:
        reason = last_error.read_text() if last_error.is_file() else "see the output above"
        raise BapoError(
            f"the pipeline failed: {reason}; once that is corrected, the same command continues "
            f"the run; logs are in {home / 'logs'}"
        )
    return max(output.glob("bapo-*"), key=lambda path: path.stat().st_mtime)


def rollout_of(parameters: Mapping[str, Any], endpoints: Endpoints, replicas: int) -> RolloutConfig:
    """Returns how the run generates its rollouts: as its parameters say, or the run of its fork.

    Raises `BapoError` if there is no run to fork.
    """
    if is_fork(parameters):
        rollout = client_of(endpoints, parameters[FORK]).run_state().config.rollout
    else:
        rollout = config_of(parameters).rollout
    return rollout.model_copy(update={"replicas": replicas})


def _execute(
    parameters: Mapping[str, Any], output: Path, segments: int, imports: Collection[str]
) -> int:
    """Returns the exit code of the pipeline; cancels the pipeline when this process is stopped."""
    # KFP leaves a temporary file for every step.
    scratch = tempfile.mkdtemp(prefix="bapo-kfp-")
    # Not a `ChildProcess`, because the parameters go through standard input.
    process = subprocess.Popen(
        python_command("pipelines.execute", str(output), str(segments), *imports),
        # The steps' processes ignore the working directory, too.
        env={**os.environ, "TMPDIR": scratch, "PYTHONSAFEPATH": "1"},
        stdin=subprocess.PIPE,
        text=True,
        preexec_fn=end_with_parent,
        start_new_session=True,
    )
    try:
        process.communicate(json.dumps(parameters))
    except (SystemExit, KeyboardInterrupt):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        context = PipelineContext.from_environment(run_of(parameters))
        cancel(context, TrainerJobs.from_environment(), "its pipeline was interrupted")
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return process.returncode


@contextmanager
def rollouts(
    home: Path, endpoints: Endpoints, rollout: RolloutConfig, tokens: Mapping[Scope, str]
) -> Iterator[Mapping[str, str]]:
    """Runs replicas and a collector as the chart deploys them; yields the steps' environment."""
    settings = {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    names = [f"rollout-{number}" for number in range(rollout.replicas)]
    with Supervisor(home / "logs") as supervisor:
        ports = supervisor.reserve_ports(len(names) + 1)

        def start(
            name: str, module: str, port: int, scope: Scope, variables: Mapping[str, str]
        ) -> None:
            process = {
                **endpoints.process_environment(tokens[scope]),
                "BAPO_REPLICA": name,
                "BAPO_PORT": str(port),
                "BAPO_SCRATCH": str(home / "scratch" / name),
            }
            supervisor.start(
                name,
                python_command("services.rollout.run_watcher", module),
                environment={**settings, **process, **variables},
                stop_within_s=STOP_ROLLOUTS_WITHIN_S,
            )

        for name, port in zip(names, ports[1:], strict=True):
            start(name, "services.rollout.server", port, "replica", engine_threads(rollout))
        verifier = endpoints.verifier_environment()
        start("collector", "services.rollout.collector", ports[0], "collector", verifier)
        yield {**connection_variables(endpoints, home, tokens), **settings}


def connection_variables(
    endpoints: Endpoints, home: Path, tokens: Mapping[Scope, str]
) -> dict[str, str]:
    """Returns what the steps get from the chart's connection ConfigMap and Secrets, and the
    trainer's token, for the local stack."""
    return {
        **endpoints.process_environment(tokens["pipeline"]),
        "BAPO_TRAINER_TOKEN": tokens["trainer"],
        "BAPO_DASHBOARD_URL": endpoints.buffer_url,
        "BAPO_RELEASE": RELEASE,
        "BAPO_CONNECTION": f"{RELEASE}-connection",
        "BAPO_TOKEN_SECRET": f"{RELEASE}-token",
        "BAPO_S3_SECRET": f"{RELEASE}-s3",
        "BAPO_TRAINER_IMAGE": "none: processes of this machine",
        "BAPO_TRAINER_SERVICE_ACCOUNT": f"{RELEASE}-trainer",
        "BAPO_SCRATCH": str(home),
        LOCAL_JOBS: str(home / "jobs"),
    }
