"""The trainer's jobs as processes of this machine: what the operator does, without a cluster.

A job is a directory: `job.json`, its manifest; `state.json`; the logs. Its own small operator
(`python -m pipelines.localjobs DIRECTORY`) starts the containers' commands with the variables that
training-operator injects, and starts them again as `restartPolicy: ExitCode` says.
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
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bapo_core.errors import BapoError
from pipelines.backends import JobState
from pipelines.pytorchjob import MADE_FROM_LABEL, RUN_LABEL
from services.common.process import end_with_parent, stop_on_signals
from services.stack.supervisor import free_ports

LOOK_EVERY_S = 0.2
STOP_WITHIN_S = 20.0
RETRIED_FROM = 128
"""Exit codes from here on are worth another try."""
MANIFEST, STATE, OPERATOR = "job.json", "state.json", "operator.pid"
"""The last one is locked as long as the operator lives."""


class LocalBackend:
    """Jobs below a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def create(self, job: dict[str, Any]) -> bool:
        directory = self._directory / job["metadata"]["name"]
        begun = Path(tempfile.mkdtemp(prefix=".", dir=self._directory))
        (begun / MANIFEST).write_text(json.dumps(job, indent=2))
        _write(begun, JobState("waiting"))
        try:
            begun.rename(directory)
        except OSError as error:
            shutil.rmtree(begun)
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            return False
        with (
            (directory / "operator.log").open("wb") as log,
            (directory / OPERATOR).open("w") as lock,
        ):
            # Held by whoever has the file open: from here on the operator, as long as it lives.
            fcntl.flock(lock, fcntl.LOCK_EX)
            process = subprocess.Popen(
                [sys.executable, "-m", "pipelines.localjobs", str(directory)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[lock.fileno()],
                # It outlives the step that began it, as a job of a cluster would.
                start_new_session=True,
            )
            lock.write(str(process.pid))
        return True

    def state(self, name: str) -> JobState | None:
        directory = self._directory / name
        try:
            state = _read(directory)
            if not state.over and not _lives(directory):
                state = _read(directory)  # it may have ended between the two looks
                if not state.over:
                    state = JobState("failed", f"its processes are gone; see {directory}")
            labels = json.loads((directory / MANIFEST).read_text())["metadata"]["labels"]
        except FileNotFoundError:
            return None
        return replace(state, spec_hash=labels[MADE_FROM_LABEL])

    def delete(self, name: str) -> None:
        directory = self._directory / name
        if not (directory / OPERATOR).exists():
            shutil.rmtree(directory, ignore_errors=True)  # it was never begun
            return
        _stop(directory)
        shutil.rmtree(directory, ignore_errors=True)

    def jobs(self) -> dict[str, str]:
        found = {}
        for manifest in self._directory.glob(f"[!.]*/{MANIFEST}"):
            labels = json.loads(manifest.read_text())["metadata"]["labels"]
            found[manifest.parent.name] = labels[RUN_LABEL]
        return found

    def abandoned(self, name: str) -> bool:  # noqa: ARG002
        """Nobody here says so: a pipeline that is killed is seen by its run."""
        return False


def _lives(directory: Path) -> bool:
    if not (directory / OPERATOR).exists():
        return False  # whoever began the job ended before it had an operator
    with (directory / OPERATOR).open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _stop(directory: Path) -> None:
    """Ends the operator, which ends its workers."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not _lives(directory):
            return
        os.kill(int((directory / OPERATOR).read_text()), number)
        deadline = time.monotonic() + STOP_WITHIN_S
        while _lives(directory) and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)


def _read(directory: Path) -> JobState:
    return JobState(**json.loads((directory / STATE).read_text()))


def _write(directory: Path, state: JobState) -> None:
    new = directory / f"{STATE}.new"
    new.write_text(json.dumps(asdict(state)))
    new.rename(directory / STATE)


# ---- the operator of one job --------------------------------------------------------------------


def operate(directory: Path) -> JobState:
    """Runs the job to its end."""
    job = json.loads((directory / MANIFEST).read_text())
    limit = job["spec"]["runPolicy"]["backoffLimit"]
    restarts = 0
    while True:
        _write(directory, JobState("running", f"{restarts} restarts" if restarts else ""))
        code = _run_workers(job, directory)
        if code == 0:
            return JobState("succeeded")
        words = f"a worker ended with {code}: {_last_line(directory)}"
        if code < RETRIED_FROM:
            return JobState("failed", words)
        if restarts == limit:
            return JobState("failed", f"{words}; {restarts} restarts did not mend it")
        restarts += 1
        _write(directory, JobState("restarting", words))


def _run_workers(job: Mapping[str, Any], directory: Path) -> int:
    """The exit code of the first worker that ends; with an elastic policy, its success is the
    job's."""
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    container = worker["template"]["spec"]["containers"][0]
    injected = injected_variables(job, f"127.0.0.1:{free_ports(1)[0]}")
    processes = []
    try:
        for number in range(worker["replicas"]):
            with (directory / f"worker-{number}.log").open("ab") as log:
                processes.append(
                    subprocess.Popen(
                        [*container["command"], *container["args"]],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=_variables(container, directory / f"volumes-{number}", injected),
                        preexec_fn=end_with_parent,
                    )
                )
        while True:
            codes = [code for process in processes if (code := process.poll()) is not None]
            if codes:
                worst = max(codes, key=lambda code: code != 0)
                return worst if worst >= 0 else 128 - worst
            time.sleep(LOOK_EVERY_S)
    finally:
        _end(processes)


def injected_variables(job: Mapping[str, Any], endpoint: str) -> dict[str, str]:
    """What training-operator gives the workers of an elastic job. `endpoint` is the first worker's,
    which there has a name of its own."""
    policy = job["spec"]["elasticPolicy"]
    return {
        "PYTHONUNBUFFERED": "1",
        "PET_RDZV_ENDPOINT": endpoint,
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ID": policy["rdzvId"],
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PET_RDZV_CONF": ",".join(f"{each['key']}={each['value']}" for each in policy["rdzvConf"]),
    }


def _variables(
    container: Mapping[str, Any], volumes: Path, injected: Mapping[str, str]
) -> dict[str, str]:
    """The container's environment. What it takes from ConfigMaps and Secrets is in ours, as it is
    in that of the step that made the job."""
    outer = dict(os.environ)
    known = {outer.get(f"BAPO_{kind}") for kind in ("CONNECTION", "TOKEN_SECRET", "S3_SECRET")}
    for source in container["envFrom"]:
        reference = source.get("configMapRef") or source["secretRef"]
        if reference["name"] not in known:
            raise BapoError(f"the job refers to {reference['name']!r}, which does not exist")
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    own = {variable["name"]: variable["value"] for variable in container["env"]}
    for name, value in own.items():
        if value in mounts:
            place = volumes / mounts[value]
            place.mkdir(parents=True, exist_ok=True)
            own[name] = str(place)
    # `python` is ours.
    path = f"{Path(sys.executable).parent}{os.pathsep}{outer.get('PATH', '')}"
    return {**outer, **own, **injected, "PATH": path}


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(STOP_WITHIN_S / 2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_line(directory: Path) -> str:
    lines = [
        line
        for log in sorted(directory.glob("worker-*.log"))
        for line in log.read_text(errors="replace").splitlines()
        if '"level": "error"' in line
    ]
    return lines[-1] if lines else f"see {directory}"


def main() -> None:
    stop_on_signals()
    directory = Path(sys.argv[1])
    try:
        state = operate(directory)
    except BapoError as error:
        state = JobState("failed", str(error))
    _write(directory, state)


if __name__ == "__main__":
    main()
