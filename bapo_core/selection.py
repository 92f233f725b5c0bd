"""Checks that what a configuration selects by name can be used, before a run begins."""

from __future__ import annotations

from bapo_core.algorithm import get_batch_rule
from bapo_core.config import RunConfig
from bapo_core.config.estimators import ESTIMATOR_ENTRY_POINTS, ESTIMATOR_KINDS
from bapo_core.config.objectives import OBJECTIVE_ENTRY_POINTS, OBJECTIVE_KINDS
from bapo_core.errors import ConfigError, TaskError
from bapo_core.plug_ins import find_entry_point
from bapo_core.rewards import check_reward
from bapo_core.sampling import get_sampler
from bapo_core.tasks import get_task


def check_selection(config: RunConfig) -> None:
    """Raises `ConfigError` or `TaskError` for what cannot be used.

    Loads the task, which must take its options and have the rewards that are weighted, the sampler
    and the batch rule. Objectives and estimators import torch, so only their names are checked.
    """
    check_reward(get_task(config.task.name, **config.task.arguments), config.reward)
    for name in config.evaluation.sets:
        try:
            get_task(config.task.name, **config.evaluation_sets[name].options)
        except TaskError as error:
            raise TaskError(f"evaluation.sets.{name}: {error}") from error
    check_data_rules(config)
    objective, estimator = config.loss.objective.kind, config.advantage.estimator
    for kind, name, kinds, group in (
        ("objective", objective, OBJECTIVE_KINDS, OBJECTIVE_ENTRY_POINTS),
        ("estimator", estimator, ESTIMATOR_KINDS, ESTIMATOR_ENTRY_POINTS),
    ):
        find_entry_point(name, kinds.sections, group=group, kind=kind, error=ConfigError)


def check_data_rules(config: RunConfig) -> None:
    """Loads the sampler and the batch rule; raises `ConfigError` if one cannot be used."""
    get_sampler(config.sampler.kind)
    get_batch_rule(config.batch.rule)
