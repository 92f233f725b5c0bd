"""Prints lines to the terminal of a person.

Names, problems, responses and errors come from models, data sets, services and other people's
files. So commands print with `echo` and `console.plain_console` alone, which escape control
characters; ruff refuses the functions of click and `print`.
"""

from __future__ import annotations

import logging

import click

from services.common.printable import escape_controls


def echo(message: object = "", *, err: bool = False, nl: bool = True, bold: bool = False) -> None:
    """Prints a message with its control characters escaped.

    err: whether to print to standard error. nl: whether to end the line. bold: on a terminal.
    """
    click.secho(escape_controls(str(message)), err=err, nl=nl, bold=bold or None)


class _PlainRecord(logging.LogRecord):
    """A log record whose message has its control characters escaped."""

    def getMessage(self) -> str:
        return escape_controls(super().getMessage())


def escape_logs() -> None:
    """Escapes control characters in what libraries log in this process from now on.

    transformers, for example, warns of the type of a model in the words of its directory.
    """
    logging.setLogRecordFactory(_PlainRecord)
