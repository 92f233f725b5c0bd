"""Estimators of advantages equal direct transcriptions of their papers' equations."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, pstdev, stdev

import pytest
import torch
from torch import Tensor

from bapo_core.advantages import ESTIMATORS, Responses, get_estimator
from bapo_core.config import ConfigError
from bapo_core.config.estimators import ESTIMATOR_KINDS
from tests.unit.core.test_plug_ins import write_distribution

Groups = list[list[float]]

RNG = random.Random(0)
GROUPS: dict[str, Groups] = {
    "binary": [[float(RNG.random() < p) for _ in range(5)] for p in (0.2, 0.5, 0.8)],
    "real": [[RNG.gauss(0.4, 1) for _ in range(5)] for _ in range(3)],
    "all right": [[1.0] * 5, [1.0] * 5],
    "all wrong": [[0.0] * 5, [0.0] * 5],
    "one group of two": [[1.0, 0.0]],
    "ragged": [[1.0, 0.0, 0.0], [0.5, 0.25], [RNG.gauss(0.4, 1) for _ in range(6)], [1.0, 1.0]],
}


def moments(values: Tensor) -> tuple[float, float, float]:
    return float(values.mean()), float(values.var(correction=0)), float(len(values))


def lengths_of(groups: Groups) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randint(1, 6) for _ in group] for group in groups]


def responses_of(groups: Groups) -> Responses:
    flat = [length for row in lengths_of(groups) for length in row]
    mask = torch.arange(max(flat) + 1) < torch.tensor(flat)[:, None]
    penalties = torch.full(mask.shape, math.nan, dtype=torch.float64)
    penalties[mask] = torch.linspace(-0.2, 0.3, int(mask.sum()), dtype=torch.float64)
    sizes = [len(group) for group in groups]
    # Padding has no influence, whatever its rewards.
    padded = [[*group, *[0.0] * (max(sizes) - len(group))] for group in groups]
    rewards = torch.tensor(padded, dtype=torch.float64)
    if len(set(sizes)) == 1:
        return Responses(rewards, mask, penalties)
    return Responses(rewards, mask, penalties, torch.tensor(sizes))


def estimated(name: str, groups: Groups, **options: object) -> list[list[float]]:
    """Returns the advantages of each response's tokens."""
    responses = responses_of(groups)
    section = ESTIMATOR_KINDS.section_of(name)
    assert section is not None
    settings = section(**options)
    advantages = get_estimator(name)(responses, settings, moments).expand(responses.mask.shape)
    return [row[valid].tolist() for row, valid in zip(advantages, responses.mask, strict=True)]


# ---- transcriptions, which return the advantage of each response ----


def grpo(groups: Groups) -> list[float]:
    return [(r - fmean(g)) / math.sqrt(pstdev(g) ** 2 + 1e-6) for g in groups for r in g]


def dr_grpo(groups: Groups) -> list[float]:
    return [r - fmean(g) for g in groups for r in g]


def lite_ppo(groups: Groups) -> list[float]:
    rewards = [r for g in groups for r in g]
    return [(r - fmean(g)) / (stdev(rewards) + 1e-6) for g in groups for r in g]


def batch_population(groups: Groups) -> list[float]:
    rewards = [r for g in groups for r in g]
    return [(r - fmean(g)) / math.sqrt(pstdev(rewards) ** 2 + 1e-6) for g in groups for r in g]


def rloo(groups: Groups) -> list[float]:
    """The baseline of a response is the mean of the others."""
    return [r - (sum(g) - r) / (len(g) - 1) for g in groups for r in g]


def opo(groups: Groups) -> list[float]:
    advantages = []
    for g, lengths in zip(groups, lengths_of(groups), strict=True):
        baseline = sum(n * r for n, r in zip(lengths, g, strict=True)) / sum(lengths)
        advantages += [r - baseline for r in g]
    return advantages


def maxrl(groups: Groups) -> list[float]:
    return [(r - fmean(g)) / (fmean(g) + 1e-6) for g in groups for r in g]


@pytest.mark.parametrize("groups", GROUPS.values(), ids=list(GROUPS))
@pytest.mark.parametrize(
    ("name", "options", "transcription"),
    [
        ("group", {}, grpo),
        ("group", {"scale": "none"}, dr_grpo),
        ("group", {"scale": "batch", "std": "sample"}, lite_ppo),
        ("group", {"scale": "batch"}, batch_population),
        ("rloo", {}, rloo),
        ("opo", {}, opo),
        ("maxrl", {}, maxrl),
    ],
)
def test_a_response_gets_the_advantage_of_the_equation(
    name: str,
    options: dict[str, object],
    transcription: Callable[[Groups], list[float]],
    groups: Groups,
) -> None:
    for tokens, expected in zip(
        estimated(name, groups, **options), transcription(groups), strict=True
    ):
        assert tokens == pytest.approx([expected] * len(tokens), abs=1e-9)


def whitened(rows: list[list[float]]) -> list[list[float]]:
    values = [value for row in rows for value in row]
    scale = math.sqrt(stdev(values) ** 2 + 1e-8)
    return [[(value - fmean(values)) / scale for value in row] for row in rows]


@pytest.mark.parametrize("groups", GROUPS.values(), ids=list(GROUPS))
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_pp_whitens_discounted_returns(groups: Groups, gamma: float) -> None:
    responses = responses_of(groups)
    rewards = [r for g in groups for r in g]
    returns = []
    for reward, penalties, valid in zip(rewards, responses.penalties, responses.mask, strict=True):
        by_token = [-penalty for penalty in penalties[valid].tolist()]
        by_token[-1] += reward
        count = len(by_token)
        returns.append(
            [sum(gamma ** (k - t) * by_token[k] for k in range(t, count)) for t in range(count)]
        )
    advantages = estimated("reinforce_pp", groups, gamma=gamma)
    for tokens, expected in zip(advantages, whitened(returns), strict=True):
        assert tokens == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=list(GROUPS))
def test_reinforce_pp_baseline_whitens_rewards_minus_the_mean_of_their_group(
    groups: Groups,
) -> None:
    lengths = [length for row in lengths_of(groups) for length in row]
    rows = [[a] * length for a, length in zip(dr_grpo(groups), lengths, strict=True)]
    advantages = estimated("reinforce_pp_baseline", groups)
    for tokens, expected in zip(advantages, whitened(rows), strict=True):
        assert tokens == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", ["group", "rloo", "opo", "maxrl", "reinforce_pp_baseline"])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
def test_equal_rewards_give_exactly_zero(name: str, reward: float) -> None:
    advantages = estimated(name, [[reward] * 7, [reward] * 7])
    assert not any(value for row in advantages for value in row)


@pytest.mark.parametrize("name", ["group", "rloo", "opo", "maxrl"])
def test_a_group_of_one_response_gets_exactly_zero(name: str) -> None:
    advantages = estimated(name, [[1.0, 0.0, 0.5], [0.7]])
    assert advantages[:3] == estimated(name, [[1.0, 0.0, 0.5]])
    assert not any(advantages[3])


def test_the_configuration_knows_every_estimator() -> None:
    assert {*ESTIMATORS, "gae"} == ESTIMATOR_KINDS.sections.keys()


def test_an_estimator_of_an_installed_package_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "def rewards(responses, settings, moments):\n    return responses.rewards.view(-1, 1)\n"
    write_distribution(tmp_path, "bapo-raw", "raw = bapo_raw:rewards", code, "bapo.estimators")
    assert estimated("raw", [[1.0, 0.5]]) == [[1.0] * 2, [0.5] * 5]
    with pytest.raises(ConfigError, match=r"no estimator 'other'; known estimators: .*, raw"):
        get_estimator("other")
