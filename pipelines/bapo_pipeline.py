"""Defines the Kubeflow pipeline, which `bapo pipeline compile` compiles to `bapo_pipeline.yaml`.

Its components only call `pipelines.steps`, on the project's own images. KFP takes each component's
source from its function, so a component imports what it needs itself.
"""
# No `from __future__ import annotations`: KFP needs the annotations as objects.

from typing import Any

from kfp import dsl, kubernetes

SERVICE_IMAGE, TRAINER_IMAGE = "bapo/service:0.2.0", "bapo/trainer:0.2.0"
"""Images of the components; `bapo pipeline compile` can replace them."""
ON_SERVICE = {"base_image": SERVICE_IMAGE, "install_kfp_package": False}
ON_TRAINER = {"base_image": TRAINER_IMAGE, "install_kfp_package": False}
RETRIES = 3
"""Retries of each step."""

COUNTDOWN = (
    "{steps: 120, model: {path: tiny}, "
    "task: {name: countdown, options: {template: short}, train_prompts: 2000, test_prompts: 200}, "
    "rollout: {engine: vllm, prompts_per_step: 64, group_size: 8, max_prompt_tokens: 32, "
    "max_response_tokens: 32, vllm_args: [--enforce-eager, --max-num-seqs, '256']}, "
    "optimizer: {learning_rate: 1.0e-4, minibatch_prompts: 16, microbatch_tokens: 2048}, "
    "evaluation: {every: 20}}"
)
"""`examples/countdown-vllm.yaml` on one line, because KFP writes defaults into a comment."""


@dsl.component(**ON_TRAINER)
def prepare_data(run: str, config: str, overrides: str) -> str:
    """Stores the prompts and the initial model in the object store."""
    from pipelines import steps

    with steps.pipeline_step(run) as (context, _):
        return steps.prepare(context, config, overrides)


@dsl.component(**ON_SERVICE)
def create_or_resume_run(run: str, request: str, steps_per_segment: int) -> list[int]:
    """Creates the run or continues it; returns the last steps of the segments that remain."""
    from pipelines import steps

    with steps.pipeline_step(run) as (context, _):
        return steps.open_run(context, request, steps_per_segment)


@dsl.component(**ON_SERVICE)
def train(
    run: str,
    until: int,
    workers: int,
    gpus_per_worker: int,
    cpu: str,
    memory: str,
    start_within_minutes: int,
) -> int:
    """Waits until the run's PyTorchJob has trained step `until`; creates the job if necessary."""
    from pipelines import steps
    from pipelines.pytorchjob import Resources

    with steps.pipeline_step(run) as (context, jobs):
        steps.train(
            context,
            jobs,
            until,
            Resources(workers=workers, gpus=gpus_per_worker, cpu=cpu, memory=memory),
            start_within_s=60.0 * start_within_minutes,
        )
    return until


@dsl.component(**ON_SERVICE)
def checkpoint_and_sync(run: str, until: int) -> int:
    """Waits until every replica serves the weights published with the segment's checkpoint."""
    from pipelines import steps

    with steps.pipeline_step(run) as (context, _):
        return steps.sync(context, until)


@dsl.component(**ON_SERVICE)
def report(
    run: str,
    version: int,
    metrics: dsl.Output[dsl.Metrics],
    page: dsl.Output[dsl.HTML],
    summary: dsl.Output[dsl.Markdown],
) -> None:
    """Reports the run so far: metrics, an HTML page with charts, and a summary."""
    from pathlib import Path

    from pipelines import steps

    with steps.pipeline_step(run) as (context, _):
        run_report = steps.report(context)
    metrics.log_metric("policy_version", version)
    for name, value in run_report.metrics.items():
        metrics.log_metric(name, value)
    Path(page.path).write_text(run_report.page)
    Path(summary.path).write_text(run_report.markdown)


@dsl.component(**ON_SERVICE)
def evaluate(run: str, versions: list, metrics: dsl.Output[dsl.Metrics]) -> float:  # type: ignore[type-arg]
    """Waits for the evaluation of the final weights on the held-out prompts."""
    from pipelines import steps

    with steps.pipeline_step(run) as (context, _):
        evaluation = steps.evaluate(context)
    for name, value in evaluation.items():
        metrics.log_metric(name, value)
    return evaluation["held_out_accuracy"]


@dsl.component(**ON_SERVICE)
def export_model(run: str, accuracy: float, model: dsl.Output[dsl.Model]) -> None:
    """Exports the final weights as a Hugging Face directory."""
    from pathlib import Path

    from pipelines import steps

    with steps.pipeline_step(run) as (context, _):
        model.metadata.update(steps.export(context, Path(model.path)))
    model.metadata["held_out_accuracy"] = accuracy


@dsl.component(**ON_SERVICE)
def clean_up(run: str) -> str:
    """Deletes the PyTorchJob, and marks the run as finished or stops it."""
    from pipelines import steps

    with steps.pipeline_step(run) as (context, jobs):
        return steps.clean_up(context, jobs)


def _connect(task: Any, connection: Any, token_secret: Any, s3_secret: Any) -> Any:
    """Gives a task the release's ConfigMap and Secrets, disables its cache and enables retries."""
    names = {name: name for name in CONNECTION}
    kubernetes.use_config_map_as_env(task, connection, names)
    kubernetes.use_secret_as_env(task, token_secret, {"BAPO_TOKEN": "BAPO_TOKEN"})
    keys = {name: name for name in ("BAPO_S3_ACCESS_KEY", "BAPO_S3_SECRET_KEY")}
    kubernetes.use_secret_as_env(task, s3_secret, keys)
    kubernetes.use_field_path_as_env(
        task, "BAPO_WORKFLOW", "metadata.labels['workflows.argoproj.io/workflow']"
    )
    # The services' network policies admit pods with this label.
    kubernetes.add_pod_label(task, "app.kubernetes.io/part-of", "bapo")
    task.set_caching_options(False)
    task.set_env_variable("HOME", "/tmp")
    return task.set_retry(RETRIES)


CONNECTION = (
    "BAPO_BUFFER_URL",
    "BAPO_VERIFIER_URL",
    "BAPO_S3_ENDPOINT",
    "BAPO_S3_BUCKET",
    "BAPO_RELEASE",
    "BAPO_CONNECTION",
    "BAPO_TOKEN_SECRET",
    "BAPO_S3_SECRET",
    "BAPO_TRAINER_IMAGE",
    "BAPO_TRAINER_SERVICE_ACCOUNT",
    "BAPO_TRAINER_QUEUE",
    "BAPO_TRAINER_PULL_SECRETS",
    "BAPO_TRAINER_PULL_POLICY",
    "BAPO_TRAINER_PRIORITY_CLASS",
    "BAPO_TRAINER_NODE_SELECTOR",
    "BAPO_TRAINER_TOLERATIONS",
)
"""Keys of the chart's connection ConfigMap that every step gets as variables."""


@dsl.pipeline(
    name="bapo",
    description="Off-policy reinforcement learning from verifiable rewards: trains a run of BAPO, "
    "or continues it from its last checkpoint.",
)
def bapo_pipeline(
    run: str = "countdown",
    config: str = COUNTDOWN,
    overrides: str = "",
    steps_per_segment: int = 50,
    workers: int = 1,
    gpus_per_worker: int = 1,
    cpu_per_worker: str = "4",
    memory_per_worker: str = "32Gi",
    start_within_minutes: int = 60,
    connection: str = "bapo-connection",
    token_secret: str = "bapo-token",
    s3_secret: str = "bapo-s3",
) -> None:
    """Trains a run with BAPO.

    Args:
        run: Name of the run: lower-case letters, digits and hyphens. An existing run is continued.
        config: The run's configuration as YAML; docs/configuration.md describes every key.
        overrides: Changes to the configuration, one `key=value` a line, for example `steps=400`.
        steps_per_segment: Training steps of a segment, at least. At its end the pipeline waits for
            a checkpoint and for the replicas, and writes a report. Training goes on meanwhile.
        workers: Number of pods of the PyTorchJob.
        gpus_per_worker: GPUs of each worker; 0 trains on CPUs.
        cpu_per_worker: Cores that each worker requests, for example `4` or `500m`.
        memory_per_worker: Memory request and limit of each worker, for example `32Gi`.
        start_within_minutes: Minutes to wait for nodes before the step fails.
        connection: Name of the ConfigMap with the addresses of the chart's release.
        token_secret: Name of the release's Secret with the services' token.
        s3_secret: Name of the release's Secret with the object store's keys.
    """

    def connect(task: Any) -> Any:
        return _connect(task, connection, token_secret, s3_secret)

    cleaned = connect(clean_up(run=run))
    with dsl.ExitHandler(cleaned, name="training"):
        prepared = connect(prepare_data(run=run, config=config, overrides=overrides))
        opened = connect(
            create_or_resume_run(
                run=run, request=prepared.output, steps_per_segment=steps_per_segment
            )
        )
        with dsl.ParallelFor(opened.output, parallelism=1, name="segments") as until:
            trained = connect(
                train(
                    run=run,
                    until=until,
                    workers=workers,
                    gpus_per_worker=gpus_per_worker,
                    cpu=cpu_per_worker,
                    memory=memory_per_worker,
                    start_within_minutes=start_within_minutes,
                )
            )
            synced = connect(checkpoint_and_sync(run=run, until=trained.output))
            connect(report(run=run, version=synced.output))
        evaluated = connect(evaluate(run=run, versions=dsl.Collected(synced.output)))
        connect(export_model(run=run, accuracy=evaluated.outputs["Output"]))
