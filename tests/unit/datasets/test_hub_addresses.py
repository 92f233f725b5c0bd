"""Addresses of data sets of the hub, and what is said without the library that reads them."""

from __future__ import annotations

import pytest

from bapo_core.errors import BapoError
from services.datasets import hub
from services.datasets.hub import HubAddress, pin_revision


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("hf://team/sums", ("team/sums", None, None, None)),
        ("hf://team/sums:train", ("team/sums", None, None, "train")),
        ("hf://team/sums@v1", ("team/sums", "v1", None, None)),
        ("hf://team/sums@refs/pr/1:test", ("team/sums", "refs/pr/1", None, "test")),
        ("hf://gsm8k:main/train", ("gsm8k", None, "main", "train")),
    ],
)
def test_an_address_names_repository_revision_and_split(
    address: str, parts: tuple[str | None, ...]
) -> None:
    parsed = HubAddress.parse(address)
    assert (parsed.repository, parsed.revision, parsed.configuration, parsed.split) == parts
    assert str(parsed) == address


@pytest.mark.parametrize("address", ["hf://", "hf://a/b/c", "hf://a/b:", "hf://a/b:c/d/e", "hf:/a"])
def test_another_address_is_refused(address: str) -> None:
    with pytest.raises(BapoError, match="is no address of a data set; write hf://organisation"):
        HubAddress.parse(address)


def test_an_address_with_a_commit_stays_as_it_is() -> None:
    address = f"hf://team/sums@{'0' * 40}:train"
    assert pin_revision(address) == address


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "find_spec", lambda _: None)
    with pytest.raises(BapoError, match=r"need the `datasets` library; .* '\.\[hub\]'"):
        pin_revision("hf://team/sums:without-library")
