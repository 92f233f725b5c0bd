"""Writes `report.html`, one self-contained page about a run."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from bapo_core.config.changes import UNSET
from bapo_core.types import Source
from services.buffer.api.wire import EvaluationSetView, RecordedChange
from services.report import charts
from services.report.explanations import explain_run
from services.report.scores import COLUMNS, INTERVALS, has_other_rewards, score_rows
from services.report.summary import RunHistory
from services.report.timeline import SyncWindow, assign_lanes

STYLE = """
:root { color-scheme: light dark; --ink:#1d2733; --soft:#5b6675; --page:#fbfbfa; --card:#fff;
  --line:#e3e6ea; --accent:#3b7dd8; }
@media (prefers-color-scheme: dark) { :root { --ink:#e8ebef; --soft:#a3acb9; --page:#14181d;
  --card:#1b2027; --line:#2d343d; } }
* { box-sizing: border-box; }
body { margin:0; background:var(--page); color:var(--ink); font:15px/1.5 system-ui, sans-serif; }
main { max-width:1180px; margin:0 auto; padding:32px 20px 64px; }
h1 { font-size:26px; margin:0 0 4px; } h2 { font-size:16px; margin:0 0 2px; }
p.lead, figcaption, .soft { color:var(--soft); }
p.lead { margin:0 0 20px; }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(240px,1fr)); gap:12px; }
.tile, figure { background:var(--card); border:1px solid var(--line); border-radius:10px; }
.tile { padding:12px 16px; }
.tile b { display:block; font-size:22px; font-weight:600; white-space:nowrap; }
.tile span { color:var(--soft); font-size:13px; }
.charts { display:grid; grid-template-columns:repeat(auto-fit,minmax(440px,1fr)); gap:16px;
  margin-top:16px; }
figure { margin:0; padding:16px; } figcaption { font-size:13px; margin-bottom:6px; }
figure svg { width:100%; height:auto; display:block; }
table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums; }
th, td { text-align:right; padding:6px 10px; border-bottom:1px solid var(--line); }
td { white-space:nowrap; }
th:first-child, td:first-child { text-align:left; } thead th { color:var(--soft); font-weight:500; }
details { margin-top:24px; } pre { overflow-x:auto; padding:12px; background:var(--card);
  border:1px solid var(--line); border-radius:10px; font-size:13px; }
figure.wide { grid-column:1 / -1; }
figure.scrolls { overflow-x:auto; margin-bottom:16px; }
@media (max-width:520px) { .charts { grid-template-columns:1fr; } }
"""


SOURCE_LABELS = {
    Source.FRESH: "fresh",
    Source.REEVALUATED: "re-evaluated",
    Source.REPLAYED: "replayed",
}


SHOWN_CHANGES = 10
"""Rows of the table of changes that are shown at once: a fork to another algorithm has 30."""

# What the page does not need, a text of a run that was not escaped shall not be able to do: pages
# are shown on the origin of Kubeflow's interface, and sent to others.
CONTENT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)


def page(title: str, body: str) -> str:
    """Returns an HTML document that loads nothing from elsewhere and runs no scripts."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def tiles(values: Sequence[tuple[str, str]]) -> str:
    cells = (
        f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'
        for name, value in values
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def figure(title: str, caption: str, svg: str, *, wide: bool = False) -> str:
    labelled = svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)
    return (
        f"<figure{' class=wide' * wide}><h2>{html.escape(title)}</h2>"
        f"<figcaption>{html.escape(caption)}</figcaption>{labelled}</figure>"
    )


def write_report(history: RunHistory, summary: dict[str, Any], path: Path) -> None:
    """Writes the report of a run to `path`."""
    name = history.state.name
    body = [
        f"<h1>{html.escape(name)}</h1>",
        f'<p class="lead">{html.escape(_lead(history))}</p>',
        *_notes(history),
        tiles(_headline(history, summary)),
        _sets_table(history.sets),
        _changes_table(history.state.changes),
        f'<div class="charts">{"".join(_figures(history, summary))}</div>',
        "<details><summary>Configuration</summary><pre>",
        html.escape(yaml.safe_dump(history.config.model_dump(mode="json"), sort_keys=False)),
        "</pre></details>",
    ]
    path.write_text(page(f"{name}: bapo report", "".join(body)), encoding="utf-8")


def _notes(history: RunHistory) -> list[str]:
    """Returns a paragraph for each thing that a reader would not guess from the figures."""
    notes = explain_run(history.steps, history.config, history.state.forked_from)
    return [f'<p class="lead">Note: {html.escape(note)}.</p>' for note in notes]


def _lead(history: RunHistory) -> str:
    config, origin = history.config, history.state.forked_from
    fork = "" if origin is None else f", fork of {origin.describe()}"
    return (
        f"{config.algorithm} on {config.task.name}, seed {config.seed}{fork}: "
        f"{len(history.steps)} steps of {config.rollout.prompts_per_step} prompts x "
        f"{config.rollout.group_size} responses, weights synced to the rollouts every "
        f"{config.sync.every} steps."
    )


def _headline(history: RunHistory, summary: dict[str, Any]) -> list[tuple[str, str]]:
    initial, final = summary["evaluation"]["initial"], summary["evaluation"]["final"]
    training = summary["unlocked_training_prompts"]
    rewards = [
        ("held-out reward, base", f"{initial['mean_reward']:.3f}"),
        ("held-out reward, final", f"{final['mean_reward']:.3f}"),
    ]
    if not has_other_rewards(history.evaluations):
        rewards = []
    values = [
        ("held-out accuracy, base", f"{initial['mean_accuracy']:.3f}"),
        ("held-out accuracy, final", f"{final['mean_accuracy']:.3f}"),
        *rewards,
        ("held-out prompts with 0 correct, base", f"{initial['bins'][0]} of {initial['prompts']}"),
        ("held-out prompts with 0 correct, final", f"{final['bins'][0]} of {final['prompts']}"),
        ("held-out prompts unlocked", f"{summary['unlocked_fraction']:.0%}"),
        (
            "training prompts unlocked",
            f"{training['unlocked']} of {training['initially_unsolved']}",
        ),
        ("training responses", f"{summary['rollouts']:,}"),
    ]
    if "wall" in summary["seconds"]:
        values.append(("wall time", f"{summary['seconds']['wall']:.0f} s"))
    return values


def _sets_table(sets: Sequence[EvaluationSetView]) -> str:
    """Returns the scores of the first and of the last evaluation on every set."""
    measured = [view for view in sets if view.evaluations]
    first = score_rows([view.evaluations[0] for view in measured])
    last = score_rows([view.evaluations[-1] for view in measured])
    heads = ["set", "prompts", "n", "mean@n, base", *COLUMNS[3:]]
    rows = [[*row[:3], base[3], *row[3:]] for base, row in zip(first, last, strict=True)]
    return (
        '<div class="charts"><figure class="wide scrolls"><h2>Evaluation sets</h2>'
        f"<figcaption>The last evaluation on each set. {html.escape(INTERVALS)} Bins: number of "
        "prompts with 0, 1, ... n correct responses."
        f"</figcaption>{_table(heads, rows)}</figure></div>"
    )


def _changes_table(changes: Sequence[RecordedChange]) -> str:
    """Returns the changes of the configuration, one row for each key; nothing without any.

    A key that begins or ends with a fork is "unset" before or after it. The name, which every fork
    changes, is left out, and rows after the first `SHOWN_CHANGES` are folded.
    """
    rows = [
        (
            change.first_step,
            key,
            change.old.get(key, UNSET),
            change.new.get(key, UNSET),
            change.attempt,
            f"{change.at:%F %T} UTC",
        )
        for change in changes
        for key in sorted({*change.old, *change.new} - {"name"})
    ]
    if not rows:
        return ""
    heads = ("from step", "key", "before", "after", "attempt", "when")
    folded = rows[SHOWN_CHANGES:]
    more = (
        f"<details><summary>{len(folded)} more</summary>{_table(heads, folded)}</details>"
        if folded
        else ""
    )
    return (
        '<div class="charts"><figure class="wide scrolls"><h2>Changes of the configuration</h2>'
        "<figcaption>Keys that were changed while the run lasted, or with its fork, and the first "
        "step with the new value, at which charts have a dashed line. The configuration below is "
        f"the last one.</figcaption>{_table(heads, rows[:SHOWN_CHANGES])}{more}</figure></div>"
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = "".join(
        f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows
    )
    return (
        f"<table><thead><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr></thead>"
        f"<tbody>{cells}</tbody></table>"
    )


def _figures(history: RunHistory, summary: dict[str, Any]) -> list[str]:
    steps, evaluations = history.steps, history.evaluations
    x = [step.step for step in steps]
    marks = [change.first_step for change in history.state.changes]
    versions = [evaluation.version for evaluation in evaluations]
    first, last = versions[0], versions[-1]

    def metric(name: str) -> list[float]:
        # A step that trained nothing has no such metric, and a method may have none at all.
        return [step.metrics.get(name, math.nan) for step in steps]

    measured = {name for step in steps for name in step.metrics}

    groups = {
        SOURCE_LABELS[source]: [step.counts[source.value] for step in steps] for source in Source
    }
    rewards = {"reward": [step.mean_reward for step in steps]}
    accuracies = [step.accuracy for step in steps]
    if rewards["reward"] != accuracies:
        rewards["accuracy"] = accuracies
    measured_values = {"accuracy": [evaluation.mean_accuracy for evaluation in evaluations]}
    if has_other_rewards(evaluations):
        measured_values["reward"] = [evaluation.mean_reward for evaluation in evaluations]
    phases = {name: value for name, value in summary["seconds"].items() if name != "wall"}
    return [
        figure(
            "Reward",
            "Mean reward of each step's fresh rollouts, before any filter, and their accuracy.",
            charts.lines(x, rewards, raw=True, marks=marks),
        ),
        figure(
            "Held-out accuracy",
            f"Mean accuracy on the evaluation set {evaluations[0].evaluation_set}, by policy "
            "version, and the mean reward if it is another number.",
            charts.lines(versions, measured_values, marks=marks),
        ),
        figure(
            "Accuracy bins over time",
            "Share of held-out prompts with k of their n responses correct.",
            charts.bins_over_time(versions, [evaluation.bins for evaluation in evaluations]),
        ),
        figure(
            "Migration of held-out prompts",
            f"Number of prompts by bin at version {first} (row) and at version {last} (column).",
            charts.migration(history.migration.matrix, f"v{first}", f"v{last}"),
        ),
        figure(
            "Batch composition",
            "Groups of the trainer's batch: fresh (X1), re-evaluated from the hard buffer (X2) and "
            "replayed from the high-quality buffer (X3). The dashed line is the batch capacity; "
            "batches are never padded.",
            charts.stacked(x, groups, y="groups", limit=history.config.batch_capacity),
        ),
        figure(
            "Replay window",
            "Groups of the high-quality buffer with an accuracy in [c2, c3] may be replayed; the "
            "window follows the accuracy r_tot (Eq. 8).",
            charts.replay_window(
                x,
                [step.c2 for step in steps],
                [step.c3 for step in steps],
                [step.r_tot for step in steps],
            ),
        ),
        figure(
            "Prompts unlocked",
            "Share of the held-out prompts with 0 correct at first that have some correct now.",
            charts.lines(versions, {"unlocked": history.unlocked_over_time}),
        ),
        figure(
            "Time by phase of the trainer",
            "In `wait` the trainer waits for rollouts. The collector works at the same time.",
            charts.bars(phases, x="seconds"),
        ),
        *_timeline(history.sync_windows, summary),
        *(
            figure(title, text, charts.lines(x, {label: metric(name)}, raw=True, marks=marks))
            for name, title, label, text in _STEP_METRICS
            if name in measured
        ),
        figure(
            "Staleness",
            "Training step minus the behaviour policy's version, over the groups of the batch.",
            charts.lines(
                x,
                {"mean": metric("staleness_mean"), "max": metric("staleness_max")},
                y="steps",
                marks=marks,
            ),
        ),
    ]


_STEP_METRICS = (
    (
        "responses/cut_off",
        "Responses that were cut off",
        "cut off",
        "Share of the sampled responses that reached rollout.max_response_tokens, and rarely "
        "hold an answer.",
    ),
    (
        "entropy",
        "Entropy",
        "entropy",
        "Entropy of the policy on the trained tokens, in nats per token.",
    ),
    (
        "mismatch/mismatch_kl",
        "Off-policy mismatch",
        "mismatch KL",
        "KL(behaviour policy || trainer's policy before the update), in nats per token.",
    ),
    (
        "theory/bound",
        "Measured lower bound of Theorem 3.2",
        "bound",
        "Mean over the groups of L - 2 K TV(new) - 2 TV(old), estimated from sequence ratios. "
        "Above 0 it says that the update improves the policy; below 0 it says nothing.",
    ),
)
"""Name, title, label and description of the metrics of steps that the report draws."""
TIMELINE_WINDOWS = 3
"""Number of sync windows on the timeline."""


def _timeline(windows: Sequence[SyncWindow], summary: dict[str, Any]) -> list[str]:
    if not windows:
        return []
    drawn = windows[-TIMELINE_WINDOWS:]
    begin = drawn[0].begin
    edges = [(window.begin - begin).total_seconds() for window in drawn]
    edges.append(edges[-1] + drawn[-1].seconds)
    idle = summary["trainer_idle"]
    return [
        figure(
            "Timeline",
            f"Spans of the components in the last {len(drawn)} sync windows, which dashed lines "
            f"separate. In the last {idle['windows']} sync windows the trainer waited for rollouts "
            f"{idle['waited_share']:.1%} of the time. The first rollouts of a window, which it "
            f"cannot avoid waiting for, took {idle['first_rollouts_share']:.1%}.",
            charts.timeline(assign_lanes(drawn), edges),
            wide=True,
        )
    ]
