"""Reads the configuration of a run from the pipeline's parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from bapo_core.config import RunConfig, merge, nest, override_config, parse_overrides, parse_values
from bapo_core.errors import ConfigError
from pipelines.naming import check_run_name
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.common.errors import ServiceError
from services.common.objectstore import S3_SCHEME, ObjectStore, ObjectStoreError

if TYPE_CHECKING:
    from pipelines.cluster import Cluster

CONFIGMAP_SCHEME = "configmap:"
"""Begins `configmap:NAME` and `configmap:NAME/KEY`."""
COUNTDOWN: dict[str, Any] = {
    "steps": 120,
    "model": {"path": "tiny"},
    "task": {
        "name": "countdown",
        "options": {"template": "short"},
        "train_prompts": 2000,
        "test_prompts": 200,
    },
    "rollout": {
        "engine": {"kind": "vllm", "args": ["--enforce-eager", "--max-num-seqs", "256"]},
        "prompts_per_step": 64,
        "group_size": 8,
        "max_prompt_tokens": 32,
        "max_response_tokens": 32,
    },
    "optimizer": {"learning_rate": 1e-4, "minibatch_prompts": 16, "microbatch_tokens": 2048},
    "evaluation": {"every": 20},
}
"""`examples/countdown-vllm.yaml`, which the form shows as the default configuration."""
KEYS = {
    "model": "model.path",
    "task": "task.name",
    "train_data": "task.train_path",
    "test_data": "task.test_path",
    "steps": "steps",
    "learning_rate": "optimizer.learning_rate",
    "prompts_per_step": "rollout.prompts_per_step",
    "group_size": "rollout.group_size",
}
"""Parameters of the pipeline that set one key of the configuration, with this key."""


def read_config(
    run: str,
    config: object,
    stored: str | None,
    overrides: object,
    settings: Mapping[str, Any],
) -> RunConfig:
    """Returns the configuration that the pipeline's parameters describe.

    config: the parameter `config`, a JSON object.
    stored: text of the stored configuration, which replaces `config`; None if none is named.
    overrides: the parameter `overrides`, a list of `key=value`, which replace all other values.
    settings: values of the parameters in `KEYS`; one that is empty or 0 changes nothing.

    Raises `ConfigError`. What cannot be meant is refused: an empty configuration, for example,
    would train every default.
    """
    check_run_name(run)
    values = _config_values(config)
    if stored is not None:
        if values != COUNTDOWN:
            raise ConfigError(
                "config and stored_config are both set; leave config as the form shows it, or "
                "clear stored_config"
            )
        values = _stored_values(stored)
    values = _drop_options_of_another_task(values, settings.get("task"))
    values = merge(values, _settings_values(settings))
    changes = merge(parse_overrides(_override_lines(overrides)), {"name": run})
    return override_config(values, changes)


def read_fork(
    run: str,
    fork_of: str,
    fork_step: int,
    config: object,
    stored_config: str,
    overrides: object,
    settings: Mapping[str, Any],
) -> wire.ForkRequest | None:
    """Returns the fork that the pipeline's parameters describe; None if they describe no fork.

    run: name of the fork. fork_of: the run that it comes from. fork_step: the last step that both
    share; 0 for none. config, stored_config: must be as the form shows them, because the
    configuration is that of `fork_of`. overrides, settings: as for `read_config`; they hold from
    the step after `fork_step` on.

    Raises `ConfigError`.
    """
    if not fork_of:
        if fork_step:
            raise ConfigError(
                f"fork_step is {fork_step}, but fork_of is empty; give the name of the run to "
                "fork, or leave fork_step at 0"
            )
        return None
    if fork_step < 1:
        raise ConfigError(
            f"fork_of is {fork_of!r}, but fork_step is {fork_step}; give the last step that both "
            "runs share, from 1 on"
        )
    if not re.fullmatch(wire.RUN_NAME, fork_of):
        raise ConfigError(f"fork_of is {fork_of!r}, which is no name of a run")
    if fork_of == run:
        raise ConfigError(
            f"bapo_run and fork_of are both {run!r}; give the fork another name, or leave bapo_run "
            "empty"
        )
    if stored_config or _config_values(config) != COUNTDOWN:
        given = "stored_config" if stored_config else "config"
        raise ConfigError(
            f"{given} and fork_of are both set, but a fork has the configuration of run "
            f"{fork_of!r}; leave config as the form shows it and stored_config empty, and give "
            "what is to change as overrides"
        )
    check_run_name(run)
    values = merge(_settings_values(settings), parse_overrides(_override_lines(overrides)))
    values.pop("name", None)  # bapo_run holds, as for a run that is no fork
    return wire.ForkRequest(name=run, step=fork_step, values=values)


def _settings_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of the parameters in `KEYS`, by section, without those that are empty."""
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if value:
            values = merge(values, nest(KEYS[name], _restore_integers(value)))
    return values


def _drop_options_of_another_task(values: dict[str, Any], name: object) -> dict[str, Any]:
    """Returns the values without `task.options` if the parameter `task` names another task."""
    section = values.get("task")
    if not name or not isinstance(section, Mapping) or section.get("name", name) == name:
        return values
    return {**values, "task": {key: section[key] for key in section if key != "options"}}


def _config_values(config: object) -> dict[str, Any]:
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"config: must be a JSON object, not a {type(config).__name__}: Kubeflow's form joins "
            "the lines of pasted YAML, so that a comment would hide all of it; choose Open Json "
            "Editor, or store the file with `bapo config push` and give its name as stored_config"
        )
    if not config:
        raise ConfigError(
            "config: holds no key, so every default would be trained; give the configuration as a "
            "JSON object, or name a stored one as stored_config"
        )
    restored: dict[str, Any] = _restore_integers(config)
    return restored


def _stored_values(text: str) -> dict[str, Any]:
    values = parse_values(text, "stored_config")
    if not values:
        raise ConfigError(
            "stored_config: the stored text sets no key, so every default would be trained; if it "
            "is one long comment, the lines of the file were joined: store the file again with "
            "`bapo config push`"
        )
    return values


def load_stored_config(
    name: str,
    buffer: BufferClient,
    store: ObjectStore,
    connect: Callable[[], Cluster] | None = None,
) -> str | None:
    """Returns the text of a stored configuration, or None if `name` is empty.

    name: as `bapo config push` stored it, or `s3://bucket/key`, which is read with the release's
    own credentials, or `configmap:NAME/KEY` in the pod's namespace. The key may be left out if the
    ConfigMap has one only.
    connect: connects to that namespace; None for the pod's own way.

    Raises `ConfigError` when there is none of this name, `BapoError` for a ConfigMap outside of a
    cluster, and `RequestRefused` for one that the pod may not read.
    """
    if not name:
        return None
    if name.startswith(CONFIGMAP_SCHEME):
        return _read_config_map(name.removeprefix(CONFIGMAP_SCHEME), connect or _own_namespace)
    if name.startswith(S3_SCHEME):
        return _read_object(name, store)
    try:
        return buffer.config(name).text
    except ServiceError as error:
        raise ConfigError(f"stored_config: {error}") from error


def _own_namespace() -> Cluster:
    from pipelines.cluster import STEP_RETRY_FOR_S, Cluster, current_namespace

    return Cluster(current_namespace(), retry_for_s=STEP_RETRY_FOR_S)


def _read_config_map(address: str, connect: Callable[[], Cluster]) -> str:
    name, _, key = address.partition("/")
    cluster = connect()
    texts = cluster.config_map(name) if name else None
    if texts is None:
        raise ConfigError(
            f"stored_config: there is no ConfigMap {name!r} in the namespace {cluster.namespace}; "
            "`kubectl create configmap NAME --from-file=config.yaml` makes one"
        )
    if not key and len(texts) == 1:
        return next(iter(texts.values()))
    if key not in texts:
        raise ConfigError(
            f"stored_config: the ConfigMap {name} has the keys {', '.join(texts) or 'none'}; give "
            f"one of them: configmap:{name}/KEY"
        )
    return texts[key]


def _read_object(address: str, store: ObjectStore) -> str:
    try:
        return store.read_address(address).decode()
    except ObjectStoreError as error:
        raise ConfigError(f"stored_config: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"stored_config: {address}: {error}") from error


def _override_lines(overrides: object) -> list[str]:
    if not isinstance(overrides, list) or not all(isinstance(item, str) for item in overrides):
        raise ConfigError(
            f'overrides: must be a JSON list of texts, such as ["steps=400"] (got {overrides!r})'
        )
    return [line.strip() for line in overrides if line.strip()]


def _restore_integers(value: Any) -> Any:
    """Returns `value` with integers for whole numbers, because KFP makes every number a float."""
    if isinstance(value, Mapping):
        return {key: _restore_integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_restore_integers(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
