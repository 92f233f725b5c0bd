"""The metrics of a run in MLflow, beside the runs of other tools.

Read from the buffer service like everything that shows a run. What is written of it stands in tags
of the MLflow run, so whoever comes next goes on from there: another segment of a pipeline, a run
that was resumed, or `bapo metrics --mlflow` after MLflow was away.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from services.buffer.api.client import BufferClient
from services.buffer.api.wire import RunState
from services.exporters.metrics import ENDED, LOOK_EVERY_S, Place, new_points

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)

_RUN, _STEP, _VERSION = "bapo.run", "bapo.step", "bapo.version"
_PARAMETERS_AT_ONCE = 100
_LONGEST_PARAMETER = 500


class MlflowRun:
    """One of our runs as one of MLflow's; made if it is not there."""

    def __init__(self, uri: str, experiment: str, buffer: BufferClient) -> None:
        """Raises `BapoError` if MLflow is not installed, or cannot be had."""
        self._buffer = buffer
        # Nobody waits long for an MLflow that is away.
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
            self._id, tags = self._found_or_made(self._client, experiment, buffer.run_state())
        except self._errors as error:
            raise BapoError(f"MLflow at {uri}: {_line(error)}") from error
        self._place = Place(int(tags.get(_STEP, 0)), int(tags.get(_VERSION, 0)))

    @staticmethod
    def _found_or_made(
        client: MlflowClient, experiment: str, state: RunState
    ) -> tuple[str, Mapping[str, str]]:
        """(MLflow's id of the run, its tags)."""
        known = client.get_experiment_by_name(experiment)
        place = client.create_experiment(experiment) if known is None else known.experiment_id
        # A run that was deleted may have had the name before.
        mark = f"{state.name} {state.created_at.isoformat()}"
        found = client.search_runs([place], f"tags.`{_RUN}` = '{mark}'", max_results=1)
        if found:
            return found[0].info.run_id, found[0].data.tags
        made = client.create_run(place, tags={_RUN: mark}, run_name=state.name)
        _write_parameters(client, made.info.run_id, state.config.model_dump(mode="json"))
        return made.info.run_id, {}

    def write(self) -> str:
        """What is new; the run's status. Raises `BapoError`."""
        from mlflow.entities import Metric, RunTag

        state = self._buffer.run_state()
        # A run that was taken back makes these steps again; MLflow keeps both.
        place = Place(
            min(self._place.step, state.current_step),
            min(self._place.version, state.current_step + 1),
        )
        metrics = [
            Metric(name, value, int(when * 1000), step)
            for step, when, values in new_points(self._buffer, place)
            for name, value in values.items()
        ]
        tags = [RunTag(_STEP, str(place.step)), RunTag(_VERSION, str(place.version))]
        try:
            for start in range(0, len(metrics), 1000):
                self._client.log_batch(self._id, metrics[start : start + 1000])
            self._client.log_batch(self._id, tags=tags)
            if state.status in _ENDED_AS:
                self._client.set_terminated(self._id, _ENDED_AS[state.status])
            else:
                self._client.update_run(self._id, status="RUNNING")
        except self._errors as error:
            raise BapoError(f"MLflow: {_line(error)}") from error
        # Not before: what did not get there is sent again.
        self._place = place
        return state.status

    def follow(self, stopped: threading.Event) -> None:
        """Until the run has ended or `stopped` is set. What goes wrong is tried again."""
        status = ""
        while status not in ENDED and not stopped.wait(LOOK_EVERY_S):
            try:
                status = self.write()
            except BapoError as error:
                log.warning("metrics are not in MLflow yet: %s", error)


_ENDED_AS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


@contextmanager
def mirrored(config: RunConfig, buffer: BufferClient) -> Iterator[None]:
    """Writes to MLflow meanwhile, and once more at the end, if the configuration names one.

    Raises `BapoError` if that cannot be had at first; later it is only a warning.
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
        bring_up_to_date(config, buffer)


def bring_up_to_date(config: RunConfig, buffer: BufferClient) -> None:
    """Writes what is new to the MLflow that the configuration names; at worst a warning."""
    settings = config.mlflow
    if not settings.tracking_uri:
        return
    try:
        MlflowRun(settings.tracking_uri, settings.experiment, buffer).write()
    except BapoError as error:
        log.warning("`bapo metrics %s --mlflow` writes what is missing: %s", buffer.run, error)


def _write_parameters(client: MlflowClient, run_id: str, config: Mapping[str, Any]) -> None:
    from mlflow.entities import Param

    flat = [Param(key, value[:_LONGEST_PARAMETER]) for key, value in _flat(config)]
    for start in range(0, len(flat), _PARAMETERS_AT_ONCE):
        client.log_batch(run_id, params=flat[start : start + _PARAMETERS_AT_ONCE])


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, text)."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, str(value)


def _line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
