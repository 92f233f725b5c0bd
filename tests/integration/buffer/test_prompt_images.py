"""Images of prompts in the buffer service and the object store."""

from __future__ import annotations

import hashlib
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bapo_core.errors import BapoError
from bapo_core.seeding import derive_rng
from bapo_core.tasks import get_task
from bapo_core.tasks.diagrams import draw
from bapo_core.tasks.figures import Figure, random_figure
from services.buffer.api.client import BufferClient
from services.common import layout
from services.common.errors import ServiceError
from services.common.objectstore import ObjectStore
from services.datasets import Dataset, DataSources, read_dataset, store_dataset
from services.stack.stack import Endpoints

GEOMETRY = get_task("geometry")


def diagram(seed: int) -> bytes:
    figure: Figure = random_figure("triangle", derive_rng(seed, "test"))
    return draw(figure.diagram, 112).png


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def client(stack: Endpoints) -> BufferClient:
    return BufferClient(stack.buffer_url, stack.token)


@pytest.fixture
def store(stack: Endpoints) -> ObjectStore:
    return ObjectStore(stack.object_store)


def dataset_of(tmp_path: Path, seeds: range) -> Dataset:
    rows = [
        {
            "images": [{"bytes": diagram(seed), "path": None}],
            "problem": "<image>Find x.",
            "answer": str(seed),
        }
        for seed in seeds
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    return read_dataset(GEOMETRY, str(tmp_path / "data.parquet"), DataSources(), {})


def test_an_image_is_stored_by_its_digest_and_read_with_the_scope_read(
    stack: Endpoints, client: BufferClient, store: ObjectStore
) -> None:
    data = diagram(1)
    digest = digest_of(data)
    assert client.missing_images([digest, digest]) == [digest]
    client.upload_image(digest, data)
    client.upload_image(digest, data)
    assert client.missing_images([digest]) == []
    assert client.image(digest) == store.get(layout.image(digest), digest) == data
    reader = client.create_token("reader", "read").token
    url = f"{stack.buffer_url}/v1/images/{digest}"
    answer = httpx.get(url, headers={"Authorization": f"Bearer {reader}"})
    assert (answer.content, answer.headers["content-type"]) == (data, "image/png")
    assert "immutable" in answer.headers["cache-control"]
    assert httpx.get(url).status_code == 401
    denied = httpx.put(url, content=data, headers={"Authorization": f"Bearer {reader}"})
    assert denied.status_code == 403


def test_a_file_that_is_no_valid_image_is_refused(client: BufferClient) -> None:
    text = b"<script>alert(1)</script>"
    with pytest.raises(ServiceError, match="is no image in PNG, JPEG or WebP"):
        client.upload_image(digest_of(text), text)
    with pytest.raises(ServiceError, match=f"has the digest {digest_of(diagram(2))}, not"):
        client.upload_image("0" * 64, diagram(2))
    with pytest.raises(ServiceError, match=f"image {digest_of(text)}") as error:
        client.image(digest_of(text))
    assert error.value.status == 404


def test_images_are_uploaded_once_and_before_the_prompts_that_refer_to_them(
    client: BufferClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = dataset_of(tmp_path, range(10, 14))
    store_dataset(client, dataset, name="diagrams")
    uploaded: list[str] = []
    monkeypatch.setattr(client, "upload_image", lambda digest, _: uploaded.append(digest))
    store_dataset(client, dataset, name="diagrams")
    assert uploaded == []
    sources = DataSources(None, connect=lambda: client)
    read = read_dataset(GEOMETRY, "dataset:diagrams", sources, {})
    assert read.prompts == dataset.prompts
    assert read.images is not None
    digest = read.prompts[0].payload["images"][0]["digest"]
    assert read.images.get(digest) == diagram(10)


def test_prompts_whose_images_were_deleted_are_refused_before_the_run(
    client: BufferClient, store: ObjectStore, tmp_path: Path
) -> None:
    dataset = dataset_of(tmp_path, range(20, 22))
    store_dataset(client, dataset, name="gone")
    digest = dataset.prompts[0].payload["images"][0]["digest"]
    store.delete([layout.image(digest)])
    read = read_dataset(GEOMETRY, "dataset:gone", DataSources(None, connect=lambda: client), {})
    with pytest.raises(BapoError, match=f"image {digest[:12]} of its prompts is not stored; run"):
        store_dataset(client, read)
    store_dataset(client, dataset, name="gone")
    store_dataset(client, read)


def test_garbage_collection_keeps_the_images_of_prompts(
    client: BufferClient, store: ObjectStore, tmp_path: Path
) -> None:
    dataset = dataset_of(tmp_path, range(30, 32))
    store_dataset(client, dataset, name="kept")
    assert dataset.images is not None
    orphan = diagram(33)
    client.upload_image(digest_of(orphan), orphan)
    orphans = client.collect_garbage(dry_run=True).orphans
    assert layout.image(digest_of(orphan)) in orphans
    assert not {layout.image(digest) for digest in dataset.images.digests} & set(orphans)
    lost = dataset.images.digests[0]
    store.delete([layout.image(lost)])
    assert layout.image(lost) in client.collect_garbage(dry_run=True).missing
    store_dataset(client, dataset, name="kept")
