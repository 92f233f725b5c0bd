"""Turns the arguments of `bapo pipeline` into the pipeline's parameters, and checks them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bapo_core.config import RunConfig, config_from, flatten, read_values
from bapo_core.errors import BapoError
from pipelines import RELEASE_NAMES
from pipelines.bapo_pipeline import build_pipeline
from pipelines.configuration import COUNTDOWN, KEYS, read_config, read_fork
from pipelines.training_job import Resources

RUN = "bapo_run"
"""Parameter with the run's name. It sorts before the others, so that Kubeflow's form begins with
it; on the command line it is the configuration's key `name`."""
FORK = "fork_of"
"""Parameter with the run that the run is a fork of."""
REFUSED = {
    "config": "give the YAML file as the first argument",
    "overrides": "give key=value for each key of the configuration",
    RUN: "give name=NAME",
    "run": "the name of a run is name=NAME",
    "steps_per_segment": "`bapo pipeline compile` takes the number of segments as --segments",
    **{
        key: "it belongs to the release; `bapo pipeline compile` takes it as --name"
        for key in RELEASE_NAMES
    },
}
"""Names that the command line does not take as parameters, and what to give instead."""


def parameters_of(config: str | None, arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the pipeline's parameters.

    config: a YAML file, which becomes the parameter `config`.
    arguments: `name=value`, where the name is a parameter of the pipeline or else a key of the
        configuration; the latter become the parameter `overrides`.

    Raises `BapoError` for what would otherwise fail later, in a pod.
    """
    parameters, overrides = _split(arguments)
    for other in ("stored_config", FORK):
        if config is not None and other in parameters:
            raise BapoError(f"a file and {other} are both given; give one of them")
    if config is not None:
        values = read_values(config)
        name = config_from(values, where=config).name
        # KFP passes no nulls, but texts.
        nulls = [f"{key}=null" for key, value in flatten(values).items() if value is None]
        named = {RUN: name} if "name" in values else {}
        parameters = named | {"config": _without_nulls(values)} | parameters
        overrides = [*nulls, *overrides]
    if overrides:
        parameters["overrides"] = overrides
    if is_fork(parameters):
        check_fork(parameters)
    elif "stored_config" not in parameters:
        config_of(parameters)
    if parameters.get("start_within_minutes", 1) < 1:
        minutes = parameters["start_within_minutes"]
        raise BapoError(f"start_within_minutes is {minutes}; give at least 1")
    sizes = {
        "workers": "workers",
        "gpus_per_worker": "gpus",
        "cpu_per_worker": "cpu",
        "memory_per_worker": "memory",
    }
    Resources(**{field: parameters[name] for name, field in sizes.items() if name in parameters})
    return parameters


def is_fork(parameters: Mapping[str, Any]) -> bool:
    """Returns whether the parameters describe a fork, whose configuration is that of its run."""
    return bool(parameters.get(FORK) or parameters.get("fork_step"))


def check_fork(parameters: Mapping[str, Any]) -> None:
    """Raises `ConfigError` unless the parameters describe a fork, as far as its run is unknown."""
    read_fork(
        parameters.get(RUN) or "unnamed",
        parameters.get(FORK, ""),
        parameters.get("fork_step", 0),
        parameters.get("config", COUNTDOWN),
        parameters.get("stored_config", ""),
        parameters.get("overrides", []),
        {name: parameters[name] for name in KEYS if name in parameters},
    )


def check_imports(imports: Iterable[str], parameters: Mapping[str, Any]) -> None:
    """Raises `BapoError` unless each parameter whose artifact is imported holds an address."""
    for name in imports:
        if not parameters.get(name):
            raise BapoError(
                f"{name} is empty, but the pipeline imports the artifact whose address it holds; "
                f"give {name}=ADDRESS, or a pipeline that is compiled without --import {name}"
            )


def run_of(parameters: Mapping[str, Any]) -> str:
    """Returns the name of the run, or that of the default run if none is given."""
    return str(parameters.get(RUN) or RunConfig().name)


def config_of(parameters: Mapping[str, Any]) -> RunConfig:
    """Returns the configuration of the run that these parameters start, without a stored one.

    Raises `ConfigError`.
    """
    return read_config(
        run_of(parameters),
        parameters.get("config", COUNTDOWN),
        None,
        parameters.get("overrides", []),
        {name: parameters[name] for name in KEYS if name in parameters},
    )


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested sections without the keys whose value is None."""
    return {
        key: _without_nulls(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value is not None
    }


def _split(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns (parameters of the pipeline, overrides of the configuration)."""
    inputs = build_pipeline().component_spec.inputs or {}
    parameters: dict[str, Any] = {}
    overrides = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals:
            raise BapoError(f"{argument!r}: give parameter=value")
        if name in REFUSED:
            raise BapoError(f"{name}={value}: {REFUSED[name]}")
        if name == "name":
            parameters[RUN] = value
        elif name in inputs:
            parameters[name] = _parse(name, value, inputs[name].type)
        else:
            _suggest_parameter(name, list(inputs))
            overrides.append(argument)
    return parameters, overrides


def _parse(name: str, value: str, kind: str) -> str | int | float:
    """Returns the value of a parameter of KFP's type `kind`. Raises `BapoError`."""
    try:
        if kind == "Integer":
            return int(value)
        return float(value) if kind == "Float" else value
    except ValueError as error:
        expected = "a whole number" if kind == "Integer" else "a number"
        raise BapoError(f"{name}={value}: give {expected}") from error


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
