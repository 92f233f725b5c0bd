"""The configuration of a run: every switch of the method, with its source and its default.

`sections` holds the models, `presets` what each `algorithm` changes, `loader` reads YAML files and
overrides, and `messages` explains what is wrong with them.
"""

from __future__ import annotations

from bapo_core.config.loader import config_from, load_config, merge, parse_config, parse_overrides
from bapo_core.config.presets import PRESETS
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
    Section,
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
    "load_config",
    "merge",
    "parse_config",
    "parse_overrides",
]
