"""A lack of memory is told as one, with what there is to do."""

from __future__ import annotations

import pytest
import torch

from bapo_core.errors import BapoError
from services.trainer.loop import memory_explained


def test_what_cannot_be_allocated_ends_the_job_with_words() -> None:
    words = r"out of memory .*lower optimizer.microbatch_tokens"
    with pytest.raises(BapoError, match=words), memory_explained():
        torch.empty(1 << 55)


def test_of_a_gpu_too() -> None:
    with pytest.raises(BapoError, match="CUDA out of memory"), memory_explained():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def test_other_errors_are_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="something else"), memory_explained():
        raise RuntimeError("something else")
