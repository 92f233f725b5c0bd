"""The base of all sections of a configuration, and sections of one of several kinds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    create_model,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from bapo_core.errors import ConfigError
from bapo_core.plug_ins import find, plug_in_names
from bapo_core.spelling import did_you_mean

OFF = "off"
"""The kind of a section that has no keys because its part of the method is turned off."""
UnitInterval = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A section of a configuration; unknown keys are refused, and values cannot be changed."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


@cache
def _section_of_kind(base: type[Section], key: str, kind: str) -> type[Section]:
    """Returns the section of `base` for one kind alone, whose name is its value at `key`.

    Each kind has one model, because sections of different models are never equal.
    """
    fields: dict[str, Any] = {key: (Literal[kind], kind)}
    return create_model(base.__name__, __base__=base, __doc__=base.__doc__, **fields)


class Kinds:
    """The kinds of a section. Each kind has keys of its own.

    Marks the annotation of a field, as in `Annotated[A | B, Kinds(A | B)]`. The section's value at
    `key` selects its model, and the first kind is the default. The name of a kind alone stands for
    the section with the defaults of this kind, in a file as on the command line.
    """

    def __init__(
        self,
        sections: Any,
        *,
        key: str = "kind",
        plug_ins: str = "",
        plug_in_base: type[Section] = Section,
    ) -> None:
        """Initialises the kinds.

        sections: the union of the models, each for one kind or several, whose names are the
            `Literal` of its field `key`; or the only model.
        plug_ins: the group of entry points by which other distributions add kinds. One of the same
            name in the group `<plug_ins>.settings` is the section of this kind's keys, a subclass
            of `plug_in_base`; without one, it has the keys of `plug_in_base`. The first group is
            not loaded here.
        """
        self.key = key
        self.sections: dict[str, type[Section]] = {
            kind: section
            for section in get_args(sections) or (sections,)
            for kind in get_args(section.model_fields[key].annotation)
        }
        self.default: str = next(iter(self.sections))
        self._plug_ins, self._plug_in_base = plug_ins, plug_in_base

    @property
    def names(self) -> list[str]:
        """The names of all kinds: the built-in ones, then the plug-ins'."""
        added = plug_in_names(self._plug_ins) - self.sections.keys() if self._plug_ins else ()
        return [*self.sections, *sorted(added)]

    def expand(self, value: Any) -> Any:
        """Returns the section `{key: name}` for the name of a kind; other values as they are.

        YAML 1.1 reads an unquoted `off` as false.
        """
        if value is False and OFF in self.sections:
            value = OFF
        if isinstance(value, str):
            return {self.key: value}
        if isinstance(value, Mapping) and value.get(self.key) is False and OFF in self.sections:
            return {**value, self.key: OFF}
        return value

    def kind_of(self, values: Any) -> Any:
        """Returns the kind that the values of a section name, or the default."""
        values = self.expand(values)
        return values.get(self.key, self.default) if isinstance(values, Mapping) else self.default

    def differ(self, values: Any, others: Any) -> bool:
        """Whether the values of two sections both name a kind, and not the same one."""
        sections = [section for section in (values, others) if isinstance(section, Mapping)]
        named = [section[self.key] for section in sections if self.key in section]
        return any(kind != named[0] for kind in named)

    def carried(self, values: Any, kind: Any) -> dict[str, Any]:
        """Returns the values of a section that hold if it is of another kind than the values name.

        These are the keys that the kind before does not have, and the ones that both kinds have in
        the same meaning, because their models inherit them from the same one.
        """
        old, new = self.section_of(self.kind_of(values)), self.section_of(kind)
        if old is None:
            return {}
        return {
            key: value
            for key, value in values.items()
            if key != self.key and (key not in old.model_fields or _shared(old, new, key))
        }

    def section_of(self, kind: Any) -> type[Section] | None:
        """Returns the model of a kind, which may be a plug-in's; None for an unknown kind."""
        if not isinstance(kind, str):
            return None
        if kind not in self.sections and kind in self.names:
            return self._plug_in_section(kind)
        return self.sections.get(kind)

    def kinds_with(self, key: str) -> list[str]:
        """Returns the built-in kinds that have a key."""
        return [kind for kind, section in self.sections.items() if key in section.model_fields]

    def _plug_in_section(self, kind: str) -> type[Section]:
        group, base = f"{self._plug_ins}.settings", self._plug_in_base
        if kind in plug_in_names(group):
            loaded: Any = find(kind, {}, group=group, kind="section of settings", error=ConfigError)
            if not (isinstance(loaded, type) and issubclass(loaded, base)):
                raise ConfigError(
                    f"section of settings {kind}: the entry point names {loaded!r}; name a "
                    f"subclass of {base.__module__}.{base.__name__}"
                )
            base = loaded
        return _section_of_kind(base, self.key, kind)

    def _validate(self, value: Any) -> Section:
        if isinstance(value, Section):
            return value
        values = self.expand(value)
        if not isinstance(values, Mapping):
            raise PydanticCustomError(
                "section_type", "must be a section or one of {names}", {"names": self._list()}
            )
        kind = self.kind_of(values)
        section = self.section_of(kind)
        if section is None:
            raise self._unknown(kind)
        return section.model_validate(values)

    def _unknown(self, kind: Any) -> ValidationError:
        message = f"{kind!r} is not one of {self._list()}{did_you_mean(str(kind), self.names)}"
        error = PydanticCustomError("value_error", "{error}", {"error": message})
        details = InitErrorDetails(type=error, loc=(self.key,), input=kind)
        return ValidationError.from_exception_data("Section", [details])

    def _list(self) -> str:
        return ", ".join(sorted(self.names))

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Returns pydantic's schema, which writes a section by its type at run time."""
        return core_schema.no_info_plain_validator_function(self._validate)

    def __get_pydantic_json_schema__(
        self,
        schema: CoreSchema,
        handler: GetJsonSchemaHandler,
    ) -> JsonSchemaValue:
        """Returns the JSON Schema of a kind's name, or of the section of any kind."""
        choices = [
            # A preset may name the kind, so that a file that only changes keys has none.
            handler(section.__pydantic_core_schema__)
            for section in self.sections.values()
        ]
        names: dict[str, Any] = {"type": "string"}
        if self._plug_ins:
            other = {"type": "string", "not": {"enum": list(self.sections)}}
            choices.append(
                {"type": "object", "properties": {self.key: other}, "required": [self.key]}
            )
        else:
            names["enum"] = list(self.sections)
        return {"anyOf": [names, *choices]}


def _shared(model: type[Section], other: type[Section] | None, key: str) -> bool:
    """Whether two models inherit a key from the same one."""
    return any(
        key in base.model_fields and other is not None and issubclass(other, base)
        for base in model.__mro__
        if issubclass(base, Section)
    )


def section_of(annotation: Any) -> type[Section] | None:
    """Returns the section that a field holds, which may be optional; None for a plain value."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def model_at(model: type[BaseModel], key: str, values: Any) -> type[Section] | None:
    """Returns the model of the section at a key of a model, of the kind that `values` name.

    None for a plain value, an unknown key and an unknown kind.
    """
    kinds = kinds_of(model, key)
    if kinds is not None:
        return kinds.section_of(kinds.kind_of(values))
    return section_of(model.model_fields[key].annotation) if key in model.model_fields else None


def kinds_of(model: type[BaseModel], key: str) -> Kinds | None:
    """Returns the kinds of the section at a key of a model; None for anything else."""
    field = model.model_fields.get(key)
    marks = field.metadata if field is not None else ()
    return next((mark for mark in marks if isinstance(mark, Kinds)), None)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested sections by dotted key, such as `sync.every`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
