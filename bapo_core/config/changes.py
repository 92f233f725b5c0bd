"""Changes of a run's configuration: which keys may change, and what is in force at a step.

A run keeps the configuration that it was created with. A change names its first step, the keys, and
their values before and after it. The configuration of a step is a function of the initial one and
of the changes, so that a step that is repeated is repeated with the values that it had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bapo_core.config.base import flatten
from bapo_core.config.loader import merge, nest
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


class ConfigChange(BaseModel):
    """Keys whose values are others from a step on."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    first_step: int = Field(ge=1)
    """First step at which the new values are in force."""
    old: dict[str, Any]
    """Values before the change, by dotted key."""
    new: dict[str, Any]
    """Values from the change on, by dotted key."""

    def describe(self) -> str:
        """Returns the keys with their old and new values."""
        return ", ".join(f"{key} {self.old[key]} -> {self.new[key]}" for key in sorted(self.new))


def values_at(
    values: Mapping[str, Any], changes: Sequence[ConfigChange], step: int | None
) -> dict[str, Any]:
    """Returns the values of a configuration that are in force at a step.

    values: the values at any step. changes: in the order in which they were made; where two are in
    force, the later one holds. step: 0 for the initial values, None for the last ones.
    """
    in_force: dict[str, Any] = {}
    for change in changes:
        in_force = {**change.old, **in_force}
    for change in changes:
        if step is None or change.first_step <= step:
            in_force |= change.new
    result = dict(values)
    for key, value in in_force.items():
        result = merge(result, nest(key, value), model=None)
    return result


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


def may_change(key: str) -> bool:
    """Whether a dotted key may have another value from a step on."""
    return any(fnmatchcase(key, pattern) for pattern in CHANGEABLE)


def refuse_fixed_keys(run: str, changed: Mapping[str, Any]) -> None:
    """Raises `ConfigError` if keys are among the changed ones that may not change."""
    fixed = [f"{key}={value}" for key, value in changed.items() if not may_change(key)]
    if fixed:
        more = f" and {len(fixed) - 5} more" if len(fixed) > 5 else ""
        raise ConfigError(
            f"run {run!r} cannot change {', '.join(fixed[:5])}{more}: its steps would be of two "
            f"methods or of two tasks; it may change {', '.join(CHANGEABLE)}; for other keys, "
            f"start a new run from its weights: `bapo checkpoints {run} --step STEP --export "
            "DIRECTORY`, then `bapo run` with model.path=DIRECTORY and a name of its own"
        )


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
