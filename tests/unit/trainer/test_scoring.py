"""Nothing is scored twice, and what is left out changes no bit of losses, gradients and weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bapo_core.config.presets import PRESETS
from services.buffer.api.wire import BatchManifest, ManifestMember
from services.trainer import update
from services.trainer.data import Batch
from services.trainer.steps import groups_to_score, logprobs_by_group
from services.trainer.update import Updater
from tests.unit.trainer import test_update as single
from tests.unit.trainer.test_methods import preset, updater_of

STEPS = 2

SAMPLED = ("mismatch/", "theory/", "divergence/")
"""Metrics that are of the groups of the first update under `correction: behavior`."""


def scored_rows(updater: Updater) -> list[int]:
    """Lets the updater note how many rows each of its scoring passes has; returns the list."""
    counts, score = [], updater.score

    def noted(batch: Batch, policy: Any = None, rows: Tensor | None = None) -> Tensor:
        counts.append(len(batch.lengths) if rows is None else len(rows))
        return score(batch, policy, rows)

    updater.score = noted  # type: ignore[method-assign]
    return counts


@pytest.fixture
def one_row_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs each row alone, so that a score has the same bits in whatever pass it is computed."""
    monkeypatch.setattr(
        update, "microbatches", lambda _, rows, *__, **___: list(torch.split(rows, 1))
    )


def train(updater: Updater) -> tuple[Tensor, list[dict[str, float]]]:
    metrics = [single.step(updater, number, single.batch()) for number in range(1, STEPS + 1)]
    return single.flat(updater.policy), metrics


@pytest.mark.usefixtures("one_row_each")
@pytest.mark.parametrize(
    ("algorithm", "overrides"),
    [
        *((algorithm, ()) for algorithm in sorted(PRESETS)),
        *((algorithm, ("optimizer.epochs=2",)) for algorithm in ("bapo", "grpo", "ppo")),
    ],
)
def test_weights_are_those_of_an_updater_that_scores_the_whole_batch_first(
    algorithm: str, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = preset(algorithm, *overrides)
    lean = train(updater_of(settings))
    monkeypatch.setattr(
        Updater, "_rows_to_score", lambda _, batch, *__: torch.arange(len(batch.lengths))
    )
    full = train(updater_of(settings))
    assert torch.equal(lean[0], full[0])
    for metrics, expected in zip(lean[1], full[1], strict=True):
        if settings.loss.correction.kind == "behavior":
            # They are of the first update's groups, a sample, or of the whole batch.
            sampled = {name for name in metrics if name.startswith(SAMPLED)}
            assert metrics.keys() - sampled == expected.keys() - sampled
            metrics, expected = (
                {name: values[name] for name in metrics.keys() - sampled}
                for values in (metrics, expected)
            )
        assert metrics == expected


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "dr_grpo", "bapo"])
def test_a_step_of_one_update_has_no_scoring_pass(algorithm: str) -> None:
    updater = updater_of(preset(algorithm, "optimizer.minibatch_prompts=6", "kl={coefficient: 0}"))
    counts = scored_rows(updater)
    single.step(updater, 1, single.batch())
    assert counts == []


def test_the_groups_of_the_first_update_are_not_scored_before_it() -> None:
    updater = updater_of(single.config("loss.correction=prox_current", "kl.coefficient=0"))
    counts = scored_rows(updater)
    single.step(updater, 1, single.batch())
    assert counts == [2 * single.G]  # of the second update


@pytest.mark.parametrize(
    "overrides",
    [
        (
            "advantage.estimator=reinforce_pp",
            "kl={coefficient: 0.1, placement: reward, reference: rollout}",
        ),
        ("loss.correction.weight_norm=batch",),
        ("loss.objective=clip_cov", "loss.objective={fraction: 0.2, covariances: [0, 9]}"),
    ],
    ids=["penalised rewards", "normalised weights", "statistics"],
)
def test_what_needs_all_scores_before_the_first_update_gets_them(
    overrides: tuple[str, ...],
) -> None:
    updater = updater_of(single.config("optimizer.minibatch_prompts=6", *overrides))
    counts = scored_rows(updater)
    single.step(updater, 1, single.batch())
    assert counts[0] == single.GROUPS * single.G


def test_under_the_behaviour_ratio_the_first_updates_groups_are_the_sample_of_the_metrics() -> None:
    """theta_t serves metrics alone there, so no pass scores it."""
    settings = single.config("loss.correction=behavior", "kl.coefficient=0")
    updater, data = updater_of(settings), single.batch()
    plan = single.make_plan(settings, 1, data.members, ranks=1, width=16)
    rows = data.rows_of(plan.updates[0][0])
    current = updater.score(data)
    counts = scored_rows(updater)
    metrics = single.step(updater, 1, data)
    assert counts == []
    mask = data.mask[rows]
    difference = (current - data.behavior_logprobs)[rows][mask].abs()
    assert metrics["mismatch/logprob_diff_mean"] == pytest.approx(
        float(difference.mean()), rel=1e-5
    )


def member(group_id: int, **changes: Any) -> ManifestMember:
    return single.batch().members[0].model_copy(update={"group_id": group_id, **changes})


def test_groups_of_the_batch_are_not_scored_again_for_the_store() -> None:
    """A group of which the batch has some responses, or a demonstration, is scored by itself."""
    manifest = BatchManifest(
        ready=True,
        step=1,
        c2=0.25,
        c3=0.5,
        r_tot=0.0,
        members=[member(1), member(2, rows=[0, 1]), member(3, demonstration="text")],
        record_proximal=[member(1), member(2), member(3), member(4)],
    )
    assert [scored.group_id for scored in groups_to_score(manifest)] == [2, 3, 4]
    data = single.batch()
    logprobs = torch.arange(data.mask.numel(), dtype=torch.float32).view(data.mask.shape)
    by_group = logprobs_by_group(data, logprobs)
    assert list(by_group) == [member.group_id for member in data.members]
    assert [value for response in by_group[2] for value in response] == logprobs[
        2 * single.G : 3 * single.G
    ][data.mask[2 * single.G : 3 * single.G]].tolist()
