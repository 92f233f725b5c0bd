"""The root classes of this project's errors, which determine a process's exit code."""

from __future__ import annotations


class BapoError(Exception):
    """An error with a one-line message: what is wrong, where, and the remedy.

    A process that it ends exits with 1, because a restart would fail in the same way.
    """


class TransientError(BapoError):
    """An error that may not recur, so that the process should be restarted.

    A process that it ends exits with `services.common.process.EXIT_RETRYABLE`.
    """


class ConfigError(BapoError):
    """A configuration that cannot be run; the message names the key, the value and the remedy."""


class TaskError(BapoError):
    """A task that does not exist, cannot be loaded, or refuses its options."""


class PayloadError(TaskError):
    """A payload against which a task cannot verify any response, so that the run must stop."""


class RewardError(TaskError):
    """A reward function gave no reward for a response; the message says why and where."""
