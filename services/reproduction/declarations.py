"""Reads the declarations of experiments: one YAML file each in `items`, and base configurations.

A declaration says what a table, a figure or a question claims, which variants are trained at which
size, and which differences decide the claim. It holds no code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from bapo_core.config import Section, read_values
from bapo_core.errors import BapoError
from bapo_core.spelling import did_you_mean

ITEMS = Path(__file__).parent / "items"
SETUPS = Path(__file__).parent / "setups"
SUFFIX = ".yaml"
ORDER = ("ladder", "r", "table", "fig", "appendix", "ac-")
"""Beginnings of names, in the order in which the list shows the items and `all` runs them: the
ladder comes first, because it says which of the differences belong to the loss."""
Size = Literal["small", "paper"]
SIZES: tuple[Size, ...] = ("small", "paper")
Measure = Literal["accuracy", "best", "unsolved", "unlocked", "rollouts", "tokens", "metric"]
Cost = Literal["training steps", "training responses", "generated tokens", "seconds of the trainer"]
BASE = "base model"
"""Stands, in a test, for the first variant's models before their first step."""


class PaperNumbers(Section):
    """Results that the paper prints."""

    columns: tuple[str, ...]
    rows: dict[str, tuple[float | None, ...]]
    """Results by the row's label; null where the paper has none."""
    note: str = ""

    @model_validator(mode="after")
    def _has_a_number_for_each_column(self) -> PaperNumbers:
        for label, row in self.rows.items():
            if len(row) != len(self.columns):
                raise ValueError(
                    f"row {label!r} has {len(row)} numbers for {len(self.columns)} columns; "
                    "write null where there is none"
                )
        return self


class Test(Section):
    """A part of the claim: differences between variants that must be decided."""

    __test__ = False
    """pytest collects classes of this name otherwise."""

    larger: str | None = None
    """Variant whose value is larger than those of all of `than`."""
    than: tuple[str, ...] = ()
    by: float = Field(0.0, ge=0.0)
    """Difference that is exceeded."""
    equal: tuple[str, str] | None = None
    """Two variants whose values differ by at most `within`."""
    within: float | None = Field(None, gt=0.0)
    measure: Measure = "accuracy"
    """`accuracy` is the mean of the last four evaluations, `best` the highest evaluation (both at
    equal `at`), `unsolved` the share of held-out prompts with no correct response in the last
    evaluation, `unlocked` the share of those without one at first that have one at last, and
    `rollouts` and `tokens` what a run has generated."""
    at: Cost = "training steps"
    """Cost at which `accuracy` and `best` are compared: what the cheapest run has spent."""
    metric: str | None = None
    """Name of a value of each step, for `measure: metric`: its mean over the last quarter of the
    steps."""

    @model_validator(mode="after")
    def _states_one_thing(self) -> Test:
        if (self.larger is None) == (self.equal is None):
            raise ValueError("give either `larger` with `than`, or `equal` with `within`")
        if self.larger is not None and not self.than:
            raise ValueError("`larger` needs `than`, the variants that are exceeded")
        if self.equal is not None and self.within is None:
            raise ValueError("`equal` needs `within`, the difference that does not matter")
        if (self.measure == "metric") != (self.metric is not None):
            raise ValueError("`measure: metric` and `metric: NAME` belong together")
        return self

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The pairs of variants whose differences the test is about."""
        if self.equal is not None:
            return (self.equal,)
        assert self.larger is not None
        return tuple((self.larger, other) for other in self.than)

    @property
    def variants(self) -> tuple[str, ...]:
        """Labels of the variants that the test names."""
        return tuple(dict.fromkeys(label for pair in self.pairs for label in pair))


class Panel(Section):
    """A panel of the figure, in the paper's layout."""

    title: str
    kind: Literal["evaluations", "steps", "bins", "sources"] = "evaluations"
    """Held-out accuracy over a cost; a value of each step; bars of prompts by correct responses
    before and after training; or shares of the sources of a batch over the steps."""
    variants: tuple[str, ...] = ()
    """Variants that are drawn; all of them unless given."""
    over: Cost = "training steps"
    metric: str | None = None
    """Name of a value of each step, for `kind: steps`."""


class Needs(Section):
    """What the experiment takes at the paper's size."""

    models: str
    data: str
    gpus: str
    hours: str


class SizePlan(Section):
    """The runs of an experiment at one size."""

    setup: str
    """Base configuration of all variants: a file in `setups`."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Keys of the configuration that all variants share, beside the setup."""
    variants: dict[str, dict[str, Any]] | None = None
    """Variants at this size, if they differ from those of the declaration."""
    seeds: tuple[int, ...] = Field((1, 2, 3, 4), min_length=1)
    own_prompts: bool = False
    """Whether each seed has generated training and held-out prompts of its own, by
    `task.data_seed`. Otherwise all seeds have the same, so that a difference is decided for these
    prompts."""
    minutes: float = Field(0.0, ge=0.0)
    """Minutes of a run on two idle cores."""
    pipeline: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the pipeline, such as `gpus_per_worker`."""

    @property
    def repeat_seeds(self) -> tuple[int, ...]:
        """Seeds of a repetition: equally many, from the one after the largest declared seed on.

        The seeds 1 to 4 are followed by 5 to 8.
        """
        first = max(self.seeds) + 1
        return tuple(range(first, first + len(self.seeds)))

    @property
    def pooled_seeds(self) -> tuple[int, ...]:
        """The declared seeds and the seeds of a repetition."""
        return self.seeds + self.repeat_seeds


class Declaration(Section):
    """An experiment: a table or a figure of a paper, or a question."""

    title: str
    """What it is, such as "Table 1b of 2602.20722: planning"."""
    claim: str
    """The claim in one sentence."""
    source: str
    """Where content and numbers of the paper were read, or whose question it is."""
    numbers: PaperNumbers | None = None
    """Results of the paper; none if they are not available here."""
    needs: Needs | None = None
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Keys that each variant changes, by its label."""
    small: SizePlan | str
    """Plan at small size, or why there is none."""
    paper: SizePlan | str
    """Plan at the paper's size, or why there is none."""
    tests: tuple[Test, ...] = ()
    """Parts of the claim; it holds if all of them do."""
    panels: tuple[Panel, ...] = ()
    note: str = ""
    """Remarks on the experiment, such as differences between the small and the paper's size."""

    @model_validator(mode="after")
    def _names_its_variants(self) -> Declaration:
        for size in SIZES:
            plan = self.plan_at(size)
            if plan is None:
                continue
            known = {*self.variants_at(size), BASE}
            if not self.variants_at(size):
                raise ValueError(f"{size}: no variants; give `variants`")
            if not self.tests:
                raise ValueError("no tests; an experiment that is run needs one that judges it")
            tested = {label for test in self.tests for label in test.variants}
            named = tested.union(*(panel.variants for panel in self.panels))
            for label in sorted(named - known):
                raise ValueError(
                    f"{size}: {label!r} is no variant; there are {', '.join(sorted(known))}"
                )
        return self

    def plan_at(self, size: str) -> SizePlan | None:
        """Returns the plan at a size; None if there is none."""
        plan = self.small if size == "small" else self.paper
        return plan if isinstance(plan, SizePlan) else None

    def variants_at(self, size: str) -> Mapping[str, Mapping[str, Any]]:
        plan = self.plan_at(size)
        return self.variants if plan is None or plan.variants is None else plan.variants

    def with_seeds(self, seeds: Sequence[int]) -> Declaration:
        """Returns the experiment with other seeds at each of its sizes."""
        return self._with_seeds_of(lambda _: tuple(seeds))

    def repeated(self) -> Declaration:
        """Returns the experiment with as many other seeds: the same, independently."""
        return self._with_seeds_of(lambda plan: plan.repeat_seeds)

    def pooled(self) -> Declaration:
        """Returns the experiment with its declared and its other seeds together."""
        return self._with_seeds_of(lambda plan: plan.pooled_seeds)

    def _with_seeds_of(self, choose: Callable[[SizePlan], tuple[int, ...]]) -> Declaration:
        plans = {size: plan for size in SIZES if (plan := self.plan_at(size)) is not None}
        return self.model_copy(
            update={
                size: plan.model_copy(update={"seeds": choose(plan)})
                for size, plan in plans.items()
            }
        )


def read_declaration(path: Path) -> Declaration:
    """Reads a declaration. Raises `BapoError`, which names the file, the key and the value."""
    values = read_values(path)
    try:
        return Declaration.model_validate(values)
    except ValidationError as error:
        details = "; ".join(
            f"{'.'.join(map(str, detail['loc'])) or 'declaration'}: {detail['msg']}"
            for detail in error.errors()
        )
        raise BapoError(f"{path}: {details}") from error


def read_items() -> dict[str, Declaration]:
    """Returns all declarations by name, in the order of the list."""
    names = sorted((path.stem for path in ITEMS.glob(f"*{SUFFIX}")), key=_place)
    return {name: read_declaration(ITEMS / f"{name}{SUFFIX}") for name in names}


def last_question() -> str:
    """Returns the name of the last question of this project, such as `r14`."""
    return [name for name in read_items() if re.fullmatch(r"r\d+", name)][-1]


def find_items(names: Sequence[str]) -> dict[str, Declaration]:
    """Returns the declarations of these names, which may be paths of YAML files, too.

    Without names, and for `all`, these are all declarations. Raises `BapoError`.
    """
    items = read_items()
    if not names or "all" in names:
        return items
    return dict(_find(name, items) for name in names)


@cache
def read_setup(name: str) -> Mapping[str, Any]:
    """Returns the values of a base configuration. Raises `BapoError`."""
    path = SETUPS / f"{name}{SUFFIX}"
    if not path.is_file():
        known = sorted(each.stem for each in SETUPS.glob(f"*{SUFFIX}"))
        raise BapoError(f"setup {name!r} is not one of {', '.join(known)}")
    return read_values(path)


def _find(name: str, items: Mapping[str, Declaration]) -> tuple[str, Declaration]:
    if name in items:
        return name, items[name]
    if name.endswith((".yaml", ".yml")):
        return Path(name).stem, read_declaration(Path(name))
    raise BapoError(
        f"{name!r} is no experiment{did_you_mean(name, items)}; `bapo reproduce --list` shows all "
        "of them, and a path that ends with .yaml is a declaration of your own"
    )


def _place(name: str) -> tuple[int, tuple[str | int, ...]]:
    """Sorts fig10 after fig9."""
    first = next((i for i, begin in enumerate(ORDER) if name.startswith(begin)), len(ORDER))
    return first, tuple(_words(name))


def _words(name: str) -> Iterator[str | int]:
    text = number = ""
    for character in name:
        if character.isdigit():
            number += character
            continue
        if number:
            yield text
            yield int(number)
            text = number = ""
        text += character
    yield text
    yield int(number or 0)
