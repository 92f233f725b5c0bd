"""The transformers engine returns exact log-probs and reproducible samples, and loads safely."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from services.rollout.api.wire import GeneratedGroup, PromptRequest, Sampling
from services.rollout.errors import ModelLoadError, WrongVersion
from services.rollout.sampling import draw_uniforms, sample_tokens
from services.rollout.transformers_engine import NonFiniteLogprobs, TransformersEngine
from tests.micro import END, micro_config, micro_model

VOCABULARY = 13
RAGGED = [[2], [3, 4, 5, 6, 7, 8, 9], [10, 11, 12], [5, 5, 5, 5]]


def save_model(directory: Path, **options: Any) -> Path:
    micro_model(**options).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "micro")


@pytest.fixture
def engine(directory: Path) -> TransformersEngine:
    engine = TransformersEngine()
    engine.load(directory, 1)
    return engine


def requests(prompts: Sequence[list[int]] = RAGGED) -> list[PromptRequest]:
    return [
        PromptRequest(prompt_token_ids=prompt, seed=100 + i) for i, prompt in enumerate(prompts)
    ]


def sampling(max_tokens: int = 12, *, group_size: int = 8, temperature: float = 1.0) -> Sampling:
    return Sampling(temperature=temperature, max_tokens=max_tokens, group_size=group_size)


def teacher_forced(
    model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float
) -> Tensor:
    """Returns log-probs (tokens,) of one forward pass over the whole sequence, without padding."""
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0]


def worst_error(
    model: Any, prompts: Sequence[Sequence[int]], groups: Sequence[GeneratedGroup], t: float
) -> float:
    return max(
        float((teacher_forced(model, p, r.token_ids, t) - torch.tensor(r.logprobs)).abs().max())
        for p, group in zip(prompts, groups, strict=True)
        for r in group.responses
    )


class TestLogprobs:
    @pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
    def test_equal_teacher_forcing_with_ragged_prompts(
        self, engine: TransformersEngine, directory: Path, temperature: float
    ) -> None:
        groups = engine.generate(
            requests(), sampling(20, temperature=temperature), policy_version=1
        )
        model = AutoModelForCausalLM.from_pretrained(directory)
        lengths = {len(r.token_ids) for group in groups for r in group.responses}
        assert len(lengths) > 3, "rows must end at different times for compaction to be tested"
        assert worst_error(model, RAGGED, groups, temperature) < 1e-5

    def test_hold_for_a_model_in_use_with_another_attention(self, directory: Path) -> None:
        # Eager attention adds its mask: a boolean one would be wrong without any error.
        model: Any = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
        engine = TransformersEngine()
        engine.use(model.eval(), 4)
        groups = engine.generate(requests(), sampling(20), policy_version=4)
        assert worst_error(model, RAGGED, groups, 1.0) < 1e-5

    def test_hold_for_a_sliding_window_shorter_than_the_sequences(self, tmp_path: Path) -> None:
        kinds = ["sliding_attention", "full_attention"]
        path = save_model(
            tmp_path / "window", sliding_window=4, use_sliding_window=True, layer_types=kinds
        )
        engine = TransformersEngine()
        engine.load(path, 1)
        groups = engine.generate(requests(), sampling(20), policy_version=1)
        model = AutoModelForCausalLM.from_pretrained(path)
        assert worst_error(model, RAGGED, groups, 1.0) < 1e-5

    def test_that_are_not_finite_are_refused(
        self, engine: TransformersEngine, directory: Path, tmp_path: Path
    ) -> None:
        broken = shutil.copytree(directory, tmp_path / "broken")
        weights = load_file(broken / "model.safetensors")
        weights["lm_head.weight"] = torch.full((VOCABULARY, 32), float("nan"))
        save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
        engine.load(broken, 2)
        with pytest.raises(NonFiniteLogprobs, match="not finite"):
            engine.generate(requests(), sampling(), policy_version=2)


class TestSamples:
    def test_are_the_same_bit_for_bit_when_repeated(self, engine: TransformersEngine) -> None:
        first = engine.generate(requests(), sampling(), policy_version=1)
        assert engine.generate(requests(), sampling(), policy_version=1) == first

    def test_do_not_depend_on_what_else_is_in_the_batch(self, engine: TransformersEngine) -> None:
        together = engine.generate(requests(), sampling(), policy_version=1)
        for request, group in zip(requests(), together, strict=True):
            (alone,) = engine.generate([request], sampling(), policy_version=1)
            for a, b in zip(alone.responses, group.responses, strict=True):
                assert a.token_ids == b.token_ids
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)

    def test_do_not_depend_on_how_many_fit_at_a_time(self, directory: Path) -> None:
        small, large = TransformersEngine(max_sequences=8), TransformersEngine()
        tokens = []
        for engine in (small, large):
            engine.load(directory, 1)
            groups = engine.generate(requests(), sampling(), policy_version=1)
            tokens.append([r.token_ids for group in groups for r in group.responses])
        assert tokens[0] == tokens[1]

    def test_of_a_group_and_of_other_seeds_differ(self, engine: TransformersEngine) -> None:
        twice = [PromptRequest(prompt_token_ids=[2, 3], seed=seed) for seed in (1, 2)]
        a, b = engine.generate(twice, sampling(), policy_version=1)
        assert len({tuple(r.token_ids) for r in a.responses}) > 1
        assert [r.token_ids for r in a.responses] != [r.token_ids for r in b.responses]

    def test_follow_the_softmax(self, engine: TransformersEngine, directory: Path) -> None:
        draws, temperature = 20_000, 0.8
        (group,) = engine.generate(
            [PromptRequest(prompt_token_ids=[4, 9], seed=5)],
            sampling(1, group_size=draws, temperature=temperature),
            policy_version=1,
        )
        counts = torch.zeros(VOCABULARY)
        for response in group.responses:
            counts[response.token_ids[0]] += 1
        model = AutoModelForCausalLM.from_pretrained(directory)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[4, 9]])).logits[0, -1]
        expected = draws * torch.softmax(logits / temperature, dim=-1)
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert chi_square < 32.9, "beyond the 99.9 % quantile for 12 degrees of freedom"

    def test_are_never_impossible(self) -> None:
        logits = torch.tensor([[-torch.inf, 0.3, -torch.inf, 1.1, 0.2, -torch.inf]])
        for uniform in (0.0, 0.25, 0.5, 1 - 2**-53):
            tokens, logprobs = sample_tokens(
                logits, torch.tensor([uniform], dtype=torch.float64), temperature=1.0
            )
            assert int(tokens) in (1, 3, 4)
            assert bool(torch.isfinite(logprobs).all())

    def test_with_a_longer_limit_begin_the_same(self) -> None:
        assert torch.equal(draw_uniforms(3, 4, 30)[:10], draw_uniforms(3, 4, 10))


class TestEnding:
    def test_a_response_has_its_end_token_or_the_limit(self, engine: TransformersEngine) -> None:
        groups = engine.generate(requests(), sampling(10), policy_version=1)
        reasons = set()
        for response in (r for group in groups for r in group.responses):
            reasons.add(response.finish_reason)
            assert len(response.token_ids) == len(response.logprobs) <= 10
            assert END not in response.token_ids[:-1]
            if response.finish_reason == "stop":
                assert response.token_ids[-1] == END
            else:
                assert len(response.token_ids) == 10
                assert response.token_ids[-1] != END
        assert reasons == {"stop", "length"}

    def test_an_end_token_in_the_last_place_is_a_stop(self, engine: TransformersEngine) -> None:
        groups = engine.generate(requests(), sampling(1, group_size=64), policy_version=1)
        ended = [r for g in groups for r in g.responses if r.token_ids == [END]]
        assert ended
        assert {r.finish_reason for r in ended} == {"stop"}

    def test_several_end_tokens_all_end(self, tmp_path: Path) -> None:
        engine = TransformersEngine()
        engine.load(save_model(tmp_path / "two", eos_token_id=[1, 7]), 1)
        groups = engine.generate(requests(), sampling(20), policy_version=1)
        last = {r.token_ids[-1] for g in groups for r in g.responses if r.finish_reason == "stop"}
        assert last == {1, 7}

    def test_groups_come_complete_and_in_order(self, directory: Path) -> None:
        engine = TransformersEngine(max_sequences=6)  # two prompts at a time
        engine.load(directory, 1)
        groups = engine.generate(requests(), sampling(group_size=3), policy_version=1)
        assert [group.index for group in groups] == [0, 1, 2, 3]
        assert [len(group.responses) for group in groups] == [3] * len(RAGGED)
        assert {group.policy_version for group in groups} == {1}

    def test_no_requests_no_groups(self, engine: TransformersEngine) -> None:
        assert engine.generate([], sampling(), policy_version=1) == []


class TestVersions:
    def test_a_version_that_is_not_served_is_refused(self, engine: TransformersEngine) -> None:
        with pytest.raises(WrongVersion, match=r"version 2.*serves 1"):
            engine.generate(requests(), sampling(), policy_version=2)

    def test_nothing_is_served_before_the_first_load(self) -> None:
        with pytest.raises(WrongVersion):
            TransformersEngine().generate(requests(), sampling(), policy_version=0)

    def test_a_reload_is_in_place_and_equals_a_fresh_engine(
        self, engine: TransformersEngine, tmp_path: Path
    ) -> None:
        old = engine.generate(requests(), sampling(), policy_version=1)
        module = engine._model
        other = save_model(tmp_path / "other", seed=1)
        engine.load(other, 2)
        assert engine._model is module
        fresh = TransformersEngine()
        fresh.load(other, 2)
        new = engine.generate(requests(), sampling(), policy_version=2)
        assert new == fresh.generate(requests(), sampling(), policy_version=2)
        assert [g.responses for g in new] != [g.responses for g in old]

    def test_tied_weights_are_reloaded_on_both_sides(self, tmp_path: Path) -> None:
        first = save_model(tmp_path / "first", tie_word_embeddings=True)
        second = save_model(tmp_path / "second", seed=1, tie_word_embeddings=True)
        engine, fresh = TransformersEngine(), TransformersEngine()
        engine.load(first, 1)
        engine.load(second, 2)
        fresh.load(second, 2)
        assert engine.generate(requests(), sampling(), policy_version=2) == fresh.generate(
            requests(), sampling(), policy_version=2
        )

    def test_experts_that_files_hold_one_by_one_are_reloaded(self, tmp_path: Path) -> None:
        """The model computes with all experts of a layer in one tensor."""
        options = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
        directories = [tmp_path / "first", tmp_path / "second"]
        for seed, directory in enumerate(directories):
            torch.manual_seed(seed)
            config = micro_config().to_dict() | options | {"model_type": "qwen3_moe"}
            Qwen3MoeForCausalLM(Qwen3MoeConfig(**config)).save_pretrained(directory)
        names = load_file(directories[0] / "model.safetensors").keys()
        assert any(".experts.3." in name for name in names)
        engine, fresh = TransformersEngine(), TransformersEngine()
        engine.load(directories[0], 1)
        model = engine._model
        engine.load(directories[1], 2)
        assert engine._model is model, "the device never holds two models"
        fresh.load(directories[1], 2)
        assert engine.generate(requests(), sampling(), policy_version=2) == fresh.generate(
            requests(), sampling(), policy_version=2
        )

    def test_another_architecture_is_built(
        self, engine: TransformersEngine, tmp_path: Path
    ) -> None:
        engine.load(save_model(tmp_path / "deep", num_hidden_layers=3), 2)
        assert engine.version == 2
        assert len(engine._model.model.layers) == 3


def without_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def with_damaged_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def with_cut_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def with_a_weight_missing(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def with_another_shape(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"] = torch.zeros(VOCABULARY + 1, 32)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


BROKEN = [
    without_config,
    with_damaged_config,
    without_weights,
    with_cut_weights,
    with_a_weight_missing,
    with_another_shape,
]


class TestBadDirectories:
    @pytest.mark.parametrize("damage", BROKEN)
    @pytest.mark.parametrize("live", [False, True], ids=["first load", "reload"])
    def test_are_refused_and_change_nothing(
        self, directory: Path, tmp_path: Path, damage: Any, live: bool
    ) -> None:
        bad = tmp_path / "bad"
        shutil.copytree(directory, bad)
        damage(bad)
        engine = TransformersEngine()
        before = None
        if live:
            engine.load(directory, 1)
            before = engine.generate(requests(), sampling(), policy_version=1)
        with pytest.raises(ModelLoadError) as error:
            engine.load(bad, 2)
        assert str(bad) in str(error.value)
        assert any(word in str(error.value) for word in ("publish", "give")), "names no remedy"
        if live:
            assert engine.generate(requests(), sampling(), policy_version=1) == before
        else:
            assert engine.version == 0

    def test_one_that_does_not_exist(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match="not a model directory"):
            TransformersEngine().load(tmp_path / "nothing", 1)

    def test_one_that_names_no_end_token(self, directory: Path, tmp_path: Path) -> None:
        bad = tmp_path / "endless"
        shutil.copytree(directory, bad)
        for name in ("config.json", "generation_config.json"):
            content = json.loads((bad / name).read_text())
            content["eos_token_id"] = None
            (bad / name).write_text(json.dumps(content))
        with pytest.raises(ModelLoadError, match="names no end token"):
            TransformersEngine().load(bad, 1)


@pytest.mark.parametrize(
    "wrong", [{"temperature": 0.0}, {"max_tokens": 0}, {"group_size": 0}], ids=str
)
def test_sampling_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 1, "group_size": 1}
    with pytest.raises(ValidationError, match=f"{next(iter(wrong))}\n.*greater than"):
        Sampling(**(options | wrong))


def test_a_nucleus_is_the_smallest_set_of_tokens_that_reaches_top_p() -> None:
    logits = torch.tensor([[0.05, 0.5, 0.15, 0.3]]).log().repeat(1000, 1)
    uniforms = torch.linspace(0, 1 - 1e-6, 1000)
    for top_p, nucleus in {0.45: {1: 1.0}, 0.6: {1: 0.625, 3: 0.375}, 0.81: {1: 10 / 19}}.items():
        tokens, logprobs = sample_tokens(logits, uniforms, temperature=1.0, top_p=top_p)
        for token, probability in nucleus.items():
            drawn = tokens == token
            assert drawn.float().mean() == pytest.approx(probability, abs=2e-3)
            assert logprobs[drawn].exp() == pytest.approx(probability, abs=1e-5)
    assert 0 not in tokens


def test_logprobs_over_a_large_vocabulary_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(64, 49_152, generator=generator)
    uniforms = torch.rand(64, generator=generator, dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, uniforms, temperature=1.0)
    exact = torch.log_softmax(logits.double(), dim=-1).gather(1, tokens[:, None])[:, 0]
    assert (logprobs.double() - exact).abs().max() < 2e-6


def test_a_prepared_engine_serves_nothing_and_then_samples_as_any_other(
    directory: Path, tmp_path: Path
) -> None:
    """The first version has the initial model's architecture, and other weights."""
    published = save_model(tmp_path / "published", seed=7)
    prepared, plain = TransformersEngine(), TransformersEngine()
    prepared.prepare(directory)
    assert prepared.version == 0
    with pytest.raises(WrongVersion):
        prepared.generate(requests(), sampling(), policy_version=1)
    built: Any = prepared._model
    for engine in (prepared, plain):
        engine.load(published, 1)
    assert prepared._model is built, "the weights were copied into the model that was built"
    assert prepared.generate(requests(), sampling(), policy_version=1) == plain.generate(
        requests(), sampling(), policy_version=1
    )
    prepared.prepare(directory)
    assert prepared.version == 1, "an engine that serves is not prepared again"
