"""An attacker with the S3 keys of a pod, who writes what the trainer or a person has written."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from bapo_core.errors import BapoError
from services.buffer.api.client import BufferClient
from services.buffer.api.wire import StepDigests, StoredVersion
from services.cli.main import bapo
from services.common import layout
from services.common.objectstore import ObjectStore, ObjectStoreError, digest_of, files_of
from services.model.stored import fetch_model
from services.rollout.weights import WeightCache
from services.stack.stack import Endpoints
from services.trainer.checkpoint import Checkpointer, restore_state
from services.trainer.checkpoint_files import read_metadata
from services.trainer.digests import weights_digest
from services.trainer.loop import refuse_other_weights, restore, train
from services.trainer.ranks import init_distributed
from services.trainer.steps import TrainerContext, as_plain, make_updater
from tests.integration.support.driver import Driver, small_config

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
        store.put_files("models/back", files_of(tmp_path))
    (tmp_path / "back\\slash").rename(tmp_path / "ein Brief (neu).txt")
    digest = store.put_files("models/back", files_of(tmp_path))
    store.get_directory("models/back", digest, tmp_path / "again")
    assert (tmp_path / "again" / "ein Brief (neu).txt").exists()


# ---- checkpoints --------------------------------------------------------------------------------


class Hostile:
    """A value whose pickle runs a command where it is loaded."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._mark}",)


@dataclass
class Saved:
    """A run with an honest checkpoint of step 1, the attacker's token, and the files."""

    driver: Driver
    attacker: BufferClient
    directory: Path
    model: Path
    mark: Path
    """A file that exists once code of the attacker has run."""
    step: int = 0
    """Last committed step."""

    @property
    def metadata(self) -> Metadata:
        return cast(Metadata, pickle.loads((self.directory / ".metadata").read_bytes()))

    def context(self, store: ObjectStore, scratch: Path) -> TrainerContext:
        return TrainerContext(self.driver.client, store, self.model, scratch)

    def commit(self, weights_after: str) -> None:
        """Commits the next step, which ended with these weights, as the trainer does."""
        self.step += 1
        self.driver.roll_out(self.step)
        self.driver.client.batch(self.step)
        digests = StepDigests(
            weights_before="0" * 64,
            batch="0" * 64,
            weights_after=weights_after,
            code="test",
            processes=1,
            platform="test",
        )
        self.driver.client.commit(self.step, {"loss": 0.5}, digests)


@pytest.fixture(scope="module")
def saved(
    stack: Endpoints,
    store: ObjectStore,
    small_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Saved:
    config = small_config("of-a-neighbour", model={"path": str(small_model)})
    driver = Driver(stack, config)
    token = driver.client.create_token("attacker", "trainer").token
    attacker = BufferClient(stack.buffer_url, token, run=config.name)
    attacker.attempt = driver.client.attempt
    scratch = tmp_path_factory.mktemp("saved")
    saved = Saved(driver, attacker, scratch / "files", small_model, scratch / "PWNED")
    with init_distributed() as ranks:
        updater = make_updater(config, small_model, ranks)
        for _, optimizers in updater.modules.values():
            for optimizer in optimizers.values():
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = torch.ones_like(parameter)
                optimizer.step()
        saved.commit(weights_digest(updater.modules, ranks))
        checkpointer = Checkpointer(driver.client, store, scratch=scratch, ranks=ranks)
        checkpointer.save(1, updater.modules_to_save(1))
        checkpointer.settle()
    stored = driver.client.latest_checkpoint()
    assert stored is not None
    store.get_directory(stored.uri, stored.manifest_digest, saved.directory)
    return saved


def record(saved: Saved, store: ObjectStore, files: Path) -> None:
    """Records a checkpoint of the last committed step, as the attacker."""
    prefix = layout.checkpoint(saved.driver.config.name, saved.step, saved.attacker.attempt)
    saved.attacker.record_checkpoint(saved.step, store.put_files(prefix, files_of(files)))


@pytest.fixture
def forged(saved: Saved, tmp_path: Path) -> Path:
    """Returns a copy of the honest checkpoint's files, for the attacker to change."""
    return Path(shutil.copytree(saved.directory, tmp_path / "forged"))


def replace_value(forged: Path, metadata: Metadata, name: str, value: object) -> None:
    """Appends a value to the checkpoint's file and lets the index name it in place of another."""
    data = io.BytesIO()
    torch.save(value, data)
    (file,) = forged.glob("*.distcp")
    offset = file.stat().st_size
    with file.open("ab") as stream:
        stream.write(data.getvalue())
    place = _StorageInfo(file.name, offset, len(data.getvalue()))
    (key,) = (key for key in metadata.storage_data if key.fqn == name)
    metadata.storage_data[key] = place
    (forged / ".metadata").write_bytes(pickle.dumps(metadata))


def test_no_index_of_a_recorded_checkpoint_runs_code(
    saved: Saved, store: ObjectStore, forged: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """Neither in the trainer that resumes from it, nor where a person exports it."""
    run, target = saved.driver.config.name, tmp_path / "exported"
    saved.commit("1" * 64)
    (forged / ".metadata").write_bytes(pickle.dumps(Hostile(saved.mark)))
    record(saved, store, forged)
    with init_distributed() as ranks, pytest.raises(BapoError, match="is no index of a checkpoint"):
        train(saved.driver.config, saved.context(store, tmp_path), ranks)
    command = ["checkpoints", run, "--step", f"{saved.step}", "--export", str(target)]
    result = CliRunner(env=environment).invoke(bapo, command)
    assert isinstance(result.exception, BapoError), result.output
    assert ".metadata: is no index of a checkpoint" in str(result.exception)
    assert not saved.mark.exists()


@pytest.mark.parametrize("name", ["optimizer.param_groups.0.lr", "model.model.norm.weight"])
def test_no_value_of_a_recorded_checkpoint_runs_code(
    saved: Saved, store: ObjectStore, forged: Path, tmp_path: Path, name: str
) -> None:
    """Whether it stands for a number or for a tensor."""
    saved.commit("1" * 64)
    replace_value(forged, saved.metadata, name, Hostile(saved.mark))
    record(saved, store, forged)
    with init_distributed() as ranks, pytest.raises(BapoError, match="does not fit the model"):
        train(saved.driver.config, saved.context(store, tmp_path), ranks)
    assert not saved.mark.exists()


def test_a_trainer_goes_on_from_no_other_weights_than_those_of_the_committed_step(
    saved: Saved, store: ObjectStore, tmp_path: Path
) -> None:
    """Of a step without a checkpoint, the attacker can record one before a trainer is restarted."""
    saved.commit("1" * 64)
    record(saved, store, saved.directory)
    with (
        init_distributed() as ranks,
        pytest.raises(BapoError, match="does not have the weights with which the step was commit"),
    ):
        train(saved.driver.config, saved.context(store, tmp_path), ranks)


def test_a_trainer_goes_on_from_the_weights_of_the_committed_step(
    saved: Saved, store: ObjectStore, tmp_path: Path
) -> None:
    with init_distributed() as ranks:
        updater = make_updater(saved.driver.config, saved.model, ranks)
        modules = updater.modules
        restore_state(saved.directory, modules, read_metadata(saved.directory, "honest"))
        weights = weights_digest(modules, ranks)
        saved.commit(weights)
        record(saved, store, saved.directory)
        context = saved.context(store, tmp_path)
        restored, step = restore(saved.driver.config, context, ranks)
        assert (step, weights_digest(restored.modules, ranks)) == (saved.step, weights)
        refuse_other_weights(step, weights, context, ranks)


def _pickled(change: Callable[[Metadata], object]) -> Callable[[Metadata], bytes]:
    def make(metadata: Metadata) -> bytes:
        change(metadata)
        return pickle.dumps(metadata)

    return make


def _in_place(**fields: Any) -> Callable[[Metadata], bytes]:
    def change(metadata: Metadata) -> None:
        places = metadata.storage_data
        key, place = next(iter(places.items()))
        places[key] = replace(place, **fields)

    return _pickled(change)


def _first_tensor(metadata: Metadata) -> TensorStorageMetadata:
    entries = metadata.state_dict_metadata.values()
    return next(entry for entry in entries if isinstance(entry, TensorStorageMetadata))


def _with_tensor(**fields: Any) -> Callable[[Metadata], bytes]:
    return _pickled(lambda metadata: vars(_first_tensor(metadata)).update(fields))


INDEXES: dict[str, Callable[[Metadata], bytes]] = {
    "empty": lambda _: b"",
    "cut off": lambda metadata: pickle.dumps(metadata)[:-100],
    "text": lambda _: b"cos\nsystem\n(S'touch PWNED'\ntR.",
    "builtin": lambda _: pickle.dumps(print),
    "class with a state": lambda _: b"\x80\x04\x8c\x02os\x8c\x07environ\x93}\x8c\x01a\x8c\x01bsb.",
    "extension": lambda _: b"\x80\x04\x82\x01.",
    "persistent": lambda _: b"\x80\x04K\x01Q.",
    "memory": lambda _: b"\x80\x04K\x01r\xff\xff\xff\xff.",
    "large frame": lambda _: b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fK\x01.",
    "large text": lambda _: b"\x80\x04X\xff\xff\xff\xffa.",
    "deep": lambda _: b"\x80\x04" + b"]" * 1000 + b"a" * 999 + b".",
    "list": lambda _: pickle.dumps([]),
    "dict": lambda metadata: pickle.dumps(vars(metadata)),
    "no values": _pickled(lambda metadata: vars(metadata).pop("state_dict_metadata")),
    "no places": _pickled(lambda metadata: vars(metadata).pop("storage_data")),
    "places in a list": _pickled(lambda metadata: setattr(metadata, "storage_data", [])),
    "absolute": _in_place(relative_path="/dev/zero"),
    "parent": _in_place(relative_path="../__0_0.distcp"),
    "hidden parent": _in_place(relative_path="__0_0.distcp/../../__0_0.distcp"),
    "the index itself": _in_place(relative_path=".metadata"),
    "missing file": _in_place(relative_path="__7_0.distcp"),
    "no text": _in_place(relative_path=7),
    "negative offset": _in_place(offset=-1),
    "beyond the end": _in_place(length=1 << 40),
    "fraction": _in_place(length=0.5),
    "truth": _in_place(offset=True),
    "decompression": _in_place(transform_descriptors=["stream.zstd"]),
    "hostile field": _in_place(offset=Hostile(Path("PWNED"))),
    "hostile key": _pickled(
        lambda metadata: metadata.state_dict_metadata.update({Hostile(Path("PWNED")): None})  # type: ignore[dict-item]
    ),
    "hostile type": _with_tensor(properties=Hostile(Path("PWNED"))),
    "hostile shape": _with_tensor(size=Hostile(Path("PWNED"))),
    "negative shape": _with_tensor(size=torch.Size([-1, 4])),
    "chunks of another kind": _with_tensor(chunks=[None]),
    "no chunks": _with_tensor(chunks=None),
}


@pytest.mark.parametrize("index", INDEXES.values(), ids=INDEXES.keys())
def test_an_index_of_another_shape_is_refused(
    saved: Saved, forged: Path, monkeypatch: pytest.MonkeyPatch, index: Callable[[Metadata], bytes]
) -> None:
    monkeypatch.chdir(forged)
    (forged / ".metadata").write_bytes(index(saved.metadata))
    with pytest.raises(BapoError, match=r"forged/.metadata: is no index of a checkpoint"):
        read_metadata(forged, str(forged))
    assert not (forged / "PWNED").exists()


def test_an_honest_index_is_read_as_it_was_written(saved: Saved) -> None:
    read, written = read_metadata(saved.directory, "honest"), saved.metadata
    assert read.state_dict_metadata == written.state_dict_metadata
    assert read.storage_data == written.storage_data


def test_evidence_of_a_failure_is_read_without_running_code(saved: Saved) -> None:
    manifest = saved.driver.client.recorded_batch(1)
    evidence = {"batch": manifest, "members": manifest.members, "rows": torch.zeros(2), "step": 1}
    data = io.BytesIO()
    torch.save(as_plain(evidence), data)
    data.seek(0)
    read = torch.load(data, weights_only=True)
    assert read["members"][0]["group_id"] == manifest.members[0].group_id
    assert read["rows"].equal(torch.zeros(2))
