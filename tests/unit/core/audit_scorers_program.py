"""Writes the generators of reasoning-gym whose scorer compiles an answer as Python, as JSON.

A program of its own, because an audit hook cannot be removed from a process.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

CANARY = "canary"
"""A name in the answers. What an evaluated answer is compiled from holds it, also after SymPy has
transformed the answer."""

compiling: set[str] = set()
scored = ""


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "compile" and CANARY in str(arguments[0]):
        compiling.add(scored)


def answers(reference: object) -> list[str]:
    """Returns answers in the forms that scorers look for, each with the canary."""
    forms = ["{}", "[{}]", "['{}']", "[[{}]]", "[['{}']]", '{{"a": "{}"}}', "1 + {}", "({}) * 2"]
    text = str(reference)
    found = [form.format(CANARY) for form in forms] + [f"{text} {CANARY}", f"{text}+{CANARY}"]
    if text[:1] in "[({":
        found.append(f"{text[:-1]}, {CANARY}{text[-1:]}")
    return found


def main() -> None:
    global scored
    from reasoning_gym.factory import DATASETS

    sys.addaudithook(audit)
    for scored, (generator_class, config_class) in sorted(DATASETS.items()):
        if scored == "composite":
            continue  # scores with the generators that it mixes
        generator = generator_class(config_class(seed=1, size=2))
        for index in range(2):
            entry = generator[index]
            for answer in answers(entry["answer"]):
                with suppress(Exception):  # whatever a scorer raises for nonsense
                    generator.score_answer(answer, entry)
    Path(sys.argv[1]).write_text(json.dumps(sorted(compiling)))


if __name__ == "__main__":
    main()
