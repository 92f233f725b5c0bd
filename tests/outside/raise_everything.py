"""Raises every exception of the libraries, with secrets in its message, wherever one is printed.

The test in `test_secrets.py` runs this file as a process and searches what it prints. Each secret
stands in the message as the library that rejects it would put it there.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
import sys
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from types import ModuleType

import click
from fastapi import FastAPI
from starlette.testclient import TestClient
from urllib3.exceptions import IncompleteRead

from services.buffer.settings import BufferSettings
from services.cli import main as cli
from services.common.logs import configure_logs
from services.common.problems import Problem, install_problem_handlers
from services.common.process import run_until_error

LIBRARIES = ("httpx", "httpcore", "h11", "minio", "urllib3", "psycopg", "alembic", "uvicorn")


def exceptions(library: str) -> Iterator[type[Exception]]:
    """Yields every exception that a module of the library defines."""
    package = importlib.import_module(library)
    modules: list[ModuleType] = [package]
    for found in pkgutil.walk_packages(package.__path__, f"{library}.", onerror=lambda _: None):
        # Some modules need packages that are not installed, or run when they are imported.
        if "__main__" not in found.name and ".testing" not in found.name:
            with suppress(ImportError, AttributeError):
                modules.append(importlib.import_module(found.name))
    classes = {
        value
        for module in modules
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    own = [kind for kind in classes if kind.__module__.startswith(library)]
    yield from sorted(own, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}")


def make(kind: type[Exception], message: str) -> Exception:
    """Returns an exception that has `message` wherever it can have a text."""
    with suppress(Exception):
        error = kind(message)
        if message in str(error):
            return error
    # Some take other arguments, of which some must be numbers for the text to be made.
    signature = inspect.signature(kind.__init__)
    for value in (message, 1):
        error = kind.__new__(kind)
        error.args = (message,)
        for name in signature.parameters:
            with suppress(Exception):
                setattr(error, name, value)
                setattr(error, f"_{name}", value)
        with suppress(Exception):
            str(error), repr(error)
            return error
    # Its text is made of what a response counts, so that it has no place for a secret.
    return IncompleteRead(1, 2)


def print_everywhere(error: Exception) -> None:
    """Raises an exception wherever this project's processes handle or print one."""

    def fail() -> None:
        raise error

    with suppress(SystemExit):
        run_until_error(fail)
    logging.getLogger("uvicorn.error").error("Exception in ASGI application", exc_info=error)
    logging.getLogger("minio").warning("a call failed: %s", error, extra={"reason": str(error)})
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    sys.excepthook(type(error), error, None)
    app = FastAPI()
    install_problem_handlers(app)

    @app.get("/problem")
    def _problem() -> None:
        raise Problem(400, "Bad request", str(error))

    @app.get("/unforeseen")
    def _unforeseen() -> None:
        raise error

    client = TestClient(app, raise_server_exceptions=False)
    for path in ("/problem", "/unforeseen"):
        sys.stderr.write(client.get(path).text + "\n")


def print_in_command_line(error: Exception) -> None:
    """Has the command line show an exception as an error, and in a log of a library."""

    @click.command
    def fail() -> None:
        logging.getLogger("library").warning("a call failed", exc_info=error)
        raise OSError(str(error)) from error

    cli.bapo = fail  # type: ignore[assignment]
    with suppress(SystemExit):
        cli.main([])


def main() -> None:
    """Prints a line with the number of exceptions at the end of standard output."""
    configure_logs("buffer")
    settings = BufferSettings.load()
    token = settings.token.get_secret_value()
    key = settings.s3.secret_key.get_secret_value()
    message = (
        f"Illegal header value b'Bearer {token}'; cannot connect to "
        f"{settings.database_url.get_secret_value()}; headers {{'Authorization': 'AWS4-HMAC-SHA256 "
        f"Credential={settings.s3.access_key.get_secret_value()}/20260101/us-east-1/s3/aws4_request"
        f", Signature=5167a7'}}; secret_access_key {key!r}; of another: Bearer "
        "b3RoZXItdG9rZW4tb2YtYS1jbG91ZA"
    )
    errors = [make(kind, message) for library in LIBRARIES for kind in exceptions(library)]
    for error in errors:
        print_everywhere(error)
    with redirect_stdout(sys.stderr), redirect_stderr(sys.stderr):
        for error in errors:
            print_in_command_line(error)
    sys.stdout.write(f"{len(errors)}\n")


if __name__ == "__main__":
    main()
