"""The shapes that cross the wire of the verifier."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid")


class VerifyItem(Wire):
    """All responses to one prompt."""

    payload: dict[str, Any]
    responses: list[str] = Field(max_length=4096)


class VerifyRequest(Wire):
    task: str
    options: dict[str, Any] = {}
    items: list[VerifyItem] = Field(max_length=10_000)


class ItemVerdict(Wire):
    """`status`: ok, timeout, too_large, parse_error, crashed, or one of the task's own."""

    reward: float
    status: str
    extracted: str | None = None


class VerifyAnswer(Wire):
    verdicts: list[list[ItemVerdict]]
