"""The digest chain of a run: each committed step has a digest of itself and of the step before.

Whoever knows the last link can tell whether a batch, weights, the configuration or the code of
an earlier step was another one. `bapo audit` checks the links and re-trains the steps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from bapo_core.errors import BapoError
from services.buffer.api import wire


def link(
    previous: str | None, config: Mapping[str, Any], step: int, digests: wire.StepDigests
) -> wire.ChainLink:
    """Returns the link of a step.

    previous: `chain` of the step before; None at step 1, and after a step without a link. config:
    the run's stored configuration. The platform is not hashed: it does not belong to the result.
    """
    hashed = [
        previous,
        _digest_of(config),
        step,
        digests.weights_before,
        digests.batch,
        digests.weights_after,
        digests.code,
        digests.processes,
    ]
    fields = digests.model_dump(include=set(wire.StepDigests.model_fields))
    return wire.ChainLink(**fields, chain=_digest_of(hashed))


def check_chain(config: Mapping[str, Any], steps: Sequence[wire.StepView]) -> None:
    """Checks the links of consecutive steps, of which the first may be any.

    Raises `BapoError` for the first step without a link, whose link is not the digest of what is
    recorded, or that did not begin with the weights that the step before had ended with.
    """
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
            if link(previous, config, view.step, found).chain != found.chain:
                raise BapoError(
                    f"the digest chain breaks at step {view.step}: its link is not the digest of "
                    "the recorded digests, configuration and link before, so one of them was "
                    "changed after the commit"
                )
        if before is not None and before.weights_after != found.weights_before:
            raise BapoError(
                f"step {view.step} did not begin with the weights that step {view.step - 1} had "
                "ended with: what lies between them was not committed"
            )
        before = found


def _digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
