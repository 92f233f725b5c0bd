"""One-line explanations of validation errors, which name the key, the value and the remedy."""

from __future__ import annotations

from collections.abc import Collection
from typing import get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from bapo_core.config.base import section_of
from bapo_core.config.run import RunConfig
from bapo_core.spelling import did_you_mean

RENAMED = {
    "x1": "fresh",
    "x2": "reevaluate",
    "x3": "replay",
    "bad": "hard_buffer",
    "high": "high_quality_buffer",
    "adaptive": "replay_window",
}
"""Renamed sections: the name in version 0.1 -> the name since version 0.2."""


def explain_validation_error(error: ValidationError, *, overrides: Collection[str] = ()) -> str:
    """Returns every error of a configuration, on one line.

    overrides: dotted keys of values that are no part of the file, which errors say.
    """
    return "; ".join(_explain(problem, overrides) for problem in error.errors())


def _explain(problem: ErrorDetails, overrides: Collection[str]) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if any(f"{key}.".startswith(f"{override}.") for override in overrides):
        key = f"override {key}"
    if problem["type"] == "extra_forbidden":
        return f"{key}: no such key{_suggest(problem['loc'])}"
    if problem["type"] == "value_error":
        message = str(problem["ctx"]["error"])
        return f"{key}: {message}" if key else message
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{key}: {message} (got {problem['input']!r})"


def _suggest(location: tuple[int | str, ...]) -> str:
    if len(location) == 1 and location[0] in RENAMED:
        return f"; it was renamed to {RENAMED[str(location[0])]}"
    model: type[BaseModel] = RunConfig
    by_name = False  # whether the next part of the location is the name of a section, and no key
    for part in location[:-1]:
        if by_name:
            by_name = False
            continue
        annotation = model.model_fields[str(part)].annotation
        section = section_of(annotation)
        if section is None:
            return ""
        model, by_name = section, get_origin(annotation) is dict
    prefix = "".join(f"{part}." for part in location[:-1])
    meant = did_you_mean(str(location[-1]), model.model_fields, prefix=prefix)
    return meant or f"; known keys: {', '.join(model.model_fields)}"
