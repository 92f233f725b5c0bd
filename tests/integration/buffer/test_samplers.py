"""Adaptive samplers through the real service, on real Postgres and S3.

What the service draws is compared with a transcription in plain Python of the papers' formulas,
from the rewards that the test posted itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from bapo_core.seeding import derive_rng
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.buffer.api.trajectories import encode_groups
from services.common.errors import ServiceError
from services.datasets import load_datasets
from services.stack.stack import Endpoints
from tests.integration.support.driver import Driver, create_run, small_config, snapshot

B, G, CANDIDATES, PROMPTS = 8, 4, 4, 80
TASK = {"options": {"template": "short"}, "train_prompts": PROMPTS, "test_prompts": 4}
Drive = Callable[..., Driver]


@pytest.fixture
def drive(stack: Endpoints, request: pytest.FixtureRequest) -> Drive:
    """Returns a function that creates a run named after the test, with MoPPS's sampler."""

    def make(suffix: str = "", *, sampler: dict[str, Any] | None = None, **sections: Any) -> Driver:
        name = request.node.name.split("[")[0].replace("_", "-")[:50] + suffix
        settings = {"kind": "mopps", "candidates": CANDIDATES, "decay": 0.5, **(sampler or {})}
        if settings["kind"] in ("uniform", "exgrpo"):
            settings = {
                key: settings[key] for key in settings if key not in ("candidates", "decay")
            }
        return Driver(stack, small_config(name, task=TASK, sampler=settings, **sections))

    return make


class Reference:
    """MoPPS in plain Python, which draws from the closed form of the recorded groups."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.settings = driver.config.sampler
        self.uids = [prompt.uid for prompt in load_datasets(driver.config)[0].prompts]
        self.results: dict[str, list[tuple[int, int]]] = {}
        """(step, correct) of each prompt's fresh groups, in order."""

    def record(self, step: int) -> None:
        for group in self.driver.groups(step):
            self.results.setdefault(group.prompt_uid, []).append((step, group.correct))

    def beta(self, uid: str, as_of: int) -> tuple[float, float]:
        results = [result for result in self.results.get(uid, []) if result[0] <= as_of]
        s = [correct for _, correct in results]
        half_life = self.settings.half_life or float("inf")
        weights = [
            self.settings.decay ** (len(s) - i) * 0.5 ** ((as_of - step) / half_life)
            for i, (step, _) in enumerate(results, start=1)
        ]
        a = 1 + sum(weight * k for weight, k in zip(weights, s, strict=True))
        b = 1 + sum(weight * (G - k) for weight, k in zip(weights, s, strict=True))
        return a, b

    def draw(self, step: int, as_of: int) -> list[str]:
        seed = self.driver.config.seed
        chosen = derive_rng(seed, "candidates", step).sample(range(PROMPTS), CANDIDATES * B)
        rng = derive_rng(seed, "mopps", step, 0)
        distances = []
        for position in chosen:
            g = rng.betavariate(*self.beta(self.uids[position], as_of))
            distances.append(((g - 0.5) ** 2, self.uids[position]))
        return [uid for _, uid in sorted(distances)[:B]]


def drawn(driver: Driver, step: int) -> list[str]:
    """Returns the uids of the fresh prompts of a step, without waiting for them."""
    return [prompt.uid for prompt in ask(driver, step).prompts]


def ask(driver: Driver, step: int, generation_round: int = 0) -> wire.StepPrompts:
    path = f"/v1/runs/{driver.client.run}/steps/{step}/prompts"
    parameters = {"wait": 0, "generation_round": generation_round}
    answer = driver.client._send("POST", path, params=parameters)
    return wire.StepPrompts.model_validate(answer.json())


# With v = 2 and the paper's phase, the syncs are at the steps 2, 4, 6, ...
AS_OF_SYNC = {1: 0, 2: 1, 3: 1, 4: 3, 5: 3, 6: 5, 7: 5, 8: 7}


@pytest.mark.parametrize("half_life", [None, 2.0])
@pytest.mark.parametrize("as_of", ["sync", "step"])
def test_prompts_are_those_of_the_papers_formulas(
    drive: Drive, as_of: str, half_life: float | None
) -> None:
    """With a half-life, results fade with the steps since, whether the prompt came back or not."""
    sampler = {"posterior_as_of": as_of, "half_life": half_life}
    driver = drive(f"-{as_of}-{half_life or 0:.0f}", sampler=sampler)
    reference = Reference(driver)
    for step, last_sync in AS_OF_SYNC.items():
        expected = reference.draw(step, last_sync if as_of == "sync" else step - 1)
        assert drawn(driver, step) == expected
        reference.record(step)
        driver.run_step(step)
    assert max(map(len, reference.results.values())) >= 3, "no prompt came back often enough"


def test_the_prompts_of_a_window_are_known_once_the_step_before_it_is_committed(
    drive: Drive,
) -> None:
    driver = drive()
    assert ask(driver, 1).ready
    assert not ask(driver, 2).ready
    assert not ask(driver, 3).ready
    driver.run_step(1)
    assert ask(driver, 2).ready
    assert ask(driver, 3).ready
    assert not ask(driver, 4).ready
    early = drawn(driver, 3)
    driver.run_step(2)
    assert drawn(driver, 3) == early


def test_with_as_of_step_the_prompts_of_a_step_wait_for_the_commit_before_it(drive: Drive) -> None:
    driver = drive(sampler={"posterior_as_of": "step"})
    for step in range(1, 4):
        driver.run_step(step)
    assert ask(driver, 4).ready
    assert not ask(driver, 5).ready
    body = encode_groups(driver.groups(4))
    with pytest.raises(ServiceError, match="step 4 is not committed; the prompts of step 5 depend"):
        driver.client.post_groups(5, "fresh", body)


def test_no_prompt_comes_twice_in_the_rounds_of_dynamic_sampling(drive: Drive) -> None:
    driver = drive(
        sampler={"candidates": 3},
        rollout={"prompts_per_step": B, "group_size": G, "max_generation_rounds": 3},
    )
    uids = [prompt.uid for number in range(3) for prompt in ask(driver, 1, number).prompts]
    assert len(set(uids)) == len(uids) == 3 * B


def test_a_committed_step_keeps_its_prompts(drive: Drive) -> None:
    driver = drive()
    before = {}
    for step in range(1, 7):
        before[step] = drawn(driver, step)
        driver.run_step(step)
    assert {step: drawn(driver, step) for step in range(1, 7)} == before
    assert len({tuple(uids) for uids in before.values()}) == 6


@pytest.mark.parametrize("as_of", ["sync", "step"])
def test_a_rewound_run_draws_the_same_prompts_again(drive: Drive, as_of: str) -> None:
    driver = drive(f"-{as_of}", sampler={"posterior_as_of": as_of})
    for step in range(1, 4):
        driver.run_step(step)
    driver.client.record_checkpoint(3, "a" * 64)
    at_checkpoint, posteriors_before = snapshot(driver), posteriors(driver)
    drawn_first = {}
    for step in range(4, 9):
        drawn_first[step] = drawn(driver, step)
        driver.run_step(step)
    at_end, posteriors_after = snapshot(driver), posteriors(driver)
    assert driver.client.begin_attempt().current_step == 3
    assert snapshot(driver) == at_checkpoint
    assert posteriors(driver) == posteriors_before
    assert not ask(driver, 6).ready, "the commit that its prompts depend on was undone"
    for step in range(4, 9):
        assert drawn(driver, step) == drawn_first[step]
        driver.run_step(step)
    assert snapshot(driver) == at_end
    assert posteriors(driver) == posteriors_after


def posteriors(driver: Driver) -> list[tuple[int, int, float, float]]:
    url = driver.stack.database_url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(url) as connection:
        return list(
            connection.execute(
                "select position, s.step, a, b from sampler_posterior s "
                "join run on run.id = s.run_id where run.name = %s order by 1, 2",
                (driver.config.name,),
            )
        )


def test_the_uniform_sampler_stores_nothing(drive: Drive) -> None:
    driver = drive(sampler={"kind": "uniform"})
    driver.run_step(1)
    assert posteriors(driver) == []
    assert not any(name.startswith("sampler/") for name in driver.client.steps()[0].metrics)
    uid = drawn(driver, 1)[0]
    assert driver.client.decision(1, uid).draw is None
    assert driver.client.prompt_history(uid).posterior is None


def test_metrics_of_steps_report_how_well_the_sampler_predicted_them(drive: Drive) -> None:
    driver = drive()
    reference = Reference(driver)
    for step in range(1, 4):
        reference.record(step)
        driver.run_step(step)
    metrics = driver.client.steps()[2].metrics
    groups = driver.groups(3)
    means = []
    for group in groups:
        a, b = reference.beta(group.prompt_uid, AS_OF_SYNC[3])
        means.append(a / (a + b))
    assert metrics["sampler/predicted_success"] == pytest.approx(sum(means) / B)
    realised = sum(group.correct for group in groups) / (B * G)
    assert metrics["sampler/realised_success"] == pytest.approx(realised)


# ---- an earlier run -----------------------------------------------------------------------------


def test_an_earlier_run_gives_the_first_posteriors(drive: Drive) -> None:
    first = drive("-first", sampler={"kind": "uniform"})
    reference = Reference(first)
    for step in range(1, 13):
        reference.record(step)
        first.run_step(step)
    second = drive("-second", sampler={"prior_run": first.config.name}, seed=7)
    before = posteriors(second)
    by_position = {position: (a, b) for position, step, a, b in before if step == 0}
    assert len(before) == len(by_position) == len(reference.results)
    reference.settings = second.config.sampler
    for position, beta in by_position.items():
        assert beta == pytest.approx(reference.beta(reference.uids[position], as_of=12))
    reference.driver = second
    assert drawn(second, 1) == reference.draw(1, as_of=12)
    # A group of this run counts as newer than all of the earlier run.
    group = second.groups(1)[0]
    a, b = reference.beta(group.prompt_uid, as_of=12)
    second.run_step(1)
    posterior = second.client.prompt_history(group.prompt_uid).posterior
    assert posterior is not None
    assert posterior.a == pytest.approx(0.5 * a + 0.5 + group.correct)
    assert posterior.b == pytest.approx(0.5 * b + 0.5 + G - group.correct)


def test_the_prior_stays_when_the_earlier_run_goes_on_or_is_deleted(drive: Drive) -> None:
    first = drive("-first", sampler={"kind": "uniform"})
    first.run_step(1)
    second = drive("-second", sampler={"prior_run": first.config.name})
    before, prompts = posteriors(second), drawn(second, 1)
    first.run_step(2)
    create_run(second.client, second.config)
    assert posteriors(second) == before
    first.client.stop()
    first.client.delete_run()
    create_run(second.client, second.config)
    assert (posteriors(second), drawn(second, 1)) == (before, prompts)
    second.run_step(1)
    second.client.rewind(0)
    assert posteriors(second) == before


def test_an_earlier_run_that_cannot_be_used_is_refused_at_the_start(drive: Drive) -> None:
    with pytest.raises(ServiceError, match="there is no run 'nobody'; `bapo runs` lists them"):
        drive("-a", sampler={"prior_run": "nobody"})
    other = drive("-other", sampler={"kind": "uniform"}, seed=1)
    with pytest.raises(ServiceError, match="has no committed step, so it has no results"):
        drive("-b", sampler={"prior_run": other.config.name})
    other.run_step(1)
    config = small_config(
        "another-dataset",
        task={**TASK, "data_seed": 9},
        sampler={"kind": "mopps", "prior_run": other.config.name},
    )
    with pytest.raises(ServiceError, match=r"has the training dataset .* name a run on"):
        Driver(other.stack, config)
    revisits = {"kind": "exgrpo", "prior_run": other.config.name}
    with pytest.raises(ServiceError, match="has groups of 4 responses, but this run has groups of"):
        drive("-c", sampler=revisits, rollout={"prompts_per_step": B, "group_size": 2})
    names = {run.name for run in BufferClient(other.stack.buffer_url, other.stack.token).runs()}
    assert "another-dataset" not in names, "a refused run leaves nothing"


def test_a_dataset_that_cannot_give_the_candidates_is_refused_at_the_start(
    stack: Endpoints,
) -> None:
    config = small_config("too-few", task=TASK, sampler={"kind": "mopps", "candidates": 4})
    client = BufferClient(stack.buffer_url, stack.token, run=config.name)
    datasets = load_datasets(config)
    for dataset in datasets.test.values():
        client.upload_dataset(dataset.name, dataset.prompts)
    client.upload_dataset("only-31", datasets.train.prompts[:31])
    request = wire.RunCreate(
        name=config.name,
        config=config.model_dump(mode="json"),
        train_dataset="only-31",
        test_datasets=datasets.test_names,
    )
    message = r"'only-31' has 31 prompts, but one step may draw 32 \(rollout.prompts_per_step x "
    with pytest.raises(ServiceError, match=message):
        client.create_run(request)


# ---- why was this prompt drawn? -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mopps", "dots"])
def test_every_prompt_has_an_explanation_of_why_it_was_drawn_or_not(
    drive: Drive, kind: str
) -> None:
    driver = drive(f"-{kind}", sampler={"kind": kind})
    for step in range(1, 5):
        driver.run_step(step)
    uids = drawn(driver, 4)
    ranks: dict[int, str] = {}
    for prompt in load_datasets(driver.config)[0].prompts:
        draw = driver.client.decision(4, prompt.uid).draw
        assert draw is not None
        assert (draw.as_of_step, draw.candidates, draw.sampler) == (3, CANDIDATES * B, kind)
        assert f"posterior Beta({draw.a:.4g}, {draw.b:.4g}) as of step 3" in draw.reason
        if draw.rank is None:
            assert "not among the 32 candidates of this step" in draw.reason
        else:
            assert draw.draw is not None
            ranks[draw.rank] = prompt.uid
            assert f"rank {draw.rank} of the 32 candidates of round 0" in draw.reason
    assert sorted(ranks) == list(range(1, CANDIDATES * B + 1))
    assert [ranks[rank] for rank in range(1, B + 1)] == uids
    fresh = driver.client.decision(4, ranks[B + 1]).considered[0]
    assert fresh.outcome == "not_considered"
    assert fresh.reason.startswith(f"not drawn: rank {B + 1} of the 32 candidates")


def test_dots_replays_mixed_groups_of_any_age_in_half_of_the_batch(drive: Drive) -> None:
    driver = drive(
        algorithm="dots",
        sampler={"kind": "dots"},
        sync={"every": 1},
        reevaluate={"enabled": False},
    )
    assert driver.config.batch_capacity == 2 * B
    ages = set()
    for step in range(1, 10):
        batch = driver.run_step(step)
        assert batch.counts["fresh"] == B
        replayed = [member for member in batch.members if member.source == "replayed"]
        assert len(replayed) <= B
        assert all(0 < member.correct < member.size for member in replayed)
        assert len({member.prompt_uid for member in batch.members}) == len(batch.members)
        ages |= {step - member.step for member in replayed}
    assert max(ages) > 3
