"""Loads a run's configuration from a YAML file, its preset and `key=value` overrides."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import yaml
from pydantic import ValidationError

from bapo_core.config.base import Section, flatten, kinds_of, model_at
from bapo_core.config.messages import explain_section, explain_validation_error
from bapo_core.config.presets import PRESETS
from bapo_core.config.run import RunConfig
from bapo_core.errors import ConfigError
from bapo_core.spelling import did_you_mean

_MOST_BITS = 1024  # The largest float has as many. Python prints no much larger integers.


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, but it refuses aliases, and a key that is given twice in a section.

    A few hundred bytes with aliases of aliases stand for more values than fit any memory.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise ConfigError(
                f"the alias *{event.anchor} at line {event.start_mark.line + 1} is not supported; "
                "write its value out"
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first_lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in first_lines:
                raise ConfigError(
                    f"{key_node.value} is given twice, at lines {first_lines[key_node.value]} and "
                    f"{line}; remove one"
                )
            first_lines[key_node.value] = line
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        number = int(super().construct_yaml_int(node))
        if number.bit_length() > _MOST_BITS:
            raise ValueError(f"an integer of {number.bit_length()} bits, more than {_MOST_BITS}")
        return number


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def merge(
    base: Mapping[str, Any],
    over: Mapping[str, Any],
    *,
    model: type[Section] | None = RunConfig,
) -> dict[str, Any]:
    """Returns `base` with the values of `over` in place of its own, section by section.

    If both name the kind of a section and the kinds differ, the keys of the kind before are
    dropped, but for the ones that mean the same in both kinds. The `options` of a task are replaced
    as a whole: they belong to one task.

    model: the section that the values are of; None for values that are in none.
    """
    merged = dict(base)
    for key, value in over.items():
        section = merged.get(key)
        kinds = kinds_of(model, key) if model else None
        if kinds is not None:
            section, value = kinds.expand(section), kinds.expand(value)
        if kinds is not None and kinds.differ(section, value):
            section = kinds.carried(section, kinds.kind_of(value))
        if isinstance(value, Mapping) and key != "options":
            section = section if isinstance(section, Mapping) else {}
            inner = model_at(model, key, {**section, **value}) if model else None
            merged[key] = merge(section, value, model=inner)
        else:
            merged[key] = value
    return merged


def _lay(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of layers, each over those before, and all over the default kinds.

    A value has the kind that the layers below it give, so that a file can set a key of the kind
    that its preset names, and lose it by an override with another kind.
    """
    values = _default_kinds(RunConfig)
    for layer in layers:
        values = merge(values, layer)
    return values


def _lay_for(algorithm: str, layers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the layers as they hold if a later one names `algorithm` in place of another one.

    A layer that names no kind of a section has keys of the kind that its own algorithm, or a layer
    below, gives the section. If `algorithm` gives it another kind, these keys are dropped: the
    replay window of a file for BAPO says nothing about GRPO, and its clip range nothing about GSPO.
    """
    named, result = "bapo", list[dict[str, Any]]()
    for number, layer in enumerate(layers):
        named = layer.get("algorithm", named)
        if named == algorithm or not _is_preset(named):
            result.append(dict(layer))
            continue
        before = _lay(PRESETS[named], *layers[:number])
        after = _lay(PRESETS[algorithm], *result)
        result.append(_drop_other_kinds(layer, before, after, RunConfig))
    return result


def _drop_other_kinds(
    layer: Mapping[str, Any], before: Any, after: Any, model: type[Section]
) -> dict[str, Any]:
    """Returns a section's values without the keys of kinds of `before` that `after` does not have.

    before, after: the section's values below the layer.
    """
    kept: dict[str, Any] = {}
    for key, value in layer.items():
        kinds = kinds_of(model, key)
        old, new = (
            values.get(key) if isinstance(values, Mapping) else None for values in (before, after)
        )
        section = model_at(model, key, old)
        if kinds is not None and isinstance(value, Mapping) and kinds.key not in value:
            if kinds.kind_of(old) != kinds.kind_of(new):
                value = kinds.carried({kinds.key: kinds.kind_of(old), **value}, kinds.kind_of(new))
        elif isinstance(value, Mapping) and section is not None:
            value = _drop_other_kinds(value, old, new, section)
        kept[key] = value
    return kept


def _default_kinds(model: type[Section]) -> dict[str, Any]:
    """Returns the default kind of each section of a model that has kinds."""
    values: dict[str, Any] = {}
    for key in model.model_fields:
        kinds = kinds_of(model, key)
        section = model_at(model, key, None)
        if kinds is not None:
            values[key] = {kinds.key: kinds.default}
        elif section is not None and (inner := _default_kinds(section)):
            values[key] = inner
    return values


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Parses overrides such as `["sync.every=3", "seed=7"]`, whose values are YAML, into a mapping.

    Raises `ConfigError` for one that is not key=value, or whose value is not YAML.
    """
    parsed: dict[str, Any] = {}
    for override in overrides:
        path, separator, text = override.partition("=")
        if not separator or not path:
            raise ConfigError(f"override {override!r}: write key=value, for example sync.every=5")
        try:
            value = _parse_yaml(text)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"override {override!r}: {text!r} is not YAML; quote it, for example '[a, b]'"
            ) from error
        except ConfigError as error:
            raise ConfigError(f"override {override!r}: {error}") from error
        # YAML 1.1 reads 1e-4 as a string.
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = float(value)
        parsed = merge(parsed, nest(path, value))
    return parsed


def _parse_yaml(text: str) -> Any:
    """Parses YAML text. Raises `ConfigError` for what `_Loader` refuses and for values that have
    the form of a number or a date but are none, and `yaml.YAMLError` if it is not YAML."""
    try:
        return yaml.load(text, Loader=_Loader)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(
            f"a value cannot be read as the number or the date that it seems to be: {error}; quote "
            "it if it is a text"
        ) from error
    except RecursionError as error:
        raise ConfigError("sections and lists are nested too deeply; nest fewer") from error


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Loads a YAML file: its values replace those of its preset, and overrides replace both.

    path: None for an empty file. Raises `ConfigError` if it cannot be read, parsed or validated,
    and as `override_config` does.
    """
    values, where = read_values(path), str(path or "config")
    return override_config(values, parse_overrides(overrides), where=where)


def read_values(path: str | Path | None) -> dict[str, Any]:
    """Reads the values that a YAML file sets, without the preset's values and the defaults.

    path: None for an empty file. Raises `ConfigError` if it cannot be read or parsed.
    """
    if path is None:
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(
            f"{path}: cannot be read: {reason}; give the path of a YAML file"
        ) from error
    return parse_values(text, str(path))


def parse_values(text: str, where: str) -> dict[str, Any]:
    """Parses YAML text to the values that it sets; `where` names its origin in errors.

    Raises `ConfigError` if it is not valid YAML, or holds no keys and values.
    """
    try:
        loaded = _parse_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{where}: not valid YAML{line}; check the indentation") from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if loaded is not None and not isinstance(loaded, dict):
        raise ConfigError(
            f"{where}: must hold keys and values, not a {type(loaded).__name__}; write, for "
            "example, `seed: 1`"
        )
    return loaded or {}


def override_config(
    values: Mapping[str, Any], *overrides: Mapping[str, Any], where: str = "config"
) -> RunConfig:
    """Lays `overrides` over the `values` of a file, and all over the preset of their algorithm.

    Raises `ConfigError` if the overrides name another algorithm than the file, and the file sets
    keys that make up either algorithm to other values than the named one has: they would stay in
    force, and the run would be called what it is not.
    """
    changes: dict[str, Any] = {}
    for override in overrides:
        changes = merge(changes, override)
    _refuse_section_of_algorithm([values, changes], where, flatten(changes).keys())
    algorithm = changes.get("algorithm")
    kept = _kept_from_another_algorithm(values, changes)
    if kept:
        keys = ", ".join(f"{key}={value}" for key, value in kept.items())
        raise ConfigError(
            f"{where}: algorithm={algorithm} would keep {keys} of the file, which {algorithm} sets "
            "otherwise; remove these keys from the file, or give them again as overrides"
        )
    return _build([values, *overrides], where=where, overrides=flatten(changes).keys())


def _kept_from_another_algorithm(
    values: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the values of the file, by dotted key, that contradict the overrides' algorithm."""
    named, before = overrides.get("algorithm"), values.get("algorithm", "bapo")
    if named == before or not (_is_preset(named) and _is_preset(before)):
        return {}
    complete = flatten(RunConfig.model_validate(_lay(PRESETS[named])).model_dump(mode="json"))
    (held,) = _lay_for(named, [values])
    given, again = flatten(merge({}, held)), flatten(overrides)
    return {
        key: given[key]
        for key in sorted(_preset_keys(named) | _preset_keys(before))
        if key in given and key not in again and given[key] != complete.get(key)
    }


def _is_preset(name: Any) -> TypeGuard[str]:
    return isinstance(name, str) and name in PRESETS


def _refuse_section_of_algorithm(
    layers: Sequence[Mapping[str, Any]], where: str, overrides: Collection[str]
) -> None:
    """Raises `ConfigError` if a layer has a section `algorithm`, as files of verl have."""
    for layer in layers:
        section = layer.get("algorithm")
        if isinstance(section, Mapping) and section:
            explanation = explain_section("algorithm", section, overrides=overrides)
            raise ConfigError(f"{where}: {explanation}")


def _preset_keys(algorithm: str) -> set[str]:
    return set(flatten(merge({}, PRESETS[algorithm])))


def nest(path: str, value: Any) -> dict[str, Any]:
    """Returns nested sections with `value` at a dotted key, such as `sync.every`."""
    for key in reversed(path.split(".")):
        value = {key: value}
    nested: dict[str, Any] = value
    return nested


def config_from(values: Mapping[str, Any], *, where: str = "config") -> RunConfig:
    """Lays `values` over the preset that their `algorithm` names, and validates the result.

    Raises `ConfigError`, with `where` as the origin of the values.
    """
    _refuse_section_of_algorithm([values], where, ())
    return _build([values], where=where)


def _build(
    layers: Sequence[Mapping[str, Any]], *, where: str, overrides: Collection[str] = ()
) -> RunConfig:
    """Lays the values of layers over the preset of their algorithm, and validates the result.

    overrides: dotted keys of the values that are overrides. Raises `ConfigError`.
    """
    named = [layer["algorithm"] for layer in layers if "algorithm" in layer]
    algorithm = named[-1] if named else "bapo"
    if not _is_preset(algorithm):
        raise ConfigError(
            f"{where}: algorithm: {algorithm!r} is not one of {', '.join(sorted(PRESETS))}"
            f"{did_you_mean(str(algorithm), PRESETS)}"
        )
    values = _lay(PRESETS[algorithm], *_lay_for(algorithm, layers))
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        explanation = explain_validation_error(error, values, overrides=overrides)
        raise ConfigError(f"{where}: {explanation}") from error
