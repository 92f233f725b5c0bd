"""Reward functions of a Python file: their addresses in a configuration, and checks of the text.

The text is parsed here and never run. Only confined processes of the verifier run it
(`services.verifier.functions`).
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bapo_core.errors import ConfigError
from bapo_core.spelling import did_you_mean

FUNCTION = "function"
"""Name of the task whose reward is a function (`task.reward`)."""
LARGEST_FILE = 1 << 20
"""Bytes of a file of reward functions."""
COMPLETIONS, PROMPTS = "completions", "prompts"
"""Arguments of every reward function: lists of the responses and of their prompts (GRPOTrainer of
TRL). Columns of the data are the others."""
_OF_TRAINERS = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that TRL's trainers pass and bapo does not have."""
_ADDRESS = re.compile(
    r"(?P<file>[^@:\r\n]{1,4000}\.py):(?P<name>[^\W\d]\w{0,99})(@(?P<digest>[0-9a-f]{64}))?"
)
_PART = re.compile(r"[a-z][a-z_]{0,39}")
_TAKEN = ("answer", "failed", "overlong")
"""Parts of a reward that have these names already (`bapo_core.rewards`)."""


@dataclass(frozen=True, slots=True)
class RewardFunctions:
    """The reward functions of a run, which are in one file."""

    file: str
    """Path of the file, as the configuration gives it."""
    names: tuple[str, ...]
    """Names of the functions. The first one gives the reward, and the others parts of it."""
    digest: str | None
    """SHA-256 of the file, under which it is stored; None until it is."""

    @classmethod
    def parse(cls, addresses: str | Sequence[str]) -> RewardFunctions:
        """Parses `file.py:function`, or a list of these.

        Raises `ValueError` for another form, and for functions of several files.
        """
        texts = [addresses] if isinstance(addresses, str) else list(addresses)
        if not texts:
            raise ValueError("names no function; write file.py:function")
        matches = [_match(text) for text in texts]
        files = list(dict.fromkeys(match.group("file", "digest") for match in matches))
        if len(files) > 1:
            raise ValueError(
                f"names functions of {files[0][0]} and {files[1][0]}; put them into one file"
            )
        names = tuple(match["name"] for match in matches)
        for number, name in enumerate(names):
            if name in names[:number]:
                raise ValueError(f"names {name} twice; remove one")
            if number and (name in _TAKEN or not _PART.fullmatch(name)):
                raise ValueError(
                    f"names {name} after the first function, so that it becomes a part of the "
                    "reward; give it another name, of at most 40 lower-case letters and _, and "
                    f"none of {', '.join(_TAKEN)}"
                )
        (file, digest) = files[0]
        return cls(file, names, digest)

    @property
    def addresses(self) -> list[str]:
        """The addresses of the functions, with the digest if the file is stored."""
        stored = f"@{self.digest}" if self.digest else ""
        return [f"{self.file}:{name}{stored}" for name in self.names]

    def pin(self, digest: str) -> RewardFunctions:
        """Returns the functions of the file that is stored under this digest."""
        return replace(self, digest=digest)

    def check_text(self, text: str) -> None:
        """Raises `ConfigError`, which names file, function and line, unless the text has them all.

        Each function must take what a reward function is given. A name that is not bound by `def`
        is checked when the verifier imports the file.
        """
        module = self._parse_text(text)
        bound = dict(_bound_names(module))
        for name in self.names:
            if name not in bound:
                defined = [name for name, node in bound.items() if _is_function(node)]
                raise ConfigError(
                    f"{self.file} has no function {name}{did_you_mean(name, bound) or ';'} its "
                    f"functions are {', '.join(defined) or 'none'}"
                )
            node = bound[name]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._check_arguments(node)

    def required_columns(self, text: str) -> dict[str, list[str]]:
        """Returns, by function, the columns without which it cannot be called."""
        bound = dict(_bound_names(self._parse_text(text)))
        nodes = {name: bound.get(name) for name in self.names}
        return {
            name: [item for item in _required(node) if item not in (COMPLETIONS, PROMPTS)]
            for name, node in nodes.items()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }

    def _parse_text(self, text: str) -> ast.Module:
        try:
            return ast.parse(text, filename=self.file)
        except SyntaxError as error:
            raise ConfigError(
                f"{self.file}, line {error.lineno}: {error.msg}; correct the file of task.reward"
            ) from error
        except (ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(f"{self.file}: is no Python file ({error})") from error

    def _check_arguments(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        where = f"{self.file}, line {node.lineno}: {node.name}"
        form = f"write `def {node.name}({COMPLETIONS}, **columns)`"
        arguments = node.args
        if arguments.posonlyargs:
            raise ConfigError(
                f"{where} takes {arguments.posonlyargs[0].arg} by position only, but arguments are "
                f"passed by name; {form}"
            )
        names = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
        if COMPLETIONS not in names and arguments.kwarg is None:
            raise ConfigError(f"{where} has no argument {COMPLETIONS}; {form}")
        for name in _required(node):
            if name in _OF_TRAINERS:
                raise ConfigError(
                    f"{where} needs {name}, which bapo does not pass; remove it or give it a "
                    "default"
                )


def digest_of_text(text: str) -> str:
    """Returns the SHA-256 of a file of reward functions, by which it is stored."""
    return hashlib.sha256(text.encode()).hexdigest()


def stored_digest(functions: RewardFunctions) -> str:
    """Returns the digest under which a file is stored. Raises `ConfigError` without one."""
    if functions.digest is None:
        raise ConfigError(
            f"task.reward names {functions.file}, a file of the machine on which the configuration "
            "was written, without the digest of a stored one; start the run with `bapo run` or "
            "`bapo pipeline submit`, or store the configuration with `bapo config push`, which "
            "store the file, too"
        )
    return functions.digest


def _match(text: str) -> re.Match[str]:
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise ValueError(f"is {text!r:.200}; write file.py:function, for example rewards.py:score")
    return match


def _bound_names(module: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yields the names that the statements of a module bind, also in `if` and `try`."""
    pending: list[ast.stmt] = list(reversed(module.body))
    while pending:
        statement = pending.pop()
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name, statement
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                yield (alias.asname or alias.name.partition(".")[0]), statement
            continue
        for node in ast.iter_child_nodes(statement):
            if isinstance(node, ast.stmt):
                pending.append(node)
            elif isinstance(node, ast.ExceptHandler):
                pending.extend(node.body)
            for part in ast.walk(node) if isinstance(node, ast.expr) else ():
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    yield part.id, statement


def _is_function(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def _required(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Returns the names of the arguments without a default."""
    arguments = node.args
    positional = arguments.args[: len(arguments.args) - len(arguments.defaults)]
    by_name = [
        argument
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    return [argument.arg for argument in (*positional, *by_name)]
