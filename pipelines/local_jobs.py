"""A small training operator for processes of this machine.

It stands in for the Kubeflow training operator where there is no cluster. A job is a directory with
`job.json` (its manifest), `state.json` and the logs. An operator for each job
(`python -m pipelines.local_jobs DIRECTORY`) runs the containers' commands with the variables that
the training operator injects, and restarts them as `restartPolicy: ExitCode` demands.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from bapo_core.errors import BapoError
from pipelines.backends import JobState
from pipelines.pytorchjob import build_pytorchjob
from pipelines.training_job import RUN_LABEL, SPEC_HASH_LABEL, TrainingJob
from services.common.files import write_private
from services.common.process import ChildProcess, python_command, stop_on_signals
from services.stack.supervisor import reserve_ports

POLL_INTERVAL_S = 0.2
STOP_WITHIN_S = 20.0
RETRYABLE_FROM = 128
"""Smallest exit code after which the training operator restarts a worker."""
MANIFEST, STATE, OPERATOR = "job.json", "state.json", "operator.pid"
"""Files of a job. The operator holds a lock on the last one while it runs."""


class LocalBackend:
    """Runs training jobs as processes of this machine, one directory for each job."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def create(self, job: TrainingJob) -> bool:
        directory = self._directory / job.name
        new = Path(tempfile.mkdtemp(prefix=".", dir=self._directory))
        write_private(new / MANIFEST, json.dumps(build_pytorchjob(job), indent=2))
        _write_state(new, JobState("waiting"))
        try:
            new.rename(directory)
        except OSError as error:
            shutil.rmtree(new)
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            return False
        with (
            (directory / "operator.log").open("wb") as log,
            (directory / OPERATOR).open("w") as lock,
        ):
            # The operator inherits the open file, and so holds the lock until it ends.
            fcntl.flock(lock, fcntl.LOCK_EX)
            # No `ChildProcess`: it outlives the step that created it, as a job of a cluster would.
            process = subprocess.Popen(
                python_command("pipelines.local_jobs", str(directory)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[lock.fileno()],
                start_new_session=True,
            )
            lock.write(str(process.pid))
        return True

    def state(self, name: str) -> JobState | None:
        directory = self._directory / name
        try:
            state = _read_state(directory)
            if not state.finished and not _is_running(directory):
                state = _read_state(directory)  # it may have finished since the first read
                if not state.finished:
                    state = JobState("failed", f"its operator was killed; see {directory}")
            spec_hash = _read_label(directory, SPEC_HASH_LABEL)
        except FileNotFoundError:
            return None
        except _Unreadable as error:
            return JobState("failed", str(error))
        return replace(state, spec_hash=spec_hash)

    def delete(self, name: str, workflow: str | None = None) -> None:  # noqa: ARG002
        directory = self._directory / name
        if (directory / OPERATOR).exists():
            _stop_operator(directory)
        shutil.rmtree(directory, ignore_errors=True)

    def jobs(self) -> dict[str, str]:
        runs = {}
        for manifest in self._directory.glob(f"[!.]*/{MANIFEST}"):
            # Nobody knows the run of a job that cannot be read.
            with suppress(_Unreadable):
                runs[manifest.parent.name] = _read_label(manifest.parent, RUN_LABEL)
        return runs

    def is_queued(self, name: str) -> bool:  # noqa: ARG002
        """Always returns True: no queue of Kueue is named on this machine."""
        return True

    def abandoned(self, name: str) -> bool:  # noqa: ARG002
        """Always returns False: locally, an abandoned job is detected through its run's status."""
        return False

    def has_ended(self, workflow: str) -> bool:  # noqa: ARG002
        """Always returns False: a run of this machine belongs to no workflow."""
        return False


def _is_running(directory: Path) -> bool:
    """Whether the job's operator runs, and so holds its lock."""
    if not (directory / OPERATOR).exists():
        return False  # the process that created the job ended before it started the operator
    with (directory / OPERATOR).open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _stop_operator(directory: Path) -> None:
    """Stops the operator, which stops its workers."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not _is_running(directory):
            return
        os.kill(int((directory / OPERATOR).read_text()), number)
        deadline = time.monotonic() + STOP_WITHIN_S
        while _is_running(directory) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_S)


class _Unreadable(BapoError):
    """A file of a job is damaged, as after a power loss, or lacks what this version needs."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is damaged or of another version; start the pipeline again")


def _read_state(directory: Path) -> JobState:
    """Returns the recorded state. Raises `_Unreadable`, and `FileNotFoundError` without a job."""
    path = directory / STATE
    try:
        recorded = json.loads(path.read_text())
        # A newer version may have recorded more.
        known = {field.name for field in fields(JobState)} & recorded.keys()
        return JobState(**{name: recorded[name] for name in known})
    except (ValueError, TypeError, AttributeError) as error:
        raise _Unreadable(path) from error


def _read_label(directory: Path, label: str) -> str:
    """Returns a label of the manifest. Raises as `_read_state` does."""
    path = directory / MANIFEST
    try:
        return str(json.loads(path.read_text())["metadata"]["labels"][label])
    except (ValueError, TypeError, KeyError) as error:
        raise _Unreadable(path) from error


def _write_state(directory: Path, state: JobState) -> None:
    write_private(directory / STATE, json.dumps(asdict(state)))


# ---- the operator of one job --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How the first worker of a job ended."""

    code: int
    """Exit code, 128 and the signal's number when a signal killed the worker."""
    reason: str


def operate(directory: Path) -> JobState:
    """Runs a job until it has finished. Raises `BapoError` for a manifest that cannot run here."""
    job = json.loads((directory / MANIFEST).read_text())
    limit = job["spec"]["runPolicy"]["backoffLimit"]
    restarts, end = 0, ""
    while True:
        reason = f"{restarts} restarts" if restarts else ""
        _write_state(directory, JobState("running", reason, restarts=restarts, last_end=end))
        worker = _run_workers(job, directory)
        if worker.code == 0:
            return JobState("succeeded")
        if worker.code < RETRYABLE_FROM:
            return JobState("failed", worker.reason)
        if restarts == limit:
            return JobState("failed", f"{worker.reason}; {restarts} restarts did not fix it")
        restarts, end = restarts + 1, worker.reason
        _write_state(directory, JobState("restarting", end, restarts=restarts, last_end=end))


def _run_workers(job: Mapping[str, Any], directory: Path) -> WorkerExit:
    """Runs the workers until the first one ends, and stops the others.

    With an elastic policy, the job succeeds as soon as one worker does.
    """
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    container = worker["template"]["spec"]["containers"][0]
    processes: list[ChildProcess] = []
    with ExitStack() as cleanup:
        (port,) = cleanup.enter_context(reserve_ports(1))
        cleanup.callback(_stop_workers, processes)
        injected = injected_variables(job, f"127.0.0.1:{port}")
        for number in range(worker["replicas"]):
            processes.append(
                ChildProcess(
                    [*container["command"], *container["args"]],
                    environment=_variables(container, directory / f"volumes-{number}", injected),
                    log=directory / f"worker-{number}.log",
                    append_log=True,
                )
            )
        while True:
            ended = [process for process in processes if process.exit_code is not None]
            if ended:
                process = max(ended, key=lambda process: process.exit_code != 0)
                number, code = processes.index(process), process.wait()
                code = code if code >= 0 else 128 - code
                reason = f"worker-{number} exited with {code}: {process.last_error()}"
                return WorkerExit(code, reason)
            time.sleep(POLL_INTERVAL_S)


def injected_variables(job: Mapping[str, Any], endpoint: str) -> dict[str, str]:
    """Returns the variables that the training operator gives the workers of an elastic job.

    endpoint: `host:port` of the rendezvous; in a cluster, the name of the first worker.
    """
    policy = job["spec"]["elasticPolicy"]
    settings = [f"{setting['key']}={setting['value']}" for setting in policy["rdzvConf"]]
    return {
        "PYTHONUNBUFFERED": "1",
        "PET_RDZV_ENDPOINT": endpoint,
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ID": policy["rdzvId"],
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PET_RDZV_CONF": ",".join(settings),
    }


def _variables(
    container: Mapping[str, Any], volumes: Path, injected: Mapping[str, str]
) -> dict[str, str]:
    """Returns the container's environment, with its volumes as directories below `volumes`.

    The contents of the ConfigMap and the Secrets are in this process's environment, as they are in
    that of the step that created the job. Raises `BapoError` when the job refers to others.
    """
    inherited = dict(os.environ)
    available = {
        inherited.get(f"BAPO_{kind}") for kind in ("CONNECTION", "TOKEN_SECRET", "S3_SECRET")
    }
    for source in container["envFrom"]:
        reference = source.get("configMapRef") or source["secretRef"]
        if reference["name"] not in available:
            raise BapoError(f"the job refers to {reference['name']!r}, which does not exist")
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    variables = {
        variable["name"]: _value_of(variable, available, inherited) for variable in container["env"]
    }
    for name, value in variables.items():
        if value in mounts:
            volume = volumes / mounts[value]
            volume.mkdir(parents=True, exist_ok=True)
            variables[name] = str(volume)
    # `python` of the command is this interpreter.
    path = f"{Path(sys.executable).parent}{os.pathsep}{inherited.get('PATH', '')}"
    return {**inherited, **variables, **injected, "PATH": path}


def _value_of(
    variable: Mapping[str, Any], available: Collection[str | None], inherited: Mapping[str, str]
) -> str:
    """Returns the value of a variable, which may be a key of one of the Secrets `available`."""
    if "value" in variable:
        return str(variable["value"])
    reference = variable["valueFrom"]["secretKeyRef"]
    if reference["name"] not in available or reference["key"] not in inherited:
        raise BapoError(
            f"the job refers to {reference['key']!r} of {reference['name']!r}, which does not exist"
        )
    return inherited[reference["key"]]


def _stop_workers(workers: list[ChildProcess]) -> None:
    """Stops all workers at the same time, in less time than the operator itself is given."""
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
    for worker in workers:
        try:
            worker.wait(STOP_WITHIN_S / 2)
        except subprocess.TimeoutExpired:
            worker.kill_group()


def main() -> None:
    stop_on_signals()
    directory = Path(sys.argv[1])
    try:
        state = operate(directory)
    except BapoError as error:
        state = JobState("failed", str(error))
    _write_state(directory, state)


if __name__ == "__main__":
    main()
