"""Prints lines to the terminal of a person.

Names, problems, responses and errors come from models, data sets, services and other people's
files. So commands print with `echo` and `console.plain_console` alone, which escape control
characters; ruff refuses the functions of click and `print`.
"""

from __future__ import annotations

import logging
from typing import Any

import click

from services.common.printable import escape_controls
from services.common.redaction import format_redacted, redact


def echo(message: object = "", *, err: bool = False, nl: bool = True, bold: bool = False) -> None:
    """Prints a message with its control characters escaped.

    err: whether to print to standard error. nl: whether to end the line. bold: on a terminal.
    """
    click.secho(escape_controls(str(message)), err=err, nl=nl, bold=bold or None)


class _PlainRecord(logging.LogRecord):
    """A log record whose message has its control characters escaped, and no secrets."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.exc_info and self.exc_info[1] is not None:
            # A formatter uses this text instead of formatting the exception itself.
            self.exc_text = escape_controls(format_redacted(self.exc_info[1]).rstrip())

    def getMessage(self) -> str:
        return escape_controls(redact(super().getMessage()))


def escape_logs() -> None:
    """Removes secrets, and escapes control characters, in what libraries log from now on.

    transformers, for example, warns of the type of a model in the words of its directory.
    """
    logging.setLogRecordFactory(_PlainRecord)
