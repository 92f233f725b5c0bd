"""What happened to a response on its way to a verdict, and what follows from it.

An outcome is a fact that is stored beside the verdict. A failure that a response can cause by its
text counts as a wrong answer. A failure that it cannot cause is no answer: the response is sampled
or scored again, and the failure enters no accuracy, advantage or difficulty. Otherwise, a worker
that the kernel kills for the memory of another process would teach the policy that a right answer
is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

OWN_LOSSES = 2
"""Times that a response must end or hang a worker before it counts as the cause. The last time, it
must be alone in the worker, so that no other response can be the cause."""
KILLS = 6
"""Times that a worker must be killed while it scores a response alone, before the response counts
as the cause: a reward function that kills its own process looks the same as a kill from outside."""
UNBEGUN = 20
"""Workers that may be lost before they begin a response; the verifier gives up after the last."""


class Outcome(StrEnum):
    """What happened to a response."""

    SCORED = "scored"
    """The reward function gave a verdict."""
    TIMED_OUT = "timed_out"
    """Scoring the response took longer than its own deadline."""
    CRASHED = "crashed"
    """Scoring the response raised an exception or ended its process."""
    VERIFIER_LOST = "verifier_lost"
    """Workers of the verifier were lost for reasons that the response did not cause."""
    ENGINE_LOST = "engine_lost"
    """The engine that sampled the response was lost before it was complete."""


class Cause(StrEnum):
    """The way in which a worker was lost."""

    DEADLINE = "deadline"
    """The verifier killed it at the deadline of the response that it had begun."""
    ENDED = "ended"
    """It ended by itself: by an exit, or by a signal such as SIGSEGV."""
    KILLED = "killed"
    """A signal from outside killed it, as the kernel sends for lack of memory."""
    UNBEGUN = "unbegun"
    """It was lost before it began the response."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a worker while a response was its present or its next one."""

    cause: Cause
    alone: bool
    """Whether the worker had scored no other response."""


def has_answer(outcome: Outcome) -> bool:
    """Returns whether a response with this outcome counts, by its verdict or as a wrong answer."""
    return outcome not in (Outcome.VERIFIER_LOST, Outcome.ENGINE_LOST)


def judge_losses(losses: Sequence[Loss]) -> Outcome | None:
    """Returns the outcome of a response without a verdict; None if it must be scored again.

    losses: the workers that were lost with it so far, in order.
    """
    if sum(loss.cause == Cause.UNBEGUN for loss in losses) >= UNBEGUN:
        return Outcome.VERIFIER_LOST
    own = [loss for loss in losses if loss.cause in (Cause.DEADLINE, Cause.ENDED)]
    if len(own) >= OWN_LOSSES and own[-1].alone:
        return Outcome.TIMED_OUT if own[-1].cause == Cause.DEADLINE else Outcome.CRASHED
    kills = sum(loss.alone and loss.cause == Cause.KILLED for loss in losses)
    return Outcome.CRASHED if kills >= KILLS else None
