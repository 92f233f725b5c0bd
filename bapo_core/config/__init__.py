"""The configuration of a run: every switch of the method, with its source and its default.

`run` has the model of a whole configuration; `rollouts`, `samplers`, `batches`, `loss`,
`objectives`, `estimators`, `training` and `evaluation` have the models of its sections, by topic;
`checks` has what is refused and warned about across sections; `changes` which keys may change
while a run lasts, and what is in force at a step; `presets` the changes that each
`algorithm` makes to the defaults; `loader` the readers of YAML files and overrides; `messages` the
text of errors; `elsewhere` the names of keys in other systems; and `schema` the JSON Schema of a
file.
"""

from __future__ import annotations

from bapo_core.config.base import Section, flatten
from bapo_core.config.changes import ConfigChange, ConfigHistory
from bapo_core.config.loader import (
    config_from,
    load_config,
    merge,
    nest,
    override_config,
    parse_overrides,
    parse_values,
    read_values,
)
from bapo_core.config.presets import PRESETS
from bapo_core.config.run import RunConfig
from bapo_core.config.schema import json_schema
from bapo_core.errors import ConfigError

__all__ = [
    "PRESETS",
    "ConfigChange",
    "ConfigError",
    "ConfigHistory",
    "RunConfig",
    "Section",
    "config_from",
    "flatten",
    "json_schema",
    "load_config",
    "merge",
    "nest",
    "override_config",
    "parse_overrides",
    "parse_values",
    "read_values",
]
