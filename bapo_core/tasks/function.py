"""Prompts of any origin, whose reward is a function of a Python file (`task.reward`).

A payload is {"prompt": text or chat messages, "columns": the further columns of the row}.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, ClassVar

from bapo_core.errors import TaskError
from bapo_core.reward_files import COMPLETIONS, FUNCTION, PROMPTS, RewardFunctions
from bapo_core.tasks.base import Message, Payload, Verdict

PROMPT = "prompt"
_ROLES = ("system", "user", "assistant", "tool")


class FunctionTask:
    """Rows with a prompt and any columns, which the verifier passes to the reward functions.

    It does not run the functions: only the verifier has the text of their file, and runs it in
    confined processes.
    """

    name: ClassVar[str] = FUNCTION
    columns: ClassVar[Sequence[str]] = (PROMPT,)
    takes_all_columns: ClassVar[bool] = True

    def __init__(self, reward: str | Sequence[str] = ()) -> None:
        """reward: `task.reward` of the configuration; empty to read rows alone."""
        self.reward_parts = RewardFunctions.parse(reward).names[1:] if reward else ()

    def uid(self, payload: Payload) -> str:
        """Returns a digest of the prompt and the columns."""
        content = json.dumps(payload, sort_keys=True, ensure_ascii=False)
        return f"{FUNCTION}:{hashlib.sha256(content.encode()).hexdigest()[:24]}"

    def render(self, payload: Payload) -> list[Message]:
        """Returns the chat messages of the prompt; a text is a message of the user."""
        prompt = payload[PROMPT]
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        return [dict(message) for message in prompt]

    def verify(self, payload: Payload, response: str) -> Verdict:  # noqa: ARG002
        """Raises `TaskError`: reward functions run in the verifier only."""
        raise TaskError(
            "the functions of task.reward run in the verifier only, so that demonstrations cannot "
            "be checked by them; remove the demonstrations section, or write a task "
            "(docs/adding-a-task.md)"
        )

    def parse_row(self, row: Mapping[str, Any]) -> Payload | None:
        """Returns the payload of a row. Raises `ValueError`, which names the column."""
        columns = {name: _to_json(value, name) for name, value in row.items() if name != PROMPT}
        for name in (COMPLETIONS, PROMPTS):
            if name in columns:
                raise ValueError(
                    f"the column {name} has the name of an argument of every reward function; "
                    "rename it"
                )
        return {PROMPT: _parse_prompt(row[PROMPT]), "columns": columns}


def _parse_prompt(value: Any) -> str | list[Message]:
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"{PROMPT} is {value!r:.80}; make it a text, or a list of chat messages "
            '{"role": …, "content": …}'
        )
    messages = []
    for number, message in enumerate(value):
        # Rows of Parquet have every key of every message, with nulls.
        items = message.items() if isinstance(message, Mapping) else ()
        present = {key: item for key, item in items if item is not None}
        if (
            present.keys() != {"role", "content"}
            or present["role"] not in _ROLES
            or not isinstance(present["content"], str)
        ):
            raise ValueError(
                f'{PROMPT}[{number}] is {message!r:.80}; make it {{"role": …, "content": …}} with '
                f"a text as its content and one of the roles {', '.join(_ROLES)}"
            )
        messages.append({"role": present["role"], "content": present["content"]})
    return messages


def _to_json(value: Any, where: str) -> Any:
    """Returns a value that JSON can hold. Raises `ValueError` for one that it cannot."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _to_json(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise ValueError(
        f"the column {where} holds {value!r:.40} ({type(value).__name__}), which is no text, "
        "number, list or mapping; write the data set without it"
    )
