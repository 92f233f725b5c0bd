"""The kinds of the section `sampler`: which prompts of the dataset a step rolls out."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from bapo_core.config.base import Kinds, Section, UnitInterval


class SamplerConfig(Section):
    """A sampler: which prompts of the dataset a step rolls out."""

    is_adaptive: ClassVar[bool] = False
    """Whether prompts are selected by the results of earlier steps."""
    selects_candidates: ClassVar[bool] = False
    """Whether a step's prompts are selected among several times as many candidates."""
    kind: str
    """Sampler of prompts (docs/methods.md)."""

    @property
    def fading(self) -> float:
        """The weight of a result for each step since: 1 without a half-life."""
        return 1.0

    @property
    def posterior_decay(self) -> float:
        """The weight of a group for each newer one: 0 if the last one alone counts."""
        return 0.0


class UniformConfig(SamplerConfig):
    """Takes each epoch in another permutation."""

    kind: Literal["uniform"] = "uniform"


class AdaptiveConfig(SamplerConfig):
    """A sampler that depends on how often prompts were answered correctly in the fresh groups of
    earlier steps."""

    is_adaptive: ClassVar[bool] = True
    posterior_as_of: Literal["sync", "step"] = "sync"
    """Last commit that posteriors include: the one before the last `sync`, so that the prompts of a
    sync window are known at its beginning; or the one of the `step` before (MoPPS), for which
    rollouts wait in every step."""
    prior_run: str | None = Field(None, pattern=r"^[a-z][a-z0-9-]{0,62}$")
    """Name of an earlier run on the same training prompts, whose committed fresh groups count as if
    they had been the first of this run; null begins with Beta(1, 1)."""


class _PosteriorConfig(AdaptiveConfig):
    """A sampler whose posteriors weigh results by their age."""

    decay: UnitInterval = 1.0
    """lambda, the weight of a prompt's group for each newer group of the prompt: the posterior's a
    is 1 + sum_i lambda^(n-i) s_i (MoPPS: 1 for mathematics, 0.5 for Countdown)."""
    half_life: float | None = Field(None, gt=0.0)
    """Steps after which a prompt's results count half, so that prompts are drawn again that an
    earlier policy could not solve (preset `dots`: 34, in place of DOTS' prediction by the present
    policy); null: results do not age."""

    @property
    def fading(self) -> float:
        """The weight of a result for each step since: 1 without `half_life`."""
        return 1.0 if self.half_life is None else 0.5 ** (1.0 / self.half_life)

    @property
    def posterior_decay(self) -> float:
        """The weight of a group for each newer one."""
        return self.decay


class CandidatesConfig(_PosteriorConfig):
    """A sampler that draws candidates uniformly, and selects among them."""

    selects_candidates: ClassVar[bool] = True
    candidates: int = Field(4, ge=2)
    """Candidates for each prompt that is drawn: a generation round selects its B prompts from
    `candidates` x B (MoPPS: 16 for mathematics, 8 for Countdown; 4 fits B = 256 into the 2000
    prompts that a task generates by default)."""
    target: UnitInterval = 0.5
    """Probability of a correct response that is sought (MoPPS and DOTS: 0.5)."""


class MoppsConfig(CandidatesConfig):
    """Selects by Thompson draws from Beta posteriors (MoPPS, arXiv 2507.04632)."""

    kind: Literal["mopps"] = "mopps"
    band: tuple[UnitInterval, UnitInterval] | None = None
    """Lowest and highest draw of the candidates that come first (MoPPS: 0.3, 0.7); the ones nearest
    to `target` follow if these do not suffice. Null takes the nearest ones alone."""

    @model_validator(mode="after")
    def _ordered(self) -> MoppsConfig:
        if self.band is not None and self.band[0] >= self.band[1]:
            low, high = self.band
            raise ValueError(f"band is [{low:g}, {high:g}]: write the lower bound first")
        return self


class DotsConfig(CandidatesConfig):
    """Samples prompts of medium difficulty (DOTS, arXiv 2506.05316), with the posterior's mean in
    place of the paper's learned predictor."""

    kind: Literal["dots"] = "dots"
    temperature: float = Field(1e-3, gt=0.0)
    """tau: a candidate is sampled with probability proportional to exp(-|d - target| / tau)
    (DOTS: 1e-3)."""


class ExgrpoConfig(AdaptiveConfig):
    """Revisits prompts that were solved in part, and retires those that were solved in full
    (ExGRPO, arXiv 2510.02245)."""

    kind: Literal["exgrpo"] = "exgrpo"
    revisited_share: UnitInterval = 0.5
    """Share of a step's prompts that are drawn from those that were answered correctly by some
    responses of their last group, and not by all (ExGRPO: 0.5)."""
    revisit_above: UnitInterval = 0.35
    """Accuracy of a step's fresh groups after which prompts are revisited and solved ones retired
    (ExGRPO: 0.35); before, the sampler is uniform."""


class PlugInSamplerConfig(_PosteriorConfig):
    """A sampler that an installed package adds, whose keys may be a subclass of this section
    (docs/adding-a-method.md)."""


SAMPLER_ENTRY_POINTS = "bapo.samplers"
"""The group of entry points of samplers: name -> `bapo_core.sampling.Sampler`."""
SAMPLER_KINDS = Kinds(
    UniformConfig | MoppsConfig | DotsConfig | ExgrpoConfig,
    plug_ins=SAMPLER_ENTRY_POINTS,
    plug_in_base=PlugInSamplerConfig,
)
"""The kinds of the section `sampler`."""
AnySamplerConfig = Annotated[SamplerConfig, SAMPLER_KINDS]
"""A section `sampler` of any kind."""
