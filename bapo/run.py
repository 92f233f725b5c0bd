"""A run of the Python API: its metrics, prompts and responses as data frames."""

from __future__ import annotations

import html
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo.frames import frame_of
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.cli.checkpoints import export_checkpoint, select_checkpoints
from services.common.errors import ServiceError
from services.common.objectstore import ObjectStore
from services.exporters.curves import curves, evaluation_curves
from services.stack.settings import default_home
from services.stack.stack import Endpoints

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

SMOOTHED_STEPS = 15
"""Training steps of the moving mean that `Run.plot` draws."""


def relative_if_below(path: Path) -> Path:
    """Returns a path as it is called from the working directory, if it is below that."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


@dataclass(frozen=True)
class Run:
    """A run, whose state the buffer service has; each call asks it anew."""

    name: str
    endpoints: Endpoints = field(repr=False)
    directory: Path
    """Directory of the summary and the report, `runs/NAME`."""

    @property
    def client(self) -> BufferClient:
        """The client of the REST API, for whatever this class does not have."""
        return BufferClient(self.endpoints.buffer_url, self.endpoints.token, run=self.name)

    @property
    def state(self) -> wire.RunState:
        """The run's configuration, status and step. Raises `ServiceError` if it was deleted."""
        return self.client.run_state()

    @property
    def status(self) -> str:
        """created, running, paused, stopped, finished or failed."""
        return self.state.status

    @property
    def forked_from(self) -> wire.ForkOrigin | None:
        """The run and the step that the run is a fork of; None for a run that began at step 1."""
        return self.state.forked_from

    @property
    def dashboard(self) -> str:
        """Address of the run's page in the dashboard."""
        return f"{self.endpoints.buffer_url}/#/runs/{self.name}"

    @property
    def report(self) -> Path:
        """The report of the run, a page in one file."""
        return self.directory / "report.html"

    def metrics(self) -> pandas.DataFrame:
        """Returns a row for each committed step: reward, accuracy, batch, and the trainer's
        metrics (docs/trainer.md)."""
        rows = [{"step": step.step, **curves(step)} for step in self.client.steps()]
        return frame_of(rows, index="step")

    def evaluations(self, evaluation_set: str | None = None) -> pandas.DataFrame:
        """Returns a row for each evaluation: its scores on a set, the primary one unless named.

        The index is the number of steps that the evaluated weights were trained.
        """
        rows = [
            {"step": evaluation.version - 1, **evaluation_curves(evaluation, "test")}
            for evaluation in self.client.evaluations(evaluation_set)
        ]
        return frame_of(rows, index="step").rename(columns=lambda name: name.removeprefix("test/"))

    def batches(self) -> pandas.DataFrame:
        """Returns a row for each batch: how many groups are of which source."""
        rows: list[dict[str, Any]] = []
        for batch in self.client.batches():
            values = batch.model_dump()
            rows.append({**values.pop("counts"), **values})
        return frame_of(rows, index="step")

    def prompts(self, limit: int | None = None, **filters: Any) -> pandas.DataFrame:
        """Returns a row for each training prompt that was attempted: its difficulty.

        limit: the most rows. filters: those of `GET /v1/runs/{run}/prompts`, for example
        `order="hardest"` or `unlocked_after=100`.
        """
        rows: list[dict[str, Any]] = []
        for prompt in self.client.all_prompts(**filters):
            if limit is not None and len(rows) >= limit:
                break
            values = prompt.model_dump()
            rows.append({"uid": values.pop("uid"), **values.pop("payload"), **values})
        return frame_of(rows, index="uid")

    def attempts(self, uid: str) -> pandas.DataFrame:
        """Returns a row for each group that was generated for a prompt."""
        rows = [attempt.model_dump() for attempt in self.client.prompt_history(uid).attempts]
        return frame_of(rows, index="group_id")

    def why(self, uid: str, step: int) -> pandas.DataFrame:
        """Returns why a prompt was in the batch of a step, or was not: a row for each source."""
        decision = self.client.decision(step, uid)
        rows = [source.model_dump() for source in decision.considered]
        return frame_of(rows, index="source")

    def group(self, group_id: int) -> pandas.DataFrame:
        """Returns a row for each response of a group: its text, its reward and its parts."""
        rows = [
            {"response": number, **response.model_dump()}
            for number, response in enumerate(self.client.group(group_id).responses)
        ]
        return frame_of(rows, index="response")

    def export(self, directory: str | Path, *, step: int | None = None, best: bool = False) -> Path:
        """Writes the model of a checkpoint, the newest unless named, to a new directory.

        step: the checkpoint's step. best: whether to take the checkpoint with the best evaluation.

        Returns the directory, which transformers and vLLM load. Raises `BapoError` if there is no
        such checkpoint.
        """
        target = Path(directory)
        client = self.client
        task = client.run_state().config.task if best else None
        kept = select_checkpoints(self.name, client.checkpoints(), step=step, best_of=task)
        config = client.run_state().config
        export_checkpoint(config, kept[0], target, lambda: ObjectStore(self.endpoints.object_store))
        return target

    def plot(self) -> Figure:
        """Returns a figure of the mean reward of each step, and of the held-out accuracy.

        A reward function without `task.solved_at` has the held-out reward instead, by which such
        runs are compared.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 3), layout="constrained")
        axes = figure.subplots()
        metrics, evaluations = self.metrics(), self.evaluations()
        if not metrics.empty:
            reward = metrics["reward"]
            smooth = reward.rolling(SMOOTHED_STEPS, min_periods=1).mean()
            axes.plot(reward.index, reward, alpha=0.3, color="C0")
            axes.plot(smooth.index, smooth, color="C0", label="mean reward of a step, smoothed")
        if not evaluations.empty:
            measure = self.state.config.task.measure
            held_out = evaluations[measure]
            axes.plot(held_out.index, held_out, "o-", color="C1", label=f"held-out {measure}")
        axes.set_xlabel("training step")
        axes.set_title(self.name)
        if axes.lines:
            axes.legend()
        return figure

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: status, the plot and where to look further."""
        try:
            state = self.state
        except ServiceError as error:
            return f"<p>{html.escape(str(error))}</p>"
        picture = io.StringIO()
        self.plot().savefig(picture, format="svg")
        svg = picture.getvalue()
        # A stored notebook must not hold the token, so it is not in the link.
        stack = relative_if_below(default_home() / "stack.json")
        name, link, report, token = map(
            html.escape, (self.name, self.dashboard, str(self.report), f'"token" in {stack}')
        )
        return (
            f"<p><b>{name}</b>: {html.escape(state.status)}, step {state.current_step} of "
            f"{state.steps}. <a href='{link}'>Dashboard</a> (it asks for the {token}), report in "
            f"{report}</p>"
            f"{svg[svg.index('<svg') :]}"
        )
