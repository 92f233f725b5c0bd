"""Running out of memory ends with an error that names the remedies."""

from __future__ import annotations

import pytest
import torch

from bapo_core.errors import BapoError
from services.trainer.loop import explain_out_of_memory


def test_a_failed_allocation_on_the_cpu_names_the_remedies() -> None:
    remedy = r"out of memory .*lower optimizer.microbatch_tokens"
    with pytest.raises(BapoError, match=remedy), explain_out_of_memory():
        torch.empty(1 << 55)


def test_a_failed_allocation_on_a_gpu_too() -> None:
    with pytest.raises(BapoError, match="CUDA out of memory"), explain_out_of_memory():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(RuntimeError, match="something else"), explain_out_of_memory():
        raise RuntimeError("something else")
