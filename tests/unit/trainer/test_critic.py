"""BA-PPO's critic: its rewards and advantages, its clipped loss, and that it learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bapo_core.advantages import gae, token_rewards
from services.trainer import attention
from services.trainer.critic import Critic, CriticTrainer
from services.trainer.micro_batches import MicroBatch
from services.trainer.policy import Policy
from services.trainer.ranks import Ranks
from services.trainer.update import Updater
from tests.micro import micro_model
from tests.unit.trainer import test_update as single

ALONE = Ranks(0, 1)


def settings(*overrides: str) -> Any:
    return single.config(
        "advantage={estimator: gae, critic: {learning_rate: 0.01, clip: 10}}", *overrides
    )


def critic(**changes: Any) -> Critic:
    model = micro_model(**changes)
    model.set_attn_implementation(attention.IMPLEMENTATION)
    return Critic(Policy(model).eval())


def packed(batch: Any, *parts: torch.Tensor | None) -> list[MicroBatch]:
    return [MicroBatch.of(batch, rows, torch.device("cpu")) for rows in parts]


def all_rows(batch: Any) -> list[MicroBatch]:
    return packed(batch, torch.arange(len(batch.lengths)))


def test_the_last_token_of_a_response_gets_its_reward() -> None:
    batch = single.batch()
    rewards = token_rewards(batch.row_rewards, batch.mask)
    assert torch.equal(rewards.sum(dim=1), batch.row_rewards)
    last = batch.mask.sum(dim=1) - 1
    assert torch.equal(rewards[torch.arange(len(last)), last], batch.row_rewards)


def test_advantages_are_the_whitened_gae_of_the_values() -> None:
    batch = single.batch()
    discounted = settings("advantage.gamma=0.9", "advantage.lam=0.8")
    trainer = CriticTrainer(discounted, critic(), ALONE)
    with torch.no_grad():
        trainer.critic.value.weight.normal_(generator=torch.Generator().manual_seed(1))
    advantages, targets, _ = trainer.advantages(batch, all_rows(batch))
    assert targets.old_values[batch.mask].std() > 0.1
    plain, returns = gae(
        token_rewards(batch.row_rewards, batch.mask),
        targets.old_values,
        batch.mask,
        gamma=0.9,
        lam=0.8,
    )
    torch.testing.assert_close(targets.returns, returns)
    valid = plain[batch.mask]
    expected = (valid - valid.mean()) / (valid.var() + 1e-8).sqrt()
    torch.testing.assert_close(advantages[batch.mask], expected, atol=1e-5, rtol=1e-5)
    assert not advantages[~batch.mask].any()
    raw = CriticTrainer(settings("advantage.whiten=false"), critic(), ALONE)
    unwhitened, _, _ = raw.advantages(batch, all_rows(batch))
    # With values of 0 and no discount, every token gets the reward itself.
    rewards = batch.row_rewards[:, None].expand_as(batch.mask)
    torch.testing.assert_close(unwhitened, torch.where(batch.mask, rewards, 0.0))


def test_values_do_not_depend_on_how_sequences_are_packed() -> None:
    batch = single.batch()
    trainer = CriticTrainer(settings(), critic(), ALONE)
    with torch.no_grad():
        trainer.critic.value.weight.fill_(0.1)
    rows = torch.arange(len(batch.lengths))
    _, together, _ = trainer.advantages(batch, packed(batch, rows))
    _, split, _ = trainer.advantages(batch, packed(batch, rows[::2], rows[1::2], None))
    torch.testing.assert_close(together.old_values, split.old_values, atol=1e-6, rtol=0)


def test_a_value_beyond_the_clip_range_gets_no_gradient_away_from_it() -> None:
    """Beyond the clip range the clipped square is the larger one, and has no gradient."""
    batch = single.batch()
    trainer = CriticTrainer(settings("advantage.critic.clip=0.01"), critic(), ALONE)
    _, targets, _ = trainer.advantages(batch, all_rows(batch))
    scale = batch.mask / batch.mask.sum()
    with torch.no_grad():
        trainer.critic.value.bias.fill_(0.5)  # towards the rewards of 1, away from those of 0
    trainer.backward(*all_rows(batch), targets, scale, 1.0)
    right = batch.row_rewards == 1.0
    assert right.any()
    gradient = trainer.critic.value.bias.grad
    assert gradient is not None
    # Only tokens of responses without reward have a gradient: V - 0, times their share.
    share = float(scale[~right].sum())
    assert float(gradient) == pytest.approx(0.5 * share, rel=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_the_critic_learns_beside_the_policy(tied: bool) -> None:
    model = micro_model(tie_word_embeddings=tied)
    model.set_attn_implementation(attention.IMPLEMENTATION)
    policy = Policy(model).eval()
    slow = settings("optimizer.learning_rate=0.001")
    updater = Updater(slow, policy, ALONE, None, critic(tie_word_embeddings=tied, seed=1))
    batch = single.batch()
    metrics = [single.step(updater, number, batch) for number in range(1, 13)]
    assert metrics[0]["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[-1]["critic/explained_variance"] > 0.3
    assert metrics[-1]["critic/loss"] < metrics[0]["critic/loss"] / 2
    assert metrics[0]["critic/gradient_norm"] > 0
    assert not [name for name in metrics[0] if name.startswith("theory/")]


def test_other_algorithms_have_no_critic() -> None:
    updater = single.updater_of(single.config())
    assert updater.critic is None
    assert list(updater.modules) == ["model"]
