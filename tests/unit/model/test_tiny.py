"""The tiny base model: an ordinary directory, made whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.model import tiny
from services.rollout.collector import render


@pytest.fixture(autouse=True)
def _few_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "EXAMPLES", 200)


def test_the_tokenizer_spells_and_reads_back(tmp_path: Path) -> None:
    tiny.build_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = render(tokenizer, [{"role": "user", "content": "3 7 25=46:"}])
    assert len(ids) == len("3 7 25=46:")
    assert tokenizer.decode(ids) == "3 7 25=46:"
    assert (
        tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "3 7 25=46:"
    )


def test_the_directory_loads_and_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        tiny.build_tiny_model(tmp_path / name, seed=seed, steps=2)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert 700_000 < model.num_parameters() < 1_000_000
    assert model.generation_config.eos_token_id == tiny.build_tokenizer().eos_token_id


def test_a_failed_build_leaves_no_model(tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        tiny.build_tiny_model(tmp_path / "model", seed=0, steps=2, progress=fail)
    assert not (tmp_path / "model").exists()


def test_progress_is_told(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    tiny.build_tiny_model(
        tmp_path / "model",
        seed=0,
        steps=3,
        progress=lambda done, total, _: seen.append((done, total)),
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]
