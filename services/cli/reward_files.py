"""Reads, checks and stores the file of a run's reward functions (`task.reward`)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from bapo_core.config import RunConfig, config_from, parse_values
from bapo_core.errors import BapoError, ConfigError
from bapo_core.reward_files import LARGEST_FILE, RewardFunctions, digest_of_text
from services.buffer.api.client import BufferClient


def read_reward_file(functions: RewardFunctions) -> str:
    """Returns the text of the file on this machine, which is checked and not run.

    Raises `ConfigError`, which names file, function and line, if it cannot be read, if it is too
    large, if it lacks a function or has one of another signature, and if it is not the stored one.
    """
    try:
        with open(functions.file, "rb") as file:
            data = file.read(LARGEST_FILE + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"task.reward: {functions.file}: {error.strerror}; give the path of the file from the "
            "directory in which the command runs"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"task.reward: {functions.file}: is no text in UTF-8 ({error})"
        ) from error
    if len(data) > LARGEST_FILE:
        raise ConfigError(
            f"task.reward: {functions.file} has more than {LARGEST_FILE} bytes; put tables into "
            "columns of the data, or into a package (docs/adding-a-task.md)"
        )
    if functions.digest not in (None, digest_of_text(text)):
        raise ConfigError(
            f"task.reward: {functions.file} has changed since it was stored as "
            f"{functions.digest}; remove `@{functions.digest}` to use the file as it is now"
        )
    functions.check_text(text)
    return text


def pin_reward(config: RunConfig) -> RunConfig:
    """Returns the configuration with the digest of its reward file, as the file is now.

    A configuration without reward functions, or with a digest, is returned as it is. Raises
    `ConfigError` as `read_reward_file` does.
    """
    functions = config.task.functions
    if functions is None or functions.digest is not None:
        return config
    return config.with_reward(functions.pin(digest_of_text(read_reward_file(functions))))


def store_reward(config: RunConfig, client: BufferClient) -> None:
    """Stores the reward file of a pinned configuration in the buffer service.

    A file that is stored is not read here. Raises `ConfigError` as `read_reward_file` does, and
    `ServiceError` if the file cannot be stored.
    """
    functions = config.task.functions
    if functions is None:
        return
    try:
        client.upload_reward_file(read_reward_file(functions))
    except ConfigError:
        if not _is_stored(functions, client):
            raise


def _is_stored(functions: RewardFunctions, client: BufferClient) -> bool:
    if functions.digest is None:
        return False
    try:
        client.reward_file(functions.digest)
    except BapoError:
        return False
    return True


def pin_in_text(text: str, config: RunConfig, pinned: RunConfig) -> str:
    """Returns the YAML text of a configuration with the addresses of its stored reward file.

    Comments and everything else stay as they are. Raises `ConfigError` for a text in which the
    addresses cannot be found as they are.
    """
    before, after = config.task.functions, pinned.task.functions
    if before is None or after is None or before == after:
        return text
    for address, stored in zip(before.addresses, after.addresses, strict=True):
        text = re.sub(rf"{re.escape(address)}(?![\w@])", stored.replace("\\", r"\\"), text)
    if config_from(parse_values(text, "config")) != pinned:
        raise ConfigError(
            f"task.reward: {before.addresses[0]} cannot be replaced by {after.addresses[0]} in the "
            "file; write the address on one line and without escapes"
        )
    return text


def store_parameters(
    parameters: Mapping[str, Any], connect: Callable[[], BufferClient]
) -> dict[str, Any]:
    """Stores the reward file that a pipeline's parameters name; returns them with its digest.

    A stored configuration and the run of a fork have a digest already. connect: returns a client of
    the buffer service, and is called only for a file. Raises `BapoError` as `store_reward` and
    `connect` do.
    """
    from pipelines.parameters import config_of, is_fork  # imports kfp

    if "stored_config" in parameters or is_fork(parameters):
        return dict(parameters)
    config = config_of(parameters)
    pinned = pin_reward(config)
    if pinned == config:
        return dict(parameters)
    store_reward(pinned, connect())
    override = f"task.reward={json.dumps(pinned.task.reward)}"
    return {**parameters, "overrides": [*parameters.get("overrides", []), override]}
