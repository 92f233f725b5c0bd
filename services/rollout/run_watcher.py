"""`python -m services.rollout.run_watcher MODULE`: does MODULE's work for one run after another.

For deployments, which are there before the runs are: a replica or a collector waits for a run that
has begun, works for it as a process of its own, with `BAPO_RUN`, and ends that when the run has
ended. The oldest run comes first; the others wait.

`/health` and `/readyz` answer on `BAPO_PORT` as long as the work does not do it itself.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from bapo_core.errors import BapoError
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.common.errors import ServiceError, ServiceUnavailable
from services.common.logs import configure_logs
from services.common.process import (
    ChildProcess,
    python_command,
    run_until_error,
    stop_on_signals,
)
from services.rollout.settings import RunWatcherSettings

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
STOP_WITHIN_S = 30.0
AGENT = "services.rollout.server"
MODULES = (AGENT, "services.rollout.collector")


def active_run(buffer: BufferClient) -> wire.RunState | None:
    """The oldest run that has begun and not ended; one that is paused keeps its place."""
    found = [*buffer.runs("running"), *buffer.runs("paused")]
    begun = [run for run in found if run.attempt > 0]
    return min(begun, key=lambda run: (run.created_at, run.name), default=None)


class Follower:
    """Runs `module` for whatever run is active, one at a time."""

    def __init__(self, buffer: BufferClient, module: str, settings: RunWatcherSettings) -> None:
        self._buffer, self._module, self._settings = buffer, module, settings

    def follow(self) -> None:
        """Never returns; exits as the work does if that fails."""
        done: tuple[str, int] | None = None
        while True:
            with _answering(self._settings):
                run = self._next(done)
            log.info("working for run %s", run.name)
            serves_itself = self._module == AGENT
            with nullcontext() if serves_itself else _answering(self._settings):
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
        process = ChildProcess(
            python_command(self._module), environment={**os.environ, "BAPO_RUN": run.name}
        )
        attempt = run.attempt
        try:
            while process.exit_code is None:
                attempt, active = self._still_active(run.name, attempt)
                if not active:
                    log.info("run %s has ended", run.name)
                    return run.name, attempt
                time.sleep(LOOK_EVERY_S)
        finally:
            process.stop(STOP_WITHIN_S)
        code = process.wait()
        if code:
            sys.exit(code if code > 0 else 128 - code)
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
def _answering(settings: RunWatcherSettings) -> Iterator[None]:
    server = ThreadingHTTPServer((settings.host, settings.port), _Answer)
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
        settings = RunWatcherSettings.load()
        buffer = BufferClient(settings.buffer_url, settings.token.get_secret_value())
        Follower(buffer, module, settings).follow()

    run_until_error(start)


if __name__ == "__main__":
    main()
