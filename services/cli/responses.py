"""How commands show problems and responses to people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from textwrap import shorten
from typing import Any

from bapo_core.outcomes import Outcome
from services.buffer.api import wire
from services.cli.echo import echo

READ_WIDTH = 80
"""Most characters of an answer that are shown in the line of its response."""


def print_payload(payload: Mapping[str, Any]) -> None:
    """Prints the fields of a problem, one a line."""
    for key, value in payload.items():
        echo(f"  {key}: {value if isinstance(value, str) else json.dumps(value)}")


def describe_response(response: wire.Response, tokens: int) -> list[str]:
    """Returns the reward of a response, its verdict and its length, each as a phrase."""
    facts = [f"reward {response.reward:g}", *_describe_verdict(response), f"{tokens} tokens"]
    if response.finish_reason == "length":
        facts.append("cut at the largest number of tokens")
    return facts


def _describe_verdict(response: wire.Response) -> list[str]:
    if response.outcome != Outcome.SCORED:
        reason = f": {response.failure}" if response.failure else ""
        how = "took too long" if response.outcome == Outcome.TIMED_OUT else f"failed{reason}"
        return [f"no verdict: the reward function {how}"]
    verdict = "correct" if response.correct else "wrong"
    if response.status is None:  # An older version did not record it.
        return [verdict]
    if response.status != "ok":
        verdict += f" ({response.status})"
    if response.extracted is None:
        return [verdict, "no answer read"]
    return [verdict, f"answer read: {shorten(response.extracted, READ_WIDTH, placeholder=' …')}"]
