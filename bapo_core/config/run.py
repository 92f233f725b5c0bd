"""A run's configuration: its name, its preset, and its sections, which the modules beside hold.

Defaults are those of Table 3 of arXiv 2602.20722 and, where the paper is silent or differs from its
authors' code, those argued in `docs/decisions/`. Each field's docstring is its description in
`docs/configuration.md` and in `docs/config.schema.json`. Symbols are the paper's: X1, X2 and X3 are
the sources of a batch; B_bad and B_high are the hard and the high-quality buffer; mu is a group's
accuracy; alpha is the rollout policy, and theta_t the trainer's weights before update t.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from bapo_core.config.base import Section
from bapo_core.config.batches import (
    AnyBatchConfig,
    AnyResponseReplayConfig,
    BatchConfig,
    DemonstrationsConfig,
    FreshConfig,
    HardBufferConfig,
    HighQualityBufferConfig,
    NoResponseReplayConfig,
    RangeFilterConfig,
    ReevaluateConfig,
    ReplayConfig,
    ReplayWindowConfig,
    WindowReplayConfig,
)
from bapo_core.config.checks import list_warnings, refuse_contradictions
from bapo_core.config.estimators import AdvantageConfig, GroupAdvantageConfig
from bapo_core.config.evaluation import (
    GREEDY_TEMPERATURE,
    TEST_SET,
    EvaluationConfig,
    EvaluationSet,
    EvaluationSetConfig,
)
from bapo_core.config.loss import KLConfig, LossConfig
from bapo_core.config.presets import PRESETS
from bapo_core.config.rollouts import (
    JOURNAL_INTERVAL_S,
    LONG_RESPONSE_TOKENS,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    SyncConfig,
    TaskConfig,
)
from bapo_core.config.samplers import (
    AdaptiveConfig,
    AnySamplerConfig,
    CandidatesConfig,
    UniformConfig,
)
from bapo_core.config.training import (
    CheckpointConfig,
    LoraConfig,
    MlflowConfig,
    OptimizerConfig,
    TrainerConfig,
)
from bapo_core.reward_files import RewardFunctions
from bapo_core.schedule import SyncSchedule


def _check_algorithm(name: str) -> str:
    if name not in PRESETS:
        raise ValueError(f"{name!r} is not one of {', '.join(sorted(PRESETS))}")
    return name


class RunConfig(Section):
    """The configuration of a run: its name, its preset, and the sections of its keys."""

    name: str = Field("countdown", pattern=r"^[a-z][a-z0-9-]{0,62}$")
    """Name of the run: lower-case letters, digits and hyphens, starting with a letter."""
    algorithm: Annotated[
        str, AfterValidator(_check_algorithm), Field(json_schema_extra={"enum": [*PRESETS]})
    ] = "bapo"
    """Preset, whose values replace the defaults; the file's values replace the preset's."""
    seed: int = Field(42, ge=0)
    """Seed from which every random draw of the run is derived (Table 3: 42)."""
    steps: int = Field(471, ge=1)
    """T, the number of training steps."""
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    sampler: AnySamplerConfig = UniformConfig()
    """Sampler of prompts (docs/methods.md): which prompts of the dataset a step rolls out; a
    built-in kind, or one that an installed package adds (docs/adding-a-method.md)."""
    sync: SyncConfig = SyncConfig()
    fresh: FreshConfig = RangeFilterConfig()
    """Fresh groups, the source X1 of a batch: the filter that this step's rollouts pass."""
    reevaluate: ReevaluateConfig = ReevaluateConfig()
    replay: ReplayConfig = WindowReplayConfig()
    """Replayed groups, the source X3 of a batch: which groups are stored and replayed."""
    response_replay: AnyResponseReplayConfig = NoResponseReplayConfig()
    """Response replay: fresh groups that single responses of earlier steps join."""
    demonstrations: DemonstrationsConfig = DemonstrationsConfig()
    hard_buffer: HardBufferConfig = HardBufferConfig()
    batch: AnyBatchConfig = BatchConfig()
    """Rule by which batches are composed and buffers are kept: `algorithm1`, of the paper, which
    the keys of this section and of the buffers configure; or one that an installed package adds
    (docs/adding-a-method.md)."""
    advantage: AdvantageConfig = GroupAdvantageConfig()
    """Estimator of advantages (docs/methods.md): from the statistics of a group (Eq. 2), of the
    batch, or from a critic (A.9); or one that an installed package adds."""
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
        sampler = self.sampler
        candidates = sampler.candidates if isinstance(sampler, CandidatesConfig) else 1
        return self.rollout.prompts_per_step * candidates

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

    def reevaluates_at(self, t: int) -> bool:
        """Whether hard prompts are answered again at step t (X2)."""
        return self.reevaluate.enabled and self.schedule.reevaluates_at(t)

    def replays_at(self, t: int) -> bool:
        """Whether the batch of step t may have replayed groups (X3)."""
        if self.replay.select == "off":
            return False
        return self.replay.last_step is None or t <= self.replay.last_step

    @property
    def high_quality_buffer(self) -> HighQualityBufferConfig:
        """The high-quality buffer B_high, with its defaults in a run without replay."""
        replay = self.replay
        if replay.select == "off":
            return HighQualityBufferConfig()
        if replay.select == "effective_sample_size":
            return HighQualityBufferConfig(capacity=replay.buffer.capacity, max_age=None)
        return replay.buffer

    @property
    def replay_window(self) -> ReplayWindowConfig:
        """The replay window, with its defaults where X3 is not chosen by one."""
        replay = self.replay
        return replay.window if replay.select == "window" else ReplayWindowConfig()

    @property
    def replays_all_mixed(self) -> bool:
        """Whether all groups whose rewards differ may be replayed, not only groups in a window."""
        return self.replay.select in ("mixed", "effective_sample_size")

    @property
    def replays_reevaluated(self) -> bool:
        """Whether re-evaluated groups enter B_high as well as fresh ones."""
        return self.replay.select != "off" and self.replay.store_reevaluated

    @property
    def most_reevaluated(self) -> int:
        """Most prompts of a re-evaluation: `reevaluate.max_prompts`, or half of B."""
        return self.reevaluate.max_prompts or max(1, self.rollout.prompts_per_step // 2)

    @property
    def hard_capacity(self) -> int:
        """Most groups in B_bad: `hard_buffer.capacity`, or B."""
        return self.hard_buffer.capacity or self.rollout.prompts_per_step

    def with_reward(self, functions: RewardFunctions) -> RunConfig:
        """Returns the configuration with these reward functions in place of its own."""
        one = isinstance(self.task.reward, str)
        reward = functions.addresses[0] if one else functions.addresses
        task = self.task.model_copy(update={"reward": reward})
        return self.model_copy(update={"task": task})

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
            options={**self.task.arguments, **settings.options},
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
        engine = self.rollout.engine
        if engine.kind != "vllm":
            return 0.0
        if engine.journal_interval_s is not None:
            return engine.journal_interval_s
        long = self.rollout.max_response_tokens > LONG_RESPONSE_TOKENS
        return JOURNAL_INTERVAL_S if long else 0.0

    @property
    def interrupts_rollouts(self) -> bool:
        """Whether new weights interrupt rollouts.

        That takes an engine that streams tokens, and rollouts that run ahead of the trainer.
        """
        ahead = self.sync.lag > 0 and self.rollout.max_generation_rounds == 1
        return self.sync.interrupt_rollouts and ahead and self.rollout.engine.kind == "vllm"

    def rollout_version(self, t: int, kind: str) -> int:
        """Returns the policy version that samples at step t: alpha for `fresh`, else theta_t."""
        return self.schedule.policy_version(t) if kind == "fresh" else t

    def sampled_as_of(self, t: int) -> int:
        """Returns the step whose commit the prompts of step t depend on; 0 for none."""
        if not isinstance(self.sampler, AdaptiveConfig):
            return 0
        return (
            self.schedule.policy_version(t) if self.sampler.posterior_as_of == "sync" else t
        ) - 1

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
        """Whether theta_t is published: for a sync, a re-evaluation, or an evaluation.

        With a lag, the syncs after the last step count too: a run that gets more steps later goes
        on with the weights of steps before its checkpoint, which no trainer has any more.
        """
        within = t <= self.steps
        return (
            t == 1
            or (within and self.schedule.syncs_at(t + self.sync.lag))
            or (within and self.reevaluates_at(t))
            or self.evaluates_at(t)
        )

    def checkpoints_after(self, step: int) -> bool:
        """Whether a checkpoint is taken after `step`: at the end, and before every step that
        `checkpoint.every` divides, as the steps with a sync are those that v divides."""
        return (step + 1) % self.checkpoint.every == 0 or step == self.steps

    def explain_prompts_needed(self) -> str:
        """Describes `prompts_needed` and the keys that it is the product of, for errors."""
        factors = ["rollout.prompts_per_step", "rollout.max_generation_rounds"]
        if self.sampler.selects_candidates:
            factors.append("sampler.candidates")
        return f"one step may draw {self.prompts_needed} ({' x '.join(factors)})"

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        refuse_contradictions(self)
        return self

    def warnings(self) -> list[str]:
        """Returns warnings about settings that are valid and surprising."""
        return list_warnings(self)
