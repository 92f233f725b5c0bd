"""The sections of the trainer: optimizer, checkpoints, memory, adapters, export of metrics."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from bapo_core.config.base import Section


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
    `evaluation.primary`: by accuracy, or by reward if the task is a reward function without
    `task.solved_at`."""


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
    attention: Literal["auto", "flash4", "varlen", "padded"] = "auto"
    """Kernel of the attention over packed sequences on a GPU: `flash4` is FlashAttention 4 of the
    extra `flash4`, for compute capability 9.0 and later; `varlen` is FlashAttention 2 in PyTorch;
    `padded` pads the sequences. A kernel that does not take a model's attention is replaced by the
    next one, and the log says why; `auto` begins with `flash4`, the fastest. CPUs have `padded`
    alone."""
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
            "MLFLOW_TRACKING_URI, MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the "
            "environment"
        )
    return uri


class MlflowConfig(Section):
    """Export of metrics to MLflow."""

    tracking_uri: Annotated[str, AfterValidator(refuse_credentials)] = ""
    """Tracking URI of an MLflow server that receives the metrics, for example http://mlflow:5000;
    empty turns it off. Credentials are in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or
    MLFLOW_TRACKING_TOKEN, of the environment, and go only to the server in MLFLOW_TRACKING_URI."""
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
