"""Defines the Kubeflow pipeline, which `bapo pipeline compile` compiles to `bapo_pipeline.yaml`.

Its components only call `pipelines.steps`, on the project's own images. KFP takes each component's
source from its function, so a component imports what it needs itself.
"""
# No `from __future__ import annotations`: KFP needs the annotations as objects.

from collections.abc import Mapping
from functools import cache
from typing import Any

from kfp import dsl, kubernetes

from pipelines import RELEASE_NAMES, SEGMENTS
from pipelines.configuration import COUNTDOWN
from pipelines.training_job import CA_DIRECTORY

SERVICE_IMAGE, TRAINER_IMAGE = "bapo/service:0.3.0", "bapo/trainer:0.3.0"
"""Images of the components; `bapo pipeline compile` can replace them."""
ON_SERVICE = {"base_image": SERVICE_IMAGE, "install_kfp_package": False}
ON_TRAINER = {"base_image": TRAINER_IMAGE, "install_kfp_package": False}
RETRIES = 3
"""Automatic retries of each step whose pod disappears. Kubeflow 2.17 retries no step that fails."""
MAX_SEGMENTS = 50
"""Argo's Workflow object grows with every task, and etcd limits its size."""
WATCHER, REPORTER, PREPARER = ("150Mi", "1Gi"), ("300Mi", "4Gi"), ("1Gi", "16Gi")
"""Request and limit of the memory of a step that only waits, of one that reads a run's history or
its weights, and of the one that loads prompts and stores the model."""


@dsl.component(**ON_TRAINER)
def import_model(run: str, artifact: dsl.Input[dsl.Model]) -> str:
    """Stores an imported model in the object store; returns its `model.path`."""
    from pathlib import Path

    from pipelines import steps

    with steps.pipeline_step(run) as (context, _):
        return steps.import_model(context, Path(artifact.path))


@dsl.component(**ON_SERVICE)
def import_data(run: str, artifact: dsl.Input[dsl.Dataset]) -> str:
    """Stores an imported data set in the object store; returns its address."""
    from pathlib import Path

    from pipelines import steps

    with steps.pipeline_step(run) as (context, _):
        return steps.import_data(context, Path(artifact.path))


@dsl.component(**ON_TRAINER)
def prepare_run(
    run: str,
    kubeflow_run: str,
    config: dict[str, Any],
    stored_config: str,
    overrides: list[str],
    model: str,
    task: str,
    train_data: str,
    test_data: str,
    training_steps: int,
    learning_rate: float,
    prompts_per_step: int,
    group_size: int,
    fork_of: str,
    fork_step: int,
    configuration: dsl.Output[dsl.Markdown],
) -> None:
    """Stores the prompts and the initial model; creates the run, or continues one of its name.

    A fork has the prompts and the model of the run that it comes from.

    The artifact is the run's whole configuration, with all that the parameters changed.
    """
    from pathlib import Path

    from pipelines import steps
    from pipelines.configuration import load_stored_config, read_config, read_fork

    settings = {
        "model": model,
        "task": task,
        "train_data": train_data,
        "test_data": test_data,
        "steps": training_steps,
        "learning_rate": learning_rate,
        "prompts_per_step": prompts_per_step,
        "group_size": group_size,
    }
    with steps.pipeline_step(run, kubeflow_run) as (context, jobs):
        steps.check_run(context, jobs, fork_of)
        name = context.buffer.run
        fork = read_fork(name, fork_of, fork_step, config, stored_config, overrides, settings)
        if fork is not None:
            stored = steps.open_fork(context, jobs, fork_of, fork)
        else:
            text = load_stored_config(stored_config, context.buffer, context.store)
            run_config = read_config(name, config, text, overrides, settings)
            stored = steps.open_run(context, jobs, steps.prepare(context, run_config))
        Path(configuration.path).write_text(steps.describe_config(stored))


@dsl.component(**ON_SERVICE)
def train(
    run: str,
    kubeflow_run: str,
    segment: int,
    segments: int,
    workers: int,
    gpus_per_worker: int,
    cpu: str,
    memory: str,
    start_within_minutes: int,
) -> None:
    """Waits until the run's training job has trained a segment; creates the job if necessary."""
    from pipelines import steps
    from pipelines.training_job import Resources

    with steps.pipeline_step(run, kubeflow_run) as (context, jobs):
        steps.train(
            context,
            jobs,
            steps.segment_end(context, segment, segments),
            Resources(workers=workers, gpus=gpus_per_worker, cpu=cpu, memory=memory),
            start_within_s=60.0 * start_within_minutes,
        )


@dsl.component(**ON_SERVICE)
def sync(
    run: str,
    kubeflow_run: str,
    segment: int,
    segments: int,
    metrics: dsl.Output[dsl.Metrics],
    page: dsl.Output[dsl.HTML],
    summary: dsl.Output[dsl.Markdown],
) -> None:
    """Waits until every replica serves the weights published with the segment's checkpoint.

    Then reports the run at the end of the segment: metrics and a summary, and an HTML page with
    charts of the run so far.
    """
    from pipelines import steps

    with steps.pipeline_step(run, kubeflow_run) as (context, jobs):
        until = steps.segment_end(context, segment, segments)
        version = steps.sync(context, jobs, until)
        run_report = steps.report(context, until)
        steps.write_metrics(metrics, {"policy_version": version, **run_report.metrics})
        run_report.write(page.path, summary.path)


@dsl.component(**ON_SERVICE)
def evaluate_and_export(
    run: str,
    kubeflow_run: str,
    metrics: dsl.Output[dsl.Metrics],
    page: dsl.Output[dsl.HTML],
    summary: dsl.Output[dsl.Markdown],
    model: dsl.Output[dsl.Model],
) -> float:
    """Waits for the evaluation of the final weights, reports the run, and exports its model.

    The model is a Hugging Face directory. The step also ends the run: clean-up does so, too, but
    Kubeflow does not repeat clean-up when a run is retried.
    """
    from pathlib import Path

    from pipelines import steps

    with steps.pipeline_step(run, kubeflow_run) as (context, jobs):
        evaluation = steps.evaluate(context, jobs)
        run_report = steps.report(context)
        steps.write_metrics(metrics, {**run_report.metrics, **evaluation})
        run_report.write(page.path, summary.path)
        model.metadata.update(steps.export(context, Path(model.path)))
        steps.clean_up(context, jobs)
    model.metadata["held_out_accuracy"] = evaluation["held_out_accuracy"]
    return evaluation["held_out_accuracy"]


@dsl.component(**ON_SERVICE)
def clean_up(run: str, kubeflow_run: str) -> str:
    """Deletes the training job, and marks the run as finished or stops it."""
    from pipelines import steps

    with steps.pipeline_step(run, kubeflow_run) as (context, jobs):
        return steps.clean_up(context, jobs)


CONNECTION = (
    "BAPO_BUFFER_URL",
    "BAPO_VERIFIER_URL",
    "BAPO_DASHBOARD_URL",
    "BAPO_S3_ENDPOINT",
    "BAPO_S3_BUCKET",
    "BAPO_S3_REGION",
    "BAPO_S3_PATH_STYLE",
    "BAPO_S3_CREDENTIALS",
    "BAPO_RELEASE",
    "BAPO_CONNECTION",
    "BAPO_TOKEN_SECRET",
    "BAPO_TRAINER_TOKEN_KEY",
    "BAPO_S3_SECRET",
    "BAPO_CA_BUNDLE",
    "BAPO_TRAINER_IMAGE",
    "BAPO_TRAINER_SERVICE_ACCOUNT",
    "BAPO_TRAINER_JOB_KIND",
    "BAPO_TRAINER_QUEUE",
    "BAPO_TRAINER_PULL_SECRETS",
    "BAPO_TRAINER_PULL_POLICY",
    "BAPO_TRAINER_POD",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "SSL_CERT_FILE",
    "HF_ENDPOINT",
)
"""Keys of the chart's connection ConfigMap that every step gets as variables."""


def _connect(task: Any, names: Mapping[str, str]) -> Any:
    """Gives a task the release's ConfigMap and Secrets, disables its cache and enables retries.

    names: of `RELEASE_NAMES`. They are compiled into the pipeline, because Kubeflow 2.17 takes the
    name of a Secret from a whole parameter only, and five of them fill the form of every run.

    All of them are optional for Kubernetes, because a pod that lacks one would wait for ever and
    say nothing. The step itself says what it lacks.
    """
    variables = {name: name for name in CONNECTION}
    kubernetes.use_config_map_as_env(task, names["connection"], variables, optional=True)
    token = {"BAPO_PIPELINE_TOKEN": "BAPO_TOKEN"}
    kubernetes.use_secret_as_env(task, names["token_secret"], token, optional=True)
    keys = {name: name for name in ("BAPO_S3_ACCESS_KEY", "BAPO_S3_SECRET_KEY")}
    kubernetes.use_secret_as_env(task, names["s3_secret"], keys, optional=True)
    kubernetes.use_config_map_as_volume(
        task, names["ca_bundle"], mount_path=CA_DIRECTORY, optional=True
    )
    kubernetes.use_field_path_as_env(
        task, "BAPO_WORKFLOW", "metadata.labels['workflows.argoproj.io/workflow']"
    )
    # The services' network policies admit pods with this label.
    kubernetes.add_pod_label(task, "app.kubernetes.io/part-of", "bapo")
    task.set_caching_options(False)
    task.set_env_variable("HOME", "/tmp")
    return task.set_retry(RETRIES)


def _size(task: Any, memory: str, limit: str) -> Any:
    """Gives a task requests and limits, without which a namespace with a quota refuses its pod.

    memory: request; limit: memory limit. All steps mostly wait, for the network or for others.
    """
    task.set_cpu_request("100m").set_cpu_limit("2")
    return task.set_memory_request(memory).set_memory_limit(limit)


@cache
def build_pipeline(
    segments: int = SEGMENTS,
    imports: frozenset[str] = frozenset(),
    release: frozenset[tuple[str, str]] = frozenset(),
) -> Any:
    """Builds the pipeline with this number of segments, as KFP compiles or runs it.

    imports: those of the parameters `IMPORTABLE` that hold the address of an artifact, which
        Kubeflow imports. release: the names that differ from `RELEASE_NAMES`.

    The segments are tasks of their own and not iterations of a loop. So a failed step ends the
    graph at once, Kubeflow's "Retry" continues at the failed step, and the graph shows which
    segment is being trained.
    """

    names = RELEASE_NAMES | dict(release)

    @dsl.pipeline(
        name="bapo",
        description="Off-policy reinforcement learning from verifiable rewards: trains a run of "
        "BAPO, or continues it from its last checkpoint.",
    )
    def bapo_pipeline(
        bapo_run: str = "",
        config: dict[str, Any] = COUNTDOWN,
        stored_config: str = "",
        overrides: list[str] = [],  # noqa: B006
        model: str = "",
        task: str = "",
        train_data: str = "",
        test_data: str = "",
        steps: int = 0,
        learning_rate: float = 0.0,
        prompts_per_step: int = 0,
        group_size: int = 0,
        fork_of: str = "",
        fork_step: int = 0,
        workers: int = 1,
        gpus_per_worker: int = 1,
        cpu_per_worker: str = "4",
        memory_per_worker: str = "32Gi",
        start_within_minutes: int = 60,
    ) -> None:
        """Trains a run with BAPO.

        Args:
            bapo_run: Name of the run: lower-case letters, digits and hyphens. Empty: a new run,
                named after this run of Kubeflow. A name: the run is created, or, if it exists,
                continued.
            config: The run's configuration; docs/configuration.md describes every key.
            stored_config: A stored configuration that replaces `config`: the name that `bapo config
                push` gave it, the address `s3://bucket/key` of a YAML file, or
                `configmap:NAME/KEY`.
            overrides: Changes to the configuration, as a list of `key=value`, for example
                `["optimizer.weight_decay=0.1"]`. They replace every other value.
            model: Model to train, `model.path` of the configuration, for example
                `hf://Qwen/Qwen3-0.6B` or `s3://bucket/prefix`. Empty: as the configuration says.
            task: Task that scores the responses, `task.name`. Empty: as the configuration says.
            train_data: Training prompts, `task.train_path`: `hf://organisation/name:split`,
                `s3://bucket/key`, or `dataset:NAME` for what `bapo dataset upload` stored. Columns
                that are named otherwise are mapped by `task.columns` of the configuration. Empty:
                as the configuration says.
            test_data: Held-out prompts, `task.test_path`, as the training prompts. Empty: as the
                configuration says.
            steps: Training steps of the run. 0: as the configuration says.
            learning_rate: Learning rate, `optimizer.learning_rate`. 0: as the configuration says.
            prompts_per_step: Prompts of each step, `rollout.prompts_per_step`. 0: as the
                configuration says.
            group_size: Responses to each prompt, `rollout.group_size`. 0: as the configuration
                says.
            fork_of: Name of a run. The new run shares the past of this run up to `fork_step`, and
                has its configuration but for the fields above, which hold from the next step on;
                `config` stays as it is. Empty: the run begins with its first step.
            fork_step: Last step that both runs share, with `fork_of`; 0 without it.
            workers: Number of pods of the training job.
            gpus_per_worker: GPUs of each worker; 0 trains on CPUs.
            cpu_per_worker: Cores that each worker requests, for example `4` or `500m`.
            memory_per_worker: Memory request and limit of each worker, for example `32Gi`.
            start_within_minutes: Minutes to wait for nodes before the step fails.
        """

        def place(task: Any, memory: tuple[str, str]) -> Any:
            return _size(_connect(task, names), *memory)

        def imported(name: str, value: Any) -> Any:
            """Returns the value of a parameter, for what it names once that is imported."""
            if name not in imports:
                return value
            is_model = name == "model"
            artifact = dsl.importer(
                artifact_uri=value, artifact_class=dsl.Model if is_model else dsl.Dataset
            )
            store = import_model if is_model else import_data
            stored = place(store(run=bapo_run, artifact=artifact.output), PREPARER)
            # The importer keeps its name: Kubeflow 2.17 looks for it by the task's key, but records
            # it under its display name.
            return stored.set_display_name(f"store {name.replace('_', ' ')}").output

        # Kubeflow's name of its run is that of a run without a name.
        run = {"run": bapo_run, "kubeflow_run": dsl.PIPELINE_JOB_NAME_PLACEHOLDER}
        cleaned = place(clean_up(**run), WATCHER)
        with dsl.ExitHandler(cleaned, name="training"):
            prepared = before = place(
                prepare_run(
                    **run,
                    config=config,
                    stored_config=stored_config,
                    overrides=overrides,
                    model=imported("model", model),
                    task=task,
                    train_data=imported("train_data", train_data),
                    test_data=imported("test_data", test_data),
                    training_steps=steps,
                    learning_rate=learning_rate,
                    prompts_per_step=prompts_per_step,
                    group_size=group_size,
                    fork_of=fork_of,
                    fork_step=fork_step,
                ),
                PREPARER,
            )
            kubernetes.use_secret_as_env(
                prepared, names["hub_secret"], {"HF_TOKEN": "HF_TOKEN"}, optional=True
            )
            for segment in range(1, segments + 1):
                position = {"segment": segment, "segments": segments}
                trained = before = place(
                    train(
                        **run,
                        **position,
                        workers=workers,
                        gpus_per_worker=gpus_per_worker,
                        cpu=cpu_per_worker,
                        memory=memory_per_worker,
                        start_within_minutes=start_within_minutes,
                    ),
                    WATCHER,
                ).after(before)
                if segments > 1:
                    trained.set_display_name(f"train {segment} of {segments}")
                if segment < segments:
                    before = place(sync(**run, **position), REPORTER).after(trained)
                    before.set_display_name(f"sync {segment} of {segments}")
            # It does what a last sync would: the evaluation needs replicas that serve the final
            # weights. Each step of the graph costs Kubeflow 20 seconds.
            place(evaluate_and_export(**run), REPORTER).after(before)

    return bapo_pipeline
