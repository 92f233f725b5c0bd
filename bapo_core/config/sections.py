"""The sections of a run's configuration: every switch of the method, with its source and default.

Defaults are those of Table 3 of arXiv 2602.20722 and, where the paper is silent or differs from its
authors' code, those argued in `docs/decisions/`. Each field's docstring is its description in
`docs/configuration.md` and in `docs/config.schema.json`. Symbols are the paper's: X1, X2 and X3 are
the sources of a batch; B_bad and B_high are the hard and the high-quality buffer; mu is a group's
accuracy; alpha is the rollout policy, and theta_t the trainer's weights before update t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from bapo_core.config.base import Section
from bapo_core.config.evaluation import (
    GREEDY_TEMPERATURE,
    TEST_SET,
    EvaluationConfig,
    EvaluationSet,
    EvaluationSetConfig,
)
from bapo_core.config.objectives import (
    BEHAVIOR_OBJECTIVES,
    ESTIMATOR_ENTRY_POINTS,
    ESTIMATOR_NAMES,
    OBJECTIVE_ENTRY_POINTS,
    OBJECTIVE_NAMES,
    OBJECTIVE_SECTIONS,
    SEQUENCE_OBJECTIVES,
    AdaptiveClippingConfig,
    CispoConfig,
    ClipCovConfig,
    GmpoConfig,
    GspoConfig,
    KlCovConfig,
    M2poConfig,
    SapoConfig,
    ToprConfig,
)
from bapo_core.plug_ins import plug_in_names
from bapo_core.schedule import SyncSchedule
from bapo_core.thresholds import replay_window, within

Algorithm = Literal[
    "bapo",
    "bapo_mini",
    "bapo_without_x2",
    "bapo_without_x3",
    "bapo_fixed_window",
    "grpo",
    "grpo_delayed",
    "dapo",
    "ba_ppo",
    "ppo",
    "dr_grpo",
    "rloo",
    "reinforce_pp",
    "opo",
    "maxrl",
    "gspo",
    "cispo",
    "sapo",
    "gmpo",
    "topr",
    "m2po",
    "clip_cov",
    "kl_cov",
    "bapo_adaptive_clipping",
    "mopps",
    "dots",
    "repo",
    "arpo",
    "exgrpo",
    "luffy",
    "relift",
    "remix_grpo",
    "areal_async",
]

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]

LONG_RESPONSE_TOKENS = 1024
"""Responses that may have more tokens are journalled by default."""
JOURNAL_INTERVAL_S = 1.0
"""The default of `rollout.journal_interval_s` where there is a journal."""


class ModelConfig(Section):
    """The initial model, which is policy version 1."""

    path: str = "tiny"
    """The initial model: a Hugging Face model directory; `hf://organisation/name[@revision]`,
    fetched from the hub; `s3://bucket/prefix`, where the objects of such a directory are; or one of
    the small character-level models that come with bapo: `tiny`, or `tiny-vision`, which reads
    diagrams of the task `geometry`."""
    freeze_vision: bool = False
    """Whether the vision tower of a model that reads images keeps its weights: fewer gradients and
    optimizer states, and smaller checkpoints. It has no effect on other models."""


class TaskConfig(Section):
    """The task: its prompts, and how responses are verified."""

    name: str = "countdown"
    """Name of the task: `countdown`, `geometry`, `math`, `reasoning_gym` (docs/verifier.md), or one
    that an installed package adds (docs/adding-a-task.md)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the task's constructor, for example `{template: short}` for `countdown`."""
    train_path: str | None = None
    """Address of the training prompts: a Parquet, JSONL or JSON file,
    `hf://organisation/name[@revision][:split]`, `s3://bucket/key`, or `dataset:NAME` for what
    `bapo dataset upload` stored; null generates them, if the task can."""
    test_path: str | None = None
    """Address of the held-out prompts, as that of the training prompts."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Columns of the data that are named otherwise than the task's: the task's name, and that of
    the data, for example `{problem: question, answer: solution}` for `math`."""
    train_prompts: int = Field(2000, ge=1)
    """Number of training prompts to generate, or the most to read from `task.train_path`."""
    test_prompts: int = Field(200, ge=1)
    """Number of held-out prompts to generate, or the most to read from `task.test_path`."""
    drop_long_prompts: bool = False
    """Whether training prompts of more than `rollout.max_prompt_tokens` tokens are left out; if
    not, the run does not start. Held-out prompts are never left out."""
    data_seed: int = 0
    """Seed of generated prompts; it is separate from `seed`, so that runs with different seeds
    train on the same data."""


class RolloutConfig(Section):
    """Rollouts: how many responses are sampled in a step, by which engine, and how."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """Rollout engine: `vllm` for production; `transformers` needs no other installation."""
    replicas: int = Field(1, ge=1)
    """Number of rollout engines that a local run starts; a cluster's chart sets its own."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype of vLLM; `auto` is float32 on CPUs and bfloat16 on GPUs."""
    vllm_args: list[str] = Field(default_factory=list)
    """Additional arguments of vLLM's server, for example `[--tensor-parallel-size, "2"]`."""
    prompts_per_step: int = Field(256, ge=1)
    """B, the number of prompts that are rolled out in a step (Table 3: 256)."""
    group_size: int = Field(8, ge=2, le=254)
    """G, the number of responses to a prompt (Table 3: 8); group statistics need at least 2. The
    numbers of correct responses to all prompts are bytes, so that 254 is the largest."""
    temperature: float = Field(1.0, gt=0.0)
    """Sampling temperature, by which the trainer divides its logits as well (Table 3: 1)."""
    top_p: float = 1.0
    """Nucleus sampling, which must be off (1): a truncated distribution biases every importance
    ratio (Table 3: 1)."""
    top_k: int = -1
    """Top-k sampling, which must be off (-1) for the same reason as `top_p` (Table 3: -1)."""
    prompt_date: date | None = None
    """Date that chat templates print which print one (Llama 3.2, SmolLM3), so that prompts are the
    same tomorrow; null is the day on which the run was created, and for `bapo eval` today."""
    max_prompt_tokens: int = Field(2048, ge=1)
    """Length of the longest prompt in tokens; with a longer one, a run does not start, unless
    `task.drop_long_prompts` leaves it out (Table 3: 2048)."""
    max_response_tokens: int = Field(8192, ge=1)
    """Length in tokens at which a response is cut off (Table 3: 8192)."""
    max_generation_rounds: int = Field(1, ge=1)
    """Dynamic sampling (DAPO): the most rounds of B prompts that are rolled out in a step until
    groups with mixed rewards fill the batch; 1 turns it off. The next step goes on with the next
    prompt, so no prompt is skipped."""
    journal_interval_s: float | None = Field(None, ge=0.0)
    """Seconds between two writes of the journal, which holds the tokens of unfinished responses, so
    that those are continued after a process has died; 0 turns it off. Null is 1 with `vllm` if
    responses may have more than 1024 tokens, else 0."""

    @model_validator(mode="after")
    def _streams_tokens(self) -> RolloutConfig:
        if self.journal_interval_s and self.engine == "transformers":
            raise ValueError(
                f"journal_interval_s is {self.journal_interval_s:g}, but the transformers engine "
                "generates responses as a whole and cannot continue them; set engine to vllm, or "
                "journal_interval_s to 0"
            )
        return self

    @model_validator(mode="after")
    def _whole_distribution(self) -> RolloutConfig:
        for key, value, off in (("top_p", self.top_p, 1.0), ("top_k", self.top_k, -1)):
            if value != off:
                raise ValueError(
                    f"{key} is {value}: training rollouts must sample the whole distribution, or "
                    f"the importance ratios are biased; set {key} to {off:g}"
                )
        return self


class RewardConfig(Section):
    """The reward of a response, from the parts of its verdict. Difficulty does not depend on it:
    the accuracy k/G of a group counts correct responses."""

    wrong: float = 0.0
    """Reward of an answer to which the verifier gives 0, for example -1 (DAPO)."""
    correct: float = 1.0
    """Reward of an answer to which the verifier gives 1; partial credit lies in between."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weights of further parts of the task's verdicts, which are added to the reward: `format` of
    `countdown` and `math`, which is 1 for a response that has an answer."""
    overlong_share: Fraction = 0.0
    """Soft overlong punishment (arXiv 2503.14476, Eq. 13): share of `rollout.max_response_tokens`,
    before its end, over which a part `overlong` falls from 0 to -1 (DAPO: 0.2, 4,096 of 20,480
    tokens); 0 turns it off."""
    overlong_weight: float = Field(1.0, ge=0.0)
    """Weight of the soft overlong punishment."""

    @model_validator(mode="after")
    def _correct_is_better(self) -> RewardConfig:
        if self.wrong >= self.correct:
            raise ValueError(
                f"wrong ({self.wrong:g}) is not below correct ({self.correct:g}), so wrong answers "
                "would be learned; lower wrong or raise correct"
            )
        return self

    @property
    def is_in_unit_interval(self) -> bool:
        """Whether every reward is in [0, 1], whatever the verdict and the length."""
        parts = bool(self.weights) or (self.overlong_share > 0 and self.overlong_weight > 0)
        return self.wrong >= 0.0 and self.correct <= 1.0 and not parts

    @property
    def may_be_negative(self) -> bool:
        """Whether a verdict between 0 and 1 can have a reward below 0."""
        punished = self.overlong_share > 0 and self.overlong_weight > 0
        return self.wrong < 0 or punished or any(weight < 0 for weight in self.weights.values())


class SamplerConfig(Section):
    """The sampler: which prompts of the dataset a step rolls out.

    All but `uniform` depend on how often the prompts were answered correctly in the fresh groups of
    earlier steps. `mopps` and `dots` draw candidates uniformly, and select among them.
    """

    kind: Literal["uniform", "mopps", "dots", "exgrpo"] = "uniform"
    """Sampler of prompts (docs/methods.md): `uniform` takes each epoch in another permutation;
    `mopps` selects by Thompson draws from Beta posteriors (arXiv 2507.04632); `dots` samples
    prompts of medium difficulty (arXiv 2506.05316), with the posterior's mean in place of the
    paper's learned predictor; `exgrpo` revisits prompts that were solved in part, and retires those
    that were solved in full (arXiv 2510.02245)."""
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
        return 1.0 if self.half_life is None else 0.5 ** (1.0 / self.half_life)

    @property
    def posterior_decay(self) -> float:
        """The weight of a group for each newer one: 0 for `exgrpo`, which knows the last alone."""
        return 0.0 if self.kind == "exgrpo" else self.decay

    @model_validator(mode="after")
    def _ordered(self) -> SamplerConfig:
        low, high = self.band
        if low >= high:
            raise ValueError(f"band is [{low:g}, {high:g}]: write the lower bound first")
        return self


class SyncConfig(Section):
    """Weight synchronisation: when, and how, rollout replicas receive the trainer's weights."""

    every: int = Field(5, ge=1)
    """v, the number of steps between two syncs, which set alpha to theta_t (Table 3: 5); 1 is
    on-policy."""
    reevaluate_every: int = Field(5, ge=1)
    """m, the number of steps between two re-evaluations of hard prompts (Table 3: 5)."""
    phase: Literal["algorithm1", "first_step"] = "algorithm1"
    """Steps t at which a sync is due: t mod v = 0 (`algorithm1`, as in the paper) or
    (t-1) mod v = 0 (`first_step`, as in the authors' code)."""
    lag: int = Field(0, ge=0)
    """Steps by which rollouts run ahead of the trainer: a sync at step t loads theta_(t - lag), so
    that generation and training overlap, with a staleness of at most v - 1 + lag (the fixed form of
    AReaL's bound; AReaL: 4). 0 loads theta_t, for which rollouts wait."""
    interrupt_rollouts: bool = False
    """Whether new weights interrupt rollouts (AReaL's interruptible generation): with a lag,
    replicas load the weights of the next sync once they are published and the rollouts of all but
    one step have ended, and go on with the responses that have not. The tokens of a response are
    then of several policy versions, and a run that resumes is not the same, bit for bit. Only
    `vllm` can continue responses; the transformers engine ends them first."""
    weights_dtype: Literal["as_trained", "float32", "bfloat16"] = "as_trained"
    """Dtype of published weights; `bfloat16` halves the transfer and rounds the rollout policy."""
    transport: Literal["object_store", "nccl"] = "object_store"
    """Transport of published weights to replicas. `nccl` broadcasts them from the trainer's GPU to
    vLLM's, with the object store as fallback; it is experimental and has not run on GPUs yet."""


class FreshConfig(Section):
    """Fresh groups, the source X1 of a batch: the filter that this step's rollouts pass."""

    filter: Literal["range", "gaussian", "uniform", "none"] = "range"
    """Filter that selects X1 from the step's groups (A.3): `range` keeps 1/G <= mu <= (G-1)/G
    (first part of Eq. 5), `gaussian` draws by mu, `uniform` regardless of mu, `none` keeps all."""
    gaussian_mean: Fraction = 0.5
    """Mean of the `gaussian` filter of X1 (Table 3: 0.5)."""
    gaussian_sigma: float = Field(0.2, gt=0.0)
    """Standard deviation of the `gaussian` filter of X1 (Table 3: 0.2)."""
    uniform_fraction: Fraction = 0.6
    """Fraction of the step's groups that the `uniform` filter keeps for X1 (A.3: 60%)."""


class ReevaluateConfig(Section):
    """Re-evaluated groups, the source X2 of a batch: hard prompts answered again by theta_t."""

    enabled: bool = True
    """Whether batches have re-evaluated groups (X2); false is the ablation "w/o X2"."""
    c1: Fraction = 0.125
    """c1, the largest accuracy mu of a hard group, which enters B_bad (Table 3: 1/8); X2 takes
    groups above it (Eq. 6)."""
    rule: Literal["paper", "improved_window", "any_gain"] = "paper"
    """Rule by which a re-evaluated group enters X2: c1 < mu_new < 1 (`paper`, Eq. 6);
    mu_stored < mu_new < 1 (`improved_window`); or mu_stored < mu_new (`any_gain`, as in the
    authors' code)."""
    max_prompts: int | None = Field(None, ge=1)
    """Most prompts of B_bad that are answered again at a re-evaluation; null is half of B (the
    paper's 128 of 256). Re-evaluations are then at most 10% of the rollouts with the default
    `every` of 5 steps."""


class HardBufferConfig(Section):
    """The hard buffer B_bad: fresh groups with mu <= c1, whose prompts are re-evaluated for X2."""

    capacity: int | None = Field(None, ge=1)
    """Most groups in B_bad, first in first out; null is B (the paper's 256)."""
    after: Literal["drop_solved", "keep"] = "drop_solved"
    """Fate of a prompt in B_bad after its re-evaluation: `drop_solved` evicts it if mu_new > c1;
    `keep` never does (as in the authors' code)."""
    store_new_in_high: bool = False
    """Whether re-evaluated groups with c2 <= mu_new <= c3 enter B_high as well."""


class ReplayConfig(Section):
    """Replayed groups, the source X3 of a batch: stored groups that fill the room left in it."""

    enabled: bool = True
    """Whether batches have replayed groups (X3); false is the ablation "w/o X3"."""
    select: Literal["window", "mixed"] = "window"
    """Groups that are stored and replayed: those in the replay window [c2, c3] (Eq. 7), or all with
    `mixed` rewards, 1/G <= mu <= (G-1)/G (DOTS)."""
    last_step: int | None = Field(None, ge=1)
    """Last step whose batch has replayed groups (ReMix: 50); null is the run's last step."""


class ResponseReplayConfig(Section):
    """Response replay: single responses of earlier steps, which join the fresh groups of their
    prompts. They are no part of X3, whose groups are whole, and take none of the batch's places."""

    enabled: bool = False
    """Whether responses of earlier steps are replayed."""
    groups: Literal["all", "unsolved", "revisited"] = "all"
    """Fresh groups that get them: `all` (RePO); those without a correct response, `unsolved`
    (ARPO); or those whose prompts were drawn for their past successes, `revisited` (ExGRPO, with
    `sampler.kind: exgrpo`)."""
    cache: int = Field(16, ge=1)
    """Newest responses to a prompt that are candidates (RePO: 16; ARPO: 8)."""
    min_cache: int = Field(16, ge=1)
    """Fewest candidates with which responses are replayed (RePO: 16, which 8 responses an epoch
    reach after two epochs; ARPO: 1)."""
    count: int = Field(8, ge=1)
    """Most responses that a group gets (RePO: 8; ARPO and ExGRPO: 1); with `strategy: all`, these
    are `cache`."""
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
        return self.cache if self.strategy == "all" else min(self.count, self.cache)

    @property
    def most_key(self) -> str:
        """The key that sets `most`."""
        return "cache" if self.most == self.cache else "count"

    @model_validator(mode="after")
    def _can_choose(self) -> ResponseReplayConfig:
        if self.min_cache > self.cache:
            raise ValueError(
                f"min_cache ({self.min_cache}) is above cache ({self.cache}), so nothing would be "
                "replayed; lower min_cache or raise cache"
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
    leave."""

    @property
    def enabled(self) -> bool:
        """Whether the run needs demonstrations."""
        return self.join != "none" or self.supervise_every > 0


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

    direction: Literal["eq8", "easy_to_hard", "off"] = "eq8"
    """Movement of [c2, c3] with r_tot: rising (`eq8`, Eq. 8 as printed); falling (`easy_to_hard`,
    as in the authors' code); or fixed at the lower ends (`off`)."""
    c2_range: tuple[Fraction, Fraction] = (0.125, 0.5)
    """Lowest and highest value of c2, the lower bound of the replay window (Table 3: 1/8, 4/8)."""
    c3_range: tuple[Fraction, Fraction] = (0.25, 0.625)
    """Lowest and highest value of c3, the upper bound of the replay window (Table 3: 2/8, 5/8)."""
    r_tot: Literal["batch", "ema", "buffer"] = "batch"
    """Definition of r_tot in Eq. 8: the accuracy of the step's unfiltered fresh groups
    (`batch`); its moving average (`ema`); or the accuracy of B_bad and B_high (`buffer`, as in
    the authors' code)."""
    ema_decay: float = Field(0.9, ge=0.0, lt=1.0)
    """Decay of the moving average that is r_tot when `replay_window.r_tot` is `ema`."""

    @field_validator("direction", mode="before")
    @classmethod
    def _read_yaml_off(cls, value: Any) -> Any:
        """YAML 1.1 reads an unquoted `off` as false."""
        return "off" if value is False else value

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


class BatchConfig(Section):
    """The composition of a training batch from X1, X2 and X3."""

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


def _check_known(key: str, value: str, built_in: Sequence[str], entry_points: str) -> str:
    """Returns `value` if it names something built in or a plug-in, which is not loaded."""
    if value not in built_in:
        known = sorted({*built_in, *plug_in_names(entry_points)})
        if value not in known:
            raise ValueError(f"{key} is {value!r}, which is not one of {', '.join(known)}")
    return value


class SourceLossConfig(Section):
    """The policy loss of the responses of one source, where it differs from that of the others."""

    coefficient: float = Field(1.0, ge=0.0)
    """Factor of the policy loss."""
    clip_low: float | None = Field(None, gt=0.0)
    """In place of `loss.clip_low`; null is the same."""
    clip_high: float | None = Field(None, gt=0.0)
    """In place of `loss.clip_high`; null is the same."""
    shaping: float | None = Field(None, gt=0.0)
    """gamma of the shaped ratio r / (r + gamma), in place of the objective (LUFFY and ExGRPO: 0.1);
    null keeps the objective."""

    @model_validator(mode="after")
    def _shaped_has_no_clip(self) -> SourceLossConfig:
        if self.shaping is not None and (self.clip_low or self.clip_high):
            raise ValueError(
                "shaping is given with a clip bound, but the shaped ratio is not clipped; remove "
                "shaping, or clip_low and clip_high"
            )
        return self


class AdvantageConfig(Section):
    """Advantages, from the statistics of a group (Eq. 2), of the batch, or from a critic (A.9)."""

    estimator: str = "group"
    """Estimator of advantages (docs/methods.md): `group` compares the G responses to a prompt
    (Eq. 2); `gae` is generalised advantage estimation, by token, with a critic (BA-PPO, A.9);
    `rloo`, `reinforce_pp`, `reinforce_pp_baseline`, `opo`, `maxrl`; or one that an installed
    package adds."""
    scale: Literal["group", "batch", "none"] = "group"
    """Standard deviation that `estimator: group` divides by: that of the group's rewards (Eq. 2),
    of all rewards of the batch (LitePPO, arXiv 2508.08221), or none (Dr. GRPO, arXiv
    2503.20783)."""
    std: Literal["population", "sample"] = "population"
    """Normalisation of group advantages: (r - mean) / sqrt(var + eps) (`population`, Eq. 2); or by
    the sample standard deviation plus eps (`sample`, as in the authors' code)."""
    eps: float = Field(1e-6, gt=0.0)
    """eps of Eq. 2, and of the mean that `estimator: maxrl` divides by."""
    gamma: Fraction = 1.0
    """gamma, the discount of the estimators `gae` and `reinforce_pp`."""
    lam: Fraction = 1.0
    """lambda of GAE (Table 3: 1)."""
    whiten: bool = True
    """Whether GAE's advantages are scaled to mean 0 and standard deviation 1 over the batch."""

    @field_validator("estimator")
    @classmethod
    def _known(cls, value: str) -> str:
        return _check_known("estimator", value, ESTIMATOR_NAMES, ESTIMATOR_ENTRY_POINTS)

    @model_validator(mode="after")
    def _scales_groups(self) -> AdvantageConfig:
        if self.scale != "group" and self.estimator != "group":
            raise ValueError(
                f"scale is '{self.scale}' but estimator is '{self.estimator}', which has a scale "
                "of its own; set estimator to group, or scale to group"
            )
        return self


class CriticConfig(Section):
    """The critic of `advantage.estimator: gae`."""

    learning_rate: float = Field(1e-5, gt=0.0)
    """Learning rate of the critic's AdamW."""
    clip: float = Field(0.5, gt=0.0)
    """Clip range of the value loss."""


class LossConfig(Section):
    """The policy loss (Eq. 3): ratios, clipping, importance weights and normalisation."""

    objective: str = "ppo"
    """Policy loss of a token (docs/methods.md): `ppo`, the clipped surrogate of Eq. 3; `gspo`,
    `cispo`, `sapo`, `gmpo`, `topr`, `m2po`, `clip_cov`, `kl_cov`, `adaptive_clipping`, each with a
    section of settings; or one that an installed package adds."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of an objective that an installed package adds."""
    gspo: GspoConfig | None = None
    """Settings of `objective: gspo`."""
    cispo: CispoConfig | None = None
    """Settings of `objective: cispo`."""
    sapo: SapoConfig | None = None
    """Settings of `objective: sapo`."""
    gmpo: GmpoConfig | None = None
    """Settings of `objective: gmpo`."""
    topr: ToprConfig | None = None
    """Settings of `objective: topr`."""
    m2po: M2poConfig | None = None
    """Settings of `objective: m2po`."""
    clip_cov: ClipCovConfig | None = None
    """Settings of `objective: clip_cov`."""
    kl_cov: KlCovConfig | None = None
    """Settings of `objective: kl_cov`."""
    adaptive_clipping: AdaptiveClippingConfig | None = None
    """Settings of `objective: adaptive_clipping`."""
    ratio: Literal["prox_current", "behavior", "decoupled"] = "prox_current"
    """Off-policy correction. `prox_current`: PPO ratio theta / theta_t with the importance weight
    theta_t / behaviour, for every source. `behavior`: PPO ratio theta / behaviour (Eq. 3).
    `decoupled`: as `prox_current`, but X3 has the trainer's weights at the step of its rollout in
    place of theta_t (authors' code)."""
    clip_center: Literal["one", "current"] = "one"
    """Centre of the clip range of `objective: ppo` under `ratio: behavior`: 1, or theta_t /
    behaviour (delayed GRPO)."""
    by_source: dict[
        Literal["fresh", "reevaluated", "replayed", "demonstrated"], SourceLossConfig
    ] = Field(default_factory=dict)
    """Settings of single sources, for example `{replayed: {coefficient: 0.5}}`."""
    clip_low: float | None = Field(0.2, gt=0.0)
    """Distance of the lower clip bound of `objective: ppo` from the centre (released script:
    0.2); null sets no bound."""
    clip_high: float | None = Field(0.28, gt=0.0)
    """Distance of the upper clip bound of `objective: ppo` from the centre (released script:
    0.28); null sets no bound."""
    dual_clip: float | None = Field(10.0, gt=1.0)
    """Dual clip of `objective: ppo`: the loss of a token with a negative advantage A is at most
    this times |A|; null turns it off (released script: 10)."""
    weight_cap: float = Field(3.0, gt=0.0)
    """Largest importance weight (released script: 3)."""
    weight_floor: float = Field(0.0, ge=0.0)
    """Smallest importance weight; 0 sets no floor (IcePop: 0.5)."""
    weight_mode: Literal["truncate", "mask", "unit"] = "truncate"
    """Treatment of importance weights outside of [weight_floor, weight_cap]: `truncate` moves them
    to the bound (released script); `mask` sets them to 0, so that those tokens have no policy
    loss (IcePop, with 0.5 and 2). `unit` makes all weights 1, as if theta_t had sampled every
    response (ARPO), which is biased."""
    weight_norm: Literal["none", "batch"] = "none"
    """Normaliser of importance weights: `batch` divides them by their mean over the tokens of the
    batch that have a loss, so that it is 1 (verl's rollout correction)."""
    weight_level: Literal["token", "sequence", "geometric"] = "token"
    """Level of importance weights: a token's ratio, the product over the response, or its geometric
    mean (released script: token)."""
    aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """Aggregation of token losses (docs/methods.md): the mean over tokens (released script), or
    over responses of their mean over tokens (Eq. 1), of their sum, or of their sum divided by
    `rollout.max_response_tokens` (Dr. GRPO)."""
    mask_truncated: bool = False
    """Whether responses that were cut off at `rollout.max_response_tokens` have no loss (overlong
    filtering, arXiv 2503.14476); their rewards count for the advantages of their group."""
    norm: Literal["actual", "nominal"] = "actual"
    """Normaliser of a last minibatch that is short: its own size, or `optimizer.minibatch_prompts`
    (`nominal`, as in the authors' code)."""
    entropy_coefficient: float = Field(0.001, ge=0.0)
    """Coefficient of the entropy bonus (Table 3: 0.001)."""

    @property
    def objective_settings(self) -> Any:
        """The settings of the objective: its section, this one for `ppo`, or `options`."""
        if self.objective == "ppo":
            return self
        return (
            getattr(self, self.objective) if self.objective in OBJECTIVE_SECTIONS else self.options
        )

    @property
    def weighting(self) -> dict[str, Any]:
        """The arguments of `bapo_core.importance` that importance weights depend on."""
        return {
            "cap": self.weight_cap,
            "floor": self.weight_floor,
            "mode": self.weight_mode,
            "level": self.weight_level,
        }

    @field_validator("objective")
    @classmethod
    def _known(cls, value: str) -> str:
        return _check_known("objective", value, OBJECTIVE_NAMES, OBJECTIVE_ENTRY_POINTS)

    @model_validator(mode="before")
    @classmethod
    def _select_section(cls, values: Any) -> Any:
        """Gives the objective its section with the defaults, so that they are shown and stored."""
        if isinstance(values, dict):
            name = str(values.get("objective"))
            if name in OBJECTIVE_SECTIONS and values.get(name) is None:
                return {**values, name: {}}
        return values

    @model_validator(mode="after")
    def _sections_need_their_objective(self) -> LossConfig:
        for name in OBJECTIVE_SECTIONS:
            if getattr(self, name) is not None and self.objective != name:
                raise ValueError(
                    f"{name} is given but objective is '{self.objective}', which does not read it; "
                    f"remove {name}, or set objective to {name}"
                )
        if self.options and self.objective in OBJECTIVE_NAMES:
            raise ValueError(
                f"options is {self.options} but objective is '{self.objective}': options are of "
                "objectives that an installed package adds; remove options"
            )
        return self

    @model_validator(mode="after")
    def _objective_fits_the_ratio(self) -> LossConfig:
        if self.objective in BEHAVIOR_OBJECTIVES and self.ratio != "behavior":
            raise ValueError(
                f"objective is '{self.objective}' but ratio is '{self.ratio}': its equation has "
                "the ratio of the current to the behaviour policy, which sampled the tokens; set "
                "ratio to behavior"
            )
        token_weights = self.ratio != "behavior" and self.weight_level == "token"
        if self.objective in SEQUENCE_OBJECTIVES and token_weights:
            raise ValueError(
                f"objective is '{self.objective}' but weight_level is 'token': a response has one "
                "ratio and needs one importance weight; set weight_level to geometric or sequence, "
                "or ratio to behavior"
            )
        if self.clip_center == "current" and self.objective != "ppo":
            raise ValueError(
                f"clip_center is 'current' but objective is '{self.objective}', whose bounds have "
                "no centre that moves; set objective to ppo or clip_center to one"
            )
        return self

    @model_validator(mode="after")
    def _sources_fit_the_objective(self) -> LossConfig:
        for source, settings in self.by_source.items():
            if settings.shaping is not None and self.ratio != "behavior":
                raise ValueError(
                    f"by_source.{source}.shaping is given but ratio is '{self.ratio}': the shaped "
                    "ratio is that of the current to the behaviour policy; set ratio to behavior"
                )
            if (settings.clip_low or settings.clip_high) and self.objective != "ppo":
                raise ValueError(
                    f"by_source.{source} has a clip bound but objective is '{self.objective}', "
                    "which does not read it; set objective to ppo, or remove the bound"
                )
        return self

    @model_validator(mode="after")
    def _weights_are_bounded(self) -> LossConfig:
        if self.weight_floor >= self.weight_cap:
            raise ValueError(
                f"weight_floor ({self.weight_floor:g}) is not below weight_cap "
                f"({self.weight_cap:g}), so no importance weight is between them; lower "
                "weight_floor or raise weight_cap"
            )
        return self

    @model_validator(mode="after")
    def _center_needs_behavior(self) -> LossConfig:
        if self.clip_center == "current" and self.ratio != "behavior":
            raise ValueError(
                f"clip_center is 'current' but ratio is '{self.ratio}': only the behavior ratio "
                "has a centre that moves; set ratio to behavior or clip_center to one"
            )
        return self


class ConvexKLConfig(Section):
    """The KL-convex penalty of ReMix (arXiv 2507.06892): beta (lambda KL(pi || reference) +
    (1 - lambda) KL(pi || theta_t)), where lambda falls stepwise from 1."""

    after: int = Field(50, ge=0)
    """Last step with lambda = 1 (ReMix: 50)."""
    every: int = Field(10, ge=1)
    """Steps between two decreases of lambda (ReMix: 10)."""
    decrease: float = Field(0.1, gt=0.0, le=1.0)
    """Size of a decrease of lambda (ReMix: 0.1)."""
    lowest: Fraction = 0.5
    """Lowest lambda (ReMix: 0.5)."""


class KLConfig(Section):
    """The KL penalty of the loss (beta KL in Eq. 3)."""

    coefficient: float = Field(0.001, ge=0.0)
    """beta, the coefficient of the KL penalty in Eq. 3 (Table 3: 0.001); 0 turns it off."""
    placement: Literal["loss", "reward"] = "loss"
    """Where the KL penalty acts: as a term of the loss (Eq. 3), or subtracted from the reward of
    each token before advantages are estimated, as beta (log theta_t - log reference)
    (REINFORCE++)."""
    reference: Literal["rollout", "initial"] = "rollout"
    """Policy that the KL penalty is taken to: the behaviour policy of each group (alpha in Eq. 3),
    or the initial model (Eq. 1, GRPO)."""
    estimator: Literal["k1", "k2", "k3", "k3_corrected", "iw"] = "k3"
    """Estimator of the KL divergence. k1 and k3 are unbiased for samples of the current policy;
    with w = current / behaviour policy, `k3_corrected` = w k3 and `iw` = w k1 - w + 1 are unbiased
    for stored samples, too."""

    convex: ConvexKLConfig | None = None
    """Schedule of a KL penalty that is in part to theta_t (ReMix), for example `{}` with its
    defaults; null takes it to the reference alone."""
    reset_after: int | None = Field(None, ge=1)
    """Step after which the policy becomes the reference, in place of the initial model (ReMix's
    policy reincarnation, 50); null keeps the initial model."""

    def reference_share(self, step: int) -> float:
        """Returns lambda, the share of the penalty that is to the reference, at a step."""
        if self.convex is None:
            return 1.0
        settings = self.convex
        decreases = -(-max(step - settings.after, 0) // settings.every)
        return max(1.0 - settings.decrease * decreases, settings.lowest)

    def resets_before(self, step: int) -> bool:
        """Whether the reference was replaced at or before the beginning of `step`."""
        return self.reset_after is not None and step > self.reset_after

    @model_validator(mode="after")
    def _has_an_initial_reference(self) -> KLConfig:
        for key in ("convex", "reset_after"):
            if getattr(self, key) is not None and (
                self.reference != "initial" or self.coefficient == 0
            ):
                raise ValueError(
                    f"{key} is given with reference '{self.reference}' and coefficient "
                    f"{self.coefficient:g}, but it needs a KL penalty to the initial model; set "
                    f"reference to initial and a coefficient above 0, or remove {key}"
                )
        if self.convex is not None and self.placement == "reward":
            raise ValueError(
                "convex is given but placement is 'reward': the KL to theta_t is 0 when rewards "
                "are computed; set placement to loss, or remove convex"
            )
        return self


class OptimizerConfig(Section):
    """The optimizer, AdamW, and the sizes of its minibatches and micro-batches."""

    learning_rate: float = Field(1e-6, gt=0.0)
    """Learning rate (Table 3: 1e-6)."""
    weight_decay: float = Field(0.1, ge=0.0)
    """Decoupled weight decay (released script: 0.1)."""
    warmup_steps: int = Field(10, ge=0)
    """Training steps of linear warm-up of the learning rate (released script: 10)."""
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """Decay of AdamW's first moment."""
    beta2: float = Field(0.999, ge=0.0, lt=1.0)
    """Decay of AdamW's second moment."""
    gradient_clip: float = Field(1.0, gt=0.0)
    """Global gradient norm above which gradients are scaled down (released script: 1)."""
    epochs: int = Field(1, ge=1)
    """Passes over a step's batch, each in minibatches of its own order (PPO epochs). The proximal
    policy stays theta_t for all of them (Table 3 has no such key, so 1)."""
    minibatch_prompts: int = Field(64, ge=1)
    """Groups in a minibatch, which is one optimizer update (Table 3: 64, so 4 updates a step)."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Most tokens in a micro-batch, which is one forward and backward pass; it bounds memory and
    does not change the gradient. A prompt counts once for the responses of its group that are in
    the same micro-batch, and a quarter more for each further one."""


class CheckpointConfig(Section):
    """Checkpoints, from which a run resumes."""

    every: int = Field(5, ge=1)
    """Steps between two checkpoints, so the most steps that a resumed run repeats."""
    keep: int = Field(2, ge=1)
    """Number of latest checkpoints to keep."""
    keep_best: int = Field(0, ge=0)
    """Number of further checkpoints to keep, which are those with the best evaluations on the set
    `evaluation.primary`."""


class TrainerConfig(Section):
    """Parallelism and memory of the trainer; these keys may differ when a run is resumed."""

    processes: int = Field(1, ge=1)
    """Trainer processes that a local run starts, each with a shard of the model; a cluster's job
    sets its own."""
    gradient_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """Activation checkpointing: `none`; `selective` recomputes cheap operations and keeps the
    outputs of matrix products and attention; `full` keeps only each layer's input, for about a
    third more compute; `auto` is `full` on a GPU whose memory would not hold all activations of a
    micro-batch by the formula of docs/scaling.md, and otherwise `none`."""
    compile: Literal["auto"] | bool = "auto"
    """Whether each layer is compiled with `torch.compile`, which makes the first steps slow; `auto`
    compiles on GPUs, except under `gradient_checkpointing: selective`."""
    attention: Literal["auto", "varlen", "cudnn", "flash4", "padded"] = "auto"
    """Kernel of the attention over packed sequences on a GPU: `varlen` is FlashAttention 2 in
    PyTorch; `cudnn` are cuDNN's kernels in PyTorch; `flash4` is FlashAttention 4 of the extra
    `flash4`, for compute capability 9.0 and later; `padded` pads the sequences. A kernel that does
    not take a model's attention is replaced by the next one, and the log says why; `auto` begins
    with `varlen`. CPUs have `padded` alone."""
    offload: bool = False
    """Whether weights, gradients and optimizer state stay in the CPU's memory, with only the layers
    in use on the GPU, for models that do not fit; it has no effect on CPUs."""
    profile_steps: int = Field(0, ge=0)
    """Number of steps, after the first one, to record with the PyTorch profiler (docs/trainer.md);
    0 turns it off."""

    @model_validator(mode="after")
    def _compiles(self) -> TrainerConfig:
        if self.compile is True and self.gradient_checkpointing == "selective":
            raise ValueError(
                "compile is true but gradient_checkpointing is 'selective': the compiler decides "
                "which activations of a compiled layer are kept; set gradient_checkpointing to "
                "none or full, or compile to auto"
            )
        return self


def refuse_credentials(uri: str) -> str:
    """Returns the tracking URI of an MLflow server.

    Raises `ValueError` for one with a user or a password, which the run's configuration, messages
    and logs would show.
    """
    if "@" in urlsplit(uri).netloc:
        raise ValueError(
            "holds a user or a password, which configurations and logs would show; set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment"
        )
    return uri


class MlflowConfig(Section):
    """Export of metrics to MLflow."""

    tracking_uri: Annotated[str, AfterValidator(refuse_credentials)] = ""
    """Tracking URI of an MLflow server that receives the metrics, for example http://mlflow:5000;
    empty turns it off. Credentials are in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""
    experiment: str = "bapo"
    """MLflow experiment that the run is recorded in."""


class LoraConfig(Section):
    """Low-rank adapters (LoRA), trained in place of the model's own weights."""

    rank: int = Field(0, ge=0)
    """Rank of the adapters; 0 trains all weights."""
    alpha: int = Field(16, ge=1)
    """Scale of the adapters, whose output is multiplied by alpha / rank."""
    targets: list[str] = Field(default_factory=lambda: ["all-linear"], min_length=1)
    """Layers that get adapters, such as q_proj; `all-linear` is every linear layer but the output
    layer."""


class RunConfig(Section):
    """The configuration of a run: its name, its preset, and the sections of its keys."""

    name: str = Field("countdown", pattern=r"^[a-z][a-z0-9-]{0,62}$")
    """Name of the run: lower-case letters, digits and hyphens, starting with a letter."""
    algorithm: Algorithm = "bapo"
    """Preset, whose values replace the defaults; the file's values replace the preset's."""
    seed: int = Field(42, ge=0)
    """Seed from which every random draw of the run is derived (Table 3: 42)."""
    steps: int = Field(471, ge=1)
    """T, the number of training steps."""
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    sampler: SamplerConfig = SamplerConfig()
    sync: SyncConfig = SyncConfig()
    fresh: FreshConfig = FreshConfig()
    reevaluate: ReevaluateConfig = ReevaluateConfig()
    replay: ReplayConfig = ReplayConfig()
    response_replay: ResponseReplayConfig = ResponseReplayConfig()
    demonstrations: DemonstrationsConfig = DemonstrationsConfig()
    hard_buffer: HardBufferConfig = HardBufferConfig()
    high_quality_buffer: HighQualityBufferConfig = HighQualityBufferConfig()
    replay_window: ReplayWindowConfig = ReplayWindowConfig()
    batch: BatchConfig = BatchConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    critic: CriticConfig = CriticConfig()
    loss: LossConfig = LossConfig()
    kl: KLConfig = KLConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig = LoraConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    mlflow: MlflowConfig = MlflowConfig()

    @property
    def schedule(self) -> SyncSchedule:
        """The schedule of syncs (v) and re-evaluations (m)."""
        sync = self.sync
        return SyncSchedule(sync.every, sync.reevaluate_every, sync.phase, sync.lag)

    @property
    def batch_capacity(self) -> int:
        """Most groups in a training batch: `batch.capacity`, or B / `batch.fresh_fraction`."""
        prompts, fraction = self.rollout.prompts_per_step, self.batch.fresh_fraction
        if self.batch.capacity is not None:
            return self.batch.capacity
        if fraction == 1.0:
            return prompts
        minibatch = self.optimizer.minibatch_prompts
        # B / fraction may exceed a whole number by a rounding error alone.
        return math.ceil(round(prompts / fraction / minibatch, 9)) * minibatch

    @property
    def candidates_per_round(self) -> int:
        """Prompts that the B of a generation round are selected from: B, or more if adaptive."""
        selects = self.sampler.selects_candidates
        return self.rollout.prompts_per_step * (self.sampler.candidates if selects else 1)

    @property
    def draws_from_stream(self) -> bool:
        """Whether a step goes on with the prompt after the last one of the step before: dynamic
        sampling with the uniform sampler."""
        return self.rollout.max_generation_rounds > 1 and not self.sampler.is_adaptive

    @property
    def prompts_needed(self) -> int:
        """Fewest training prompts from which a step can draw in all of its generation rounds."""
        return self.candidates_per_round * self.rollout.max_generation_rounds

    @property
    def keeps_hard_buffer(self) -> bool:
        """Whether hard groups are stored: for re-evaluation, or for supervised updates."""
        return self.reevaluate.enabled or self.demonstrations.supervise_every > 0

    def replays_at(self, t: int) -> bool:
        """Whether the batch of step t may have replayed groups (X3)."""
        last = self.replay.last_step
        return self.replay.enabled and (last is None or t <= last)

    @property
    def most_reevaluated(self) -> int:
        """Most prompts of a re-evaluation: `reevaluate.max_prompts`, or half of B."""
        return self.reevaluate.max_prompts or max(1, self.rollout.prompts_per_step // 2)

    @property
    def hard_capacity(self) -> int:
        """Most groups in B_bad: `hard_buffer.capacity`, or B."""
        return self.hard_buffer.capacity or self.rollout.prompts_per_step

    @property
    def evaluation_sets(self) -> dict[str, EvaluationSet]:
        """The evaluation sets in the order of their names: `evaluation.sets`, or the set `test`."""
        sets = self.evaluation.sets or {TEST_SET: EvaluationSetConfig(path=self.task.test_path)}
        return {name: self._complete_set(name, sets[name]) for name in sorted(sets)}

    def _complete_set(self, name: str, settings: EvaluationSetConfig) -> EvaluationSet:
        defaults, rollout = self.evaluation, self.rollout
        given = (settings.temperature, defaults.temperature, rollout.temperature)
        temperature = next(value for value in given if value is not None)
        # Greedy responses to a prompt are all the same.
        samples = settings.samples or defaults.samples or (rollout.group_size if temperature else 1)
        return EvaluationSet(
            name=name,
            path=settings.path,
            options={**self.task.options, **settings.options},
            columns={**self.task.columns, **settings.columns},
            prompts=settings.prompts or self.task.test_prompts,
            samples=samples,
            temperature=temperature or GREEDY_TEMPERATURE,
            top_p=settings.top_p or defaults.top_p,
            every=settings.every or defaults.every,
        )

    @property
    def primary_set(self) -> str:
        """The name of the set that stands for the run: `evaluation.primary`, or the first."""
        return self.evaluation.primary or min(self.evaluation.sets or {TEST_SET})

    @property
    def journal_interval_s(self) -> float:
        """Seconds between two writes of the journal of unfinished responses; 0 if there is none."""
        rollout = self.rollout
        if rollout.journal_interval_s is not None:
            return rollout.journal_interval_s
        long = rollout.engine == "vllm" and rollout.max_response_tokens > LONG_RESPONSE_TOKENS
        return JOURNAL_INTERVAL_S if long else 0.0

    @property
    def interrupts_rollouts(self) -> bool:
        """Whether new weights interrupt rollouts.

        That takes an engine that streams tokens, and rollouts that run ahead of the trainer.
        """
        ahead = self.sync.lag > 0 and self.rollout.max_generation_rounds == 1
        return self.sync.interrupt_rollouts and ahead and self.rollout.engine == "vllm"

    def rollout_version(self, t: int, kind: str) -> int:
        """Returns the policy version that samples at step t: alpha for `fresh`, else theta_t."""
        return self.schedule.policy_version(t) if kind == "fresh" else t

    def sampled_as_of(self, t: int) -> int:
        """Returns the step whose commit the prompts of step t depend on; 0 for none."""
        if not self.sampler.is_adaptive:
            return 0
        return (self.schedule.policy_version(t) if self.sampler.as_of == "sync" else t) - 1

    def evaluates_at(self, t: int) -> bool:
        """Whether theta_t is evaluated on any set."""
        return bool(self.evaluation_sets_at(t))

    def evaluation_sets_at(self, t: int) -> list[str]:
        """Returns the sets on which theta_t is evaluated.

        All sets are evaluated initially and finally, and each one every `evaluation.every` steps,
        or at the interval of its own.
        """
        ends = t in (1, self.steps + 1)
        sets = self.evaluation_sets.items()
        return [name for name, settings in sets if ends or t % settings.every == 0]

    def publishes_at(self, t: int) -> bool:
        """Whether theta_t is published: for a sync, a re-evaluation, or an evaluation."""
        within = t <= self.steps
        return (
            t == 1
            or (t + self.sync.lag <= self.steps and self.schedule.syncs_at(t + self.sync.lag))
            or (within and self.reevaluate.enabled and self.schedule.reevaluates_at(t))
            or self.evaluates_at(t)
        )

    def checkpoints_after(self, step: int) -> bool:
        """Whether a checkpoint is taken after `step`: at the end, and before every step that
        `checkpoint.every` divides, as the steps with a sync are those that v divides."""
        return (step + 1) % self.checkpoint.every == 0 or step == self.steps

    @model_validator(mode="after")
    def _samples_dynamically_by_range(self) -> RunConfig:
        if self.rollout.max_generation_rounds > 1 and self.fresh.filter != "range":
            raise ValueError(
                f"rollout.max_generation_rounds is {self.rollout.max_generation_rounds} with "
                f"fresh.filter={self.fresh.filter}: dynamic sampling counts groups with mixed "
                "rewards, all of which only fresh.filter=range keeps; set "
                "rollout.max_generation_rounds=1 or fresh.filter=range"
            )
        return self

    @model_validator(mode="after")
    def _advantages_fit_the_loss(self) -> RunConfig:
        estimator, objective = self.advantage.estimator, self.loss.objective
        in_reward = self.kl.placement == "reward"
        if in_reward and estimator != "reinforce_pp":
            raise ValueError(
                f"kl.placement is 'reward' but advantage.estimator is '{estimator}', which has no "
                "rewards of single tokens; set advantage.estimator=reinforce_pp or "
                "kl.placement=loss"
            )
        by_token = estimator == "gae" or (
            estimator == "reinforce_pp" and (in_reward or self.advantage.gamma < 1.0)
        )
        if objective in SEQUENCE_OBJECTIVES and by_token:
            raise ValueError(
                f"loss.objective is '{objective}', which needs one advantage for a response, but "
                f"advantage.estimator={estimator} gives one for each token; set "
                "advantage.estimator=group (or reinforce_pp with advantage.gamma=1 and "
                "kl.placement=loss)"
            )
        return self

    @model_validator(mode="after")
    def _replays_responses(self) -> RunConfig:
        settings, size = self.response_replay, self.rollout.group_size
        if self.sampler.kind == "exgrpo" and self.rollout.max_generation_rounds > 1:
            raise ValueError(
                "sampler.kind is 'exgrpo' with rollout.max_generation_rounds="
                f"{self.rollout.max_generation_rounds}: a step has one round of prompts that are "
                "revisited; set rollout.max_generation_rounds=1 or another sampler.kind"
            )
        if not settings.enabled:
            return self
        if settings.groups == "revisited" and self.sampler.kind != "exgrpo":
            raise ValueError(
                "response_replay.groups is 'revisited' but sampler.kind is "
                f"'{self.sampler.kind}', which revisits no prompts; set sampler.kind=exgrpo, or "
                "response_replay.groups to all or unsolved"
            )
        demonstrated = int(self.demonstrations.join != "none")
        if settings.replace and settings.most + demonstrated >= size:
            key = f"response_replay.{settings.most_key}"
            and_one = " and a demonstration" if demonstrated else ""
            raise ValueError(
                f"{key} is {settings.most} with response_replay.replace{and_one}, which leaves no "
                f"fresh response of a group of {size}; lower {key}"
            )
        if self.loss.ratio == "decoupled":
            raise ValueError(
                "response_replay.enabled is true but loss.ratio is 'decoupled', which has the "
                "trainer's log-probs of whole groups alone; set loss.ratio to behavior or "
                "prox_current"
            )
        if self.replay.enabled and self.batch.dedup == "rollout":
            raise ValueError(
                "response_replay.enabled and replay.enabled with batch.dedup=rollout would put "
                "responses into a batch twice; set batch.dedup=prompt, or disable one of the two"
            )
        return self

    @model_validator(mode="after")
    def _filter_keeps_what_is_joined(self) -> RunConfig:
        joins = {
            "response_replay.groups": self.response_replay.enabled
            and self.response_replay.groups == "unsolved",
            "demonstrations.join": self.demonstrations.join == "unsolved",
        }
        joins_all = self.demonstrations.join == "all"
        if joins_all and self.fresh.filter in ("gaussian", "uniform"):
            raise ValueError(
                f"demonstrations.join is 'all' but fresh.filter is '{self.fresh.filter}', which "
                "drops groups without a correct response that the demonstration makes mixed; set "
                "fresh.filter to range or none"
            )
        for key, unsolved in joins.items():
            if unsolved and self.fresh.filter == "gaussian":
                raise ValueError(
                    f"{key} is 'unsolved' but fresh.filter is 'gaussian', which keeps no group "
                    "without a correct response, so nothing would join; set fresh.filter to range "
                    "or none"
                )
        return self

    @model_validator(mode="after")
    def _supervises(self) -> RunConfig:
        count = self.demonstrations.supervise_every
        if count and self.reevaluate.enabled:
            raise ValueError(
                f"demonstrations.supervise_every is {count} with reevaluate.enabled, but both take "
                "prompts from the hard buffer; set supervise_every=0 or reevaluate.enabled=false"
            )
        if count > self.hard_capacity:
            raise ValueError(
                f"demonstrations.supervise_every ({count}) is above the capacity of the hard "
                f"buffer ({self.hard_capacity}), so no update would ever be due; raise "
                "hard_buffer.capacity"
            )
        return self

    @model_validator(mode="after")
    def _greedy_samples_differ(self) -> RunConfig:
        for settings in self.evaluation_sets.values():
            if settings.temperature == GREEDY_TEMPERATURE and settings.samples > 1:
                raise ValueError(
                    f"the evaluation set {settings.name} has temperature 0 and "
                    f"{settings.samples} samples, but greedy responses to a prompt are all the "
                    "same; set samples to 1, or a temperature above 0"
                )
        return self

    @model_validator(mode="after")
    def _rewards_fit(self) -> RunConfig:
        if self.advantage.estimator == "maxrl" and self.reward.may_be_negative:
            raise ValueError(
                "advantage.estimator is 'maxrl', which divides by the mean reward of a group, but "
                "the reward section allows rewards below 0; set reward.wrong=0, "
                "reward.overlong_share=0 and no negative weight, or another estimator"
            )
        return self

    @model_validator(mode="after")
    def _resets_whole_models(self) -> RunConfig:
        if self.kl.reset_after is not None and self.lora.rank:
            raise ValueError(
                f"kl.reset_after is {self.kl.reset_after} but lora.rank is {self.lora.rank}: the "
                "reference has no adapters to become the policy; set one of them to null or 0"
            )
        return self

    @model_validator(mode="after")
    def _names_its_sets(self) -> RunConfig:
        names, primary = sorted(self.evaluation.sets) or [TEST_SET], self.evaluation.primary
        if primary is not None and primary not in names:
            raise ValueError(
                f"evaluation.primary is {primary!r}, which is no set of evaluation.sets; choose "
                f"one of {', '.join(names)}"
            )
        if self.evaluation.sets and self.task.test_path is not None:
            raise ValueError(
                f"task.test_path is {self.task.test_path}, but the held-out prompts are those of "
                f"evaluation.sets ({', '.join(names)}); remove task.test_path "
                "(task.test_path=null), or make it the path of a set"
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        minibatch = self.optimizer.minibatch_prompts
        if self.batch_capacity < minibatch:
            raise ValueError(
                f"the batch capacity ({self.batch_capacity} groups) is below "
                f"optimizer.minibatch_prompts ({minibatch}); raise batch.capacity or "
                "rollout.prompts_per_step, or lower optimizer.minibatch_prompts"
            )
        longest = self.rollout.max_prompt_tokens + self.rollout.max_response_tokens
        if self.optimizer.microbatch_tokens < longest:
            raise ValueError(
                f"optimizer.microbatch_tokens ({self.optimizer.microbatch_tokens}) is below the "
                f"longest sequence, rollout.max_prompt_tokens + rollout.max_response_tokens "
                f"({longest}); raise optimizer.microbatch_tokens"
            )
        if self.sync.transport == "nccl" and self.rollout.engine != "vllm":
            raise ValueError(
                f"sync.transport is nccl, which rollout.engine {self.rollout.engine} does not "
                "support; set rollout.engine to vllm, or sync.transport to object_store"
            )
        every = self.evaluation_sets[self.primary_set].every
        if self.checkpoint.keep_best and every % self.checkpoint.every:
            raise ValueError(
                f"checkpoint.keep_best is {self.checkpoint.keep_best}, which needs a checkpoint of "
                f"every policy version that is evaluated; make evaluation.every ({every}) a "
                f"multiple of checkpoint.every ({self.checkpoint.every})"
            )
        if self.task.train_prompts < self.prompts_needed:
            raise ValueError(
                f"task.train_prompts is {self.task.train_prompts} but "
                f"{self.explain_prompts_needed()}; raise task.train_prompts"
            )
        if self.sampler.prior_run == self.name:
            raise ValueError(
                f"sampler.prior_run is {self.name!r}, the run itself; name an earlier run, or "
                "remove sampler.prior_run"
            )
        return self

    def explain_prompts_needed(self) -> str:
        """Describes `prompts_needed` and the keys that it is the product of, for errors."""
        factors = ["rollout.prompts_per_step", "rollout.max_generation_rounds"]
        if self.sampler.selects_candidates:
            factors.append("sampler.candidates")
        return f"one step may draw {self.prompts_needed} ({' x '.join(factors)})"

    def warnings(self) -> list[str]:
        """Returns warnings about settings that are valid and surprising."""
        warnings = []
        if self.sync.lag and self.reevaluate.enabled:
            warnings.append(
                f"sync.lag is {self.sync.lag} with reevaluate.enabled: re-evaluations need the "
                "current weights, so rollouts wait for the trainer every sync.reevaluate_every "
                "steps"
            )
        if self.sync.interrupt_rollouts and not self.sync.lag:
            warnings.append(
                "sync.interrupt_rollouts changes nothing with sync.lag=0: the weights of a sync "
                "are published when all responses before it have ended; set sync.lag"
            )
        elif self.sync.interrupt_rollouts and self.rollout.max_generation_rounds > 1:
            warnings.append(
                "sync.interrupt_rollouts changes nothing with rollout.max_generation_rounds="
                f"{self.rollout.max_generation_rounds}: the prompts of a step follow from the "
                "rewards of the step before, so its responses end before new weights are loaded"
            )
        if self.reevaluate.enabled and not self.sync.lag and not self.schedule.one_load_serves_both:
            warnings.append(
                f"sync.every (v={self.sync.every}) does not divide sync.reevaluate_every "
                f"(m={self.sync.reevaluate_every}) or sync.phase is first_step, so the engine "
                "loads the current weights for each re-evaluation and then the older ones again: "
                "correct, but slower; make reevaluate_every a multiple of every, with phase "
                "algorithm1"
            )
        if self.batch_capacity % self.optimizer.minibatch_prompts:
            warnings.append(
                f"optimizer.minibatch_prompts ({self.optimizer.minibatch_prompts}) does not divide "
                f"the batch capacity ({self.batch_capacity}), so the last minibatch of a full "
                "batch is short"
            )
        if self.steps > 1 and self.schedule.policy_version(self.steps) == 1:
            warnings.append(
                f"sync.every is {self.sync.every} and steps is {self.steps}: all rollouts come "
                "from the initial model; lower sync.every or raise steps"
            )
        weights = ("weight_cap", "weight_floor", "weight_mode", "weight_norm", "weight_level")
        unused = _changed("loss", self.loss, weights)
        if self.loss.ratio == "behavior" and unused:
            warnings.append(
                f"{' and '.join(unused)} change nothing with loss.ratio=behavior, whose ratio has "
                "the behaviour policy in the denominator and needs no importance weights"
            )
        warnings += self._warnings_about_methods()
        warnings += self._warnings_about_sampling()
        warnings += self._warnings_about_batches()
        warnings += self._warnings_about_unused_sections()
        empty = self._empty_windows()
        if self.replay.enabled and self.replay.select == "window" and empty:
            warnings.append(
                f"with rollout.group_size {self.rollout.group_size}, the replay window [c2, c3] "
                f"holds no accuracy k/G for {empty:.0%} of the values of r_tot, so nothing is "
                "stored for replay then; widen replay_window.c2_range and c3_range, or raise the "
                "group size"
            )
        return warnings

    def _warnings_about_methods(self) -> list[str]:
        """Returns warnings about objectives and estimators."""
        warnings = []
        objective, estimator = self.loss.objective, self.advantage.estimator
        unused = _changed("loss", self.loss, ("clip_low", "clip_high", "dual_clip"))
        if objective != "ppo" and unused:
            warnings.append(
                f"{' and '.join(unused)} change nothing with loss.objective={objective}: its "
                f"settings are the keys of loss.{objective}"
            )
        replays = self.replay.enabled or self.response_replay.enabled
        stale = self.sync.every > 1 or self.sync.lag > 0 or replays
        if objective == "gspo" and self.loss.ratio == "behavior" and stale:
            warnings.append(
                "loss.objective=gspo with loss.ratio=behavior clips almost every response that an "
                "earlier policy sampled (sync.every above 1, or replay), because its bounds are "
                "3e-4 and 4e-4 from 1; set loss.ratio=prox_current with "
                "loss.weight_level=geometric"
            )
        if estimator == "opo" and self.optimizer.minibatch_prompts < self.batch_capacity:
            warnings.append(
                "advantage.estimator=opo is derived for exactly on-policy updates, but "
                f"optimizer.minibatch_prompts ({self.optimizer.minibatch_prompts}) is below the "
                f"batch capacity ({self.batch_capacity}), so later minibatches are off-policy; "
                "raise optimizer.minibatch_prompts"
            )
        unscaled = estimator == "group" and self.advantage.scale == "none"
        read = () if unscaled else _READ_BY_ESTIMATOR.get(estimator, ())
        unread = [key for key in ("std", "eps", "gamma", "lam", "whiten") if key not in read]
        unused = _changed("advantage", self.advantage, unread)
        # A plug-in gets the whole section.
        if estimator in ESTIMATOR_NAMES and unused:
            warnings.append(
                f"{' and '.join(unused)} change nothing with advantage.estimator={estimator}"
                f"{' and scale=none' if unscaled else ''}"
            )
        return warnings

    def _warnings_about_sampling(self) -> list[str]:
        """Returns warnings about the sampler."""
        warnings = []
        kind, revisits = self.sampler.kind, ["revisited_share", "revisit_above"]
        unread = ["select", "band", *revisits]  # by dots
        if kind == "uniform":
            unread = [key for key in SamplerConfig.model_fields if key != "kind"]
        elif kind == "mopps":
            band = ["band"] if self.sampler.select == "nearest" else []
            unread = ["temperature", *band, *revisits]
        elif kind == "exgrpo":
            unread = ["candidates", "decay", "half_life", "target", "select", "band"]
            unread.append("temperature")
        unused = _changed("sampler", self.sampler, unread)
        if unused:
            warnings.append(f"{' and '.join(unused)} change nothing with sampler.kind={kind}")
        if self.sampler.is_adaptive and self.sampler.as_of == "step" and self.sync.lag:
            warnings.append(
                f"sync.lag is {self.sync.lag} with sampler.as_of=step: the prompts of a step "
                "depend on the commit of the step before, so rollouts wait for the trainer in "
                "every step; set sampler.as_of=sync"
            )
        if kind == "dots":
            warnings.append(
                "sampler.kind=dots predicts difficulty by the posterior of each prompt's own "
                "results, not by the paper's embedding model, so every prompt that was never drawn "
                "counts as of medium difficulty (0.5); sampler.prior_run gives it results"
            )
        return warnings

    def _warnings_about_batches(self) -> list[str]:
        """Returns warnings about what batches are composed of."""
        warnings = []
        unused = _changed(
            "replay_window", self.replay_window, list(ReplayWindowConfig.model_fields)
        )
        if self.replay.select == "mixed" and unused:
            warnings.append(
                f"{' and '.join(unused)} change nothing with replay.select=mixed, which replays "
                "groups of any mixed rewards"
            )
        replayed = [key for key in ResponseReplayConfig.model_fields if key != "enabled"]
        unused = _changed("response_replay", self.response_replay, replayed)
        if unused and not self.response_replay.enabled:
            warnings.append(
                f"{' and '.join(unused)} change nothing with response_replay.enabled=False, the "
                "default"
            )
        absent = {
            "reevaluated": not self.reevaluate.enabled,
            "replayed": not (self.replay.enabled or self.response_replay.enabled),
            "demonstrated": self.demonstrations.join == "none",
        }
        warnings += [
            f"loss.by_source.{source} changes nothing: no batch of this run has such responses"
            for source in self.loss.by_source
            if absent.get(source)
        ]
        if self.demonstrations.join != "none" and self.reward.weights:
            parts = " and ".join(sorted(self.reward.weights))
            warnings.append(
                f"demonstrations have the reward of a correct answer ({self.reward.correct:g}) "
                f"without the part {parts} of reward.weights, so beside sampled responses that "
                "have it too, their advantage is negative; remove the weights, or set "
                "demonstrations.join=none"
            )
        fresh = self.rollout.prompts_per_step * self.rollout.max_generation_rounds
        if self.rollout.max_generation_rounds > 1 and self.batch_capacity > fresh:
            warnings.append(
                f"the batch capacity ({self.batch_capacity}) is above the {fresh} groups of all "
                "generation rounds (rollout.prompts_per_step x rollout.max_generation_rounds), so "
                "every step takes all rounds; lower batch.capacity, or raise one of these"
            )
        if self.batch.fresh_fraction < 1.0 and not self.replay.enabled:
            warnings.append(
                f"batch.fresh_fraction={self.batch.fresh_fraction} leaves room in every batch that "
                "nothing fills with replay.enabled=False; set replay.enabled=true, or "
                "batch.fresh_fraction=1"
            )
        if self.batch.fresh_fraction < 1.0 and self.batch.capacity is not None:
            warnings.append(
                f"batch.fresh_fraction={self.batch.fresh_fraction} changes nothing with "
                f"batch.capacity={self.batch.capacity}, which sets the batch's size"
            )
        return warnings

    def _warnings_about_unused_sections(self) -> list[str]:
        """Returns warnings about settings of what another setting turns off."""
        warnings = []
        for is_unused, condition, sections in self._unused_sections():
            keys = [
                key
                for name, (section, names) in sections.items()
                for key in _changed(name, section, names or tuple(type(section).model_fields))
            ]
            if is_unused and keys:
                warnings.append(f"{' and '.join(keys)} change nothing with {condition}")
        return warnings

    def _unused_sections(self) -> list[tuple[bool, str, dict[str, tuple[Section, Sequence[str]]]]]:
        """Returns whether a condition holds, the condition, and the keys that then have no effect.

        The keys are by section; without any, the whole section has none.
        """
        replay, window, reevaluate = self.replay, self.replay_window, self.reevaluate
        windowed = replay.enabled and replay.select == "window"
        estimator, fresh = self.advantage.estimator, self.fresh
        supervises = self.demonstrations.enabled
        return [
            (
                not replay.enabled,
                "replay.enabled=False",
                {
                    "replay": (replay, ["select", "last_step"]),
                    "hard_buffer": (self.hard_buffer, ["store_new_in_high"]),
                    "replay_window": (window, ()),
                    "high_quality_buffer": (self.high_quality_buffer, ()),
                },
            ),
            (
                windowed and window.direction == "off",
                "replay_window.direction=off",
                {"replay_window": (window, ["r_tot", "ema_decay"])},
            ),
            (
                windowed and window.direction != "off" and window.r_tot != "ema",
                f"replay_window.r_tot={window.r_tot}",
                {"replay_window": (window, ["ema_decay"])},
            ),
            (
                not reevaluate.enabled,
                "reevaluate.enabled=False",
                {
                    "reevaluate": (reevaluate, ["rule", "max_prompts"]),
                    "sync": (self.sync, ["reevaluate_every"]),
                },
            ),
            (
                not reevaluate.enabled and not supervises,
                "reevaluate.enabled=False",
                {"reevaluate": (reevaluate, ["c1"]), "hard_buffer": (self.hard_buffer, ())},
            ),
            (
                fresh.filter != "gaussian",
                f"fresh.filter={fresh.filter}",
                {"fresh": (fresh, ["gaussian_mean", "gaussian_sigma"])},
            ),
            (
                fresh.filter != "uniform",
                f"fresh.filter={fresh.filter}",
                {"fresh": (fresh, ["uniform_fraction"])},
            ),
            (
                estimator in ESTIMATOR_NAMES and estimator != "gae",
                f"advantage.estimator={estimator}",
                {"critic": (self.critic, ())},
            ),
            (
                self.kl.coefficient == 0,
                "kl.coefficient=0",
                {"kl": (self.kl, ["estimator", "reset_after"])},
            ),
            (
                self.loss.weight_mode == "unit",
                "loss.weight_mode=unit",
                {"loss": (self.loss, ["weight_cap", "weight_floor", "weight_norm"])},
            ),
            (
                self.rollout.engine != "vllm",
                f"rollout.engine={self.rollout.engine}",
                {"rollout": (self.rollout, ["dtype", "vllm_args"])},
            ),
            (
                not self.mlflow.tracking_uri,
                "an empty mlflow.tracking_uri",
                {"mlflow": (self.mlflow, ["experiment"])},
            ),
            (
                self.lora.rank == 0,
                "lora.rank=0",
                {"lora": (self.lora, ["alpha", "targets"])},
            ),
            (
                self.reward.overlong_share == 0,
                "reward.overlong_share=0",
                {"reward": (self.reward, ["overlong_weight"])},
            ),
        ]

    def _empty_windows(self) -> float:
        """Returns the share of r_tot in [0, 1] at which no accuracy k/G is in the window."""
        settings, size = self.replay_window, self.rollout.group_size
        windows = [
            replay_window(share / 1000, settings.c2_range, settings.c3_range, settings.direction)
            for share in range(1001)
        ]
        empty = [not any(within(k / size, c2, c3) for k in range(size + 1)) for c2, c3 in windows]
        return sum(empty) / len(empty)


_READ_BY_ESTIMATOR: dict[str, tuple[str, ...]] = {
    "group": ("std", "eps"),
    "gae": ("gamma", "lam", "whiten"),
    "reinforce_pp": ("gamma",),
    "maxrl": ("eps",),
}
"""The keys of the section `advantage` that a built-in estimator reads, besides `scale`."""


def _changed(name: str, section: Section, keys: Sequence[str]) -> list[str]:
    """Returns `name.key=value` for each of the section's keys that has not its default."""
    fields = type(section).model_fields
    values = {key: getattr(section, key) for key in keys}
    return [
        f"{name}.{key}={value}"
        for key, value in values.items()
        if value != fields[key].get_default(call_default_factory=True)
    ]
