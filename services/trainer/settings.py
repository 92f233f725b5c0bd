"""Environment variables of the trainer. torchrun adds its own: RANK, LOCAL_RANK, WORLD_SIZE."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from services.common.settings import BufferClientSettings, ObjectStoreClientSettings
from services.rollout.api.addresses import ReplicaCallerSettings


class TrainerSettings(BufferClientSettings, ObjectStoreClientSettings, ReplicaCallerSettings):
    """Settings of a trainer process (`python -m services.trainer.loop`)."""

    run: str
    """Name of the run to train."""
    scratch: Path
    """Directory for checkpoints and models in transfer."""
    attempt: int | None = None
    """Attempt of the run that this trainer belongs to; it begins a new one unless set."""
    model: Path | None = None
    """Directory of the initial model on this machine, where the run's `model.path` is not."""
    engine_share: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the GPU's memory that an engine on this machine is going to take; the trainer plans
    with the rest."""
    # Not a `TrainerConfig`: BAPO_TRAINER_IMAGE and its like would be taken for keys of it.
    trainer: str | None = None
    """The configuration's `trainer` section as JSON, in place of the stored one: it affects how a
    step is computed here, and not its result."""
