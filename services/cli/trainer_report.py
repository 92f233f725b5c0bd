"""Reports how the trainer of a configuration computes on a machine, and the memory it takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from bapo_core.config import RunConfig
from services.trainer.attention_kernels import current_choices, forget_choices
from services.trainer.lora import add_adapters
from services.trainer.memory import (
    MARGIN,
    MemoryPlan,
    Mode,
    ModelSize,
    free_bytes,
    plan_memory,
    predict_bytes,
)
from services.trainer.policy import Policy
from services.trainer.ranks import init_distributed
from services.trainer.shard import compiles, load_sharded

MODES: tuple[Mode, ...] = ("none", "full")
"""Checkpointing of activations whose memory is predicted."""
CARDS = (16, 24, 48, 80, 141)
"""Sizes of common GPUs, in GiB."""
SYSTEM_GIB = 0.5
"""Memory of a GPU that the driver and CUDA take."""
GIB = float(1 << 30)


@dataclass
class TrainerReport:
    """How the trainer computes, by topic."""

    device: str
    attention: list[str]
    """The kernel of each kind of attention of the model, and why others are not used."""
    compiled: bool
    plan: str
    """How a step fits the memory of this machine."""
    predicted_gib: dict[str, float] = field(default_factory=dict)
    """Predicted peak on one GPU by `trainer.gradient_checkpointing`; empty for unknown layers."""
    cards: dict[str, str] = field(default_factory=dict)
    """How a step would fit common GPUs, by their memory."""


def report_trainer(config: RunConfig, model: Path) -> TrainerReport:
    """Loads the model as a trainer does, and returns how it would compute.

    Raises `BapoError` for a model that the trainer cannot score.
    """
    sizes: list[ModelSize | None] = []

    def plan(size: ModelSize | None) -> MemoryPlan:
        sizes.append(size)
        return plan_memory(config, size, available=available)

    def adapted(policy: Policy) -> Policy:
        add_adapters(policy.model, config.lora, config.seed)
        return policy

    available = free_bytes()
    forget_choices()
    with init_distributed() as ranks:
        policy = load_sharded(model, ranks, prepare=adapted, settings=config.trainer, plan=plan)
    (size,) = sizes
    report = TrainerReport(
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        attention=[str(choice) for choice in current_choices()] or ["transformers' own"],
        compiled=compiles(config.trainer, policy.model),
        plan=str(plan_memory(config, size, available=available)),
    )
    if size is not None:
        tokens = config.optimizer.microbatch_tokens
        report.predicted_gib = {mode: predict_bytes(size, tokens, mode) / GIB for mode in MODES}
        report.cards = {f"{card} GB": fit_card(config, size, card) for card in CARDS}
    return report


def fit_card(config: RunConfig, size: ModelSize, card: int) -> str:
    """Returns how a step fits a GPU of `card` GiB."""
    available = (card - SYSTEM_GIB) * GIB
    plan = plan_memory(config, size, available=available)
    assert plan.predicted is not None
    if plan.predicted * MARGIN > available:
        return f"too small: {plan.predicted / GIB:.1f} GiB predicted"
    return str(plan)
