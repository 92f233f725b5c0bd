"""Groups come in: checked, written to the object store, then recorded, in this order.

A row exists only after its object does, so none points to a missing or torn one. An object whose
row never came (a crash in between, a rival that was faster) is an orphan, which `gc` finds.
"""

from __future__ import annotations

import hashlib

from services.buffer import runs, steps
from services.buffer.api import wire
from services.buffer.api.trajectories import (
    PROXIMAL_SCHEMA,
    SCHEMA,
    TrajectoryError,
    check_groups,
    read_table,
)
from services.buffer.service import Service
from services.common import layout
from services.common.errors import bad_request


def accept_groups(
    service: Service, name: str, step: int, attempt: int, kind: wire.Kind, body: bytes
) -> wire.GroupsAccepted:
    """Records the whole groups of an Arrow stream, except those that have landed before."""
    try:
        found = check_groups(read_table(body, SCHEMA))
    except TrajectoryError as error:
        raise bad_request(f"the body is refused: {error}") from error
    if len({group.prompt_uid for group in found}) != len(found):
        raise bad_request("the body is refused: a prompt has more than one group")
    with service.sessions.begin() as session:
        run = runs.get_run(session, name)
        runs.check_attempt(run, attempt)
        wanted = steps.new_groups(session, run, step, kind, found)
    digest = hashlib.sha256(body).hexdigest()
    # The name holds the content's digest: a retry or a rival writes another object or the same
    # bytes, never other bytes under a name that a row points to.
    key = layout.trajectories(name, step, kind, digest)
    with (
        service.store_alongside(key, body if wanted else None),
        service.sessions.begin() as session,
    ):
        known = steps.places(session, runs.get_run(session, name), step, kind)
    with service.write_transaction(name) as session:
        run = runs.lock_run(session, name, attempt)
        wanted = steps.new_groups(session, run, step, kind, found)
        if kind == "reevaluation":
            # Only under the lock is it certain which prompts those are.
            known = steps.places(session, run, step, kind)
        steps.record_groups(session, run, step, kind, wanted, known, key, digest)
        complete = not steps.groups_complete(session, run, step, kind)
        if complete and kind == "evaluation":
            steps.record_evaluation(session, run, step)
    return wire.GroupsAccepted(
        accepted=len(wanted), duplicates=len(found) - len(wanted), complete=complete
    )


def accept_proximal(service: Service, name: str, step: int, attempt: int, body: bytes) -> None:
    """Records the trainer's log-probs of groups of this step."""
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
        steps.record_proximal(session, run, step, sorted(group_ids), key, digest)
