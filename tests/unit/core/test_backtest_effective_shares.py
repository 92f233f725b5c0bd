"""A back-test estimates the effective share of replayed tokens from what the trainer measured."""

from __future__ import annotations

import pytest

from bapo_core.backtest import BackTest, EffectiveShares, GroupLength, RecordedStep
from bapo_core.config import config_from
from bapo_core.types import GroupSummary


def metrics(**shares: float) -> dict[str, float]:
    return {f"divergence/age_{age}/ess_fraction": share for age, share in shares.items()}


SHARES = EffectiveShares(
    {1: {"loss": 1.0}, 2: metrics(**{"1": 0.9, "2": 0.6}), 3: metrics(**{"1": 0.8, "3_4": 0.5})}
)


@pytest.mark.parametrize(
    ("step", "age", "expected"),
    [
        (2, 1, (0.9, True)),
        (3, 1, (0.8, True)),
        (1, 1, (pytest.approx(0.85), True)),  # the mean of the steps that measured it
        (2, 4, (0.5, True)),
        (3, 7, (0.5, False)),  # that of the next younger age
        (3, 0, (None, False)),
    ],
)
def test_the_share_of_an_age_is_that_of_the_step_or_of_the_run(
    step: int, age: int, expected: tuple[float | None, bool]
) -> None:
    assert SHARES.of_age(step, age) == expected


def recorded_step(step: int) -> RecordedStep:
    """Returns a step with one group that is stored and replayed, of 10 tokens a step."""
    group = GroupSummary(step, f"prompt-{step}", step, 2, 4, policy_version=step)
    lengths = {step: GroupLength(10 * step, 1)}
    return RecordedStep(step, [group], [], lengths, {group.prompt_uid: step})


def test_the_shares_of_groups_add_up_by_their_tokens() -> None:
    config = config_from(
        {
            "name": "shares",
            "rollout": {"prompts_per_step": 4, "group_size": 4},
            "replay": {"select": "mixed"},
            "optimizer": {"minibatch_prompts": 4},
        }
    )
    test = BackTest(config, shares=SHARES)
    for step in (1, 2, 3):
        test.add(recorded_step(step))
    result = test.result()
    # Step 2 replays the group of step 1; step 3 replays those of steps 1 and 2.
    assert result.replayed == 3
    assert result.replay_ess_measured == 1.0
    assert result.replay_ess == pytest.approx(40 / (10 / 0.9 + 10 / 0.6 + 20 / 0.8))
    assert result.tokens == 10 + 20 + 30 + 40
    assert (result.cut_off, result.without_loss) == (0.25, 0.0)


def test_cut_off_responses_have_no_loss_if_they_are_masked() -> None:
    config = config_from(
        {
            "name": "masked",
            "rollout": {"prompts_per_step": 4, "group_size": 4},
            "loss": {"mask_truncated": True},
            "optimizer": {"minibatch_prompts": 4},
        }
    )
    test = BackTest(config)
    test.add(recorded_step(1))
    assert test.result().without_loss == test.result().cut_off == 0.25
    assert test.result().replay_ess is None
