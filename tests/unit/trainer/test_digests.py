"""Digests of weights and batches notice every change of a bit, and nothing else."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch

from services import VERSION
from services.trainer import digests as digests_module
from services.trainer.code_version import code_version
from services.trainer.digests import batch_digest, weights_digest
from services.trainer.ranks import Ranks
from services.trainer.shard import checkpoint_layers
from tests.micro import micro_model
from tests.unit.trainer.test_update import batch, config, updater_of

ALONE = Ranks(0, 1)


def digest_of(updater: Any) -> str:
    return weights_digest(updater.modules, ALONE)


def test_one_bit_of_the_weights_changes_the_digest() -> None:
    updater = updater_of(config())
    before = digest_of(updater)
    assert digest_of(updater_of(config())) == before
    parameter = list(updater.policy.parameters())[-1]
    bits = parameter.data.view(torch.int32)
    bits[-1] ^= 1
    assert digest_of(updater) != before
    bits[-1] ^= 1
    assert digest_of(updater) == before


def test_two_changes_whose_sum_is_0_change_the_digest() -> None:
    updater = updater_of(config())
    before = digest_of(updater)
    bits = list(updater.policy.parameters())[-1].data.view(torch.int32)
    bits[0] += 1
    bits[1] -= 1
    assert digest_of(updater) != before


def test_wrappers_and_chunks_do_not_change_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    updater = updater_of(config())
    before = digest_of(updater)
    checkpoint_layers(updater.policy, "full")
    assert digest_of(updater) == before
    monkeypatch.setattr(digests_module, "_CHUNK", 7)
    assert digest_of(updater) == before


def test_the_digest_of_bfloat16_weights_is_of_their_bits() -> None:
    model = micro_model(seed=0).to(torch.bfloat16)
    trained: Any = {"model": (model, None)}
    before = weights_digest(trained, ALONE)
    next(model.parameters()).data.view(torch.int16)[0, 0] ^= 1
    assert weights_digest(trained, ALONE) != before


def test_every_part_of_a_batch_is_in_its_digest() -> None:
    data = batch()
    positions = range(len(data.members))
    expected = batch_digest(data, positions, ALONE)
    assert batch_digest(batch(), positions, ALONE) == expected
    row = int(data.mask[:, 0].nonzero()[0])
    for name in ("tokens", "behavior_logprobs", "rewards"):
        changed = getattr(data, name).clone()
        changed[row if name != "rewards" else 0, 0] += 1
        assert batch_digest(replace(data, **{name: changed}), positions, ALONE) != expected, name
    for change in ({"source": "replayed"}, {"images": ["a" * 64]}):
        other = [data.members[0].model_copy(update=change), *data.members[1:]]
        assert batch_digest(replace(data, members=other), positions, ALONE) != expected


def test_padding_is_not_in_the_digest() -> None:
    data = batch()
    positions = range(len(data.members))
    wider = replace(
        data,
        behavior_logprobs=torch.nn.functional.pad(data.behavior_logprobs, (0, 3), value=9.0),
        mask=torch.nn.functional.pad(data.mask, (0, 3)),
    )
    assert batch_digest(wider, positions, ALONE) == batch_digest(data, positions, ALONE)


def test_the_version_of_the_code_needs_no_metadata_of_an_installed_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The images hold the code alone."""

    def no_metadata(name: str) -> NoReturn:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", no_metadata)
    code_version.cache_clear()
    version, _, digest = code_version().partition("+")
    assert version == VERSION
    assert len(digest) == 16
