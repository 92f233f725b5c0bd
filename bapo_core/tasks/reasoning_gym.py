"""The task `reasoning_gym`, whose problems the library reasoning-gym generates and scores.

A payload is {"dataset": name of a generator, "config": its configuration, "seed", "index",
"question", "answer"}. The first four determine the entry of the generator, which scoring needs
whole. It is generated again where responses are scored, because its metadata need not be JSON. The
question and the answer show whether that gave the same entry.

The library is imported at first use, because bapo must import without it.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import count
from typing import Any, ClassVar, Literal, get_args

from bapo_core.errors import PayloadError
from bapo_core.seeding import derive_seed
from bapo_core.spelling import did_you_mean
from bapo_core.tasks.base import (
    Message,
    Payload,
    Verdict,
    VerdictStatus,
    draw_distinct,
    with_format,
)
from bapo_core.tasks.tags import THINK_PREFIX, last_answer

CODE_SCORERS = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Generators whose scorer evaluates the answer as Python (`eval`, or SymPy's `parse_expr`)."""

_HASH_DEPENDENT = (
    "generates other entries in every process, because they depend on Python's hashes of strings, "
    "so a run could be neither scored nor resumed"
)
REFUSED = {
    "codeio": _HASH_DEPENDENT,
    "game_of_life_halting": "accepts every answer",
    "intermediate_integration": _HASH_DEPENDENT,
    "isomorphic_strings": _HASH_DEPENDENT,
    "knight_swap": _HASH_DEPENDENT,
    "polynomial_multiplication": _HASH_DEPENDENT,
    "ransom_note": _HASH_DEPENDENT,
    "word_ladder": _HASH_DEPENDENT,
}
"""Generators that no run can use, and the reason."""

COMPOSITE = "composite"
"""The library's generator that mixes others, which its configuration lists as `datasets`."""

ENTRIES = 1_000
"""The size with which a generator is made; further entries come from another seed. Some generators
prepare as many entries, and some depend on their number."""
MAX_ANSWER = 20_000
"""Most characters of an answer; a longer one is not scored."""
MAX_MISSES = 1_000
"""Consecutive entries without a new question after which the questions count as exhausted. It is
low because some generators take a second for an entry."""
TOLERANCE = 1e-9
"""A score of at least 1 - TOLERANCE is correct: sums of partial scores are rounded."""

Template = Literal["think", "prefilled", "system", "short"]

_THINK = """{question}

Reason inside <think> </think> tags first. Then give only the final answer inside \
<answer> </answer> tags."""


@dataclass(frozen=True, slots=True)
class ReasoningGymTask:
    """A generator of reasoning-gym with a prompt template."""

    name: ClassVar[str] = "reasoning_gym"
    columns: ClassVar[Sequence[str]] = (
        "dataset",
        "config",
        "seed",
        "index",
        "question",
        "answer",
    )
    reward_parts: ClassVar[Sequence[str]] = ("format",)

    dataset: str = ""
    """Name of the generator, for example `chain_sum`; `composite` mixes several. It must be set."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of the generator, for example `{min_terms: 2, max_terms: 4}`, without `seed`
    and `size`, which `task.data_seed` and the numbers of prompts determine."""
    template: Template = "think"
    """Prompt template. `think`: the question and instructions for a chat model, whose answer is in
    the last <answer> tag. `prefilled`: the same, and the response continues a message of the
    assistant that opens <think>. `system`: the library's default system prompt, and the question.
    `short`: the question alone, whose response is the answer alone."""
    allow_code: bool = False
    """Whether to use generators that evaluate answers as Python, in the verifier's processes. A
    response can then do there whatever the verifier's user may do: read files, connect to the
    network, give itself any reward."""

    def __post_init__(self) -> None:
        if self.template not in get_args(Template):
            raise ValueError(
                f"template is {self.template!r}; choose {', '.join(get_args(Template))}"
            )
        _check_allowed(self.dataset, self.config, self.allow_code)
        _generator(self.dataset, _as_json(self.config), 0)

    def uid(self, payload: Payload) -> str:
        """Returns "reasoning_gym:<hash of the question>"."""
        question = payload["question"].encode(errors="surrogatepass")
        return f"reasoning_gym:{hashlib.sha256(question).hexdigest()[:16]}"

    def render(self, payload: Payload) -> list[Message]:
        """Returns one user message, and a message before or after it as the template says."""
        question = payload["question"]
        if self.template == "short":
            return [{"role": "user", "content": question}]
        if self.template == "system":
            return [
                {"role": "system", "content": _system_prompt()},
                {"role": "user", "content": question},
            ]
        messages = [{"role": "user", "content": _THINK.format(question=question)}]
        if self.template == "prefilled":
            messages.append({"role": "assistant", "content": THINK_PREFIX})
        return messages

    def warm_up(self) -> None:
        """Generates and scores an entry, for which some generators load data."""
        generator = _generator(self.dataset, _as_json(self.config), 0)
        entry = _entry(self.dataset, _as_json(self.config), 0, 0)
        generator.score_answer(entry["answer"], copy.deepcopy(entry))

    def load(self, payload: Payload) -> None:
        """Generates the entry of a payload again, which takes some generators seconds.

        Raises `PayloadError` if this process generates another entry than that of the payload.
        """
        try:
            self._regenerate(payload)
        except ValueError as error:
            raise PayloadError(f"task {self.name}: {error}") from error

    def verify(self, payload: Payload, response: str) -> Verdict:
        """Rewards an answer with the generator's score, and is `ok` for a score of 1.

        The scorer may take long, so the caller must set a deadline. Raises `PayloadError` as `load`
        does.
        """
        return with_format(self._judge_response(payload, response))

    def _judge_response(self, payload: Payload, response: str) -> Verdict:
        answer = response if self.template == "short" else last_answer(response)
        if answer is None or not (answer := answer.strip()):
            return Verdict(0.0, VerdictStatus.NO_ANSWER, None, "no answer found")
        if len(answer) > MAX_ANSWER:
            detail = f"the answer is longer than {MAX_ANSWER} characters"
            return Verdict(0.0, VerdictStatus.TOO_LARGE, None, detail)
        self.load(payload)
        key = payload["dataset"], _as_json(payload["config"]), payload["seed"]
        # Copied, because a scorer may change what it gets.
        entry = copy.deepcopy(_entry(*key, payload["index"]))
        try:
            score = float(_generator(*key).score_answer(answer, entry))
        except MemoryError:
            raise  # the process may be unusable, and the verifier must replace it
        except Exception as error:  # noqa: BLE001
            # Scorers raise exceptions of many kinds on answers in another format (KeyError,
            # OverflowError, ...), and a response must not be able to raise in our callers.
            return Verdict(0.0, VerdictStatus.PARSE_ERROR, answer, type(error).__name__)
        if score >= 1 - TOLERANCE:
            return Verdict(score, VerdictStatus.OK, answer)
        return Verdict(score, VerdictStatus.WRONG_VALUE, answer, f"the score is {score:g}")

    def parse_row(self, row: Mapping[str, Any]) -> Payload:
        """Returns the problem of a row, whose entry it generates again.

        Raises `ValueError` for a generator that is unknown or not allowed, and for another entry
        than that of the row.
        """
        payload = {column: row[column] for column in self.columns}
        payload["config"] = dict(payload["config"] or {})
        for column in ("seed", "index"):
            if type(payload[column]) is not int or payload[column] < 0:
                raise ValueError(f"{column} is {payload[column]!r:.80}; make it a whole number")
        self._regenerate(payload)
        return payload

    def generate(self, seed: int, n: int) -> list[Payload]:
        """Returns n problems with distinct questions.

        Raises `ValueError` if there are not as many, or the generator fails.
        """
        return self._draw(seed, "train", n, set())

    def generate_split(
        self, seed: int, *, train: int, test: int
    ) -> tuple[list[Payload], list[Payload]]:
        """Returns disjoint (train, test) problems; the test problems do not depend on `train`."""
        seen: set[str] = set()
        held_out = self._draw(seed, "test", test, seen)
        return self._draw(seed, "train", train, seen), held_out

    def _draw(self, seed: int, split: str, n: int, seen: set[str]) -> list[Payload]:
        """Draws n problems whose uids are not in `seen`, and adds their uids to it."""
        problems = self._problems(seed, split)

        def draw() -> tuple[str, Payload]:
            problem = next(problems)
            return self.uid(problem), problem

        options = f"dataset={self.dataset}, config={dict(self.config)}; widen the config"
        return draw_distinct(draw, n, seen, options, MAX_MISSES)

    def _problems(self, seed: int, split: str) -> Iterator[Payload]:
        """Yields problems without end."""
        for part in count():
            # Entries derive from the sum of seed and index, so neighbouring seeds would overlap;
            # NumPy's generators take 32 bits.
            part_seed = derive_seed(seed, self.name, split, part) % 2**31
            for index in range(ENTRIES):
                entry = _entry(self.dataset, _as_json(self.config), part_seed, index)
                yield {
                    "dataset": self.dataset,
                    "config": dict(self.config),
                    "seed": part_seed,
                    "index": index,
                    "question": entry["question"],
                    "answer": entry["answer"],
                }

    def _regenerate(self, payload: Payload) -> None:
        """Generates the entry of a payload again, and checks it.

        Raises `ValueError` for a generator that is unknown or not allowed, and if the entry has
        another question or answer than the payload.
        """
        dataset, config = payload["dataset"], payload["config"]
        _check_allowed(dataset, config, self.allow_code)
        entry = _entry(dataset, _as_json(config), payload["seed"], payload["index"])
        for key in ("question", "answer"):
            if entry[key] != payload[key]:
                raise ValueError(
                    f"entry {payload['index']} of {dataset} with seed {payload['seed']} has "
                    f"another {key} than the prompt, {entry[key]!r:.80} instead of "
                    f"{payload[key]!r:.80}; install the version of reasoning-gym with which the "
                    "prompts were generated, or if it is the same, choose another dataset, because "
                    "this one does not repeat its entries"
                )


def _as_json(config: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(config), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"config is {config!r:.80}; make it a JSON object: {error}") from error


def _list_generators(
    dataset: str, config: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields (name, configuration) of a generator and of those that it mixes.

    Raises `ValueError` for a mixture that lists something else.
    """
    yield dataset, config
    if dataset != COMPOSITE:
        return
    parts = config.get("datasets")
    if not isinstance(parts, list) or not parts:
        raise ValueError(
            f"config.datasets is {parts!r:.80}; list the generators of the mixture, for example "
            "[{name: chain_sum, weight: 1, config: {}}]"
        )
    for part in parts:
        if not isinstance(part, Mapping) or not {"name"} <= set(part) <= {
            "name",
            "weight",
            "config",
        }:
            raise ValueError(
                f"config.datasets lists {part!r:.80}; give a name, and if needed a weight and a "
                "config"
            )
        yield from _list_generators(str(part["name"]), part.get("config") or {})


def _check_allowed(dataset: str, config: Mapping[str, Any], allow_code: bool) -> None:
    """Raises `ValueError` for generators that no run can use, or that need `allow_code`."""
    if not isinstance(dataset, str) or not dataset:
        raise ValueError(
            f"dataset is {dataset!r:.80}; name a generator of reasoning-gym, for example chain_sum "
            f"({COMPOSITE} mixes several)"
        )
    if not isinstance(config, Mapping):
        raise ValueError(f"config is {config!r:.80}; make it a mapping of the generator's options")
    for name, _ in _list_generators(dataset, config):
        if name in REFUSED:
            raise ValueError(f"dataset {name} {REFUSED[name]}; choose another")
        if name in CODE_SCORERS and not allow_code:
            raise ValueError(
                f"dataset {name} evaluates responses as Python code, which can do whatever the "
                "verifier's user may; choose another, or set allow_code to true where the verifier "
                "is isolated from everything of value"
            )


# ---- reasoning-gym ------------------------------------------------------------------------------


def _datasets() -> dict[str, tuple[type[Any], type[Any]]]:
    """Returns the classes (generator, configuration) of all generators by name.

    Raises `ValueError` if the library cannot be imported.
    """
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(
            f"reasoning-gym cannot be imported ({error}); `pip install -e "
            "'.[reasoning-gym]'` in a clone of bapo, for which a machine needs a C compiler"
        ) from error
    datasets: dict[str, tuple[type[Any], type[Any]]] = DATASETS
    return datasets


def _system_prompt() -> str:
    from reasoning_gym.utils import SYSTEM_PROMPTS

    return str(SYSTEM_PROMPTS["default"]).strip()


# A run needs few generators, as its prompts come from one seed for every `ENTRIES` draws.
@lru_cache(maxsize=16)
def _generator(dataset: str, config: str, seed: int) -> Any:
    """Returns a generator with a configuration given as JSON.

    Raises `ValueError` for an unknown generator, and for a configuration that it refuses.
    """
    arguments = _arguments(dataset, json.loads(config))
    generator_class, config_class = _datasets()[dataset]
    try:
        with _seed_global_generator(seed):
            # The constructor validates the configuration.
            return generator_class(config_class(**arguments, seed=seed, size=ENTRIES))
    except Exception as error:
        # Configurations assert, and compare or iterate over values of the wrong type.
        raise ValueError(
            f"dataset {dataset} refuses config {config}: {_one_line(error)}"
        ) from error


# The G responses to a prompt share an entry.
@lru_cache(maxsize=256)
def _entry(dataset: str, config: str, seed: int, index: int) -> dict[str, Any]:
    """Returns an entry, which the caller must not change. Raises `ValueError` without one."""
    generator = _generator(dataset, config, seed)
    try:
        with _seed_global_generator(seed, index):
            entry: dict[str, Any] = generator[index]
    except Exception as error:  # generators raise anything for odd configurations
        raise ValueError(
            f"dataset {dataset} cannot generate entry {index} with seed {seed} and config "
            f"{config}: {_one_line(error)}"
        ) from error
    return entry


def _arguments(dataset: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a generator's configuration class.

    Raises `ValueError` for an unknown generator or an unknown name in its configuration.
    """
    datasets = _datasets()
    for name, options in _list_generators(dataset, config):
        if name not in datasets:
            raise ValueError(
                f"reasoning-gym has no dataset {name!r}{did_you_mean(name, datasets, most=3)}; its "
                f"gallery shows all {len(datasets)}"
            )
        known = {item.name for item in fields(datasets[name][1])} - {"seed", "size"}
        for option in options:
            if option in ("seed", "size"):
                raise ValueError(
                    f"dataset {name} gets its {option} from task.data_seed and the numbers of "
                    f"prompts; remove {option} from its config"
                )
            if option not in known:
                meant = did_you_mean(option, known, most=3)
                raise ValueError(
                    f"dataset {name} has no option {option!r}{meant}; its options are "
                    f"{', '.join(sorted(known)) or 'none'}"
                )
    if dataset != COMPOSITE:
        return dict(config)
    from reasoning_gym.composite import DatasetSpec

    specs = [
        DatasetSpec(
            part["name"],
            part.get("weight", 1.0),
            _arguments(part["name"], part.get("config") or {}),
        )
        for part in config["datasets"]
    ]
    return {**config, "datasets": specs}


@contextmanager
def _seed_global_generator(*seed: int) -> Iterator[None]:
    """Seeds Python's global generator, from which some generators draw, and restores it.

    What is printed is dropped: the programs of `bf` print when they are run.
    """
    state = random.getstate()
    random.seed("/".join(map(str, seed)))
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        random.setstate(state)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
