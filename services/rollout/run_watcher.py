"""`python -m services.rollout.run_watcher MODULE`: runs MODULE for one active run after another.

A deployment exists before its runs do. The watcher waits for a run whose first attempt has begun,
starts MODULE (the replica's server or the collector) as a child process with `BAPO_RUN` set, and
stops it when the run ends. The oldest run comes first; the others wait.

As the first process of its container, it also waits for the processes that vLLM leaves behind.

The watcher answers `/health` and `/readyz` on `BAPO_PORT` while MODULE does not.
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
from services.common.listener import bind_address
from services.common.logs import configure_logs
from services.common.process import (
    ChildProcess,
    hide_memory,
    python_command,
    reap_orphans,
    run_until_error,
    stop_on_signals,
)
from services.rollout.settings import RunWatcherSettings

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 2.0
STOP_WITHIN_S = 30.0
REPLICA = "services.rollout.server"
MODULES = (REPLICA, "services.rollout.collector")


def active_run(buffer: BufferClient) -> wire.RunState | None:
    """Returns the oldest run that has begun and not ended; a paused run keeps its place."""
    unfinished = [run for status in wire.ACTIVE_STATUSES for run in buffer.runs(status)]
    begun = [run for run in unfinished if run.attempt > 0]
    return min(begun, key=lambda run: (run.created_at, run.name), default=None)


class RunWatcher:
    """Runs `module` for the active run, one run at a time."""

    def __init__(self, buffer: BufferClient, module: str, settings: RunWatcherSettings) -> None:
        self._buffer, self._module, self._settings = buffer, module, settings

    def watch_forever(self) -> None:
        """Never returns; exits with the exit code of a child process that failed."""
        done: tuple[str, int] | None = None
        while True:
            with _health_server(self._settings):
                run = self._wait_for_run(done)
            log.info("starting %s for run %s", self._module, run.name)
            serves_health = self._module == REPLICA
            with nullcontext() if serves_health else _health_server(self._settings):
                done = self._run_module(run)

    def _wait_for_run(self, done: tuple[str, int] | None) -> wire.RunState:
        """Waits for an active run, other than the attempt `done`, whose work is finished."""
        while True:
            reap_orphans()
            run = self._find_active_run()
            if run is not None and (run.name, run.attempt) != done:
                return run
            time.sleep(POLL_INTERVAL_S)

    def _find_active_run(self) -> wire.RunState | None:
        try:
            return active_run(self._buffer)
        except ServiceUnavailable as error:
            log.warning("%s", error)
            return None

    def _run_module(self, run: wire.RunState) -> tuple[str, int]:
        """Runs the module until it ends or the run does; returns the run and its last attempt."""
        process = ChildProcess(
            python_command(self._module), environment={**os.environ, "BAPO_RUN": run.name}
        )
        attempt = run.attempt
        try:
            while process.exit_code is None:
                reap_orphans(process.pid)
                attempt, active = self._still_active(run.name, attempt)
                if not active:
                    log.info("run %s has ended", run.name)
                    return run.name, attempt
                time.sleep(POLL_INTERVAL_S)
        finally:
            process.stop(STOP_WITHIN_S)
        code = process.wait()
        if code:
            sys.exit(code if code > 0 else 128 - code)
        return run.name, attempt

    def _still_active(self, name: str, attempt: int) -> tuple[int, bool]:
        """Returns the run's attempt, and whether the run is running or paused.

        While the buffer service does not answer, the run counts as active in the attempt given.
        """
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
        return state.attempt, state.status in wire.ACTIVE_STATUSES


class _HealthHandler(BaseHTTPRequestHandler):
    """Answers health and readiness probes: a deployment without a run is ready."""

    def do_GET(self) -> None:
        exists = self.path in ("/health", "/readyz")
        body = b'{"status":"ok"}' if exists else b""
        self.send_response(200 if exists else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silences access logs, because Kubernetes probes every few seconds."""


@contextmanager
def _health_server(settings: RunWatcherSettings) -> Iterator[None]:
    address = (settings.host, settings.port)
    server = ThreadingHTTPServer(address, _HealthHandler, bind_and_activate=False)
    server.socket.close()  # It is one of IPv4.
    server.socket = bind_address(*address)
    server.server_activate()
    thread = threading.Thread(target=server.serve_forever, name="health", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def main() -> None:
    configure_logs("run-watcher")
    hide_memory()
    stop_on_signals()

    def start() -> None:
        module = sys.argv[1] if len(sys.argv) == 2 else ""
        if module not in MODULES:
            raise BapoError(
                "the run watcher takes one argument, the module to run for each run: "
                f"{' or '.join(MODULES)}; got {' '.join(sys.argv[1:]) or 'none'}"
            )
        settings = RunWatcherSettings.load()
        buffer = BufferClient(settings.buffer_url, settings.token.get_secret_value())
        RunWatcher(buffer, module, settings).watch_forever()

    run_until_error(start)


if __name__ == "__main__":
    main()
