"""Adapters change nothing until they are trained; merged, they make a plain model again."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from bapo_core.config.training import LoraConfig
from bapo_core.errors import BapoError
from services.trainer import attention
from services.trainer.data import pack
from services.trainer.lora import add_adapters, merge_adapter, plain_weights, trained_state
from services.trainer.policy import Policy
from tests.micro import micro_config, micro_model
from tests.unit.trainer import test_update as single


def adapted(seed: int = 1, *, rank: int = 3, tied: bool = False) -> Policy:
    model = micro_model(tie_word_embeddings=tied)
    model.set_attn_implementation(attention.IMPLEMENTATION)
    add_adapters(model, LoraConfig(rank=rank, alpha=6), seed)
    return Policy(model).eval()


def logprobs(policy: Policy) -> torch.Tensor:
    batch = single.batch()
    with torch.no_grad():
        scores, _ = policy(pack(batch, torch.arange(len(batch.lengths))), 1.0)
    return scores


def plain(policy: Policy, *, tied: bool = False) -> Policy:
    """Builds a model without adapters whose weights are the sums."""
    model = micro_model(seed=9, tie_word_embeddings=tied)
    model.set_attn_implementation(attention.IMPLEMENTATION)
    weights = {
        name: merge_adapter(tensor, layer) for name, tensor, layer in plain_weights(policy.model)
    }
    model.load_state_dict(weights)
    return Policy(model).eval()


@pytest.mark.parametrize("tied", [False, True])
def test_training_changes_only_the_adapters_and_the_sum_computes_the_same(tied: bool) -> None:
    policy = adapted(tied=tied)
    before = logprobs(policy)
    torch.testing.assert_close(before, logprobs(adapted(rank=0, tied=tied)), atol=0, rtol=0)
    frozen = {
        name: parameter.clone()
        for name, parameter in policy.named_parameters()
        if not parameter.requires_grad
    }
    updater = single.Updater(single.config("lora.rank=3"), policy, single.Ranks(0, 1))
    single.step(updater, 1, single.batch())
    after = logprobs(policy)
    assert (after - before).abs().max() > 1e-3
    for name, parameter in policy.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name]), name
    torch.testing.assert_close(logprobs(plain(policy, tied=tied)), after, atol=1e-5, rtol=0)


def test_a_checkpoint_holds_the_adapters_alone() -> None:
    policy = adapted(tied=True)
    state = trained_state(policy.model)
    assert state
    assert all(".lora_" in name for name in state)
    unadapted = Policy(micro_model(tie_word_embeddings=True))
    assert trained_state(unadapted.model).keys() == unadapted.model.state_dict().keys()


def test_adapters_are_drawn_from_the_seed() -> None:
    state = torch.random.get_rng_state()
    one, same, other = (trained_state(adapted(seed).model) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_targets_that_name_no_layer_are_refused() -> None:
    with pytest.raises(BapoError, match=r"lora.targets \['no_such_layer'\]"):
        add_adapters(micro_model(), LoraConfig(rank=2, targets=["no_such_layer"]), 1)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapters_of_a_layer_whose_weight_is_read_are_refused(target: str) -> None:
    with pytest.raises(BapoError, match=f"the weight of .*{target} is read and not called"):
        add_adapters(micro_model(), LoraConfig(rank=2, targets=["q_proj", target]), 1)


def test_adapters_of_experts_are_refused() -> None:
    """Their published weights had names that no engine knows."""
    options = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**micro_config().to_dict() | options | {"model_type": "qwen3_moe"})
    with pytest.raises(BapoError, match="holds the weights of several experts in one tensor"):
        add_adapters(Qwen3MoeForCausalLM(config), LoraConfig(rank=2), 1)
    model = Qwen3MoeForCausalLM(config)
    add_adapters(model, LoraConfig(rank=2, targets=["q_proj"]), 1)
    assert not any(
        ".base_layer." in name.replace("q_proj.base_layer.", "")
        for name, _ in model.named_parameters()
    )
