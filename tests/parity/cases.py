"""Random ragged responses, and what bapo computes for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bapo_core.advantages import Responses, get_estimator, token_rewards
from bapo_core.config.estimators import ESTIMATOR_KINDS
from bapo_core.config.objectives import OBJECTIVE_KINDS
from bapo_core.losses import Aggregation, aggregate
from bapo_core.objectives import Tokens, get_objective
from tests.unit.core.test_objectives import flat


class Loss(NamedTuple):
    """A loss of a batch."""

    value: Tensor
    gradient: Tensor
    """(N, T) gradient with respect to the log-probs."""
    clipped: float
    """Share of the valid tokens that are clipped."""


@dataclass(frozen=True)
class Case:
    """Responses of different lengths, (N, T) each; what is masked has finite values."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor
    """Importance weights of tokens."""

    @property
    def response_weights(self) -> Tensor:
        """The importance weights with those of a response's first token for all of its tokens."""
        return self.weights[:, :1].expand_as(self.weights)


def make_case(seed: int, *, sign: int = 0, longest: int = 6, noise: float = 0.3) -> Case:
    """Draws 8 responses whose log-ratios have the standard deviation `noise`.

    All advantages get the `sign`, or signs of their own where it is 0.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        numbers = torch.rand(8, longest + 1, generator=generator, dtype=torch.float64)
        return low + (high - low) * numbers

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, longest + 1, (8, 1), generator=generator)
    old_logprobs = uniform(-3.0, -0.05)
    advantages = normal(8, 1)
    if sign:
        advantages = sign * (advantages.abs() + 0.1)
    else:
        advantages[3] = 0.0
    return Case(
        logprobs=old_logprobs + noise * normal(8, longest + 1),
        old_logprobs=old_logprobs,
        advantages=advantages.expand(8, longest + 1).clone(),
        mask=torch.arange(longest + 1) < lengths,
        weights=uniform(0.3, 2.0),
    )


CASES = {
    "mixed": make_case(1),
    "better responses only": make_case(2, sign=1),
    "worse responses only": make_case(3, sign=-1),
    "one token": make_case(4, longest=1),
    "stale": make_case(5, noise=1.5),
    "on policy": make_case(6, noise=0.0),
}


def single_token(log_ratio: float, *, advantage: float = 1.0) -> Case:
    """Returns one response of one token."""
    one = torch.ones(1, 1, dtype=torch.float64)
    return Case(-2 * one, (-2 - log_ratio) * one, advantage * one, one.bool(), one)


def our_loss(
    case: Case,
    objective: str,
    aggregation: Aggregation = "token-mean",
    *,
    weights: Tensor | None = None,
    longest: int = 1,
    **settings: Any,
) -> Loss:
    """Returns the loss of one of bapo's objectives, whose statistics are those of this batch."""
    logprobs = case.logprobs.clone().requires_grad_()
    section = OBJECTIVE_KINDS.sections[objective](**settings)
    tokens = Tokens(
        logprobs=logprobs,
        proximal_logprobs=case.old_logprobs,
        advantages=case.advantages,
        mask=case.mask,
        weights=torch.ones_like(case.weights) if weights is None else weights,
        pre_update_logprobs=case.logprobs,
        uniforms=torch.linspace(0.0, 0.9, case.mask.numel()).reshape(case.mask.shape),
    )
    selected = get_objective(objective)
    statistics: dict[str, float] = {}
    if selected.statistics is not None:
        statistics = selected.statistics(flat(tokens), section)
    losses, clipped = selected.loss(tokens, section, statistics)
    loss = aggregate(losses, case.mask, aggregation, longest=longest)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return Loss(loss.detach(), gradient, float(clipped.sum() / case.mask.sum()))


def assert_same(ours: Any, theirs: Any) -> None:
    """Compares values, and a loss also in its gradient, with a tolerance of 1e-6."""
    if isinstance(ours, Loss):
        assert_same(ours.value, theirs.value)
        assert_same(ours.gradient, theirs.gradient)
    else:
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6, check_dtype=False)


Groups = list[list[float]]

_RNG = torch.Generator().manual_seed(0)
GROUPS: dict[str, Groups] = {
    "binary": torch.randint(0, 2, (4, 5), generator=_RNG).double().tolist(),
    "real": torch.randn(3, 5, generator=_RNG, dtype=torch.float64).tolist(),
    "all right": [[1.0] * 5, [1.0] * 5],
    "all wrong": [[0.0] * 5, [0.0] * 5],
    "ragged": [[1.0, 0.0, 0.0], [0.5, 0.25], [1.0, 1.0], [0.0, 0.2, 0.7, 1.0]],
}


def responses_of(groups: Groups, *, penalised: bool = False) -> Responses:
    """Returns responses of random lengths, whose tokens have penalties if `penalised`."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.tensor([len(group) for group in groups])
    lengths = torch.randint(1, 7, (int(sizes.sum()), 1), generator=generator)
    mask = torch.arange(7) < lengths
    penalties = torch.linspace(-0.2, 0.3, mask.numel(), dtype=torch.float64).reshape(mask.shape)
    rewards = torch.zeros(len(groups), int(sizes.max()), dtype=torch.float64)
    for row, group in zip(rewards, groups, strict=True):
        row[: len(group)] = torch.tensor(group, dtype=torch.float64)
    return Responses(rewards, mask, penalties * mask if penalised else penalties * 0, sizes)


def rewards_by_token(responses: Responses) -> Tensor:
    """Returns the rewards minus the penalties, as verl takes them, (M, R)."""
    rewards = responses.by_row(responses.rewards)[:, 0]
    return token_rewards(rewards, responses.mask) - responses.penalties


def our_advantages(responses: Responses, estimator: str, **settings: Any) -> Tensor:
    """Returns the advantages of tokens, (M, R); 0 where masked."""
    config = ESTIMATOR_KINDS.sections[estimator](**settings)
    advantages = get_estimator(estimator)(responses, config, moments)
    return torch.where(responses.mask, advantages, 0.0)


def moments(values: Tensor) -> tuple[float, float, float]:
    """Returns the statistics that estimators get of a single rank."""
    return float(values.mean()), float(values.var(correction=0)), float(len(values))
