"""The page of a back-test: its first line, its tables and its file for the dashboard."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bapo_core.backtest import BackTest, BackTestResult
from bapo_core.config import config_from
from bapo_core.sampler_backtest import SamplerResult
from services.report.backtest_page import write_backtest
from services.report.backtest_table import (
    CAVEAT,
    COLUMNS,
    OWN_RULES,
    SAMPLER_COLUMNS,
    SAMPLER_NOTE,
    RunBackTest,
    tables_of,
)

EXPERIMENTS = (Path(__file__).parents[3] / "docs/experiments.md").read_text()


def result(**values: float) -> BackTestResult:
    none = BackTest(config_from({"name": "none"})).result()
    return replace(none, **{"steps": 10, "groups": 40, "fresh": 40, **values})  # type: ignore[arg-type]


SAMPLER = SamplerResult(
    steps=10,
    drawn=80,
    recorded=20,
    untried=8,
    recorded_accuracy=0.25,
    estimated_accuracy_of_recorded=0.3,
    accuracy=0.4,
    signal_per_step=1.5,
    no_signal=0.1,
)


def back_test(
    run: str = "mine", *, samplers: bool = True, data: bool = True, **values: float
) -> RunBackTest:
    rules = {OWN_RULES: result(), "<b>no</b> filter": result(**values)}
    drawn = replace(SAMPLER, recorded=80, accuracy=0.25)
    return RunBackTest(
        run=run,
        last_step=10,
        results=rules if data else {},
        samplers={OWN_RULES: drawn, "mopps": SAMPLER} if samplers else {},
        first_difference=None,
        first_other_draw=None,
        changed_at=[],
    )


def text_of(page: str) -> str:
    return re.sub(r"<[^>]*>", "", page[page.index("<body>") :])


def test_the_first_line_says_what_the_figures_cannot_say(tmp_path: Path) -> None:
    page = write_backtest([back_test()], tmp_path).read_text()
    assert text_of(page).startswith(CAVEAT)
    assert json.loads((tmp_path / "backtest.json").read_text())["caveat"] == CAVEAT


def test_the_page_has_all_rules_and_no_markup_of_their_labels(tmp_path: Path) -> None:
    page = write_backtest([back_test()], tmp_path).read_text()
    assert "&lt;b&gt;no&lt;/b&gt; filter" in page
    assert "<b>no</b>" not in page
    assert SAMPLER_NOTE in page
    for title in ("Groups in a batch", "Prompts that a sampler draws in a step"):
        assert f'aria-label="{title}"' in page


@pytest.mark.parametrize(("data", "samplers"), [(True, False), (False, True)])
def test_a_table_without_rules_is_left_out(tmp_path: Path, data: bool, samplers: bool) -> None:
    page = write_backtest([back_test(data=data, samplers=samplers)], tmp_path).read_text()
    assert ("Data rules" in page, "Samplers" in page) == (data, samplers)


def test_values_are_means_over_the_runs() -> None:
    (table,) = tables_of(
        [back_test("one", samplers=False, fill=0.5), back_test("two", samplers=False, fill=0.7)]
    )
    row = dict(zip(table.headings, table.rows["<b>no</b> filter"], strict=True))
    assert (row["full"], row["fresh"]) == ("60%", "4.0")


def test_columns_that_are_0_for_all_rules_are_left_out_if_they_are_optional() -> None:
    (without,) = tables_of([back_test(samplers=False)])
    assert {"missing", "cut off", "effective"}.isdisjoint(without.headings)
    assert "replayed" in without.headings
    (table,) = tables_of(
        [back_test(samplers=False, cut_off=0.25, replay_ess=0.9, replay_ess_measured=0.96)]
    )
    assert {"cut off", "effective"} <= set(table.headings)
    own = dict(zip(table.headings, table.rows[OWN_RULES], strict=True))
    assert own["effective"] == "-"  # It has no replayed groups.


def test_an_effective_share_of_ages_that_were_not_measured_is_not_shown() -> None:
    (table,) = tables_of([back_test(samplers=False, replay_ess=0.9, replay_ess_measured=0.94)])
    assert "effective" not in table.headings
    row = dict(zip(table.headings, table.rows["<b>no</b> filter"], strict=True))
    assert row["measured"] == "94%"


def test_what_the_own_rules_do_not_give_again_is_noted(tmp_path: Path) -> None:
    test = replace(back_test(), first_difference=4, first_other_draw=5)
    page = write_backtest([test], tmp_path).read_text()
    assert "the batch of step 4 by the run&#x27;s own rules is not the recorded one" in page
    assert "the prompts of step 5 by the run&#x27;s own sampler are not the recorded ones" in page
    assert all("so another version of the rules" in warning for warning in test.warnings())
    for warning in replace(test, changed_at=[3, 7]).warnings():
        assert "the configuration changed at step 3, 7, and the last one is applied" in warning


def test_the_file_has_the_cells_of_the_tables(tmp_path: Path) -> None:
    write_backtest([back_test()], tmp_path)
    data = json.loads((tmp_path / "backtest.json").read_text())
    titles = [table["title"] for table in data["tables"]]
    assert titles == ["Data rules", "Samplers"]
    for table in data["tables"]:
        for row in table["rows"]:
            assert len(row["cells"]) == len(table["headings"]) == len(table["meanings"])
    assert data["runs"][0]["rules"][OWN_RULES]["fresh"] == 40
    assert data["runs"][0]["samplers"]["mopps"]["accuracy"] == 0.4


@pytest.mark.parametrize("heading", COLUMNS)
def test_the_documentation_explains_every_column(heading: str) -> None:
    assert f"| {heading} | {COLUMNS[heading].meaning} |" in EXPERIMENTS


def test_headings_of_samplers_are_named_in_their_documentation() -> None:
    paragraph = EXPERIMENTS[EXPERIMENTS.index("**Samplers.**") :]
    for heading in ("untried", "recorded", "estimated"):
        assert heading in SAMPLER_COLUMNS
        assert f"`{heading}`" in paragraph
