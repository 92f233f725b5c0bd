"""The trainer scores and trains models that read images."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, VipLlavaModel

from bapo_core.config import RunConfig, config_from
from bapo_core.config.training import LoraConfig
from bapo_core.errors import BapoError
from services.buffer.api.trajectories import TrajectoryGroup, TrajectoryResponse, table_of
from services.buffer.api.wire import ManifestMember
from services.model.vision import VisionProcessor, check_model, vision_tower
from services.rollout.api.wire import GeneratedGroup, Sampling
from services.rollout.transformers_engine import TransformersEngine
from services.trainer.critic import Critic
from services.trainer.data import Batch, Plan, collate, pack, read_pixels
from services.trainer.export import as_saved, model_files, write_files
from services.trainer.load_policy import empty_policy, freeze_vision, load_policy
from services.trainer.lora import add_adapters
from services.trainer.phases import PhaseTimer
from services.trainer.policy import Policy, response_logprobs
from services.trainer.ranks import Ranks
from services.trainer.update import Updater
from tests.image_prompts import IMAGES, prompts_of
from tests.micro import VISION_MODELS, save_micro_vision_model
from tests.stand_in_gpu import compare_with_cpu, stand_in_gpu

TEMPERATURE, G = 0.9, 4
EMBEDS_PATCHES = (nn.Conv2d, nn.Conv3d, nn.Linear)
"""Layers that may embed the patches of an image; the first one of a tower does."""


@pytest.fixture(scope="module", params=VISION_MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_micro_vision_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def batch(directory: Path) -> Batch:
    """Returns groups of all prompts, as the engine generates them."""
    return sampled_batch(directory)


def sampled_batch(directory: Path) -> Batch:
    engine = TransformersEngine(open_image=IMAGES.__getitem__)
    engine.load(directory, 1)
    prompts, groups = prompts_of(directory), generate(engine, directory)
    table = table_of(
        [
            TrajectoryGroup(
                prompt_uid=str(group.index),
                prompt_token_ids=prompt.prompt_token_ids,
                policy_version=1,
                responses=[
                    TrajectoryResponse(
                        r.token_ids, r.logprobs, float(i % 2), r.finish_reason, "", i % 2 == 1
                    )
                    for i, r in enumerate(group.responses)
                ],
            )
            for prompt, group in zip(prompts, groups, strict=True)
        ]
    )
    members = [
        ManifestMember(
            group_id=index,
            source="fresh",
            prompt_uid=str(index),
            step=1,
            policy_version=1,
            correct=G // 2,
            size=G,
            object_key="",
            object_digest="",
            row_start=index * G,
            row_count=G,
            images=prompt.images,
        )
        for index, prompt in enumerate(prompts)
    ]
    vision = VisionProcessor.load(directory)
    pixels = read_pixels([prompt.images for prompt in prompts], vision, IMAGES.__getitem__)
    return replace(collate(members, table), pixels=pixels)


def generate(engine: TransformersEngine, directory: Path) -> list[GeneratedGroup]:
    sampling = Sampling(temperature=TEMPERATURE, max_tokens=12, group_size=G)
    return engine.generate(prompts_of(directory), sampling, policy_version=1)


def scored(policy: Policy, batch: Batch, rows: Tensor) -> Tensor:
    with torch.no_grad():
        return response_logprobs(policy, batch, rows, TEMPERATURE)[0]


def tower(policy: Policy) -> Any:
    model: Any = policy.model
    return vision_tower(model.base_model)


def test_logprobs_are_those_of_the_engine(directory: Path, batch: Batch) -> None:
    rows = torch.arange(len(batch.lengths))
    logprobs = scored(load_policy(directory), batch, rows)
    assert batch.mask.sum() > 100
    assert logprobs == pytest.approx(batch.behavior_logprobs, abs=2e-5)


def test_logprobs_do_not_depend_on_what_a_sequence_is_packed_with(
    directory: Path, batch: Batch
) -> None:
    policy = load_policy(directory)
    rows = torch.arange(len(batch.lengths))
    together = scored(policy, batch, rows)
    shuffled = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))]
    assert scored(policy, batch, shuffled) == pytest.approx(together[shuffled], abs=2e-5)
    for row in rows:
        assert scored(policy, batch, row[None]) == pytest.approx(together[row[None]], abs=2e-5)


def test_a_gpu_computes_what_a_cpu_computes(directory: Path, batch: Batch) -> None:
    engine = TransformersEngine(open_image=IMAGES.__getitem__)
    engine.load(directory, 1)
    compare_with_cpu(load_policy(directory), batch, TEMPERATURE)
    model = AutoModelForImageTextToText.from_pretrained(directory)
    with stand_in_gpu():
        engine.use(model.to("cuda"), 1)
        groups = generate(engine, directory)
    tokens = [response.token_ids for group in groups for response in group.responses]
    assert tokens == [
        row[prompt:length].tolist()
        for row, prompt, length in zip(
            batch.tokens, batch.prompt_lengths, batch.lengths, strict=True
        )
    ]


def test_images_of_other_prompts_change_the_logprobs(directory: Path, batch: Batch) -> None:
    swapped = replace(batch, pixels=[batch.pixels[3], *batch.pixels[1:]])
    rows = torch.arange(G)
    policy = load_policy(directory)
    assert not torch.allclose(scored(policy, batch, rows), scored(policy, swapped, rows))


def test_a_sampled_placeholder_is_no_image(directory: Path, batch: Batch) -> None:
    tokens = batch.tokens.clone()
    tokens[0, batch.prompt_lengths[0]] = 3
    with_placeholder = replace(batch, tokens=tokens)
    logprobs = scored(load_policy(directory), with_placeholder, torch.arange(2 * G))
    assert logprobs.isfinite().all()


def settings(**changes: Any) -> RunConfig:
    optimizer = {"minibatch_prompts": 4, "microbatch_tokens": 512, "learning_rate": 1e-3}
    return config_from(
        {
            "rollout": {
                "group_size": G,
                "temperature": TEMPERATURE,
                "prompts_per_step": 4,
                "max_prompt_tokens": 96,
                "max_response_tokens": 16,
            },
            "steps": 2,
            **changes,
            "optimizer": optimizer | changes.get("optimizer", {}),
        }
    )


def updater_of(directory: Path, **changes: Any) -> Updater:
    config = settings(**changes)
    policy = load_policy(directory)
    if config.model.freeze_vision:
        freeze_vision(policy.model)
    return Updater(config, policy, Ranks(0, 1))


@pytest.mark.parametrize("frozen", [False, True])
def test_an_update_trains_the_vision_tower_unless_it_is_frozen(
    directory: Path, batch: Batch, frozen: bool
) -> None:
    updater = updater_of(directory, model={"freeze_vision": frozen})
    tower_before = [parameter.clone() for parameter in tower(updater.policy).parameters()]
    head_before = updater.policy.model.get_output_embeddings().weight.clone()  # type: ignore[operator]
    plan = Plan([[[0, 1, 2, 3]]])
    metrics = updater.step(1, batch, plan, (0.25, 0.75), PhaseTimer()).metrics
    assert metrics["gradient_norm"] > 0
    tower_after = list(tower(updater.policy).parameters())
    unchanged = all(map(torch.equal, tower_before, tower_after))
    assert unchanged == frozen
    assert not torch.equal(head_before, updater.policy.model.get_output_embeddings().weight)  # type: ignore[operator]


def test_gradients_of_the_vision_tower_equal_finite_differences(
    directory: Path, batch: Batch
) -> None:
    policy = load_policy(directory)
    packed = pack(batch, torch.arange(2 * G))
    weight = next(
        module for module in tower(policy).modules() if isinstance(module, EMBEDS_PATCHES)
    ).weight
    policy(packed, TEMPERATURE)[0].sum().backward()
    direction = weight.grad / weight.grad.norm()
    # With experts, small enough that no token changes its own.
    step = 2e-4 if hasattr(policy.model.config.get_text_config(), "num_experts") else 1e-3
    values = []
    with torch.no_grad():
        for change in (step, -2 * step):
            weight += change * direction
            values.append(float(policy(packed, TEMPERATURE)[0].sum()))
    slope = (values[0] - values[1]) / (2 * step)
    assert slope == pytest.approx(float(weight.grad.norm()), rel=0.02)


def test_adapters_and_a_critic_read_images(directory: Path, batch: Batch) -> None:
    policy = load_policy(directory)
    before = scored(policy, batch, torch.arange(G))
    add_adapters(policy.model, LoraConfig(rank=2), seed=0)
    freeze_vision(policy.model)
    assert torch.equal(scored(policy, batch, torch.arange(G)), before)
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert trained
    assert not any("visual" in name for name in trained)
    critic = Critic(load_policy(directory))
    assert critic(pack(batch, torch.arange(G))).shape == (int(batch.mask[:G].sum()),)


def test_published_weights_are_a_model_directory_with_its_processor(
    directory: Path, batch: Batch, tmp_path: Path
) -> None:
    updater = updater_of(directory)
    updater.step(1, batch, Plan([[[0, 1, 2, 3]]]), (0.25, 0.75), PhaseTimer())
    model: Any = updater.policy.model
    saved = as_saved(model, {name: t.detach() for name, t in model.state_dict().items()})
    write_files(model_files(model, saved, directory), tmp_path)
    check_model(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == (
        load_file(directory / "model.safetensors").keys()
    )
    rows = torch.arange(len(batch.lengths))
    assert torch.equal(
        scored(load_policy(tmp_path), batch, rows), scored(updater.policy, batch, rows)
    )
    engine = TransformersEngine(open_image=IMAGES.__getitem__)
    engine.load(directory, 1)
    engine.load(tmp_path, 2)
    assert sampled_batch(tmp_path).tokens.shape
    AutoModelForImageTextToText.from_pretrained(tmp_path)


def test_an_empty_policy_has_the_same_weights_by_name(directory: Path) -> None:
    full, empty = load_policy(directory), empty_policy(directory)
    assert {n: p.shape for n, p in full.named_parameters()} == {
        n: p.shape for n, p in empty.named_parameters()
    }


def test_images_need_a_model_that_reads_them() -> None:
    assert read_pixels([[], []], None, IMAGES.__getitem__) == []
    with pytest.raises(BapoError, match="the batch has prompts with images, but the model reads"):
        read_pixels([["a"]], None, IMAGES.__getitem__)


# ---- models without rules of their own ----------------------------------------------------------


def test_a_model_whose_tokens_see_later_ones_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its responses would have log-probs that depend on what follows."""
    directory = save_micro_vision_model(tmp_path, "vipllava")
    load_policy(directory)
    causal = VipLlavaModel.forward

    def see_all(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = causal(self, *args, **kwargs)
        if kwargs.get("pixel_values") is None:
            return output
        output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.sum(1, True)
        return output

    # The decorators of transformers pass arguments by this signature.
    see_all.__signature__ = inspect.signature(causal)  # type: ignore[attr-defined]
    monkeypatch.setattr(VipLlavaModel, "forward", see_all)
    with pytest.raises(BapoError, match="tokens of a VipLlavaForConditionalGeneration see later"):
        load_policy(directory)


def test_a_model_that_cannot_score_images_is_refused(tmp_path: Path) -> None:
    directory = save_micro_vision_model(tmp_path, "vipllava")
    file = directory / "processor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"patch_size": 28}))
    check_model(directory)
    with pytest.raises(BapoError, match="the trainer cannot score images with a VipLlava") as error:
        load_policy(directory)
    assert "\n" not in str(error.value)


def test_a_vision_tower_that_is_not_found_is_not_frozen_in_silence(
    tmp_path: Path,
) -> None:
    policy = load_policy(save_micro_vision_model(tmp_path, "idefics2"))
    base: Any = policy.model.base_model
    base.tower = base.vision_model
    del base.vision_model
    with pytest.raises(BapoError, match=r"set model\.freeze_vision to false"):
        freeze_vision(policy.model)
