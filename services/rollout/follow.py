"""`python -m services.rollout.follow MODULE`: does MODULE's work for one run after another.

For deployments, which are there before the runs are: a replica or a collector waits for a run that
has begun, works for it as a process of its own, with `BAPO_RUN`, and ends that when the run has
ended. The oldest run comes first; the others wait.

`/health` and `/readyz` answer on `BAPO_PORT` as long as the work does not do it itself.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from services.buffer import wire
from services.buffer.client import BufferClient
from services.common.errors import BapoError, ServiceError, ServiceUnavailable
from services.common.logs import configure_logs
from services.common.process import end_with_parent, run_until_error, stop_on_signals
from services.common.settings import require

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
STOP_WITHIN_S = 30.0
AGENT = "services.rollout.agent"
MODULES = (AGENT, "services.rollout.collector")


def active_run(buffer: BufferClient) -> wire.RunState | None:
    """The oldest run that has begun and not ended; one that is paused keeps its place."""
    found = [*buffer.runs("running"), *buffer.runs("paused")]
    begun = [run for run in found if run.attempt > 0]
    return min(begun, key=lambda run: (run.created_at, run.name), default=None)


class Follower:
    """Runs `module` for whatever run is active, one at a time."""

    def __init__(self, buffer: BufferClient, module: str, port: int) -> None:
        self._buffer, self._module, self._port = buffer, module, port

    def follow(self) -> None:
        """Never returns; exits as the work does if that fails."""
        done: tuple[str, int] | None = None
        while True:
            with _answering(self._port):
                run = self._next(done)
            log.info("working for run %s", run.name)
            serves_itself = self._module == AGENT
            with nullcontext() if serves_itself else _answering(self._port):
                done = self._work_for(run)

    def _next(self, done: tuple[str, int] | None) -> wire.RunState:
        """Waits for a run whose work is not done: another one, or another attempt."""
        while True:
            run = self._look()
            if run is not None and (run.name, run.attempt) != done:
                return run
            time.sleep(LOOK_EVERY_S)

    def _look(self) -> wire.RunState | None:
        try:
            return active_run(self._buffer)
        except ServiceUnavailable as error:
            log.warning("%s", error)
            return None

    def _work_for(self, run: wire.RunState) -> tuple[str, int]:
        """The run, and its attempt when the work was over."""
        process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            env={**os.environ, "BAPO_RUN": run.name},
            preexec_fn=end_with_parent,
        )
        attempt = run.attempt
        try:
            while process.poll() is None:
                attempt, active = self._still_active(run.name, attempt)
                if not active:
                    log.info("run %s has ended", run.name)
                    return run.name, attempt
                time.sleep(LOOK_EVERY_S)
        finally:
            _end(process)
        if process.returncode:
            sys.exit(process.returncode if process.returncode > 0 else 128 - process.returncode)
        return run.name, attempt

    def _still_active(self, name: str, attempt: int) -> tuple[int, bool]:
        """(attempt, whether the run goes on)."""
        self._buffer.run = name
        try:
            state = self._buffer.run_state()
        except ServiceUnavailable as error:
            log.warning("%s", error)
            return attempt, True
        except ServiceError as error:
            if error.status != 404:
                raise
            return attempt, False
        return state.attempt, state.status in ("running", "paused")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Answer(BaseHTTPRequestHandler):
    """Nothing is wanted that is not served: a deployment without a run is ready."""

    def do_GET(self) -> None:
        known = self.path in ("/health", "/readyz")
        body = b'{"status":"ok"}' if known else b""
        self.send_response(200 if known else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Probes are not news."""


@contextmanager
def _answering(port: int) -> Iterator[None]:
    server = ThreadingHTTPServer((os.environ.get("BAPO_HOST", "127.0.0.1"), port), _Answer)
    thread = threading.Thread(target=server.serve_forever, name="health", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def main() -> None:
    configure_logs("follow")
    stop_on_signals()

    def start() -> None:
        module = sys.argv[1] if len(sys.argv) == 2 else ""
        if module not in MODULES:
            raise BapoError(f"give what to run for each run: {' or '.join(MODULES)}")
        buffer = BufferClient(require("BAPO_BUFFER_URL"), require("BAPO_TOKEN"))
        Follower(buffer, module, int(require("BAPO_PORT"))).follow()

    run_until_error(start)


if __name__ == "__main__":
    main()
