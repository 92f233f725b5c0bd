"""The configuration of a run: every switch of the method, with its source and its default.

`run` has the model of a whole configuration; `rollouts`, `samplers`, `batches`, `loss`,
`objectives`, `estimators`, `training` and `evaluation` have the models of its sections, by topic;
`checks` has what is refused and warned about across sections; `presets` the changes that each
`algorithm` makes to the defaults; `loader` the readers of YAML files and overrides; `messages` the
text of errors; and `schema` the JSON Schema of a file.
"""

from __future__ import annotations

from bapo_core.config.base import Fraction, Section
from bapo_core.config.batches import (
    BatchConfig,
    DemonstrationsConfig,
    FreshConfig,
    HardBufferConfig,
    HighQualityBufferConfig,
    ReevaluateConfig,
    ReplayConfig,
    ReplayWindowConfig,
    ResponseReplayConfig,
)
from bapo_core.config.estimators import GaeConfig, GroupAdvantageConfig
from bapo_core.config.evaluation import EvaluationConfig, EvaluationSet, EvaluationSetConfig
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
from bapo_core.config.loss import (
    ConvexKLConfig,
    KLConfig,
    LossConfig,
    SourceLossConfig,
)
from bapo_core.config.objectives import (
    AdaptiveClippingConfig,
    CispoConfig,
    ClipCovConfig,
    GmpoConfig,
    GspoConfig,
    KlCovConfig,
    M2poConfig,
    PpoConfig,
    SapoConfig,
    ToprConfig,
)
from bapo_core.config.presets import PRESETS
from bapo_core.config.rollouts import (
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    SyncConfig,
    TaskConfig,
    TransformersConfig,
    VllmConfig,
)
from bapo_core.config.run import Algorithm, RunConfig
from bapo_core.config.samplers import SamplerConfig
from bapo_core.config.schema import json_schema
from bapo_core.config.training import (
    CheckpointConfig,
    LoraConfig,
    MlflowConfig,
    OptimizerConfig,
    TrainerConfig,
    refuse_credentials,
)
from bapo_core.errors import ConfigError

__all__ = [
    "PRESETS",
    "AdaptiveClippingConfig",
    "Algorithm",
    "BatchConfig",
    "CheckpointConfig",
    "CispoConfig",
    "ClipCovConfig",
    "ConfigError",
    "ConvexKLConfig",
    "DemonstrationsConfig",
    "EvaluationConfig",
    "EvaluationSet",
    "EvaluationSetConfig",
    "Fraction",
    "FreshConfig",
    "GaeConfig",
    "GmpoConfig",
    "GroupAdvantageConfig",
    "GspoConfig",
    "HardBufferConfig",
    "HighQualityBufferConfig",
    "KLConfig",
    "KlCovConfig",
    "LoraConfig",
    "LossConfig",
    "M2poConfig",
    "MlflowConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PpoConfig",
    "ReevaluateConfig",
    "ReplayConfig",
    "ReplayWindowConfig",
    "ResponseReplayConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplerConfig",
    "SapoConfig",
    "Section",
    "SourceLossConfig",
    "SyncConfig",
    "TaskConfig",
    "ToprConfig",
    "TrainerConfig",
    "TransformersConfig",
    "VllmConfig",
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
    "refuse_credentials",
]
