"""The section `sampler`: which prompts of the dataset a step rolls out."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from bapo_core.config.base import Fraction, Section, check_known

SAMPLER_NAMES = ("uniform", "mopps", "dots", "exgrpo")
"""The built-in samplers."""
SAMPLER_ENTRY_POINTS = "bapo.samplers"
"""The group of entry points of samplers: name -> `bapo_core.sampling.Sampler`."""


class SamplerConfig(Section):
    """The sampler: which prompts of the dataset a step rolls out.

    All but `uniform` depend on how often the prompts were answered correctly in the fresh groups of
    earlier steps. `mopps` and `dots` draw candidates uniformly, and select among them.
    """

    kind: str = "uniform"
    """Sampler of prompts (docs/methods.md): `uniform` takes each epoch in another permutation;
    `mopps` selects by Thompson draws from Beta posteriors (arXiv 2507.04632); `dots` samples
    prompts of medium difficulty (arXiv 2506.05316), with the posterior's mean in place of the
    paper's learned predictor; `exgrpo` revisits prompts that were solved in part, and retires those
    that were solved in full (arXiv 2510.02245); or one that an installed package adds
    (docs/adding-a-method.md)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of a sampler that an installed package adds."""
    candidates: int = Field(4, ge=2)
    """Candidates for each prompt that is drawn: a generation round selects its B prompts from
    `candidates` x B (MoPPS: 16 for mathematics, 8 for Countdown; 4 fits B = 256 into the 2000
    prompts that a task generates by default)."""
    decay: Fraction = 1.0
    """lambda, the weight of a prompt's group for each newer group of the prompt: the posterior's a
    is 1 + sum_i lambda^(n-i) s_i (MoPPS: 1 for mathematics, 0.5 for Countdown)."""
    half_life: float | None = Field(None, gt=0.0)
    """Steps after which a prompt's results count half, so that `mopps` and `dots` draw prompts
    again that an earlier policy could not solve (`dots`: 34, in place of DOTS' prediction by the
    present policy); null: results do not age."""
    target: Fraction = 0.5
    """Probability of a correct response that is sought (MoPPS and DOTS: 0.5)."""
    select: Literal["nearest", "band"] = "nearest"
    """Selection by `kind: mopps`: the candidates whose draws are `nearest` to `target`; or those in
    the `band` first, and the nearest ones only if these do not suffice."""
    band: tuple[Fraction, Fraction] = (0.3, 0.7)
    """Lowest and highest draw that `select: band` prefers (MoPPS: 0.3, 0.7)."""
    temperature: float = Field(1e-3, gt=0.0)
    """tau of `kind: dots`: a candidate is sampled with probability proportional to
    exp(-|d - target| / tau) (DOTS: 1e-3)."""
    revisited_share: Fraction = 0.5
    """Share of a step's prompts that `kind: exgrpo` draws from those that were answered correctly
    by some responses of their last group, and not by all (ExGRPO: 0.5)."""
    revisit_above: Fraction = 0.35
    """Accuracy of a step's fresh groups after which `kind: exgrpo` revisits prompts and retires
    solved ones (ExGRPO: 0.35); before, it is uniform."""
    as_of: Literal["sync", "step"] = "sync"
    """Last commit that posteriors include: that before the last `sync`, so that the prompts of a
    sync window are known at its beginning; or that of the `step` before (MoPPS), for which rollouts
    wait in every step."""
    prior_run: str | None = Field(None, pattern=r"^[a-z][a-z0-9-]{0,62}$")
    """Name of an earlier run on the same training prompts, whose committed fresh groups count as if
    they had been the first of this run; null begins with Beta(1, 1)."""

    @property
    def is_adaptive(self) -> bool:
        """Whether prompts are selected by the results of earlier steps."""
        return self.kind != "uniform"

    @property
    def selects_candidates(self) -> bool:
        """Whether a step's prompts are selected among several times as many candidates."""
        return self.kind in ("mopps", "dots")

    @property
    def fading(self) -> float:
        """The weight of a result for each step since: 1 without `half_life`."""
        # exgrpo counts the correct responses of the last group, of whatever age.
        return (
            1.0
            if self.half_life is None or self.kind == "exgrpo"
            else 0.5 ** (1.0 / self.half_life)
        )

    @property
    def posterior_decay(self) -> float:
        """The weight of a group for each newer one: 0 for `exgrpo`, which knows the last alone."""
        return 0.0 if self.kind == "exgrpo" else self.decay

    @field_validator("kind")
    @classmethod
    def _known(cls, value: str) -> str:
        return check_known("kind", value, SAMPLER_NAMES, SAMPLER_ENTRY_POINTS)

    @model_validator(mode="after")
    def _options_are_of_plug_ins(self) -> SamplerConfig:
        if self.options and self.kind in SAMPLER_NAMES:
            raise ValueError(
                f"options is {self.options} but kind is '{self.kind}': options are of samplers "
                "that an installed package adds; remove options"
            )
        return self

    @model_validator(mode="after")
    def _ordered(self) -> SamplerConfig:
        low, high = self.band
        if low >= high:
            raise ValueError(f"band is [{low:g}, {high:g}]: write the lower bound first")
        return self
