"""`python -m bapo_core.config.reference FILE`: the reference of every configuration key.

Keys, types and defaults come from the models of `bapo_core.config`, the words from the docstrings
under their fields.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bapo_core import config

HEADER = """# Configuration

A run is described by a YAML file. It names an `algorithm`, whose preset it lays over the defaults
below; whatever the file sets besides wins, and `key=value` on the command line wins over the file:

```
bapo run examples/countdown.yaml sync.every=3 optimizer.learning_rate=1e-5
```

Unknown and contradictory keys are refused. `bapo config show FILE` prints every key with its value,
`bapo config check FILE` says what is wrong or slow. *Table 3*, *Eq.* and *A.* refer to
arXiv 2602.20722, *code* to its authors' release. This page is generated (`make docs`).
"""


def render() -> str:
    """The page."""
    sections = [_section("", config.RunConfig)]
    for name, field in config.RunConfig.model_fields.items():
        if _is_section(field):
            sections.append(_section(name, field.annotation))  # type: ignore[arg-type]
    return "\n".join([HEADER, *sections, _presets()])


def undocumented() -> list[str]:
    """Keys without a docstring."""
    missing = []
    for name, field in config.RunConfig.model_fields.items():
        if _is_section(field):
            model: type[BaseModel] = field.annotation  # type: ignore[assignment]
            missing += [
                f"{name}.{key}"
                for key, nested in model.model_fields.items()
                if not nested.description
            ]
        elif not field.description:
            missing.append(name)
    return missing


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, config.Section)


def _section(name: str, model: type[BaseModel]) -> str:
    lines = [f"## {name or 'Top level'}", "", "| key | default | meaning |", "| --- | --- | --- |"]
    for key, field in model.model_fields.items():
        if _is_section(field):
            continue
        value = field.get_default(call_default_factory=True)
        default = yaml.safe_dump(value, default_flow_style=True)
        default = default.removesuffix("...\n").strip()
        full = f"{name}.{key}" if name else key
        lines.append(f"| `{full}` | `{default}` | {_choices(model, key)}{_description(field)} |")
    return "\n".join([*lines, ""])


def _choices(model: type[BaseModel], key: str) -> str:
    found = model.model_json_schema()["properties"][key].get("enum")
    return f"{', '.join(f'`{choice}`' for choice in found)}. " if found else ""


def _description(field: FieldInfo) -> str:
    return " ".join((field.description or "").split()).replace("|", "\\|")


def _presets() -> str:
    lines = ["## Presets", "", "What each `algorithm` changes of the defaults.", ""]
    for name, changes in config.PRESETS.items():
        shown = yaml.safe_dump(changes, sort_keys=False) if changes else "# the defaults\n"
        lines += [f"### {name}", "", "```yaml", shown.rstrip(), "```", ""]
    return "\n".join(lines)


def main() -> None:
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
