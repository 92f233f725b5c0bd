"""Compiles the pipeline to a file, and starts it on Kubeflow Pipelines."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Collection, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import httpx

from bapo_core.errors import BapoError
from pipelines.bapo_pipeline import MAX_SEGMENTS, SERVICE_IMAGE, TRAINER_IMAGE, build_pipeline
from pipelines.parameters import check_imports, config_of, run_of
from services.common.errors import first_line

_IMAGE = re.compile(r"[a-z0-9][\w.:/@-]*")
_IMPORTED = re.compile(r"uri:\s+componentInputParameter: pipelinechannel--(\w+)")
"""The parameters whose artifacts a compiled pipeline imports."""


def compile_pipeline(
    output: Path,
    *,
    service_image: str,
    trainer_image: str,
    segments: int,
    imports: Collection[str] = (),
) -> None:
    """Writes the pipeline for Kubeflow Pipelines, with these images.

    imports: parameters that hold the address of an artifact for Kubeflow to import.

    Raises `BapoError` when the file's name, an image or the number of segments is one that Kubeflow
    would refuse.
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
    output.parent.mkdir(parents=True, exist_ok=True)
    compiler.Compiler().compile(build_pipeline(segments, frozenset(imports)), str(output))
    # KFP begins the file with a comment in which the keys of a default have a random order.
    text = re.sub(r"\A(#.*\n)+", "", output.read_text())
    for default, image in ((SERVICE_IMAGE, service_image), (TRAINER_IMAGE, trainer_image)):
        text = text.replace(f"image: {default}\n", f"image: {image}\n")
    output.write_text(text)


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

    Raises `BapoError` for what would otherwise fail in a pod, and when the API refuses the run.
    """
    # kfp warns of the day when it drops this version of Python.
    warnings.filterwarnings("ignore", category=FutureWarning)
    from kfp import Client
    from kfp_server_api.exceptions import ApiException
    from urllib3.exceptions import HTTPError, MaxRetryError

    _check(package, parameters)
    profile = {} if namespace is None else {"namespace": namespace}
    try:
        # kfp prints links to the API's address, which may have no pages (`run_page`).
        with redirect_stdout(io.StringIO()):
            run = Client(host=host, **profile).create_run_from_pipeline_package(
                str(package),
                arguments=dict(parameters),
                run_name=f"bapo {run_of(parameters)}",
                experiment_name=experiment,
                enable_caching=False,
                **profile,
            )
    except (ApiException, HTTPError) as error:
        if isinstance(error, MaxRetryError):
            error = error.reason or error
        reason = first_line(error)
        raise BapoError(
            f"Kubeflow Pipelines did not take the run: {reason}; give --host, for example after "
            "`kubectl port-forward -n kubeflow svc/ml-pipeline-ui 8080:80`"
        ) from error
    return str(run.run_id)


def run_page(host: str | None, run: str) -> str:
    """Returns the address of a run's page in Kubeflow, or how to reach it.

    host: URL of the KFP API, which only Kubeflow's own pages serve together with themselves.
    """
    path = f"#/runs/details/{run}"
    if host is not None:
        address = host.rstrip("/")
        try:
            answer = httpx.get(f"{address}/", timeout=5.0, follow_redirects=True)
        except httpx.HTTPError:
            pass  # the run was taken: what follows is for people alone
        else:
            if answer.headers.get("content-type", "").startswith("text/html"):
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
    check_imports(_IMPORTED.findall(package.read_text()), parameters)
    if "stored_config" in parameters:
        return  # the step reads it from the services
    engine = config_of(parameters).rollout.engine
    if engine != "vllm":
        raise BapoError(
            f"rollout.engine is {engine!r}, and the chart's rollouts are vLLM; add "
            "rollout.engine=vllm, or start from examples/countdown-vllm.yaml"
        )
