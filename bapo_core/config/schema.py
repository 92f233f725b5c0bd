"""The JSON Schema of a configuration file, for editors and for validators in other languages."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from bapo_core.config.run import RunConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a configuration file, with the descriptions of all keys.

    No key is required, because the preset and the defaults supply the others. Only `load_config`
    refuses values that contradict each other.
    """
    schema = RunConfig.model_json_schema(schema_generator=_Generator)
    schema["$defs"] = {name: _described(definition) for name, definition in schema["$defs"].items()}
    return {
        "$schema": DIALECT,
        "title": "bapo run configuration",
        "description": (
            "The configuration of a run of bapo. Every key is optional: keys that are absent have "
            "the value of the preset that `algorithm` names, or else their default."
        ),
        **{
            key: value
            for key, value in _described(schema).items()
            if key not in ("title", "description")
        },
    }


class _Generator(GenerateJsonSchema):
    """Leaves out titles of keys, which only repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False


def _described(schema: JsonSchemaValue) -> JsonSchemaValue:
    """Returns an object's schema without line breaks in descriptions and defaults of sections.

    A section's default repeats those of its keys.
    """
    described = dict(schema)
    if "description" in described:
        described["description"] = " ".join(described["description"].split())
    described["properties"] = {
        key: {
            name: " ".join(value.split()) if name == "description" else value
            for name, value in field.items()
            if not (name == "default" and "$ref" in field)
        }
        for key, field in schema["properties"].items()
    }
    return described
