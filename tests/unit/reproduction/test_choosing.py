"""The page on choosing a method has what the runs decide of each of its statements."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo_core.claims import Judgement
from docs.generate.__main__ import PAGES
from docs.generate.choosing_a_method import (
    Statement,
    describe_decisions,
    judge_statement,
    read_statements,
    render_table,
)
from services.reproduction.declarations import read_items
from services.reproduction.records import RESULTS
from services.reproduction.states import find_state

ROOT = Path(__file__).parents[3]
COMMITTED = ROOT / RESULTS
ITEMS = read_items()
STATEMENTS = [each for table in read_statements().values() for each in table]


def test_the_page_of_the_documentation_is_current() -> None:
    render = PAGES["docs/choosing-a-method.md"]
    assert (ROOT / "docs/choosing-a-method.md").read_text() == render(), "run `make docs`"


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda each: each.text[:50])
def test_a_statement_is_judged_by_the_runs_of_its_experiment(statement: Statement) -> None:
    """A pair that the experiment tests as well has the same judgement in its state."""
    item = ITEMS[statement.experiment]
    pairs = {"larger", "than", "equal", "text", "experiment"}
    for seeds in (item, item.repeated(), item.pooled()):
        judged = judge_statement(statement, seeds, COMMITTED)
        state = find_state(seeds, "small", COMMITTED)
        assert (judged is not None) == state.is_judged
        if judged is None:
            continue
        assert [(each.variant, each.other) for each in judged.judgements] == list(statement.pairs)
        for result in state.results:
            if result.test.model_dump(exclude=pairs) == statement.model_dump(exclude=pairs):
                tested = {(each.variant, each.other): each for each in result.judgements}
                for each in judged.judgements:
                    assert tested.get((each.variant, each.other), each) == each


def test_a_text_that_the_runs_contradict_is_refused() -> None:
    reversed_ladder = Statement(
        text="GRPO is ahead of replays",
        experiment="ladder",
        larger="grpo",
        than=("+ replays",),
        at="generated tokens",
    )
    with pytest.raises(ValueError, match="'GRPO is ahead of replays': the declared seeds decide"):
        render_table([reversed_ladder], ITEMS, COMMITTED)


def test_a_statement_without_results_has_empty_cells(tmp_path: Path) -> None:
    statement = Statement(text="new > old", experiment="table1a", larger="bapo", than=("grpo",))
    assert render_table([statement], ITEMS, tmp_path).splitlines()[-1] == (
        "| new > old ([Table 1a](reproduction.md#table1a)) | steps |  |  |  |"
    )


def test_decisions_are_said_together_where_they_are_alike() -> None:
    ahead = Judgement("new", "old", "holds", 0.0894, 0.0731)
    unsure = Judgement("new", "other", "not decided", -0.0321, 0.0731)
    behind = Judgement("new", "best", "does not hold", -0.2, 0.0731)
    assert describe_decisions([ahead]) == "yes: 0.089 (± 0.073)"
    assert describe_decisions([unsure, unsure]) == "no: −0.032, −0.032 (± 0.073)"
    assert describe_decisions([behind]) == "the opposite: −0.200 (± 0.073)"
    assert describe_decisions([ahead, unsure, behind]) == (
        "0.089 yes, −0.032 no, −0.200 the opposite (± 0.073)"
    )


def test_what_paired_runs_leave_open_is_said() -> None:
    first, second = (Judgement("new", old, "holds", 0.1, 0.05) for old in ("a", "b"))
    unsure = Judgement("new", "b", "not decided", 0.1, 0.12)
    assert describe_decisions([first, second], [first, second]) == "yes: 0.100, 0.100 (± 0.050)"
    assert describe_decisions([first, second], [first, unsure]) == (
        "yes: 0.100, 0.100 (± 0.050; 0.100 open by paired runs)"
    )
    assert describe_decisions([first, second], [unsure, unsure]) == (
        "yes: 0.100, 0.100 (± 0.050; 0.100, 0.100 open by paired runs)"
    )
    assert describe_decisions([unsure], [first]) == "no: 0.100 (± 0.120)"
