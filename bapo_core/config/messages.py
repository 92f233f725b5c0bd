"""One-line explanations of validation errors, which name the key, the value and the remedy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from bapo_core.config.base import Kinds, flatten, kinds_of, model_at
from bapo_core.config.elsewhere import answer_elsewhere, is_elsewhere
from bapo_core.config.objectives import OBJECTIVE_KINDS
from bapo_core.config.run import RunConfig
from bapo_core.spelling import did_you_mean

RENAMED = {
    "x1": "fresh",
    "x2": "reevaluate",
    "x3": "replay",
    "bad": "hard_buffer",
    "high": "replay.buffer",
    "adaptive": "replay.window",
    "high_quality_buffer": "replay.buffer",
    "replay_window": "replay.window",
    "replay.enabled": "replay.select, which is `off` for false",
    "hard_buffer.store_new_in_high": "replay.store_reevaluated",
    **{
        f"loss.{key}": f"loss.objective.{key}"
        for key in ("clip_low", "clip_high", "dual_clip", "clip_center")
    },
    **{f"loss.{kind}": f"loss.objective, of kind {kind}" for kind in OBJECTIVE_KINDS.sections},
    "loss.options": "loss.objective",
    "response_replay.enabled": "response_replay.groups, which is `off` for false",
    "response_replay.cache": "response_replay.candidates",
    "response_replay.min_cache": "response_replay.min_candidates",
    "hard_buffer.after": "hard_buffer.evict_solved, which is true for drop_solved",
    "loss.norm": "loss.minibatch_norm",
    "sampler.as_of": "sampler.posterior_as_of",
    "sampler.select": "sampler.band, which is null for `nearest`",
    "critic": "advantage.critic, of the estimator gae",
    "loss.ratio": "loss.correction",
    "rollout.dtype": "rollout.engine.dtype",
    "rollout.vllm_args": "rollout.engine.args",
    "rollout.journal_interval_s": "rollout.engine.journal_interval_s",
    **{
        f"loss.weight_{key}": f"loss.correction.weight_{key}"
        for key in ("cap", "floor", "mode", "norm", "level")
    },
}
"""Keys and sections of earlier versions -> what they are now."""


def explain_validation_error(
    error: ValidationError, values: Mapping[str, Any], *, overrides: Collection[str] = ()
) -> str:
    """Returns every error of a configuration, on one line.

    values: what was validated. overrides: dotted keys of values that are no part of the file, which
    errors say.
    """
    return "; ".join(_explain(problem, values, overrides) for problem in error.errors())


def explain_section(
    key: str, section: Mapping[str, Any], *, overrides: Collection[str] = ()
) -> str:
    """Returns an error for each key of a section in a place that has a value here, and no keys.

    key: dotted key of the place. overrides: as in `explain_validation_error`.
    """
    return "; ".join(
        f"{_name(name, overrides)}: no such key; "
        + (_refer_to_page(name) or f"{key} has a value and no keys, so write {key}=VALUE")
        for name in flatten(section, f"{key}.")
    )


def _explain(problem: ErrorDetails, values: Mapping[str, Any], overrides: Collection[str]) -> str:
    location, value = problem["loc"], problem["input"]
    key = ".".join(str(part) for part in location)
    name = _name(key, overrides)
    inner = flatten(value, f"{key}.") if isinstance(value, Mapping) else {}
    known = [other for other in inner if answer_elsewhere(other)]
    if problem["type"] == "extra_forbidden":
        if known and not is_elsewhere(key) and key not in RENAMED:
            return "; ".join(
                f"{_name(other, overrides)}: no such key; {_refer_to_page(other)}"
                for other in known
            )
        return f"{name}: no such key{_suggest(location, values)}"
    if problem["type"] == "value_error":
        message = str(problem["ctx"]["error"])
        return f"{name}: {message}" if key else message
    if known and problem["type"].endswith("_type"):
        return explain_section(key, value, overrides=overrides)
    message = problem["msg"][0].lower() + problem["msg"][1:]
    hint = (
        f"; {_refer_to_page(key)}" if problem["type"] == "model_type" and is_elsewhere(key) else ""
    )
    return f"{name}: {message} (got {value!r}){hint}"


def _name(key: str, overrides: Collection[str]) -> str:
    """Returns a dotted key as errors name it."""
    if any(f"{key}.".startswith(f"{override}.") for override in overrides):
        return f"override {key}"
    return key


def _refer_to_page(key: str) -> str:
    """Returns what a key of another system is called here, and where that stands, if it is one."""
    answer = answer_elsewhere(key)
    return f"{answer} (docs/coming-from.md)" if answer else ""


def _suggest(location: tuple[int | str, ...], values: Any) -> str:
    """Returns what a key that does not exist may have been, as the end of a message."""
    renamed = RENAMED.get(".".join(map(str, location)))
    if renamed is not None:
        return f"; it was renamed to {renamed}"
    model: type[BaseModel] = RunConfig
    kinds: Kinds | None = None
    by_name = False  # whether the next part of the location is the name of a section, and no key
    for part in location[:-1]:
        values = values.get(part) if isinstance(values, Mapping) else None
        if by_name:
            by_name = False
            continue
        annotation = model.model_fields[str(part)].annotation
        kinds = kinds_of(model, str(part))
        section = model_at(model, str(part), values)
        if section is None:
            return ""
        model, by_name = section, get_origin(annotation) is dict
    prefix = "".join(f"{part}." for part in location[:-1])
    key = str(location[-1])
    selector = kind = ""
    if kinds is not None:
        selector, kind = f"{prefix}{kinds.key}", kinds.kind_of(values)
        others = kinds.kinds_with(key)
        if others:
            return f" with {selector}={kind}; it belongs to {selector}={' or '.join(others)}"
    here = _refer_to_page(".".join(map(str, location)))
    if here:
        return f"; {here}"
    meant = did_you_mean(key, model.model_fields, prefix=prefix)
    if meant:
        return meant
    places = find_keys(key)
    if len(places) == 1:
        return f"; did you mean {places[0]}?"
    keys = ", ".join(model.model_fields)
    return (
        f" with {selector}={kind}, whose keys are {keys}" if selector else f"; known keys: {keys}"
    )


def find_keys(last: str) -> list[str]:
    """Returns the dotted keys of sections, whatever their kinds, that end with a name."""
    found: dict[str, None] = {}
    for name, field in RunConfig.model_fields.items():
        kinds = kinds_of(RunConfig, name)
        models = kinds.sections.values() if kinds else [field.annotation]
        for model in models:
            if last in getattr(model, "model_fields", ()):
                found[f"{name}.{last}"] = None
    return list(found)
