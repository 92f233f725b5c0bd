"""The functions of the Python API."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo.frames import frame_of
from bapo.reward import RewardFunction, write_functions
from bapo.run import Run, relative_if_below
from bapo_core.config import RunConfig, nest, override_config, read_values
from services.buffer.api.client import BufferClient
from services.cli.console import plain_console
from services.cli.local_run import REPORTS, execute, prepare_new_run
from services.cli.responses import stored_responses
from services.cli.reward_files import pin_reward
from services.cli.service import format_addresses, open_local_object_store
from services.common.proxies import bypass_proxies
from services.datasets import pin_revisions
from services.model.resolve import find_model
from services.stack import DEFAULT_PORT
from services.stack.settings import default_home
from services.stack.stack import Endpoints, find_or_start_stack

if TYPE_CHECKING:
    import pandas

Config = str | os.PathLike[str] | Mapping[str, Any]
"""A YAML file, or the values of one."""


def train(
    config: Config,
    changes: Mapping[str, Any] | None = None,
    *,
    reward: RewardFunction | Sequence[RewardFunction] | None = None,
    new: bool = False,
    port: int = DEFAULT_PORT,
    **keys: Any,
) -> Run:
    """Trains on this machine and returns the run, as `bapo run` does.

    Postgres, the object store and the services are used if they run, or started; they end with this
    process. Summary and report are written to `runs/NAME`. Interrupt the kernel, or press Ctrl-C,
    to stop the run.

    config: a YAML file (see examples/), or the values of one as a mapping.
    changes: values by dotted key, for example `{"optimizer.learning_rate": 1e-5}`. keys: further
        values of the top level, for example `steps=50`.
    reward: a reward function with TRL's signature, or several of which the first gives the reward
        and the others are parts (docs/adding-a-task.md). It must import what it uses.
    new: whether to take the next free name if the run's name is taken.
    port: port of the REST API and the dashboard if the services are started; 0 takes any free one.

    Raises `ConfigError` for an invalid configuration, and `BapoError` if the name is taken, if data
    or model cannot be read, and if a process of the run fails.
    """
    loaded = _load(config, {**(changes or {}), **keys}, reward)
    home, console = default_home(), plain_console()
    for warning in loaded.warnings():
        console.print(f"note: {warning}", soft_wrap=True)
    loaded = pin_revisions(pin_reward(loaded))
    endpoints = _services(port)
    # Without the token in a notebook, whose outputs are stored.
    console.print(
        format_addresses(endpoints, relative_if_below(home), with_token=console.is_terminal),
        soft_wrap=True,
    )
    run, model = prepare_new_run(loaded, endpoints, home, console, new=new)
    execute(run, model)
    return Run(run.config.name, endpoints, run.directory)


def open_run(name: str, *, port: int = DEFAULT_PORT) -> Run:
    """Returns a run of this machine, whatever its state.

    The services are started if they do not run. Raises `BapoError` if there is no such run.
    """
    run = Run(name, _services(port), REPORTS / name)
    _ = run.status
    return run


def runs(*, port: int = DEFAULT_PORT) -> pandas.DataFrame:
    """Returns the runs of this machine: a row for each, by its name."""
    endpoints = _services(port)
    states = BufferClient(endpoints.buffer_url, endpoints.token).runs()
    rows = [
        {
            "name": state.name,
            "status": state.status,
            "step": state.current_step,
            "steps": state.steps,
            "created_at": state.created_at,
        }
        for state in states
    ]
    return frame_of(rows, index="name")


def evaluate(
    model: str | os.PathLike[str],
    config: Config,
    changes: Mapping[str, Any] | None = None,
    *,
    reward: RewardFunction | Sequence[RewardFunction] | None = None,
    responses: str | os.PathLike[str] | None = None,
    **keys: Any,
) -> pandas.DataFrame:
    """Measures the accuracy of a model on the evaluation sets of a configuration.

    Returns a row for each set: its accuracy and mean reward, and mean@n, pass@k and maj@k. What the
    model wrote, with its verdicts, is written to a file of JSON lines, which
    `pandas.read_json(file, lines=True)` and `bapo responses` read. No service is needed.

    model: a model directory, `tiny`, or an address such as `hf://organisation/name`. config,
    changes, reward, keys: as for `train`. responses: the file of the responses; unless given,
    `runs/eval-MODEL-TIME.jsonl`.

    Raises `BapoError` as `bapo eval` does.
    """
    from services.cli.evaluate import evaluate_directory  # imports torch

    loaded = _load(config, {**(changes or {}), **keys}, reward)
    directory = find_model(os.fspath(model), default_home(), open_store=open_local_object_store)
    console, file = plain_console(), None if responses is None else Path(responses)
    with stored_responses(directory, file, console) as keep:
        evaluations = evaluate_directory(
            loaded,
            directory,
            note=lambda text: console.print(f"note: {text}", soft_wrap=True),
            keep=keep,
        )
    rows = [
        {
            "set": evaluation.evaluation_set,
            "prompts": evaluation.prompts,
            "accuracy": evaluation.mean_accuracy,
            "reward": evaluation.mean_reward,
            **{f"{score.metric}@{score.k}": score.value for score in evaluation.scores},
        }
        for evaluation in evaluations
    ]
    return frame_of(rows, index="set")


def _load(
    config: Config,
    changes: Mapping[str, Any],
    reward: RewardFunction | Sequence[RewardFunction] | None,
) -> RunConfig:
    """Returns the configuration of a file or a mapping, with changed keys and reward functions."""
    if reward is not None:
        functions = [reward] if callable(reward) else list(reward)
        names = write_functions(functions, default_home() / "rewards")
        changes = {**changes, "task.reward": names if len(names) > 1 else names[0]}
    if isinstance(config, Mapping):
        values, where = dict(config), "config"
    else:
        where = os.fspath(config)
        values = read_values(where)
    nested = [nest(key, value) for key, value in changes.items()]
    return override_config(values, *nested, where=where)


@functools.cache
def _services(port: int) -> Endpoints:
    """Returns the services of this machine, which end with this process if it started them."""
    bypass_proxies()
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(find_or_start_stack(default_home(), port))
