"""Engine and trainer score models with recurrent layers as transformers does for each sequence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm3Config,
    Lfm3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

from bapo_core.config import config_from
from bapo_core.errors import BapoError
from services.buffer.api.trajectories import TrajectoryGroup, TrajectoryResponse, table_of
from services.rollout.api.wire import GeneratedGroup, PromptRequest, Sampling
from services.rollout.errors import ModelLoadError
from services.rollout.transformers_engine import TransformersEngine
from services.trainer.data import Batch, collate, microbatches
from services.trainer.load_policy import empty_policy, load_policy
from services.trainer.policy import response_logprobs
from services.trainer.ranks import Ranks
from services.trainer.update import Updater
from tests.micro import END, RECURRENT
from tests.stand_in_gpu import compare_with_cpu, stand_in_gpu

PROMPTS = [[2], [3, 4, 5, 6, 7, 8, 9], [10, 11, 12], [5, 5, 5, 5]]
TEMPERATURE, G = 0.9, 5
SMALL: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": END,
    "bos_token_id": None,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}

GRANITE: dict[str, Any] = {
    **SMALL,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 4,
    "num_local_experts": 0,
    "shared_intermediate_size": 48,
    "logits_scaling": 0.5,
}

MODELS: dict[str, Callable[[], Any]] = {
    "qwen3_next": lambda: Qwen3NextForCausalLM(
        Qwen3NextConfig(**{**SMALL, **EXPERTS, **RECURRENT, "head_dim": 8})
    ),
    "lfm2": lambda: Lfm2ForCausalLM(
        Lfm2Config(**SMALL, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)
    ),
    "granitemoehybrid": lambda: GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(**GRANITE, layer_types=["mamba", "attention"])
    ),
    "lfm3": lambda: Lfm3ForCausalLM(
        Lfm3Config(
            **{**SMALL, "num_hidden_layers": 3},
            layer_types=["conv", "sliding_attention", "full_attention"],
            sliding_window=6,
            head_dim=16,
        )
    ),
}


def _lfm2_with_bias() -> Any:
    layers = ["conv", "full_attention"]
    config = Lfm2Config(**SMALL, layer_types=layers, block_auto_adjust_ff_dim=False, conv_bias=True)
    model: Any = Lfm2ForCausalLM(config)
    torch.nn.init.ones_(model.model.layers[0].conv.in_proj.bias)
    return model


NOT_SHARED: dict[str, tuple[str, Callable[[], Any]]] = {
    # Its layers have keys, values and a recurrent state at once.
    "falcon_h1": (
        "LinearAttentionAndFullAttentionLayer",
        lambda: FalconH1ForCausalLM(
            FalconH1Config(
                **SMALL,
                mamba_n_heads=8,
                mamba_d_head=8,
                mamba_d_ssm=64,
                mamba_d_state=8,
                mamba_chunk_size=4,
                lm_head_multiplier=0.25,
            )
        ),
    ),
    "recurrent_gemma": (
        "they are not in the cache",
        lambda: RecurrentGemmaForCausalLM(
            RecurrentGemmaConfig(
                **{**SMALL, "num_hidden_layers": 3},
                lru_width=32,
                attention_window_size=8,
                block_types=["recurrent", "recurrent", "attention"],
                logits_soft_cap=2.0,
            )
        ),
    ),
    "lfm2_with_bias": (
        "padding before a prompt changes them",
        _lfm2_with_bias,
    ),
}
"""Models whose states the engine cannot share, and why."""


def save(build: Callable[[], Any], directory: Path) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        build().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(MODELS[request.param], tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def groups(directory: Path) -> list[GeneratedGroup]:
    engine = TransformersEngine()
    engine.load(directory, 1)
    return generate(engine)


def generate(engine: TransformersEngine) -> list[GeneratedGroup]:
    prompts = [
        PromptRequest(prompt_token_ids=prompt, seed=index) for index, prompt in enumerate(PROMPTS)
    ]
    sampling = Sampling(temperature=TEMPERATURE, max_tokens=20, group_size=G)
    return engine.generate(prompts, sampling, policy_version=1)


@pytest.fixture(scope="module")
def batch(groups: list[GeneratedGroup]) -> Batch:
    table = table_of(
        [
            TrajectoryGroup(
                prompt,
                prompt_token_ids,
                1,
                [
                    TrajectoryResponse(r.token_ids, r.logprobs, 0.0, r.finish_reason, "", False)
                    for r in group.responses
                ],
            )
            for prompt, prompt_token_ids, group in zip("abcd", PROMPTS, groups, strict=True)
        ]
    )
    return collate(None, table)


def teacher_forced(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """Returns log-probs of one pass of transformers over one sequence."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).logits
    logprobs = torch.log_softmax(logits[0, len(prompt) - 1 : -1] / TEMPERATURE, dim=-1)
    return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0]


def test_the_engine_scores_its_samples_as_transformers_does(
    directory: Path, groups: list[GeneratedGroup]
) -> None:
    """Some rows of the batch are finished, and dropped, before others."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    lengths = {len(response.token_ids) for group in groups for response in group.responses}
    assert len(lengths) > 5
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for response in group.responses:
            expected = teacher_forced(model, prompt, response.token_ids)
            assert response.logprobs == pytest.approx(expected.tolist(), abs=2e-5)


def test_the_trainer_scores_them_as_the_engine_does(directory: Path, batch: Batch) -> None:
    policy = load_policy(directory)
    assert not policy.packs
    rows = torch.randperm(len(batch.lengths), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logprobs, _ = response_logprobs(policy, batch, rows, TEMPERATURE)
    assert batch.mask.sum() > 100
    assert logprobs == pytest.approx(batch.behavior_logprobs[rows], abs=2e-5)


def test_a_gpu_computes_what_a_cpu_computes(
    directory: Path, batch: Batch, groups: list[GeneratedGroup]
) -> None:
    assert compare_with_cpu(load_policy(directory), batch, TEMPERATURE).kernel_heads == []
    engine = TransformersEngine()
    model = AutoModelForCausalLM.from_pretrained(directory)
    with stand_in_gpu():
        engine.use(model.to("cuda"), 1)
        for group, expected in zip(generate(engine), groups, strict=True):
            for response, other in zip(group.responses, expected.responses, strict=True):
                assert response.token_ids == other.token_ids
                assert response.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_gradients_do_not_depend_on_what_a_sequence_is_computed_with(
    directory: Path, batch: Batch
) -> None:
    policy = load_policy(directory)
    gradients = []
    for size in (len(batch.lengths), 1):
        policy.zero_grad()
        for rows in torch.arange(len(batch.lengths)).split(size):
            response_logprobs(policy, batch, rows, TEMPERATURE)[0].sum().backward()
        gradients.append(
            torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
        )
    together, alone = gradients
    assert (together - alone).norm() < 1e-4 * alone.norm()


def test_a_rank_without_the_weights_builds_the_same_model(directory: Path) -> None:
    loaded, empty = load_policy(directory), empty_policy(directory)
    assert not empty.packs
    assert {n: p.shape for n, p in loaded.named_parameters()} == {
        n: p.shape for n, p in empty.named_parameters()
    }


def test_padding_counts_in_a_micro_batch(batch: Batch) -> None:
    rows = torch.arange(len(batch.lengths))
    longest = int(batch.lengths.max())
    for budget in (longest, 2 * longest, 100, 1000):
        parts = microbatches(batch, rows, budget, padded=True)
        assert sorted(torch.cat(parts).tolist()) == rows.tolist()
        for part in parts:
            assert len(part) * int(batch.lengths[part].max()) <= budget
    assert len(microbatches(batch, rows, 1000, padded=True)) == 1


def test_an_update_counts_the_padding(directory: Path, batch: Batch) -> None:
    budget = 3 * int(batch.lengths.max())
    config = config_from(
        {
            "rollout": {
                "group_size": G,
                "prompts_per_step": 4,
                "max_prompt_tokens": 16,
                "max_response_tokens": 24,
            },
            "optimizer": {"minibatch_prompts": 4, "microbatch_tokens": budget},
        }
    )
    updater = Updater(config, load_policy(directory), Ranks(0, 1))
    computed = []
    updater.policy.register_forward_pre_hook(
        lambda _, arguments: computed.append(arguments[0].sequences.pad_indices.numel())
    )
    updater.score(batch)
    assert len(computed) > 1
    assert max(computed) <= budget


def test_a_model_whose_state_cannot_be_shared_is_refused_in_one_line(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In earlier transformers, each model has a cache of its own."""
    monkeypatch.setattr("services.rollout.transformers_engine.LinearAttentionLayer", None)
    with pytest.raises(ModelLoadError, match="a state that this engine cannot share between"):
        TransformersEngine().load(directory, 1)


@pytest.mark.parametrize("name", NOT_SHARED)
def test_a_model_whose_states_are_of_another_kind_is_refused(name: str, tmp_path: Path) -> None:
    reason, build = NOT_SHARED[name]
    with pytest.raises(ModelLoadError, match=f"cannot share between samples \\({reason}\\)"):
        TransformersEngine().load(save(build, tmp_path), 1)


@pytest.mark.parametrize("name", ["falcon_h1", "recurrent_gemma"])
def test_the_trainer_multiplies_and_caps_logits_as_the_model_does(
    name: str, tmp_path: Path, batch: Batch
) -> None:
    """This engine does not serve the two, but vLLM serves Falcon-H1."""
    directory = save(NOT_SHARED[name][1], tmp_path)
    model = AutoModelForCausalLM.from_pretrained(directory)
    rows = torch.arange(len(batch.lengths))
    with torch.no_grad():
        logprobs, _ = response_logprobs(load_policy(directory), batch, rows, TEMPERATURE)
    for row in rows:
        prompt, length = int(batch.prompt_lengths[row]), int(batch.lengths[row])
        tokens = batch.tokens[row, :length].tolist()
        expected = teacher_forced(model, tokens[:prompt], tokens[prompt:])
        assert logprobs[row, : length - prompt] == pytest.approx(expected, abs=2e-5)


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save(MODELS["granitemoehybrid"], tmp_path)
    monkeypatch.setattr("services.trainer.families._LOGIT_DIVISORS", ())
    with pytest.raises(BapoError, match=r"log-probs of a Granite\w+ differ from the model's own"):
        load_policy(directory)


def test_a_hybrid_architecture_with_attention_alone_is_packed(tmp_path: Path) -> None:
    """The smallest Granite 4 is one."""
    config = GraniteMoeHybridConfig(**GRANITE, layer_types=["attention"] * 2)
    directory = save(lambda: GraniteMoeHybridForCausalLM(config), tmp_path)
    TransformersEngine().load(directory, 1)
    assert load_policy(directory).packs
