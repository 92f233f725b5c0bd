"""Receives groups and log-probs: checks them, stores their objects, then records their rows.

A row exists only after its object does, so no row points to a missing or torn one. An object
whose row was never written (after a crash, or when another sender was faster) is an orphan, which
garbage collection finds.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from services.buffer.api import wire
from services.buffer.api.trajectories import (
    PROXIMAL_SCHEMA,
    GroupRows,
    TrajectoryError,
    check_groups,
    read_table,
    read_trajectories,
)
from services.buffer.queries.evaluations import record_evaluation
from services.buffer.runs import runs
from services.buffer.service import Service
from services.buffer.steps.step_groups import (
    ExpectedPrompt,
    missing_groups,
    record_groups,
    select_new,
)
from services.buffer.steps.step_prompts import depend_on_results, expected_prompts
from services.buffer.storage.artifacts import is_set_aside, weights_digest
from services.buffer.storage.stored_groups import record_proximal
from services.buffer.storage.tables import Run
from services.common import layout
from services.common.problems import bad_request, conflict


@dataclass(frozen=True, slots=True)
class _Delivery:
    """Groups of the same rollouts that were sent together."""

    run: str
    rollouts: wire.Rollouts
    attempt: int
    body: bytes
    """The groups as an Arrow IPC stream."""
    digest: str
    """SHA-256 of `body`."""
    groups: list[GroupRows]
    weights: str | None
    """Manifest digest of the weights that made them, if the sender gave it."""


def accept_groups(
    service: Service,
    name: str,
    rollouts: wire.Rollouts,
    attempt: int,
    body: bytes,
    weights: str | None = None,
) -> wire.GroupsAccepted:
    """Records the whole groups of an Arrow stream, except those that are recorded already.

    Raises 400 if the stream or one of its groups is not valid for this step, and 409 if the
    attempt was superseded, the step is committed, or the policy version has other weights now.
    """
    _check_attempt(service, name, attempt)
    groups = _read_groups(body)
    digest = hashlib.sha256(body).hexdigest()
    delivery = _Delivery(name, rollouts, attempt, body, digest, groups, weights)
    has_new = _check(service, delivery)
    key, expected = _store(service, delivery, has_new)
    return _record(service, delivery, key, expected)


def _check_attempt(service: Service, name: str, attempt: int) -> None:
    """Checks run and attempt, before the body is decoded."""
    with service.sessions() as session:
        runs.check_attempt(runs.get_run(session, name), attempt)


def _read_groups(body: bytes) -> list[GroupRows]:
    try:
        groups = check_groups(read_trajectories(body))
    except TrajectoryError as error:
        raise bad_request(f"the body is refused: {error}") from error
    if len({group.prompt_uid for group in groups}) != len(groups):
        raise bad_request("the body is refused: a prompt has more than one group")
    return groups


def _check(service: Service, delivery: _Delivery) -> bool:
    """Checks attempt and groups before anything is stored; returns whether a group is new."""
    with service.sessions.begin() as session:
        run = runs.get_run(session, delivery.run)
        runs.check_attempt(run, delivery.attempt)
        _check_weights(run, delivery)
        return bool(select_new(run, delivery.rollouts, delivery.groups))


def _check_weights(run: Run, delivery: _Delivery) -> None:
    """Raises 409 if the groups were made by other weights than their version has now.

    It happens when a trainer has trained the version again while they were being generated.
    """
    step, kind, _ = delivery.rollouts
    version = run.config.rollout_version(step, kind)
    if delivery.weights not in (None, weights_digest(run, version)):
        raise conflict(
            f"version {version} of the weights was trained again since these {kind} groups of "
            f"step {step} were generated; generate them with the new weights"
        )


def _store(
    service: Service, delivery: _Delivery, has_new: bool
) -> tuple[str, dict[str, ExpectedPrompt]]:
    """Stores the object while the prompts of the step are read; returns its key and the prompts."""
    # The key holds the digest of the content: a repeated or rival delivery writes the same bytes
    # or another object, never other bytes under a key that a row points to.
    step, kind, _ = delivery.rollouts
    key = layout.trajectories(delivery.run, step, kind, delivery.digest)
    with (
        service.store_alongside(key, delivery.body if has_new else None),
        service.sessions.begin() as session,
    ):
        run = runs.get_run(session, delivery.run)
        return key, expected_prompts(run, delivery.rollouts)


def _record(
    service: Service, delivery: _Delivery, key: str, expected: dict[str, ExpectedPrompt]
) -> wire.GroupsAccepted:
    """Records the new groups under the lock of the run, which makes the checks final."""
    rollouts = delivery.rollouts
    with service.write_transaction(delivery.run) as session:
        run = runs.lock_run(session, delivery.run, delivery.attempt)
        _check_weights(run, delivery)
        new = select_new(run, rollouts, delivery.groups)
        if depend_on_results(run.config, rollouts.kind):
            # Since `_store` read what these decide, a rewind may have undone commits, and another
            # delivery may have completed the step.
            expected = expected_prompts(run, rollouts)
        record_groups(run, rollouts, new, expected, key, delivery.digest)
        complete = not missing_groups(run, rollouts)
        # The result of a version that is set aside may be another one's: publishing it records it.
        if complete and rollouts.kind == "evaluation" and not is_set_aside(run, rollouts.step):
            record_evaluation(run, rollouts.step, rollouts.evaluation_set)
    return wire.GroupsAccepted(
        accepted=len(new), duplicates=len(delivery.groups) - len(new), complete=complete
    )


def accept_proximal(service: Service, name: str, step: int, attempt: int, body: bytes) -> None:
    """Stores and records the trainer's log-probs of groups of this step, for the correction
    `decoupled`.

    Raises 400 if the stream is not valid, 404 if a group is not of this step, and 409 if the
    attempt was superseded.
    """
    _check_attempt(service, name, attempt)
    try:
        group_ids = set(read_table(body, PROXIMAL_SCHEMA)["group_id"].to_pylist())
    except TrajectoryError as error:
        raise bad_request(f"the body is refused: {error}") from error
    digest = hashlib.sha256(body).hexdigest()
    key = layout.trajectories(name, step, "proximal", digest)
    service.store.put(key, body)
    with service.write_transaction(name) as session:
        run = runs.lock_run(session, name, attempt)
        record_proximal(run, step, sorted(group_ids), key, digest)
