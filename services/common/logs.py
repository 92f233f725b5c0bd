"""Structured logs: one JSON object a line, with the component, the run and every extra field."""

from __future__ import annotations

import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any

from pythonjsonlogger.json import JsonFormatter

from services.common.redaction import redact, redact_tracebacks


class _Formatter(JsonFormatter):
    """Writes the fields that every line has, then those passed as `extra=`."""

    def __init__(self, component: str, run: str | None) -> None:
        super().__init__("%(message)s", rename_fields={"exc_info": "exception"})
        self._fields = {"component": component} | ({"run": run} if run else {})

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))

    def add_fields(
        self,
        log_data: dict[str, Any],
        record: logging.LogRecord,
        message_dict: dict[str, Any],
    ) -> None:
        moment = datetime.fromtimestamp(record.created, UTC)
        log_data["time"] = moment.isoformat(timespec="milliseconds")
        log_data["level"] = record.levelname.lower()
        log_data |= self._fields
        super().add_fields(log_data, record, message_dict)


def hide_progress_bars() -> None:
    """Keeps the progress bars of transformers out of logs: they are for terminals."""
    # Imported here, because the services that load no model have no transformers.
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():
        disable_progress_bar()  # type: ignore[no-untyped-call]


def configure_logs(component: str) -> None:
    """Sends the logs of this process to standard error, as JSON lines without secrets.

    Each line names `component` and the run of the variable `BAPO_RUN`, which is set for every
    process that works for one run.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(component, os.environ.get("BAPO_RUN")))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    redact_tracebacks()
    for noisy in ("httpx", "httpcore", "urllib3", "alembic", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
