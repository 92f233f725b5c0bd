"""The kinds of the section `advantage`, one for each estimator of advantages.

The estimators themselves are in `bapo_core.advantages`, which imports torch; this module does not.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from bapo_core.config.base import Kinds, Section, UnitInterval


class GroupAdvantageConfig(Section):
    """Compares the G responses to a prompt (Eq. 2)."""

    estimator: Literal["group"] = "group"
    scale: Literal["group", "batch", "none"] = "group"
    """Standard deviation to divide by: of the group's rewards (Eq. 2), of all rewards of the
    batch (LitePPO, arXiv 2508.08221), or none (Dr. GRPO, arXiv 2503.20783)."""
    std: Literal["population", "sample"] = "population"
    """Normalisation of group advantages: (r - mean) / sqrt(var + eps) (`population`, Eq. 2); or by
    the sample standard deviation plus eps (`sample`, as in the authors' code)."""
    eps: float = Field(1e-6, gt=0.0)
    """eps of Eq. 2."""


class CriticConfig(Section):
    """The critic of `advantage.estimator: gae`."""

    learning_rate: float = Field(1e-5, gt=0.0)
    """Learning rate of the critic's AdamW."""
    clip: float = Field(0.5, gt=0.0)
    """Clip range of the value loss."""


class GaeConfig(Section):
    """Generalised advantage estimation, by token, with a critic (BA-PPO, A.9)."""

    estimator: Literal["gae"] = "gae"
    gamma: UnitInterval = 1.0
    """gamma, the discount."""
    lam: UnitInterval = 1.0
    """lambda of GAE (Table 3: 1)."""
    whiten: bool = True
    """Whether advantages are scaled to mean 0 and standard deviation 1 over the batch."""
    critic: CriticConfig = CriticConfig()


class RlooConfig(Section):
    """Takes the mean of the other responses as the baseline (RLOO, arXiv 2402.14740)."""

    estimator: Literal["rloo"] = "rloo"


class ReinforcePpConfig(Section):
    """Whitens the returns of tokens over the batch (REINFORCE++, arXiv 2501.03262)."""

    estimator: Literal["reinforce_pp"] = "reinforce_pp"
    gamma: UnitInterval = 1.0
    """gamma, the discount."""


class ReinforcePpBaselineConfig(Section):
    """Whitens rewards less the group's mean over the batch (REINFORCE++ w/ baseline, arXiv
    2501.03262)."""

    estimator: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"


class OpoConfig(Section):
    """Takes the baseline of least variance, weighted by length (OPO, arXiv 2505.23585)."""

    estimator: Literal["opo"] = "opo"


class MaxrlConfig(Section):
    """Divides by the mean reward, which weighs hard prompts most (MaxRL, arXiv 2602.02710)."""

    estimator: Literal["maxrl"] = "maxrl"
    eps: float = Field(1e-6, gt=0.0)
    """eps, which is added to the mean reward."""


ESTIMATOR_ENTRY_POINTS = "bapo.estimators"
"""The group of entry points of estimators: name -> `bapo_core.advantages.Estimator`."""
_Advantage = (
    GroupAdvantageConfig
    | GaeConfig
    | RlooConfig
    | ReinforcePpConfig
    | ReinforcePpBaselineConfig
    | OpoConfig
    | MaxrlConfig
)
ESTIMATOR_KINDS = Kinds(_Advantage, key="estimator", plug_ins=ESTIMATOR_ENTRY_POINTS)
"""The kinds of the section `advantage`."""
AdvantageConfig = Annotated[_Advantage, ESTIMATOR_KINDS]
"""A section `advantage`; one of a plug-in has a model of its own."""
