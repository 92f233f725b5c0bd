"""What happened to a response on its way to a verdict, and what follows from it.

An outcome is a fact that is stored beside the verdict. The rule is this: what the policy can cause
by what it writes is a wrong answer; what it cannot cause is no answer, is asked again, and never
enters an accuracy, an advantage or a difficulty. Otherwise a worker that the kernel kills for its
neighbour's memory would teach the policy that a right answer is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

OWN_LOSSES = 2
"""Times that a response must end or hang a worker before it is blamed. The last time, it must be
alone in the worker, so that no other response can be the cause."""
KILLS = 6
"""Times that a worker must be killed while it scores a response alone, before it is blamed: a
response could make the reward function kill its own process, which looks the same."""
UNBEGUN = 20
"""Workers that may be lost before they begin a response, before the verifier gives up."""


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
    """How a worker was lost."""

    DEADLINE = "deadline"
    """It was killed at the deadline of the response that it had begun."""
    ENDED = "ended"
    """It ended by itself: by an exit, or by a signal of its own fault."""
    KILLED = "killed"
    """It was killed by a signal that comes from outside, as the kernel does for lack of memory."""
    UNBEGUN = "unbegun"
    """It was lost before it began the response."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker that was lost while a response was its next or present one."""

    cause: Cause
    alone: bool
    """Whether the worker had scored no other response."""


def has_answer(outcome: Outcome) -> bool:
    """Whether a response with this outcome counts, as its verdict or as a wrong answer."""
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
