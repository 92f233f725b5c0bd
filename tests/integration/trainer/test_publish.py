"""A published version is a copy of the model at one moment, and exists as a whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.common.errors import ServiceError
from services.common.objectstore import Content, ObjectStore, ObjectStoreError
from services.rollout.vllm.weight_layout import read_layout
from services.stack.stack import Endpoints
from services.trainer import export
from services.trainer.publish import WeightPublisher
from services.trainer.ranks import Ranks
from tests.integration.support.driver import Driver, small_config
from tests.micro import micro_model

Publishing = Callable[..., WeightPublisher]


@pytest.fixture
def driver(stack: Endpoints, request: pytest.FixtureRequest) -> Driver:
    name = "".join(c if c.isalnum() else "-" for c in request.node.name.lower())[:60].rstrip("-")
    return Driver(stack, small_config(name))


@pytest.fixture
def publishing(driver: Driver, tmp_path: Path) -> Publishing:
    def make(model: Any, dtype: torch.dtype | None = None) -> WeightPublisher:
        source = tmp_path / "source"
        model.save_pretrained(source)
        store = ObjectStore(driver.stack.object_store)
        return WeightPublisher(driver.client, store, source=source, dtype=dtype, ranks=Ranks(0, 1))

    return make


def fetched(driver: Driver, version: int, target: Path) -> Path:
    stored = driver.client.weights(version)
    ObjectStore(driver.stack.object_store).get_directory(stored.uri, stored.manifest_digest, target)
    return target


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_version_is_the_model_at_that_moment(
    driver: Driver,
    publishing: Publishing,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tied: bool,
    dtype: torch.dtype | None,
) -> None:
    monkeypatch.setattr(export, "LARGEST_SHARD", "8KB")
    model = micro_model(tie_word_embeddings=tied)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    publisher = publishing(model, dtype)
    publisher.publish(1, model)
    with torch.no_grad():  # training goes on
        for parameter in model.parameters():
            parameter.add_(1.0)
    publisher.settle()
    directory = fetched(driver, 1, tmp_path / "fetched")
    assert len(list(directory.glob("*.safetensors"))) > 1
    read_layout(directory)
    expected_dtype = dtype or torch.float32
    assert json.loads((directory / "config.json").read_text())["dtype"] == str(expected_dtype)[6:]
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=expected_dtype).state_dict()
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor.to(expected_dtype)), name
    # Publishing it again changes nothing, though the model has changed.
    digest = driver.client.weights(1).manifest_digest
    publisher.publish(1, model)
    publisher.settle()
    assert driver.client.weights(1).manifest_digest == digest


def test_a_version_that_could_not_be_uploaded_does_not_exist(
    driver: Driver, publishing: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = micro_model()
    publisher = publishing(model)
    put_content = publisher._store.put_content

    def full(key: str, content: Content) -> str:
        if key.endswith(".safetensors"):
            raise ObjectStoreError("the disk is full")
        return put_content(key, content)

    monkeypatch.setattr(publisher._store, "put_content", full)
    publisher.publish(1, model)
    with pytest.raises(ObjectStoreError, match="the disk is full"):
        publisher.settle()
    with pytest.raises(ObjectStoreError, match="the disk is full"):
        publisher.check()
    with pytest.raises(ServiceError, match="no version 1"):
        driver.client.weights(1)
