"""The glossary's names exist: in the code, the configuration, the database and the REST API."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from bapo_core.config import RunConfig
from bapo_core.config.base import kinds_of, section_of
from services.buffer.app import create_app
from services.buffer.storage.tables import Base
from services.common.objectstore import ObjectStore
from services.common.settings import ObjectStoreSettings
from services.verifier.api import wire as verifier_wire

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in Path("docs/glossary.md").read_text().splitlines()
    if line.startswith("| **")
]
TERMS = set(
    """prompt, response, group, trajectory, rollout policy, behaviour policy, proximal policy,
    policy version, target version, staleness, hard buffer, high-quality buffer, accuracy, bin,
    unlocked, rollout, importance weight, sync window, replay window, attempt, span, replica,
    collector, run watcher, verifier, buffer service, difficulty, migration matrix, micro-batch,
    minibatch, manifest, digest, checkpoint, c1, r_tot""".replace("\n    ", " ").split(", ")
)
SYMBOLS = ("X1", "X2", "X3", "B_bad", "B_high", "c1", "c2", "c3", "r_tot", "v", "m", "B", "G", "mu")


def names(column: int) -> list[str]:
    """Returns the names in a column of the glossary."""
    return sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row[column])})


def resolve(path: str) -> Any:
    """Imports a dotted path: a module, or something in one."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        return reduce(_member, parts[count:], module)
    raise AttributeError(path)


def _member(owner: Any, name: str) -> Any:
    fields = getattr(owner, "model_fields", {})
    return fields[name] if name in fields else getattr(owner, name)


@cache
def api() -> dict[str, Any]:
    """Returns the OpenAPI document of the buffer service, which needs no database."""
    settings = ObjectStoreSettings(
        endpoint="http://localhost:1", bucket="none", access_key="none", secret_key="none"
    )
    app = create_app(
        "postgresql+psycopg://localhost:1/none", ObjectStore(settings), {"admin": "token"}
    )
    return app.openapi()


@cache
def fields() -> frozenset[str]:
    """Returns the fields of all messages of the buffer service and the verifier."""

    def of_verifier() -> Iterator[str]:
        for model in vars(verifier_wire).values():
            if isinstance(model, type) and issubclass(model, BaseModel):
                yield from model.model_fields

    schemas = api()["components"]["schemas"].values()
    return frozenset(
        [*of_verifier(), *(name for schema in schemas for name in schema.get("properties", ()))]
    )


def test_terms_are_unique_and_complete() -> None:
    terms = [row[0].strip("*") for row in ROWS]
    assert len(terms) == len(set(terms))
    assert set(terms) >= TERMS
    symbols = {symbol for row in ROWS for symbol in re.split(r"[\s,\[\]]+", row[6])}
    assert set(SYMBOLS) <= symbols


@pytest.mark.parametrize("name", names(2))
def test_names_in_the_code_exist(name: str) -> None:
    resolve(name)


@pytest.mark.parametrize("name", names(3))
def test_configuration_keys_exist(name: str) -> None:
    models: list[type[BaseModel]] = [RunConfig]
    for key in name.split("."):
        owners = [model for model in models if key in model.model_fields]
        assert owners, f"no section has the key {key}"
        kinds = kinds_of(owners[0], key)
        section = section_of(owners[0].model_fields[key].annotation)
        models = list(kinds.sections.values()) if kinds else [section] if section else []


@pytest.mark.parametrize("name", names(4))
def test_columns_exist(name: str) -> None:
    table, column = name.split(".")
    assert column in Base.metadata.tables[table].columns


@pytest.mark.parametrize("name", names(5))
def test_rest_paths_and_fields_exist(name: str) -> None:
    if name.startswith("/"):
        assert f"/v1{name}" in {re.sub(r"\{[^}]*\}", "{}", path) for path in api()["paths"]}
    else:
        assert name in fields()
