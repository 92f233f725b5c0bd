"""Tests the settings of the buffer service."""

from __future__ import annotations

import pytest

from bapo_core.errors import BapoError, ConfigError
from services.buffer.database import connection_arguments
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


@pytest.mark.parametrize("password", ["p@ss", "p@ss/w", "p@s?s"])
def test_a_password_that_is_not_encoded_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, password: str
) -> None:
    """libpq would take the text after the first @ for the host, and messages show the host."""
    monkeypatch.setenv("BAPO_DATABASE_URL", f"postgresql://app:{password}@db.team:6432/app")
    with pytest.raises(ConfigError, match="write @ as %40, / as %2F") as caught:
        MigrationSettings.load()
    assert "ss" not in str(caught.value).replace("password", "")


@pytest.mark.parametrize(
    ("query", "threshold", "timeout"),
    [
        ("", None, None),
        ("?prepare_threshold=none", None, None),
        ("?prepare_threshold=0&connect_timeout=7", 0, "7"),
        ("?connect_timeout=7&prepare_threshold=5", 5, "7"),
    ],
)
def test_parameters_of_psycopg_are_set_in_the_url(
    query: str, threshold: int | None, timeout: str | None
) -> None:
    _, options = connection_arguments(f"postgresql+psycopg://app@db/app{query}")
    assert options["prepare_threshold"] == threshold
    assert options.get("connect_timeout") == timeout
    assert options["target_session_attrs"] == "read-write"


def test_a_threshold_that_is_no_number_is_refused() -> None:
    with pytest.raises(BapoError, match="prepare_threshold is 'often'; give the number of uses"):
        connection_arguments("postgresql+psycopg://app@db/app?prepare_threshold=often")
