"""Runs the reward functions of a run's file (`task.reward`), in a worker process of the verifier.

The file is whatever a person who may start runs has written, and its arguments are hostile. This
module is the only one that runs it, and is imported only by workers, which are confined. A worker
that has run a file scores for no other task afterwards (`services.verifier.pool`).
"""

from __future__ import annotations

import asyncio
import inspect
import linecache
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from types import ModuleType
from typing import Any

from bapo_core.errors import RewardError
from bapo_core.reward_files import COMPLETIONS, PROMPTS, RewardFunctions, digest_of_text
from bapo_core.tasks import FunctionTask, Verdict, VerdictStatus

_MODULE = "bapo_reward_file"
"""Name of the file's module: its own may be the name of a module of Python's."""


class RunnableFunctions(FunctionTask):
    """The task of a reward function with the text of its file.

    Each function is called for one response at a time, with lists of one element, because each
    response has a deadline of its own.
    """

    def __init__(self, reward: str | Sequence[str] = (), source: str = "") -> None:
        """reward: `task.reward` of the configuration. source: the text of the file.

        Raises `ValueError` for a text that has another digest than `reward`.
        """
        super().__init__(reward)
        self._functions = RewardFunctions.parse(reward)
        self._source = source
        self._calls: list[tuple[str, Callable[..., Any]]] = []
        digest = digest_of_text(source)
        if self._functions.digest not in (None, digest):
            raise ValueError(
                f"the source of {self._functions.file} has the digest {digest}, not "
                f"{self._functions.digest}; send the file that is stored"
            )

    def warm_up(self) -> None:
        """Imports the file. Raises `ValueError`, which names the line, if that fails."""
        file = self._functions.file
        module = ModuleType(_MODULE)
        module.__file__ = file
        sys.modules[_MODULE] = module  # Dataclasses look up their module there.
        lines = self._source.splitlines(keepends=True)
        linecache.cache[file] = (len(self._source), None, lines, file)
        try:
            exec(compile(self._source, file, "exec"), module.__dict__)
        except MemoryError:
            raise
        except BaseException as error:
            hint = ""
            if isinstance(error, ImportError):
                hint = (
                    "; a reward file is one file, which may import what is installed where the "
                    "verifier runs (docs/deploy.md), and no other file of its directory"
                )
            raise ValueError(f"{_describe(file, error)}{hint}") from error
        for name in self._functions.names:
            function = getattr(module, name, None)
            if not callable(function):
                raise ValueError(
                    f"{file}: {name} is {type(function).__name__}, and no function; correct "
                    "task.reward"
                )
            self._calls.append((name, function))

    def verify(self, payload: Mapping[str, Any], response: str) -> Verdict:
        """Returns the rewards of a response: the first function's, and the others' as parts.

        Raises `RewardError`.
        """
        conversation = not isinstance(payload["prompt"], str)
        completion = [{"role": "assistant", "content": response}] if conversation else response
        columns = {name: [value] for name, value in payload["columns"].items()}
        arguments = {**columns, PROMPTS: [payload["prompt"]], COMPLETIONS: [completion]}
        (_, reward), *parts = [
            (name, self._call(name, function, arguments)) for name, function in self._calls
        ]
        status = VerdictStatus.OK if reward >= 1.0 else VerdictStatus.WRONG_VALUE
        return Verdict(reward, status, parts=dict(parts))

    def _call(self, name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> float:
        where = f"{self._functions.file}:{name}"
        try:
            # A copy: what a function changes must not reach the next one, nor the next response.
            result = function(**_accepted(function, deepcopy(arguments)))
            if inspect.isawaitable(result):
                result = asyncio.run(_wait(result))
        except MemoryError:
            raise
        except BaseException as error:
            raise RewardError(_describe(where, error)) from error
        return _check_result(where, result)


async def _wait(result: Any) -> Any:
    return await result


def _accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that a function takes: all of them if it has `**`."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(arguments)
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}


def _check_result(where: str, result: Any) -> float:
    """Returns the one reward of a result. Raises `RewardError` for anything else."""
    if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
        raise RewardError(
            f"{where} returned {result!r:.80}; return a list with one number for each completion"
        )
    rewards = list(result)
    if len(rewards) != 1:
        raise RewardError(
            f"{where} returned {len(rewards)} rewards for 1 completion; return a list with one "
            "number for each completion"
        )
    try:
        if isinstance(rewards[0], str | bytes):
            raise TypeError
        reward = float(rewards[0])
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"{where} returned [{rewards[0]!r:.80}]; return a number for each completion, for "
            "example 0.0"
        ) from error
    if not math.isfinite(reward):
        raise RewardError(f"{where} returned [{reward}]; return a finite number")
    return reward


def _describe(where: str, error: BaseException) -> str:
    """Returns the error with the last line of the file that led to it."""
    file = where.partition(":")[0]
    if isinstance(error, SyntaxError) and error.filename == file:
        return f"{file}, line {error.lineno}: {error.msg}"
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file
    ]
    line = f", line {frames[-1].lineno}" if frames else ""
    try:
        text = str(error)
    except Exception as second:  # noqa: BLE001 - the message of an exception is code of the file's, too
        text = f"whose message raised {type(second).__name__}"
    return f"{where} raised {type(error).__name__}: {text}{line and f' ({file}{line})'}"
