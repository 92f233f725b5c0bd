"""Broadcasts weights from the trainer to the replicas' engines by NCCL, beside the object store.

Experimental: the protocol is tested against stand-ins for engine and NCCL; NCCL itself has not run.
Nothing depends on it: a replica that gets no weights this way takes them from the object store.
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
from services.buffer.api.wire import HEARTBEAT_TIMEOUT_S, CallableReplica
from services.common.errors import ServiceCallError, ServiceError
from services.common.http import HttpClient
from services.rollout.api.addresses import ReplicaHosts
from services.rollout.api.offers import OFFER_TTL_S, OfferTaken, Parameter, WeightOffer
from services.trainer.export import dtype_name
from services.trainer.nccl import DATA_TYPES, NcclError

log = logging.getLogger(__name__)

SEND_WITHIN_S = 600.0
"""Seconds for a broadcast, then it is aborted: one whose receiver died blocks for ever."""
GIVE_UP_WITHIN_S = 10.0
"""Seconds for an aborted broadcast to end."""


class Communicator(Protocol):
    """Opens communicators with the workers of an engine; `NcclCommunicator` is the real one."""

    def unique_id(self) -> bytes:
        """Creates an id for a new communicator."""
        ...

    def send(self, unique_id: bytes, receivers: int, tensors: Sequence[Tensor]) -> None:
        """Joins as rank 0 of `receivers` + 1, and broadcasts one tensor after the other.

        Raises `NcclError`.
        """
        ...

    def abort(self, unique_id: bytes) -> None:
        """Makes `send` end, if all receivers have joined."""
        ...


class NcclBroadcaster:
    """Offers each version to every replica that serves, and broadcasts it to those that accept."""

    def __init__(
        self, buffer: BufferClient, hosts: ReplicaHosts, communicator: Communicator
    ) -> None:
        """hosts: where replicas may be; those that report other addresses get no offer."""
        self._buffer, self._hosts, self._communicator = buffer, hosts, communicator
        self._unused_ids: list[bytes] = []
        """Ids whose offers were refused, so that no receiver has joined."""
        self.stuck = False
        """Whether a broadcast could not be aborted: it holds its tensors, and no other is begun."""

    def send(self, version: int, digest: str, weights: Mapping[str, Tensor]) -> list[str]:
        """Returns the names of the replicas that got the weights, sorted.

        digest: of the published version's manifest. weights: under the names, and in the shapes and
        dtypes, of its files.
        """
        unsupported = {
            str(tensor.dtype) for tensor in weights.values() if tensor.dtype not in DATA_TYPES
        }
        if self.stuck or unsupported:
            reason = (
                "an earlier broadcast is stuck"
                if self.stuck
                else f"NCCL has no {', '.join(unsupported)}"
            )
            log.info("version %d is not broadcast by NCCL: %s", version, reason)
            return []
        parameters = [
            Parameter(name=name, dtype=dtype_name(tensor.dtype), shape=list(tensor.shape))
            for name, tensor in weights.items()
        ]

        def offer(unique_id: bytes) -> WeightOffer:
            return WeightOffer(
                policy_version=version,
                manifest_digest=digest,
                parameters=parameters,
                unique_id=base64.b64encode(unique_id).decode(),
            )

        sends = [
            _Send(
                self._communicator,
                replica,
                offer(self._next_id()),
                list(weights.values()),
            )
            for replica in self._buffer.replica_credentials()
            if replica.state == "serving"
            and replica.silent_s < HEARTBEAT_TIMEOUT_S
            and self._hosts.admit(replica.name, replica.url)
        ]
        for send in sends:
            send.start()
        deadline = time.monotonic() + OFFER_TTL_S + SEND_WITHIN_S
        for send in sends:
            send.end(max(0.0, deadline - time.monotonic()))
        self.stuck = any(send.is_alive() for send in sends)
        if self.stuck:
            log.error(
                "a broadcast to a replica cannot be aborted; from now on replicas get weights from "
                "the object store only"
            )
        self._unused_ids += [send.unique_id for send in sends if send.outcome == "refused"]
        return sorted(send.replica.name for send in sends if send.outcome == "sent")

    def _next_id(self) -> bytes:
        return self._unused_ids.pop() if self._unused_ids else self._communicator.unique_id()


class _Send(threading.Thread):
    """Broadcasts one version to one replica. A daemon, because it may block for ever."""

    def __init__(
        self,
        communicator: Communicator,
        replica: CallableReplica,
        offer: WeightOffer,
        tensors: Sequence[Tensor],
    ) -> None:
        super().__init__(name=f"send-{replica.name}", daemon=True)
        self.replica, self.unique_id = replica, base64.b64decode(offer.unique_id)
        self.outcome = ""
        """`refused`, `failed` or `sent`; empty until then."""
        self._communicator = communicator
        self._offer, self._tensors = offer, tensors

    def run(self) -> None:
        version, name = self._offer.policy_version, self.replica.name
        try:
            receivers = self._make_offer()
        except ServiceCallError as error:
            log.info("replica %s loads version %d from files: %s", name, version, error)
            # A replica that has not answered may have joined, which uses up the id.
            self.outcome = "refused" if isinstance(error, ServiceError) else "failed"
            return
        try:
            self._communicator.send(self.unique_id, receivers, self._tensors)
        except (NcclError, RuntimeError) as error:
            log.warning("version %d was not broadcast to %s: %s", version, name, error)
            self.outcome = "failed"
            return
        self.outcome = "sent"

    def end(self, seconds: float) -> None:
        """Waits for the broadcast, and aborts it after `seconds`."""
        self.join(seconds)
        if self.is_alive():
            with suppress(NcclError):
                self._communicator.abort(self.unique_id)
            self.join(GIVE_UP_WITHIN_S)

    def _make_offer(self) -> int:
        """Returns the number of receivers that join now.

        Sent only once: a second offer would replace the first.
        """
        http = HttpClient(
            "replica",
            self.replica.url,
            self.replica.credential,
            timeout_s=OFFER_TTL_S + 10,
            give_up_s=0,
        )
        try:
            answer = http.call("POST", "/v1/weights", json=self._offer.model_dump())
        finally:
            http.close()
        return OfferTaken.model_validate_json(answer.content).receivers
