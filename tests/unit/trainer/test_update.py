"""A step's result depends on the data and the configuration, not on how the batch is split."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from dataclasses import replace
from statistics import fmean, pvariance
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from bapo_core.advantages import group_relative
from bapo_core.config import RunConfig, load_config
from bapo_core.errors import BapoError
from services.buffer.api.trajectories import TrajectoryGroup, TrajectoryResponse, table_of
from services.buffer.api.wire import ManifestMember
from services.trainer import attention
from services.trainer.data import Batch, Plan, collate, make_plan, microbatches, split_groups
from services.trainer.diagnostics import StepResults, diagnose
from services.trainer.digests import group_digests
from services.trainer.lora import add_adapters
from services.trainer.phases import PhaseTimer
from services.trainer.policy import Policy, response_logprobs
from services.trainer.ranks import Ranks
from services.trainer.shard import checkpoint_layers, compile_layers
from services.trainer.targets import TokenResults
from services.trainer.update import NonFiniteLoss, Updater

GROUPS, G, WINDOW = 6, 4, (0.25, 0.5)


def policy(seed: int = 0) -> Policy:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=12,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    model = Qwen3ForCausalLM._from_config(config, attn_implementation=attention.IMPLEMENTATION)
    return Policy(model).eval()


def updater_of(settings: RunConfig, reference: Policy | None = None) -> Updater:
    return Updater(settings, policy(), Ranks(0, 1), reference)


def step(updater: Updater, number: int, data: Batch) -> dict[str, float]:
    plan = make_plan(updater.config, number, data.members, ranks=1, width=16)
    assert plan.of_rank(0) == list(range(GROUPS))
    return updater.step(number, data, plan, WINDOW, PhaseTimer()).metrics


def config(*overrides: str) -> RunConfig:
    return load_config(
        None,
        [
            "rollout.group_size=4",
            "rollout.temperature=0.8",
            "rollout.max_prompt_tokens=7",
            "rollout.max_response_tokens=6",
            "optimizer.minibatch_prompts=4",
            "optimizer.learning_rate=1e-3",
            "optimizer.warmup_steps=0",
            *overrides,
        ],
    )


def batch(
    source: str = "fresh", behavior: float | None = None, joins: Collection[int] = ()
) -> Batch:
    """Builds ragged groups with mixed rewards; behaviour log-probs are random, or `behavior`.

    joins: indexes of those that are compared with the ones before them.
    """
    draw = torch.Generator().manual_seed(3)

    def integers(low: int, high: int, count: int = 1) -> list[int]:
        return torch.randint(low, high, (count,), generator=draw).tolist()

    groups, members = [], []
    for index in range(GROUPS):
        responses = []
        for position in range(G):
            (length,) = integers(1, 7)
            noise = torch.rand(length, generator=draw)
            logprobs = (-1.5 - noise) if behavior is None else torch.full((length,), behavior)
            responses.append(
                TrajectoryResponse(
                    integers(2, 12, length),
                    logprobs.tolist(),
                    float(position <= index % 3),
                    "stop",
                    "",
                    correct=position <= index % 3,
                )
            )
        groups.append(TrajectoryGroup(str(index), integers(2, 12, 2 + index), 1, responses))
        members.append(
            ManifestMember(
                group_id=index,
                source=source,
                prompt_uid=str(index),
                step=1,
                policy_version=1,
                correct=groups[-1].correct,
                size=G,
                object_key="",
                object_digest="",
                row_start=0,
                row_count=G,
                joins_previous=index in joins,
            )
        )
    return collate(members, table_of(groups))


def trained(settings: RunConfig, data: Batch, reference: Policy | None = None) -> Tensor:
    """Returns the weights after one step."""
    updater = updater_of(settings, reference)
    step(updater, 1, data)
    return flat(updater.policy)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_the_gradient_does_not_depend_on_the_microbatches(aggregation: str) -> None:
    gradients = []
    for tokens in (13, 30, 70, 10_000):
        settings = config(
            f"optimizer.microbatch_tokens={tokens}",
            f"loss.aggregation={aggregation}",
            "optimizer.gradient_clip=1000",
        )
        updater = updater_of(settings)
        data = batch()
        targets, _ = updater._make_targets(data)
        rows = data.rows_of([0, 2, 3, 5])
        updater.optimizer.step = lambda: None  # type: ignore[assignment, method-assign]
        updater._update(data, rows, 4, targets, TokenResults.empty(data))
        gradients.append(
            torch.cat([p.grad.flatten() for p in updater.policy.parameters() if p.grad is not None])
        )
    assert gradients[0].abs().max() > 1e-3
    for gradient in gradients[1:]:
        assert torch.allclose(gradient, gradients[0], atol=1e-6)


def test_members_that_join_are_compared_as_one_group() -> None:
    settings, data = config(), batch(joins=(1, 2, 5))
    targets, _ = updater_of(settings)._make_targets(data)
    rewards, start = data.row_rewards.tolist(), 0
    for size in (3 * G, G, 2 * G):
        group = rewards[start : start + size]
        expected = [(r - fmean(group)) / math.sqrt(pvariance(group) + 1e-6) for r in group]
        advantages = targets.advantages[start : start + size]
        assert advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-5)
        start += size
    assert start == GROUPS * G


def supervised_config(*overrides: str) -> RunConfig:
    supervised = ["reevaluate.enabled=false", "demonstrations.supervise_every=4"]
    return config(*supervised, *overrides)


@pytest.mark.parametrize("coefficient", [0.0, 0.001, 0.5])
def test_a_supervised_update_descends_on_the_mean_of_minus_log_pi(coefficient: float) -> None:
    settings, data = (
        supervised_config(
            "optimizer.microbatch_tokens=40",
            "demonstrations.supervised_gradient_clip=1e9",
            f"demonstrations.supervised_entropy_coefficient={coefficient}",
        ),
        batch(),
    )
    updater, tested = updater_of(settings), policy()
    metrics = updater.supervise(1, data)
    rows = torch.arange(GROUPS * G)
    logprobs, entropies = response_logprobs(
        tested, data, rows, settings.rollout.temperature, entropy=True
    )
    minus_log_pi = -logprobs[data.mask].mean()
    loss = minus_log_pi - coefficient * entropies[data.mask].mean()
    loss.backward()  # type: ignore[no-untyped-call]
    assert metrics["supervised/loss"] == pytest.approx(minus_log_pi.item(), abs=1e-6)
    gradient = torch.cat([p.grad.flatten() for p in tested.parameters() if p.grad is not None])
    assert metrics["supervised/gradient_norm"] == pytest.approx(gradient.norm().item(), abs=1e-6)
    torch.optim.AdamW(tested.parameters(), 1e-3, weight_decay=0.1).step()
    reference = policy()
    with torch.no_grad():
        for parameter, graded in zip(reference.parameters(), tested.parameters(), strict=True):
            parameter.grad = graded.grad
    torch.optim.AdamW(reference.parameters(), 1e-3, weight_decay=0.1).step()
    assert torch.allclose(flat(updater.policy), flat(reference), atol=1e-6)


def test_a_supervised_update_has_the_learning_rate_of_its_step() -> None:
    """Its step may have no other update: with a filter, a batch may be empty."""
    updater = updater_of(supervised_config("optimizer.warmup_steps=4"))
    rates = []
    for number in (1, 2, 5):
        updater.supervise(number, batch())
        assert updater.supervised_optimizer is not None
        rates.append(updater.supervised_optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 1e-3])


def test_a_supervised_update_clips_its_gradient_by_its_own_bound() -> None:
    """AdamW divides the scale of a gradient out, so the clip is seen in the gradient itself."""
    bound = "demonstrations.supervised_gradient_clip=0.01"
    updater = updater_of(supervised_config(bound, "optimizer.gradient_clip=1e9"))
    assert updater.supervise(1, batch())["supervised/gradient_norm"] > 0.02
    gradients = [p.grad.flatten() for p in updater.policy.parameters() if p.grad is not None]
    assert torch.cat(gradients).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_updates_of_a_batch_and_supervised_ones_have_moments_of_their_own() -> None:
    updater, data = updater_of(supervised_config()), batch()
    assert updater.supervised_optimizer is not None
    both = (updater.optimizer, updater.supervised_optimizer)
    step(updater, 1, data)
    policys, supervised = map(moments, both)
    assert policys.any()
    assert not supervised.any()
    updater.supervise(1, data)
    assert torch.equal(moments(updater.optimizer), policys)
    supervised = moments(updater.supervised_optimizer)
    assert supervised.any()
    step(updater, 2, data)
    assert not torch.equal(moments(updater.optimizer), policys)
    assert torch.equal(moments(updater.supervised_optimizer), supervised)


def moments(optimizer: torch.optim.Optimizer) -> Tensor:
    """Returns the state of an optimizer: for each parameter, steps and moments."""
    states = optimizer.state.values()
    return torch.cat([value.flatten() for state in states for value in state.values()])


def test_a_run_without_supervised_updates_has_one_optimizer() -> None:
    updater = updater_of(config())
    assert updater.supervised_optimizer is None
    assert list(updater.modules["model"][1]) == ["optimizer"]


def test_a_demonstration_has_no_behaviour_policy() -> None:
    """Its KL is to theta_t, so 0 before the first update, and the mismatch leaves it out."""
    data = batch(behavior=0.0)
    members = [
        member.model_copy(update={"demonstration": "text", "rows": [1, 2, 3]})
        for member in data.members
    ]
    shown = replace(data, members=members)
    assert shown.sources == (["fresh"] * (G - 1) + ["demonstrated"]) * GROUPS
    settings = config("loss.correction=behavior", "kl.coefficient=0.1")
    targets, _ = updater_of(settings)._make_targets(shown)
    rows = shown.demonstrated[:, 0]
    assert torch.equal(targets.reference_logprobs[rows], targets.current_logprobs[rows])
    assert torch.equal(targets.reference_logprobs[~rows], data.behavior_logprobs[~rows])
    metrics = step(updater_of(settings), 1, shown)
    sampled = targets.current_logprobs[~rows][data.mask[~rows]]
    assert metrics["mismatch/logprob_diff_mean"] == pytest.approx(-sampled.mean().item(), abs=1e-5)
    assert "clip_fraction/demonstrated" in metrics


@pytest.mark.parametrize("ranks", [1, 2])
def test_members_that_join_are_in_the_same_updates_and_ranks(ranks: int) -> None:
    data = batch(joins=(1, 2, 5))
    settings = config("optimizer.minibatch_prompts=2", "optimizer.epochs=2")
    plan = make_plan(settings, 1, data.members, ranks=ranks, width=16)
    assert len(plan.updates) == 4
    for updates in (plan.updates[:2], plan.updates[2:]):
        placed = [group for update in updates for rank in update for group in rank]
        assert sorted(placed) == [0, 1, 2]
    groups = split_groups(data.members)
    assert [[member.group_id for member in group] for group in groups] == [[0, 1, 2], [3], [4, 5]]


def test_the_digest_of_a_group_holds_the_members_that_join() -> None:
    apart, joined = batch(), batch(joins=(1, 2, 5))
    assert len(list(group_digests(apart))) == GROUPS
    assert len(list(group_digests(joined))) == GROUPS - 3
    assert list(group_digests(joined))[1] == list(group_digests(apart))[3]


def test_a_convex_kl_is_in_part_to_the_policy_before_the_step() -> None:
    overrides = ["kl={coefficient: 0.5, reference: initial, convex: {after: 0, every: 1}}"]
    settings = config("loss.correction=behavior", *overrides)
    data, start = batch(), policy()
    updater = updater_of(settings, policy(seed=1))
    targets, _ = updater._make_targets(data, 3)
    assert targets.reference_share == pytest.approx(0.7)
    rows = torch.arange(GROUPS * G)
    with torch.no_grad():
        for parameter in updater.policy.parameters():
            parameter.mul_(1.05)
    moved = policy()
    moved.load_state_dict(updater.policy.state_dict())
    temperature = settings.rollout.temperature
    logprobs, _ = response_logprobs(moved, data, rows, temperature)

    def k3(reference: Tensor) -> Tensor:
        d = reference - logprobs
        return (d.exp() - 1 - d).clamp(max=10.0)[data.mask].mean()

    initial, _ = response_logprobs(policy(seed=1), data, rows, temperature)
    before, _ = response_logprobs(start, data, rows, temperature)
    expected = 0.7 * k3(initial) + 0.3 * k3(before)
    metrics = updater._update(data, rows, GROUPS, targets, TokenResults.empty(data))
    assert metrics["kl"] == pytest.approx(expected.item(), abs=1e-6)
    assert k3(before) < k3(initial)


def test_the_policy_becomes_the_reference_when_it_is_reset() -> None:
    settings = config("kl={coefficient: 0.1, reference: initial, reset_after: 2}")
    updater = updater_of(settings, policy(seed=1))
    assert updater.reference is not None
    assert list(updater.modules_to_save(2)) == ["model"]
    assert list(updater.modules_to_save(3)) == ["model", "reference"]
    step(updater, 1, batch())
    before = flat(updater.policy)
    updater.reset_reference()
    step(updater, 2, batch())
    assert torch.equal(flat(updater.reference), before)
    assert not torch.equal(flat(updater.policy), before)


def test_the_same_step_gives_the_same_weights_bit_for_bit() -> None:
    assert torch.equal(trained(config(), batch()), trained(config(), batch()))


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_activation_checkpointing_changes_no_result(mode: Any) -> None:
    updater = updater_of(config())
    checkpoint_layers(updater.policy, mode)
    names = updater.policy.model.state_dict().keys()
    step(updater, 1, batch())
    assert torch.equal(flat(updater.policy), trained(config(), batch()))
    assert names == policy().model.state_dict().keys()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
def test_compiled_layers_compute_the_same(rank: int) -> None:
    settings = config(f"lora.rank={rank}")
    networks = policy(), policy()
    for network in networks:
        add_adapters(network.model, settings.lora, 7)
    plain, compiled = (Updater(settings, network, Ranks(0, 1)) for network in networks)
    compile_layers(compiled.policy)
    assert torch.allclose(compiled.score(batch()), plain.score(batch()), atol=1e-5)
    metrics = step(compiled, 1, batch())
    assert metrics == pytest.approx(step(plain, 1, batch()), rel=1e-4, abs=1e-5)


def test_log_probs_are_those_of_a_plain_forward_pass_at_the_temperature() -> None:
    data, network = batch(), policy()
    plain: Any = policy().model
    plain.set_attn_implementation("eager")
    rows = torch.tensor([5, 0, 17])
    logprobs, entropy = response_logprobs(network, data, rows, 0.8, entropy=True)
    for position, row in enumerate(rows.tolist()):
        length, prompt = int(data.lengths[row]), int(data.prompt_lengths[row])
        tokens = data.tokens[row, :length]
        logits = plain(tokens[None]).logits[0] / 0.8
        distribution = torch.log_softmax(logits, dim=-1)[prompt - 1 : length - 1]
        expected = distribution.gather(1, tokens[prompt:, None])[:, 0]
        count = length - prompt
        assert torch.allclose(logprobs[position, :count], expected, atol=1e-5)
        expected_entropy = -(distribution.exp() * distribution).sum(dim=-1)
        assert torch.allclose(entropy[position, :count], expected_entropy, atol=1e-5)
        assert not logprobs[position, count:].any()


def test_on_policy_data_has_no_mismatch_and_its_weights_are_one() -> None:
    updater = updater_of(config())
    data = batch()
    data.behavior_logprobs.copy_(updater.score(data))
    targets, _ = updater._make_targets(data)
    assert torch.allclose(targets.weights[data.mask], torch.ones(int(data.mask.sum())), atol=1e-4)
    metrics = step(updater, 1, data)
    assert metrics["mismatch/logprob_diff_max"] < 1e-5
    assert metrics["updates"] == 2


def test_weights_normalised_over_the_batch_have_mean_one() -> None:
    data = batch()

    def weights(*overrides: str) -> Tensor:
        targets, _ = updater_of(config(*overrides))._make_targets(data)
        return targets.weights[data.mask]

    plain, normed = weights(), weights("loss.correction.weight_norm=batch")
    assert plain.mean() != pytest.approx(1.0, abs=0.01)
    torch.testing.assert_close(normed, plain / plain.mean())
    # Responses without a loss are no part of the mean.
    data.truncated[::2] = True
    targets, _ = updater_of(
        config("loss.correction.weight_norm=batch", "loss.mask_truncated=true")
    )._make_targets(data)
    assert float(targets.weights[targets.mask].mean()) == pytest.approx(1.0, abs=1e-5)
    masked = weights(
        "loss.correction.weight_mode=mask",
        "loss.correction.weight_floor=0.5",
        "loss.correction.weight_cap=2",
    )
    outside = (plain < 0.5) | (plain > 2.0)
    assert outside.any()
    assert torch.equal(masked == 0.0, outside)


def test_behavior_and_prox_current_agree_on_the_first_update() -> None:
    """Without clipping and truncation, w * ratio is theta / behaviour in both."""
    wide = ["loss.objective={clip_low: 100, clip_high: 100, dual_clip: null}"]
    wide += ["optimizer.minibatch_prompts=6", "kl.coefficient=0"]
    behavior = trained(config("loss.correction=behavior", *wide), batch())
    current = trained(config("loss.correction={weight_cap: 100}", *wide), batch())
    assert torch.allclose(behavior, current, atol=1e-6)


def test_decoupled_needs_the_storage_step_of_replayed_groups() -> None:
    settings = config("loss.correction=decoupled")
    with pytest.raises(BapoError, match="log-probs of the storage step"):
        trained(settings, batch("replayed"))
    fresh = trained(settings, batch("fresh"))
    assert torch.equal(fresh, trained(config("loss.correction=prox_current"), batch("fresh")))


def test_kl_to_the_initial_model_uses_that_model() -> None:
    settings = config("kl.reference=initial", "kl.coefficient=0.5")
    assert not torch.equal(
        trained(settings, batch(), policy(seed=0)), trained(settings, batch(), policy(seed=1))
    )


def test_a_short_last_minibatch_weighs_by_its_own_size_or_by_the_nominal_one() -> None:
    data = batch()
    norms, losses = {}, {}
    for norm in ("actual", "nominal"):
        updater = updater_of(config(f"loss.minibatch_norm={norm}", "optimizer.gradient_clip=1000"))
        targets, _ = updater._make_targets(data)
        metrics = updater._update(data, data.rows_of([1, 4]), 2, targets, TokenResults.empty(data))
        norms[norm] = metrics.pop("gradient_norm")
        losses[norm] = metrics
    assert losses["nominal"] == losses["actual"], "metrics are means over tokens"
    assert norms["nominal"] == pytest.approx(norms["actual"] / 2, rel=1e-4)
    assert config().loss.minibatch_norm == "nominal", "all groups of a batch weigh the same"


def test_a_loss_that_is_not_finite_stops_before_the_weights_change() -> None:
    updater = updater_of(config())
    before = flat(updater.policy)
    with torch.no_grad():
        next(iter(updater.policy.parameters()))[3] = torch.nan
    spoilt = flat(updater.policy)
    with pytest.raises(NonFiniteLoss, match="stopped before the optimizer step") as caught:
        step(updater, 1, batch())
    assert math.isnan(caught.value.evidence["totals"]["loss"])
    assert caught.value.evidence["batch"].tokens.equal(batch().tokens)
    assert torch.equal(flat(updater.policy).isnan(), spoilt.isnan())
    assert torch.equal(flat(updater.policy)[~spoilt.isnan()], before[~spoilt.isnan()])


def test_minibatches_hold_whole_groups_once_each() -> None:
    data = batch()

    def plan(number: int, ranks: int) -> Plan:
        return make_plan(config(), number, data.members, ranks=ranks, width=16)

    for ranks in (1, 2, 4, 7):
        drawn = plan(7, ranks)
        assert [sum(map(len, update)) for update in drawn.updates] == [4, 2]
        assert all(len(update) == ranks for update in drawn.updates)
        taken = [drawn.of_rank(rank) for rank in range(ranks)]
        assert sorted(group for groups in taken for group in groups) == list(range(GROUPS))
        positions = [sorted(p for taken in update for p in taken) for update in drawn.updates]
        assert positions == [sorted(update[0]) for update in plan(7, 1).updates]
    assert plan(7, 1) != plan(8, 1)
    assert sorted(data.rows_of(range(GROUPS)).tolist()) == list(range(GROUPS * G))


def test_later_passes_hold_every_group_once_in_another_order() -> None:
    assert three_passes(ranks=1) == three_passes(ranks=2) == three_passes(ranks=4)


def three_passes(ranks: int) -> list[list[list[int]]]:
    """Returns the groups of each update of each pass, whatever their ranks."""
    data = batch()

    def plan(epochs: int) -> Plan:
        settings = config(f"optimizer.epochs={epochs}")
        return make_plan(settings, 1, data.members, ranks=ranks, width=16)

    one, three = plan(1), plan(3)
    assert three.updates[:2] == one.updates
    assert len(three.updates) == 6
    passes = [
        [sorted(position for rank in update for position in rank) for update in updates]
        for updates in (three.updates[:2], three.updates[2:4], three.updates[4:])
    ]
    for updates in passes:
        assert sorted(position for update in updates for position in update) == list(range(6))
        assert [len(update) for update in updates] == [4, 2]
    assert passes[0] != passes[1] != passes[2] != passes[0]
    for rank in range(ranks):
        assert three.of_rank(rank) == one.of_rank(rank)
    return passes


def test_a_second_pass_goes_on_from_the_first() -> None:
    def updates(epochs: int) -> tuple[list[Tensor], dict[str, float]]:
        updater = updater_of(config(f"optimizer.epochs={epochs}"))
        weights: list[Tensor] = []
        take = updater.optimizer.step

        def recorded() -> None:
            take()
            weights.append(flat(updater.policy))

        updater.optimizer.step = recorded  # type: ignore[assignment, method-assign]
        return weights, step(updater, 1, batch())

    (once, metrics), (twice, more) = updates(1), updates(2)
    assert (metrics["updates"], more["updates"]) == (2, 4)
    for first, second in zip(once, twice[:2], strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(twice[1], twice[3])


def test_a_restored_optimizer_takes_the_rates_of_the_configuration_of_its_step() -> None:
    """A checkpoint has the rates of the step that it was stored at, which may be others."""
    restored = updater_of(config("optimizer.weight_decay=0.5"))
    restored.optimizer.load_state_dict(updater_of(config()).optimizer.state_dict())
    data = batch()
    fresh = updater_of(config("optimizer.weight_decay=0.5"))
    for updater in (restored, fresh):
        step(updater, 1, data)
    assert torch.equal(flat(restored.policy), flat(fresh.policy))
    for updater in (restored, fresh):
        updater.config = config("optimizer.learning_rate=1e-4", "optimizer.gradient_clip=0.01")
        step(updater, 2, data)
        (group,) = updater.optimizer.param_groups
        assert (group["lr"], group["weight_decay"]) == (1e-4, 0.1)
    assert torch.equal(flat(restored.policy), flat(fresh.policy))


def test_the_learning_rate_warms_up() -> None:
    updater = updater_of(config("optimizer.warmup_steps=10"))
    rates = {}
    for step in (1, 5, 10, 50):
        updater._set_rates(step)
        rates[step] = updater.optimizer.param_groups[0]["lr"]
    assert rates == pytest.approx({1: 1e-4, 5: 5e-4, 10: 1e-3, 50: 1e-3})


def test_responses_with_positive_advantage_become_likelier() -> None:
    settings = config("kl.coefficient=0", "loss.entropy_coefficient=0")
    updater = updater_of(settings)
    data = batch()
    data.behavior_logprobs.copy_(updater.score(data))
    before = updater.score(data).sum(dim=1)
    for number in range(1, 6):
        step(updater, number, data)
    gain = updater.score(data).sum(dim=1) - before
    advantages = group_relative(data.rewards).flatten()
    assert float((gain * advantages).mean()) > 0


@given(
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=10),
    responses=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 50)), min_size=1, max_size=40),
    budget=st.integers(1, 300),
    data=st.data(),
)
def test_microbatches_partition_the_rows_within_the_budget(
    prompts: list[int], responses: list[tuple[int, int]], budget: int, data: Any
) -> None:
    """A micro-batch counts a prompt once, and a quarter of it for each further response."""
    members = [index % len(prompts) for index, _ in responses]
    lengths = [length for _, length in responses]
    chosen = data.draw(st.permutations(range(len(responses))))[
        : data.draw(st.integers(1, len(responses)))
    ]
    sizes = dataclasses.replace(
        batch(),
        member=torch.tensor(members),
        prompt_lengths=torch.tensor([prompts[member] for member in members]),
        lengths=torch.tensor([prompts[m] + n for m, n in zip(members, lengths, strict=True)]),
    )
    rows = torch.tensor(chosen)
    if int(sizes.lengths[rows].max()) > budget:
        with pytest.raises(BapoError, match="does not fit optimizer"):
            microbatches(sizes, rows, budget)
        return
    split = [rows.tolist() for rows in microbatches(sizes, rows, budget)]
    assert sorted(row for micro_batch in split for row in micro_batch) == sorted(chosen)
    for micro_batch in split:
        cost = sum(lengths[row] + 0.25 * prompts[members[row]] for row in micro_batch)
        cost += sum(0.75 * prompts[member] for member in {members[row] for row in micro_batch})
        assert cost <= budget


def test_clip_fractions_are_reported_by_source() -> None:
    settings = config(
        "optimizer.learning_rate=0.05",
        "loss.objective.clip_low=0.01",
        "loss.objective.clip_high=0.01",
        "loss.aggregation=token-mean",
        "loss.correction=behavior",
    )
    metrics = step(updater_of(settings), 1, batch("replayed"))
    assert 0 < metrics["clip_fraction/replayed"] < 1
    assert "clip_fraction/fresh" not in metrics
    mask = torch.tensor([[True, True], [True, False]])
    logprobs = torch.zeros(2, 2)
    results = StepResults(
        behavior_logprobs=logprobs,
        current_logprobs=logprobs,
        proximal_logprobs=logprobs,
        new_logprobs=logprobs,
        clipped=torch.tensor([[True, False], [True, False]]),
        mask=mask,
        trained=mask,
        advantages=torch.zeros(2),
        rewards=torch.zeros(2),
        variances=torch.zeros(2),
        sources=["fresh", "replayed"],
        positions=torch.tensor([0, 1]),
        ages=torch.tensor([0, 3]),
        scored=torch.ones(2, dtype=torch.bool),
    )
    assert results.clip_fractions() == {
        "clip_fraction/fresh": 1 / 2,
        "clip_fraction/replayed": 1.0,
    }


def test_responses_without_a_loss_are_no_part_of_the_trained_tokens() -> None:
    """Overlong filtering: the clip fraction of the only source is that of the update."""
    settings = config(
        "optimizer.minibatch_prompts=6",
        "loss.mask_truncated=true",
        "loss.objective.clip_low=0.01",
        "loss.objective.clip_high=0.01",
        "loss.correction=behavior",
    )
    data = batch()
    data.truncated[::2] = True
    metrics = step(updater_of(settings), 1, data)
    assert metrics["trained_tokens"] == int(data.mask[1::2].sum())
    assert metrics["response_length"] == pytest.approx(float(data.mask.sum()) / (GROUPS * G))
    assert 0 < metrics["clip_fraction/fresh"] == pytest.approx(metrics["clip_fraction"])


def test_weight_metrics_are_those_of_the_weights_that_the_loss_applies() -> None:
    def metrics_with(ratio: str) -> dict[str, float]:
        settings = config(f"loss.correction={ratio}", f"optimizer.minibatch_prompts={GROUPS}")
        return step(updater_of(settings), 1, batch())

    weighted, unweighted = metrics_with("prox_current"), metrics_with("behavior")
    assert weighted["mismatch/ess_fraction"] < 1.0
    assert unweighted["mismatch/ess_fraction"] == 1.0
    assert unweighted["mismatch/mismatch_kl"] == weighted["mismatch/mismatch_kl"] > 0.0


def test_divergence_is_measured_by_source_and_by_age() -> None:
    """The batch has two fresh responses, a replayed, an unscored and a demonstrated one."""
    current = torch.tensor(
        [[0.0, 0.0], [math.log(2), 0.0], [math.log(3), 0.0], [9.0, 9.0], [9.0, 9.0]]
    )
    mask = torch.ones(5, 2, dtype=torch.bool)
    mask[1, 1] = False
    clipped = torch.zeros(5, 2, dtype=torch.bool)
    clipped[2, 0] = True
    results = StepResults(
        behavior_logprobs=torch.zeros(5, 2),
        current_logprobs=current,
        proximal_logprobs=torch.zeros(5, 2),
        new_logprobs=torch.zeros(5, 2),
        clipped=clipped,
        mask=mask,
        trained=mask,
        advantages=torch.zeros(5),
        rewards=torch.zeros(5),
        variances=torch.zeros(5),
        sources=["fresh", "fresh", "replayed", "fresh", "demonstrated"],
        positions=torch.arange(5),
        ages=torch.tensor([0, 2, 7, 0, 0]),
        scored=torch.tensor([True, True, True, False, True]),
    )

    # The effective shares are 1 after 2 steps, of one token, and 16 / 20 after 7, of two.
    decay = -2 * math.log(0.8) / (2 + 2 * 7)

    def kl(*ratios: float) -> Any:
        return pytest.approx(sum(ratio - 1 - math.log(ratio) for ratio in ratios) / len(ratios))

    def ess(*ratios: float) -> Any:
        squares = sum(ratio**2 for ratio in ratios)
        return pytest.approx(sum(ratios) ** 2 / (len(ratios) * squares))

    assert results.divergences() == {
        "divergence/fresh/kl": kl(1, 1, 2),
        "divergence/fresh/ess_fraction": ess(1, 1, 2),
        "divergence/replayed/kl": kl(3, 1),
        "divergence/replayed/ess_fraction": ess(3, 1),
        "divergence/age_0/kl": kl(1, 1),
        "divergence/age_0/ess_fraction": ess(1, 1),
        "divergence/age_0/clip_fraction": 0.0,
        "divergence/age_2/kl": kl(2),
        "divergence/age_2/ess_fraction": ess(2),
        "divergence/age_2/clip_fraction": 0.0,
        "divergence/age_5_9/kl": kl(3, 1),
        "divergence/age_5_9/ess_fraction": ess(3, 1),
        "divergence/age_5_9/clip_fraction": 0.5,
        "divergence/ess_decay": pytest.approx(decay),
    }


def test_a_batch_of_the_current_policy_measures_no_decay() -> None:
    data = batch()
    for member in data.members:
        member.policy_version = 5
    assert "divergence/ess_decay" not in step(updater_of(config()), 5, data)
    assert step(updater_of(config()), 6, data)["divergence/ess_decay"] > 0.0


def test_the_age_of_a_response_is_that_of_its_policy() -> None:
    data = batch("replayed")
    for index, member in enumerate(data.members):
        member.policy_version = 1 + index % 2
    metrics = step(updater_of(config()), 5, data)
    ages = {name.split("/")[1] for name in metrics if name.startswith("divergence/age_")}
    assert ages == {"age_3_4"}
    metrics = step(updater_of(config()), 2, data)
    ages = {name.split("/")[1] for name in metrics if name.startswith("divergence/age_")}
    assert ages == {"age_0", "age_1"}


def test_the_bound_weighs_each_group_once_and_leaves_out_groups_without_variance() -> None:
    """Two fresh groups, one of which is all correct, and a replayed one."""
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.0, 1.0, -1.0])
    results = StepResults(
        behavior_logprobs=torch.zeros(6, 1),
        current_logprobs=torch.zeros(6, 1),
        proximal_logprobs=torch.zeros(6, 1),
        # The replayed group's first response is twice as likely as before, the second half as.
        new_logprobs=torch.tensor([0.0, 0.0, 0.0, 0.0, math.log(2), -math.log(2)])[:, None],
        clipped=torch.zeros(6, 1, dtype=torch.bool),
        mask=torch.ones(6, 1, dtype=torch.bool),
        trained=torch.ones(6, 1, dtype=torch.bool),
        advantages=advantages,
        rewards=torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0]),
        variances=torch.tensor([0.25, 0.25, 0.0, 0.0, 0.16, 0.16]),
        sources=["fresh"] * 4 + ["replayed"] * 2,
        positions=torch.tensor([0, 0, 1, 1, 2, 2]),
        ages=torch.zeros(6, dtype=torch.long),
        scored=torch.ones(6, dtype=torch.bool),
    )
    metrics = diagnose(config("advantage.eps=1e-12"), results, (0.125, 0.25))
    # sigma = 0.4, so K = 1.5; L = (2 - 1/2) / 2; TV = (1 + 1/2) / 2 / 2.
    replayed = 0.75 - 2 * 1.5 * 0.375
    assert metrics["theory/bound_fresh"] == 0.0
    assert metrics["theory/bound_replayed"] == pytest.approx(replayed, abs=1e-6)
    assert metrics["theory/tv_replayed"] == pytest.approx(0.375)
    assert metrics["theory/bound"] == pytest.approx(replayed / 2, abs=1e-6)


@pytest.mark.parametrize(
    "override",
    [
        "reward.wrong=-1",
        "reward.weights={format: 0.1}",
        "reward.overlong_share=0.2",
        "advantage.scale=batch",
        "advantage.estimator=rloo",
    ],
)
def test_there_is_no_bound_where_the_theorem_does_not_hold(override: str) -> None:
    """It is about rewards in [0, 1], with the advantages of Eq. 2."""
    assert "theory/bound" in step(updater_of(config()), 1, batch())
    metrics = step(updater_of(config(override)), 1, batch())
    assert not [name for name in metrics if name.startswith("theory/")]


@pytest.mark.parametrize("reward", [1.0465, -0.5])
def test_there_is_no_bound_in_a_step_with_a_reward_outside_of_the_theorems_range(
    reward: float,
) -> None:
    """A reward function gives any number, which no configuration tells."""
    data = batch()
    data.rewards[0, 0] = reward
    metrics = step(updater_of(config()), 1, data)
    assert not [name for name in metrics if name.startswith("theory/")]
