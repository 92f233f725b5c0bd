"""The tiny base model: its tokenizer, its directory, its reproducibility."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo_core.errors import BapoError
from services.model.resolve import BUNDLED_MODELS
from services.rollout.api.wire import PromptRequest, Sampling
from services.rollout.transformers_engine import TransformersEngine
from tools.tiny_models import text as tiny
from tools.tiny_models.digits import build_tiny_distinct_model, build_tiny_sorting_model

TEXT = "3 7 25=46:(3*7)+25-4/1"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tiny") / "model", seed=0)


def build(directory: Path, *, seed: int, steps: int = 3) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "EXAMPLES", 256)
        tiny.build_tiny_model(directory, seed=seed, steps=steps)
    return directory


def test_the_tokenizer_gives_back_what_it_reads(built: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built)
    ids = tokenizer.encode(TEXT)
    assert len(ids) == len(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == TEXT


@pytest.mark.parametrize("text", ["3 7 x=46:", "3\n7=1:", "３=3:"])
def test_a_character_it_does_not_know_is_an_error(built: Path, text: str) -> None:
    with pytest.raises(Exception, match="WordLevel"):
        AutoTokenizer.from_pretrained(built).encode(text)


def test_the_chat_template_is_the_content(built: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built)
    messages = [{"role": "user", "content": "3 7 25=46:"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "3 7 25=46:"
    encoding: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert encoding["input_ids"] == tokenizer.encode("3 7 25=46:")


def test_the_directory_is_an_ordinary_model(built: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(built)
    tokenizer = AutoTokenizer.from_pretrained(built)
    assert 7e5 < model.num_parameters() < 9e5
    assert not model.config.tie_word_embeddings
    generation = json.loads((built / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.eos_token_id
    assert generation["pad_token_id"] == tokenizer.pad_token_id
    assert not list(built.parent.glob("*.partial"))


def test_the_engine_serves_it(built: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built)
    engine = TransformersEngine()
    engine.load(built, 1)
    (group,) = engine.generate(
        [PromptRequest(prompt_token_ids=tokenizer.encode("3 7 25=46:"), seed=0)],
        Sampling(temperature=1.0, max_tokens=8, group_size=4),
        policy_version=1,
    )
    assert len(group.responses) == 4


def test_a_seed_is_a_model(built: Path, tmp_path: Path) -> None:
    weights = load_file(built / "model.safetensors")
    torch.manual_seed(99)  # the surroundings have no influence
    again = load_file(build(tmp_path / "again", seed=0) / "model.safetensors")
    other = load_file(build(tmp_path / "other", seed=1) / "model.safetensors")
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert any(not torch.equal(weights[name], other[name]) for name in weights)


def test_building_leaves_the_callers_randomness_and_threads(tmp_path: Path) -> None:
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    build(tmp_path / "model", seed=0, steps=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_progress_is_reported_for_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "EXAMPLES", 256)
    seen: list[tuple[int, int]] = []
    tiny.build_tiny_model(
        tmp_path / "model", seed=0, steps=3, progress=lambda d, n, _: seen.append((d, n))
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_build_into_a_directory_with_files_is_refused_and_leaves_them(built: Path) -> None:
    before = (built / "model.safetensors").read_bytes()
    with pytest.raises(BapoError, match="is not empty; name a new directory"):
        tiny.build_tiny_model(built, seed=5, steps=2)
    assert (built / "model.safetensors").read_bytes() == before


def test_a_build_goes_into_the_working_directory_if_it_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "EXAMPLES", 256)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    tiny.build_tiny_model(Path(), seed=0, steps=1)
    assert (tmp_path / "empty" / "model.safetensors").exists()


def test_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(done: int, total: int, loss: float) -> None:
        raise RuntimeError("interrupted")

    monkeypatch.setattr(tiny, "EXAMPLES", 256)
    with pytest.raises(RuntimeError, match="interrupted"):
        tiny.build_tiny_model(tmp_path / "model", seed=5, steps=2, progress=fail)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "build"),
    [("tiny-sorting", build_tiny_sorting_model), ("tiny-distinct", build_tiny_distinct_model)],
)
def test_a_model_of_digits_is_a_seeds_and_knows_its_prompts(
    name: str, build: Callable[..., None], tmp_path: Path
) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    for directory in (first, again):
        build(directory, seed=0, steps=2)
    weights, same = (load_file(each / "model.safetensors") for each in (first, again))
    assert all(torch.equal(weights[key], same[key]) for key in weights)
    bundled = load_file(BUNDLED_MODELS[name] / "model.safetensors")
    assert {key: tensor.shape for key, tensor in bundled.items()} == {
        key: tensor.shape for key, tensor in weights.items()
    }
    for directory in (first, BUNDLED_MODELS[name]):
        tokenizer = AutoTokenizer.from_pretrained(directory)
        assert tokenizer.decode(tokenizer.encode("0918273645=")) == "0918273645="
