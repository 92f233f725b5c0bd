"""Compiles the pipeline to a file, and starts it on Kubeflow Pipelines."""

from __future__ import annotations

import io
import logging
import re
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import httpx
import yaml

from bapo_core.errors import BapoError
from pipelines import RELEASE_NAMES
from pipelines.bapo_pipeline import MAX_SEGMENTS, SERVICE_IMAGE, TRAINER_IMAGE, build_pipeline
from pipelines.parameters import RUN, check_imports, config_of, is_fork
from pipelines.waiting import WaitLog
from services.common.errors import first_line
from services.common.http_options import client_options

FINAL_STATES = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
"""States of a run of Kubeflow after which nothing happens."""
POLL_INTERVAL_S = 5.0
GIVE_UP_AFTER_S = 900.0
"""Seconds for which the API may be away while `wait_for_run` waits."""
LOGIN_PAGES_S = 60.0
"""Seconds for which pages that are no answer of the API may come while `wait_for_run` waits: a
gateway shows them while it is maintained, and a session that has ended from then on."""
_REMEDY = (
    "give --host, for example after `kubectl port-forward -n kubeflow svc/ml-pipeline-ui 8080:80`"
)
_PAGE_TITLE = "<title>Kubeflow Pipelines</title>"
"""What the pages of every version of Kubeflow Pipelines have, and login pages before them lack."""
_IMAGE = re.compile(r"[a-z0-9][\w.:/@-]*")
_OBJECT_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_IMPORTED = re.compile(r"uri:\s+componentInputParameter: pipelinechannel--(\w+)")
"""The parameters whose artifacts a compiled pipeline imports."""


def compile_pipeline(
    output: Path,
    *,
    service_image: str,
    trainer_image: str,
    segments: int,
    imports: Collection[str] = (),
    names: Collection[str] = (),
) -> None:
    """Writes the pipeline for Kubeflow Pipelines, with these images.

    imports: parameters that hold the address of an artifact for Kubeflow to import.
    names: those of `RELEASE_NAMES` that differ, as `key=name`.

    Raises `BapoError` when the file's name, an image, the number of segments or a name is one that
    Kubeflow would refuse.
    """
    from kfp import compiler

    if output.suffix not in (".yaml", ".yml"):
        raise BapoError(f"{output}: Kubeflow takes a file whose name ends with .yaml")
    for image in (service_image, trainer_image):
        if not _IMAGE.fullmatch(image):
            raise BapoError(f"{image!r} is no image; give registry/name:tag")
        if image.endswith(":latest"):
            raise BapoError(f"{image}: the tag `latest` does not name one version; give a version")
    if not 1 <= segments <= MAX_SEGMENTS:
        raise BapoError(f"--segments is {segments}; give 1 to {MAX_SEGMENTS}")
    release = frozenset(map(_release_name, names))
    output.parent.mkdir(parents=True, exist_ok=True)
    pipeline = build_pipeline(segments, frozenset(imports), release)
    compiler.Compiler().compile(pipeline, str(output))
    # KFP begins the file with a comment in which the keys of a default have a random order.
    text = re.sub(r"\A(#.*\n)+", "", output.read_text())
    for default, image in ((SERVICE_IMAGE, service_image), (TRAINER_IMAGE, trainer_image)):
        text = text.replace(f"image: {default}\n", f"image: {image}\n")
    output.write_text(text)


def _release_name(text: str) -> tuple[str, str]:
    key, _, name = text.partition("=")
    if key not in RELEASE_NAMES or not _OBJECT_NAME.fullmatch(name):
        raise BapoError(
            f"--name {text}: give KEY=NAME, where KEY is one of {', '.join(RELEASE_NAMES)}, and "
            "NAME that of a ConfigMap or Secret; `helm status` prints them"
        )
    return key, name


def submit_pipeline(
    package: Path,
    parameters: Mapping[str, Any],
    *,
    host: str | None,
    namespace: str | None,
    experiment: str,
) -> str:
    """Starts a compiled pipeline and returns the id of its run.

    host: URL of the KFP API; None lets `kfp` find it.
    namespace: Kubeflow profile to run in.

    Raises `BapoError` for what would otherwise fail in a pod, when the API refuses the run, and
    when what answers is not the API, such as a login page.
    """
    _check(package, parameters)
    profile = {} if namespace is None else {"namespace": namespace}
    name = parameters.get(RUN)
    with _kubeflow("did not take the run"):
        run = _client(host, namespace).create_run_from_pipeline_package(
            str(package),
            arguments=dict(parameters),
            run_name=f"bapo {name}" if name else "bapo",
            experiment_name=experiment,
            enable_caching=False,
            **profile,
        )
    # kfp makes an answer without any field of the page that another server sends with status 200.
    if not run.run_id:
        raise BapoError(
            f"{host or 'the server that kfp found'} has answered without the id of a run, as a "
            f"login page does, and has started none; {_REMEDY}"
        )
    return str(run.run_id)


def wait_for_run(
    run: str,
    package: Path,
    *,
    host: str | None,
    namespace: str | None,
    log: Callable[[str], None],
) -> None:
    """Waits until a run of Kubeflow has ended, and logs what becomes of its steps.

    package: the compiled pipeline, which has the steps' names.

    Raises `BapoError` unless the run succeeds, when the API has not answered for 15 minutes, and
    when for a minute what answers is not the API, such as the login page of a session that has
    ended.
    """
    names = _step_names(package)
    with _kubeflow("does not answer"):
        client = _client(host, namespace)
    lines, states, answered = WaitLog(log), dict[str, str](), time.monotonic()
    pages_since: float | None = None
    while True:
        try:
            with _kubeflow("does not answer"):
                state = client.get_run(run)
        except BapoError as error:
            if time.monotonic() - answered > GIVE_UP_AFTER_S:
                raise
            lines.say(str(error))
            pages_since = None
            time.sleep(POLL_INTERVAL_S)
            continue
        if not state.run_id:
            page = (
                f"{host or 'the server that kfp found'} has answered without run {run}, as a login "
                "page does"
            )
            pages_since = time.monotonic() if pages_since is None else pages_since
            if time.monotonic() - pages_since >= LOGIN_PAGES_S:
                raise BapoError(
                    f"{page}; the run goes on, and its page shows it. Next time, {_REMEDY}"
                )
            lines.say(f"{page}; it is asked again for {LOGIN_PAGES_S:.0f} s")
            time.sleep(POLL_INTERVAL_S)
            continue
        answered, pages_since = time.monotonic(), None
        details = state.run_details.task_details if state.run_details is not None else None
        for task in details or []:
            name = names.get(task.display_name)
            if name is not None and task.state and states.get(name) != task.state:
                states[name] = task.state
                log(f"{name}: {task.state.lower()}")
        if state.state in FINAL_STATES:
            break
        lines.say(f"the run is {(state.state or 'pending').lower()}")
        time.sleep(POLL_INTERVAL_S)
    if state.state != "SUCCEEDED":
        failed = [name for name, status in states.items() if status == "FAILED"]
        where = f" in {', '.join(failed)}" if failed else ""
        raise BapoError(
            f"run {run} of Kubeflow has ended as {state.state.lower()}{where}; the last line of "
            "the step's log has the reason"
        )


def _step_names(package: Path) -> dict[str, str]:
    """Returns the names of a compiled pipeline's steps as the graph shows them, by their keys."""
    pipeline = _read(package)
    graphs = [pipeline["root"], *pipeline["components"].values()]
    return {
        key: task["taskInfo"]["name"]
        for graph in graphs
        for key, task in graph.get("dag", {}).get("tasks", {}).items()
        if "dag" not in pipeline["components"][task["componentRef"]["name"]]
    }


def _client(host: str | None, namespace: str | None) -> Any:
    # kfp warns of the day when it drops this version of Python.
    warnings.filterwarnings("ignore", category=FutureWarning)
    from kfp import Client

    profile = {} if namespace is None else {"namespace": namespace}
    return Client(host=host, **profile)


@contextmanager
def _kubeflow(failure: str) -> Iterator[None]:
    """Turns the errors of kfp into a `BapoError`, without the tracebacks that kfp logs for each of
    its own attempts, and without the links that it prints to the API's address, which may have no
    pages (`run_page`)."""
    from kfp_server_api.exceptions import ApiException
    from urllib3.exceptions import HTTPError, MaxRetryError

    logging.disable(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    except (ApiException, HTTPError, TimeoutError) as error:
        cause = (error.reason or error) if isinstance(error, MaxRetryError) else error
        raise BapoError(f"Kubeflow Pipelines {failure}: {first_line(cause)}; {_REMEDY}") from error
    finally:
        logging.disable(logging.NOTSET)


def run_page(host: str | None, run: str) -> str:
    """Returns the address of a run's page in Kubeflow, or how to reach it.

    host: URL of the KFP API, which only Kubeflow's own pages serve together with themselves.
    """
    path = f"#/runs/details/{run}"
    if host is not None:
        address = host.rstrip("/")
        try:
            answer = httpx.get(
                f"{address}/", timeout=5.0, follow_redirects=True, **client_options(address)
            )
        except httpx.HTTPError:
            pass  # the run was taken: what follows is for people alone
        else:
            if _PAGE_TITLE in answer.text:
                return f"{address}/{path}"
    return (
        "run `kubectl port-forward -n kubeflow svc/ml-pipeline-ui 8080:80`, and open "
        f"http://127.0.0.1:8080/{path}"
    )


def _check(package: Path, parameters: Mapping[str, Any]) -> None:
    """Raises `BapoError` for what would otherwise fail in a pod."""
    if not package.is_file():
        raise BapoError(
            f"{package} does not exist; make it with `bapo pipeline compile --output {package}`"
        )
    _read(package)
    check_imports(_IMPORTED.findall(package.read_text()), parameters)
    if "stored_config" in parameters or is_fork(parameters):
        return  # the step reads it from the services
    engine = config_of(parameters).rollout.engine.kind
    if engine != "vllm":
        raise BapoError(
            f"rollout.engine is {engine!r}, and the chart's rollouts are vLLM; add "
            "rollout.engine=vllm, or start from examples/countdown-vllm.yaml"
        )


def _read(package: Path) -> dict[str, Any]:
    """Returns the first document of a compiled pipeline. Raises `BapoError` for any other file."""
    try:
        pipeline = next(iter(yaml.safe_load_all(package.read_text())), None)
    except (yaml.YAMLError, UnicodeDecodeError):
        pipeline = None
    if not isinstance(pipeline, dict) or "pipelineInfo" not in pipeline:
        raise BapoError(
            f"{package} is no compiled pipeline; make one with `bapo pipeline compile --output "
            "FILE`"
        )
    return pipeline
