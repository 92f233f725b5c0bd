"""Metrics of the runs for Prometheus, read from the database.

Every replica of the service reports the same, so that a query takes the maximum over them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy import and_, case, func, select
from sqlalchemy.orm import Session

from services.buffer.api.wire import HEARTBEAT_TIMEOUT_S, OPEN_STATUSES, Status
from services.buffer.storage.tables import EvaluationRecord, Replica, Run, StepRecord


def run_metrics(session: Session) -> bytes:
    """Returns the metrics of all runs that are running, paused or queued, in the text format."""
    registry = CollectorRegistry()
    registry.register(_Families([*_run_families(session), _replica_family(session)]))
    return generate_latest(registry)


class _Families(Collector):
    """A collector of prometheus_client that returns metrics that were read already."""

    def __init__(self, families: list[GaugeMetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield from self._families


def _run_families(session: Session) -> Iterator[GaugeMetricFamily]:
    statuses = GaugeMetricFamily("bapo_runs", "Runs by status", labels=["status"])
    by_status = select(Run.status, func.count()).group_by(Run.status)
    counts = {status: count for status, count in session.execute(by_status)}
    for status in get_args(Status):
        # A status without runs is reported as 0, because alerts compare with it.
        statuses.add_metric([status], counts.get(status, 0))
    yield statuses
    steps = GaugeMetricFamily("bapo_current_step", "Last committed step", labels=["run"])
    ages = GaugeMetricFamily(
        "bapo_seconds_since_commit",
        "Seconds since a running run committed a step, or got its turn",
        labels=["run"],
    )
    rewards = GaugeMetricFamily(
        "bapo_mean_reward", "Mean reward of the last step's fresh responses", labels=["run"]
    )
    accuracies = GaugeMetricFamily(
        "bapo_held_out_accuracy",
        "Mean accuracy of the last evaluation on a set",
        labels=["run", "evaluation_set"],
    )
    held_out_rewards = GaugeMetricFamily(
        "bapo_held_out_reward",
        "Mean reward of the last evaluation on a set",
        labels=["run", "evaluation_set"],
    )
    last_event = func.greatest(StepRecord.committed_at, Run.queued_at, Run.created_at)
    rows = session.execute(
        select(
            Run.name,
            Run.status,
            Run.current_step,
            func.extract("epoch", func.now() - last_event).label("age"),
            StepRecord.mean_reward,
        )
        .outerjoin(
            StepRecord, and_(StepRecord.run_id == Run.id, StepRecord.step == Run.current_step)
        )
        .where(Run.status.in_(OPEN_STATUSES))
    )
    for name, status, step, age, mean_reward in rows:
        steps.add_metric([name], step)
        if status == "running":
            ages.add_metric([name], float(age))
        if mean_reward is not None:
            rewards.add_metric([name], mean_reward)
    last_evaluations = (
        select(
            Run.name,
            EvaluationRecord.evaluation_set,
            EvaluationRecord.mean_accuracy,
            EvaluationRecord.mean_reward,
        )
        .join(Run, Run.id == EvaluationRecord.run_id)
        .where(Run.status.in_(OPEN_STATUSES))
        .distinct(Run.name, EvaluationRecord.evaluation_set)
        .order_by(Run.name, EvaluationRecord.evaluation_set, EvaluationRecord.version.desc())
    )
    for name, evaluation_set, accuracy, reward in session.execute(last_evaluations):
        accuracies.add_metric([name, evaluation_set], accuracy)
        held_out_rewards.add_metric([name, evaluation_set], reward)
    yield from (steps, ages, rewards, accuracies, held_out_rewards)


def _replica_family(session: Session) -> GaugeMetricFamily:
    """Counts the rollout replicas of open runs; those without a recent heartbeat are `silent`."""
    replicas = GaugeMetricFamily(
        "bapo_replicas", "Rollout replicas by state", labels=["run", "state"]
    )
    age = func.extract("epoch", func.now() - Replica.last_seen)
    state = case((age > HEARTBEAT_TIMEOUT_S, "silent"), else_=Replica.state).label("seen_as")
    rows = session.execute(
        select(Run.name, state, func.count())
        .join(Run, Run.id == Replica.run_id)
        .where(Run.status.in_(OPEN_STATUSES))
        .group_by(Run.name, "seen_as")
    )
    for name, seen_as, count in rows:
        replicas.add_metric([name, seen_as], count)
    return replicas
