"""The trainer scores responses as a model of any architecture does, or refuses the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoXJapaneseConfig,
    GPTNeoXJapaneseForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    XGLMConfig,
    XGLMForCausalLM,
)

from bapo_core.errors import BapoError
from services.buffer.api.trajectories import TrajectoryGroup, TrajectoryResponse, table_of
from services.trainer.data import collate
from services.trainer.load_policy import empty_policy, load_policy
from services.trainer.policy import response_logprobs
from tests.unit.trainer.test_recurrent import save

WINDOW = 8
"""Shorter than the sequences."""
TOKENS = {
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL: dict[str, Any] = TOKENS | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
GATED: dict[str, Any] = SMALL | {"intermediate_size": 32, "num_key_value_heads": 2}
EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1}
SCALED_OPT = {"word_embed_proj_dim": 32, "ffn_dim": 32, "init_std": 0.3}
XGLM = {"d_model": 32, "ffn_dim": 32, "num_layers": 2, "attention_heads": 4, "init_std": 0.3}
CHUNKED = {"attention_chunk_size": WINDOW, "intermediate_size_mlp": 32, "head_dim": 8}
PHIMOE = GATED | EXPERTS | {"sliding_window": WINDOW}

PACKED: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GATED)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**GATED, sliding_window=WINDOW)),
    "opt": lambda: OPTForCausalLM(OPTConfig(**SMALL, **SCALED_OPT)),
    "phimoe without a window": lambda: PhimoeForCausalLM(
        PhimoeConfig(**PHIMOE | {"sliding_window": None})
    ),
}
PADDED: dict[str, Callable[[], Any]] = {
    "bloom": lambda: BloomForCausalLM(BloomConfig(**SMALL)),
    "falcon": lambda: FalconForCausalLM(FalconConfig(**SMALL)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**GATED, head_dim=8, sliding_window=WINDOW, attn_logit_softcapping=0.5)
    ),
    "gpt_neox_japanese": lambda: GPTNeoXJapaneseForCausalLM(GPTNeoXJapaneseConfig(**SMALL)),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**GATED, **EXPERTS, head_dim=8, sliding_window=WINDOW)
    ),
    "llama4": lambda: Llama4ForCausalLM(Llama4TextConfig(**GATED, **CHUNKED, num_local_experts=2)),
    "nemotron": lambda: NemotronForCausalLM(NemotronConfig(**GATED)),
    "phimoe": lambda: PhimoeForCausalLM(PhimoeConfig(**PHIMOE)),
    "stablelm": lambda: StableLmForCausalLM(StableLmConfig(**GATED)),
    "xglm": lambda: XGLMForCausalLM(XGLMConfig(**TOKENS, **XGLM)),
}


@pytest.mark.parametrize("name", [*PACKED, *PADDED])
def test_responses_are_scored_as_the_model_scores_each_alone(name: str, tmp_path: Path) -> None:
    directory = save((PACKED | PADDED)[name], tmp_path)
    policy = load_policy(directory)
    assert policy.packs == empty_policy(directory).packs == (name in PACKED)
    rng = torch.Generator().manual_seed(0)
    prompt, *responses = (
        torch.randint(3, 64, (length,), generator=rng).tolist() for length in (4, 30, 20)
    )
    group = TrajectoryGroup(
        "p",
        prompt,
        1,
        [TrajectoryResponse(r, [0.0] * len(r), 0.0, "stop", "", False) for r in responses],
    )
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    with torch.no_grad():
        logprobs, _ = response_logprobs(
            policy, collate(None, table_of([group])), torch.arange(2), temperature=1.0
        )
        for row, response in zip(logprobs, responses, strict=True):
            logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits
            expected = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            expected = expected.gather(1, torch.tensor(response)[:, None])[:, 0]
            torch.testing.assert_close(row[: len(response)], expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: OlmoeForCausalLM(OlmoeConfig(**GATED, **EXPERTS, sliding_window=WINDOW)),
            "a OlmoeForCausalLM applies its sliding window in a way that the trainer's packed",
        ),
        (
            lambda: BertLMHeadModel(BertConfig(**GATED)),
            "log-probs of a BertLMHeadModel differ from the model's own by up to",
        ),
    ],
)
def test_a_model_that_cannot_be_scored_is_refused(
    build: Callable[[], Any], message: str, tmp_path: Path
) -> None:
    """Eager and flash attention differ in the window of the first; the second is not causal."""
    with pytest.raises(BapoError, match=message):
        load_policy(save(build, tmp_path))
