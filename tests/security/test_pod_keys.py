"""An attacker with the S3 keys of a pod, who writes what the trainer or a person has written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.buffer.api.wire import StoredVersion
from services.common.objectstore import ObjectStore, ObjectStoreError, digest_of
from services.model.stored import fetch_model
from services.rollout.weights import WeightCache
from services.stack.stack import Endpoints

PAYLOAD = b"of the attacker"


@pytest.fixture(scope="module")
def store(stack: Endpoints) -> ObjectStore:
    return ObjectStore(stack.object_store)


def put_manifest(store: ObjectStore, prefix: str, manifest: Any) -> str:
    """Writes any manifest, as someone with the keys can. Returns its digest."""
    data = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    store.put(f"{prefix}/manifest.json", data)
    return digest_of(data)


# ---- names of files -----------------------------------------------------------------------------

Fetch = Callable[[ObjectStore, str, str, Path], object]


def _fetch_weights(store: ObjectStore, prefix: str, digest: str, directory: Path) -> object:
    stored = StoredVersion(number=1, uri=prefix, manifest_digest=digest)
    return WeightCache(store, directory).fetch(stored)


def _fetch_model(store: ObjectStore, prefix: str, digest: str, directory: Path) -> object:
    return fetch_model(f"store://{prefix}#{digest}", store, directory)


@pytest.mark.parametrize("fetch", [_fetch_weights, _fetch_model])
@pytest.mark.parametrize(
    "name",
    [
        "{outside}/victim",
        "../victim",
        "a/../../victim",
        "./../victim",
        "linked/victim",
        "..\\victim",
        "a\0b",
        "a\x1b]0;b",
        "\ud800",
        "",
        ".",
        "/",
        "a//b",
        "a" * 256,
    ],
)
def test_a_manifest_cannot_name_a_file_outside_its_directory(
    store: ObjectStore, tmp_path: Path, name: str, fetch: Fetch
) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    place = inside / f"v1-{'0' * 16}"
    place.mkdir(parents=True)
    name = name.format(outside=outside)
    files = {"config.json": digest_of(PAYLOAD), name: digest_of(PAYLOAD)}
    digest = put_manifest(store, "models/evil", {"files": files})
    for directory in (inside, inside / f"v1-{digest[:16]}"):
        directory.mkdir(exist_ok=True)
        (directory / "linked").symlink_to(outside)
    store.put("models/evil/config.json", PAYLOAD)
    before = {path for path in tmp_path.rglob("*")}
    with pytest.raises(ObjectStoreError, match=r"models/evil/manifest.json: .*find out who has"):
        fetch(store, "models/evil", digest, inside)
    assert {path for path in tmp_path.rglob("*")} == before, "nothing was written"


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        [],
        None,
        "files",
        {},
        {"files": ["config.json"]},
        {"files": {"config.json": None}},
        {"files": {"config.json": {"sha256": "0" * 64}}},
        {"files": {"config.json": "0" * 63}},
        {"files": {"a": "0" * 64, "a/b": "0" * 64}},
    ],
)
def test_a_manifest_of_another_shape_is_refused(
    store: ObjectStore, tmp_path: Path, manifest: Any
) -> None:
    digest = put_manifest(store, "models/odd", manifest)
    with pytest.raises(ObjectStoreError, match=r"models/odd/manifest.json: .*find out who has"):
        store.get_directory("models/odd", digest, tmp_path / "odd")


def test_a_file_that_could_not_be_fetched_again_is_not_stored(
    store: ObjectStore, tmp_path: Path
) -> None:
    (tmp_path / "back\\slash").write_bytes(b"")
    with pytest.raises(ObjectStoreError, match="rename it"):
        store.put_directory("models/back", tmp_path)
    (tmp_path / "back\\slash").rename(tmp_path / "ein Brief (neu).txt")
    digest = store.put_directory("models/back", tmp_path)
    store.get_directory("models/back", digest, tmp_path / "again")
    assert (tmp_path / "again" / "ein Brief (neu).txt").exists()
