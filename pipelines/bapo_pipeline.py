"""The Kubeflow pipeline. Its components only call `pipelines.steps`; they run on our own images.

Compiled to `bapo_pipeline.yaml` by `bapo pipeline compile`. KFP takes each component's source from
its function: everything that a component needs is imported within it.
"""
# No `from __future__ import annotations`: KFP reads the annotations themselves.

from typing import Any

from kfp import dsl, kubernetes

SERVICE_IMAGE, TRAINER_IMAGE = "bapo/service:0.2.0", "bapo/trainer:0.2.0"
"""Part of the pipeline; `bapo pipeline compile` puts others in their place."""
ON_SERVICE = {"base_image": SERVICE_IMAGE, "install_kfp_package": False}
ON_TRAINER = {"base_image": TRAINER_IMAGE, "install_kfp_package": False}
RETRIES = 3

COUNTDOWN = (
    "{steps: 200, model: {path: tiny}, "
    "task: {name: countdown, options: {template: short}, train_prompts: 2000, test_prompts: 200}, "
    "rollout: {engine: vllm, prompts_per_step: 64, group_size: 8, max_prompt_tokens: 32, "
    "max_response_tokens: 32, vllm_args: [--enforce-eager, --max-num-seqs, '256']}, "
    "optimizer: {learning_rate: 1.0e-4, minibatch_prompts: 16, microbatch_tokens: 2048}, "
    "evaluation: {every: 20}}"
)
"""What `examples/countdown-vllm.yaml` says, on one line: KFP puts defaults into a comment."""


@dsl.component(**ON_TRAINER)
def prepare_data(run: str, config: str, overrides: str) -> str:
    """Stores the prompts and the initial model."""
    from pipelines import steps

    with steps.step(run) as (around, _):
        return steps.prepare(around, config, overrides)


@dsl.component(**ON_SERVICE)
def create_or_resume_run(run: str, request: str, steps_per_segment: int) -> list[int]:
    """Creates the run, or finds it as it was left; the segments to do."""
    from pipelines import steps

    with steps.step(run) as (around, _):
        return steps.open_run(around, request, steps_per_segment)


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
    """Trains to step `until` with the run's PyTorchJob, which it creates if need be."""
    from pipelines import steps
    from pipelines.pytorchjob import Resources

    with steps.step(run) as (around, trainers):
        steps.train(
            around,
            trainers,
            until,
            Resources(workers=workers, gpus=gpus_per_worker, cpu=cpu, memory=memory),
            start_within_s=60.0 * start_within_minutes,
        )
    return until


@dsl.component(**ON_SERVICE)
def checkpoint_and_sync(run: str, until: int) -> int:
    """Waits until every replica serves the weights published with the checkpoint."""
    from pipelines import steps

    with steps.step(run) as (around, _):
        return steps.sync(around, until)


@dsl.component(**ON_SERVICE)
def report(
    run: str,
    version: int,
    metrics: dsl.Output[dsl.Metrics],
    page: dsl.Output[dsl.HTML],
    summary: dsl.Output[dsl.Markdown],
) -> None:
    """The run so far: metrics, pictures, a summary."""
    from pathlib import Path

    from pipelines import steps

    with steps.step(run) as (around, _):
        found = steps.report(around)
    metrics.log_metric("policy_version", version)
    for name, value in found.metrics.items():
        metrics.log_metric(name, value)
    Path(page.path).write_text(found.page)
    Path(summary.path).write_text(found.markdown)


@dsl.component(**ON_SERVICE)
def evaluate(run: str, versions: list, metrics: dsl.Output[dsl.Metrics]) -> float:  # type: ignore[type-arg]
    """The final weights on the held-out prompts, once all segments are done."""
    from pipelines import steps

    with steps.step(run) as (around, _):
        found = steps.evaluate(around)
    for name, value in found.items():
        metrics.log_metric(name, value)
    return found["held_out_accuracy"]


@dsl.component(**ON_SERVICE)
def export_model(run: str, accuracy: float, model: dsl.Output[dsl.Model]) -> None:
    """The final weights as a Hugging Face directory."""
    from pathlib import Path

    from pipelines import steps

    with steps.step(run) as (around, _):
        model.metadata.update(steps.export(around, Path(model.path)))
    model.metadata["held_out_accuracy"] = accuracy


@dsl.component(**ON_SERVICE)
def clean_up(run: str) -> str:
    """Deletes the job, and says of the run how it ended."""
    from pipelines import steps

    with steps.step(run) as (around, trainers):
        return steps.clean_up(around, trainers)


def _connected(task: Any, connection: Any, token_secret: Any, s3_secret: Any) -> Any:
    """The task knows the release of the chart, is never answered from a cache, and is repeated."""
    names = {name: name for name in CONNECTION}
    kubernetes.use_config_map_as_env(task, connection, names)
    kubernetes.use_secret_as_env(task, token_secret, {"BAPO_TOKEN": "BAPO_TOKEN"})
    keys = {name: name for name in ("BAPO_S3_ACCESS_KEY", "BAPO_S3_SECRET_KEY")}
    kubernetes.use_secret_as_env(task, s3_secret, keys)
    kubernetes.use_field_path_as_env(
        task, "BAPO_WORKFLOW", "metadata.labels['workflows.argoproj.io/workflow']"
    )
    # The services' network policies let these pods in.
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
"""Keys of the connection ConfigMap that the chart makes."""


@dsl.pipeline(
    name="bapo",
    description="Off-policy reinforcement learning from verifiable rewards: trains a run of BAPO, "
    "or continues it where it was left.",
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
        run: Name of the run: lower-case letters, digits and hyphens. One that exists is continued.
        config: The run's configuration as YAML (docs/configuration.md lists every key).
        overrides: Changes to it, one `key=value` a line, for example `steps=400`.
        steps_per_segment: After how many steps at least the pipeline waits for a checkpoint and
            the replicas, and writes a report. Training goes on meanwhile.
        workers: Pods of the PyTorchJob.
        gpus_per_worker: GPUs of each; 0 trains on CPUs.
        cpu_per_worker: Cores that each asks for.
        memory_per_worker: Memory that each may take.
        start_within_minutes: How long to wait for nodes before giving up.
        connection: ConfigMap of the chart's release with its addresses.
        token_secret: Secret of the release with the services' token.
        s3_secret: Secret of the release with the object store's keys.
    """

    def connected(task: Any) -> Any:
        return _connected(task, connection, token_secret, s3_secret)

    cleaning = connected(clean_up(run=run))
    with dsl.ExitHandler(cleaning, name="training"):
        prepared = connected(prepare_data(run=run, config=config, overrides=overrides))
        opened = connected(
            create_or_resume_run(
                run=run, request=prepared.output, steps_per_segment=steps_per_segment
            )
        )
        with dsl.ParallelFor(opened.output, parallelism=1, name="segments") as until:
            trained = connected(
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
            synced = connected(checkpoint_and_sync(run=run, until=trained.output))
            connected(report(run=run, version=synced.output))
        evaluated = connected(evaluate(run=run, versions=dsl.Collected(synced.output)))
        connected(export_model(run=run, accuracy=evaluated.outputs["Output"]))
