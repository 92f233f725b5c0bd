"""The real vLLM takes token ids together with images. Run `make install-vllm` first."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from bapo_core.config import load_config
from services.cli.doctor import measure_parity
from services.model.vision import ON_A_GRID, VisionProcessor, fed_tokens
from services.rollout.api.wire import (
    Generated,
    GeneratedGroup,
    GenerateRequest,
    PromptRequest,
    StartedResponse,
)
from services.rollout.driver import EngineDriver
from services.rollout.server import make_driver
from services.rollout.settings import VllmSettings
from tests.image_prompts import IMAGES, prompts_of
from tests.micro import save_micro_vision_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOLERANCE = 5e-4
"""Largest difference in log-probs between two programs that both compute in float32.

The largest of 1,511 differences was 1.4e-4, the median 3e-6. Wrong pixels make differences of 2.
"""
TEMPERATURE = 0.9
PLACEHOLDER = 3
MODELS = [pytest.param("qwen2_vl", marks=pytest.mark.slow), "qwen2_5_vl", "qwen3_vl", "internvl"]


@pytest.fixture(scope="module", params=MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_micro_vision_model(tmp_path_factory.mktemp("model"), request.param, head_size=32)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def make_vllm_driver(directory: Path, scratch: Path, *options: str) -> EngineDriver:
    """Makes a driver of vLLM, which has loaded no model yet. options: further keys of the run."""
    config = load_config(
        None,
        [
            f"model.path={directory}",
            "rollout.engine=vllm",
            "rollout.max_prompt_tokens=160",
            "rollout.max_response_tokens=32",
            *options,
        ],
    )
    vllm = VllmSettings(python=os.environ.get("BAPO_VLLM_PYTHON"))
    return make_driver(config, scratch, vllm, IMAGES.__getitem__)


@pytest.fixture(scope="module")
def driver(
    directory: Path, loop: asyncio.AbstractEventLoop, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineDriver]:
    driver = make_vllm_driver(directory, tmp_path_factory.getbasetemp())
    loop.run_until_complete(driver.load(directory, 1))
    yield driver
    loop.run_until_complete(driver.close())


def generate(
    driver: EngineDriver,
    loop: asyncio.AbstractEventLoop,
    prompts: Sequence[PromptRequest],
    *,
    version: int = 1,
    group_size: int = 2,
) -> list[GeneratedGroup]:
    """Returns the groups in the order of the prompts."""
    request = GenerateRequest(
        policy_version=version,
        manifest_digest="",
        prompts=list(prompts),
        group_size=group_size,
        temperature=TEMPERATURE,
        top_p=1.0,
        max_tokens=12,
    )

    async def collect() -> list[Generated]:
        return [generated async for generated in driver.generate(request)]

    groups = [g for g in loop.run_until_complete(collect()) if isinstance(g, GeneratedGroup)]
    return sorted(groups, key=lambda group: group.index)


def teacher_forced(directory: Path, prompt: PromptRequest, response: Sequence[int]) -> Tensor:
    """Returns the log-probs of transformers for one sequence."""
    with_vision = "vision_config" in json.loads((directory / "config.json").read_text())
    auto: Any = AutoModelForImageTextToText if with_vision else AutoModelForCausalLM
    model = auto.from_pretrained(directory)
    fed = fed_tokens(model, torch.tensor(response))
    ids = torch.cat([torch.tensor(prompt.prompt_token_ids), fed])[None]
    images: dict[str, Tensor] = {}
    if prompt.images:
        pixels = VisionProcessor.load(directory).pixels([IMAGES[d] for d in prompt.images])
        images = dict(pixels.arguments)
    if model.config.model_type in ON_A_GRID:
        images["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, **images).logits
    start = len(prompt.prompt_token_ids) - 1
    logprobs = torch.log_softmax(logits[0, start:-1].float() / TEMPERATURE, dim=-1)
    return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0]


def check_parity(
    directory: Path, prompts: Sequence[PromptRequest], groups: Sequence[GeneratedGroup]
) -> None:
    assert [group.refused for group in groups] == [""] * len(prompts)
    for prompt, group in zip(prompts, groups, strict=True):
        for response in group.responses:
            expected = teacher_forced(directory, prompt, response.token_ids)
            assert response.logprobs == pytest.approx(expected.tolist(), abs=TOLERANCE)


def test_logprobs_are_those_of_transformers(
    driver: EngineDriver, loop: asyncio.AbstractEventLoop, directory: Path
) -> None:
    prompts = prompts_of(directory)
    groups = generate(driver, loop, prompts)
    check_parity(directory, prompts, groups)
    assert generate(driver, loop, prompts) == groups


def test_a_sampled_placeholder_is_no_image(
    driver: EngineDriver, loop: asyncio.AbstractEventLoop, directory: Path
) -> None:
    """Responses that hold placeholders are continued as the trainer scores them."""
    prompt = prompts_of(directory)[0]
    begun = [40, PLACEHOLDER, PLACEHOLDER, 41]
    logprobs = teacher_forced(directory, prompt, begun).tolist()
    started = [StartedResponse(token_ids=begun, logprobs=logprobs) for _ in range(2)]
    prompt = prompt.model_copy(update={"started": started})
    groups = generate(driver, loop, [prompt])
    check_parity(directory, [prompt], groups)
    assert all(response.token_ids[:4] == begun for response in groups[0].responses)
    assert any(len(response.token_ids) > 4 for response in groups[0].responses)


def test_what_does_not_fit_is_refused_and_the_rest_is_generated(
    driver: EngineDriver, loop: asyncio.AbstractEventLoop, directory: Path
) -> None:
    first, _, text, _ = prompts_of(directory)
    tokens = list(first.prompt_token_ids)
    tokens.remove(PLACEHOLDER)
    short = first.model_copy(update={"prompt_token_ids": tokens})
    refused, generated = generate(driver, loop, [short, text])
    count = first.prompt_token_ids.count(PLACEHOLDER)
    message = f"the prompt has [{count - 1}] placeholders for images of [{count}] patches"
    assert message in refused.refused
    assert generated.refused == ""


def test_new_weights_of_the_vision_tower_are_loaded_in_place(
    driver: EngineDriver, loop: asyncio.AbstractEventLoop, directory: Path, tmp_path: Path
) -> None:
    prompts = prompts_of(directory)
    generate(driver, loop, prompts)  # vLLM keeps what the old vision tower computed
    newer = tmp_path / "newer"
    shutil.copytree(directory, newer)
    weights = load_file(newer / "model.safetensors")
    changed = {name: tensor * (1.5 if "vis" in name else 1.0) for name, tensor in weights.items()}
    save_file(changed, newer / "model.safetensors", {"format": "pt"})
    server = driver._server  # type: ignore[attr-defined]
    loop.run_until_complete(driver.load(newer, 2))
    assert driver._server is server  # type: ignore[attr-defined]
    check_parity(newer, prompts, generate(driver, loop, prompts, version=2))
    loop.run_until_complete(driver.load(directory, 1))


def test_doctor_proves_parity_with_images(tmp_path: Path) -> None:
    model = save_micro_vision_model(tmp_path, head_size=32)
    config = load_config(
        None,
        [
            f"model.path={model}",
            "task.name=geometry",
            "task.options.template=diagram",
            "task.train_prompts=16",
            "rollout.prompts_per_step=4",
            "optimizer.minibatch_prompts=4",
            "task.test_prompts=2",
            "rollout.engine=vllm",
            "rollout.group_size=2",
            "rollout.max_prompt_tokens=256",
            "rollout.max_response_tokens=12",
        ],
    )
    parity = measure_parity(config, model, prompts=4)
    assert parity.responses == 8
    assert parity.failures() == []
