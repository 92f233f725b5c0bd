"""Tests the settings of the buffer service."""

from __future__ import annotations

import pytest

from bapo_core.errors import ConfigError
from services.buffer.settings import MigrationSettings


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_urls_of_other_programs_get_the_driver(
    monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """CloudNativePG's Secret, for example, has the URL that libpq takes."""
    monkeypatch.setenv("BAPO_DATABASE_URL", f"{scheme}://app:secret@db-rw.team:5432/app")
    url = MigrationSettings.load().database_url.get_secret_value()
    assert url == "postgresql+psycopg://app:secret@db-rw.team:5432/app"


@pytest.mark.parametrize("url", ["mysql://app:secret@db/app", "db-rw.team:5432"])
def test_other_databases_are_refused_without_their_password(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("BAPO_DATABASE_URL", url)
    with pytest.raises(ConfigError, match="must have the form postgresql://") as caught:
        MigrationSettings.load()
    assert "secret" not in str(caught.value)
