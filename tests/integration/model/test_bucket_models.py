"""Models in a bucket: `model.path: s3://bucket/prefix`."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from bapo_core.config import config_from
from bapo_core.errors import BapoError
from services.common.objectstore import ObjectStore
from services.model.resolve import ensure_model, pin_model
from services.stack.stack import Endpoints

FILES = {
    "config.json": b'{"max_position_embeddings": 64}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
}


@pytest.fixture
def bucket(stack: Endpoints, request: pytest.FixtureRequest) -> ObjectStore:
    """Returns the store of a bucket of its own that holds a model below `team/model`."""
    name = f"models-{hashlib.sha256(request.node.name.encode()).hexdigest()[:16]}"
    store = ObjectStore(stack.object_store.model_copy(update={"bucket": name}))
    store.ensure_bucket()
    for file, data in FILES.items():
        store.put(f"team/model/{file}", data)
    # Neither a pickle, nor another folder, nor another model is fetched.
    for key in ("model/training_args.bin", "model/optimizer/state.json", "model-2/config.json"):
        store.put(f"team/{key}", b"{}")
    return store


def fetch(store: ObjectStore, stack: Endpoints, home: Path, prefix: str = "team/model") -> Path:
    path = f"s3://{store.settings.bucket}/{prefix}"
    of_run = ObjectStore(stack.object_store)  # another bucket, with the same credentials
    return ensure_model(config_from({"model": {"path": path}}), home, open_store=lambda: of_run)


def test_a_model_is_fetched_again_once_it_has_changed(
    bucket: ObjectStore, stack: Endpoints, tmp_path: Path
) -> None:
    first = fetch(bucket, stack, tmp_path)
    assert {file.name: file.read_bytes() for file in first.iterdir()} == FILES
    inode = (first / "model.safetensors").stat().st_ino
    assert fetch(bucket, stack, tmp_path, "team/model/") == first
    assert (first / "model.safetensors").stat().st_ino == inode, "it is not fetched again"

    bucket.put("team/model/model.safetensors", b"trained")
    second = fetch(bucket, stack, tmp_path)
    assert (second / "model.safetensors").read_bytes() == b"trained"
    assert (first / "model.safetensors").read_bytes() == b"weights", "a run may still use it"


def test_a_run_keeps_its_model(bucket: ObjectStore, stack: Endpoints, tmp_path: Path) -> None:
    of_run = ObjectStore(stack.object_store)
    path = f"s3://{bucket.settings.bucket}/team/model"
    config = config_from({"model": {"path": path}})
    pinned = pin_model(config, tmp_path, open_store=lambda: of_run)
    assert pin_model(pinned, tmp_path) == pinned
    model = ensure_model(pinned, tmp_path)  # it is here, so no object store is asked
    assert pinned.model.path == f"{path}#{model.name}"
    elsewhere = tmp_path / "elsewhere"
    assert ensure_model(pinned, elsewhere, open_store=lambda: of_run).name == model.name

    bucket.put("team/model/model.safetensors", b"trained")
    assert ensure_model(pinned, tmp_path) == model
    with pytest.raises(BapoError, match=r"the model has changed since the run began .* restore"):
        ensure_model(pinned, tmp_path / "third", open_store=lambda: of_run)
    assert pin_model(config, tmp_path, open_store=lambda: of_run) != pinned


def test_two_processes_may_fetch_a_model_at_the_same_time(
    bucket: ObjectStore, stack: Endpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ObjectStore.download

    def download(store: ObjectStore, key: str, target: Path) -> None:
        if key.endswith("config.json"):
            monkeypatch.setattr(ObjectStore, "download", original)
            fetch(bucket, stack, tmp_path)  # the other process, which is faster
        original(store, key, target)

    monkeypatch.setattr(ObjectStore, "download", download)
    fetched = fetch(bucket, stack, tmp_path)
    assert {file.name: file.read_bytes() for file in fetched.iterdir()} == FILES
    assert list((tmp_path / "models").iterdir()) == [fetched], "nothing is left over"


def test_a_model_that_changes_while_it_is_fetched_is_refused(
    bucket: ObjectStore, stack: Endpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ObjectStore.download

    def download(store: ObjectStore, key: str, target: Path) -> None:
        original(store, key, target)
        bucket.put("team/model/model.safetensors", b"trained")

    monkeypatch.setattr(ObjectStore, "download", download)
    with pytest.raises(BapoError, match="the model changed while it was fetched"):
        fetch(bucket, stack, tmp_path)
    assert not list((tmp_path / "models").iterdir())


@pytest.mark.parametrize("prefix", ["team", "team/model/config.json", "elsewhere"])
def test_where_there_is_no_model_the_error_says_so(
    bucket: ObjectStore, stack: Endpoints, tmp_path: Path, prefix: str
) -> None:
    with pytest.raises(BapoError, match=rf"s3://.*/{prefix}: .* has no model there .* give s3://"):
        fetch(bucket, stack, tmp_path, prefix)


def test_a_bucket_that_does_not_exist_has_no_model(stack: Endpoints, tmp_path: Path) -> None:
    missing = ObjectStore(stack.object_store.model_copy(update={"bucket": "no-such-bucket"}))
    with pytest.raises(BapoError, match=r"s3://no-such-bucket/team/model: .* has no model there"):
        fetch(missing, stack, tmp_path)
