"""The table of evaluation sets with mean@n, pass@n, maj@n and the mean reward, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from services.buffer.api.wire import Evaluation, Score

COLUMNS = ("set", "prompts", "n", "mean@n", "pass@n", "maj@n", "reward", "bins")
INTERVALS = (
    "In brackets: the 95% confidence interval of the mean over the prompts, mean ± 1.96 s / √N."
)


def score_of(evaluation: Evaluation, metric: Literal["mean", "pass", "maj"]) -> Score | None:
    """Returns the score with the largest k of a metric; None if the evaluation has none."""
    scores = [score for score in evaluation.scores if score.metric == metric]
    return max(scores, key=lambda score: score.k, default=None)


def format_score(score: Score | None) -> str:
    """Returns, for example, "0.412 [0.301–0.523]" without a break, or "-" without a score."""
    if score is None:
        return "-"
    return f"{score.value:.3f}\N{NO-BREAK SPACE}[{score.low:.3f}–{score.high:.3f}]"


def has_other_rewards(evaluations: Sequence[Evaluation]) -> bool:
    """Returns whether the mean reward of an evaluation is another number than its accuracy."""
    return any(abs(each.mean_reward - each.mean_accuracy) > 1e-6 for each in evaluations)


def score_rows(evaluations: Sequence[Evaluation]) -> list[list[str]]:
    """Returns a row of `COLUMNS` for each evaluation, and their averages if there are several.

    Every set counts alike in an average, as in Table 1 of the paper. With one sample, only mean@n
    is a number.
    """
    rows = [
        [
            evaluation.evaluation_set,
            str(evaluation.prompts),
            str(evaluation.samples),
            *(format_score(score_of(evaluation, metric)) for metric in ("mean", "pass", "maj")),
            f"{evaluation.mean_reward:.3f}",
            " ".join(map(str, evaluation.bins)),
        ]
        for evaluation in evaluations
    ]
    if len(evaluations) > 1:
        reward = sum(evaluation.mean_reward for evaluation in evaluations) / len(evaluations)
        averages = [*map(_average, _by_metric(evaluations)), f"{reward:.3f}"]
        rows.append(["average", "", "", *averages, ""])
    return rows


def _by_metric(evaluations: Sequence[Evaluation]) -> list[list[Score | None]]:
    return [
        [score_of(evaluation, metric) for evaluation in evaluations]
        for metric in ("mean", "pass", "maj")
    ]


def _average(scores: Sequence[Score | None]) -> str:
    values = [score.value for score in scores if score is not None]
    return f"{sum(values) / len(values):.3f}" if len(values) == len(scores) else "-"
