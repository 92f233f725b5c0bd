"""What the keys of TRL, verl and prime-rl are called here, or what takes their place.

The names are those of TRL 1.16 (`GRPOConfig`), verl 0.9 (its Hydra configuration) and prime-rl 0.9
(its TOML files). `docs/coming-from.md` shows them, and messages for unknown keys name what was
meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class _Names:
    """Names of one setting in other systems."""

    trl: tuple[str, ...] = ()
    verl: tuple[str, ...] = ()
    prime_rl: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names in other systems."""
        return (*self.trl, *self.verl, *self.prime_rl)


@dataclass(frozen=True)
class Elsewhere(_Names):
    """A key, and its names in other systems."""

    key: str
    """Dotted key of the configuration."""
    note: str = ""
    """How the meaning differs."""
    units: Mapping[str, str] = field(default_factory=dict)
    """Name in another system -> the unit of the value here, where it is another one."""

    def answer(self, name: str) -> str:
        """Returns what a message says of a name."""
        unit = self.units.get(name)
        return f"here it is {self.key}" + (f", {unit}" if unit else "")


@dataclass(frozen=True)
class WithoutKey(_Names):
    """A setting of other systems that has no key of its own here."""

    advice: str
    """What to use in place of the setting."""

    def answer(self, name: str) -> str:  # noqa: ARG002
        """Returns what a message says of a name."""
        return self.advice


_STEPS = "a number of steps, not of epochs"
_PROMPTS = "a number of prompts, not of responses"
_SHARE = "a share of rollout.max_response_tokens, not a number of tokens"
_TOKENS = "a number of tokens, not of responses"

ELSEWHERE = (
    Elsewhere(
        "model.path",
        trl=("model", "model_name_or_path"),
        verl=("actor_rollout_ref.model.path",),
        prime_rl=("model.name",),
        note="a model of the hub has the prefix `hf://`",
    ),
    Elsewhere(
        "task.train_path",
        trl=("train_dataset", "dataset_name"),
        verl=("data.train_files",),
        prime_rl=("orchestrator.train.env",),
        note="a data set of the hub has the prefix `hf://`",
    ),
    Elsewhere("task.test_path", trl=("eval_dataset",), verl=("data.val_files",)),
    Elsewhere(
        "task.columns",
        verl=("data.prompt_key",),
        note="a mapping: the task's column, and its name in the data",
    ),
    Elsewhere("seed", trl=("data_seed",)),
    Elsewhere(
        "steps",
        trl=("max_steps", "num_train_epochs"),
        verl=("trainer.total_training_steps", "trainer.total_epochs"),
        prime_rl=("max_steps",),
        note="a step has one batch; there is no number of epochs of the data",
        units={
            "num_train_epochs": _STEPS,
            "trainer.total_epochs": _STEPS,
        },
    ),
    Elsewhere(
        "rollout.prompts_per_step",
        trl=("generation_batch_size", "per_device_train_batch_size"),
        verl=("data.train_batch_size", "data.gen_batch_size"),
        prime_rl=("orchestrator.batch_size",),
        note="counts prompts; the batch sizes of TRL and prime-rl count responses",
        units={
            "generation_batch_size": _PROMPTS,
            "per_device_train_batch_size": _PROMPTS,
            "orchestrator.batch_size": _PROMPTS,
        },
    ),
    Elsewhere(
        "rollout.group_size",
        trl=("num_generations",),
        verl=("actor_rollout_ref.rollout.n",),
        prime_rl=("orchestrator.group_size", "rollouts_per_example"),
    ),
    Elsewhere(
        "rollout.max_response_tokens",
        trl=("max_completion_length", "max_new_tokens"),
        verl=("data.max_response_length",),
        prime_rl=("sampling.max_tokens", "max_completion_tokens"),
    ),
    Elsewhere(
        "rollout.max_prompt_tokens",
        trl=("max_prompt_length",),
        verl=("data.max_prompt_length",),
        note="longer prompts are refused, or left out (`task.drop_long_prompts`), and never cut",
    ),
    Elsewhere("task.drop_long_prompts", verl=("data.filter_overlong_prompts", "data.truncation")),
    Elsewhere(
        "rollout.temperature",
        verl=("actor_rollout_ref.rollout.temperature",),
        prime_rl=("sampling.temperature",),
    ),
    Elsewhere(
        "rollout.engine",
        trl=("use_vllm", "vllm_mode"),
        verl=("actor_rollout_ref.rollout.name",),
        note="`vllm` or `transformers`",
    ),
    Elsewhere(
        "rollout.engine.args",
        trl=("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_max_model_length"),
        verl=(
            "actor_rollout_ref.rollout.gpu_memory_utilization",
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
        ),
        prime_rl=("inference.parallel.tp", "inference.model.max_model_len"),
        note="a list of arguments of vLLM's server",
    ),
    Elsewhere(
        "sync.every",
        trl=("steps_per_generation",),
        verl=("trigger_parameter_sync_step",),
        note="steps that are trained between two refreshes of the rollout policy",
    ),
    Elsewhere(
        "sync.lag",
        verl=("staleness_threshold",),
        prime_rl=("max_async_level", "max_off_policy_steps"),
        note="here the staleness is fixed, so that a run can be repeated",
    ),
    Elsewhere(
        "algorithm",
        trl=("loss_type",),
        verl=("algorithm.adv_estimator",),
        note="a preset, whose keys the file replaces",
        units={"algorithm.adv_estimator": "the name of a preset"},
    ),
    Elsewhere(
        "advantage.scale",
        trl=("scale_rewards",),
        verl=("algorithm.norm_adv_by_std_in_grpo",),
        note="`group`, `batch` or `none`",
    ),
    Elsewhere("advantage.gamma", verl=("algorithm.gamma",)),
    Elsewhere("advantage.lam", verl=("algorithm.lam",)),
    Elsewhere(
        "loss.aggregation",
        verl=("actor_rollout_ref.actor.loss_agg_mode",),
        note="with verl's names",
    ),
    Elsewhere(
        "loss.objective.clip_low",
        trl=("epsilon",),
        verl=("actor_rollout_ref.actor.clip_ratio", "actor_rollout_ref.actor.clip_ratio_low"),
    ),
    Elsewhere(
        "loss.objective.clip_high",
        trl=("epsilon_high",),
        verl=("actor_rollout_ref.actor.clip_ratio_high",),
    ),
    Elsewhere(
        "loss.objective.dual_clip", trl=("delta",), verl=("actor_rollout_ref.actor.clip_ratio_c",)
    ),
    Elsewhere(
        "loss.objective",
        trl=("importance_sampling_level",),
        verl=("actor_rollout_ref.actor.policy_loss.loss_mode",),
        prime_rl=("trainer.loss.type",),
        note="`gspo` has a ratio for each response",
    ),
    Elsewhere(
        "loss.correction.weight_cap",
        trl=("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"),
        verl=("algorithm.rollout_correction.rollout_is_threshold", "tis_imp_ratio_cap"),
    ),
    Elsewhere("loss.mask_truncated", trl=("mask_truncated_completions",)),
    Elsewhere(
        "loss.entropy_coefficient",
        trl=("entropy_coef",),
        verl=("actor_rollout_ref.actor.entropy_coeff",),
    ),
    Elsewhere(
        "kl.coefficient",
        trl=("beta",),
        verl=("actor_rollout_ref.actor.kl_loss_coef", "algorithm.kl_ctrl.kl_coef"),
        note="0 turns the penalty off, as in TRL's default",
    ),
    Elsewhere(
        "kl.placement",
        verl=("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward"),
        note="`loss` or `reward`",
    ),
    Elsewhere("kl.estimator", verl=("actor_rollout_ref.actor.kl_loss_type",)),
    Elsewhere("kl.reset_after", trl=("sync_ref_model", "ref_model_sync_steps")),
    Elsewhere(
        "reward.weights",
        trl=("reward_weights",),
        note="weights of the parts of a verdict",
    ),
    Elsewhere(
        "reward.overlong_share",
        verl=("reward_model.overlong_buffer.len", "overlong_buffer"),
        note="a share of `rollout.max_response_tokens`",
        units={
            "reward_model.overlong_buffer.len": _SHARE,
            "overlong_buffer": _SHARE,
        },
    ),
    Elsewhere(
        "rollout.max_generation_rounds",
        verl=("algorithm.filter_groups.max_num_gen_batches", "algorithm.filter_groups.enable"),
        note="dynamic sampling (`algorithm=dapo`)",
    ),
    Elsewhere(
        "optimizer.learning_rate",
        trl=("learning_rate",),
        verl=("actor_rollout_ref.actor.optim.lr",),
        prime_rl=("trainer.optim.lr",),
    ),
    Elsewhere(
        "optimizer.warmup_steps",
        trl=("warmup_steps", "warmup_ratio"),
        verl=("actor_rollout_ref.actor.optim.lr_warmup_steps",),
        units={"warmup_ratio": "a number of steps, not a share of them"},
    ),
    Elsewhere(
        "optimizer.weight_decay",
        trl=("weight_decay",),
        verl=("actor_rollout_ref.actor.optim.weight_decay",),
        prime_rl=("trainer.optim.weight_decay",),
    ),
    Elsewhere("optimizer.beta1", trl=("adam_beta1",), prime_rl=("trainer.optim.betas1",)),
    Elsewhere("optimizer.beta2", trl=("adam_beta2",), prime_rl=("trainer.optim.betas2",)),
    Elsewhere(
        "optimizer.gradient_clip",
        trl=("max_grad_norm",),
        verl=("actor_rollout_ref.actor.grad_clip",),
        prime_rl=("trainer.optim.max_norm",),
    ),
    Elsewhere(
        "optimizer.epochs",
        trl=("num_iterations",),
        verl=("actor_rollout_ref.actor.ppo_epochs",),
    ),
    Elsewhere(
        "optimizer.minibatch_prompts",
        trl=("gradient_accumulation_steps",),
        verl=("actor_rollout_ref.actor.ppo_mini_batch_size",),
        note="groups of one optimizer update",
        units={"gradient_accumulation_steps": "a number of prompts, not of microbatches"},
    ),
    Elsewhere(
        "optimizer.microbatch_tokens",
        verl=(
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        ),
        prime_rl=("trainer.model.seq_len",),
        note="counts tokens, so that no batch runs out of memory",
        units={"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": _TOKENS},
    ),
    Elsewhere(
        "lora.rank",
        trl=("lora_r", "peft_config"),
        verl=("actor_rollout_ref.model.lora_rank",),
        prime_rl=("trainer.model.lora.rank",),
    ),
    Elsewhere("lora.alpha", trl=("lora_alpha",), verl=("actor_rollout_ref.model.lora_alpha",)),
    Elsewhere(
        "lora.targets",
        trl=("lora_target_modules",),
        verl=("actor_rollout_ref.model.target_modules",),
    ),
    Elsewhere(
        "trainer.gradient_checkpointing",
        trl=("gradient_checkpointing",),
        verl=("actor_rollout_ref.model.enable_gradient_checkpointing",),
        prime_rl=("trainer.model.ac",),
    ),
    Elsewhere(
        "trainer.offload",
        verl=(
            "actor_rollout_ref.actor.fsdp_config.param_offload",
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
        ),
    ),
    Elsewhere(
        "trainer.processes",
        verl=("trainer.n_gpus_per_node",),
        prime_rl=("deployment.num_train_gpus",),
        note="of a local run; a cluster's job sets its own",
    ),
    Elsewhere(
        "evaluation.every",
        trl=("eval_steps",),
        verl=("trainer.test_freq",),
        prime_rl=("orchestrator.eval.interval",),
    ),
    Elsewhere(
        "evaluation.samples",
        trl=("num_generations_eval",),
        verl=("actor_rollout_ref.rollout.val_kwargs.n",),
    ),
    Elsewhere(
        "checkpoint.every",
        trl=("save_steps",),
        verl=("trainer.save_freq",),
        prime_rl=("ckpt.interval",),
    ),
    Elsewhere(
        "checkpoint.keep",
        trl=("save_total_limit",),
        verl=("trainer.max_actor_ckpt_to_keep",),
        prime_rl=("ckpt.keep_last",),
    ),
    Elsewhere(
        "name",
        trl=("run_name", "output_dir"),
        verl=("trainer.experiment_name",),
        prime_rl=("wandb.name",),
    ),
)


WITHOUT_KEY = (
    WithoutKey(
        "a system prompt is `task.options.system` of the task math; for a reward function, a "
        "prompt of the data may be a list of chat messages, the first one with the role system",
        prime_rl=("system_prompt",),
    ),
    WithoutKey(
        "no key says where metrics go, but for MLflow `mlflow.tracking_uri`: `bapo metrics RUN "
        "--wandb PROJECT` or `--tensorboard DIRECTORY` writes them, with `--follow` while the run "
        "trains",
        trl=("report_to",),
        verl=("trainer.logger",),
        prime_rl=("wandb.project",),
    ),
    WithoutKey(
        "there is no schedule but `optimizer.warmup_steps`: the learning rate is constant after "
        "them",
        trl=("lr_scheduler_type",),
        verl=("actor_rollout_ref.actor.optim.lr_scheduler_type",),
        prime_rl=("trainer.scheduler.type",),
    ),
    WithoutKey(
        "there is no such key: the metrics of every step are stored",
        trl=("logging_steps",),
    ),
)

_ALL = (*ELSEWHERE, *WITHOUT_KEY)


def is_elsewhere(key: str) -> bool:
    """Whether a dotted name as a whole is a key of another system."""
    return any(key in entry.names for entry in _ALL)


def answer_elsewhere(key: str) -> str:
    """Returns what to use here for a key of another system, as a clause, or an empty text.

    key: its dotted name, of which the last part suffices.
    """
    last = key.rpartition(".")[2]
    for same in (key, last):
        for entry in _ALL:
            if same in entry.names:
                return entry.answer(same)
    for entry in _ALL:
        for name in entry.names:
            if last == name.rpartition(".")[2]:
                return entry.answer(name)
    return ""
