"""One-line explanations of validation errors, which name the key, the value and the remedy."""

from __future__ import annotations

from typing import get_origin

from pydantic import BaseModel, ValidationError

from bapo_core.config.base import section_of
from bapo_core.config.sections import RunConfig
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


def explain_validation_error(error: ValidationError) -> str:
    """Returns every error of a configuration, on one line."""
    explanations = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            explanations.append(f"{key}: no such key{_suggest(problem['loc'])}")
        elif problem["type"] == "value_error":
            message = str(problem["ctx"]["error"])
            explanations.append(f"{key}: {message}" if key else message)
        else:
            message = problem["msg"][0].lower() + problem["msg"][1:]
            explanations.append(f"{key}: {message} (got {problem['input']!r})")
    return "; ".join(explanations)


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
    meant = did_you_mean(str(location[-1]), model.model_fields)
    return meant or f"; known keys: {', '.join(model.model_fields)}"
