"""The generated page of methods is current and lists every method with its source."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from bapo_core.advantages import ESTIMATORS
from bapo_core.config import PRESETS
from bapo_core.config.samplers import SAMPLER_KINDS
from bapo_core.losses import AGGREGATIONS
from bapo_core.objectives import OBJECTIVES
from bapo_core.sampling import Posterior, rank_by_difficulty, rank_by_thompson
from docs.generate.methods import render


def test_the_page_is_up_to_date() -> None:
    assert Path("docs/methods.md").read_text() == render(), "run `make docs`"


def test_every_method_is_on_the_page() -> None:
    page = render()
    for name in (*OBJECTIVES, *ESTIMATORS, "gae", *AGGREGATIONS, *SAMPLER_KINDS.sections):
        assert f"### {name}\n" in page
    for name in PRESETS:
        assert f"| `{name}` |" in page


def test_every_method_states_its_paper_and_its_equation() -> None:
    losses = {name: objective.loss for name, objective in OBJECTIVES.items()}
    samplers = {"mopps": rank_by_thompson, "posterior": Posterior, "dots": rank_by_difficulty}
    for name, function in {**losses, **ESTIMATORS, **AGGREGATIONS, **samplers}.items():
        docstring = inspect.getdoc(function) or ""
        assert re.search(r"arXiv \d{4}\.\d{5}", docstring), name
        assert re.search(r"^    \S", docstring, re.MULTILINE), name
