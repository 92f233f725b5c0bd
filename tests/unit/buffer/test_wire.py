"""The wire models describe themselves: `/docs` explains every field of every model."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from pydantic import ValidationError

from bapo_core.config import load_config
from bapo_core.errors import ConfigError
from services.buffer.api import wire
from services.buffer.app import create_app
from services.common.objectstore import ObjectStore
from services.common.settings import ObjectStoreSettings

MODELS = [
    model
    for _, model in inspect.getmembers(wire, inspect.isclass)
    if issubclass(model, wire.Wire) and model is not wire.Wire
]


@pytest.fixture(scope="module")
def schemas() -> dict[str, Any]:
    """Schemas of the OpenAPI document, which needs neither a database nor an object store."""
    settings = ObjectStoreSettings.model_validate(
        {"endpoint": "http://localhost:1", "bucket": "b", "access_key": "a", "secret_key": "s"}
    )
    app = create_app(
        "postgresql+psycopg://u:p@localhost/d", ObjectStore(settings), {"admin": "token"}
    )
    components: dict[str, Any] = app.openapi()["components"]
    return components["schemas"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_model_and_every_field_is_described(model: type[wire.Wire]) -> None:
    assert vars(model).get("__doc__")
    assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_the_openapi_document_carries_the_descriptions(schemas: dict[str, Any]) -> None:
    names = {model.__name__ for model in MODELS}
    described = {
        f"{schema}.{name}": "description" in field
        for schema, definition in schemas.items()
        if schema.partition("_")[0] in names
        for name, field in definition["properties"].items()
    }
    assert len(described) > 200
    assert [name for name, has_description in described.items() if not has_description] == []


def test_the_openapi_document_has_the_configuration(schemas: dict[str, Any]) -> None:
    assert schemas["RunState"]["properties"]["config"]["$ref"].endswith("/RunConfig")
    assert "description" in schemas["RunConfig"]["properties"]["steps"]


def run(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "countdown",
        "status": "running",
        "config": config,
        "train_dataset": "train",
        "test_datasets": {"test": "test"},
        "current_step": 0,
        "attempt": 0,
        "created_at": "2026-01-01T00:00:00Z",
    }


def test_a_stored_configuration_survives() -> None:
    config = load_config(None)
    state = wire.RunState.model_validate(run(config.model_dump(mode="json")))
    assert state.config == config
    assert state.model_dump(mode="json")["config"] == config.model_dump(mode="json")


def test_an_invalid_stored_configuration_names_the_run_and_the_key() -> None:
    stored = load_config(None).model_dump(mode="json") | {"steps": 0, "x1": {}}
    (state,) = wire.Page[wire.RunState].model_validate({"items": [run(stored)]}).items
    assert state.model_dump(mode="json")["config"] == stored
    with pytest.raises(ConfigError) as caught:
        _ = state.config.steps
    message = str(caught.value)
    assert "run 'countdown'" in message
    assert "steps: input should be greater than or equal to 1" in message
    assert "x1: no such key; it was renamed to fresh" in message
    assert "`bapo delete countdown`" in message


def test_other_fields_of_a_run_are_validated_as_usual() -> None:
    with pytest.raises(ValidationError, match="attempt"):
        wire.RunState.model_validate(run(load_config(None).model_dump()) | {"attempt": "first"})
