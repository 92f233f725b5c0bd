"""The digest chain of a run: each committed step has a digest of itself and of the step before.

Whoever knows the last link can tell whether a batch, weights, the configuration or the code of
an earlier step was another one. `bapo audit` checks the links and re-trains the steps. The changes
of a configuration are a chain of their own, which begins with the initial configuration; a step
links to the last change that was in force.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from bapo_core.config.changes import values_at
from bapo_core.errors import BapoError
from services.buffer.api import wire


def link(
    previous: str | None,
    config: Mapping[str, Any],
    step: int,
    digests: wire.StepDigests,
    changes: Sequence[wire.RecordedChange] = (),
) -> wire.ChainLink:
    """Returns the link of a step.

    previous: `chain` of the step before; None at step 1, and after a step without a link. config:
    the run's stored configuration, before or after its changes. The platform is not hashed: it does
    not belong to the result.
    """
    hashed = [
        previous,
        digest_configuration(config, changes, step),
        step,
        digests.weights_before,
        digests.batch,
        digests.weights_after,
        digests.code,
        digests.processes,
    ]
    fields = digests.model_dump(include=set(wire.StepDigests.model_fields))
    return wire.ChainLink(**fields, chain=digest_values(hashed))


def digest_configuration(
    config: Mapping[str, Any], changes: Sequence[wire.RecordedChange], step: int
) -> str:
    """Returns the digest of the configuration of a step.

    It is the digest of the last change that is in force, and that of the initial configuration
    before any. config: the stored configuration, before or after its changes.
    """
    in_force = [change for change in changes if change.first_step <= step]
    return in_force[-1].digest if in_force else digest_values(values_at(config, changes, 0))


def digest_change(previous: str, change: wire.RecordedChange) -> str:
    """Returns the digest of a change of the configuration.

    previous: digest of the change before it, or of the initial configuration.
    """
    return digest_values([previous, change.model_dump(mode="json", exclude={"digest"})])


def add_change(
    config: Mapping[str, Any],
    changes: Sequence[wire.RecordedChange],
    change: wire.RecordedChange,
) -> list[wire.RecordedChange]:
    """Returns the changes with one more, whose digest is that of the chain.

    config: the run's configuration before any change.
    """
    previous = changes[-1].digest if changes else digest_values(config)
    return [*changes, change.model_copy(update={"digest": digest_change(previous, change)})]


def check_changes(config: Mapping[str, Any], changes: Sequence[wire.RecordedChange]) -> None:
    """Raises `BapoError` for the first change whose digest is not that of what is recorded."""
    previous = digest_configuration(config, changes, 0)
    for number, change in enumerate(changes, 1):
        if digest_change(previous, change) != change.digest:
            raise BapoError(
                f"the digest chain breaks at change {number} of the configuration, from step "
                f"{change.first_step} on: its digest is not that of the recorded values, time and "
                "change before, so one of them was changed afterwards"
            )
        previous = change.digest


def check_chain(
    config: Mapping[str, Any],
    steps: Sequence[wire.StepView],
    changes: Sequence[wire.RecordedChange] = (),
    fork: wire.ForkOrigin | None = None,
) -> None:
    """Checks the changes of the configuration, and the links of consecutive steps.

    config: the run's stored configuration, before or after its changes. steps: the first may be any
    step. fork: what the run is a fork of. If its last shared steps were trained again, the weights
    that it began with may be others than the parent's, by the order of the machine's sums.

    Raises `BapoError` as `check_changes` does, and for the first step without a link, whose link is
    not the digest of what is recorded, or that did not begin with the weights that the step before
    had ended with.
    """
    check_changes(config, changes)
    before: wire.ChainLink | None = None
    for view in steps:
        found = view.digests
        if found is None:
            raise BapoError(
                f"step {view.step} has no link in the digest chain: its trainer sent no digests; "
                "audit the steps before and after it apart"
            )
        if view.step == 1 or before is not None:
            previous = None if before is None else before.chain
            if link(previous, config, view.step, found, changes).chain != found.chain:
                raise BapoError(
                    f"the digest chain breaks at step {view.step}: its link is not the digest of "
                    "the recorded digests, configuration and link before, so one of them was "
                    "changed after the commit"
                )
        begins = fork is not None and fork.was_trained_again(view.step - 1)
        if before is not None and before.weights_after != found.weights_before and not begins:
            raise BapoError(
                f"step {view.step} did not begin with the weights that step {view.step - 1} had "
                "ended with: what lies between them was not committed"
            )
        before = found


def digest_values(value: Any) -> str:
    """Returns the SHA-256 of a value that JSON can hold, in hexadecimal."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
