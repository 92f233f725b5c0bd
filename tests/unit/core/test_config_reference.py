"""The generated reference of the configuration is complete, current, and fits the examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from bapo_core.config import PRESETS, RunConfig, json_schema
from docs.generate.configuration import render, render_schema, undocumented

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))


def errors(values: dict[str, Any]) -> list[str]:
    """Returns the schema's objections to a configuration."""
    validator = jsonschema.Draft202012Validator(json_schema())
    return [error.message for error in validator.iter_errors(values)]


def test_the_page_is_up_to_date() -> None:
    assert Path("docs/configuration.md").read_text() == render(), "run `make docs`"


def test_the_schema_is_up_to_date() -> None:
    assert Path("docs/config.schema.json").read_text() == render_schema(), "run `make docs`"


def test_every_key_and_section_is_documented() -> None:
    assert undocumented() == []


def test_the_schema_is_valid_and_describes_every_key() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for definition in (schema, *schema["$defs"].values()):
        assert definition["description"]
        for name, field in definition["properties"].items():
            assert "$ref" in field or field["description"], name


@pytest.mark.parametrize("path", EXAMPLES, ids=str)
def test_every_example_satisfies_the_schema_and_names_it(path: Path) -> None:
    text = path.read_text()
    assert errors(yaml.safe_load(text)) == []
    first = text.splitlines()[0]
    assert first == "# yaml-language-server: $schema=../docs/config.schema.json"
    assert (path.parent / first.partition("=")[2]).is_file()


@pytest.mark.parametrize("algorithm", PRESETS)
def test_a_file_that_only_names_a_preset_satisfies_the_schema(algorithm: str) -> None:
    assert errors({"algorithm": algorithm}) == []
    assert errors({"algorithm": algorithm, **PRESETS[algorithm]}) == []


def test_a_whole_configuration_satisfies_the_schema() -> None:
    assert errors(RunConfig().model_dump(mode="json")) == []


@pytest.mark.parametrize(
    "values",
    [
        {"sync": {"evry": 3}},
        {"sync": {"every": 0}},
        {"algorithm": "sac"},
        {"rollout": 3},
        {"name": "Bad Name"},
        {"replay": {"window": {"c2_range": [0.1, 0.2, 0.3]}}},
    ],
)
def test_the_schema_refuses_invalid_configurations(values: dict[str, Any]) -> None:
    assert errors(values)
