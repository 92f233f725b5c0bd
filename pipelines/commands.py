"""`bapo pipeline`: compiles, submits and runs the pipeline; lists and removes what one has left."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bapo_core.config import RunConfig, load_config
from bapo_core.errors import BapoError
from pipelines.bapo_pipeline import COUNTDOWN, SERVICE_IMAGE, TRAINER_IMAGE, bapo_pipeline
from pipelines.pytorchjob import Resources
from pipelines.settings import LOCAL_JOBS, LocalJobsSettings
from pipelines.steps import (
    LAST_ERROR,
    PipelineContext,
    TrainerJobs,
    cancel,
    delete_orphaned_jobs,
    orphaned_jobs,
    read_config,
)
from services.buffer.api.client import BufferClient
from services.common.process import end_with_parent, stop_on_signals
from services.common.settings import BufferClientSettings
from services.stack.stack import Endpoints, any_stack, default_home
from services.stack.supervisor import Supervisor, free_ports

RELEASE = "bapo"
_IMAGE = re.compile(r"[a-z0-9][\w.:/@-]*")


def parameters_of(config: str | None, given: Sequence[str]) -> dict[str, Any]:
    """The pipeline's arguments: its own parameters, a file as `config`, and what is left as
    `overrides`. Raises `BapoError` or `ConfigError`: here, and not in a pod."""
    if config is not None and "=" in config:
        given, config = [config, *given], None
    own, overrides = _own_parameters(given)
    if config is not None:
        own = {"run": load_config(config).name, "config": Path(config).read_text("utf-8")} | own
    if overrides:
        own["overrides"] = "\n".join(overrides)
    _config_of(own)
    for name in ("steps_per_segment", "start_within_minutes"):
        if own.get(name, 1) < 1:
            raise BapoError(f"{name} is {own[name]}; give at least 1")
    sizes = {"workers": "workers", "gpus_per_worker": "gpus", "cpu_per_worker": "cpu"}
    sizes["memory_per_worker"] = "memory"
    Resources(**{field: own[name] for name, field in sizes.items() if name in own})
    return own


def _config_of(values: Mapping[str, Any]) -> RunConfig:
    """The run's, by the pipeline's arguments or their defaults."""
    run = values.get("run", "countdown")
    return read_config(values.get("config", COUNTDOWN), values.get("overrides", ""), run)


def _own_parameters(given: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """(the pipeline's parameters, what else there is)."""
    known = bapo_pipeline.component_spec.inputs or {}
    own: dict[str, Any] = {}
    others = []
    for each in given:
        name, equals, value = each.partition("=")
        if not equals:
            raise BapoError(f"{each!r}: give parameter=value")
        if name not in known:
            others.append(each)
        elif known[name].type != "Integer":
            own[name] = value
        elif value.isdecimal():
            own[name] = int(value)
        else:
            raise BapoError(f"{name}={value}: give a whole number")
    return own, others


def compile_pipeline(arguments: argparse.Namespace) -> None:
    from kfp import compiler

    if arguments.output.suffix not in (".yaml", ".yml"):
        raise BapoError(f"{arguments.output}: Kubeflow takes a file that ends with .yaml")
    for image in (arguments.service, arguments.trainer):
        if not _IMAGE.fullmatch(image):
            raise BapoError(f"{image!r} is no image; give registry/name:tag")
        if image.endswith(":latest"):
            raise BapoError(f"{image}: latest is another image tomorrow; give a version")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    compiler.Compiler().compile(bapo_pipeline, str(arguments.output))
    text = arguments.output.read_text()
    for image, otherwise in (("service", SERVICE_IMAGE), ("trainer", TRAINER_IMAGE)):
        text = text.replace(f"image: {otherwise}\n", f"image: {getattr(arguments, image)}\n")
    arguments.output.write_text(text)
    print(arguments.output)


def submit(arguments: argparse.Namespace) -> None:
    # Of Python's own version.
    warnings.filterwarnings("ignore", category=FutureWarning)
    from kfp import Client
    from kfp_server_api.exceptions import ApiException
    from urllib3.exceptions import HTTPError, MaxRetryError

    values = parameters_of(arguments.config, arguments.parameters)
    _check_cluster_can(arguments.package, values)
    profile = {} if arguments.namespace is None else {"namespace": arguments.namespace}
    try:
        run = Client(host=arguments.host, **profile).create_run_from_pipeline_package(
            str(arguments.package),
            arguments=values,
            run_name=f"bapo {values.get('run', 'countdown')}",
            experiment_name=arguments.experiment,
            enable_caching=False,
            **profile,
        )
    except (ApiException, HTTPError) as error:
        if isinstance(error, MaxRetryError):
            error = error.reason or error
        reason = str(error).strip().splitlines()[0]
        raise BapoError(
            f"Kubeflow Pipelines did not take the run: {reason}; give --host, for example after "
            "`kubectl port-forward -n kubeflow svc/ml-pipeline-ui 8080:80`"
        ) from error
    print(run.run_id)


def _check_cluster_can(package: Path, values: Mapping[str, Any]) -> None:
    """What would only be found out in a pod. Raises `BapoError`."""
    if not package.is_file():
        raise BapoError(f"{package} is not there; `bapo pipeline compile --output {package}`")
    engine = _config_of(values).rollout.engine
    if engine != "vllm":
        raise BapoError(
            f"rollout.engine is {engine!r}, and the chart's rollouts are vLLM; add "
            "rollout.engine=vllm, or start from examples/countdown-vllm.yaml"
        )


def run_local(arguments: argparse.Namespace) -> None:
    """Everything but the cluster is real: the pipeline, its components as processes, the services,
    the rollouts, and the job's command under torchrun."""
    if arguments.replicas < 1:
        raise BapoError(f"--replicas is {arguments.replicas}; nothing is generated without one")
    stop_on_signals("stopping; the same command continues the run")
    values = parameters_of(arguments.config, arguments.parameters)
    home = default_home()
    root = arguments.output.resolve()
    error = home / "jobs" / LAST_ERROR
    error.unlink(missing_ok=True)
    with any_stack(home) as endpoints, _rollouts(home, endpoints, arguments.replicas) as connection:
        os.environ.update(connection)
        print(
            f"REST API  {endpoints.buffer_url}/docs  (token: in {home / 'stack.json'})", flush=True
        )
        code = _execute(
            {"gpus_per_worker": 0, "cpu_per_worker": str(os.cpu_count()), **values}, root
        )
    if code:
        why = error.read_text() if error.is_file() else "as it says above"
        raise BapoError(
            f"the pipeline failed: {why}; with that mended the same command continues the run, "
            f"logs are in {home / 'logs'}"
        )
    run = values.get("run", "countdown")
    newest = max(root.glob("bapo-*"), key=lambda path: path.stat().st_mtime)
    pages = sorted(newest.glob("**/report/page"), key=lambda path: path.stat().st_mtime)
    print(f"report   {pages[-1]}" if pages else f"no report in {newest}")
    print(f"model    {newest / 'export-model' / 'model'}")
    print(f"query    `bapo stack up`, then `bapo prompts {run}`")


def _execute(values: Mapping[str, Any], root: Path) -> int:
    """The exit code of the pipeline. Ended from outside, it leaves nothing at work."""
    scratch = tempfile.mkdtemp(prefix="bapo-kfp-")  # KFP leaves a file of every step
    process = subprocess.Popen(
        [sys.executable, "-m", "pipelines.execute", str(root)],
        env={**os.environ, "TMPDIR": scratch},
        stdin=subprocess.PIPE,
        text=True,
        preexec_fn=end_with_parent,
        start_new_session=True,
    )
    try:
        process.communicate(json.dumps(values))
    except (SystemExit, KeyboardInterrupt):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        context = PipelineContext.from_environment(values.get("run", "countdown"))
        cancel(context, TrainerJobs.from_environment())
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return process.returncode


@contextmanager
def _rollouts(home: Path, endpoints: Endpoints, replicas: int) -> Iterator[Mapping[str, str]]:
    """Replicas and a collector, as the chart deploys them; what its ConfigMap and Secrets say."""
    connection = connection_of(endpoints, home)
    environment = {**connection, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment |= {"OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    scratch = home / "scratch"
    with Supervisor(home / "logs") as supervisor:
        ports = free_ports(replicas + 1)
        for name, module, port in [
            *((f"rollout-{number}", "server", ports[number]) for number in range(replicas)),
            ("collector", "collector", ports[replicas]),
        ]:
            own = {
                "BAPO_REPLICA": name,
                "BAPO_PORT": str(port),
                "BAPO_SCRATCH": str(scratch / name),
            }
            supervisor.start(
                name,
                [
                    sys.executable,
                    "-m",
                    "services.rollout.run_watcher",
                    f"services.rollout.{module}",
                ],
                environment={**environment, **own},
                stop_within_s=40.0,
            )
        yield environment


def connection_of(endpoints: Endpoints, home: Path) -> dict[str, str]:
    """What the chart's connection ConfigMap and Secrets say, of the stack of this machine."""
    return {
        **endpoints.environment(),
        "BAPO_RELEASE": RELEASE,
        "BAPO_CONNECTION": f"{RELEASE}-connection",
        "BAPO_TOKEN_SECRET": f"{RELEASE}-token",
        "BAPO_S3_SECRET": f"{RELEASE}-s3",
        "BAPO_TRAINER_IMAGE": "none: processes of this machine",
        "BAPO_TRAINER_SERVICE_ACCOUNT": f"{RELEASE}-trainer",
        "BAPO_SCRATCH": str(home),
        LOCAL_JOBS: str(home / "jobs"),
    }


def reap(arguments: argparse.Namespace) -> None:
    from pipelines.backends import TrainerBackend
    from pipelines.local_jobs import LocalBackend

    backend: TrainerBackend
    local_jobs = LocalJobsSettings.load().local_jobs
    if local_jobs is not None:
        backend = LocalBackend(local_jobs)
    else:
        from pipelines.kubeflow import KubeflowBackend

        backend = KubeflowBackend(arguments.namespace, arguments.release)
    settings = BufferClientSettings.load()
    buffer = BufferClient(settings.buffer_url, settings.token.get_secret_value())
    lost = orphaned_jobs(buffer, backend)
    if arguments.delete:
        delete_orphaned_jobs(buffer, backend, lost)
    for name, run in sorted(lost.items()):
        print(f"{'deleted' if arguments.delete else 'lost'}  {name}  of run {run}")
    if not lost:
        print("no job is lost")
