"""A step is fitted to the memory of a GPU by a prediction, and says what to change if it fails."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from bapo_core.config import RunConfig, config_from
from bapo_core.errors import BapoError
from services.trainer import shard
from services.trainer.loop import explain_out_of_memory
from services.trainer.lora import add_adapters
from services.trainer.memory import (
    MARGIN,
    MemoryPlan,
    ModelSize,
    free_bytes,
    longest_sequence,
    out_of_memory_remedy,
    plan_memory,
    predict_bytes,
)
from services.trainer.shard import size_of

GIB = float(1 << 30)
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "num_key_value_heads": 8},
    "qwen3-4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
    | {"num_attention_heads": 32, "num_key_value_heads": 8},
}


@lru_cache
def size(shape: str, *, lora: int = 0, half_frozen: bool = False) -> ModelSize:
    """Returns the sizes of a model, which is built without weights."""
    config = Qwen3Config(**SHAPES[shape], head_dim=128, tie_word_embeddings=True, vocab_size=151936)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
        add_adapters(model, config_from({"lora": {"rank": lora}}).lora, 0)
    found = size_of(model, half_frozen=half_frozen)
    assert found is not None
    return found


def test_the_sizes_of_a_model_are_counted() -> None:
    model = size("qwen3-0.6b")
    assert model.trained == pytest.approx(596e6, rel=0.01)
    assert (model.frozen, model.layers, model.width) == (0, 28, 1024)
    assert model.root == model.root_trained == 151936 * 1024 + 1024
    assert model.largest_layer * 28 + model.root == model.trained
    adapted = size("qwen3-4b", lora=16)
    assert adapted.frozen == pytest.approx(4.02e9, rel=0.01)
    assert adapted.trained == pytest.approx(33e6, rel=0.01)
    assert adapted.root_trained == 0


@pytest.mark.parametrize(
    ("shape", "lora", "tokens", "mode", "reserved_gib"),
    [
        ("qwen3-0.6b", 0, 16_384, "full", 13.6),
        ("qwen3-0.6b", 0, 16_384, "none", 45.3),
        ("qwen3-0.6b", 0, 65_536, "full", 22.7),
        ("qwen3-4b", 16, 16_384, "full", 23.7),
    ],
)
def test_predictions_are_near_what_an_h100_reserved(
    shape: str, lora: int, tokens: int, mode: Any, reserved_gib: float
) -> None:
    """By benchmarks/results/gpu/trainer.json, with frozen weights in fp32."""
    predicted = predict_bytes(size(shape, lora=lora), tokens, mode) / GIB
    assert reserved_gib / MARGIN <= predicted <= 1.05 * reserved_gib


@pytest.mark.parametrize("card", [80, 24, 16])
@pytest.mark.parametrize(("shape", "lora"), [("qwen3-0.6b", 0), ("qwen3-4b", 16)])
def test_models_start_with_the_defaults_on_cards_of_several_sizes(
    card: int, shape: str, lora: int
) -> None:
    """0.5 GiB of a card are the driver's and CUDA's own."""
    config = config_from({"lora": {"rank": lora}})
    model = size(shape, lora=lora, half_frozen=bool(lora))
    plan = plan_memory(config, model, available=(card - 0.5) * GIB)
    assert plan.predicted is not None
    assert plan.predicted * MARGIN <= (card - 0.5) * GIB
    assert longest_sequence(config) <= plan.microbatch_tokens <= config.optimizer.microbatch_tokens
    # A card of 80 GB holds all activations of the small model.
    assert (plan.checkpointing == "none") == (card == 80 and shape == "qwen3-0.6b")


def test_a_cpu_keeps_activations_and_micro_batches_as_they_are() -> None:
    for mode, expected in (("auto", "none"), ("full", "full")):
        config = config_from({"trainer": {"gradient_checkpointing": mode}})
        plan = plan_memory(config, size("qwen3-4b"))
        assert plan == MemoryPlan(expected, config.optimizer.microbatch_tokens)  # type: ignore[arg-type]


@given(
    available=st.floats(1e9, 2e11),
    ranks=st.integers(1, 16),
    more=st.integers(0, 200_000),
    response=st.integers(1, 60_000),
    lora=st.booleans(),
    mode=st.sampled_from(["auto", "none", "selective", "full"]),
    offload=st.booleans(),
)
def test_a_plan_fits_whenever_any_plan_does(
    available: float,
    ranks: int,
    more: int,
    response: int,
    lora: bool,
    mode: str,
    offload: bool,
) -> None:
    tokens = 64 + response + more
    config = config_from(
        {
            "rollout": {"max_prompt_tokens": 64, "max_response_tokens": response},
            "optimizer": {"microbatch_tokens": tokens},
            "trainer": {"gradient_checkpointing": mode, "offload": offload},
        }
    )
    model = _SIZES[lora]
    plan = plan_memory(config, model, ranks=ranks, available=available)
    shortest = longest_sequence(config)
    assert shortest <= plan.microbatch_tokens <= tokens
    assert mode == "auto" or plan.checkpointing == mode
    assert plan.predicted is not None
    if plan.predicted * MARGIN > available * 1.0001:
        # Nothing smaller would have been allowed.
        assert plan.microbatch_tokens == shortest
        assert plan.checkpointing == ("full" if mode == "auto" else mode)


_SIZES = {False: size("qwen3-0.6b"), True: size("qwen3-4b", lora=16, half_frozen=True)}


def test_reference_critic_and_ranks_count() -> None:
    model = size("qwen3-0.6b")
    plain = predict_bytes(model, 1_000, "full")
    assert predict_bytes(model, 1_000, "full", reference=True) - plain == 4 * model.trained
    assert predict_bytes(model, 1_000, "full", critic=True) - plain == 16 * model.trained
    assert predict_bytes(model, 1_000, "full", supervised=True) - plain == 8 * model.trained
    assert plain - predict_bytes(model, 1_000, "full", ranks=2) == 8 * model.trained


def run_config(**sections: Any) -> RunConfig:
    return config_from(sections)


@pytest.mark.parametrize(
    ("plan", "offload", "expected", "not_expected"),
    [
        (
            MemoryPlan("none", 16_384, 1.0, 1.0),
            False,
            ["trainer.gradient_checkpointing=full", "trainer.offload=true", "=10240, one sequence"],
            ["max_response_tokens"],
        ),
        (
            MemoryPlan("full", 10_240, 1.0, 1.0),
            False,
            ["trainer.offload=true", "lower rollout.max_response_tokens"],
            ["gradient_checkpointing", "microbatch_tokens"],
        ),
        (
            MemoryPlan("full", 16_384, 1.0, 1.0),
            True,
            ["trainer.processes", "=10240, one sequence"],
            ["gradient_checkpointing", "offload"],
        ),
    ],
)
def test_the_message_names_only_keys_that_would_help(
    plan: MemoryPlan, offload: bool, expected: list[str], not_expected: list[str]
) -> None:
    config = run_config(trainer={"offload": offload})
    with (
        pytest.raises(BapoError) as caught,
        explain_out_of_memory(lambda: out_of_memory_remedy(config, plan)),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert all(text in message for text in expected), message
    assert not any(text in message for text in not_expected), message


def test_a_failed_allocation_on_the_cpu_names_the_remedies() -> None:
    remedy = r"out of memory .*lower optimizer.microbatch_tokens"
    with pytest.raises(BapoError, match=remedy), explain_out_of_memory():
        torch.empty(1 << 55)


def test_a_failed_allocation_on_a_gpu_too() -> None:
    with pytest.raises(BapoError, match="CUDA out of memory"), explain_out_of_memory():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(RuntimeError, match="something else"), explain_out_of_memory():
        raise RuntimeError("something else")


def test_frozen_weights_are_stored_as_the_models_files_store_them(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without loss: what is bfloat16 in the files is bfloat16 on the GPU."""
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    config = Qwen3Config()
    for dtype, halved in ((torch.float32, False), (torch.bfloat16, True)):
        config.dtype = dtype
        monkeypatch.setattr(
            shard.AutoConfig, "from_pretrained", lambda _, config=config, **_options: config
        )
        assert shard.halve_frozen(model, tmp_path) is halved  # type: ignore[type-var]
    assert (model.weight.dtype, model.bias.dtype) == (torch.float32, torch.bfloat16)
    model.bias.requires_grad_(True)
    assert not shard.halve_frozen(model, tmp_path)  # type: ignore[type-var]


def test_a_plan_says_what_it_is() -> None:
    plan = replace(MemoryPlan("full", 12_000), predicted=12.5 * GIB, available=15.5 * GIB)
    assert str(plan) == (
        "gradient_checkpointing full, micro-batches of at most 12,000 tokens: 12.5 of 15.5 GiB "
        "predicted"
    )


def test_memory_that_an_engine_will_take_is_not_planned_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert free_bytes() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70, 80))
    assert free_bytes() == 70
    assert free_bytes(0.25) == 50
    assert free_bytes(1.0) == 0
