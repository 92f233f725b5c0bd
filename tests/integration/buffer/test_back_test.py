"""Back-tests of recorded runs compose what the service composed, and what it would have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result

from bapo_core.backtest import BackTest
from bapo_core.config import ConfigError
from bapo_core.errors import BapoError
from bapo_core.sampler_backtest import SamplerTest
from services.buffer.api.client import BufferClient
from services.buffer.api.wire import ManifestMember
from services.cli.main import bapo
from services.cli.recorded_groups import back_test, is_recorded_draw, recorded_steps
from services.cli.variants import Variant, read_variants
from services.report.backtest_table import CAVEAT, OWN_RULES, SAMPLER_NOTE
from services.stack.stack import Endpoints
from tests.integration.support.driver import WINDOW, Driver, small_config

STEPS = 8
SHIPPED = str(Path(__file__).parents[3] / "examples/variants/rules.yaml")
RULES: dict[str, dict[str, Any]] = {
    "paper": {},
    "falling window, moving average": {
        "replay": {"window": {**WINDOW, "direction": "easy_to_hard", "r_tot": "ema"}}
    },
    "mixed groups of any age": {"replay": {"select": "mixed", "buffer": {"max_age": None}}},
    "no filter, any gain": {"fresh": {"filter": "none"}, "reevaluate": {"rule": "any_gain"}},
    "gaussian filter, groups of one prompt": {
        "fresh": {"filter": "gaussian"},
        "batch": {"dedup": "rollout"},
    },
    "re-evaluated groups are stored": {"replay": {"window": WINDOW, "store_reevaluated": True}},
    "small buffers": {"hard_buffer": {"capacity": 3}, "replay": {"buffer": {"capacity": 4}}},
}
Member = tuple[str, str, int]
"""Source, prompt, and step of the rollout."""


def recorded_run(stack: Endpoints, name: str, rules: dict[str, Any]) -> Driver:
    driver = Driver(stack, small_config(name, **rules))
    for step in range(1, STEPS + 1):
        driver.run_step(step)
    return driver


def members_of_batches(driver: Driver) -> list[ManifestMember]:
    steps = range(1, STEPS + 1)
    return [member for step in steps for member in driver.client.recorded_batch(step).members]


def recorded_members(driver: Driver) -> list[list[Member]]:
    batches = [driver.client.recorded_batch(step).members for step in range(1, STEPS + 1)]
    return [
        [(member.source, member.prompt_uid, member.step) for member in members]
        for members in batches
    ]


def back_tested_members(driver: Driver, test: BackTest) -> list[list[Member]]:
    """Returns the batches of a back-test of the run that was driven."""
    batches = [
        test.add(step).members for step in recorded_steps(driver.client, driver.config, STEPS)
    ]
    return [
        [(member.source.value, member.group.prompt_uid, member.group.step) for member in members]
        for members in batches
    ]


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_the_rules_of_a_run_compose_its_recorded_batches(
    stack: Endpoints, rules: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    name = f"back-test-own-{list(RULES.values()).index(rules)}"
    driver = recorded_run(stack, name, rules)
    assert back_tested_members(driver, BackTest(driver.config)) == recorded_members(driver)
    found = back_test(driver.client, [], first=1, last=None, where="rules")
    assert found.first_difference is None
    result = found.results[OWN_RULES]
    batches = list(driver.client.batches())
    for source in ("fresh", "reevaluated", "replayed"):
        assert getattr(result, source) == sum(batch.counts[source] for batch in batches)
    assert result.rollouts == sum(step.rollouts for step in driver.client.steps())
    assert result.tokens == sum(member.tokens for member in members_of_batches(driver))
    assert result.missing == 0


@pytest.mark.parametrize(
    "other",
    [rules for rules in RULES.values() if "hard_buffer" not in rules],
    ids=[name for name, rules in RULES.items() if "hard_buffer" not in rules],
)
def test_other_rules_compose_the_batches_of_a_run_that_has_them(
    stack: Endpoints, other: dict[str, Any]
) -> None:
    """The groups of both runs are the same, because no rule here asks for other rollouts."""
    number = list(RULES.values()).index(other)
    without = {**other, "reevaluate": {"enabled": False}}
    one = recorded_run(stack, f"back-test-from-{number}", {"reevaluate": {"enabled": False}})
    two = recorded_run(stack, f"back-test-to-{number}", without)
    assert back_tested_members(one, BackTest(two.config)) == recorded_members(two)


def test_re_evaluations_that_were_not_made_are_missing_and_estimated(stack: Endpoints) -> None:
    driver = recorded_run(stack, "back-test-missing", {"reevaluate": {"enabled": False}})
    rule = Variant("re-evaluated", {"reevaluate": {"enabled": True, "c1": 0.25}})
    found = back_test(driver.client, [rule], first=3, last=6, where="rules")
    own, other = found.results[OWN_RULES], found.results["re-evaluated"]
    assert own.steps == other.steps == 4
    assert (own.missing, own.missing_promoted) == (0, 0.0)
    assert other.reevaluated == 0
    assert 0 < other.missing_promoted < other.missing
    assert other.rollouts == own.rollouts + 4 * other.missing


@pytest.mark.parametrize(
    "sampler",
    [
        {"kind": "uniform"},
        {"kind": "mopps", "candidates": 2, "decay": 0.5},
        {"kind": "mopps", "candidates": 2, "posterior_as_of": "step"},
        {"kind": "dots", "candidates": 2, "half_life": 3},
        {"kind": "exgrpo", "revisit_above": 0.1},
    ],
    ids=lambda sampler: "-".join(map(str, sampler.values())),
)
def test_the_sampler_of_a_run_draws_its_recorded_prompts(
    stack: Endpoints, sampler: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    name = f"back-test-{request.node.callspec.id}".replace(".", "")
    driver = recorded_run(stack, name, {"sampler": sampler, "reevaluate": {"enabled": False}})
    other = {"kind": "mopps" if sampler["kind"] != "mopps" else "dots", "candidates": 3}
    rules = Variant("other", {"sampler": other})
    found = back_test(driver.client, [rules], first=1, last=None, where="rules")
    assert found.first_other_draw is None
    assert found.results == {}
    own, tested = found.samplers[OWN_RULES], found.samplers["other"]
    assert (own.recorded, own.drawn) == (STEPS * 8, STEPS * 8)
    assert 0 < tested.recorded < tested.drawn == STEPS * 8
    steps = driver.client.steps()
    mean = sum(sum(k * n for k, n in enumerate(step.bins)) for step in steps) / (STEPS * 8 * 4)
    assert own.accuracy == own.recorded_accuracy == pytest.approx(mean)


def test_another_sampler_draws_what_a_run_with_it_draws_before_the_first_results(
    stack: Endpoints,
) -> None:
    sampler, sync = {"kind": "mopps", "candidates": 2}, {"every": 4, "reevaluate_every": 4}
    one = recorded_run(stack, "back-test-other-sampler-from", {"sync": sync})
    two = recorded_run(stack, "back-test-other-sampler-to", {"sync": sync, "sampler": sampler})
    config = one.config.model_copy(update={"sampler": two.config.sampler})
    test = SamplerTest(config, one.client.dataset(one.client.run_state().train_dataset).prompts)
    steps = zip(
        recorded_steps(one.client, one.config, STEPS),
        recorded_steps(two.client, two.config, STEPS),
        strict=True,
    )
    drawn = [is_recorded_draw(test.add(uniform), mopps) for uniform, mopps in steps]
    assert drawn[:3] == [True, True, True]  # The sync of step 4 brings the first results.
    assert not all(drawn)


def test_rules_that_need_other_rollouts_are_refused(stack: Endpoints) -> None:
    driver = recorded_run(stack, "back-test-refused", {})

    def test(values: dict[str, Any]) -> None:
        back_test(driver.client, [Variant("mine", values)], first=1, last=None, where="rules.yaml")

    with pytest.raises(ConfigError, match=r"rules.yaml: mine: sync.every=1: .* no rollouts"):
        test({"sync": {"every": 1}})
    with pytest.raises(ConfigError, match=r"seed=9"):
        test({"seed": 9})
    with pytest.raises(ConfigError, match=r"reevaluate.c2"):
        test({"reevaluate": {"c2": 0.5}})
    with pytest.raises(ConfigError, match=r"evaluation.every=2: no batch depends on it"):
        test({"evaluation": {"every": 2}})
    with pytest.raises(ConfigError, match=r"replay.select=off .*give the sampler a label of its"):
        test({"sampler": {"kind": "mopps", "candidates": 2}, "replay": {"select": "off"}})
    with pytest.raises(ConfigError, match=r"mine: task.train_prompts is 24 but one step may draw"):
        test({"sampler": {"kind": "mopps"}})
    with pytest.raises(BapoError, match=r"steps 1:9 .* not all committed; it has committed 8"):
        back_test(driver.client, [], first=1, last=9, where="rules")


def invoke(stack: Endpoints, *arguments: str) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BAPO_BUFFER_URL", stack.buffer_url)
        patch.setenv("BAPO_TOKEN", stack.token)
        return CliRunner().invoke(bapo, ["backtest", *arguments])


def test_the_command_prints_every_rule_of_the_shipped_file(stack: Endpoints) -> None:
    driver = recorded_run(stack, "back-test-command", {})
    labels = [OWN_RULES, *(variant.label for variant in read_variants(SHIPPED))]
    result = invoke(stack, driver.config.name, "--rules", SHIPPED)
    assert result.exit_code == 0, result.output
    caveat, heading, *rows = result.output.splitlines()
    assert "what a rule would have trained on" in caveat
    assert heading.split()[:2] == ["rules", "fresh"]
    assert len(rows) == len(labels) > 15
    for row, label in zip(rows, labels, strict=True):
        assert row.startswith(f"{label} ")
    result = invoke(stack, driver.config.name, "--rules", SHIPPED, "--json", "--steps", "3:5")
    (values,) = json.loads(result.stdout)
    assert list(values["rules"]) == labels
    assert values["reproduces_recorded_batches"] is True
    assert {rule["steps"] for rule in values["rules"].values()} == {3}


def test_the_page_of_data_rules_and_samplers_is_written_beside_the_reports(
    stack: Endpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "back-test-page"
    recorded_run(stack, name, {})
    rules = ("--rule", "none: replay.select=off")
    sampler = ("--rule", "mopps: sampler.kind=mopps sampler.candidates=2")
    result = invoke(stack, name, *rules, *sampler, "--page")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == CAVEAT
    assert [line.split()[0] for line in lines if line.startswith(("none", "mopps"))] == [
        "none",
        "mopps",
    ]
    assert SAMPLER_NOTE in lines
    path = tmp_path / "runs" / f"{name}-backtest" / "backtest.html"
    assert path.relative_to(tmp_path) == Path(lines[-1])
    assert CAVEAT in path.read_text()
    data = json.loads(path.with_suffix(".json").read_text())
    assert [table["title"] for table in data["tables"]] == ["Data rules", "Samplers"]


def test_a_rule_that_is_the_sampler_of_one_of_several_runs_is_refused(stack: Endpoints) -> None:
    sampler = {"kind": "mopps", "candidates": 2}
    recorded_run(stack, "back-test-without-mopps", {})
    recorded_run(stack, "back-test-with-mopps", {"sampler": sampler})
    result = invoke(
        stack,
        *("back-test-without-mopps", "back-test-with-mopps"),
        *("--rule", "mopps: sampler.kind=mopps sampler.candidates=2"),
    )
    assert result.exit_code != 0
    assert (
        "mopps: the rule changes the sampler of run 'back-test-without-mopps', and not of run "
        "'back-test-with-mopps'"
    ) in str(result.exception)


def test_several_runs_are_averaged(stack: Endpoints) -> None:
    names = [f"back-test-seed-{seed}" for seed in (1, 2)]
    for seed, name in enumerate(names):
        recorded_run(stack, name, {"seed": seed})
    rule = ("--rule", "none: replay.select=off")
    rows = [
        invoke(stack, *runs, *rule).output.splitlines()[2].split()
        for runs in ([names[0]], [names[1]], names)
    ]
    fresh = [float(row[2]) for row in rows]
    assert fresh[0] != fresh[1]
    assert fresh[2] == pytest.approx((fresh[0] + fresh[1]) / 2, abs=0.051)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --rules FILE"),
        (("--rule", "a: replay.select=off", "--steps", "5"), "write FIRST:LAST"),
        (("--rule", "a: replay.select=off", "--steps", "5:3"), "no step is in this range"),
        (("--rule", "a: replay.select=off", "--steps", "0:3"), "steps count from 1"),
        (("--rule", "a: replay.select=off", "--steps", "3:99"), "it has committed 8"),
        (("--rule", "a: replay.select=off", "--rule", "a: fresh.filter=none"), "given twice"),
        (("--rule", "a: optimizer.learning_rate=1"), "optimizer.learning_rate=1.0"),
    ],
)
def test_wrong_arguments_are_explained(
    stack: Endpoints, arguments: tuple[str, ...], message: str
) -> None:
    name = "back-test-arguments"
    if name not in {run.name for run in BufferClient(stack.buffer_url, stack.token).runs()}:
        recorded_run(stack, name, {})
    result = invoke(stack, name, *arguments)
    assert result.exit_code != 0
    assert message in f"{result.output}{result.exception}"


def test_a_batch_that_other_rules_composed_is_found(stack: Endpoints) -> None:
    """An upgrade that changes a rule makes the recorded batch differ from the composed one."""
    driver = recorded_run(stack, "back-test-other-version", {})
    url = stack.database_url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(url) as connection:
        connection.execute(
            "update step_record set c2 = c2 + 0.01 where step = 4 and run_id = "
            "(select id from run where name = 'back-test-other-version')"
        )
    result = invoke(stack, driver.config.name, "--rule", "none: replay.select=off")
    assert result.exit_code == 0
    assert "the batch of step 4 by the run's own rules is not the recorded one" in result.stderr


def test_groups_of_a_version_that_did_not_count_cut_off_responses_are_explained(
    stack: Endpoints,
) -> None:
    driver = recorded_run(stack, "back-test-not-counted", {})
    rules = [Variant("mask", {"loss": {"mask_truncated": True}})]
    found = back_test(driver.client, rules, first=1, last=None, where="rules")
    assert found.results["mask"].without_loss == found.results[OWN_RULES].cut_off == 0.0
    url = stack.database_url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(url) as connection:
        connection.execute(
            "update rollout_group set cut_off = null where step = 2 and run_id = "
            "(select id from run where name = 'back-test-not-counted')"
        )
    with pytest.raises(ConfigError, match=r"rules: mask: loss.mask_truncated=True: .* not count"):
        back_test(driver.client, rules, first=1, last=None, where="rules")
    own = back_test(driver.client, [], first=1, last=None, where="rules").results[OWN_RULES]
    assert own.cut_off is None


def test_a_run_without_a_committed_step_is_explained(stack: Endpoints) -> None:
    driver = Driver(stack, small_config("back-test-no-step"))
    with pytest.raises(BapoError, match=r"'back-test-no-step' has committed no step yet"):
        back_test(driver.client, [], first=1, last=None, where="rules")


def test_runs_whose_batches_have_single_responses_are_refused(stack: Endpoints) -> None:
    driver = Driver(stack, small_config("back-test-responses", algorithm="repo"))
    with pytest.raises(ConfigError, match=r"response_replay.groups is all: .* whole groups alone"):
        BackTest(driver.config)
