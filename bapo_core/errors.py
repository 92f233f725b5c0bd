"""The root of this project's errors, from which a process's exit code follows."""

from __future__ import annotations


class BapoError(Exception):
    """An error whose message is one line: what is wrong, where, and what to do.

    A process that ends with it exits with 1: a restart does not help.
    """


class TransientError(BapoError):
    """An error that may not happen again, so the process should be restarted.

    A process that ends with it exits with `services.common.process.EXIT_RETRYABLE`.
    """


class ConfigError(BapoError):
    """A configuration that cannot be run; the message is one line: where, what, and the remedy."""


class TaskError(BapoError):
    """A task that does not exist, or that refuses its options or its data."""
