"""How commands show problems and responses to people, and store those of an evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from textwrap import shorten
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from bapo_core.errors import BapoError
from bapo_core.outcomes import Outcome
from services.buffer.api import wire
from services.cli.echo import echo

READ_WIDTH = 80
"""Most characters of an answer that are shown in the line of its response."""


class SampledResponse(wire.Response):
    """A response of an evaluation, and the prompt that it answers."""

    evaluation_set: str
    """Name of the evaluation set."""
    prompt_uid: str
    """Identifier of the prompt."""
    payload: dict[str, Any]
    """The problem in the task's own format."""
    index: int
    """Index of the response among the responses to the prompt, from 0."""
    tokens: int
    """Number of its tokens."""


@contextmanager
def stored_responses(
    directory: Path, file: Path | None, console: Console
) -> Iterator[Callable[[SampledResponse], None]]:
    """Yields what takes the responses of an evaluation, and writes them to a file at the end.

    They are written after an error, too, because they tell why an evaluation failed.

    directory: of the model. file: lines of JSON; unless given, `runs/eval-MODEL-TIME.jsonl`.
    """
    if file is None:
        file = Path("runs") / f"eval-{directory.name}-{datetime.now():%Y%m%d-%H%M%S}.jsonl"
    sampled: list[SampledResponse] = []
    try:
        yield sampled.append
    finally:
        if sampled:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(f"{response.model_dump_json()}\n" for response in sampled))
            console.print(f"responses: {file}", soft_wrap=True)


def read_responses(file: Path) -> list[SampledResponse]:
    """Returns the responses that `stored_responses` wrote. Raises `BapoError` for another file."""
    responses: list[SampledResponse] = []
    try:
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                responses.append(SampledResponse.model_validate_json(line))
    except OSError as error:
        raise BapoError(f"{file} cannot be read: {error.strerror}") from error
    except (ValidationError, UnicodeDecodeError) as error:
        raise BapoError(
            f"{file}: line {len(responses) + 1} is no response of an evaluation; name a file that "
            "`bapo eval` has written"
        ) from error
    return responses


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
    if response.extracted is None and response.status in ("ok", "wrong_value"):
        # A reward function compares no answer: the threshold `task.solved_at` decides.
        return [f"counts as {verdict}"]
    if response.status != "ok":
        verdict += f" ({response.status})"
    if response.extracted is None:
        return [verdict, "no answer read"]
    return [verdict, f"answer read: {shorten(response.extracted, READ_WIDTH, placeholder=' …')}"]
