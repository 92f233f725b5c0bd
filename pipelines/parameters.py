"""Turns the arguments of `bapo pipeline` into the pipeline's parameters, and checks them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bapo_core.config import RunConfig, load_config
from bapo_core.errors import BapoError
from pipelines.bapo_pipeline import COUNTDOWN, bapo_pipeline
from pipelines.pytorchjob import Resources
from pipelines.steps import read_config


def parameters_of(config: str | None, arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the pipeline's parameters.

    config: a YAML file, which becomes the parameter `config`.
    arguments: `name=value`, where the name is a parameter of the pipeline or else a key of the
        configuration; the latter become the parameter `overrides`.

    Raises `BapoError` for what would otherwise fail later, in a pod.
    """
    parameters, overrides = _split(arguments)
    if config is not None:
        from_file = {"run": load_config(config).name, "config": Path(config).read_text("utf-8")}
        parameters = from_file | parameters
    if overrides:
        parameters["overrides"] = "\n".join(overrides)
    config_of(parameters)
    for name in ("steps_per_segment", "start_within_minutes"):
        if parameters.get(name, 1) < 1:
            raise BapoError(f"{name} is {parameters[name]}; give at least 1")
    sizes = {
        "workers": "workers",
        "gpus_per_worker": "gpus",
        "cpu_per_worker": "cpu",
        "memory_per_worker": "memory",
    }
    Resources(**{field: parameters[name] for name, field in sizes.items() if name in parameters})
    return parameters


def run_of(parameters: Mapping[str, Any]) -> str:
    """Returns the name of the run, which has a default in the pipeline."""
    return str(parameters.get("run", "countdown"))


def config_of(parameters: Mapping[str, Any]) -> RunConfig:
    """Returns the configuration of the run that these parameters start. Raises `ConfigError`."""
    config, overrides = parameters.get("config", COUNTDOWN), parameters.get("overrides", "")
    return read_config(config, overrides, run_of(parameters))


def _split(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns (parameters of the pipeline, overrides of the configuration)."""
    inputs = bapo_pipeline.component_spec.inputs or {}
    parameters: dict[str, Any] = {}
    overrides = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals:
            raise BapoError(f"{argument!r}: give parameter=value")
        if name not in inputs:
            _suggest_parameter(name, list(inputs))
            overrides.append(argument)
        elif inputs[name].type != "Integer":
            parameters[name] = value
        elif value.isdecimal():
            parameters[name] = int(value)
        else:
            raise BapoError(f"{name}={value}: give a whole number")
    return parameters, overrides


def _suggest_parameter(name: str, parameters: Sequence[str]) -> None:
    """Raises `BapoError` when a name is no key of the configuration, but much like a parameter."""
    keys = list(RunConfig.model_fields)
    if name.split(".")[0] in keys:
        return
    similar = difflib.get_close_matches(name, [*parameters, *keys], n=1)
    if similar and similar[0] in parameters:
        raise BapoError(
            f"{name}: neither a parameter of the pipeline nor a key of the configuration; did you "
            f"mean {similar[0]}?"
        )
