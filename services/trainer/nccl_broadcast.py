"""Weights straight from the trainer to the replicas' engines, beside the object store.

Experimental: the protocol is tested against stand-ins for engine and NCCL; NCCL itself has not run.
Nothing depends on it. A replica that gets no weights this way takes them from the object store.
"""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from torch import Tensor

from services.buffer.api.client import BufferClient
from services.buffer.api.wire import ReplicaView
from services.common.errors import ServiceError, ServiceUnavailable
from services.common.http import HttpClient
from services.rollout.api.offers import OFFER_TTL_S, OfferTaken, Parameter, WeightOffer
from services.trainer.nccl import DATA_TYPES, NcclError

log = logging.getLogger(__name__)

SILENT_S = 10.0
"""A replica that has said nothing for so long is not asked."""
SEND_WITHIN_S = 600.0
"""A group that a receiver has left never ends by itself."""
GIVE_UP_WITHIN_S = 10.0


class Link(Protocol):
    """Groups of one sender and the workers of one engine."""

    def unique_id(self) -> bytes:
        """Of a group that is to be."""
        ...

    def send(self, unique_id: bytes, receivers: int, tensors: Sequence[Tensor]) -> None:
        """Joins as rank 0 of `receivers` + 1, and broadcasts one tensor after the other. Raises
        `NcclError`."""
        ...

    def abort(self, unique_id: bytes) -> None:
        """Makes `send` end, if the group has come together."""
        ...


class NcclBroadcaster:
    """Offers each version to every replica that serves, and sends to those that want it."""

    def __init__(self, buffer: BufferClient, token: str, link: Link) -> None:
        self._buffer, self._token, self._link = buffer, token, link
        self._unused: list[bytes] = []
        """Ids of groups that came to nothing."""
        self.stuck = False
        """A send could not be ended: nothing is sent any more, and it still holds its tensors."""

    def send(self, version: int, digest: str, weights: Mapping[str, Tensor]) -> list[str]:
        """The replicas that got the weights, which are those of a published version: names and
        shapes as in its files, the same bytes."""
        unknown = {str(each.dtype) for each in weights.values() if each.dtype not in DATA_TYPES}
        if self.stuck or unknown:
            reason = "an earlier one hangs" if self.stuck else f"it has {', '.join(unknown)}"
            log.info("version %d is not sent directly: %s", version, reason)
            return []
        parameters = [
            Parameter(name=name, dtype=str(each.dtype)[6:], shape=list(each.shape))
            for name, each in weights.items()
        ]

        def offer(unique_id: bytes) -> WeightOffer:
            return WeightOffer(
                policy_version=version,
                manifest_digest=digest,
                parameters=parameters,
                unique_id=base64.b64encode(unique_id).decode(),
            )

        sends = [
            _Send(self._link, replica, self._token, offer(self._id()), list(weights.values()))
            for replica in self._buffer.replicas()
            if replica.state == "serving" and replica.silent_s < SILENT_S
        ]
        for each in sends:
            each.start()
        deadline = time.monotonic() + OFFER_TTL_S + SEND_WITHIN_S
        for each in sends:
            each.end(max(0.0, deadline - time.monotonic()))
        self.stuck = any(each.is_alive() for each in sends)
        if self.stuck:
            log.error("a replica left while weights were sent; the object store serves from here")
        self._unused += [each.unique_id for each in sends if each.outcome == "refused"]
        return sorted(each.replica.name for each in sends if each.outcome == "sent")

    def _id(self) -> bytes:
        return self._unused.pop() if self._unused else self._link.unique_id()


class _Send(threading.Thread):
    """To one replica. A daemon, because it may hang for good."""

    def __init__(
        self,
        link: Link,
        replica: ReplicaView,
        token: str,
        offer: WeightOffer,
        tensors: Sequence[Tensor],
    ) -> None:
        super().__init__(name=f"send-{replica.name}", daemon=True)
        self.replica, self.unique_id = replica, base64.b64decode(offer.unique_id)
        self.outcome = ""
        """refused, failed or sent, once it is."""
        self._link, self._token, self._offer, self._tensors = link, token, offer, tensors

    def run(self) -> None:
        version, name = self._offer.policy_version, self.replica.name
        try:
            receivers = self._make_offer()
        except (ServiceError, ServiceUnavailable) as error:
            log.info("replica %s takes version %d's files: %s", name, version, error)
            # Whoever has not answered may have joined: that group's id is used up.
            self.outcome = "refused" if isinstance(error, ServiceError) else "failed"
            return
        try:
            self._link.send(self.unique_id, receivers, self._tensors)
        except (NcclError, RuntimeError) as error:
            log.warning("version %d was not sent to %s: %s", version, name, error)
            self.outcome = "failed"
            return
        self.outcome = "sent"

    def end(self, seconds: float) -> None:
        """Waits so long, then makes it end."""
        self.join(seconds)
        if self.is_alive():
            with suppress(NcclError):
                self._link.abort(self.unique_id)
            self.join(GIVE_UP_WITHIN_S)

    def _make_offer(self) -> int:
        """How many receive, now. Asked once: an offer that is made again would replace itself."""
        http = HttpClient(
            "replica", self.replica.url, self._token, timeout_s=OFFER_TTL_S + 10, give_up_s=0
        )
        try:
            answer = http.call("POST", "/v1/weights", json=self._offer.model_dump())
        finally:
            http.close()
        return OfferTaken.model_validate_json(answer.content).receivers
