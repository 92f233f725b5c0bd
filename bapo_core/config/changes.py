"""Changes of a run's configuration: which keys may change, and what is in force at a step.

A run keeps the configuration that it was created with. A change names its first step, the keys, and
their values before and after it. The configuration of a step is a function of the initial one and
of the changes, so that a step that is repeated is repeated with the values that it had.

A fork of a run is a change as well: from the step after the fork on, the new run has other values,
and what came before it stays as it was. Its values may be of other kinds of sections, so that keys
begin or end with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bapo_core.config.base import flatten
from bapo_core.config.loader import config_from, merge, nest, override_config
from bapo_core.config.messages import explain_validation_error
from bapo_core.config.run import RunConfig
from bapo_core.errors import ConfigError

CHANGEABLE = (
    "steps",
    "optimizer.learning_rate",
    "optimizer.weight_decay",
    "optimizer.gradient_clip",
    "evaluation.every",
    "evaluation.sets.*.every",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.keep_best",
)
"""Keys that may change while a run lasts: each is read anew for every step, and no recorded group,
batch or evaluation depends on its value at another step."""


FIXED_IN_FORKS = {
    "model.*": "the initial model, which step 1 began with",
    "lora.*": "the state of the trained weights in every checkpoint",
    "task.*": "the prompts and the rewards of every group since step 1",
    "reward.*": "the rewards of every group since step 1",
    "rollout.group_size": "the difficulty of every prompt since step 1, as correct responses of G",
    "rollout.max_prompt_tokens": "the training prompts, which were chosen by their length",
    "sampler.prior_run": "the results that the run began with before step 1",
    "evaluation.samples": "the accuracies of evaluations since version 1",
    "evaluation.temperature": "the accuracies of evaluations since version 1",
    "evaluation.top_p": "the accuracies of evaluations since version 1",
    "evaluation.sets.*": "the held-out prompts of evaluations since version 1",
}
"""Keys that a fork cannot change, as patterns, and what of the run's past depends on each."""
FREE_IN_FORKS = "evaluation.sets.*.every"
"""Pattern of the keys that a fork can change although one of `FIXED_IN_FORKS` matches them."""


UNSET = "unset"
"""Stands on pages for the value of a key that a change begins or ends."""


class ConfigChange(BaseModel):
    """Keys whose values are others from a step on."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    first_step: int = Field(ge=1)
    """First step at which the new values are in force."""
    old: dict[str, Any]
    """Values before the change, by dotted key; a key that is in `new` alone begins with it."""
    new: dict[str, Any]
    """Values from the change on, by dotted key; a key that is in `old` alone ends with it."""

    def describe(self, most: int | None = None) -> str:
        """Returns the keys with their old and new values, without the keys that end.

        most: number of keys after which the others are counted, not named; None names all.
        """
        keys = sorted(self.new)
        texts = [f"{key} {self.old.get(key, UNSET)} -> {self.new[key]}" for key in keys[:most]]
        more = len(keys) - len(texts)
        return ", ".join([*texts, f"{more} more"] if more else texts)


def values_at(
    values: Mapping[str, Any], changes: Sequence[ConfigChange], step: int | None
) -> dict[str, Any]:
    """Returns the values of a configuration that are in force at a step.

    values: the values at any step. changes: in the order in which they were made; where two are in
    force, the later one holds. step: 0 for the initial values, None for the last ones.
    """
    in_force: dict[str, Any] = {}
    for change in changes:
        in_force = {**_every_key(change.old, change.new), **in_force}
    for change in changes:
        if step is None or change.first_step <= step:
            in_force |= _every_key(change.new, change.old)
    result = dict(values)
    # A section may be null or empty in place of keys: `kl.convex` ends as `kl.convex.after` begins.
    for key in [key for key, value in in_force.items() if value is _ABSENT]:
        result = _without(result, key.split("."))
    for key, value in in_force.items():
        if value is not _ABSENT:
            result = merge(result, nest(key, value), model=None)
    return result


_ABSENT = object()
"""Stands for the value of a key that is not in force."""


def _every_key(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values, with `_ABSENT` for the keys that `others` alone has."""
    return {**dict.fromkeys(others, _ABSENT), **values}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested sections by dotted key, and the sections that are empty."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _without(values: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """Returns nested values without the key at a path, and without sections that get empty."""
    key, *rest = path
    if key not in values:
        return dict(values)
    kept = {name: value for name, value in values.items() if name != key}
    inner = _without(values[key], rest) if rest and isinstance(values[key], Mapping) else {}
    return {
        name: inner if name == key else values[name] for name in values if name in kept or inner
    }


class ConfigHistory:
    """The configuration of a run at each of its steps."""

    def __init__(self, config: RunConfig, changes: Sequence[ConfigChange] = ()) -> None:
        """config: the configuration at any step. changes: in the order in which they were made."""
        self._config, self._changes = config, changes
        self._by_changes: dict[tuple[bool, ...], RunConfig] = {}

    def at(self, step: int | None) -> RunConfig:
        """Returns the configuration at a step; None is after the last change.

        theta_t is published and evaluated by the configuration of step t, and stored in a
        checkpoint by the configuration of the step before.
        """
        if not self._changes:
            return self._config
        in_force = tuple(step is None or change.first_step <= step for change in self._changes)
        if in_force not in self._by_changes:
            values = values_at(self._config.model_dump(mode="json"), self._changes, step)
            self._by_changes[in_force] = RunConfig.model_validate(values)
        return self._by_changes[in_force]

    @property
    def current(self) -> RunConfig:
        """The configuration after the last change."""
        return self.at(None)

    def plan_change(self, requested: Mapping[str, Any], trained: int) -> ConfigChange | None:
        """Returns the change that gives keys new values; None if they have these values already.

        requested: values by dotted key. trained: the last step of the checkpoint that the run
        continues from; the change holds from the step after it on.

        Raises `ConfigError` for keys that may not change, for values that are not valid, and unless
        a step is left to train.
        """
        now = flatten(self.at(trained + 1).model_dump(mode="json"))
        last = flatten(self.current.model_dump(mode="json"))
        values = self.current.model_dump(mode="json")
        for key, value in requested.items():
            values = merge(values, nest(key, value))
        try:
            config = RunConfig.model_validate(values)
        except ValidationError as error:
            explanation = explain_validation_error(error, values, overrides=requested.keys())
            raise ConfigError(explanation) from error
        wanted = flatten(config.model_dump(mode="json"))
        changed = {
            key: wanted.get(key)
            for key in sorted({*wanted, *last})
            if wanted.get(key) != last.get(key)
            or (key in requested and wanted.get(key) != now.get(key))
        }
        refuse_fixed_keys(config.name, changed)
        _refuse_steps_that_are_trained(changed, config, trained)
        if not changed:
            return None
        old = {key: now[key] for key in changed}
        return ConfigChange(first_step=trained + 1, old=old, new=changed)

    def with_change(self, change: ConfigChange | None) -> RunConfig:
        """Returns the configuration after the last change and one change more."""
        changes = self._changes if change is None else [*self._changes, change]
        values = values_at(self._config.model_dump(mode="json"), changes, None)
        return RunConfig.model_validate(values)

    def plan_fork(self, requested: Mapping[str, Any], step: int, name: str) -> ConfigChange:
        """Returns the first change of a fork: its name, and the values that it changes.

        requested: values by section, as in a file; those of a preset hold if they name an
        algorithm. step: the last step that the fork shares with this run. name: of the fork.

        Raises `ConfigError` for keys that the past depends on, for values that are not valid, and
        unless a step is left to train.
        """
        now = _flatten(self.at(step + 1).model_dump(mode="json"))
        last = _flatten(self.current.model_dump(mode="json"))
        where = f"fork of run {self.current.name!r}"
        config = override_config(
            values_of_user(self.current), requested, {"name": name}, where=where
        )
        wanted = _flatten(config.model_dump(mode="json"))
        given = flatten(requested)
        sections = {key.partition(".")[0] for key in given}

        def holds_at_once(key: str) -> bool:
            """Whether the fork's value holds before a later change of the run would hold."""
            is_structural = key not in now or key not in wanted
            is_related = is_structural and key.partition(".")[0] in sections
            return key in given or "algorithm" in given or is_related

        changed = {
            key
            for key in {*wanted, *last, *now}
            if wanted.get(key, _ABSENT) != last.get(key, _ABSENT)
            or (holds_at_once(key) and wanted.get(key, _ABSENT) != now.get(key, _ABSENT))
        }
        given_others = {
            key: wanted.get(key) for key in sorted(changed) if wanted.get(key) != last.get(key)
        }
        _refuse_fixed_in_forks(where, given_others)
        _refuse_other_checkpoint(where, self.at(step), config, step)
        if config.steps <= step:
            raise ConfigError(
                f"{where}: it has no step left to train after step {step}, because steps is "
                f"{config.steps}; set a number of steps above {step} (steps=...), or fork earlier"
            )
        # A key that a later change of the run begins, and the fork does not have, ends with it.
        before = {key: value for key, value in last.items() if key not in wanted} | now
        return ConfigChange(
            first_step=step + 1,
            old={key: before[key] for key in sorted(changed) if key in before},
            new={key: wanted[key] for key in sorted(changed) if key in wanted},
        )


def values_of_user(config: RunConfig) -> dict[str, Any]:
    """Returns the values in which a configuration differs from its algorithm's preset.

    They are what a file would have to set for this configuration.
    """
    preset = config_from({"algorithm": config.algorithm})
    values, defaults = config.model_dump(mode="json"), preset.model_dump(mode="json")
    return {**_differing(values, defaults), "algorithm": config.algorithm}


def _differing(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that differ from the defaults; sections of another kind as a whole."""
    differing: dict[str, Any] = {}
    for key, value in values.items():
        default = defaults.get(key, _ABSENT)
        if value == default:
            continue
        is_section = isinstance(value, Mapping) and isinstance(default, Mapping)
        if is_section and value.keys() == default.keys() and key != "options":
            value = _differing(value, default)
        differing[key] = value
    return differing


def _refuse_fixed_in_forks(where: str, changed: Mapping[str, Any]) -> None:
    for key, value in changed.items():
        depends = _what_past_depends_on(key)
        if depends is not None:
            raise ConfigError(
                f"{where}: {key}={value} cannot change in a fork, because the past that it "
                f"shares depends on this key from step 1 on: {depends}; leave it as it is, or "
                f"{_NEW_RUN}"
            )


_NEW_RUN = (
    "start a new run with `bapo run`, of the trained model by `bapo checkpoints RUN --export DIR` "
    "and model.path=DIR"
)


def _what_past_depends_on(key: str) -> str | None:
    """Returns what of a run's past depends on a key; None for one that a fork can change."""
    if fnmatchcase(key, FREE_IN_FORKS):
        return None
    depends = (text for pattern, text in FIXED_IN_FORKS.items() if fnmatchcase(key, pattern))
    return next(depends, None)


def _refuse_other_checkpoint(where: str, before: RunConfig, after: RunConfig, step: int) -> None:
    """Raises `ConfigError` if checkpoints up to a step have other states than the fork trains."""

    def states(config: RunConfig) -> dict[str, tuple[object, bool | int | None]]:
        reset = config.kl.reset_after
        return {
            "advantage.estimator": (
                config.advantage.estimator,
                config.advantage.estimator == "gae",  # a critic
            ),
            "demonstrations.supervise_every": (
                config.demonstrations.supervise_every,
                config.demonstrations.supervise_every > 0,  # an optimizer of supervised updates
            ),
            "kl.reset_after": (reset, reset if reset is not None and reset <= step else None),
        }

    stored, wanted = states(before), states(after)
    for key, (value, state) in wanted.items():
        if state != stored[key][1]:
            raise ConfigError(
                f"{where}: {key}={value} cannot change in a fork at step {step}, because the "
                f"checkpoint that it begins with was written with {key}={stored[key][0]}, and what "
                "it stores depends on that; leave it as it is, or start a new run with `bapo run`"
            )


def may_change(key: str) -> bool:
    """Whether a dotted key may have another value from a step on."""
    return any(fnmatchcase(key, pattern) for pattern in CHANGEABLE)


def refuse_fixed_keys(run: str, changed: Mapping[str, Any]) -> None:
    """Raises `ConfigError` if keys are among the changed ones that may not change."""
    fixed = [f"{key}={value}" for key, value in changed.items() if not may_change(key)]
    if fixed:
        more = f" and {len(fixed) - 5} more" if len(fixed) > 5 else ""
        past = {key: _what_past_depends_on(key) for key in changed}
        refused = [f"{key} ({depends})" for key, depends in past.items() if depends is not None]
        remedy = (
            f"a fork cannot change {refused[0]} either; {_NEW_RUN}"
            if refused
            else f"for other keys, fork it: `bapo fork {run} --at STEP {fixed[0]}` makes a new run "
            "with the same past up to this step"
        )
        raise ConfigError(
            f"run {run!r} cannot change {', '.join(fixed[:5])}{more}: {_why_fixed(changed)}; it "
            f"may change {', '.join(CHANGEABLE)}; {remedy}"
        )


def _why_fixed(changed: Mapping[str, Any]) -> str:
    """Returns why the keys among the changed ones that may not change are fixed."""
    fixed = [key for key in changed if not may_change(key)]
    evaluated = [key for key in fixed if key.startswith(("evaluation.", "task.test_"))]
    reasons = []
    if len(evaluated) < len(fixed):
        reasons.append("its steps would be of two methods or of two tasks")
    if evaluated:
        reasons.append(
            "the accuracies of its evaluations before and after the change could not be compared"
        )
    return ", and ".join(reasons)


def _refuse_steps_that_are_trained(
    changed: Mapping[str, Any], config: RunConfig, trained: int
) -> None:
    others = [f"{key}={value}" for key, value in changed.items() if key != "steps"]
    if "steps" in changed and config.steps < trained:
        raise ConfigError(
            f"steps={config.steps} is below the {trained} steps that run {config.name!r} has "
            f"trained; give at least {trained}"
        )
    if others and config.steps <= trained:
        raise ConfigError(
            f"{', '.join(others)} would change nothing: run {config.name!r} has trained "
            f"{trained} of {config.steps} steps; train longer as well, with a number of steps "
            f"above {trained} (steps=...)"
        )
