"""Errors of rollout engines and replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bapo_core.errors import BapoError, TransientError
from services.common.errors import describe_error


class WrongVersion(TransientError):
    """An engine or replica was asked for a policy version that it does not serve."""


class ModelLoadError(BapoError):
    """A directory holds no model that this engine can load; the message says why."""


@contextmanager
def explain_damage(directory: Path) -> Iterator[None]:
    """Turns whatever reading a model directory raises into a `ModelLoadError`.

    Whoever can write to the bucket decides what is in the files, and the packages that read them
    raise errors of many kinds. A replica that ended with one would be started again and again.
    """
    try:
        yield
    except ModelLoadError:
        raise
    except BapoError as error:
        raise ModelLoadError(str(error)) from error
    except Exception as error:
        raise ModelLoadError(
            f"{directory}: cannot be read as a model ({describe_error(error)}); publish the "
            "weights again, or give a Hugging Face directory"
        ) from error


class EngineLost(TransientError):
    """The engine has exited, hangs or is faulty. The replica restarts it."""


class EngineFaulty(EngineLost):
    """The engine answered nonsense, such as tokens of other weights; none of it may be used."""


class PromptRefused(BapoError):
    """The engine can never answer a prompt, for example because it is too long."""


class ReplicaFailed(TransientError):
    """A replica did not finish a request. Another replica may."""


class PromptsFailed(BapoError):
    """Prompts of a request cannot be answered, however often they are asked for."""

    def __init__(self, indices: Sequence[int], message: str) -> None:
        """indices: places of the prompts in the request."""
        super().__init__(message)
        self.indices = list(indices)


class EngineFailed(ReplicaFailed):
    """The engine of a replica raised an error on a request; the message is the error."""


class EngineDied(ReplicaFailed):
    """The engine of a replica died or hung during a request; the message is its last error."""
