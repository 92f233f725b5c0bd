"""Tries the reward functions of a run before it begins."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from bapo_core.errors import RewardError
from bapo_core.reward_files import FUNCTION, RewardFunctions
from services.verifier.api.wire import ItemVerdict, VerifyItem

TRIED_ROWS = 3
SHOWN = 60
"""Characters of a prompt that a message shows."""
MOST_TRIED_ROWS = 500
"""Rows of the training data that are tried where it is read as a whole."""
RESPONSES = (
    "",
    "The answer is 42.",
    "Step 1. 1,234.5 - 12 = 1,222.5.\n\nSo it is \\boxed{\\frac{1}{2}} ... <answer>-7</answer> .",
)
"""Responses that are scored in a trial. A model may well give none, and any other text: the last
one has what trips functions that search for numbers, lines, boxes and tags."""

Verify = Callable[[str, dict[str, Any], list[VerifyItem]], list[list[ItemVerdict]]]
"""`VerifierClient.verify`."""


def verifier_options(arguments: Mapping[str, Any], text: str | None) -> dict[str, Any]:
    """Returns the options that the verifier gets.

    arguments: those of the task. text: the text of its reward file; None for another task.
    """
    return dict(arguments) if text is None else {**arguments, "source": text}


def try_functions(
    functions: RewardFunctions,
    text: str,
    payloads: Iterable[Mapping[str, Any]],
    verify: Verify,
    *,
    count: int = TRIED_ROWS,
    every: int = 1,
    within_s: float = math.inf,
) -> int:
    """Calls the functions for payloads, from the first on, with each of `RESPONSES`.

    count: rows that are tried at most, every `every`-th one. within_s: seconds after which no
    further row is begun.

    Returns the number of rows that were tried. Raises `RewardError`, which names file, function
    and row, at the first one without a reward, and what `verify` raises if the verifier cannot
    import the file.
    """
    options = verifier_options({"reward": functions.addresses}, text)
    began, tried = time.monotonic(), 0
    rows = islice(enumerate(payloads, start=1), 0, count * every, every)
    for number, row in rows:
        if tried and time.monotonic() - began > within_s:
            break
        tried += 1
        item = VerifyItem(payload=dict(row), responses=list(RESPONSES))
        (verdicts,) = verify(FUNCTION, options, [item])
        for response, verdict in zip(RESPONSES, verdicts, strict=True):
            if verdict.failed:
                where = "" if functions.file in verdict.failure else f"{functions.file}: "
                raise RewardError(
                    f"{where}{verdict.failure}; tried with row {number} "
                    f"({_cut(str(row.get('prompt')))!r}) and the response {response!r}: a "
                    "reward function gives a number for every response"
                )
    return tried


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
