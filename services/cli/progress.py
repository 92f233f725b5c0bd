"""Shows the progress of a run: its step, its metrics, and the time that is left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from bapo_core.rewards import FAILED, OVERLONG
from services.buffer.api.wire import (
    HEARTBEAT_TIMEOUT_S,
    Evaluation,
    ReplicaState,
    ReplicaView,
    RolloutProgress,
    RunProgress,
    StepView,
)
from services.cli.notebook_view import NotebookView
from services.report.explanations import explain_difficulty, explain_equal_rewards
from services.report.scores import has_other_rewards

PLAIN_EVERY_S = 10.0
"""Seconds between two lines of progress, where the output is not a terminal."""
LONG_STEP_S = 60.0
"""Seconds after the last line from which on a step that goes on is reported, where the output is
not a terminal; before the first step `PLAIN_EVERY_S` holds."""
FAILED_SHARE = 0.01
"""Share of responses without a verdict from which on it is said: single ones are hostile input."""
CUT_OFF_SHARE = 0.5
"""Share of responses that reach the largest number of tokens from which on it is said."""
ENGINE_ACTIVITIES: dict[ReplicaState, str] = {
    "starting": "starting the engine",
    "downloading": "copying the weights to the engine",
    "loading": "loading the weights into the engine",
    "failing": "waiting for the engine, which fails",
}
"""What is going on while no engine serves, by the states of the engines."""
RECENT = 20
"""Steps over which rates and the mean reward are taken."""


class RunDisplay:
    """Displays the steps, evaluations and replicas given to `update`.

    On a terminal and in a notebook the display is redrawn in place; elsewhere it prints a line from
    time to time.
    """

    def __init__(
        self,
        console: Console,
        name: str,
        total_steps: int,
        done: int,
        *,
        solved_at: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """done: last committed step. solved_at: `task.solved_at`. clock: returns seconds."""
        self._solved_at = solved_at
        self._clock = clock
        self._console, self._name, self._total, self._done = console, name, total_steps, done
        self._recent: deque[tuple[float, StepView]] = deque(maxlen=RECENT)
        self._evaluations: list[Evaluation] = []
        self._activity, self._activity_since = "starting the engine and the trainer", clock()
        self._last_line = clock()
        self._printed_activity: str | None = None
        self._live: Live | NotebookView | None = None
        self._replicas: list[ReplicaView] = []
        self._errors: dict[str, str] = {}
        self._failures_noted = False
        self._cut_off_noted = False
        self._trained = done > 0
        """Whether a step has trained, or it was said that one has not."""
        self._difficulty_known = done > 0
        """Whether some responses and not all were correct, or it was said that it was not so."""

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Displays the progress for as long as the context lasts."""
        if self._console.is_jupyter:
            self._live = NotebookView()
            self._live.update(self._render())
            try:
                yield
            finally:
                self._live.update(self._render())
            return
        if not self._console.is_terminal:
            yield
            return
        with Live(self._render(), console=self._console, refresh_per_second=4) as self._live:
            try:
                yield
            finally:
                self._live.update(self._render())

    def update(
        self,
        steps: list[StepView],
        evaluations: list[Evaluation],
        replicas: list[ReplicaView],
        progress: RunProgress | None = None,
    ) -> None:
        """Shows the steps since the last call, and all evaluations and replicas.

        progress: what the run works at now; None changes nothing.
        """
        now = self._clock()
        for step in steps:
            self._recent.append((now, step))
            self._done = step.step
            self._note_failures(step)
            self._note_empty_batch(step)
            self._note_difficulty(step)
            self._note_cut_off(step)
        if evaluations and not self._evaluations and not steps and self._live is None:
            self._evaluations = evaluations
            self._console.print(f"held-out accuracy {self._accuracy()}", soft_wrap=True)
        self._evaluations = evaluations
        self._update_replicas(replicas)
        if progress is not None:
            activity = describe_activity(progress, replicas, self._total)
            if activity != self._activity:
                self._activity, self._activity_since = activity, now
        if self._live is not None:
            self._live.update(self._render())
        elif steps and (now - self._last_line > PLAIN_EVERY_S or self._done == self._total):
            self._last_line = now
            self._console.print(self._line(steps[-1]), soft_wrap=True)
        elif progress is not None:
            self._print_activity(now)

    def _print_activity(self, now: float) -> None:
        """Prints what the run works at, if that is new and the last line is old enough."""
        interval = LONG_STEP_S if self._recent else PLAIN_EVERY_S
        is_new = self._activity != self._printed_activity
        is_first = self._printed_activity is None and not self._recent
        is_due = is_first or now - self._last_line > interval
        if not is_new or not is_due:
            return
        self._last_line, self._printed_activity = now, self._activity
        self._console.print(self._activity, soft_wrap=True)

    def _note_failures(self, step: StepView) -> None:
        """Says once that the reward function fails, before what may follow from it."""
        share = step.reward_parts.get(FAILED, 0.0)
        if share < FAILED_SHARE or self._failures_noted:
            return
        self._failures_noted = True
        self._console.print(
            f"note: the reward function failed on {share:.1%} of the responses of step "
            f"{step.step}, which count as wrong; collector.log among the run's logs says why",
            soft_wrap=True,
        )

    def _note_empty_batch(self, step: StepView) -> None:
        """Says once, before any step has trained, why one did not."""
        known, self._trained = self._trained, True
        if known:
            return
        reason = explain_equal_rewards([step])
        if not step.trained:
            self._console.print(f"note: step {step.step} trained nothing: {reason}", soft_wrap=True)
        elif not step.mixed and OVERLONG not in step.reward_parts:
            # As with fresh.filter=none, under which a batch is never empty.
            self._console.print(
                f"note: no group of step {step.step} had a signal: {reason}", soft_wrap=True
            )

    def _note_difficulty(self, step: StepView) -> None:
        """Says once, before some responses were correct and others were not, why it is so."""
        if self._difficulty_known:
            return
        reason = explain_difficulty([step], self._solved_at)
        if reason:
            self._console.print(f"note: step {step.step}: {reason}", soft_wrap=True)
        self._difficulty_known = bool(reason) or any(step.bins[1:-1])

    def _note_cut_off(self, step: StepView) -> None:
        """Says once that most responses reach the length limit, and so rarely hold an answer."""
        share = step.metrics.get("responses/cut_off", 0.0)
        if share <= CUT_OFF_SHARE or self._cut_off_noted:
            return
        self._cut_off_noted = True
        self._console.print(
            f"note: {share:.0%} of the responses of step {step.step} were cut off at "
            "rollout.max_response_tokens, and rarely hold an answer; raise the limit",
            soft_wrap=True,
        )

    def _update_replicas(self, replicas: list[ReplicaView]) -> None:
        """Notes the state of the engines; without a terminal, prints each new error on a line."""
        self._replicas = replicas
        for replica in replicas:
            error = replica.detail if replica.state == "failing" else ""
            if error and error != self._errors.get(replica.name) and self._live is None:
                self._console.print(f"{replica.name}: {error}")
            self._errors[replica.name] = error

    def _describe_engines(self) -> str:
        """Returns how many engines serve which versions, and the errors of the others."""
        loaded = [replica.loaded_version for replica in self._replicas if replica.loaded_version]
        versions = ", ".join(str(version) for version in sorted(set(loaded)))
        serving = f"{len(loaded)} of {len(self._replicas)} engines serve" + (
            f" version {versions}" if versions else ""
        )
        errors = [f"{name}: {error}" for name, error in self._errors.items() if error]
        return "\n".join([serving, *errors])

    def _seconds_a_step(self) -> float | None:
        if len(self._recent) < 2 or self._recent[-1][1].step == self._recent[0][1].step:
            return None
        span = self._recent[-1][1].committed_at - self._recent[0][1].committed_at
        return span.total_seconds() / (self._recent[-1][1].step - self._recent[0][1].step)

    def _time_left(self) -> str:
        seconds = self._seconds_a_step()
        if seconds is None:
            return "?"
        seconds_left = int(seconds * (self._total - self._done))
        return f"{seconds_left // 60}:{seconds_left % 60:02d}"

    def _tokens_per_second(self) -> str:
        """Returns the rate as digits; "?" after a single step, which has no duration yet."""
        seconds = self._seconds_a_step()
        if not seconds:
            return "?"
        tokens = sum(step.tokens for _, step in self._recent) / len(self._recent)
        return f"{tokens / seconds:.0f}"

    def _accuracy(self) -> str:
        if not self._evaluations:
            return "not measured yet"
        first, last = self._evaluations[0], self._evaluations[-1]
        with_reward = has_other_rewards(self._evaluations)
        base, newest = (
            f"{evaluation.mean_accuracy:.3f}"
            + (f", reward {evaluation.mean_reward:.3f}" if with_reward else "")
            for evaluation in (first, last)
        )
        if first.version == last.version:
            return f"{newest} (base)"
        return f"{newest} (version {last.version}; base {base})"

    def _line(self, step: StepView) -> str:
        return (
            f"step {step.step}/{self._total}  reward {step.mean_reward:.3f}  accuracy "
            f"{self._accuracy()}  batch {_composition(step)}  staleness "
            f"{step.metrics.get('staleness_mean', 0):.1f}  {self._tokens_per_second()} tok/s  "
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
            mean = sum(recent.mean_reward for _, recent in self._recent) / len(self._recent)
            table.add_row(
                "reward", f"{step.mean_reward:.3f} (last {len(self._recent)}: {mean:.3f})"
            )
            table.add_row("held-out accuracy", self._accuracy())
            table.add_row("batch", _composition(step))
            table.add_row("replay window", f"[{step.c2:.3f}, {step.c3:.3f}]")
            table.add_row("staleness", f"{step.metrics.get('staleness_mean', 0):.1f} steps")
            table.add_row("rollouts", self._describe_engines())
            table.add_row("entropy", f"{step.metrics.get('entropy', 0):.3f}")
            table.add_row("throughput", f"{self._tokens_per_second()} tokens/s")
        else:
            table.add_row("held-out accuracy", self._accuracy())
            table.add_row("rollouts", self._describe_engines())
        seconds = self._clock() - self._activity_since
        table.add_row("now", f"{self._activity} ({seconds:.0f} s)")
        return Group(bar, table)


def describe_activity(
    progress: RunProgress, replicas: Sequence[ReplicaView], total_steps: int
) -> str:
    """Returns what a run works at, such as `step 1: 5 of 8 groups`.

    total_steps: number of steps of the run.
    """
    if progress.newest_version == 0:
        return "starting the engine and the trainer"
    activities = []
    if progress.has_batch:
        activities.append(f"training step {progress.step}")
    live = [replica for replica in replicas if replica.silent_s < HEARTBEAT_TIMEOUT_S]
    if not any(replica.state == "serving" for replica in live):
        states: list[ReplicaState] = sorted({replica.state for replica in live}) or ["starting"]
        activities += [ENGINE_ACTIVITIES[state] for state in states]
        return "; ".join(activities)
    activities += [
        _describe_rollouts(rollouts)
        for rollouts in progress.rollouts
        if rollouts.kind != "evaluation"
    ]
    evaluations = [rollouts for rollouts in progress.rollouts if rollouts.kind == "evaluation"]
    begun = [rollouts for rollouts in evaluations if rollouts.groups]
    activities += map(_describe_rollouts, begun or ([] if activities else evaluations[:1]))
    if not activities and progress.step > total_steps:
        return "storing the last checkpoint"
    return "; ".join(activities)


def _describe_rollouts(rollouts: RolloutProgress) -> str:
    counts = f"{rollouts.groups} of {rollouts.expected}"
    if rollouts.kind == "evaluation":
        model = "the base model" if rollouts.step == 1 else f"version {rollouts.step}"
        return f"evaluating {model} on {rollouts.evaluation_set}: {counts} prompts"
    groups = "groups" if rollouts.kind == "fresh" else "re-evaluated groups"
    return f"step {rollouts.step}: {counts} {groups}"


def _composition(step: StepView) -> str:
    count = step.counts.get("replayed_responses", 0)
    responses = f" + {count} replayed responses" if count else ""
    return (
        f"{step.counts['fresh']} fresh + {step.counts['reevaluated']} re-evaluated + "
        f"{step.counts['replayed']} replayed{responses}"
    )
