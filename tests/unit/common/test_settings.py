"""Settings come from environment variables; one error names everything that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, SecretStr, TypeAdapter
from pydantic.fields import FieldInfo

from bapo_core.errors import ConfigError
from docs.generate.environment import settings_classes
from services.common.settings import (
    BufferClientSettings,
    ObjectStoreClientSettings,
    ServerSettings,
    Settings,
    SettingsGroup,
    variables,
)

S3 = {
    "BAPO_S3_ENDPOINT": "http://localhost:8333",
    "BAPO_S3_BUCKET": "bapo",
    "BAPO_S3_REGION": "eu-west-1",
    "BAPO_S3_PATH_STYLE": "always",
    "BAPO_S3_CREDENTIALS": "keys",
    "BAPO_S3_ACCESS_KEY": "access",
    "BAPO_S3_SECRET_KEY": "hidden",
}


class Example(ServerSettings, ObjectStoreClientSettings):
    """Settings of no real process."""

    token: SecretStr = Field(min_length=8)
    """Bearer token."""
    limit_s: float | None = None
    """Seconds, or no limit."""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, _ in variables(Example):
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    valid = {"BAPO_PORT": "8700", "BAPO_TOKEN": "a secret token", **S3}
    for name, value in (valid | changes).items():
        monkeypatch.setenv(name, value)


def error_of(settings: type[Settings]) -> str:
    with pytest.raises(ConfigError) as caught:
        settings.load()
    return str(caught.value)


def test_values_are_typed_and_groups_are_nested(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, BAPO_LIMIT_S="1.5")
    settings = Example.load()
    assert (settings.host, settings.port, settings.limit_s) == ("127.0.0.1", 8700, 1.5)
    assert settings.s3.bucket == "bapo"
    assert settings.s3.secret_key.get_secret_value() == "hidden"
    assert settings.s3.environment() == S3


def test_one_error_names_every_missing_variable() -> None:
    assert error_of(Example) == (
        "environment: BAPO_S3_ENDPOINT is not set; BAPO_S3_BUCKET is not set; "
        "BAPO_S3_ACCESS_KEY is not set; BAPO_S3_SECRET_KEY is not set; BAPO_PORT is not set; "
        "BAPO_TOKEN is not set"
    )


def test_a_group_that_is_incomplete_names_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch)
    monkeypatch.delenv("BAPO_S3_SECRET_KEY")
    assert error_of(Example) == "environment: BAPO_S3_SECRET_KEY is not set"


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, BAPO_S3_BUCKET="", BAPO_LIMIT_S="")
    assert error_of(Example) == "environment: BAPO_S3_BUCKET is not set"
    monkeypatch.setenv("BAPO_S3_BUCKET", "bapo")
    assert Example.load().limit_s is None


def test_an_invalid_value_is_shown_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, BAPO_PORT="many")
    message = error_of(Example)
    assert message.startswith("environment: BAPO_PORT: input should be a valid integer")
    assert "(got 'many')" in message


@pytest.mark.parametrize("show", [repr, str, lambda settings: settings.model_dump_json()])
def test_secrets_are_never_shown(show: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch)
    settings = Example.load()
    assert "a secret token" not in show(settings)
    assert "hidden" not in show(settings)


def test_an_error_never_shows_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, BAPO_TOKEN="brief", BAPO_PORT="0")
    with pytest.raises(ConfigError) as caught:
        Example.load()
    message = str(caught.value)
    assert "BAPO_TOKEN: value should have at least 8" in message
    for shown in (message, str(caught.value.__cause__), repr(caught.value.__cause__)):
        assert "brief" not in shown
        assert "hidden" not in shown


@pytest.mark.parametrize("variable", ["BAPO_S3_ENDPOINT", "BAPO_BUFFER_URL"])
def test_addresses_hold_no_password(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, **{"BAPO_BUFFER_URL": "http://buffer:8700"})
    BufferClientSettings.load()
    monkeypatch.setenv(variable, "https://user:swordfish@example.com")
    settings = BufferClientSettings if "BUFFER" in variable else Example
    message = error_of(settings)
    assert f"{variable}: holds a user or a password" in message
    assert "swordfish" not in message


def test_every_variable_is_listed_with_its_description() -> None:
    described = {name: field.description for name, field in variables(Example)}
    listening = {"BAPO_HOST", "BAPO_PORT", "BAPO_LISTEN_FD", "BAPO_HOST_NAMES"}
    assert set(described) == {*listening, "BAPO_TOKEN", "BAPO_LIMIT_S", *S3}
    assert all(described.values())


@pytest.mark.parametrize("settings", list(settings_classes()), ids=lambda each: each.__qualname__)
def test_the_defaults_are_values_that_a_variable_may_have(settings: type[Settings]) -> None:
    """pydantic-settings validates defaults: one that is refused ends each process that lacks the
    variable, as a step of the pipeline where the chart exposes no dashboard."""
    for name, field in _fields(settings):
        if not field.is_required():
            default = field.get_default(call_default_factory=True, validated_data={})
            annotated: Any = Annotated[(field.annotation, field, *field.metadata)]
            assert TypeAdapter(annotated).validate_python(default) == default, name


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Yields the fields of settings, and those of their groups."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, SettingsGroup):
            yield from _fields(field.annotation)
        else:
            yield name, field
