"""Layers are compiled once for batches of all lengths."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend

from bapo_core.config.training import TrainerConfig
from services.buffer.api.trajectories import TrajectoryGroup, TrajectoryResponse, table_of
from services.trainer import shard
from services.trainer.data import Batch, collate
from services.trainer.lora import add_adapters
from services.trainer.phases import PhaseTimer
from services.trainer.policy import Policy
from services.trainer.shard import checkpoint_layers, compile_layers, compiles
from tests.micro import micro_model
from tests.unit.trainer.test_update import Updater, config, make_plan, policy
from tests.unit.trainer.test_update import batch as batch_of_groups

STEPS = 7


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def ragged_batch(step: int) -> Batch:
    """Returns the groups of a step; each step has other prompts, numbers and lengths of tokens."""
    draw = torch.Generator().manual_seed(step)

    def integers(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=draw).tolist()

    def response(length: int, reward: float) -> TrajectoryResponse:
        tokens = integers(2, 12, length)
        return TrajectoryResponse(tokens, [-2.0] * length, reward, "stop", "", reward > 0)

    groups = [
        TrajectoryGroup(
            "",
            integers(2, 12, 1 + step % 4 + index),
            1,
            [response(length, float(row % 2)) for row, length in enumerate(integers(1, 7, 4))],
        )
        for index in range(3 + step % 2)
    ]
    return collate(batch_of_groups().members[: len(groups)], table_of(groups))


@pytest.mark.parametrize("rank", [0, 4])
def test_numbers_of_the_layers_are_constants_of_their_graphs(rank: int) -> None:
    """A number that is a tensor would be one of the CPU, and need a C++ compiler on a GPU."""
    settings = config(f"lora.rank={rank}")
    network = policy()
    add_adapters(network.model, settings.lora, 7)
    inputs: list[Any] = []

    def keep_inputs(graph: Any, examples: list[Any]) -> Any:
        inputs.extend(examples)
        return graph

    compile_layers(network, backend=keep_inputs)
    Updater(settings, network, shard.Ranks(0, 1)).score(batch_of_groups())
    assert inputs
    assert not [found for found in inputs if isinstance(found, torch.Tensor) and found.dim() == 0]


@pytest.mark.parametrize("mode", ["none", "full"])
def test_nothing_is_compiled_again_after_the_third_step(mode: Any) -> None:
    """Whatever the lengths of the responses and the numbers of micro-batches are."""
    settings = config("optimizer.microbatch_tokens=40", "optimizer.minibatch_prompts=2")
    updater = Updater(settings, policy(), shard.Ranks(0, 1))
    checkpoint_layers(updater.policy, mode)
    counter = CompileCounterWithBackend("eager")
    compile_layers(updater.policy, backend=counter)
    graphs, tokens = [], set()
    for step in range(1, STEPS + 1):
        batch = ragged_batch(step)
        plan = make_plan(settings, step, batch.members, ranks=1, width=16)
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            updater.step(step, batch, plan, (0.25, 0.5), PhaseTimer())
        graphs.append(counter.frame_count)
        tokens.add(batch.packed_tokens)
    assert len(tokens) > STEPS // 2
    assert graphs[0] > 0
    assert graphs[2] == graphs[-1], graphs


def test_layers_are_compiled_on_gpus_unless_something_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Policy(micro_model(vocab_size=40)).model
    automatic = TrainerConfig()
    assert not compiles(automatic, model), "a CPU"
    assert compiles(TrainerConfig(compile=True), model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(shard, "has_triton", lambda: True)
    monkeypatch.setattr(shard.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert compiles(automatic, model)
    assert not compiles(TrainerConfig(compile=False), model)
    assert not compiles(TrainerConfig(gradient_checkpointing="selective"), model)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shard, "has_triton", lambda: False)
            assert not compiles(automatic, model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shard.shutil, "which", lambda _: None)
            patch.delenv("CC", raising=False)
            assert not compiles(automatic, model)
    messages = [record.getMessage() for record in caplog.records]
    assert "Triton is missing" in messages[0]
    assert "no C compiler" in messages[1]
