"""The configuration of a run: every switch of the method, with its source and its default.

`sections` has the models, `presets` the changes that each `algorithm` makes to the defaults,
`loader` the readers of YAML files and overrides, `messages` the text of errors, and `schema` the
JSON Schema of a file.
"""

from __future__ import annotations

from bapo_core.config.base import Section
from bapo_core.config.loader import (
    config_from,
    flatten,
    load_config,
    merge,
    nest,
    override_config,
    parse_config,
    parse_overrides,
    parse_values,
    read_values,
)
from bapo_core.config.presets import PRESETS
from bapo_core.config.schema import json_schema
from bapo_core.config.sections import (
    AdvantageConfig,
    Algorithm,
    BatchConfig,
    CheckpointConfig,
    CriticConfig,
    EvaluationConfig,
    Fraction,
    FreshConfig,
    HardBufferConfig,
    HighQualityBufferConfig,
    KLConfig,
    LoraConfig,
    LossConfig,
    MlflowConfig,
    ModelConfig,
    OptimizerConfig,
    ReevaluateConfig,
    ReplayConfig,
    ReplayWindowConfig,
    RolloutConfig,
    RunConfig,
    SyncConfig,
    TaskConfig,
    TrainerConfig,
)
from bapo_core.errors import ConfigError

__all__ = [
    "PRESETS",
    "AdvantageConfig",
    "Algorithm",
    "BatchConfig",
    "CheckpointConfig",
    "ConfigError",
    "CriticConfig",
    "EvaluationConfig",
    "Fraction",
    "FreshConfig",
    "HardBufferConfig",
    "HighQualityBufferConfig",
    "KLConfig",
    "LoraConfig",
    "LossConfig",
    "MlflowConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ReevaluateConfig",
    "ReplayConfig",
    "ReplayWindowConfig",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "SyncConfig",
    "TaskConfig",
    "TrainerConfig",
    "config_from",
    "flatten",
    "json_schema",
    "load_config",
    "merge",
    "nest",
    "override_config",
    "parse_config",
    "parse_overrides",
    "parse_values",
    "read_values",
]
