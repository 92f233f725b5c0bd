"""The configuration of a run: every switch of the method, with its source and default.

Defaults are Table 3 of arXiv 2602.20722 and, where the paper is silent or differs from the
authors' code, the choice argued in `docs/decisions/`. Unknown keys are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from bapo_core.schedule import SyncSchedule

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
]

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Part of a configuration. Unknown keys are refused; field docstrings are descriptions."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelConfig(Section):
    path: str = "tiny"
    """A Hugging Face model directory; `hf://organisation/name`, fetched from the hub; or `tiny`,
    the built-in small model, built on first use."""


class TaskConfig(Section):
    name: str = "countdown"
    """A task of the registry (`bapo_core.tasks`)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the task, for example `template: short` or `template: think`."""
    train_path: str | None = None
    """Training prompts, Parquet or JSONL. Generated when absent and the task is synthetic."""
    test_path: str | None = None
    """Held-out prompts, Parquet or JSONL. Generated when absent and the task is synthetic."""
    train_prompts: int = Field(2000, ge=1)
    """How many training prompts to generate, or at most to take from the file."""
    test_prompts: int = Field(200, ge=1)
    """How many held-out prompts to generate, or at most to take from the file."""
    data_seed: int = 0
    """Seed of the generated data. Separate from `seed`, so seeds share the same data."""


class RolloutConfig(Section):
    engine: Literal["transformers", "vllm"] = "transformers"
    """What generates: vLLM in production, transformers where there is no vLLM."""
    replicas: int = Field(1, ge=1)
    """Engines that a local run starts. In a cluster, any number may come and go."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What vLLM computes in: float32 on CPU, bfloat16 on GPU, unless given."""
    vllm_args: list[str] = []
    """More arguments for vLLM's server, `[--tensor-parallel-size, "2"]` for example."""
    prompts_per_step: int = Field(256, ge=1)
    """B: prompts rolled out for each step (Table 3: 256)."""
    group_size: int = Field(8, ge=2)
    """G: responses a prompt (Table 3: 8). One response has no group statistics, so at least 2."""
    temperature: float = Field(1.0, gt=0.0)
    """Sampling temperature; the trainer divides its logits by the same number (Table 3: 1)."""
    top_p: float = 1.0
    """Must be 1: a truncated distribution biases every importance ratio (Table 3: 1)."""
    top_k: int = -1
    """Must be -1 (off), for the same reason (Table 3: -1)."""
    max_prompt_tokens: int = Field(2048, ge=1)
    """Longer prompts are refused when the data is loaded (Table 3: 2048)."""
    max_response_tokens: int = Field(8192, ge=1)
    """Responses are cut here (Table 3: 8192)."""
    max_generation_rounds: int = Field(1, ge=1)
    """DAPO's dynamic sampling: rounds of B prompts until B groups pass the filter. 1 = off."""

    @model_validator(mode="after")
    def _whole_distribution(self) -> RolloutConfig:
        if self.top_p != 1.0:
            raise ValueError(
                f"top_p is {self.top_p}: training rollouts must sample the whole distribution, "
                "or the importance ratios are biased; set top_p to 1"
            )
        if self.top_k != -1:
            raise ValueError(
                f"top_k is {self.top_k}: training rollouts must sample the whole distribution, "
                "or the importance ratios are biased; set top_k to -1"
            )
        return self


class SyncConfig(Section):
    every: int = Field(5, ge=1)
    """v: steps between refreshes of the rollout policy (Table 3: 5). 1 = on-policy."""
    reevaluate_every: int = Field(5, ge=1)
    """m: steps between re-evaluations of hard prompts (Table 3: 5)."""
    phase: Literal["algorithm1", "first_step"] = "algorithm1"
    """Sync when t mod v = 0 (Algorithm 1) or when (t-1) mod v = 0 (authors' code)."""
    weights_dtype: Literal["as_trained", "float32", "bfloat16"] = "as_trained"
    """Of the published weights. bfloat16 halves what is sent, and rounds what is served."""
    transport: Literal["object_store", "nccl"] = "object_store"
    """How replicas get weights. nccl: from the trainer's GPU to vLLM's, and the object store when
    that fails (experimental: has not run on GPUs yet; all versions are stored either way)."""


class FreshConfig(Section):
    filter: Literal["range", "gaussian", "uniform", "none"] = "range"
    """Online filter on fresh groups (A.3): range keeps 1/G <= mu <= (G-1)/G."""
    gaussian_mean: Fraction = 0.5
    """Centre of the Gaussian filter (Table 3: 0.5)."""
    gaussian_sigma: float = Field(0.2, gt=0.0)
    """Width of the Gaussian filter (Table 3: 0.2)."""
    uniform_fraction: Fraction = 0.6
    """Share of groups that the uniform filter keeps (A.3: 60%)."""


class ReevaluateConfig(Section):
    enabled: bool = True
    """Off: the ablation "without X2"."""
    c1: Fraction = 0.125
    """Groups with mu <= c1 are hard (Table 3: 1/8)."""
    rule: Literal["paper", "improved_window", "any_gain"] = "paper"
    """Who is promoted: c1 < mu_new < 1 (Eq. 6); mu_stored < mu_new < 1; or any gain,
    mu_new = 1 included (authors' code)."""
    max_prompts: int = Field(128, ge=1)
    """At most this many hard prompts are re-evaluated at a time (Table 3: 128)."""


class HardBufferConfig(Section):
    capacity: int | None = Field(None, ge=1)
    """Entries of B_bad, first in first out; null = B (the paper's 256)."""
    after: Literal["drop_solved", "keep"] = "drop_solved"
    """After re-evaluation: drop a prompt whose mu_new exceeds c1, or keep it until evicted."""
    store_new_in_high: bool = False
    """Whether re-evaluated groups of medium difficulty enter B_high too."""


class ReplayConfig(Section):
    enabled: bool = True
    """Off: the ablation "without X3"."""


class HighQualityBufferConfig(Section):
    capacity: int = Field(256, ge=1)
    """Entries of B_high, first in first out (Table 3: 256)."""
    max_age: int = Field(3, ge=1)
    """Replay only groups of the last this many steps: t - max_age <= step <= t - 1."""


class ReplayWindowConfig(Section):
    direction: Literal["eq8", "easy_to_hard", "off"] = "eq8"
    """How [c2, c3] follows the mean reward: rising (Eq. 8), falling (authors' code), fixed."""
    c2_range: tuple[Fraction, Fraction] = (0.125, 0.5)
    """Lowest and highest c2 (Table 3: 1/8, 4/8)."""
    c3_range: tuple[Fraction, Fraction] = (0.25, 0.625)
    """Lowest and highest c3 (Table 3: 2/8, 5/8)."""
    r_tot: Literal["batch", "ema", "buffer"] = "batch"
    """r_tot of Eq. 8: mean reward of this step's unfiltered fresh groups; its moving average; or
    the mean over both buffers (authors' code)."""
    ema_decay: float = Field(0.9, ge=0.0, lt=1.0)
    """Decay of the moving average."""

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
                    f"c2 is above c3 at the {end} end ({c2} > {c3}): the window [c2, c3] would be "
                    "empty; lower c2_range or raise c3_range"
                )
        return self


class BatchConfig(Section):
    capacity: int | None = Field(None, ge=1)
    """Groups in a training batch; null = B. Never padded."""
    dedup: Literal["prompt", "rollout"] = "prompt"
    """What makes two buffer entries the same: the dataset's prompt (newest replaces, and
    X1 > X2 > X3 in a batch), or the rollout (authors' code)."""


class AdvantageConfig(Section):
    std: Literal["population", "sample"] = "population"
    """(r - mean) / sqrt(var + eps) (Eq. 2), or the sample deviation with eps outside (code)."""
    eps: float = Field(1e-6, gt=0.0)
    """eps of Eq. 2."""
    estimator: Literal["group", "gae"] = "group"
    """group: Eq. 2, from the other responses to the prompt. gae: from a critic, token by token."""
    gamma: Fraction = 1.0
    """Discount of GAE."""
    lam: Fraction = 1.0
    """lambda of GAE (Table 3: 1)."""
    whiten: bool = True
    """Scale GAE's advantages to mean 0 and deviation 1 over the batch."""


class CriticConfig(Section):
    learning_rate: float = Field(1e-5, gt=0.0)
    """AdamW of the critic, where there is one (`advantage.estimator: gae`)."""
    clip: float = Field(0.5, gt=0.0)
    """How far a value may move in a step before its loss stops to fall."""


class LossConfig(Section):
    ratio: Literal["prox_current", "behavior", "decoupled"] = "prox_current"
    """Importance correction. prox_current: PPO ratio theta/theta_t, weight theta_t/behaviour
    for every source. behavior: theta/behaviour (Eq. 3). decoupled: prox is theta_t for X1 and X2,
    and the trainer at storage time for X3 (authors' code)."""
    clip_center: Literal["one", "current"] = "one"
    """Centre of the clip under `behavior`: 1, or theta_t/behaviour (delayed GRPO)."""
    clip_low: float = Field(0.2, gt=0.0)
    """Lower clip width (released script: 0.2)."""
    clip_high: float = Field(0.28, gt=0.0)
    """Upper clip width (released script: 0.28)."""
    dual_clip: float | None = Field(10.0, gt=1.0)
    """Bound on the loss of a bad token whose ratio exploded; null = off (released script: 10)."""
    weight_cap: float = Field(3.0, gt=0.0)
    """Truncation of the importance weights (released script: 3)."""
    weight_level: Literal["token", "sequence", "geometric"] = "token"
    """What an importance weight is computed over (released script: token)."""
    aggregation: Literal["token-mean", "seq-mean-token-mean"] = "token-mean"
    """How token losses become one number (released script: token-mean; Eq. 1: per sequence)."""
    norm: Literal["actual", "nominal"] = "actual"
    """Divide a short last minibatch by its own size, or by the nominal one (authors' code)."""
    entropy_coefficient: float = Field(0.001, ge=0.0)
    """Weight of the entropy bonus (Table 3: 0.001)."""

    @model_validator(mode="after")
    def _center_needs_behavior(self) -> LossConfig:
        if self.clip_center == "current" and self.ratio != "behavior":
            raise ValueError(
                f"clip_center is 'current' but ratio is '{self.ratio}': only the behavior ratio "
                "has a centre to move; set ratio to behavior or clip_center to one"
            )
        return self


class KLConfig(Section):
    coefficient: float = Field(0.001, ge=0.0)
    """beta of Eq. 3 (Table 3: 0.001). 0 = off."""
    reference: Literal["rollout", "initial"] = "rollout"
    """KL to the rollout policy (Eq. 3), or to the initial model (Eq. 1, GRPO)."""
    estimator: Literal["k1", "k2", "k3", "iw"] = "k3"
    """k3 is unbiased only for samples of pi_theta; iw = rho log rho - rho + 1 corrects for it."""


class OptimizerConfig(Section):
    learning_rate: float = Field(1e-6, gt=0.0)
    """AdamW (Table 3: 1e-6)."""
    weight_decay: float = Field(0.1, ge=0.0)
    """Decoupled weight decay (released script: 0.1)."""
    warmup_steps: int = Field(10, ge=0)
    """Training steps of linear warm-up (released script: 10)."""
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """Decay of the first moment."""
    beta2: float = Field(0.999, ge=0.0, lt=1.0)
    """Decay of the second moment."""
    gradient_clip: float = Field(1.0, gt=0.0)
    """Largest gradient norm (released script: 1)."""
    minibatch_prompts: int = Field(64, ge=1)
    """Groups an optimizer update (Table 3: 64, so 4 updates a step)."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Tokens a forward pass; bounds memory, never changes the result."""


class EvaluationConfig(Section):
    every: int = Field(20, ge=1)
    """k: steps between evaluations of the current policy on the held-out prompts."""
    samples: int | None = Field(None, ge=1)
    """Responses a prompt; null = G."""
    temperature: float | None = Field(None, gt=0.0)
    """null = the rollout temperature."""


class CheckpointConfig(Section):
    every: int = Field(5, ge=1)
    """Steps between checkpoints; a resumed run repeats at most this many."""
    keep: int = Field(2, ge=1)
    """How many checkpoints to keep: the latest."""
    keep_best: int = Field(0, ge=0)
    """How many to keep besides: those with the best evaluations."""


class TrainerConfig(Section):
    processes: int = Field(1, ge=1)
    """Processes that a local run trains with, each holding a shard. In a cluster the job says."""
    gradient_checkpointing: Literal["none", "selective", "full"] = "none"
    """What is computed again on the way back, to save memory: nothing; what is cheap, so that the
    results of matrix products and attention are kept; everything but each layer's input, for a
    third more time. The result is the same."""
    compile: bool = False
    """Compile each layer (torch.compile): faster steps after a slow first one."""
    offload: bool = False
    """Keep weights, gradients and moments in the CPU's memory, and on the GPU only the layers at
    work: for models that do not fit. On CPUs it changes nothing."""
    profile_steps: int = Field(0, ge=0)
    """Trace so many steps, after the first one (docs/trainer.md); 0 = none."""

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _as_it_was_once(cls, value: object) -> object:
        return ("full" if value else "none") if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _compiles(self) -> TrainerConfig:
        if self.compile and self.gradient_checkpointing == "selective":
            raise ValueError(
                "compile goes with gradient_checkpointing none or full: what is kept of a layer "
                "that is compiled is the compiler's choice"
            )
        return self


class MlflowConfig(Section):
    tracking_uri: str = ""
    """Of an MLflow that gets the metrics too, http://mlflow:5000 for example; empty = none."""
    experiment: str = "bapo"
    """Where MLflow shows the run."""


class LoraConfig(Section):
    rank: int = Field(0, ge=0)
    """Rank of the adapters that are trained instead of the model's own weights; 0 = none."""
    alpha: int = Field(16, ge=1)
    """What the adapters add is multiplied by alpha / rank."""
    targets: list[str] = Field(default_factory=lambda: ["all-linear"], min_length=1)
    """Layers that get adapters, such as q_proj; all-linear: every one but the output layer."""


class RunConfig(Section):
    name: str = Field("countdown", pattern=r"^[a-z][a-z0-9-]{0,62}$")
    """Lower-case letters, digits and hyphens, starting with a letter."""
    algorithm: Algorithm = "bapo"
    """A preset; whatever the file sets besides wins over it."""
    seed: int = Field(42, ge=0)
    """Seed of everything random (Table 3: 42)."""
    steps: int = Field(471, ge=1)
    """T: training steps."""
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    rollout: RolloutConfig = RolloutConfig()
    sync: SyncConfig = SyncConfig()
    fresh: FreshConfig = FreshConfig()
    reevaluate: ReevaluateConfig = ReevaluateConfig()
    replay: ReplayConfig = ReplayConfig()
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
        return SyncSchedule(self.sync.every, self.sync.reevaluate_every, self.sync.phase)

    @property
    def batch_capacity(self) -> int:
        return self.batch.capacity or self.rollout.prompts_per_step

    @property
    def hard_capacity(self) -> int:
        return self.hard_buffer.capacity or self.rollout.prompts_per_step

    @property
    def evaluation_samples(self) -> int:
        return self.evaluation.samples or self.rollout.group_size

    @property
    def evaluation_temperature(self) -> float:
        return self.evaluation.temperature or self.rollout.temperature

    def rollout_version(self, t: int, kind: str) -> int:
        """Which weights make rollouts at step t: alpha for fresh ones, theta_t for the others."""
        return self.schedule.policy_version(t) if kind == "fresh" else t

    def evaluates_at(self, t: int) -> bool:
        """Whether theta_t is evaluated: the base, every k steps, and the final weights."""
        return t == 1 or t % self.evaluation.every == 0 or t == self.steps + 1

    def publishes_at(self, t: int) -> bool:
        """Whether somebody needs theta_t: a sync, a re-evaluation, or an evaluation."""
        within = t <= self.steps
        return (
            t == 1
            or (within and self.schedule.syncs_at(t))
            or (within and self.reevaluate.enabled and self.schedule.reevaluates_at(t))
            or self.evaluates_at(t)
        )

    def checkpoints_after(self, step: int) -> bool:
        """Whether a checkpoint holds the state after `step`; aligned with the syncs."""
        return (step + 1) % self.checkpoint.every == 0 or step == self.steps

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        minibatch = self.optimizer.minibatch_prompts
        if self.batch_capacity < minibatch:
            raise ValueError(
                f"the batch capacity ({self.batch_capacity} groups) is below one minibatch "
                f"({minibatch}); raise batch.capacity or rollout.prompts_per_step, or lower "
                "optimizer.minibatch_prompts"
            )
        longest = self.rollout.max_prompt_tokens + self.rollout.max_response_tokens
        if self.optimizer.microbatch_tokens < longest:
            raise ValueError(
                f"optimizer.microbatch_tokens ({self.optimizer.microbatch_tokens}) is below the "
                f"longest sequence, rollout.max_prompt_tokens + rollout.max_response_tokens "
                f"({longest}); raise the former"
            )
        if self.sync.transport == "nccl" and self.rollout.engine != "vllm":
            raise ValueError(
                f"sync.transport is nccl, which the {self.rollout.engine} engine does not know; "
                "set rollout.engine to vllm, or sync.transport to object_store"
            )
        if self.checkpoint.keep_best and self.evaluation.every % self.checkpoint.every:
            raise ValueError(
                f"checkpoint.keep_best needs checkpoints of what is evaluated: make "
                f"evaluation.every ({self.evaluation.every}) a multiple of checkpoint.every "
                f"({self.checkpoint.every})"
            )
        needed = self.rollout.prompts_per_step * self.rollout.max_generation_rounds
        if self.task.train_prompts < needed:
            raise ValueError(
                f"task.train_prompts is {self.task.train_prompts} but one step may draw {needed} "
                "(rollout.prompts_per_step x rollout.max_generation_rounds); raise the former"
            )
        return self

    def warnings(self) -> list[str]:
        """What works but costs more than it looks."""
        found = []
        if self.reevaluate.enabled and not self.schedule.one_load_serves_both:
            found.append(
                f"sync.every (v={self.sync.every}) does not divide sync.reevaluate_every "
                f"(m={self.sync.reevaluate_every}) or the phase is first_step: the engine loads "
                "the current weights for each re-evaluation and goes back. Correct, but slower."
            )
        if self.batch_capacity % self.optimizer.minibatch_prompts:
            found.append(
                f"optimizer.minibatch_prompts ({self.optimizer.minibatch_prompts}) does not divide "
                f"the batch capacity ({self.batch_capacity}): the last minibatch is short."
            )
        return found
