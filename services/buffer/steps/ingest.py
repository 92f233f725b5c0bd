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
    """Groups of one step and kind that were sent together."""

    run: str
    step: int
    attempt: int
    kind: wire.Kind
    body: bytes
    """The groups as an Arrow IPC stream."""
    digest: str
    """SHA-256 of `body`."""
    groups: list[GroupRows]
    weights: str | None
    """Manifest digest of the weights that made them, if the sender gave it."""
    evaluation_set: str | None
    """Name of the set of an evaluation; None is the primary one."""


def accept_groups(
    service: Service,
    name: str,
    step: int,
    attempt: int,
    kind: wire.Kind,
    body: bytes,
    weights: str | None = None,
    evaluation_set: str | None = None,
) -> wire.GroupsAccepted:
    """Records the whole groups of an Arrow stream, except those that are recorded already.

    Raises 400 if the stream or one of its groups is not valid for this step, and 409 if the
    attempt was superseded, the step is committed, or the policy version has other weights now.
    """
    groups = _read_groups(body)
    digest = hashlib.sha256(body).hexdigest()
    delivery = _Delivery(name, step, attempt, kind, body, digest, groups, weights, evaluation_set)
    has_new = _check(service, delivery)
    key, expected = _store(service, delivery, has_new)
    return _record(service, delivery, key, expected)


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
        return bool(_select_new(run, delivery))


def _select_new(run: Run, delivery: _Delivery) -> list[GroupRows]:
    step, kind, groups = delivery.step, delivery.kind, delivery.groups
    return select_new(run, step, kind, groups, delivery.evaluation_set)


def _check_weights(run: Run, delivery: _Delivery) -> None:
    """Raises 409 if the groups were made by other weights than their version has now.

    It happens when a trainer has trained the version again while they were being generated.
    """
    version = run.config.rollout_version(delivery.step, delivery.kind)
    if delivery.weights not in (None, weights_digest(run, version)):
        raise conflict(
            f"version {version} of the weights was trained again since these {delivery.kind} "
            f"groups of step {delivery.step} were generated; generate them with the new weights"
        )


def _store(
    service: Service, delivery: _Delivery, has_new: bool
) -> tuple[str, dict[str, ExpectedPrompt]]:
    """Stores the object while the prompts of the step are read; returns its key and the prompts."""
    # The key holds the digest of the content: a repeated or rival delivery writes the same bytes
    # or another object, never other bytes under a key that a row points to.
    key = layout.trajectories(delivery.run, delivery.step, delivery.kind, delivery.digest)
    with (
        service.store_alongside(key, delivery.body if has_new else None),
        service.sessions.begin() as session,
    ):
        run = runs.get_run(session, delivery.run)
        return key, expected_prompts(run, delivery.step, delivery.kind, delivery.evaluation_set)


def _record(
    service: Service, delivery: _Delivery, key: str, expected: dict[str, ExpectedPrompt]
) -> wire.GroupsAccepted:
    """Records the new groups under the lock of the run, which makes the checks final."""
    step, kind = delivery.step, delivery.kind
    with service.write_transaction(delivery.run) as session:
        run = runs.lock_run(session, delivery.run, delivery.attempt)
        _check_weights(run, delivery)
        new = _select_new(run, delivery)
        if depend_on_results(run.config, kind):
            # Since `_store` read what these decide, a rewind may have undone commits, and another
            # delivery may have completed the step.
            expected = expected_prompts(run, step, kind)
        record_groups(run, step, kind, new, expected, key, delivery.digest)
        complete = not missing_groups(run, step, kind, delivery.evaluation_set)
        # The result of a version that is set aside may be another one's: publishing it records it.
        if complete and kind == "evaluation" and not is_set_aside(run, step):
            record_evaluation(run, step, delivery.evaluation_set)
    return wire.GroupsAccepted(
        accepted=len(new), duplicates=len(delivery.groups) - len(new), complete=complete
    )


def accept_proximal(service: Service, name: str, step: int, attempt: int, body: bytes) -> None:
    """Stores and records the trainer's log-probs of groups of this step, for the correction
    `decoupled`.

    Raises 400 if the stream is not valid, 404 if a group is not of this step, and 409 if the
    attempt was superseded.
    """
    try:
        group_ids = set(read_table(body, PROXIMAL_SCHEMA)["group_id"].to_pylist())
    except TrajectoryError as error:
        raise bad_request(f"the body is refused: {error}") from error
    digest = hashlib.sha256(body).hexdigest()
    with service.sessions.begin() as session:
        run = runs.get_run(session, name)
        runs.check_attempt(run, attempt)
    key = layout.trajectories(name, step, "proximal", digest)
    service.store.put(key, body)
    with service.write_transaction(name) as session:
        run = runs.lock_run(session, name, attempt)
        record_proximal(run, step, sorted(group_ids), key, digest)
