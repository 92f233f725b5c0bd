"""An attacker who decides what is in a data set that somebody else reads."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.images import LARGEST_IMAGE
from services.datasets import files
from services.datasets.files import read_rows
from services.datasets.images import Images
from tests.image_prompts import diagram

# ---- Parquet ------------------------------------------------------------------------------------


def parquet(values: Any, **options: Any) -> io.BytesIO:
    """Returns a Parquet file with one column."""
    file = io.BytesIO()
    pq.write_table(pa.table({"problem": values}), file, **options)
    return file


def read(file: io.BytesIO) -> list[Any]:
    return [row["problem"] for row in read_rows(file, "data.parquet", ["problem"])]


def test_a_small_file_of_large_values_is_not_decompressed() -> None:
    bomb = parquet(["a" * (80 << 20)], compression="zstd", use_dictionary=False)
    assert len(bomb.getvalue()) < 20_000
    with pytest.raises(ValueError, match=r"bytes in a file of .*, which is more than 200 for each"):
        read(bomb)


def test_a_list_of_values_without_bytes_is_not_built() -> None:
    bomb = parquet([[None] * 20_000_000], compression="zstd")
    assert len(bomb.getvalue()) < 500_000
    with pytest.raises(ValueError, match="which is more than 200 for each"):
        read(bomb)


def test_a_value_that_is_stored_once_is_not_decoded_for_all_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files, "LARGEST_BATCH", 8 << 20)
    bomb = parquet(["a" * (1 << 20)] * 200, dictionary_pagesize_limit=1 << 30)
    assert len(bomb.getvalue()) < 200_000
    with pytest.raises(ValueError, match=r"16 rows have 16,.* bytes, more than 8,388,608"):
        read(bomb)


def test_files_of_honest_sizes_are_read() -> None:
    """Texts that repeat, images, and long lists."""
    texts = [f"Reply to question {number % 7}." * 20 for number in range(5000)]
    images = [os.urandom(1 << 20) for _ in range(20)]
    for values in (texts, images, [[1.0] * 100_000] * 3):
        for compression in ("snappy", "zstd"):
            assert read(parquet(values, compression=compression)) == values


# ---- JSON ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_deeply_nested_json_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not JSON"):
        list(read_rows(io.BytesIO(b"[" * 100_000), name, []))


# ---- images -------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Returns the directory of a data set, beside which a user has private files."""
    directory = tmp_path / "data"
    directory.mkdir()
    for path in (tmp_path / "private.png", directory / "public.png"):
        path.write_bytes(diagram(1))
    (directory / "link.png").symlink_to(tmp_path / "private.png")
    (directory / "linked").symlink_to(tmp_path)
    (directory / "own-link.png").symlink_to("public.png")
    (directory / "loop").symlink_to("loop")
    os.mkfifo(directory / "pipe")
    (directory / "large.png").write_bytes(bytes(LARGEST_IMAGE + 1))
    return directory


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("../private.png", "is outside of the data set's directory"),
        ("{parent}/private.png", "is outside of the data set's directory"),
        ("link.png", "is outside of the data set's directory"),
        ("linked/private.png", "is outside of the data set's directory"),
        ("/dev/zero", "is outside of the data set's directory"),
        ("/proc/self/environ", "is outside of the data set's directory"),
        ("pipe", "is no regular file"),
        ("", "is no regular file|Is a directory"),
        ("loop", "Too many levels of symbolic links"),
        ("a" * 300, "File name too long"),
        ("\0", "null byte"),
        ("\ud800", "surrogates not allowed"),
        ("large.png", "the image has more than"),
        ("missing.png", "No such file or directory; give a path relative to the data set"),
    ],
)
@pytest.mark.parametrize("as_struct", [False, True])
def test_rows_name_no_other_files_than_images_of_their_directory(
    directory: Path, path: str, reason: str, as_struct: bool
) -> None:
    path = path.format(parent=directory.parent)
    value = {"bytes": None, "path": path} if as_struct else path
    images = Images(lambda _: b"", directory)
    with pytest.raises(ValueError, match=reason):
        images._take_value([value], "images")
    assert not images.digests


@pytest.mark.parametrize("path", ["public.png", "own-link.png", "{directory}/public.png"])
def test_images_below_the_directory_are_taken(directory: Path, path: str) -> None:
    images = Images(lambda _: b"", directory)
    (taken,) = images._take_value([path.format(directory=directory)], "images")
    assert images.get(taken["digest"]) == diagram(1)
