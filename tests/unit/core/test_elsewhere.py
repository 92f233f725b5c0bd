"""Names of other systems lead to keys that exist."""

from __future__ import annotations

import pytest

from bapo_core.config import PRESETS, RunConfig
from bapo_core.config.base import kinds_of
from bapo_core.config.elsewhere import ELSEWHERE, find_elsewhere
from bapo_core.spelling import did_you_mean


def keys_of(model: type, prefix: str = "") -> set[str]:
    """Returns the dotted keys of a section of any kind, and of the sections in it."""
    keys: set[str] = set()
    for name, field in model.model_fields.items():
        kinds = kinds_of(model, name)
        sections = [*kinds.sections.values()] if kinds else [field.annotation]
        keys.add(prefix + name)
        for section in sections:
            if hasattr(section, "model_fields"):
                keys |= keys_of(section, f"{prefix}{name}.")
    return keys


def test_every_key_exists() -> None:
    assert {entry.key for entry in ELSEWHERE} <= keys_of(RunConfig)


def test_no_name_has_two_meanings_within_a_system() -> None:
    for system in ("trl", "verl", "prime_rl"):
        names = [name for entry in ELSEWHERE for name in getattr(entry, system)]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("entry", ELSEWHERE, ids=lambda entry: entry.key)
def test_the_whole_name_leads_to_its_key(entry: object) -> None:
    for name in entry.names:  # type: ignore[attr-defined]
        found = find_elsewhere(name)
        assert name in next(other for other in ELSEWHERE if other.key == found).names


def test_letters_in_another_order_are_the_likeliest_slip() -> None:
    assert did_you_mean("gpro", PRESETS) == "; did you mean grpo?"
    assert did_you_mean("gsop", PRESETS) == "; did you mean gspo?"
    assert did_you_mean("pgo", ["opg", "pgx"], most=2) == "; did you mean opg or pgx?"
