"""Tensors cross between host and device together, and an update makes the host wait once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.transfer import read, send
from services.trainer.update import Updater
from tests.stand_in_gpu import GPU, OnGpu, StandInGpu, stand_in_gpu, value_of
from tests.unit.trainer import test_update as single
from tests.unit.trainer.test_methods import preset, updater_of

DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 5), st.integers(1, 3))))
def test_tensors_of_any_dtypes_and_shapes_are_sent_in_one_transfer(
    kinds: list[tuple[torch.dtype, int, int]],
) -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randint(0, 2, shape, generator=draw).to(dtype) for dtype, *shape in kinds]
    with stand_in_gpu() as gpu:
        sent = send(tensors, GPU)
        assert gpu.copies_to_gpu == 1
        assert not gpu.waits
        for tensor, copy in zip(tensors, sent, strict=True):
            assert isinstance(copy, OnGpu)
            assert copy.dtype == tensor.dtype
            assert torch.equal(value_of(copy), tensor)
        returned = read(sent)
        assert len(gpu.waits) == bool(sent)
    for tensor, copy in zip(tensors, returned, strict=True):
        assert torch.equal(copy.to(tensor.dtype), tensor.flatten())


def waits_of_updates(updater: Updater, gpu: StandInGpu) -> tuple[list[Counter[str]], list[str]]:
    """Returns what the host waits for in each update of a step, and in the step as a whole."""
    updates, update = [], updater._update

    def counted(*arguments: Any, **options: Any) -> Any:
        before = len(gpu.waits)
        result = update(*arguments, **options)
        updates.append(Counter(gpu.waits[before:]))
        return result

    updater._update = counted  # type: ignore[method-assign]
    gpu.waits.clear()
    single.step(updater, 1, single.batch())
    return updates, gpu.waits


@pytest.mark.parametrize("tokens", [10_000, 40, 13])
@pytest.mark.parametrize("algorithm", ["bapo", "grpo", "gspo", "luffy", "ppo"])
def test_an_update_waits_for_the_gpu_once_however_many_micro_batches_it_has(
    algorithm: str, tokens: int
) -> None:
    """With a reference, losses by source, and a critic. Each read two or more values once."""
    with stand_in_gpu() as gpu:
        settings = preset(algorithm, f"optimizer.microbatch_tokens={tokens}")
        updates, step = waits_of_updates(updater_of(settings, "cuda"), gpu)
    assert updates == [Counter({"copy to the CPU": 1})] * 2
    # Scores before the updates: those of theta_t, of a reference or of a critic.
    assert len(step) <= 2 + 3


def test_with_one_update_a_step_the_host_waits_for_its_results_alone() -> None:
    with stand_in_gpu() as gpu:
        settings = preset("grpo", "optimizer.minibatch_prompts=6", "kl.coefficient=0")
        updates, step = waits_of_updates(updater_of(settings, "cuda"), gpu)
    assert len(updates) == len(step) == 1
