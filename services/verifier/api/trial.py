"""Tries the reward functions of a run before it begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from bapo_core.errors import RewardError
from bapo_core.reward_files import FUNCTION, RewardFunctions
from services.verifier.api.wire import ItemVerdict, VerifyItem

TRIED_ROWS = 3
RESPONSES = ("", "The answer is 42.")
"""Responses that are scored in a trial. A model may well give none, and any other text."""

Verify = Callable[[str, dict[str, Any], list[VerifyItem]], list[list[ItemVerdict]]]
"""`VerifierClient.verify`."""


def verifier_options(arguments: Mapping[str, Any], text: str | None) -> dict[str, Any]:
    """Returns the options that the verifier gets.

    arguments: those of the task. text: the text of its reward file; None for another task.
    """
    return dict(arguments) if text is None else {**arguments, "source": text}


def try_functions(
    functions: RewardFunctions, text: str, payloads: Iterable[Mapping[str, Any]], verify: Verify
) -> None:
    """Calls the functions for the first payloads with two responses each.

    Raises `RewardError`, which names file, function and row, if one gives no reward, and what
    `verify` raises if the verifier cannot import the file.
    """
    rows = list(islice(payloads, TRIED_ROWS))
    options = verifier_options({"reward": functions.addresses}, text)
    items = [VerifyItem(payload=dict(row), responses=list(RESPONSES)) for row in rows]
    for number, verdicts in enumerate(verify(FUNCTION, options, items), start=1):
        for response, verdict in zip(RESPONSES, verdicts, strict=True):
            if verdict.failed:
                where = "" if functions.file in verdict.failure else f"{functions.file}: "
                raise RewardError(
                    f"{where}{verdict.failure}; tried with row {number} "
                    f"({str(rows[number - 1].get('prompt'))!r:.60}) and the response "
                    f"{response!r}: a reward function gives a number for every response"
                )
