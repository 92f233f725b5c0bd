"""The configuration reference is complete, and what the models say."""

from __future__ import annotations

from pathlib import Path

from bapo_core.config.reference import render, undocumented


def test_the_page_is_up_to_date() -> None:
    assert Path("docs/configuration.md").read_text() == render(), "run `make docs`"


def test_every_key_is_documented() -> None:
    assert undocumented() == []
