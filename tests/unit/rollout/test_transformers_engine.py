"""The engine samples the model's distribution exactly, and every sample from its own seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from services.rollout.engine import (
    GeneratedGroup,
    GenerationRequest,
    ModelLoadError,
    SamplingParams,
    WrongVersion,
)
from services.rollout.transformers_engine import TransformersEngine

VOCABULARY, END = 12, 1


def save_model(directory: Path, seed: int, hidden: int = 32) -> Path:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
        eos_token_id=END,
        pad_token_id=0,
        # Far from uniform, so that a wrong log-prob shows.
        initializer_range=0.3,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def engine(directory: Path) -> TransformersEngine:
    engine = TransformersEngine()
    engine.load(directory, 7)
    return engine


RAGGED = [
    GenerationRequest([2, 3, 4, 5, 6], 10),
    GenerationRequest([7], 11),
    GenerationRequest([8, 9, 10, 2, 3, 4, 5, 6, 7], 12),
]
SAMPLING = SamplingParams(temperature=0.7, max_tokens=20, group_size=6)


def generate(engine: TransformersEngine, requests: list[GenerationRequest]) -> list[GeneratedGroup]:
    return engine.generate(requests, SAMPLING, policy_version=engine.version)


def test_log_probs_are_those_of_a_forward_pass_over_the_whole(
    engine: TransformersEngine, directory: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    checked = 0
    for request, group in zip(RAGGED, generate(engine, RAGGED), strict=True):
        for response in group.responses:
            prompt = list(request.prompt_token_ids)
            with torch.no_grad():
                logits = model(torch.tensor([prompt + response.token_ids])).logits[0]
            expected = torch.log_softmax(logits / SAMPLING.temperature, dim=-1)
            for t, (token, logprob) in enumerate(
                zip(response.token_ids, response.logprobs, strict=True)
            ):
                assert logprob == pytest.approx(
                    float(expected[len(prompt) - 1 + t, token]), abs=1e-5
                )
                checked += 1
    assert checked > 50


def test_a_sample_depends_on_its_seed_and_on_nothing_else(directory: Path) -> None:
    roomy, cramped = TransformersEngine(), TransformersEngine(max_sequences=6)
    for engine in (roomy, cramped):
        engine.load(directory, 7)
    together = generate(roomy, RAGGED)
    assert generate(roomy, RAGGED) == together
    waves = generate(cramped, RAGGED)
    alone = [generate(roomy, [request])[0] for request in RAGGED]
    for one, other, third in zip(together, waves, alone, strict=True):
        tokens = [response.token_ids for response in one.responses]
        assert tokens == [response.token_ids for response in other.responses]
        assert tokens == [response.token_ids for response in third.responses]
    reseeded = generate(roomy, [GenerationRequest(RAGGED[0].prompt_token_ids, 99)])[0]
    assert reseeded.responses != together[0].responses


def test_responses_end_with_the_end_token_or_at_the_limit(engine: TransformersEngine) -> None:
    responses = [r for group in generate(engine, RAGGED) for r in group.responses]
    stopped = [r for r in responses if r.finish_reason == "stop"]
    cut = [r for r in responses if r.finish_reason == "length"]
    assert stopped
    assert cut
    for response in stopped:
        assert response.token_ids[-1] == END
        assert END not in response.token_ids[:-1]
        assert len(response.token_ids) <= SAMPLING.max_tokens
    for response in cut:
        assert END not in response.token_ids
        assert len(response.token_ids) == SAMPLING.max_tokens


def test_groups_are_whole_and_carry_their_version(engine: TransformersEngine) -> None:
    groups = generate(engine, RAGGED)
    assert [len(group.responses) for group in groups] == [6, 6, 6]
    assert {group.policy_version for group in groups} == {7}


def test_frequencies_are_the_models_probabilities(
    engine: TransformersEngine, directory: Path
) -> None:
    prompt = [2, 3, 4]
    many = SamplingParams(temperature=1.3, max_tokens=1, group_size=4000)
    (group,) = engine.generate([GenerationRequest(prompt, 5)], many, policy_version=7)
    counts = torch.zeros(VOCABULARY)
    for response in group.responses:
        counts[response.token_ids[0]] += 1
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        probabilities = torch.softmax(model(torch.tensor([prompt])).logits[0, -1] / 1.3, dim=-1)
    expected = probabilities * 4000
    common = expected > 5
    chi_square = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    # 99.99% quantile for at most 11 degrees of freedom.
    assert chi_square < 38


def test_new_weights_are_loaded_in_place(directory: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", seed=1)
    engine, fresh = TransformersEngine(), TransformersEngine()
    engine.load(directory, 1)
    before = generate(engine, RAGGED)
    engine.load(other, 2)
    fresh.load(other, 2)
    after = generate(engine, RAGGED)
    assert after == generate(fresh, RAGGED)
    assert [g.responses for g in after] != [g.responses for g in before]
    engine.load(directory, 1)
    assert generate(engine, RAGGED) == before


def test_another_architecture_is_built_anew(directory: Path, tmp_path: Path) -> None:
    wider = save_model(tmp_path / "wider", seed=1, hidden=48)
    engine = TransformersEngine()
    engine.load(directory, 1)
    engine.load(wider, 2)
    assert len(generate(engine, RAGGED)) == 3


def test_another_version_is_refused(engine: TransformersEngine) -> None:
    with pytest.raises(WrongVersion, match="asked for policy version 8, but the engine serves 7"):
        engine.generate(RAGGED, SAMPLING, policy_version=8)
    with pytest.raises(WrongVersion):
        TransformersEngine().generate(RAGGED, SAMPLING, policy_version=0)


def test_directories_that_hold_no_model_are_refused(directory: Path, tmp_path: Path) -> None:
    engine = TransformersEngine()
    with pytest.raises(ModelLoadError, match="not a model directory"):
        engine.load(tmp_path, 1)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="not JSON"):
        engine.load(tmp_path, 1)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    with pytest.raises(ModelLoadError, match="no causal language model can be loaded"):
        engine.load(tmp_path, 1)


def test_weights_that_do_not_fit_are_refused_and_nothing_is_served(
    directory: Path, tmp_path: Path
) -> None:
    engine = TransformersEngine()
    engine.load(directory, 1)
    wider = save_model(tmp_path / "wider", seed=1, hidden=48)
    (wider / "config.json").write_bytes((directory / "config.json").read_bytes())
    with pytest.raises(ModelLoadError, match=r"do not fit its config\.json"):
        engine.load(wider, 2)
    with pytest.raises(WrongVersion):
        engine.generate(RAGGED, SAMPLING, policy_version=2)
    (wider / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"has no \*\.safetensors"):
        engine.load(wider, 2)


@pytest.mark.parametrize("field", ["temperature", "max_tokens", "group_size"])
def test_sampling_parameters_must_be_positive(field: str) -> None:
    values = {"temperature": 1.0, "max_tokens": 1, "group_size": 1, field: 0}
    with pytest.raises(ValueError, match="must be positive"):
        SamplingParams(**values)  # type: ignore[arg-type]
