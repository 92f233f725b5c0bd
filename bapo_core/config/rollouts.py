"""The sections of model, task, rollouts, rewards and weight synchronisation."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from bapo_core.config.base import Kinds, Section, UnitInterval
from bapo_core.config.vllm_arguments import check_vllm_arguments
from bapo_core.reward_files import FUNCTION, RewardFunctions

DEFAULT_PROMPT_DATE = date(2024, 7, 26)
"""The default of `rollout.prompt_date`."""
LONG_RESPONSE_TOKENS = 1024
"""Responses that may have more tokens are journalled by default."""
JOURNAL_INTERVAL_S = 1.0
"""The default of `rollout.engine.journal_interval_s` where there is a journal."""


EvaluationMeasure = Literal["accuracy", "reward"]


class ModelConfig(Section):
    """The initial model, which is policy version 1."""

    path: str = "tiny"
    """The initial model: a Hugging Face model directory; `hf://organisation/name[@revision]`,
    fetched from the hub; `s3://bucket/prefix`, where the objects of such a directory are; or one of
    the small character-level models that come with bapo: `tiny`; `tiny-sorting` and
    `tiny-distinct`, for the tasks `sorting` and `distinct`; or `tiny-vision`, which reads diagrams
    of the task `geometry`. bapo runs no code of models: types that transformers does not have, and
    weights that are pickles, are refused."""
    freeze_vision: bool = False
    """Whether the vision tower of a model that reads images keeps its weights: fewer gradients and
    optimizer states, and smaller checkpoints. It has no effect on other models."""


class TaskConfig(Section):
    """The task: its prompts, and how responses are verified."""

    name: str = "countdown"
    """Name of the task: `countdown`, `distinct`, `geometry`, `math`, `reasoning_gym`, `sorting`
    (docs/verifier.md), or one that an installed package adds (docs/adding-a-task.md); `function` if
    `reward` is set."""
    reward: str | list[str] | None = None
    """Reward function in place of a task: `file.py:function`, with TRL's signature
    `def function(completions, **columns) -> list[float]`, for data with a column `prompt`
    (docs/adding-a-task.md). Further functions of the file, in a list, are parts of the reward that
    `reward.weights` weighs. `task.name` is then `function`. The file is stored with the run: its
    digest follows as `@…`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the task's constructor, for example `{template: short}` for `countdown`."""
    train_path: str | None = None
    """Address of the training prompts: a Parquet, JSONL or JSON file,
    `hf://organisation/name[@revision][:split]`, `s3://bucket/key`, or `dataset:NAME` for what
    `bapo dataset upload` stored; null generates them, if the task can."""
    test_path: str | None = None
    """Address of the held-out prompts, in the forms of `train_path`."""
    solved_at: float | None = None
    """Reward of a verdict from which a response counts as correct, for tasks whose rewards are any
    numbers: for the accuracy k/G of a group and all that follows from it (difficulty, buffers,
    replay window, adaptive samplers), and in evaluations. It is compared with the number that the
    task returns, before the section `reward` weighs it. Null is the verdict's status `ok`."""
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

    @property
    def functions(self) -> RewardFunctions | None:
        """The reward functions of `reward`, if it is set."""
        return None if self.reward is None else RewardFunctions.parse(self.reward)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the task's constructor: `options`, or `reward`."""
        return dict(self.options) if self.reward is None else {"reward": self.reward}

    @property
    def measure(self) -> EvaluationMeasure:
        """Measure by which evaluations of the task are compared: the mean reward for a reward
        function, and the mean accuracy otherwise.

        A reward function has no notion of a correct response, unless `solved_at` gives it one.
        """
        no_notion = self.reward is not None and self.solved_at is None
        return "reward" if no_notion else "accuracy"

    def rank(self, *, accuracy: float, reward: float) -> tuple[float, float]:
        """Returns what orders evaluations from the worst to the best: `measure`, then the reward.

        accuracy, reward: means over the responses. Of equal accuracies, the reward decides, so that
        it also does for a task class that calls no response correct.
        """
        return (reward if self.measure == "reward" else accuracy), reward

    @model_validator(mode="before")
    @classmethod
    def _name_function(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("reward") is not None:
            return {"name": FUNCTION, **values}
        return values

    @model_validator(mode="after")
    def _check_reward(self) -> TaskConfig:
        if self.reward is None:
            if self.name == FUNCTION:
                raise ValueError(
                    f"name is {FUNCTION} without reward; set task.reward to file.py:function"
                )
            return self
        if self.name != FUNCTION:
            raise ValueError(
                f"reward is set beside name={self.name}; remove one of them: a reward function "
                "takes the place of a task"
            )
        if self.options:
            message = "options are set beside reward; remove them: a reward function has none"
            if "system" in self.options:
                message += (
                    ", and a system prompt is a message with the role system in a prompt of the "
                    "data, which may be a list of chat messages"
                )
            raise ValueError(message)
        try:
            RewardFunctions.parse(self.reward)
        except ValueError as error:
            raise ValueError(f"reward {error}") from error
        return self


class TransformersConfig(Section):
    """The engine that runs in the replica's own process, by Hugging Face transformers. It generates
    responses as a whole, so that it neither continues nor journals them."""

    kind: Literal["transformers"] = "transformers"


class VllmConfig(Section):
    """The engine vLLM, in a process of its own."""

    kind: Literal["vllm"] = "vllm"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; `auto` is float32 on CPUs and bfloat16 on GPUs."""
    args: list[str] = Field(default_factory=list)
    """Additional arguments of vLLM's server, for example `[--tensor-parallel-size, "2"]`:
    arguments for memory, batching and sharding, by their whole names. The operator sets all other
    arguments, such as ones that load code or open addresses, in `BAPO_VLLM_ARGS`."""
    journal_interval_s: float | None = Field(None, ge=0.0)
    """Seconds between two writes of the journal, which holds the tokens of unfinished responses, so
    that those are continued after a process has died; 0 turns it off. Null is 1 if responses may
    have more than 1024 tokens, else 0."""

    @field_validator("args")
    @classmethod
    def _check_args(cls, args: list[str]) -> list[str]:
        check_vllm_arguments(args)
        return args


_Engine = TransformersConfig | VllmConfig
EngineConfig = Annotated[_Engine, Kinds(_Engine)]
"""A section `rollout.engine`."""


class RolloutConfig(Section):
    """Rollouts: how many responses are sampled in a step, by which engine, and how."""

    engine: EngineConfig = TransformersConfig()
    """Rollout engine: `vllm` for production; `transformers` needs no other installation."""
    replicas: int = Field(1, ge=1)
    """Number of rollout engines that a local run starts; a cluster's chart sets its own."""
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
    prompt_date: date = DEFAULT_PROMPT_DATE
    """Date that chat templates print which print today's (Llama 3.2, SmolLM3). It is fixed, so that
    prompts are the same tomorrow, in all runs of a comparison and in `bapo eval`; the default is
    the date of Llama 3.2's template for programs without a clock."""
    max_prompt_tokens: int = Field(2048, ge=1)
    """Length of the longest prompt in tokens; with a longer one, a run does not start, unless
    `task.drop_long_prompts` leaves it out (Table 3: 2048)."""
    max_response_tokens: int = Field(8192, ge=1)
    """Length in tokens at which a response is cut off (Table 3: 8192)."""
    max_generation_rounds: int = Field(1, ge=1)
    """Dynamic sampling (DAPO): the most rounds of B prompts that are rolled out in a step until
    groups whose rewards differ fill the batch; 1 turns it off. The next step goes on with the next
    prompt, so no prompt is skipped."""

    @field_validator("prompt_date", mode="before")
    @classmethod
    def _replace_null(cls, value: Any) -> Any:
        """Reads configurations that were stored when null was the day of the run's creation."""
        return DEFAULT_PROMPT_DATE if value is None else value

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
    """The reward of a response, from the parts of its verdict. Groups whose rewards differ train.
    Difficulty does not depend on this section: the accuracy k/G of a group counts correct responses
    (`task.solved_at`)."""

    wrong: float = 0.0
    """Reward of an answer to which the verifier gives 0, for example -1 (DAPO)."""
    correct: float = 1.0
    """Reward of an answer to which the verifier gives 1; partial credit lies in between."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weights of further parts of the task's verdicts, which are added to the reward: `format` of
    `countdown` and `math`, which is 1 for a response that has an answer."""
    overlong_share: UnitInterval = 0.0
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
