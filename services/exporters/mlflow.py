"""Writes a run's metrics to MLflow.

Tags of the MLflow run hold the last step and version written, so any later writer continues there:
the next segment of a pipeline, a resumed run, or `bapo metrics --mlflow` after an outage of MLflow.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from bapo_core.config import RunConfig
from bapo_core.config.training import refuse_credentials
from bapo_core.errors import BapoError
from services.buffer.api.client import BufferClient
from services.buffer.api.wire import RunState
from services.common.errors import first_line
from services.exporters.curves import FINAL_STATUSES, POLL_INTERVAL_S, Position, new_points

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)

_RUN_TAG, _STEP_TAG, _VERSION_TAG = "bapo.run", "bapo.step", "bapo.version"
# Limits of MLflow's API for one call of `log_batch`, and for the length of a parameter's value.
_MAX_PARAMETERS = 100
_MAX_METRICS = 1000
_MAX_PARAMETER_LENGTH = 500
# Where MLflow's client finds credentials.
_CREDENTIALS = (
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_AUTH",
    "MLFLOW_TRACKING_AWS_SIGV4",
    "MLFLOW_TRACKING_CLIENT_CERT_PATH",
)
_CREDENTIALS_FILE = Path("~/.mlflow/credentials")


class MlflowRun:
    """The MLflow run with the metrics of a run; it is created when it does not exist."""

    def __init__(self, uri: str, experiment: str, buffer: BufferClient) -> None:
        """Raises `BapoError` when MLflow is not installed or does not answer, and for a URI with
        credentials or one that would get those of another server."""
        try:
            # A configuration checks its URI; that of `bapo metrics --mlflow` is in none.
            refuse_credentials(uri)
        except ValueError as error:
            raise BapoError(f"the URI of MLflow {error}") from error
        _keep_credentials(uri)
        self._buffer = buffer
        # MLflow's own defaults would block for minutes when the server does not answer.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        try:
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        except ModuleNotFoundError as error:
            raise BapoError("MLflow is not installed; `pip install mlflow-skinny`") from error
        self._errors: tuple[type[Exception], ...] = (MlflowException, OSError)
        try:
            self._client = MlflowClient(uri)
            self._id, tags = self._find_or_create(self._client, experiment, buffer.run_state())
        except self._errors as error:
            raise BapoError(f"MLflow at {uri}: {first_line(error)}") from error
        self._position = Position(int(tags.get(_STEP_TAG, 0)), int(tags.get(_VERSION_TAG, 0)))

    @staticmethod
    def _find_or_create(
        client: MlflowClient, experiment: str, state: RunState
    ) -> tuple[str, Mapping[str, str]]:
        """Returns MLflow's id of the run, and its tags."""
        existing = client.get_experiment_by_name(experiment)
        if existing is not None:
            experiment_id = existing.experiment_id
        else:
            experiment_id = client.create_experiment(experiment)
        # The name alone is not unique: an earlier run of this name may have been deleted.
        identity = f"{state.name} {state.created_at.isoformat()}"
        matches = client.search_runs(
            [experiment_id], f"tags.`{_RUN_TAG}` = '{identity}'", max_results=1
        )
        if matches:
            return matches[0].info.run_id, matches[0].data.tags
        run = client.create_run(experiment_id, tags={_RUN_TAG: identity}, run_name=state.name)
        _write_parameters(client, run.info.run_id, state.config.model_dump(mode="json"))
        return run.info.run_id, {}

    def write(self) -> str:
        """Writes the points that are new; returns the run's status. Raises `BapoError`."""
        from mlflow.entities import Metric, RunTag

        state = self._buffer.run_state()
        # A run that was rewound makes these steps again; MLflow keeps both values.
        position = Position(
            min(self._position.step, state.current_step),
            min(self._position.version, state.current_step + 1),
        )
        metrics = [
            Metric(name, value, int(unix_time * 1000), step)
            for step, unix_time, values in new_points(self._buffer, position)
            for name, value in values.items()
        ]
        tags = [
            RunTag(_STEP_TAG, str(position.step)),
            RunTag(_VERSION_TAG, str(position.version)),
        ]
        try:
            for start in range(0, len(metrics), _MAX_METRICS):
                self._client.log_batch(self._id, metrics[start : start + _MAX_METRICS])
            self._client.log_batch(self._id, tags=tags)
            if state.status in _MLFLOW_STATUSES:
                self._client.set_terminated(self._id, _MLFLOW_STATUSES[state.status])
            else:
                self._client.update_run(self._id, status="RUNNING")
        except self._errors as error:
            raise BapoError(f"MLflow: {first_line(error)}") from error
        # Only after the last call, so that points are sent again when one of them fails.
        self._position = position
        return state.status

    def follow(self, stopped: threading.Event) -> None:
        """Writes every few seconds until the run has ended or `stopped` is set; retries errors."""
        status = ""
        while status not in FINAL_STATUSES and not stopped.wait(POLL_INTERVAL_S):
            try:
                status = self.write()
            except BapoError as error:
                log.warning("metrics could not be written to MLflow, retrying: %s", error)


def _keep_credentials(uri: str) -> None:
    """Raises `BapoError` if MLflow's client would send credentials to a server they are not for.

    uri: tracking URI, which may come from a configuration that somebody else wrote.

    The client sends the credentials that it finds to each server that it is given. The user has
    named the server they are for in MLFLOW_TRACKING_URI.
    """
    trusted = os.environ.get("MLFLOW_TRACKING_URI", "")
    if urlsplit(uri).scheme not in ("http", "https") or uri.rstrip("/") == trusted.rstrip("/"):
        return
    found = [name for name in _CREDENTIALS if os.environ.get(name)]
    if _CREDENTIALS_FILE.expanduser().exists():
        found.append(str(_CREDENTIALS_FILE))
    if found:
        raise BapoError(
            f"the MLflow server {uri} would get the credentials in {' and '.join(found)}, but "
            f"MLFLOW_TRACKING_URI is {trusted or 'not set'}; set MLFLOW_TRACKING_URI={uri} in the "
            "environment if they are for this server, or else remove them from it"
        )


_MLFLOW_STATUSES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


@contextmanager
def mirror_to_mlflow(config: RunConfig, buffer: BufferClient) -> Iterator[None]:
    """Writes the run's metrics to the configuration's MLflow during the block and at its end.

    Does nothing when `mlflow.tracking_uri` is empty. Raises `BapoError` when MLflow does not answer
    at first; later errors are warnings.
    """
    if not config.mlflow.tracking_uri:
        yield
        return
    run = MlflowRun(config.mlflow.tracking_uri, config.mlflow.experiment, buffer)
    stopped = threading.Event()
    thread = threading.Thread(target=run.follow, args=(stopped,), name="mlflow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        update_mlflow(config, buffer)


def update_mlflow(config: RunConfig, buffer: BufferClient) -> None:
    """Writes the new points to the configuration's MLflow; an error is only a warning."""
    settings = config.mlflow
    if not settings.tracking_uri:
        return
    try:
        MlflowRun(settings.tracking_uri, settings.experiment, buffer).write()
    except BapoError as error:
        log.warning(
            "metrics could not be written to MLflow (%s); "
            "`bapo metrics %s --mlflow` writes what is missing",
            error,
            buffer.run,
        )


def _write_parameters(client: MlflowClient, run_id: str, config: Mapping[str, Any]) -> None:
    from mlflow.entities import Param

    parameters = [Param(key, value[:_MAX_PARAMETER_LENGTH]) for key, value in _flatten(config)]
    for start in range(0, len(parameters), _MAX_PARAMETERS):
        client.log_batch(run_id, params=parameters[start : start + _MAX_PARAMETERS])


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields (dotted key, value as text) of every entry."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, str(value)
