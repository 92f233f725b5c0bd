"""The sections of what a batch is composed of: X1, X2, X3, single responses and the buffers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from bapo_core.config.base import Kinds, Section, UnitInterval
from bapo_core.types import NEAR_ESS_FRACTION


class RangeFilterConfig(Section):
    """Keeps groups whose rewards differ: 1/G <= mu <= (G-1)/G with rewards of 1 and 0 (first part
    of Eq. 5)."""

    filter: Literal["range"] = "range"


class GaussianFilterConfig(Section):
    """Draws groups whose rewards differ by mu, the share of correct responses (A.3)."""

    filter: Literal["gaussian"] = "gaussian"
    gaussian_mean: UnitInterval = 0.5
    """Mean of the filter (Table 3: 0.5)."""
    gaussian_sigma: float = Field(0.2, gt=0.0)
    """Standard deviation of the filter (Table 3: 0.2)."""


class UniformFilterConfig(Section):
    """Draws groups regardless of mu and of their rewards (A.3)."""

    filter: Literal["uniform"] = "uniform"
    uniform_fraction: UnitInterval = 0.6
    """Fraction of the step's groups that are kept (A.3: 60%)."""


class NoFilterConfig(Section):
    """Keeps all groups."""

    filter: Literal["none"] = "none"


_Filter = RangeFilterConfig | GaussianFilterConfig | UniformFilterConfig | NoFilterConfig
FreshConfig = Annotated[_Filter, Kinds(_Filter, key="filter")]
"""A section `fresh`."""


class ReevaluateConfig(Section):
    """Re-evaluated groups, the source X2 of a batch: hard prompts answered again by theta_t."""

    enabled: bool = True
    """Whether batches have re-evaluated groups (X2); false is the ablation "w/o X2"."""
    c1: UnitInterval = 0.125
    """c1, the largest accuracy mu of a hard group, which enters B_bad (Table 3: 1/8); X2 takes
    groups above it (Eq. 6)."""
    rule: Literal["paper", "improved_window", "any_gain"] = "paper"
    """Rule by which a re-evaluated group enters X2: c1 < mu_new < 1 (`paper`, Eq. 6);
    mu_stored < mu_new < 1 (`improved_window`); or mu_stored < mu_new (`any_gain`, as in the
    authors' code). In the place of mu_new < 1, the rewards must differ, which is the same for
    rewards of 1 and 0."""
    max_prompts: int | None = Field(None, ge=1)
    """Most prompts of B_bad that are answered again at a re-evaluation; null is half of B (the
    paper's 128 of 256). Re-evaluations are then at most 10% of the rollouts with the default
    `every` of 5 steps."""


class HardBufferConfig(Section):
    """The hard buffer B_bad: fresh groups with mu <= c1, whose prompts are re-evaluated for X2."""

    capacity: int | None = Field(None, ge=1)
    """Most groups in B_bad, first in first out; null is B (the paper's 256)."""
    evict_solved: bool = True
    """Whether a re-evaluated prompt with mu_new > c1 leaves B_bad; false is as in the authors'
    code."""


class HighQualityBufferConfig(Section):
    """The high-quality buffer B_high: fresh groups with c2 <= mu <= c3, which X3 replays."""

    capacity: int = Field(256, ge=1)
    """Most groups in B_high, first in first out (Table 3: 256)."""
    max_age: int | None = Field(3, ge=1)
    """Most steps between a group's rollout and its replay: X3 of step t draws from the groups of
    steps t - max_age to t - 1 (paper: the three most recent steps). Null sets no limit but the
    capacity (DOTS)."""


class ReplayWindowConfig(Section):
    """The replay window [c2, c3] of accuracies that enter B_high and X3 (Eq. 7, Eq. 8)."""

    direction: Literal["eq8", "easy_to_hard", "fixed"] = "eq8"
    """Movement of [c2, c3] with r_tot: rising (`eq8`, Eq. 8 as printed); falling (`easy_to_hard`,
    as in the authors' code); or `fixed` at the lower ends."""
    c2_range: tuple[UnitInterval, UnitInterval] = (0.125, 0.5)
    """Lowest and highest value of c2, the lower bound of the replay window (Table 3: 1/8, 4/8)."""
    c3_range: tuple[UnitInterval, UnitInterval] = (0.25, 0.625)
    """Lowest and highest value of c3, the upper bound of the replay window (Table 3: 2/8, 5/8)."""
    r_tot: Literal["batch", "ema", "buffer"] = "batch"
    """Definition of r_tot in Eq. 8: the accuracy of the step's unfiltered fresh groups
    (`batch`); its moving average (`ema`); or the accuracy of B_bad and B_high (`buffer`, as in
    the authors' code)."""
    ema_decay: float = Field(0.9, ge=0.0, lt=1.0)
    """Decay of the moving average that is r_tot when `replay.window.r_tot` is `ema`."""

    @model_validator(mode="after")
    def _ordered(self) -> ReplayWindowConfig:
        for name, (low, high) in (("c2_range", self.c2_range), ("c3_range", self.c3_range)):
            if low > high:
                raise ValueError(f"{name} is [{low}, {high}]: write the lower bound first")
        for (end, c2), (_, c3) in zip(
            (("low", self.c2_range[0]), ("high", self.c2_range[1])),
            (("low", self.c3_range[0]), ("high", self.c3_range[1])),
            strict=True,
        ):
            if c2 > c3:
                raise ValueError(
                    f"c2 is above c3 at the {end} end ({c2} > {c3}), so the window [c2, c3] would "
                    "be empty; lower c2_range or raise c3_range"
                )
        return self


class _ReplayConfig(Section):
    """Stored groups fill the room that is left in a batch."""

    last_step: int | None = Field(None, ge=1)
    """Last step whose batch has replayed groups (ReMix: 50); null is the run's last step."""
    store_reevaluated: bool = False
    """Whether re-evaluated groups enter B_high as well as fresh ones."""


class _AgedReplayConfig(_ReplayConfig):
    """Stored groups are replayed up to an age."""

    buffer: HighQualityBufferConfig = HighQualityBufferConfig()


class WindowReplayConfig(_AgedReplayConfig):
    """Groups in the replay window [c2, c3] are stored and replayed (Eq. 7)."""

    select: Literal["window"] = "window"
    window: ReplayWindowConfig = ReplayWindowConfig()


class MixedReplayConfig(_AgedReplayConfig):
    """All groups whose rewards differ are stored and replayed (DOTS): 1/G <= mu <= (G-1)/G with
    rewards of 1 and 0."""

    select: Literal["mixed"] = "mixed"


class UnagedBufferConfig(Section):
    """The high-quality buffer B_high without a limit of age."""

    capacity: int = Field(256, ge=1)
    """Most groups in B_high, first in first out (Table 3: 256)."""


class EffectiveReplayConfig(_ReplayConfig):
    """All groups whose rewards differ are stored, and replayed at any age as long as the policy is
    near the one that sampled them: as the effective share of their tokens under the ratios of the
    two policies predicts, by the decay that the trainer measures in every step."""

    select: Literal["effective_sample_size"] = "effective_sample_size"
    min_ess_fraction: float = Field(NEAR_ESS_FRACTION, gt=0.0, lt=1.0)
    """Smallest predicted effective share, exp(-d a), with which a group is replayed. a: steps
    between its policy and the step; d: median of `divergence/ess_decay` in the last ten steps that
    have it. Before the first such step, only groups of the policy before are replayed. The share is
    1 / (1 + c^2) for ratios with the coefficient of variation c, which is then 1/3; PPO clips them
    at 0.2. In `examples/countdown.yaml` a policy is there after 11 steps."""
    buffer: UnagedBufferConfig = UnagedBufferConfig()


class NoReplayConfig(Section):
    """Batches have no replayed groups: the ablation "w/o X3"."""

    select: Literal["off"] = "off"


_Replay = WindowReplayConfig | MixedReplayConfig | EffectiveReplayConfig | NoReplayConfig
ReplayConfig = Annotated[_Replay, Kinds(_Replay, key="select")]
"""A section `replay`."""


class NoResponseReplayConfig(Section):
    """No responses of earlier steps are replayed."""

    groups: Literal["off"] = "off"


class ResponseReplayConfig(Section):
    """Single responses of earlier steps join the fresh groups of their prompts. They are no part of
    X3, whose groups are whole, and take none of the batch's places."""

    groups: Literal["all", "unsolved", "revisited"] = "all"
    """Fresh groups that get them: `all` (RePO); `unsolved`, without a correct response (ARPO); or
    `revisited`, whose prompts were drawn for their past successes (ExGRPO, with
    `sampler.kind: exgrpo`)."""
    candidates: int = Field(16, ge=1)
    """Newest responses to a prompt that are candidates (RePO: 16; ARPO: 8)."""
    min_candidates: int = Field(16, ge=1)
    """Fewest candidates with which responses are replayed (RePO: 16, which 8 responses an epoch
    reach after two epochs; ARPO: 1)."""
    count: int = Field(8, ge=1)
    """Most responses that a group gets (RePO: 8; ARPO and ExGRPO: 1); with `strategy: all`, these
    are `candidates`."""
    only_correct: bool = False
    """Whether correct responses alone are candidates (ARPO and ExGRPO)."""
    strategy: Literal[
        "recent", "random", "all", "highest_reward", "max_variance", "most_likely"
    ] = "recent"
    """Choice among the candidates: the `recent` ones, `random` ones, `all`, those of
    `highest_reward`, the subset whose rewards have the largest variance (`max_variance`), or those
    of highest mean log-prob when they were sampled (`most_likely`, which stands for ExGRPO's lowest
    entropy)."""
    advantages: Literal["split", "mixed"] = "split"
    """Comparison for advantages: of replayed responses with each other (`split`, RePO), or with the
    fresh ones as one group (`mixed`)."""
    replace: bool = False
    """Whether replayed responses take the place of as many fresh ones (ARPO and ExGRPO)."""

    @property
    def most(self) -> int:
        """Most responses that a group gets."""
        return self.candidates if self.strategy == "all" else min(self.count, self.candidates)

    @property
    def most_key(self) -> str:
        """The key that sets `most`."""
        return "candidates" if self.most == self.candidates else "count"

    @model_validator(mode="after")
    def _can_choose(self) -> ResponseReplayConfig:
        if self.min_candidates > self.candidates:
            raise ValueError(
                f"min_candidates ({self.min_candidates}) is above candidates "
                f"({self.candidates}), so nothing would be "
                "replayed; lower min_candidates or raise candidates"
            )
        if self.advantages == "split" and (self.only_correct or self.replace):
            key = "only_correct" if self.only_correct else "replace"
            raise ValueError(
                f"{key} is true but advantages is 'split': compared with each other alone, correct "
                "responses have no advantages, and replaced responses are missed; set advantages "
                "to mixed"
            )
        if self.advantages == "split" and self.most == 1:
            raise ValueError(
                f"{self.most_key} is 1 but advantages is 'split': a response by itself has nothing "
                f"to be compared with; set advantages to mixed, or raise {self.most_key}"
            )
        return self


_ResponseReplay = NoResponseReplayConfig | ResponseReplayConfig
AnyResponseReplayConfig = Annotated[_ResponseReplay, Kinds(_ResponseReplay, key="groups")]
"""A section `response_replay`."""


class DemonstrationsConfig(Section):
    """Demonstrations: correct responses to training prompts, which are not the policy's own.

    They are a column `demonstration` of the data (`task.columns` maps it), or composed by the task,
    as `countdown` does. The verifier checks them when the data are loaded.
    """

    join: Literal["none", "all", "unsolved"] = "none"
    """Fresh groups that the demonstration of their prompt joins, in place of one response: `all`
    (LUFFY), or those without a correct response (`unsolved`). It has the reward of a correct
    answer, and probability 1 under its behaviour policy."""
    supervise_every: int = Field(0, ge=0)
    """Number of unsolved prompts after which a step has a supervised update on their demonstrations
    (ReLIFT: 128); 0 turns it off. The prompts are collected in the hard buffer, which they then
    leave. Supervised updates have an AdamW of their own, with the settings of `optimizer`."""
    supervised_gradient_clip: float = Field(1.0, gt=0.0)
    """Global gradient norm above which the gradients of supervised updates are scaled down (the
    default of ReLIFT's code, which its scripts keep)."""
    supervised_entropy_coefficient: float = Field(0.001, ge=0.0)
    """Coefficient of the entropy bonus of supervised updates (ReLIFT's scripts: 0.001)."""

    @property
    def enabled(self) -> bool:
        """Whether the run needs demonstrations."""
        return self.join != "none" or self.supervise_every > 0


class BatchConfig(Section):
    """The composition of a training batch from X1, X2 and X3."""

    rule: Literal["algorithm1"] = "algorithm1"
    capacity: int | None = Field(None, ge=1)
    """Most groups in a training batch, which is never padded; null is B, or B / `fresh_fraction`
    rounded up to whole minibatches."""
    fresh_fraction: float = Field(1.0, gt=0.0, le=1.0)
    """sigma, the share of a full batch that the B groups of a step can fill; replayed groups fill
    the rest (DOTS: 0.5, so that batches of 2 B groups need rollouts of B prompts)."""
    dedup: Literal["prompt", "rollout"] = "prompt"
    """Dedup key of groups, in the buffers and in a batch: the dataset's prompt (`prompt`: the
    newest entry replaces older ones, and X1 precedes X2 precedes X3), or the group (`rollout`, as
    in the authors' code)."""


BATCH_RULE_ENTRY_POINTS = "bapo.batch_rules"
"""The group of entry points of batch rules: name -> `bapo_core.algorithm.BatchRule`."""
BATCH_KINDS = Kinds(
    BatchConfig, key="rule", plug_ins=BATCH_RULE_ENTRY_POINTS, plug_in_base=BatchConfig
)
"""The kinds of the section `batch`, one for each batch rule."""
AnyBatchConfig = Annotated[BatchConfig, BATCH_KINDS]
"""A section `batch` of any batch rule."""
