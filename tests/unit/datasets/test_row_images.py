"""Images of rows: where they may stand, how they are checked, and how payloads refer to them."""

from __future__ import annotations

import hashlib
import io
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from bapo_core.config import config_from
from bapo_core.errors import BapoError
from bapo_core.tasks import get_task
from services.common import images
from services.common.images import ImageCache, check_image, decode_image
from services.datasets import DataSources, load_datasets, read_dataset

GEOMETRY = get_task("geometry")


def _noise() -> bytes:
    """Returns a PNG of random pixels, which cannot be compressed."""
    buffer = io.BytesIO()
    Image.frombytes("L", (32, 32), random.Random(0).randbytes(1024)).save(buffer, format="PNG")
    return buffer.getvalue()


def encoded(format_: str = "PNG", size: tuple[int, int] = (30, 20), color: Any = 200) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", size, color).save(buffer, format=format_)
    return buffer.getvalue()


NOISE = _noise()
DAMAGED = NOISE[:100] + b"\xff" * 50 + NOISE[150:]


def reference(data: bytes, size: tuple[int, int] = (30, 20)) -> dict[str, Any]:
    return {"digest": hashlib.sha256(data).hexdigest(), "width": size[0], "height": size[1]}


def row(*items: Any, answer: str = "47") -> dict[str, Any]:
    return {"images": list(items), "problem": "Find x.", "answer": answer}


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


# ---- rows ---------------------------------------------------------------------------------------


def test_a_parquet_file_holds_images_as_structs(tmp_path: Path) -> None:
    first, second = encoded("PNG"), encoded("JPEG", (8, 16))
    rows = [
        row({"bytes": first, "path": "1.png"}),
        row({"bytes": second, "path": None}, {"bytes": first, "path": None}),
    ]
    dataset = read_dataset(GEOMETRY, write_parquet(tmp_path / "a.parquet", rows), DataSources(), {})
    assert [prompt.payload["images"] for prompt in dataset.prompts] == [
        [reference(first)],
        [reference(second, (8, 16)), reference(first)],
    ]
    assert dataset.images is not None
    assert {dataset.images.get(digest) for digest in dataset.images.digests} == {first, second}


def test_a_local_file_names_files_relative_to_itself(tmp_path: Path) -> None:
    data = encoded("WEBP")
    (tmp_path / "img").mkdir()
    (tmp_path / "img" / "1.webp").write_bytes(data)
    rows = [row("img/1.webp"), row({"bytes": None, "path": "img/1.webp"}, "img/1.webp")]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = read_dataset(GEOMETRY, str(tmp_path / "a.jsonl"), DataSources(), {})
    assert [len(prompt.payload["images"]) for prompt in dataset.prompts] == [1, 2]
    assert dataset.images is not None
    assert dataset.images.digests == [reference(data)["digest"]], "equal images are one"


def test_a_column_may_hold_one_image(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(encoded())
    (tmp_path / "a.json").write_text(
        json.dumps([{"image": "1.png", "problem": "Find x.", "answer": 1}])
    )
    columns = {"images": "image"}
    dataset = read_dataset(GEOMETRY, str(tmp_path / "a.json"), DataSources(), columns)
    assert dataset.prompts[0].payload["images"] == [reference(encoded())]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("none.png", r"images\[0\] \(none.png\): No such file or directory; give a path relative"),
        (
            {"bytes": b"text", "path": "1.png"},
            r"images\[0\] \(1.png\): is no image in PNG, JPEG or",
        ),
        ({"bytes": encoded("GIF"), "path": None}, r"images\[0\]: is no image in PNG, JPEG or WebP"),
        (
            {"bytes": DAMAGED, "path": "1.png"},
            r"the image cannot be decoded \(.*\); replace",
        ),
        (
            {"bytes": NOISE[: len(NOISE) // 2], "path": "1.png"},
            r"the image cannot be decoded \(.*\); replac",
        ),
        (
            {"bytes": None, "path": None},
            r"is None; make it an image struct \{bytes, path\}, or the",
        ),
    ],
)
def test_an_invalid_image_is_refused_in_one_line_with_its_row_and_file(
    tmp_path: Path, item: Any, message: str
) -> None:
    rows = [row({"bytes": encoded(), "path": "0.png"})]
    if isinstance(item, str):
        (tmp_path / "a.jsonl").write_text(json.dumps(row(item)))
        address, number = str(tmp_path / "a.jsonl"), 1
    else:
        address, number = write_parquet(tmp_path / "a.parquet", [*rows, row(item)]), 2
    with pytest.raises(BapoError, match=message) as error:
        read_dataset(GEOMETRY, address, DataSources(), {})
    assert str(error.value).startswith(f"{address}, row {number}: images[0]")
    assert "\n" not in str(error.value)


def test_images_that_are_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MOST_PIXELS", 500)
    with pytest.raises(ValueError, match="has 30 x 20 pixels, more than 500 together; reduce"):
        check_image(encoded())
    with pytest.raises(ValueError, match="one side is more than 200 times the other; crop it"):
        check_image(encoded(size=(201, 1)))
    monkeypatch.setattr(images, "LARGEST_IMAGE", 10)
    with pytest.raises(ValueError, match=r"has \d+ bytes, more than 10; reduce its size"):
        check_image(encoded())


def test_generated_problems_refer_to_their_diagrams() -> None:
    config = config_from(
        {
            "task": {"name": "geometry", "train_prompts": 8, "test_prompts": 2},
            "rollout": {"prompts_per_step": 2},
            "optimizer": {"minibatch_prompts": 2},
        }
    )
    datasets = load_datasets(config)
    train = datasets.train
    for prompt in (prompt for dataset in datasets.all for prompt in dataset.prompts):
        (image,) = prompt.payload["images"]
        assert (image["width"], image["height"]) == (224, 224)
    assert train.images is not None
    assert len(train.images.digests) == 8
    assert load_datasets(config)[0].name == train.name


def test_tasks_without_images_take_rows_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"problem": "?", "answer": "1", "images": "x"}]))
    dataset = read_dataset(get_task("math"), str(tmp_path / "a.json"), DataSources(), {})
    assert dataset.images is None


# ---- decoding -----------------------------------------------------------------------------------


def test_a_transparent_image_is_shown_on_white() -> None:
    buffer = io.BytesIO()
    Image.new("RGBA", (2, 1), (255, 0, 0, 0)).save(buffer, format="PNG")
    image = decode_image(buffer.getvalue())
    assert (image.mode, image.getpixel((0, 0))) == ("RGB", (255, 255, 255))


def test_a_photograph_is_turned_as_it_is_shown() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turned by 90 degrees
    buffer = io.BytesIO()
    Image.new("RGB", (30, 20)).save(buffer, format="JPEG", exif=exif)
    facts = check_image(buffer.getvalue())
    assert (facts.width, facts.height, facts.media_type) == (20, 30, "image/jpeg")
    assert decode_image(buffer.getvalue()).size == (20, 30)


# ---- the cache ----------------------------------------------------------------------------------


def test_the_cache_fetches_an_image_once_and_drops_those_not_used_lately() -> None:
    fetched: list[str] = []

    def fetch(digest: str) -> bytes:
        fetched.append(digest)
        return digest.encode() * 10

    cache = ImageCache(fetch, capacity=25)
    assert cache.get("a") == b"a" * 10
    for digest in "abacab":
        cache.get(digest)
    assert fetched == ["a", "b", "c", "b"]
