"""The shapes and sizes that cross the wire of the verifier."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

LONGEST_RESPONSE = 200_000
"""Characters of a response; a longer one is refused unread, with status `too_large`."""
MOST_RESPONSES = 8_192
"""Responses in one request, over all its items."""
LARGEST_PAYLOAD = 100_000
"""Bytes of a payload, or of the options, as JSON."""
LARGEST_BODY = 64 << 20
"""Bytes of a request's body."""


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid")


class VerifyItem(Wire):
    """All responses to one prompt."""

    payload: dict[str, Any]
    responses: list[str] = Field(max_length=MOST_RESPONSES)


class VerifyRequest(Wire):
    task: str = Field(max_length=100)
    options: dict[str, Any] = {}
    items: list[VerifyItem] = Field(max_length=MOST_RESPONSES)


class ItemVerdict(Wire):
    """`status`: ok, timeout, too_large, parse_error, crashed, or one of the task's own."""

    reward: float
    status: str
    extracted: str | None = None
    detail: str | None = None
    """What broke, for `crashed`."""


class VerifyAnswer(Wire):
    verdicts: list[list[ItemVerdict]]
