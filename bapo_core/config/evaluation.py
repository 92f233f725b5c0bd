"""The section `evaluation`: on which held-out prompts theta_t is evaluated, when, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from bapo_core.config.base import Section

TEST_SET = "test"
"""Name of the evaluation set of a run whose configuration names none."""
SetName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,31}$")]
"""Name of an evaluation set: lower-case letters, digits and hyphens, starting with a letter."""
TopP = Annotated[float, Field(gt=0.0, le=1.0)]


GREEDY_TEMPERATURE = 1e-6
"""The temperature that stands for 0: the softmax of logits divided by it has one token."""


class EvaluationSetConfig(Section):
    """Evaluation sets by name, for example `{aime24: {path: aime24.json, samples: 32}}`: held-out
    prompts, and how responses to them are sampled. Without any, there is one set `test`, of
    `task.test_path` or generated. Names have lower-case letters, digits and hyphens."""

    path: str | None = None
    """Address of the prompts, as `task.test_path`; null generates them, if the task can."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the task that differ from `task.options`, for example `{numbers: [4]}`."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Columns that differ from `task.columns`."""
    prompts: int | None = Field(None, ge=1)
    """Number of prompts to generate, or the most to read; null is `task.test_prompts`."""
    samples: int | None = Field(None, ge=1)
    """Responses sampled for each prompt; null is `evaluation.samples`."""
    temperature: float | None = Field(None, ge=0.0)
    """Sampling temperature; null is `evaluation.temperature`, and 0 is greedy, with one sample."""
    top_p: TopP | None = None
    """Nucleus sampling; null is `evaluation.top_p`."""
    every: int | None = Field(None, ge=1)
    """Steps between two evaluations on this set; null is `evaluation.every`."""


class EvaluationConfig(Section):
    """Evaluations of theta_t on held-out prompts, in one or several sets."""

    every: int = Field(20, ge=1)
    """Steps between two evaluations; the initial and the final weights are always evaluated."""
    samples: int | None = Field(None, ge=1)
    """Responses sampled for each held-out prompt; null is G."""
    temperature: float | None = Field(None, ge=0.0)
    """Sampling temperature of evaluations; null is `rollout.temperature`, and 0 is greedy, with one
    sample."""
    top_p: TopP = 1.0
    """Nucleus sampling of evaluations, which may truncate, because nothing is trained on them."""
    sets: dict[SetName, EvaluationSetConfig] = Field(default_factory=dict)
    """Evaluation sets by name; without any, there is one set `test`."""
    primary: SetName | None = None
    """The set that stands for the run in lists and comparisons, and by which
    `checkpoint.keep_best` selects; null is the first set by name."""


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """An evaluation set of a run, with every value that its configuration left to others."""

    name: str
    path: str | None
    options: Mapping[str, Any]
    """All options of the task for these prompts."""
    columns: Mapping[str, str]
    prompts: int
    samples: int
    temperature: float
    top_p: float
    every: int
