"""The tags <think> and <answer>, which chat prompts ask for."""

from __future__ import annotations

THINK_PREFIX = "Let me solve this step by step.\n<think>"
"""The beginning of the assistant's message with the templates `prefilled`, as in MoPPS."""


def last_answer(response: str) -> str | None:
    """Returns the content of the last complete <answer> tag, in linear time."""
    end = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, end) if end >= 0 else -1
    return None if start < 0 else response[start + len("<answer>") : end]
