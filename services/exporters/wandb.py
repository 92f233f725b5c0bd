"""Writes a run's metrics to Weights & Biases."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_core.errors import BapoError
from services.buffer.api.client import BufferClient
from services.common.errors import first_line
from services.exporters.curves import FINAL_STATUSES, POLL_INTERVAL_S, Position, new_points

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

STEP = "training_step"
"""Metric that is the x axis of all others: W&B's own step may not go back, and a run that is
rewound makes steps again."""


def write_wandb(
    buffer: BufferClient,
    project: str,
    directory: Path,
    *,
    dashboard: str,
    follow: bool,
    log: Callable[[str], None],
) -> None:
    """Writes the run's curves to the W&B run of its name, and the configuration beside them.

    The W&B run is the same whenever it is written, so that a later call writes what is new.
    WANDB_MODE=offline writes below `directory` alone, for `wandb sync`. WANDB_API_KEY and
    WANDB_BASE_URL say where to otherwise.

    project: project of W&B, or entity/project. directory: where W&B keeps its files.
    dashboard: address of the run's page in the dashboard, which is put into the configuration.
    follow: keeps writing until the run has ended. log: gets one line about what was written.

    Raises `BapoError` when W&B is not installed, or refuses the run.
    """
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise BapoError("Weights & Biases is not installed; `pip install wandb`") from error
    state = buffer.run_state()
    entity, _, name = project.rpartition("/")
    directory.mkdir(parents=True, exist_ok=True)
    try:
        run = wandb.init(
            entity=entity or None,
            project=name,
            # The name alone is not unique: an earlier run of this name may have been deleted.
            id=f"{state.name}-{state.created_at:%Y%m%d%H%M%S}",
            name=state.name,
            resume="allow",
            dir=directory.resolve(),
            config={**state.config.model_dump(mode="json"), "dashboard": dashboard},
            # Nothing of the machine, its git repository or its environment is sent.
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_code=True,
                disable_git=True,
                x_disable_stats=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
            ),
        )
    except (wandb.Error, OSError) as error:
        raise BapoError(f"Weights & Biases: {first_line(error)}") from error
    run.define_metric(STEP, hidden=True)
    run.define_metric("*", step_metric=STEP)
    position = Position(*_written(run))
    written = 0
    try:
        while True:
            state = buffer.run_state()
            # A run that was rewound makes these steps again; W&B keeps both values.
            position.step = min(position.step, state.current_step)
            position.version = min(position.version, state.current_step + 1)
            for step, _, values in new_points(buffer, position):
                run.log({STEP: step, **values})
                written += 1
            run.summary.update({"bapo/step": position.step, "bapo/version": position.version})
            if state.status in FINAL_STATUSES or not follow:
                break
            time.sleep(POLL_INTERVAL_S)
    finally:
        run.finish(exit_code=1 if state.status == "failed" else 0)
        # The process that writes goes on after `finish`.
        wandb.teardown()
    # Offline there is no address, and W&B warns about the question.
    where = f"{directory}; `wandb sync` sends them" if run.offline else f"{run.url}"
    log(f"{written} points are in {where}")


def _written(run: Run) -> tuple[int, int]:
    """Returns the last step and the last version that an earlier call has written."""
    summary: Any = run.summary
    return int(summary.get("bapo/step") or 0), int(summary.get("bapo/version") or 0)
