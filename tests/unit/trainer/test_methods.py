"""Every preset trains, and statistics of an update depend on its tokens alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bapo_core.config import PRESETS, RunConfig, load_config
from bapo_core.objectives import Objective, TokenLosses, Tokens
from services.buffer.api.trajectories import SCHEMA
from services.trainer.critic import Critic
from services.trainer.data import Batch, collate
from services.trainer.ranks import Ranks
from services.trainer.update import Updater
from services.trainer.update_statistics import draw_tokens
from tests.integration.support.ranks_program import batch_of_rank
from tests.stand_in_gpu import stand_in_gpu
from tests.unit.trainer import test_update as single

STEPS = 3
WITHOUT_STATISTICS = [
    ("loss.objective=gspo", "loss.correction.weight_level=geometric"),
    ("loss.objective=cispo", "loss.aggregation=seq-mean-token-sum"),
    ("loss.objective=sapo", "loss.aggregation=seq-mean-token-sum-norm"),
    (
        "loss.objective=gmpo",
        "loss.correction.weight_level=sequence",
        "loss.aggregation=seq-mean-token-mean",
    ),
    ("loss.objective=topr", "loss.correction=behavior"),
]
WITH_STATISTICS = [
    ("loss.objective=adaptive_clipping", "loss.correction=behavior"),
    ("loss.objective=m2po", "loss.correction=behavior"),
    ("loss.objective=m2po", "loss.correction=behavior", "loss.objective.rule=clip"),
    ("loss.objective=clip_cov", "loss.objective={fraction: 0.2, covariances: [0, 9]}"),
    ("loss.objective=kl_cov", "loss.objective.fraction=0.2"),
]


def preset(algorithm: str, *overrides: str) -> RunConfig:
    """Returns the configuration of a preset in the sizes of the tests' model."""
    return single.config(f"algorithm={algorithm}", *overrides)


def updater_of(config: RunConfig, device: str = "cpu") -> Updater:
    policy = single.policy().to(device)
    reference = single.policy(seed=1).to(device) if config.kl.reference == "initial" else None
    critic = Critic(single.policy()).to(device) if config.advantage.estimator == "gae" else None
    return Updater(config, policy, Ranks(0, 1), reference, critic)


def train_steps(updater: Updater) -> list[dict[str, float]]:
    return [single.step(updater, number, single.batch()) for number in range(1, STEPS + 1)]


@pytest.mark.parametrize("algorithm", sorted(PRESETS))
def test_every_preset_trains(algorithm: str) -> None:
    updater = updater_of(preset(algorithm))
    before = single.flat(updater.policy)
    for metrics in train_steps(updater):
        assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())
        assert 0.0 <= metrics["clip_fraction"] <= 1.0
        assert metrics["gradient_norm"] > 0.0
    after = single.flat(updater.policy)
    assert after.isfinite().all()
    assert not torch.equal(after, before)


@pytest.mark.parametrize("algorithm", ["bapo", "grpo", "gspo", "kl_cov", "luffy", "m2po", "ppo"])
def test_updates_on_a_gpu_are_those_on_a_cpu(algorithm: str) -> None:
    """With a reference, statistics of all tokens, demonstrations, and a critic."""
    on_cpu = train_steps(updater_of(preset(algorithm)))
    with stand_in_gpu():
        on_gpu = train_steps(updater_of(preset(algorithm), "cuda"))
    for metrics, expected in zip(on_gpu, on_cpu, strict=True):
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "opo", "maxrl", "topr", "gspo"])
def test_better_responses_become_likelier(algorithm: str) -> None:
    updater, data = updater_of(preset(algorithm, "kl.coefficient=0")), single.batch()
    data.behavior_logprobs.copy_(updater.score(data))
    before = updater.score(data).sum(dim=1)
    for number in range(1, 6):
        single.step(updater, number, data)
    gain = updater.score(data).sum(dim=1) - before
    rewards = data.rewards - data.rewards.mean(dim=1, keepdim=True)
    assert float((gain * rewards.flatten()).mean()) > 0


def gradients(updater: Updater) -> Tensor:
    """Returns AdamW's running mean of the gradients, of shape (elements,).

    Weights do not show what two gradients have in common: AdamW divides a gradient by its own
    size, so the rounding of an element that is almost 0 becomes a part of a learning rate.
    """
    state = updater.optimizer.state
    return torch.cat([state[parameter]["exp_avg"].flatten() for parameter in state])


@pytest.mark.parametrize("overrides", [*WITH_STATISTICS, *WITHOUT_STATISTICS], ids=" ".join)
def test_an_update_does_not_depend_on_its_micro_batches(overrides: tuple[str, ...]) -> None:
    results = []
    for tokens in (13, 30, 10_000):
        updater = updater_of(single.config(f"optimizer.microbatch_tokens={tokens}", *overrides))
        metrics = single.step(updater, 1, single.batch())
        results.append((gradients(updater), metrics))
    expected, expected_metrics = results[0]
    for actual, metrics in results[1:]:
        assert (actual - expected).abs().max() < 1e-4 * expected.abs().max()
        assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-5)


def truncated(data: Batch, rows: list[int]) -> Batch:
    """Returns the batch as if the responses of these rows had been cut off."""
    cut_off = torch.zeros_like(data.truncated)
    cut_off[rows] = True
    return replace(data, truncated=cut_off)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_truncated_responses_have_advantages_and_no_loss(aggregation: str) -> None:
    """The loss is a mean over the other rows' tokens; those of row 3 have no part in it."""
    overrides = (f"loss.aggregation={aggregation}", "loss.entropy_coefficient=0")
    overrides += ("kl.coefficient=0", "optimizer.minibatch_prompts=8", "loss.mask_truncated=true")
    updater = updater_of(single.config(*overrides))
    data = single.batch()
    plain, _ = updater._make_targets(data)
    masked, _ = updater._make_targets(truncated(data, [3]))
    assert torch.equal(plain.advantages, masked.advantages)
    assert torch.equal(plain.mask, data.mask)
    assert not masked.mask[3].any()
    others = [row for row in range(len(data.lengths)) if row != 3]
    assert torch.equal(masked.mask[others], data.mask[others])
    rows = torch.arange(len(data.lengths))
    scale = updater._loss_scale(masked.mask, rows, aggregation)
    assert not scale[3].any()
    assert torch.equal(
        scale[others], updater._loss_scale(data.mask, torch.tensor(others), aggregation)[others]
    )
    # The text that was cut off does not change the update.
    changed = truncated(data, [3])
    length, prompt = int(changed.lengths[3]), int(changed.prompt_lengths[3])
    tokens = changed.tokens.clone()
    tokens[3, prompt:length] = 13 - tokens[3, prompt:length]
    results = []
    for text in (changed.tokens, tokens):
        updater = updater_of(single.config(*overrides, "loss.correction=behavior"))
        single.step(updater, 1, replace(changed, tokens=text))
        results.append(gradients(updater))
    assert not torch.equal(changed.tokens, tokens)
    assert (results[0] - results[1]).abs().max() < 1e-5 * results[0].abs().max()


@pytest.mark.parametrize("overrides", [*WITH_STATISTICS, *WITHOUT_STATISTICS], ids=" ".join)
def test_a_batch_of_truncated_responses_changes_nothing(overrides: tuple[str, ...]) -> None:
    overrides += ("loss.mask_truncated=true", "kl.coefficient=0", "optimizer.weight_decay=0")
    updater = updater_of(single.config(*overrides))
    data = single.batch()
    before = single.flat(updater.policy)
    metrics = single.step(updater, 1, truncated(data, list(range(len(data.lengths)))))
    assert metrics["gradient_norm"] == 0.0
    assert torch.equal(single.flat(updater.policy), before)


@pytest.mark.parametrize("estimator", ["group", "rloo", "opo", "maxrl", "reinforce_pp"])
def test_a_rank_without_groups_has_no_advantages(estimator: str) -> None:
    empty = collate([], SCHEMA.empty_table())
    updater = updater_of(single.config(f"advantage.estimator={estimator}"))
    advantages, _, _ = updater._advantages(empty, torch.zeros_like(empty.behavior_logprobs))
    assert advantages.shape == empty.mask.shape == (0, 1)


def forward_passes(*overrides: str) -> int:
    """Returns how many micro-batches of a step with two updates pass through the policy."""
    updater = updater_of(single.config("optimizer.microbatch_tokens=10000", *overrides))
    passes = 0
    forward = updater.policy.forward

    def counted(*arguments: Any) -> Any:
        nonlocal passes
        passes += 1
        return forward(*arguments)

    updater.policy.forward = counted  # type: ignore[method-assign]
    single.step(updater, 1, single.batch())
    return passes


def test_only_objectives_with_statistics_take_one_more_forward_pass() -> None:
    """The scoring pass is of the second update's rows; the first update scores its own."""
    scoring, updates = 1, 2
    for overrides in ((), *WITHOUT_STATISTICS):
        scored = 0 if "loss.correction=behavior" in overrides else scoring
        assert forward_passes(*overrides) == scored + updates, overrides
    # The scoring pass is of all rows, and the first update's statistics are of its scores.
    for overrides in WITH_STATISTICS:
        assert forward_passes(*overrides) == scoring + updates + 1


def test_statistics_are_of_all_ranks() -> None:
    """The tokens of two ranks, gathered, give the same numbers as those of one."""
    config = single.config(*WITH_STATISTICS[3], "optimizer.minibatch_prompts=6")
    data = single.batch()
    updater = updater_of(config)
    targets, _ = updater._make_targets(data)
    whole = updater._statistics(data, torch.arange(len(data.mask)), targets, range(6), (1, 0))
    columns = []
    for positions in ([0, 3, 5], [1, 2, 4]):
        part = batch_of_rank(data, positions)
        one = updater_of(config)
        one.ranks = GatheringRanks(columns)
        targets, _ = one._make_targets(part)
        last = one._statistics(part, torch.arange(len(part.mask)), targets, positions, (1, 0))
    assert last.values == pytest.approx(whole.values)


def test_statistics_are_of_the_tokens_that_the_loss_has() -> None:
    """Those of a plug-in may use the importance weights and the centre of the clip range."""
    found: dict[str, Tensor | None] = {}

    def statistics(tokens: Tokens, settings: Any) -> dict[str, float]:
        found.update(weights=tokens.weights, center=tokens.clip_center)
        return {}

    data = single.batch()
    for overrides in ((), ("loss.correction=behavior", "loss.objective.clip_center=current")):
        updater = updater_of(single.config(*overrides))
        updater.objective = replace(updater.objective, statistics=statistics)
        targets, _ = updater._make_targets(data)
        updater._statistics(data, torch.arange(len(data.mask)), targets, range(6), (1, 0))
        assert found["weights"] is not None
        assert torch.equal(found["weights"], targets.weights[data.mask])
        assert (found["center"] is None) == (targets.clip_center is None)
    assert found["center"] is not None
    assert targets.clip_center is not None
    assert torch.equal(found["center"], targets.clip_center[data.mask])


def test_an_objective_without_statistics_may_draw_tokens() -> None:
    updater, draws = updater_of(single.config()), []
    plain = updater.objective.loss

    def loss(tokens: Tokens, *arguments: Any) -> TokenLosses:
        draws.append(tokens.uniforms)
        return plain(tokens, *arguments)

    updater.objective = Objective(loss, needs_uniforms=True)
    single.step(updater, 1, single.batch())
    assert draws
    assert all(drawn is not None for drawn in draws)


class GatheringRanks(Ranks):
    """Ranks of a process that is the last to arrive at each collective."""

    def __init__(self, columns: list[Tensor]) -> None:
        super().__init__(0, 1)
        object.__setattr__(self, "columns", columns)

    def all_gather(self, values: Tensor) -> Tensor:
        self.columns.append(values)  # type: ignore[attr-defined]
        return torch.cat(self.columns, dim=1)  # type: ignore[attr-defined]


def test_draws_depend_neither_on_ranks_nor_on_other_responses() -> None:
    data = single.batch()
    whole = draw_tokens(data, range(6), 1, 2, 0)
    part = draw_tokens(batch_of_rank(data, [4, 1]), [4, 1], 1, 2, 0)
    assert torch.equal(part, whole[data.rows_of([4, 1])])
    assert len(set(whole[data.mask].tolist())) == int(data.mask.sum())
    assert not torch.equal(whole, draw_tokens(data, range(6), 1, 2, 1))


def stale_batch(updater: Updater) -> Batch:
    """Returns a batch: since its sampling, better responses became likelier, worse ones less so."""
    data = single.batch()
    scored = updater.score(data)
    bad = data.rewards.flatten() == 0.0
    data.behavior_logprobs.copy_(torch.where(bad[:, None], scored + 0.3, scored - 0.5) * data.mask)
    return data


def test_adaptive_clipping_reports_its_bounds() -> None:
    """The better tokens' ratio is e^.5, above the first upper bound; the worse ones' is e^-.3."""
    updater = updater_of(preset("bapo_adaptive_clipping", "optimizer.minibatch_prompts=6"))
    metrics = single.step(updater, 1, stale_batch(updater))
    assert metrics["clip/high"] == pytest.approx(1.65)  # the first above e^.5 = 1.6487
    assert metrics["clip/low"] == pytest.approx(0.6)
    assert metrics["clip/rho"] >= 0.4


def test_adaptive_clipping_is_composed_with_batch_adaptation() -> None:
    overrides = ("loss.objective=adaptive_clipping", "loss.correction=behavior")
    config = preset("bapo", *overrides)
    assert config.replay.select == "window"
    assert config.reevaluate.enabled
    metrics = single.step(updater_of(config), 1, single.batch("replayed"))
    assert {"clip/low", "clip/high", "clip/rho", "clip_fraction/replayed"} <= metrics.keys()


def test_a_kl_penalty_in_the_reward_is_not_in_the_loss() -> None:
    """Without a difference in rewards, the penalty alone makes advantages."""
    data = single.batch()
    data.rewards.fill_(1.0)
    zero = updater_of(preset("reinforce_pp", "kl.coefficient=0"))
    targets, _ = zero._make_targets(data)
    assert targets.advantages[data.mask].abs().max() < 1e-3
    updater = updater_of(preset("reinforce_pp", "kl.coefficient=0.1"))
    targets, _ = updater._make_targets(data)
    difference = 0.1 * (targets.current_logprobs - targets.reference_logprobs) * data.mask
    returns = -difference.flip(1).cumsum(1).flip(1)[data.mask]
    expected = (returns - returns.mean()) / returns.std()
    torch.testing.assert_close(targets.advantages[data.mask], expected, atol=1e-4, rtol=1e-4)
    in_loss = updater_of(
        preset("reinforce_pp", "kl={placement: loss, coefficient: 0.1, reference: initial}")
    )
    plain = single.step(in_loss, 1, single.batch())
    moved = single.step(updater, 1, single.batch())
    assert plain["kl"] == pytest.approx(moved["kl"], rel=0.2)
    assert plain["loss"] != pytest.approx(moved["loss"], rel=1e-3)


def test_metrics_are_means_whatever_the_aggregation() -> None:
    data = single.batch()
    of_mean = single.step(updater_of(preset("grpo", "loss.aggregation=token-mean")), 1, data)
    of_sum = single.step(updater_of(preset("grpo", "loss.aggregation=seq-mean-token-sum")), 1, data)
    # Before the first update, the policies are the same; the metrics are means over two updates.
    assert of_sum["entropy"] == pytest.approx(of_mean["entropy"], rel=0.01)


@pytest.mark.parametrize("algorithm", sorted(PRESETS))
def test_presets_get_warnings_about_approximations_alone(algorithm: str) -> None:
    warnings = load_config(None, [f"algorithm={algorithm}"]).warnings()
    approximations = {"opo": ["advantage.estimator=opo"], "dots": ["sampler.kind=dots"]}
    assert [warning.split()[0] for warning in warnings] == approximations.get(algorithm, [])
