"""The dashboard in a real browser, on the real service, with a run of synthetic rewards."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bapo_core.config import config_from
from bapo_core.seeding import derive_rng
from bapo_core.tasks.countdown import CountdownTask
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.buffer.api.trajectories import TrajectoryGroup, TrajectoryResponse, encode_groups
from services.cli.recorded_groups import back_test
from services.cli.variants import Variant
from services.common import layout
from services.common.objectstore import BytesContent, ObjectStore
from services.datasets import load_datasets, store_dataset
from services.report.backtest_page import write_backtest
from services.report.backtest_table import CAVEAT, tables_of
from services.report.explanations import explain_equal_rewards
from services.stack.stack import Endpoints
from tests.integration.buffer.test_evaluation_sets import SETS, evaluate, sets_config
from tests.integration.buffer.test_real_rewards import (
    EQUAL,
    SPREAD,
    create_with_reward_function,
    reward_function_config,
    with_rewards,
)
from tests.integration.support.driver import Driver, small_config
from tests.unit.buffer.test_step_view import step_view

"""The names of the program, those of the Makefile."""
STEPS = 14
END_OF_SEQUENCE = 1
TASK = CountdownTask(template="short")

HOSTILE = (
    '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
    '<a href="javascript:window.hacked=1">x</a> שלום عالم 🧮\u202e 👩‍👩‍👧 ' + "W" * 3000
)
"""Text that a model might write: markup, both text directions, emoji, a word of 3,000 letters."""


# ---- a run to show -----------------------------------------------------------------------------


class ImprovingRun(Driver):
    """A run whose policy improves: easy prompts are solved early, hard ones late."""

    hostile: str = ""
    """Text of every response, instead of an arithmetic expression; rewards are then +1 and -1."""

    def groups(
        self, step: int, kind: wire.Kind = "fresh", generation_round: int = 0
    ) -> list[TrajectoryGroup]:
        prompts = self.client.step_prompts(step, kind, generation_round)
        return [
            self._group(prompt, prompts.policy_version, step, kind) for prompt in prompts.prompts
        ]

    def _group(
        self, prompt: wire.PromptItem, version: int, step: int, kind: wire.Kind
    ) -> TrajectoryGroup:
        rng = derive_rng(self.config.seed, "rewards", kind, step, prompt.uid)
        hardness = derive_rng(0, "hardness", prompt.uid).random()
        skill = 0.1 + 0.8 * (1 - math.exp(-3 * version / self.config.steps))
        ability = 1 / (1 + math.exp(10 * (hardness - skill)))
        responses = [self._response(prompt, rng, rng.random() < ability) for _ in range(self.size)]
        responses[0] = replace(responses[0], interruptions={1: version + 1})
        return TrajectoryGroup(prompt.uid, [2, 3, 4], version, responses)

    @property
    def size(self) -> int:
        return self.config.rollout.group_size

    def _response(
        self, prompt: wire.PromptItem, rng: random.Random, right: bool
    ) -> TrajectoryResponse:
        text = self.hostile or _answer(prompt.payload, rng, right)
        ids = [ord(character) % 30_000 + 2 for character in text] + [END_OF_SEQUENCE]
        logprobs = [-rng.expovariate(1.5) for _ in ids]
        parts = (
            {"answer": float(right), "format": 0.5} if self.hostile else {"answer": float(right)}
        )
        reward = 2.0 * right - 1.0 if self.hostile else float(right)
        return TrajectoryResponse(ids, logprobs, reward, "stop", text, right, parts)

    def evaluate(self, version: int) -> None:
        self.client.post_groups(
            version, "evaluation", encode_groups(self.groups(version, "evaluation"))
        )

    def run_step(self, step: int) -> wire.BatchManifest:
        if self.config.evaluates_at(step):
            self.evaluate(step)
        self.roll_out(step)
        manifest = self.client.batch(step)
        self.client.commit(step, self._metrics(step, manifest))
        report = wire.ReplicaReport(url="http://127.0.0.1:1", state="serving", loaded_version=step)
        self.client.report_replica("engine-0", report)
        return manifest

    def _metrics(self, step: int, manifest: wire.BatchManifest) -> dict[str, float]:
        rng = derive_rng(self.config.seed, "metrics", step)
        stale = [step - member.policy_version for member in manifest.members] or [0]
        return {
            "loss": rng.gauss(0.02, 0.01),
            "entropy": 0.35 + 0.9 * math.exp(-2 * step / self.config.steps) + rng.gauss(0, 0.03),
            "gradient_norm": 0.4 + rng.random() / 4,
            "kl": 0.001 + rng.random() / 500,
            "staleness_mean": sum(stale) / len(stale),
            "staleness_max": float(max(stale)),
            "seconds/wait": 0.7 + rng.random() / 3,
            "seconds/proximal": 0.25 + rng.random() / 10,
            "seconds/update": 0.9 + rng.random() / 4,
            "seconds/read": 0.04,
            "seconds/commit": 0.05,
            **({"seconds/publish": 0.3} if step % 2 == 0 else {}),
        }


def _answer(payload: dict[str, Any], rng: random.Random, right: bool) -> str:
    """Returns an expression that the verifier scores as right or wrong."""
    if right:
        return _solution(tuple(payload["nums"]), payload["target"])
    while True:
        text = _expression(payload["nums"], rng)
        if TASK.verify(payload, text).reward == 0:
            return text


@cache
def _solution(numbers: tuple[int, ...], target: int) -> str:
    expression = _reach([(Fraction(number), str(number)) for number in numbers], target)
    assert expression is not None, "generated problems have a solution"
    return expression


def _reach(terms: list[tuple[Fraction, str]], target: int) -> str | None:
    """Combines terms (value, expression) in every way; returns an expression of value `target`."""
    if len(terms) == 1:
        return terms[0][1] if terms[0][0] == target else None
    for i, j in itertools.permutations(range(len(terms)), 2):
        (a, left), (b, right) = terms[i], terms[j]
        others = [term for k, term in enumerate(terms) if k not in (i, j)]
        joined = {"+": a + b, "-": a - b, "*": a * b, **({"/": a / b} if b else {})}
        for operator, value in joined.items():
            text = f"{left}{operator}{right}"
            expression = _reach([*others, (value, f"({text})" if others else text)], target)
            if expression is not None:
                return expression
    return None


def _expression(numbers: list[int], rng: random.Random) -> str:
    shuffled = rng.sample(numbers, len(numbers))
    text = str(shuffled[0])
    for number in shuffled[1:]:
        text = f"{text}{rng.choice('+-*/')}{number}"
        if rng.random() < 0.3:
            text = f"({text})"
    return text


@pytest.fixture(scope="module")
def play(stack: Endpoints) -> ImprovingRun:
    """Creates a run with 14 of its 40 steps committed."""
    run = ImprovingRun(stack, small_config("dashboard", steps=40, seed=1))
    for step in range(1, STEPS + 1):
        run.run_step(step)
    return run


@pytest.fixture(scope="module")
def hostile(stack: Endpoints) -> ImprovingRun:
    """Creates a stopped run of 2 steps whose responses contain markup."""
    run = ImprovingRun(stack, small_config("dashboard-hostile", seed=2))
    run.hostile = HOSTILE
    for step in (1, 2):
        run.run_step(step)
    run.client.stop()
    return run


# ---- a browser ----------------------------------------------------------------------------------


@pytest.fixture
def console_errors() -> list[str]:
    """Collects errors of the browser's console; a test that provokes some clears the list."""
    return []


@pytest.fixture
def page(browser: Browser, console_errors: list[str]) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1400, "height": 900}, color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(EXPECT_MS)
    page.on("pageerror", lambda error: console_errors.append(str(error)))
    page.on(
        "console",
        lambda message: console_errors.append(message.text) if message.type == "error" else None,
    )
    yield page
    context.close()
    assert console_errors == []


def visit(page: Page, stack: Endpoints, address: str, token: str | None = None) -> None:
    """Opens a page of the dashboard through a link with a token."""
    page.goto(f"{stack.buffer_url}/#token={token or stack.token}&{address}")


EXPECT_MS = 60_000
expect.set_options(timeout=EXPECT_MS)

ACCESSIBILITY_ERRORS = Path(__file__).with_name("accessibility.js").read_text()
PAYLOAD_LINE = """async (payload) =>
    (await import("/dashboard/views/pieces.js")).payloadText(payload)"""

EXPLANATIONS = """async (steps) =>
    (await import("/dashboard/steps.js")).explanations(steps, null)"""


def uid_of(play: ImprovingRun) -> str:
    return play.client.prompts(limit=1).items[0].uid


# ---- every view ---------------------------------------------------------------------------------


def addresses(play: ImprovingRun) -> dict[str, tuple[str, str]]:
    """Returns the address of each view, and a text that it shows once its data is loaded."""
    run = "/runs/dashboard"
    return {
        "runs": ("/runs", "dashboard-hostile"),
        "overview": (run, "Values as a table"),
        "difficulty": (f"{run}/difficulty?before=6", "easier"),
        "held out": (f"{run}/difficulty?set=held-out&unit=prompts", "Held-out prompts by bin"),
        "buffers": (
            f"{run}/buffers?buffer=high_quality",
            "accuracy in the replay window [c2, c3]",
        ),
        "batches": (f"{run}/batches?step=4&uid={uid_of(play)}", "Decision of each source"),
        "prompts": (f"{run}/prompts?order=hardest", "Hardest first"),
        "responses": (f"{run}/responses?first=1", "finish reason stop"),
        "prompt": (f"{run}/prompt?uid={uid_of(play)}", "mean log-prob"),
        "system": (f"{run}/system", "engine-0"),
        "compare": (
            "/compare?runs=dashboard,dashboard-hostile&by=tokens",
            "Configuration differences",
        ),
        "compare seeds": (SEEDS_PAGE, "no interval worth reading"),
    }


VIEWS = [
    "runs",
    "overview",
    "difficulty",
    "held out",
    "buffers",
    "batches",
    "prompts",
    "responses",
    "prompt",
    "system",
    "compare",
    "compare seeds",
]


@pytest.mark.parametrize("view", VIEWS)
def test_every_view(
    stack: Endpoints,
    play: ImprovingRun,
    hostile: ImprovingRun,
    seeds: list[ImprovingRun],
    page: Page,
    view: str,
) -> None:
    """Every view loads without console errors, is accessible in light and dark, and fits a narrow
    screen."""
    address, text = addresses(play)[view]
    visit(page, stack, address)
    expect(page.locator("main")).to_contain_text(text)
    expect(page.locator("[aria-busy]")).to_have_count(0)
    assert page.evaluate(ACCESSIBILITY_ERRORS) == []
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(ACCESSIBILITY_ERRORS) == []
    page.set_viewport_size({"width": 380, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 380


def test_charts_show_the_committed_steps(stack: Endpoints, play: ImprovingRun, page: Page) -> None:
    visit(page, stack, "/runs/dashboard")
    reward = page.get_by_role("slider", name="Reward")
    expect(reward).to_have_attribute("aria-valuemax", str(STEPS))
    steps = play.client.steps()
    last = sum(k * n for k, n in enumerate(steps[-1].bins)) / (4 * sum(steps[-1].bins))
    expect(reward).to_have_attribute("aria-valuetext", f"step {STEPS}: reward {last:.3f}")
    batch = page.get_by_role("slider", name="Batch composition")
    counts = steps[-1].counts
    expect(batch).to_have_attribute(
        "aria-valuetext",
        f"step {STEPS}: fresh {counts['fresh']}, re-evaluated {counts['reevaluated']}, "
        f"replayed {counts['replayed']}",
    )
    page.get_by_label("Metric", exact=True).select_option("gradient_norm")
    expect(page).to_have_url(re.compile("metric=gradient_norm"))


def test_the_scores_of_every_evaluation_set_are_shown(stack: Endpoints, page: Page) -> None:
    run = ImprovingRun(stack, sets_config("dashboard-sets"))
    for version in (1, 12):
        for name in SETS:
            evaluate(run, version, name)
    visit(page, stack, "/runs/dashboard-sets")
    first, second = run.client.evaluation_sets()
    rows = page.get_by_role("region", name="Evaluation sets").locator("tbody tr")
    expect(rows).to_have_count(2)
    for row, one in zip((0, 1), (first, second), strict=True):
        last = one.evaluations[-1]
        (mean,) = (score for score in last.scores if score.metric == "mean")
        for text in (
            one.name,
            f"{mean.value:.3f} [{mean.low:.3f}–{mean.high:.3f}]",
            " · ".join(map(str, last.bins)),
        ):
            expect(rows.nth(row)).to_contain_text(text)
    chart = page.get_by_role("slider", name="Held-out evaluation")
    expect(chart).to_have_attribute(
        "aria-valuetext",
        f"version 12: cd-34 {first.evaluations[-1].mean_accuracy:.3f}, "
        f"cd-4 {second.evaluations[-1].mean_accuracy:.3f}",
    )
    expect(page.locator("[aria-busy]")).to_have_count(0)
    assert page.evaluate(ACCESSIBILITY_ERRORS) == []
    visit(page, stack, "/runs/dashboard-sets/difficulty?set=held-out&unit=prompts")
    page.get_by_label("Evaluation set", exact=True).select_option("cd-4")
    expect(page).to_have_url(re.compile("evaluation=cd-4"))
    migration = run.client.evaluation_migration(1, 12, "cd-4")
    cells = page.locator(".heatmap tbody tr").first.locator("td")
    expect(cells).to_have_text([*map(str, migration.matrix[0]), str(sum(migration.matrix[0]))])


def test_runs_are_added_to_a_comparison_and_removed(
    stack: Endpoints,
    play: ImprovingRun,
    hostile: ImprovingRun,
    page: Page,
    console_errors: list[str],
) -> None:
    visit(page, stack, "/runs")
    for name in ("dashboard", "dashboard-hostile"):
        page.get_by_label(f"Compare {name}", exact=True).check()
    page.get_by_role("button", name="Compare 2 runs").click()
    expect(page).to_have_url(re.compile("runs=dashboard%2Cdashboard-hostile"))
    fresh = page.get_by_role("slider", name="Accuracy of fresh rollouts")
    expect(fresh).to_have_attribute("aria-valuemax", str(STEPS))
    page.get_by_label("Curves by", exact=True).select_option("generated tokens")
    expect(page).to_have_url(re.compile("by=tokens"))
    compared = play.client.compare("dashboard-hostile").runs
    tokens = max(run.cost.tokens for run in compared)
    expect(fresh).to_have_attribute("aria-valuemax", str(tokens))
    page.get_by_role("button", name="Remove dashboard-hostile").click()
    expect(page.get_by_role("list", name="Compared runs").get_by_role("listitem")).to_have_count(1)
    expect(page.locator("main")).to_contain_text("The configurations are equal.")
    page.get_by_label("Add a run", exact=True).fill("nowhere")
    page.get_by_role("button", name="Add").click()
    expect(page.locator("main")).to_contain_text("there is no run 'nowhere'")
    (error,) = console_errors
    assert "404" in error
    console_errors.clear()
    page.get_by_role("button", name="Remove nowhere").click()
    expect(page.get_by_role("slider", name="Accuracy of fresh rollouts")).to_be_visible()


@pytest.fixture(scope="module")
def seeds(stack: Endpoints) -> list[ImprovingRun]:
    """Creates runs of two variants: one with three seeds, the third of fewer steps, and one with
    two."""
    runs = []
    for label, overrides, lengths in (
        ("a", {}, (8, 8, 4)),
        ("b", {"reevaluate": {"c1": 0.5}}, (8, 8)),
    ):
        for seed, steps in enumerate(lengths, start=1):
            name = f"seeds-{label}-s{seed}"
            run = ImprovingRun(stack, small_config(name, steps=40, seed=seed, **overrides))
            for step in range(1, steps + 1):
                run.run_step(step)
            runs.append(run)
    return runs


SEEDS_PAGE = "/compare?runs=seeds-a-s1,seeds-a-s2,seeds-a-s3,seeds-b-s1,seeds-b-s2"


def test_the_seeds_of_a_variant_are_one_line_in_a_band(
    stack: Endpoints, seeds: list[ImprovingRun], page: Page
) -> None:
    visit(page, stack, SEEDS_PAGE)
    fresh = page.locator("figure", has=page.get_by_role("slider", name="Accuracy of fresh rollou"))
    expect(fresh.locator(".legend .key")).to_contain_text(
        ["seeds-a (3 seeds)", "seeds-b (2 seeds)"]
    )
    expect(fresh.locator(".band")).to_have_count(2)
    # The two longer seeds of the first variant go on where the third has ended.
    expect(fresh.locator(".line.faint")).to_have_count(2)
    strokes = fresh.locator("path.line").evaluate_all("all => all.map(one => one.style.stroke)")
    assert strokes == ["var(--blue)"] * 3 + ["var(--orange)"]
    chips = page.get_by_role("list", name="Compared runs").locator("i")
    assert chips.evaluate_all("all => all.map(one => one.style.background)") == (
        ["var(--blue)"] * 3 + ["var(--orange)"] * 2
    )
    answer = seeds[0].client.compare(*(run.config.name for run in seeds[1:]))
    equal = answer.at_equal["steps"]
    first, second = equal.variants
    values = [value for value in first.values if value is not None]
    rows = page.get_by_role("region", name="Held-out accuracy by variant").locator("tbody tr")
    # Rounded as the page does: Python rounds 0.0625 down.
    spread = [
        page.evaluate("x => x.toFixed(3)", x)
        for x in (sum(values) / len(values), min(values), max(values))
    ]
    assert (first.places, second.places) == ((1, 2), (1, 2))
    expect(rows.nth(0)).to_contain_text("1–2{}{} to {}".format(*spread))
    expect(rows.nth(1)).to_contain_text("2 seeds: no interval worth reading")
    assert second.difference is not None
    difference = page.evaluate("x => x.toFixed(3)", abs(second.difference.mean))
    expect(rows.nth(1)).to_contain_text(difference)
    assert equal.cheapest_run == "seeds-a-s3"
    assert equal.resolution is not None
    assert equal.resolution.smallest_difference is not None
    smallest = page.evaluate("x => x.toFixed(3)", equal.resolution.smallest_difference)
    card = page.locator("section.card", has_text="Held-out accuracy at equal training steps")
    expect(card).to_contain_text("evaluation of seeds-a-s3, which has cost least")
    expect(card).to_contain_text(f"Differences above {smallest} are decided (95% for the pair).")
    page.get_by_label("Curves by", exact=True).select_option("generated tokens")
    tokens = answer.at_equal["tokens"]
    card = page.locator("section.card", has_text="Held-out accuracy at equal generated tokens")
    expect(card).to_contain_text(f"{tokens.costs[-1]:,.0f} generated tokens, the last")
    page.get_by_label("Curves by", exact=True).select_option("training steps")
    page.get_by_role("button", name="Remove seeds-a-s2").click()
    page.get_by_role("button", name="Remove seeds-a-s3").click()
    expect(fresh.locator(".legend .key")).to_contain_text(["seeds-a-s1", "seeds-b (2 seeds)"])
    expect(fresh.locator(".band")).to_have_count(1)


def test_a_back_test_is_opened_beside_the_comparison(
    stack: Endpoints, play: ImprovingRun, page: Page, tmp_path: Path
) -> None:
    rules = [Variant("<i>none</i>", {"replay": {"select": "off"}})]
    found = back_test(play.client, rules, first=1, last=None, where="rules")
    write_backtest([found], tmp_path)
    visit(page, stack, "/compare?runs=dashboard")
    page.get_by_label("Open backtest.json").set_input_files(tmp_path / "backtest.json")
    card = page.locator("section.card", has=page.get_by_role("heading", name="Back-tests"))
    expect(card).to_contain_text(CAVEAT)
    table = page.get_by_role("region", name="Data rules, by the groups of dashboard")
    expect(table.locator("tbody tr")).to_have_count(2)
    (cells,) = tables_of([found])
    expect(table.locator("tbody tr").nth(1)).to_have_text(
        "".join(["<i>none</i>", *cells.rows["<i>none</i>"]])
    )
    assert page.evaluate(ACCESSIBILITY_ERRORS) == []
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(ACCESSIBILITY_ERRORS) == []
    page.set_viewport_size({"width": 380, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    for name, content, why in (
        ("half.json", "{", "It holds no JSON"),
        ("other.json", "[]", "It has no tables of back-tests"),
    ):
        (tmp_path / name).write_text(content)
        page.get_by_label("Open backtest.json").set_input_files(tmp_path / name)
        expect(card.get_by_role("alert")).to_contain_text(f"{name} cannot be shown{why}")
        expect(card).not_to_contain_text(CAVEAT)


@pytest.mark.parametrize(("solved_at", "shown"), [(None, "0.688reward"), (1.0, "0.250accuracy")])
def test_runs_of_a_reward_function_are_listed_with_their_measure(
    stack: Endpoints,
    page: Page,
    solved_at: float | None,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"listed-by-{'reward' if solved_at is None else 'accuracy'}"
    config = reward_function_config(tmp_path, name, solved_at)
    driver = Driver(stack, config, create_with_reward_function)
    groups = []
    for group in driver.groups(1, "evaluation"):
        spread = with_rewards(group, SPREAD)
        responses = [replace(each, correct=each.reward >= 1) for each in spread.responses]
        groups.append(replace(spread, responses=responses))
    driver.client.post_groups(1, "evaluation", encode_groups(groups))
    visit(page, stack, f"/runs?search={name}")
    expect(page.locator("tbody tr .spark")).to_have_text(re.compile(f"^{re.escape(shown)}"))


@pytest.mark.parametrize("width", [1280, 400])
def test_texts_of_a_run_are_not_cut(
    stack: Endpoints, play: ImprovingRun, page: Page, width: int
) -> None:
    """A row of the evaluation sets is one line, and a caption ends within the screen."""
    page.set_viewport_size({"width": width, "height": 900})
    visit(page, stack, "/runs/dashboard")
    scores = page.get_by_role("region", name="Evaluation sets")
    row = scores.locator("tbody tr").bounding_box()
    caption = scores.locator("caption span").bounding_box()
    assert row is not None
    assert caption is not None
    assert row["height"] < 50
    assert caption["x"] + caption["width"] <= width
    visit(page, stack, "/compare?runs=dashboard&by=seconds")
    chart = page.locator("figure", has=page.get_by_role("slider", name="Held-out evaluation"))
    names = chart.locator(".axis-title")
    expect(names).to_have_text(["accuracy", "seconds of the trainer"])
    plot = chart.locator(".plot > svg").bounding_box()
    name = names.last.bounding_box()
    ticks = chart.locator(".axes text:not(.axis-title)").last.bounding_box()
    assert plot is not None
    assert name is not None
    assert ticks is not None
    assert plot["x"] <= name["x"]
    assert name["x"] + name["width"] <= plot["x"] + plot["width"]
    assert ticks["y"] + ticks["height"] <= name["y"] + 2


def test_variants_that_the_seeds_tell_apart_have_places_of_their_own(
    stack: Endpoints, page: Page
) -> None:
    """Runs of a reward function, in which no response is correct, are compared by rewards."""
    names = []
    for number, (label, reward) in enumerate((("bad", -1.0), ("good", 2.0), ("best", 3.0))):
        for seed in (1, 2):
            config = {"seed": seed, "steps": 4, "reevaluate": {"c1": 0.25 * (1 + number)}}
            run = Driver(stack, small_config(f"by-reward-{label}-s{seed}", **config))
            names.append(run.config.name)
            for version, mean in ((1, 0.0), (4, reward + seed / 64)):
                drawn = run.groups(version, "evaluation")
                groups = [with_rewards(group, [mean] * 4) for group in drawn]
                run.client.post_groups(version, "evaluation", encode_groups(groups))
                if version == 1:
                    for step in (1, 2, 3):
                        run.run_step(step)
    visit(page, stack, f"/compare?runs={','.join(names)}")
    rows = page.get_by_role("region", name="Held-out reward by variant").locator("tbody tr")
    for row, place, mean in ((0, "3", "−0.977"), (1, "2", "2.023"), (2, "1", "3.023")):
        expect(rows.nth(row)).to_contain_text(f"1, 2{place}{mean}")
    expect(page.get_by_role("slider", name="Reward of fresh rollouts")).to_be_visible()
    chart = page.locator("figure", has=page.get_by_role("slider", name="Held-out evaluation"))
    expect(chart.locator(".axis-title", has_text="reward")).to_have_count(1)
    expect(page.locator("[aria-busy]")).to_have_count(0)
    assert page.evaluate(ACCESSIBILITY_ERRORS) == []


@pytest.mark.parametrize(
    ("solved_at", "rewards", "note"),
    [
        (None, SPREAD, "No response counts as correct, although rewards differ: groups train"),
        (
            1.5,
            SPREAD,
            "No response has a reward of task.solved_at = 1.5 or more, although",
        ),
        (None, EQUAL, "No step trained: the responses of each group had equal rewards"),
    ],
    ids=["without threshold", "with threshold", "equal"],
)
def test_rewards_of_any_number_are_explained(
    stack: Endpoints,
    page: Page,
    request: pytest.FixtureRequest,
    solved_at: float | None,
    rewards: tuple[float, ...],
    note: str,
) -> None:
    name = f"dashboard-{request.node.callspec.id.replace(' ', '-')}"
    task = {"options": {"template": "short"}, "train_prompts": 24, "test_prompts": 4}
    driver = Driver(stack, small_config(name, task=task | {"solved_at": solved_at}))
    kinds: tuple[wire.Kind, ...] = ("fresh", "evaluation")
    for kind in kinds:
        groups = [with_rewards(group, rewards) for group in driver.groups(1, kind)]
        driver.client.post_groups(1, kind, encode_groups(groups))
    driver.client.batch(1)
    driver.client.commit(1, {})
    visit(page, stack, f"/runs/{name}")
    expect(page.locator("main p.note", has_text=note)).to_have_count(1)
    mean = f"{sum(rewards) / len(rewards):.3f}"
    tile = page.locator(".tiles > *", has_text="Held-out reward")
    expect(tile).to_contain_text(f"{mean}version 1; base model {mean}")
    row = page.get_by_role("region", name="Evaluation sets").locator("tbody tr")
    expect(row).to_contain_text(mean)
    chart = page.get_by_role("slider", name="Held-out evaluation")
    expect(chart).to_have_attribute("aria-valuetext", "version 1: accuracy 0.000")
    # Another scale, so a chart of its own.
    chart = page.get_by_role("slider", name="Held-out reward")
    expect(chart).to_have_attribute("aria-valuetext", f"version 1: reward {mean}")
    expect(page.locator("[aria-busy]")).to_have_count(0)
    assert page.evaluate(ACCESSIBILITY_ERRORS) == []


@pytest.mark.parametrize("overlong", [False, True])
def test_the_punishment_of_length_is_left_out_of_equal_rewards(
    stack: Endpoints, page: Page, overlong: bool
) -> None:
    page.goto(stack.buffer_url)
    parts = {"answer": 0.0} | ({"overlong": -0.2} if overlong else {})
    counts = {"fresh": 0, "reevaluated": 0, "replayed": 0, "mixed": 0}
    step = step_view(counts=counts, bins=[8, 0], reward_parts=parts)
    (note,) = page.evaluate(EXPLANATIONS, [step.model_dump(mode="json")])
    reason = note.removeprefix("No step trained: ").partition(".")[0]
    assert ("but for the punishment of length" in reason) == overlong
    assert explain_equal_rewards([step]).startswith(reason)


def test_a_run_without_steps_says_so(stack: Endpoints, page: Page) -> None:
    ImprovingRun(stack, small_config("dashboard-empty"))
    for section, text in {
        "": "No evaluation yet",
        "/difficulty": "No step is committed yet",
        "/buffers": "The buffer is empty",
        "/batches": "No step is committed yet",
        "/prompts": "No prompt was attempted yet",
        "/system": "No checkpoint yet",
    }.items():
        visit(page, stack, f"/runs/dashboard-empty{section}")
        expect(page.locator("main")).to_contain_text(text)


# ---- prompts, batches, buffers -------------------------------------------------------------------


def test_filters_of_prompts(stack: Endpoints, play: ImprovingRun, page: Page) -> None:
    """The rows are those that the service returns, and the address leads back to them."""
    visit(page, stack, "/runs/dashboard/prompts")
    rows = page.locator("tbody tr")
    everything = list(play.client.all_prompts())
    expect(rows).to_have_count(len(everything))
    solved = [prompt for prompt in everything if prompt.bin == 4]
    page.get_by_label("Now correct", exact=True).select_option("4")
    expect(rows).to_have_count(len(solved))
    page.get_by_label("Search", exact=True).fill(solved[0].uid)
    expect(rows).to_have_count(1)
    expect(page).to_have_url(re.compile(r"bin=4&search=countdown"))
    page.reload()
    expect(rows).to_have_count(1)
    expect(page.get_by_label("Now correct", exact=True)).to_have_value("4")
    page.get_by_role("button", name="Clear").click()
    expect(rows).to_have_count(len(everything))
    page.get_by_role("button", name="Change").click()
    expect(page.locator("th[aria-sort=descending]")).to_have_text("Change")
    most_improved = next(play.client.all_prompts(order="most_improved")).uid
    expect(rows.first.get_by_role("link")).to_have_text(most_improved)


def test_pages_of_prompts(stack: Endpoints, play: ImprovingRun, page: Page) -> None:
    """The reader goes to the next page and back."""

    def request_smaller_pages(route: Route) -> None:
        route.continue_(url=route.request.url.replace("limit=50", "limit=10"))

    page.route("**/prompts?*", request_smaller_pages)
    visit(page, stack, "/runs/dashboard/prompts")
    rows = page.locator("tbody tr th")
    uids = [prompt.uid for prompt in play.client.all_prompts()]
    expect(rows).to_have_text(uids[:10])
    page.get_by_role("button", name="Next").click()
    expect(rows).to_have_text(uids[10:20])
    page.get_by_role("button", name="Previous").click()
    expect(rows).to_have_text(uids[:10])


def test_what_the_model_wrote_is_searched(stack: Endpoints, play: ImprovingRun, page: Page) -> None:
    wrong = list(play.client.responses(evaluation_set="test", correct=False))
    visit(page, stack, "/runs/dashboard/responses")
    page.get_by_label("Prompts", exact=True).select_option(label="Evaluation: test")
    page.get_by_label("Verdict", exact=True).select_option(label="Wrong")
    written = page.locator(".response")
    expect(written.first.locator("pre")).to_have_text(wrong[0].text)
    expect(written).to_have_count(min(20, len(wrong)))
    page.get_by_label("Text", exact=True).fill("no such text")
    expect(page.locator("main")).to_contain_text("No response matches")
    page.reload()
    expect(page.get_by_label("Text", exact=True)).to_have_value("no such text")
    expect(page.locator("main")).to_contain_text("No response matches")
    page.get_by_label("Text", exact=True).fill("")
    expect(written.first).to_contain_text(wrong[0].prompt_uid)
    page.get_by_role("button", name="Clear").click()
    newest = next(play.client.responses())
    expect(written.first.locator("pre")).to_have_text(newest.text)
    expect(page.get_by_label("Prompts", exact=True)).to_have_value("")
    expect(page).not_to_have_url(re.compile("evaluation_set|correct"))


def test_a_prompt_opens_with_its_trajectories(
    stack: Endpoints, play: ImprovingRun, page: Page
) -> None:
    prompt = max(play.client.all_prompts(), key=lambda prompt: prompt.attempts)
    attempts = play.client.prompt_history(prompt.uid).attempts
    visit(page, stack, "/runs/dashboard/prompts")
    page.get_by_role("link", name=prompt.uid).click()
    history = page.get_by_role("slider", name="History")
    expect(history).to_have_attribute("aria-valuemax", str(attempts[-1].step))
    for name, attempt in (("First group", attempts[0]), ("Second group", attempts[-1])):
        side = page.get_by_role("region", name=name)
        shown = play.client.group(attempt.group_id)
        texts = [response.text for response in shown.responses]
        expect(side.locator("pre")).to_have_text(texts)
        right = sum(response.reward == 1 for response in shown.responses)
        expect(side.get_by_text("reward 1", exact=True)).to_have_count(right)
        interruption = f"version {shown.policy_version + 1} from token 2 on"
        expect(side.get_by_text(interruption, exact=True)).to_have_count(1)
    page.get_by_label("Show tokens, shaded by log-prob", exact=True).check()
    token = page.locator(".token").first
    expect(token).to_have_attribute("title", re.compile(r"^token \d+, log-prob −?[\d.]+"))
    other = attempts[1]
    page.get_by_role("combobox", name="First group").select_option(str(other.group_id))
    expect(page).to_have_url(re.compile(f"first={other.group_id}"))


class BytePairRun(ImprovingRun):
    """A run whose responses are the tokens of a byte-level BPE tokenizer, which it publishes."""

    TEXT = "The sum of 12 and 30 is 42. 🧮"

    def __init__(self, stack: Endpoints, name: str) -> None:
        super().__init__(stack, small_config(name))
        self.hostile = self.TEXT
        self.tokenizer = Tokenizer(models.BPE())
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=280, initial_alphabet=alphabet, show_progress=False
        )
        self.tokenizer.train_from_iterator(["The sum of 12 and 30 is 42."] * 3, trainer)

    def _response(
        self, prompt: wire.PromptItem, rng: random.Random, right: bool
    ) -> TrajectoryResponse:
        ids = self.tokenizer.encode(self.TEXT).ids
        response = super()._response(prompt, rng, right)
        return replace(response, token_ids=ids, logprobs=[-0.5] * len(ids))

    def publish(self) -> None:
        store = ObjectStore(self.stack.object_store)
        prefix = layout.weights(self.config.name, 1, self.client.attempt)
        files = {"tokenizer.json": BytesContent(self.tokenizer.to_str().encode())}
        self.client.publish_weights(1, store.put_files(prefix, files))


def test_tokens_are_shown_with_their_own_text(stack: Endpoints, page: Page) -> None:
    run = BytePairRun(stack, "dashboard-tokens")
    run.roll_out(1)
    uid = run.client.step_prompts(1, "fresh").prompts[0].uid
    visit(page, stack, f"/runs/dashboard-tokens/prompt?uid={uid}")
    shade = page.get_by_label("Show tokens, shaded by log-prob")
    shade.check()
    tokens = page.locator(".tokens").first.locator(".token")
    ids = run.tokenizer.encode(run.TEXT).ids
    expect(tokens).to_have_text([str(token_id) for token_id in ids])
    run.publish()
    shade.uncheck()
    shade.check()
    expect(tokens.first).to_have_text("The")
    texts = tokens.all_text_contents()
    assert "".join(texts[:-4]) == "The sum of 12 and 30 is 42. "
    assert " sum" in texts
    assert texts[-4:] == ["<0xF0>", "<0x9F>", "<0xA7>", "<0xAE>"]
    group = run.client.group(run.client.prompt_history(uid).attempts[0].group_id)
    assert group.responses[0].tokens is None
    with_tokens = run.client.group(group.group_id, tokens=True)
    assert [response.tokens for response in with_tokens.responses] == [texts] * run.size


def test_a_guessed_address_of_a_prompt_leads_to_its_page(
    stack: Endpoints, play: ImprovingRun, page: Page
) -> None:
    uid = uid_of(play)
    visit(page, stack, f"/runs/dashboard/prompts/{uid}")
    expect(page.locator(".uid")).to_have_text(uid)
    expect(page).to_have_url(re.compile(r"#/runs/dashboard/prompt\?uid="))
    expect(page.locator("main")).to_contain_text("mean log-prob")


def test_a_prompt_shows_its_images(stack: Endpoints, page: Page) -> None:
    config = config_from(
        {
            "name": "with-images",
            "task": {"name": "geometry", "train_prompts": 4, "test_prompts": 2},
            "rollout": {"prompts_per_step": 2},
            "optimizer": {"minibatch_prompts": 2},
        }
    )
    client = BufferClient(stack.buffer_url, stack.token, run=config.name)
    datasets = load_datasets(config)
    for dataset in datasets.all:
        store_dataset(client, dataset)
    client.create_run(
        wire.RunCreate(
            name=config.name,
            config=config.model_dump(mode="json"),
            train_dataset=datasets.train.name,
            test_datasets=datasets.test_names,
        )
    )
    prompt = datasets.train.prompts[0]
    visit(page, stack, f"/runs/with-images/prompt?uid={prompt.uid}")
    image = page.get_by_role("img", name="Image 1 of the prompt")
    expect(image).to_be_visible()
    expect(image).to_have_js_property("naturalWidth", 224)
    expect(page.locator("main")).not_to_contain_text(prompt.payload["images"][0]["digest"])
    line = page.evaluate(PAYLOAD_LINE, prompt.payload)
    assert line.startswith(f"1 image, problem {prompt.payload['problem']}, answer ")
    assert page.evaluate(ACCESSIBILITY_ERRORS) == []


def test_why_a_prompt_is_in_a_batch(stack: Endpoints, play: ImprovingRun, page: Page) -> None:
    member = play.client.recorded_batch(4).members[-1]
    visit(page, stack, "/runs/dashboard/batches?step=4")
    page.get_by_role("button", name=f"Why {member.prompt_uid}").click()
    for decided in play.client.decision(4, member.prompt_uid).considered:
        expect(page.locator("#why")).to_contain_text(decided.reason)
    page.get_by_role("button", name="Next").click()
    expect(page.get_by_text("in the batch of step 5", exact=True)).to_be_visible()
    expect(page).to_have_url(re.compile("step=5"))


@pytest.mark.parametrize("buffer", ["hard", "high_quality"])
def test_a_buffer_as_of_a_step(
    stack: Endpoints, play: ImprovingRun, page: Page, buffer: wire.BufferName
) -> None:
    visit(page, stack, f"/runs/dashboard/buffers?buffer={buffer}")
    contents = page.locator("section", has_text="in the order of admission")
    page.get_by_label("As of step", exact=True).fill("9")
    page.get_by_label("As of step", exact=True).press("Enter")
    entries = play.client.buffer(buffer, 9)
    expect(contents.locator("tbody th")).to_have_text([entry.prompt_uid for entry in entries])
    contents.get_by_role("button", name="Staleness").click()
    expect(contents.locator("th[aria-sort=ascending]")).to_have_text("Staleness")


def test_migration_between_two_steps(stack: Endpoints, play: ImprovingRun, page: Page) -> None:
    visit(page, stack, "/runs/dashboard/difficulty?before=5&after=12")
    migration = play.client.difficulty_migration(5, 12)
    rows = page.locator(".heatmap tbody tr")
    for row, values in enumerate([*migration.matrix, migration.newly_attempted]):
        expect(rows.nth(row).locator("td")).to_have_text([*map(str, values), str(sum(values))])
    page.get_by_label("Before: step", exact=True).fill("2")
    page.get_by_label("Before: step", exact=True).press("Enter")
    earlier = play.client.difficulty_migration(2, 12)
    expect(rows.first.locator("td")).to_have_text(
        [*map(str, earlier.matrix[0]), str(sum(earlier.matrix[0]))]
    )
    expect(page).to_have_url(re.compile(r"before=2&after=12"))


# ---- live updates and actions --------------------------------------------------------------------


def test_a_step_shows_up_while_the_page_is_open(stack: Endpoints, page: Page) -> None:
    play = ImprovingRun(stack, small_config("dashboard-live", steps=40, seed=5))
    play.run_step(1)
    visit(page, stack, "/runs/dashboard-live")
    reward = page.get_by_role("slider", name="Reward")
    expect(reward).to_have_attribute("aria-valuemax", "1")
    # A poll without changes has no body.
    page.wait_for_event("response", lambda response: response.status == 304)
    play.run_step(2)
    expect(reward).to_have_attribute("aria-valuemax", "2")
    expect(page.get_by_text("2 / 40")).to_be_visible()


def test_a_run_says_what_it_works_at(stack: Endpoints, page: Page) -> None:
    play = ImprovingRun(stack, small_config("dashboard-now", steps=40, seed=6))
    head = page.locator(".run-head")
    visit(page, stack, "/runs/dashboard-now")
    expect(head).to_contain_text("Now: starting the engine and the trainer")
    play.client.publish_weights(1, "a" * 64)
    play.client.post_groups(1, "fresh", encode_groups(play.groups(1)[:5]))
    expect(head).to_contain_text("Now: step 1: 5 of 8 groups")
    play.client.post_groups(1, "fresh", encode_groups(play.groups(1)))
    play.client.batch(1)
    expect(head).to_contain_text("Now: training step 1")
    groups = play.groups(1, "evaluation")
    play.client.post_groups(1, "evaluation", encode_groups(groups[:3]))
    expect(head).to_contain_text(
        "Now: training step 1; evaluating the base model on test: 3 of 4 prompts"
    )


def test_pause_and_resume(stack: Endpoints, page: Page, console_errors: list[str]) -> None:
    play = ImprovingRun(stack, small_config("dashboard-pause"))
    visit(page, stack, "/runs/dashboard-pause")
    page.get_by_role("button", name="Pause").click()
    dialog = page.get_by_role("dialog", name="Pause dashboard-pause?")
    dialog.get_by_role("button", name="Cancel").click()
    assert play.client.run_state().status == "running"
    page.get_by_role("button", name="Pause").click()
    page.evaluate("location.hash = '/runs/dashboard-pause/system'")
    expect(dialog).to_have_count(0)
    page.get_by_role("button", name="Pause").click()
    dialog.get_by_role("button", name="Pause").click()
    expect(page.locator(".pill")).to_have_text("paused")
    assert play.client.run_state().status == "paused"
    # The run is stopped while the dialog is open: the page shows the conflict.
    page.get_by_role("button", name="Resume").click()
    play.client.stop()
    page.get_by_role("dialog").get_by_role("button", name="Resume").click()
    expect(page.get_by_role("alert").filter(has_text="is stopped, not paused")).to_be_visible()
    assert all("409" in error for error in console_errors)
    console_errors.clear()


def test_the_page_of_a_stopped_run_says_who_stopped_it_and_why(
    stack: Endpoints, page: Page
) -> None:
    client = ImprovingRun(stack, small_config("dashboard-stop")).client
    visit(page, stack, "/runs/dashboard-stop")
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("dialog").get_by_role("button", name="Stop").click()
    expect(page.locator(".pill")).to_have_text("stopped")
    expect(page.get_by_text("by a person at the dashboard")).to_be_visible()
    client.begin_attempt(reopen=True)
    client.stop(by="workflow team/bapo-x7k2p", reason="its pipeline was terminated")
    text = "by workflow team/bapo-x7k2p: its pipeline was terminated"
    expect(page.get_by_text(text)).to_be_visible()


def test_changes_of_the_configuration_are_listed_and_marked_in_the_charts(
    stack: Endpoints, page: Page
) -> None:
    run = ImprovingRun(stack, small_config("dashboard-changed"))
    run.hostile = "text"  # With two parts of the reward, one of which has a chart.
    for step in (1, 2, 3, 4):
        run.run_step(step)
    run.client.record_checkpoint(4, "c" * 64)
    visit(page, stack, "/runs/dashboard-changed")
    table = page.get_by_role("region", name="Changes of the configuration")
    reward = page.get_by_role("slider", name="Reward", exact=True)
    expect(reward).to_have_attribute("aria-valuemax", "4")
    expect(table).to_have_count(0)
    run.client.change_config({"steps": 20, "optimizer.learning_rate": 1e-5}, by="alice")
    run.client.begin_attempt()
    run.run_step(5)
    run.run_step(6)
    rows = table.locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("5optimizer.learning_rate0.0000010.00001")
    expect(rows.nth(1)).to_contain_text("5steps1220")
    expect(rows.nth(1)).to_contain_text("alice")
    mark = reward.locator("line.mark")
    expect(mark).to_have_count(1)
    part = page.get_by_role("figure", name="Part of the reward")
    expect(part.locator("line.mark")).to_have_count(1)
    expect(mark.locator("title")).to_have_text(
        "From step 5 on: optimizer.learning_rate 0.000001 → 0.00001, steps 12 → 20"
    )
    expect(page.locator(".run-head")).to_contain_text("6 / 20")
    expect(page.locator("[aria-busy]")).to_have_count(0)
    assert page.evaluate(ACCESSIBILITY_ERRORS) == []
    page.set_viewport_size({"width": 380, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 380


def test_a_fork_and_its_run_lead_to_each_other(stack: Endpoints, page: Page) -> None:
    run = ImprovingRun(stack, small_config("dashboard-past"))
    for step in (1, 2, 3, 4):
        run.run_step(step)
    run.client.record_checkpoint(4, "d" * 64)
    values = {"algorithm": "grpo", "sync": {"every": 1}, "replay": "off"}
    for name, request in (
        ("dashboard-same", wire.ForkRequest(name="dashboard-same", step=3)),
        ("dashboard-grpo", wire.ForkRequest(name="dashboard-grpo", step=4, values=values)),
        ("dashboard-rec", wire.ForkRequest(name="dashboard-rec", step=0, rollouts_until=3)),
    ):
        assert run.client.fork_run(request).name == name
    visit(page, stack, "/runs?search=dashboard-rec")
    row = page.get_by_role("row", name="dashboard-rec")
    expect(row).to_contain_text("fork of dashboard-past at step 0, on its rollouts to step 3")
    row.get_by_role("link", name="dashboard-past").click()
    forks = page.get_by_role("region", name="Forks of this run")
    expect(forks.get_by_role("listitem")).to_have_text(
        ["dashboard-rec at step 0", "dashboard-grpo at step 4", "dashboard-same at step 3"]
    )
    forks.get_by_role("link", name="dashboard-same").click()
    expect(page.locator(".run-head")).to_contain_text("fork of dashboard-past at step 3")
    expect(page.get_by_role("slider", name="Reward")).to_have_attribute("aria-valuemax", "3")
    table = page.get_by_role("region", name="Changes of the configuration")
    expect(table).to_have_count(0)
    visit(page, stack, "/runs/dashboard-grpo")
    expect(table.locator("tbody tr")).to_have_count(10)
    page.get_by_role("button", name="Show all").click()
    expect(table).to_contain_text("5replay.window.r_totbatchunset")
    expect(table).not_to_contain_text("nameda")
    assert page.evaluate(ACCESSIBILITY_ERRORS) == []
    page.set_viewport_size({"width": 380, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    visit(page, stack, "/compare?runs=dashboard-past,dashboard-grpo")
    chips = page.get_by_role("list", name="Compared runs").get_by_role("listitem")
    expect(chips.nth(1)).to_contain_text("fork of dashboard-past at step 4")


def test_a_token_that_may_only_read(stack: Endpoints, play: ImprovingRun, page: Page) -> None:
    token = play.client.create_token("dashboard reader", "read").token
    visit(page, stack, "/runs/dashboard", token)
    expect(page.locator(".pill")).to_have_text("running")
    expect(page.get_by_role("button", name="Stop")).to_have_count(0)


# ---- errors and outages --------------------------------------------------------------------------


def test_a_bad_token_and_a_good_one(
    stack: Endpoints, play: ImprovingRun, page: Page, console_errors: list[str]
) -> None:
    page.goto(f"{stack.buffer_url}/#/runs/dashboard/difficulty")
    field = page.get_by_label("Token", exact=True)
    expect(field).to_be_focused()
    field.fill("unknown")
    field.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("this token is not known here")
    assert all("401" in error for error in console_errors)
    console_errors.clear()
    field.fill(stack.token)
    field.press("Enter")
    expect(page.locator("h1")).to_contain_text("dashboard")
    assert page.url.endswith("/#/runs/dashboard/difficulty"), "the requested page is shown"


def test_a_token_leaves_the_address(stack: Endpoints, play: ImprovingRun, page: Page) -> None:
    visit(page, stack, "/runs/dashboard")
    expect(page.locator("h1")).to_contain_text("dashboard")
    assert stack.token not in page.url
    page.reload()
    expect(page.locator("h1")).to_contain_text("dashboard")
    page.get_by_role("button", name="Forget token").click()
    expect(page.get_by_label("Token", exact=True)).to_be_visible()
    assert page.evaluate("sessionStorage.length + localStorage.length") == 0


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("/runs/unknown", "there is no run 'unknown'"),
        ("/runs/dashboard/prompt?uid=unknown", "there is no prompt 'unknown'"),
        ("/runs/dashboard/batches?step=999", "there is no batch of step 999"),
    ],
)
def test_a_missing_resource_is_reported(
    stack: Endpoints,
    play: ImprovingRun,
    page: Page,
    console_errors: list[str],
    address: str,
    text: str,
) -> None:
    visit(page, stack, address)
    expect(page.get_by_role("alert").filter(has_text=text)).to_be_visible()
    assert all("404" in error for error in console_errors)
    console_errors.clear()


def test_the_page_survives_an_outage(
    stack: Endpoints, play: ImprovingRun, page: Page, console_errors: list[str]
) -> None:
    visit(page, stack, "/runs/dashboard")
    reward = page.get_by_role("slider", name="Reward")
    expect(reward).to_be_visible()
    problem = {"title": "Unavailable", "status": 503, "detail": "the database does not answer"}
    # The next attempt is half a minute away, so that it is the button that makes one before.
    later = {"Retry-After": "600"}
    page.route("**/v1/**", lambda route: route.fulfill(status=503, json=problem, headers=later))
    banner = page.locator("#banner")
    expect(banner).to_contain_text("the database does not answer")
    expect(banner).to_contain_text("next attempt in 30 s")
    expect(reward).to_be_visible()
    # During the outage, because whatever answers after it hides the button.
    with page.expect_request("**/v1/**", timeout=20_000):
        banner.get_by_role("button", name="Try now").click()
    expect(banner).to_contain_text("the database does not answer")
    page.unroute("**/v1/**")
    expect(banner).to_be_hidden()
    expect(page.get_by_text("Connected")).to_be_visible()
    console_errors.clear()


def test_hostile_text_is_text(stack: Endpoints, hostile: ImprovingRun, page: Page) -> None:
    visit(page, stack, f"/runs/dashboard-hostile/prompt?uid={uid_of(hostile)}")
    response = page.locator("pre").first
    expect(response).to_have_text(HOSTILE)
    page.get_by_label("Show tokens, shaded by log-prob", exact=True).check()
    expect(page.locator(".token").first).to_have_text("<")
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img, main script, main a[href^=javascript]").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 1400


@pytest.mark.usefixtures("play")
def test_the_parts_of_rewards_are_shown(
    stack: Endpoints, hostile: ImprovingRun, page: Page
) -> None:
    visit(page, stack, "/runs/dashboard-hostile")
    expect(page.get_by_role("figure", name="Reward", exact=True)).to_contain_text("reward −0.")
    chart = page.get_by_role("figure", name="Part of the reward")
    for part, line in {
        "accuracy": "accuracy 0.",
        "answer": "answer 0.",
        "format (not in the reward)": "format 0.500",
    }.items():
        chart.get_by_label("Part", exact=True).select_option(label=part)
        expect(chart).to_contain_text(line)
    assert page.url.endswith("part=format"), "a link leads to the same chart"
    assert page.evaluate(ACCESSIBILITY_ERRORS) == []
    visit(page, stack, f"/runs/dashboard-hostile/prompt?uid={uid_of(hostile)}")
    head = page.locator(".response-head").first
    expect(head).to_contain_text(re.compile("reward (1answer 1|−1answer 0), format 0.500"))
    visit(page, stack, "/runs/dashboard")
    chart = page.get_by_role("figure", name="Reward", exact=True)
    expect(chart.get_by_role("slider")).to_be_visible()
    expect(page.get_by_role("figure", name="Part of the reward")).to_have_count(0)


def test_inline_code_does_not_run(stack: Endpoints, page: Page, console_errors: list[str]) -> None:
    """The content security policy stops code even if markup got into a page."""
    visit(page, stack, "/runs")
    # Not `wait_for_function`, which evaluates a string in the page, as the policy forbids.
    page.evaluate(
        """() => new Promise((loaded) => {
            document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=hacked=1>');
            document.body.lastElementChild.addEventListener('error', () => loaded());
        })"""
    )
    assert page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in error for error in console_errors)
    console_errors.clear()


def test_the_files(stack: Endpoints) -> None:
    """The files of the dashboard are served without a token, and no other files are."""
    index = httpx.get(f"{stack.buffer_url}/")
    assert index.status_code == 200
    assert index.headers["content-security-policy"].startswith("default-src 'self';")
    assert index.headers["x-content-type-options"] == "nosniff"
    assert "<script>" not in index.text
    for name in ("app.js", "style.css", "views/run.js", "charts/chart.js", "icon.svg"):
        answer = httpx.get(f"{stack.buffer_url}/dashboard/{name}")
        assert answer.status_code == 200
        cached = {"If-None-Match": answer.headers["etag"]}
        assert httpx.get(f"{stack.buffer_url}/dashboard/{name}", headers=cached).status_code == 304
    for name in ("unknown.js", "../app.py", "%2e%2e/app.py", "views", ""):
        assert httpx.get(f"{stack.buffer_url}/dashboard/{name}").status_code == 404


# ---- accessibility -------------------------------------------------------------------------------


def test_dark_and_light(stack: Endpoints, play: ImprovingRun, page: Page) -> None:
    def brightness() -> float:
        channels = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        return sum(map(float, re.findall(r"[\d.]+", channels)[:3])) / 3

    page.emulate_media(color_scheme="dark")
    visit(page, stack, "/runs/dashboard")
    expect(page.get_by_role("slider", name="Reward")).to_be_visible()
    assert brightness() < 60
    page.get_by_label("Colours").select_option("light")
    assert brightness() > 200
    page.reload()
    assert brightness() > 200, "the choice is remembered"
    page.get_by_label("Colours").select_option("")
    assert brightness() < 60


def test_the_dashboard_works_by_keyboard_alone(
    stack: Endpoints, play: ImprovingRun, page: Page
) -> None:
    visit(page, stack, "/runs?search=dashboard")
    link = page.get_by_role("link", name="dashboard", exact=True)
    expect(link).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    for _ in range(40):
        page.keyboard.press("Tab")
        if link.evaluate("element => element === document.activeElement"):
            break
    expect(link).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_be_focused()
    expect(page).to_have_title(re.compile("Overview"))
    reward = page.get_by_role("slider", name="Reward")
    reward.focus()
    page.keyboard.press("Home")
    expect(reward).to_have_attribute("aria-valuetext", re.compile(r"^step 1:"))
    page.keyboard.press("ArrowRight")
    expect(reward).to_have_attribute("aria-valuetext", re.compile(r"^step 2:"))
    batch = page.get_by_role("slider", name="Batch composition")
    batch.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(rf"/batches\?step={STEPS - 1}$"))
    page.go_back()
    expect(page.locator("h1")).to_be_focused()


# ---- at scale -----------------------------------------------------------------------------------


class Large:
    """Fakes the answers of a run with 10,000 steps and 1,000,000 prompts."""

    SIZE = 16

    def __init__(self) -> None:
        self.requested_urls: list[str] = []

    def answer(self, route: Route) -> None:
        url = route.request.url
        self.requested_urls.append(url)
        path = url.split("/v1", 1)[1].partition("?")[0]
        answer = self._answer_of(path.removeprefix("/runs/large"), url)
        route.fulfill(json=answer, headers={"ETag": '"1"'})

    def _answer_of(self, path: str, url: str) -> Any:
        match path:
            case "/token":
                return {"scope": "read"}
            case "":
                return self._run()
            case "/steps":
                sampled = "points=" in url
                return [
                    self._step(s)
                    for s in (range(25, 10_001, 25) if sampled else range(9981, 10_001))
                ]
            case "/progress":
                return {"step": 10_001, "has_batch": True, "newest_version": 10_001, "rollouts": []}
            case "/evaluation-sets":
                return [self._evaluation_set()]
            case "/difficulty/bins/history":
                return [self._bins(step) for step in range(50, 10_001, 50)]
            case "/difficulty/migration":
                rows = [[987_654] * (self.SIZE + 1)] * (self.SIZE + 1)
                return {
                    "before": 5000,
                    "after": 10_000,
                    "matrix": rows,
                    "newly_attempted": rows[0],
                    "unlocked": 987_654,
                    "unlocked_fraction": 0.123456,
                }
            case "/prompts":
                return {"items": [self._prompt(i) for i in range(50)], "next": "x"}
            case _:
                return {"items": [], "next": None}

    def _run(self) -> dict[str, Any]:
        return {
            "name": "large",
            "status": "running",
            "config": {
                "algorithm": "bapo",
                "seed": 1,
                "steps": 1_000_000,
                "task": {"train_prompts": 4096},
                "rollout": {"group_size": self.SIZE, "prompts_per_step": 4096},
            },
            "train_dataset": "t",
            "test_datasets": {"test": "h"},
            "current_step": 10_000,
            "attempt": 12_345,
            "changes": [],
            "created_at": "2025-01-01T00:00:00Z",
        }

    def _step(self, step: int) -> dict[str, Any]:
        rng = random.Random(step)
        return {
            "step": step,
            "r_tot": rng.random(),
            "c2": 0.2,
            "c3": 0.4,
            "counts": {"fresh": rng.randrange(3000), "reevaluated": 500, "replayed": 596},
            "rollouts": 65_536,
            "tokens": 268_435_456,
            "mean_reward": -12_345.678,
            "reward_parts": {"answer": 0.5, "format": -1e-6},
            "metrics": {
                "entropy": rng.random() * 1e-7,
                "staleness_mean": 123.456,
                "staleness_max": 9999.0,
                "seconds/update": 1234.5,
                "loss": -1e12 * rng.random(),
                **{f"metric/with/a/very/long/name/number/{i}": rng.random() for i in range(60)},
            },
            "bins": [rng.randrange(999) for _ in range(self.SIZE + 1)],
            "committed_at": "2025-01-01T00:00:00Z",
        }

    def _evaluation_set(self) -> dict[str, Any]:
        return {
            "name": "test",
            "primary": True,
            "dataset": "h",
            "samples": self.SIZE,
            "temperature": 1.0,
            "top_p": 1.0,
            "every": 20,
            "evaluations": [self._evaluation(version) for version in range(1, 10_001, 20)],
        }

    def _evaluation(self, version: int) -> dict[str, Any]:
        return {
            "version": version,
            "evaluation_set": "test",
            "scores": [{"metric": "mean", "k": self.SIZE, "value": 0.1, "low": 0.0, "high": 1.0}],
            "mean_accuracy": version / 20_000,
            "mean_reward": version / 20_000,
            "bins": [1] * (self.SIZE + 1),
            "prompts": 17,
            "tokens": 10**9,
        }

    def _bins(self, step: int) -> dict[str, Any]:
        return {"step": step, "bins": [58_823 + step] * (self.SIZE + 1), "unseen": 9}

    def _prompt(self, index: int) -> dict[str, Any]:
        return {
            "uid": f"{index}:" + "u" * 500,
            "payload": {"question": "long words " * 500, "answer": 10**15},
            "attempts": 9_999_999,
            "first_mean": 0.0,
            "last_mean": 0.5,
            "best_mean": 0.5,
            "first_solved_step": 1_000_000,
            "last_step": 1_000_000,
            "bin": 8,
        }


@pytest.mark.parametrize("width", [1400, 380])
def test_ten_thousand_steps_and_a_million_prompts(stack: Endpoints, page: Page, width: int) -> None:
    """Lists are requested in parts, nothing overflows, and drawing is fast."""
    large = Large()
    page.route("**/v1/**", large.answer)
    page.set_viewport_size({"width": width, "height": 800})
    for address, text in {
        "/runs/large": "10,000 / 1,000,000",
        "/runs/large/difficulty": "988K",
        "/runs/large/prompts": "9,999,999",
    }.items():
        visit(page, stack, address)
        expect(page.get_by_text(text).first).to_be_attached()
        expect(page.locator("[aria-busy]")).to_have_count(0)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, address
    visit(page, stack, "/runs/large")
    reward = page.get_by_role("slider", name="Reward", exact=True)
    expect(reward).to_have_attribute("aria-valuemax", "10000")
    drawn = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    times = []
    for changed in (width - 1, width) * 8:
        start = page.evaluate("performance.now()")
        page.set_viewport_size({"width": changed, "height": 800})
        page.evaluate(drawn)
        times.append(page.evaluate("performance.now()") - start)
    # The shortest time counts, because on a busy machine the others include waits for a core.
    assert min(times) < 500, f"{min(times):.0f} ms to draw all charts once"
    lists = [url for url in large.requested_urls if re.search(r"/(steps|prompts|history)\b", url)]
    assert lists
    assert all(re.search(r"(points|limit)=\d+", url) for url in lists)


def test_the_scale_test_answers_as_the_service_does() -> None:
    """The faked answers are valid answers of the service."""
    large = Large()
    wire.RunState.model_validate(large._run())
    wire.StepView.model_validate(large._step(1))
    wire.EvaluationSetView.model_validate(large._evaluation_set())
    wire.DifficultyBins.model_validate(large._bins(1))
    wire.DifficultyView.model_validate(large._prompt(1))
    wire.DifficultyMigration.model_validate(large._answer_of("/difficulty/migration", ""))
    json.dumps(large._answer_of("/steps", "points=400"))


# ---- the REST API -------------------------------------------------------------------------------


def test_the_page_of_the_api_lists_routes_with_scopes_and_fields(
    page: Page, stack: Endpoints
) -> None:
    page.goto(f"{stack.buffer_url}/docs")
    route = page.get_by_text("POST /v1/runs/{name}/stop", exact=True)
    route.click()
    details = page.locator("details", has=route)
    expect(details).to_contain_text("Scopes: run, admin, pipeline")
    expect(details).to_contain_text("reason")
    page.locator("summary", has_text="TokenCreate").first.click()
    expect(page.locator("details[open]").last).to_contain_text("expires")
