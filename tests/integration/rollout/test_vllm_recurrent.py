"""The real vLLM serves models with recurrent layers. Run `make install-vllm` first.

vLLM computes the layers of Qwen3.5 on a CPU in bfloat16 only, so its log-probs have the noise of
that. The noise is measured on prompts without images, where nothing else can be wrong.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
)

from services.rollout.api.wire import GeneratedGroup, PromptRequest
from tests.image_prompts import IMAGES, prompts_of
from tests.integration.rollout.test_vllm_images import (
    TOLERANCE,
    generate,
    make_vllm_driver,
    teacher_forced,
)
from tests.micro import END, RECURRENT, save_micro_vision_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": END,
    "bos_token_id": None,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
MODELS: dict[str, Callable[[], Any]] = {
    "granitemoehybrid": lambda: GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            **SMALL,
            layer_types=["mamba", "attention", "mamba"],
            num_local_experts=0,
            shared_intermediate_size=48,
            logits_scaling=0.5,
        )
    ),
    "falcon_h1": lambda: FalconH1ForCausalLM(
        FalconH1Config(**SMALL, mamba_d_ssm=256, lm_head_multiplier=0.25)
    ),
}


def generated(
    directory: Path, scratch: Path, prompts: Sequence[PromptRequest], *options: str
) -> list[GeneratedGroup]:
    driver = make_vllm_driver(directory, scratch, *options)
    with asyncio.Runner() as runner:
        try:
            runner.run(driver.load(directory, 1))
            return generate(driver, runner.get_loop(), prompts, group_size=8)
        finally:
            runner.run(driver.close())


def differences(directory: Path, prompt: PromptRequest, group: GeneratedGroup) -> Tensor:
    """Returns the differences of a group's log-probs from those of transformers in float32."""
    assert group.refused == ""
    return torch.cat(
        [
            torch.tensor(response.logprobs) - teacher_forced(directory, prompt, response.token_ids)
            for response in group.responses
        ]
    ).abs()


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        MODELS[name]().save_pretrained(directory)
    prompts = [
        PromptRequest(prompt_token_ids=[2 + (7 * i) % 61 for i in range(length)], seed=length)
        for length in (1, 7, 20, 33)
    ]
    groups = generated(directory, tmp_path, prompts)
    for prompt, group in zip(prompts, groups, strict=True):
        assert differences(directory, prompt, group).max() < TOLERANCE


def test_images_of_qwen3_5_add_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Larger weights make the model chaotic in bfloat16.
    monkeypatch.setitem(RECURRENT, "initializer_range", 0.08)
    directory = save_micro_vision_model(tmp_path / "model", "qwen3_5", head_size=64)
    prompts = prompts_of(directory)
    groups = generated(directory, tmp_path, prompts, "rollout.engine.dtype=bfloat16")
    of_one, of_several, noise, of_another = (
        differences(directory, prompt, group).mean()
        for prompt, group in zip(prompts, groups, strict=True)
    )
    for mean in (of_one, of_several, of_another):
        assert mean < 2 * noise
    black = io.BytesIO()
    Image.new("RGB", (112, 112)).save(black, "PNG")
    monkeypatch.setitem(IMAGES, "black", black.getvalue())
    swapped = prompts[0].model_copy(update={"images": ["black"]})
    assert differences(directory, swapped, groups[0]).mean() > 10 * noise
