"""`bapo pipeline`: compiles, submits and runs the Kubeflow pipeline, and removes orphaned jobs."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bapo_core.errors import BapoError
from pipelines import IMPORTABLE, SEGMENTS
from services import VERSION
from services.cli import COMPILED
from services.cli.echo import echo
from services.cli.options import ConfigArguments, pipeline_arguments

if TYPE_CHECKING:
    from pipelines.backends import TrainerBackend
    from services.buffer.api.client import BufferClient

# Imported within functions: kfp takes seconds, and most modules of `pipelines` import it.


import_option = click.option(
    "--import",
    "imports",
    type=click.Choice(IMPORTABLE),
    multiple=True,
    help="Let this parameter hold the address of an artifact, which Kubeflow imports with its own "
    "credentials. May be repeated.",
)


@click.group
def pipeline() -> None:
    """Compile, submit or try the Kubeflow pipeline.

    docs/deploy.md explains what the pipeline does and how it is deployed.
    """


@pipeline.command("compile")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=COMPILED,
    metavar="FILE",
    help="File to write; its name ends with .yaml.",
)
@click.option(
    "--service-image",
    default=f"bapo/service:{VERSION}",
    metavar="IMAGE",
    help="The service image in your registry.",
)
@click.option(
    "--trainer-image",
    default=f"bapo/trainer:{VERSION}",
    metavar="IMAGE",
    help="The trainer image in your registry.",
)
@click.option(
    "--segments",
    type=int,
    default=SEGMENTS,
    metavar="COUNT",
    help="Parts that the training is divided into; each ends with a checkpoint and a report.",
)
@import_option
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="KEY=NAME",
    help="ConfigMap or Secret of the release: connection, token_secret, s3_secret, hub_secret or "
    "ca_bundle. Needed unless the release is named bapo. May be repeated.",
)
def compile_pipeline(
    output: Path,
    service_image: str,
    trainer_image: str,
    segments: int,
    imports: tuple[str, ...],
    names: tuple[str, ...],
) -> None:
    """Write the pipeline as a file for Kubeflow Pipelines.

    \b
    Examples:
      bapo pipeline compile --output bapo.yaml --service-image registry.example/bapo/service:0.3.0
      bapo pipeline compile --output imports.yaml --import model --import train_data
      bapo pipeline compile --output team.yaml --name connection=x-connection --name s3_secret=keys
    """
    from pipelines import submission

    submission.compile_pipeline(
        output,
        service_image=service_image,
        trainer_image=trainer_image,
        segments=segments,
        imports=imports,
        names=names,
    )
    echo(output)


@pipeline.command
@pipeline_arguments
@click.option("--host", metavar="URL", help="The KFP API; found as `kfp` finds it unless given.")
@click.option("--namespace", metavar="NAME", help="The Kubeflow profile to run in.")
@click.option("--experiment", default="bapo", metavar="NAME", help="Experiment of the run.")
@click.option(
    "--package",
    type=click.Path(path_type=Path),
    default=COMPILED,
    metavar="FILE",
    help="The compiled pipeline.",
)
@click.option(
    "--wait",
    is_flag=True,
    help="Wait for the end of the run, show its steps, and exit with 1 unless it succeeds.",
)
def submit(
    config: ConfigArguments,
    host: str | None,
    namespace: str | None,
    experiment: str,
    package: Path,
    wait: bool,
) -> None:
    """Start the pipeline on Kubeflow, and print the id of its run and where its page is.

    With a name (`name=NAME`, or in the file), the run is created, or continued if it exists.
    Without one, it is a new run, which is named after the run of Kubeflow. The file of
    `task.reward` is stored first, for which `BAPO_BUFFER_URL` and `BAPO_TOKEN` are needed.

    \b
    Examples:
      bapo pipeline submit examples/countdown-vllm.yaml name=mine workers=2 --namespace team
      bapo pipeline submit examples/countdown-vllm.yaml name=nightly-17 --wait
    """
    from pipelines.parameters import parameters_of
    from pipelines.submission import run_page, submit_pipeline, wait_for_run
    from services.cli.reward_files import store_parameters
    from services.cli.service import connect

    parameters = store_parameters(parameters_of(config.file, config.overrides), connect)
    run_id = submit_pipeline(
        package, parameters, host=host, namespace=namespace, experiment=experiment
    )
    echo(run_id)
    echo(f"its page: {run_page(host, run_id)}", err=True)
    if wait:
        log = partial(echo, err=True)
        wait_for_run(run_id, package, host=host, namespace=namespace, log=log)


@pipeline.command("run-local")
@pipeline_arguments
@click.option("--replicas", type=int, default=1, metavar="COUNT", help="Rollout replicas to start.")
@click.option(
    "--segments", type=int, default=SEGMENTS, metavar="COUNT", help="Parts of the training."
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("runs/pipeline"),
    metavar="DIRECTORY",
    help="Directory for what the steps write.",
)
@import_option
def run_local(
    config: ConfigArguments,
    replicas: int,
    segments: int,
    output: Path,
    imports: tuple[str, ...],
) -> None:
    """Run the pipeline on this machine, without a cluster.

    Services, rollouts and the trainer under torchrun are real. The same command continues a run
    that was interrupted.

    \b
    Example:
      bapo pipeline run-local examples/countdown.yaml name=mine steps=50 --segments 2
    """
    from pipelines.parameters import parameters_of, run_of
    from services.cli.pipeline_local import run_pipeline
    from services.common.process import stop_on_signals
    from services.stack.settings import default_home

    if replicas < 1:
        raise BapoError(f"--replicas is {replicas}; at least one replica is needed to generate")
    stop_on_signals("stopping; the same command continues the run")
    parameters = parameters_of(config.file, config.overrides)
    written = run_pipeline(
        parameters,
        home=default_home(),
        output=output.resolve(),
        replicas=replicas,
        segments=segments,
        imports=imports,
    )
    pages = sorted(written.glob("**/page"), key=lambda path: path.stat().st_mtime)
    if pages:
        # Kubeflow's artifacts have no suffix, by which browsers know a page.
        report = shutil.copyfile(pages[-1], pages[-1].with_suffix(".html"))
        echo(f"report   {report}")
    else:
        echo(f"no report in {written}")
    echo(f"model    {written / 'evaluate-and-export' / 'model'}")
    echo(f"query    `bapo stack up`, then `bapo prompts {run_of(parameters)}`")


@pipeline.command
@click.option(
    "--namespace", default="default", metavar="NAME", help="Kubernetes namespace of the jobs."
)
@click.option("--release", default="bapo", metavar="NAME", help="Release of the chart.")
@click.option("--delete", is_flag=True, help="Delete the jobs, and stop the runs.")
def reap(namespace: str, release: str, delete: bool) -> None:
    """List jobs and runs whose pipeline has ended, and jobs whose run is not at work.

    The chart does this every few minutes. Needs `BAPO_BUFFER_URL` and `BAPO_TOKEN`.
    """
    from pipelines.steps import find_orphans, remove_orphans

    backend, buffer = _backend(namespace, release), _buffer()
    orphans = find_orphans(buffer, backend)
    if delete:
        remove_orphans(buffer, backend, orphans, echo)
    for name, run in sorted(orphans.jobs.items()):
        echo(f"{'deleted' if delete else 'orphaned'}  job {name} of run {run}")
    for run in sorted(orphans.runs):
        echo(f"{'stopped' if delete else 'orphaned'}  run {run}")
    if not orphans.jobs and not orphans.runs:
        echo("no job and no run is orphaned")


@pipeline.command("scale-rollouts")
@click.option("--namespace", default="default", metavar="NAME", help="Kubernetes namespace.")
@click.option("--statefulset", metavar="NAME", help="The rollout replicas of one pod each.")
@click.option("--leader-worker-set", metavar="NAME", help="The rollout replicas of several pods.")
@click.option("--replicas", required=True, type=int, metavar="COUNT", help="Replicas for a run.")
@click.option(
    "--idle-minutes", default=10, metavar="MINUTES", help="Time without a run, before zero."
)
def scale_rollouts(
    namespace: str,
    statefulset: str | None,
    leader_worker_set: str | None,
    replicas: int,
    idle_minutes: int,
) -> None:
    """Scale the rollout replicas up for a run, and to zero without one, until this is ended.

    The chart does this with `rollout.scaleToZero`. Needs `BAPO_BUFFER_URL` and `BAPO_TOKEN`.
    """
    from pipelines.cluster import Cluster
    from pipelines.scaling import LEADER_WORKER_SETS, STATEFUL_SETS, RolloutScaler
    from services.common.process import stop_on_signals

    named = [
        (kind, name)
        for kind, name in ((STATEFUL_SETS, statefulset), (LEADER_WORKER_SETS, leader_worker_set))
        if name
    ]
    if len(named) != 1:
        raise click.UsageError("give either --statefulset or --leader-worker-set")
    ((kind, name),) = named
    stop_on_signals()
    cluster = Cluster(namespace)
    RolloutScaler(_buffer(), cluster, kind, name, replicas, idle_minutes * 60, echo).run()


def _buffer() -> BufferClient:
    from services.buffer.api.client import BufferClient
    from services.common.settings import BufferClientSettings

    settings = BufferClientSettings.load()
    return BufferClient(settings.buffer_url, settings.token.get_secret_value())


def _backend(namespace: str, release: str) -> TrainerBackend:
    """Returns the backend of `bapo pipeline run-local` in one of its processes, else Kubernetes."""
    from pipelines.settings import LocalJobsSettings

    local_jobs = LocalJobsSettings.load().local_jobs
    if local_jobs is not None:
        from pipelines.local_jobs import LocalBackend

        return LocalBackend(local_jobs)
    from pipelines.kubeflow import KubeflowBackend

    return KubeflowBackend(namespace, release)
