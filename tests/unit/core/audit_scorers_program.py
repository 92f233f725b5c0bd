"""Writes the generators of reasoning-gym whose scorer compiles an answer as Python, as JSON.

It runs in a process of its own, because an audit hook cannot be removed from a process.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

CANARY = "canary"
"""A name in every answer. The source that a scorer compiles contains it, also after SymPy has
transformed the answer."""

compiling: set[str] = set()
scored_dataset = ""


def record_compilation(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "compile" and CANARY in str(arguments[0]):
        compiling.add(scored_dataset)


def make_answers(reference: object) -> list[str]:
    """Returns answers in the forms that scorers look for, each with the canary."""
    forms = ["{}", "[{}]", "['{}']", "[[{}]]", "[['{}']]", '{{"a": "{}"}}', "1 + {}", "({}) * 2"]
    text = str(reference)
    answers = [form.format(CANARY) for form in forms] + [f"{text} {CANARY}", f"{text}+{CANARY}"]
    if text[:1] in "[({":
        answers.append(f"{text[:-1]}, {CANARY}{text[-1:]}")
    return answers


def main() -> None:
    global scored_dataset
    from reasoning_gym.factory import DATASETS

    sys.addaudithook(record_compilation)
    for scored_dataset, (generator_class, config_class) in sorted(DATASETS.items()):
        if scored_dataset == "composite":
            continue  # its scorers are those of the generators that it mixes
        generator = generator_class(config_class(seed=1, size=2))
        for index in range(2):
            entry = generator[index]
            for answer in make_answers(entry["answer"]):
                with suppress(Exception):  # scorers raise any error for an answer that is no answer
                    generator.score_answer(answer, entry)
    Path(sys.argv[1]).write_text(json.dumps(sorted(compiling)))


if __name__ == "__main__":
    main()
