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
from typing import Any, Protocol

import torch
from torch import Tensor

from services.buffer.client import BufferClient
from services.buffer.wire import ReplicaView
from services.common.errors import ServiceError, ServiceUnavailable
from services.common.http import HttpClient
from services.common.offers import STANDS_S, OfferTaken, Parameter, WeightOffer

log = logging.getLogger(__name__)

SEND_WITHIN_S = 600.0
"""A broadcast that a receiver has left never ends: then nothing is sent this way any more."""


class Link(Protocol):
    """Groups of one sender and the workers of one engine."""

    def unique_id(self) -> bytes:
        """Of a group that is to be."""
        ...

    def send(self, unique_id: bytes, receivers: int, tensors: Sequence[Tensor]) -> None:
        """Joins as rank 0 of `receivers` + 1, and broadcasts one tensor after the other."""
        ...


class NcclLink:
    """NCCL from this process's GPU. Tensors on the CPU are copied there one at a time."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._nccl: Any = torch.cuda.nccl  # without types

    def unique_id(self) -> bytes:
        return bytes(self._nccl.unique_id())

    def send(self, unique_id: bytes, receivers: int, tensors: Sequence[Tensor]) -> None:
        torch.cuda.set_device(self._device)  # each thread has its own
        group = [self._nccl.init_rank(receivers + 1, unique_id, 0)]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            # vLLM begins with one of these, and waits for ours.
            self._nccl.all_reduce([torch.zeros(1, device="cuda")], None, 0, [stream], group)
            for tensor in tensors:
                here = tensor.to("cuda").contiguous()
                self._nccl.broadcast([here], 0, [stream], group)
        stream.synchronize()


class DirectSender:
    """Offers each version to every replica, and sends to those that want it."""

    def __init__(self, buffer: BufferClient, token: str, link: Link) -> None:
        self._buffer, self._token, self._link = buffer, token, link
        self._stuck = False

    def send(self, version: int, digest: str, weights: Mapping[str, Tensor]) -> list[str]:
        """The replicas that got the weights, which are those of a published version: names and
        shapes as in its files, the same bytes."""
        if self._stuck:
            return []
        served: list[str] = []
        threads = [
            # A thread whose broadcast hangs cannot be ended, and must not keep the process.
            threading.Thread(
                target=self._serve, args=(each, version, digest, weights, served), daemon=True
            )
            for each in self._buffer.replicas()
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + STANDS_S + SEND_WITHIN_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self._stuck = True
        if self._stuck:
            log.error("a replica left while weights were sent; the object store serves from here")
        return sorted(served)

    def _serve(
        self,
        replica: ReplicaView,
        version: int,
        digest: str,
        weights: Mapping[str, Tensor],
        served: list[str],
    ) -> None:
        unique_id = self._link.unique_id()
        offer = WeightOffer(
            policy_version=version,
            manifest_digest=digest,
            parameters=[
                Parameter(name=name, dtype=str(each.dtype)[6:], shape=list(each.shape))
                for name, each in weights.items()
            ],
            unique_id=base64.b64encode(unique_id).decode(),
        )
        try:
            receivers = self._offer(replica, offer)
        except (ServiceError, ServiceUnavailable) as error:
            log.info("replica %s takes version %d's files: %s", replica.name, version, error)
            return
        try:
            self._link.send(unique_id, receivers, list(weights.values()))
        except RuntimeError as error:  # as torch reports NCCL's
            log.warning("version %d was not sent to %s: %s", version, replica.name, error)
            return
        served.append(replica.name)

    def _offer(self, replica: ReplicaView, offer: WeightOffer) -> int:
        """How many receive, now. Asked once: an offer that is made again would replace itself."""
        http = HttpClient("replica", replica.url, self._token, timeout_s=STANDS_S + 10, give_up_s=0)
        try:
            answer = http.call("POST", "/v1/weights", json=offer.model_dump())
        finally:
            http.close()
        return OfferTaken.model_validate_json(answer.content).receivers
