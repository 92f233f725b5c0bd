"""Packed sequences get the scores that each gets alone, in models of several architectures."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from bapo_core.errors import BapoError
from services.buffer.api.trajectories import TrajectoryGroup, TrajectoryResponse, table_of
from services.trainer import attention
from services.trainer.data import Packed, collate, pack
from services.trainer.policy import Policy
from services.trainer.ranks import init_distributed
from services.trainer.sequences import Sequences
from tests.micro import micro_model
from tests.stand_in_gpu import MixedDevices, compare_with_cpu, stand_in_gpu

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
LENGTHS = (5, 12, 1, 9)

MODELS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: micro_model(vocab_size=40),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SMALL, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "mistral_window": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SMALL)),
    "gemma3_window": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SMALL,
            head_dim=8,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    ),
}


def packed_of(sequences: list[torch.Tensor]) -> Packed:
    """Packs the sequences; every token but the first of each is scored."""
    cu_seqlens = [0]
    for tokens in sequences:
        cu_seqlens.append(cu_seqlens[-1] + len(tokens))
    scored = [p for start, end in pairwise(cu_seqlens) for p in range(start + 1, end)]
    joined = torch.cat(sequences)
    return Packed(
        tokens=joined[None],
        position_ids=torch.cat([torch.arange(len(tokens)) for tokens in sequences])[None],
        sequences=Sequences(torch.tensor(cu_seqlens, dtype=torch.int32), max(map(len, sequences))),
        logit_positions=torch.tensor(scored) - 1,
        response_positions=torch.tensor(scored),
        target_ids=joined[scored],
    )


@pytest.mark.parametrize("name", MODELS)
def test_no_sequence_attends_to_another(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    sequences = [torch.randint(2, 40, (length,)) for length in LENGTHS]
    model.set_attn_implementation("eager")
    expected = []
    with torch.no_grad():
        for tokens in sequences:
            distribution = torch.log_softmax(model(tokens[None]).logits[0], dim=-1)
            expected.append(distribution[:-1].gather(1, tokens[1:, None])[:, 0])
    model.set_attn_implementation(attention.IMPLEMENTATION)
    policy = Policy(model)
    logprobs, _ = policy(packed_of(sequences), 1.0)
    torch.testing.assert_close(logprobs.detach(), torch.cat(expected), atol=1e-5, rtol=1e-5)
    # Gradients do not depend on the order of the sequences.
    gradients = []
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        policy.zero_grad()
        logprobs, _ = policy(packed_of([sequences[index] for index in order]), 1.0)
        logprobs.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def group_of(prompt: list[int], lengths: tuple[int, ...]) -> TrajectoryGroup:
    """Makes a group of random responses of these lengths."""
    responses = []
    for length in lengths:
        tokens = torch.randint(2, 40, (length,)).tolist()
        responses.append(TrajectoryResponse(tokens, [0.0] * length, 0.0, "stop", "", correct=False))
    return TrajectoryGroup("", prompt, 1, responses)


@pytest.mark.parametrize("name", MODELS)
def test_responses_that_share_a_prompt_score_as_each_does_alone(name: str) -> None:
    """Three prompts with 3, 2 and 1 responses, which alternate."""
    torch.manual_seed(0)
    policy = Policy(MODELS[name]()).eval()
    policy.model.set_attn_implementation(attention.IMPLEMENTATION)
    batch = collate(
        None,
        table_of(
            [
                group_of([2, 3, 4, 5, 6, 7], lengths=(3, 7, 1)),
                group_of([8, 9], lengths=(5, 2)),
                group_of([3, 3, 3], lengths=(4,)),
            ]
        ),
    )
    rows = torch.tensor([3, 0, 5, 2, 4, 1])
    packed = pack(batch, rows)
    assert packed.tokens.shape[1] == batch.packed_tokens == 11 + 22
    factors = torch.randn(22)

    def gradients(scores: torch.Tensor) -> torch.Tensor:
        policy.zero_grad()
        (scores * factors).sum().backward()
        return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])

    shared = policy(packed, 1.0)[0]
    alone = torch.cat([policy(pack(batch, row), 1.0)[0] for row in rows.split(1)])
    torch.testing.assert_close(shared, alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients(shared), gradients(alone), atol=1e-4, rtol=1e-4)


OTHER_HEADS: dict[str, tuple[list[int], Callable[[], Any]]] = {
    "gemma4": (
        [8],
        lambda: Gemma4ForCausalLM(
            Gemma4TextConfig(
                **SMALL,
                head_dim=8,
                global_head_dim=512,
                sliding_window=4,
                layer_types=["sliding_attention", "full_attention"],
                hidden_size_per_layer_input=0,
            )
        ),
    ),
    "deepseek_v3": (
        [],
        lambda: DeepseekV3ForCausalLM(
            DeepseekV3Config(
                **{**SMALL, "num_key_value_heads": 4},
                q_lora_rank=16,
                kv_lora_rank=16,
                qk_rope_head_dim=8,
                qk_nope_head_dim=16,
                v_head_dim=16,
                first_k_dense_replace=2,
            )
        ),
    ),
    "heads_of_12": ([], lambda: micro_model(vocab_size=40, head_dim=12)),
}
"""Models with heads that the variable-length kernel does not take, and those that it takes."""


@pytest.mark.parametrize("name", [*MODELS, *OTHER_HEADS])
def test_a_gpu_computes_what_a_cpu_computes(name: str) -> None:
    """Gemma 4 and DeepSeek-V3 failed on a GPU: the kernel refuses their heads."""
    kernel_heads, build = OTHER_HEADS.get(name) or ([8, 8], MODELS[name])
    torch.manual_seed(0)
    policy = Policy(build()).eval()
    policy.model.set_attn_implementation(attention.IMPLEMENTATION)
    groups = [group_of([2, 3, 4, 5, 6, 7], lengths=(3, 7, 1)), group_of([8, 9], lengths=(5, 2))]
    gpu = compare_with_cpu(policy, collate(None, table_of(groups)), 0.9)
    assert gpu.kernel_heads == kernel_heads


def test_a_tensor_of_the_cpu_among_those_of_the_gpu_is_an_error() -> None:
    policy = Policy(micro_model(vocab_size=40)).eval()
    policy.model.set_attn_implementation(attention.IMPLEMENTATION)
    packed = packed_of([torch.tensor([2, 3, 4])])
    with stand_in_gpu():
        policy.to("cuda")
        with pytest.raises(MixedDevices, match="a tensor of the CPU"):
            policy(packed, 1.0)
        policy(packed.to(policy.device), 1.0)


def test_gradients_of_shared_prompts_are_equal_bit_for_bit_with_several_threads() -> None:
    """So that a run that is resumed, or a step that is trained again, gives the same weights."""
    torch.manual_seed(0)
    policy = Policy(micro_model(vocab_size=40)).eval()
    policy.model.set_attn_implementation(attention.IMPLEMENTATION)
    prompts = torch.randint(2, 40, (8, 40)).tolist()
    batch = collate(None, table_of([group_of(prompt, lengths=(16,) * 8) for prompt in prompts]))
    # Responses of each prompt in both halves, which the threads divide between them.
    packed = pack(batch, torch.arange(64).view(8, 8).T.flatten())

    def gradients() -> bytes:
        policy.zero_grad()
        policy(packed, 1.0)[0].sum().backward()
        all_gradients = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
        return torch.cat(all_gradients).numpy().tobytes()

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with init_distributed():
            first = gradients()
            assert all(gradients() == first for _ in range(20))
    finally:
        torch.set_num_threads(threads)


def test_other_kinds_of_attention_are_refused() -> None:
    soft_capped = Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8)).eval()
    soft_capped.set_attn_implementation(attention.IMPLEMENTATION)
    with pytest.raises(BapoError, match="needs soft-capped attention"):
        Policy(soft_capped)(packed_of([torch.tensor([2, 3, 4])]), 1.0)
