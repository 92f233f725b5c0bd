"""The live display of a run: where it stands, how it learns, how long it still takes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from services.buffer.api.wire import Evaluation, ReplicaView, StepView

PLAIN_EVERY_S = 10.0
"""Without a terminal, a line this often instead of a display."""
RECENT = 20
"""Steps over which rates are taken."""


class RunDisplay:
    """Shows the steps and evaluations given to `update`."""

    def __init__(self, console: Console, name: str, total_steps: int, done: int) -> None:
        self._console, self._name, self._total, self._done = console, name, total_steps, done
        self._recent: deque[tuple[float, StepView]] = deque(maxlen=RECENT)
        self._evaluations: list[Evaluation] = []
        self._started = self._last_line = time.monotonic()
        self._live: Live | None = None
        self._replicas: list[ReplicaView] = []
        self._troubles: dict[str, str] = {}

    @contextmanager
    def shown(self) -> Iterator[None]:
        if not self._console.is_terminal:
            yield
            return
        with Live(self._render(), console=self._console, refresh_per_second=4) as self._live:
            yield
            self._live.update(self._render())

    def update(
        self,
        steps: list[StepView],
        evaluations: list[Evaluation],
        replicas: list[ReplicaView],
    ) -> None:
        now = time.monotonic()
        for step in steps:
            self._recent.append((now, step))
            self._done = step.step
        self._evaluations = evaluations
        self._tell_of(replicas)
        if self._live is not None:
            self._live.update(self._render())
        elif steps and (now - self._last_line > PLAIN_EVERY_S or self._done == self._total):
            self._last_line = now
            self._console.print(self._line(steps[-1]), highlight=False)

    def _tell_of(self, replicas: list[ReplicaView]) -> None:
        """Without a live display, each trouble of a rollout engine gets one line."""
        self._replicas = replicas
        for each in replicas:
            trouble = each.detail if each.state == "failing" else ""
            if trouble and trouble != self._troubles.get(each.name) and self._live is None:
                self._console.print(f"{each.name}: {trouble}", highlight=False)
            self._troubles[each.name] = trouble

    def _rollouts(self) -> str:
        """How many engines generate, and what is wrong with the others."""
        serving = [each for each in self._replicas if each.loaded_version]
        versions = ", ".join(str(v) for v in sorted({each.loaded_version for each in serving}))
        words = f"{len(serving)} of {len(self._replicas)} engines serve" + (
            f" version {versions}" if versions else ""
        )
        troubles = [f"{name}: {trouble}" for name, trouble in self._troubles.items() if trouble]
        return "\n".join([words, *troubles])

    def _seconds_a_step(self) -> float | None:
        if len(self._recent) < 2 or self._recent[-1][1].step == self._recent[0][1].step:
            return None
        span = self._recent[-1][1].committed_at - self._recent[0][1].committed_at
        return span.total_seconds() / (self._recent[-1][1].step - self._recent[0][1].step)

    def _time_left(self) -> str:
        seconds = self._seconds_a_step()
        if seconds is None:
            return "?"
        left = int(seconds * (self._total - self._done))
        return f"{left // 60}:{left % 60:02d}"

    def _tokens_per_second(self) -> float:
        seconds = self._seconds_a_step()
        if not seconds:
            return 0.0
        return sum(step.tokens for _, step in self._recent) / len(self._recent) / seconds

    def _accuracy(self) -> str:
        if not self._evaluations:
            return "?"
        first, last = self._evaluations[0], self._evaluations[-1]
        return f"{last.mean_accuracy:.3f} (base {first.mean_accuracy:.3f})"

    def _line(self, step: StepView) -> str:
        return (
            f"step {step.step}/{self._total}  reward {step.r_tot:.3f}  accuracy "
            f"{self._accuracy()}  batch {_composition(step)}  staleness "
            f"{step.metrics.get('staleness_mean', 0):.1f}  {self._tokens_per_second():.0f} tok/s  "
            f"left {self._time_left()}"
        )

    def _render(self) -> RenderableType:
        bar = Progress(
            TextColumn(f"[bold]{self._name}"),
            BarColumn(bar_width=None),
            TextColumn(f"step {self._done}/{self._total}  left {self._time_left()}"),
            expand=True,
        )
        bar.add_task("", total=self._total, completed=self._done)
        table = Table.grid(padding=(0, 3))
        if self._recent:
            step = self._recent[-1][1]
            mean = sum(each.r_tot for _, each in self._recent) / len(self._recent)
            table.add_row("reward", f"{step.r_tot:.3f} (last {len(self._recent)}: {mean:.3f})")
            table.add_row("held-out accuracy", self._accuracy())
            table.add_row("batch", _composition(step))
            table.add_row("window", f"[{step.c2:.3f}, {step.c3:.3f}]")
            table.add_row("staleness", f"{step.metrics.get('staleness_mean', 0):.1f} steps")
            table.add_row("rollouts", self._rollouts())
            table.add_row("entropy", f"{step.metrics.get('entropy', 0):.3f}")
            table.add_row("throughput", f"{self._tokens_per_second():.0f} tokens/s")
        else:
            waited = time.monotonic() - self._started
            table.add_row("starting the engine and the trainer", f"{waited:.0f} s")
            table.add_row("rollouts", self._rollouts())
        return Group(bar, table)


def _composition(step: StepView) -> str:
    return (
        f"{step.counts['fresh']} fresh + {step.counts['reevaluated']} re-evaluated + "
        f"{step.counts['replayed']} replayed"
    )
