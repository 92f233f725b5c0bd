"""The JSON Schema of a configuration file, for editors and for validators in other languages."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from bapo_core.config.run import RunConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a configuration file, with the descriptions of all keys.

    No key is required, because the preset and the defaults supply the others. Only `load_config`
    refuses values that contradict each other.
    """
    schema = _described(RunConfig.model_json_schema(schema_generator=_Generator))
    return {
        "$schema": DIALECT,
        "title": "bapo run configuration",
        "description": (
            "The configuration of a run of bapo. Every key is optional: keys that are absent have "
            "the value of the preset that `algorithm` names, or else their default."
        ),
        **{key: value for key, value in schema.items() if key not in ("title", "description")},
    }


class _Generator(GenerateJsonSchema):
    """Leaves out titles of keys, which only repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False


def _described(schema: Any) -> Any:
    """Returns a schema without line breaks in descriptions and without defaults of sections.

    A section's default repeats those of its keys.
    """
    if isinstance(schema, list):
        return [_described(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    is_section = "$ref" in schema or ("anyOf" in schema and isinstance(schema.get("default"), dict))
    return {
        key: " ".join(value.split())
        if key == "description" and isinstance(value, str)
        else _described(value)
        for key, value in schema.items()
        if not (key == "default" and is_section)
    }
