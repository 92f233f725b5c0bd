"""Wire models and size limits of the verifier."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from bapo_core.outcomes import Outcome
from bapo_core.tasks import is_solved

LONGEST_RESPONSE = 200_000
"""Maximum characters of a response; a longer one is not read and gets the status `too_large`."""
MOST_RESPONSES = 8_192
"""Maximum number of responses in one request, over all its items."""
LARGEST_PAYLOAD = 100_000
"""Maximum bytes of a payload, or of the options, as JSON; the `source` of reward functions may have
`bapo_core.reward_files.LARGEST_FILE`."""
LARGEST_BODY = 64 << 20
"""Maximum bytes of a request's body."""


_OUTCOMES = {
    "timeout": Outcome.TIMED_OUT,
    "crashed": Outcome.CRASHED,
    "verifier_lost": Outcome.VERIFIER_LOST,
}
"""The outcomes that the statuses of responses without a verdict tell."""


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class VerifyItem(Wire):
    """One prompt and all its responses."""

    payload: dict[str, Any]
    """The prompt's payload, as the task defines it."""
    responses: list[str] = Field(max_length=MOST_RESPONSES)
    """Texts of the responses."""


class VerifyRequest(Wire):
    """Responses to score with one task."""

    task: str = Field(max_length=100)
    """Name of the task."""
    options: dict[str, Any] = {}
    """Options of the task (`task.options` of the run's configuration). The task `function` has
    `reward`, as `task.reward`, and `source`, the text of the file."""
    items: list[VerifyItem] = Field(max_length=MOST_RESPONSES)
    """Prompts with their responses."""


class ItemVerdict(Wire):
    """The verdict on one response."""

    reward: float
    """Reward that the task gives to the answer: usually 1 with the status `ok`, and else 0 or
    partial credit."""
    status: str
    """`ok`, `timeout`, `too_large` (the response is, or verifying it takes more memory than
    `BAPO_VERIFIER_MEMORY_MB`), `parse_error`, `crashed`, `verifier_lost` (there is no verdict, and
    the response is not the cause), or a status of the task's own."""
    extracted: str | None = None
    """The answer that the task found in the response, at most 1,000 characters; null if none."""
    detail: str | None = None
    """The error for which a response has the status `crashed`; null otherwise."""
    parts: dict[str, float] = {}
    """Further parts of the reward by name, such as `format`, without their weights."""

    @property
    def outcome(self) -> Outcome:
        """What happened to the response."""
        return _OUTCOMES.get(self.status, Outcome.SCORED)

    @property
    def failed(self) -> bool:
        """Whether the task gave no verdict: it raised an exception, or took too long."""
        return self.outcome != Outcome.SCORED

    @property
    def failure(self) -> str:
        """Why the task gave no verdict."""
        if self.status == "timeout":
            return "no verdict within the verifier's deadline (BAPO_VERIFIER_DEADLINE_S)"
        return self.detail or "it exited"

    def is_correct(self, solved_at: float | None) -> bool:
        """Whether the response counts as correct for the difficulty of its prompt.

        solved_at: `task.solved_at`, the reward from which on it does; None for the status `ok`.
            A response that was not scored never counts, whatever the threshold is.
        """
        if self.failed or self.status == "too_large":
            return False
        return is_solved(self.reward, self.status, solved_at)


class VerifyAnswer(Wire):
    """The verdicts of a request."""

    verdicts: list[list[ItemVerdict]]
    """For each item, the verdicts on its responses, in the request's order."""
