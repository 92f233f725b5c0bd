"""Publishing weights while training goes on.

The weights are copied at once and sent in the background: shards, then their manifest, then the row
that makes the version exist. Nobody sees a version before that, and a process that dies in between
leaves objects without a row.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from services.buffer.client import BufferClient
from services.common.errors import ServiceError
from services.common.objectstore import ObjectStore
from services.trainer.export import model_files

log = logging.getLogger(__name__)


class WeightPublisher:
    """Sends one version at a time; a failure is raised by the next call."""

    def __init__(
        self,
        buffer: BufferClient,
        store: ObjectStore,
        *,
        source: Path,
        dtype: torch.dtype | None,
    ) -> None:
        """`source` has the tokenizer and the configuration; `dtype` None keeps the model's."""
        self._buffer, self._store = buffer, store
        self._source, self._dtype = source, dtype
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._sending: Future[None] | None = None
        self._copies: dict[str, Tensor] = {}
        """Kept from version to version: memory that is new each time is slow to fill."""

    def publish(self, version: int, model: nn.Module) -> None:
        """Returns when the weights are copied; the version exists some time after."""
        self.settle()
        if self._published(version):
            return
        self._sending = self._sender.submit(self._send, version, model, self._copy(model))

    def _copy(self, model: nn.Module) -> dict[str, Tensor]:
        """On the CPU, where training does not change it. What is tied stays one tensor."""
        seen: dict[tuple[int, torch.Size], Tensor] = {}
        for name, tensor in model.state_dict().items():
            key = (tensor.data_ptr(), tensor.shape)
            if key not in seen:
                if name not in self._copies:
                    floating = self._dtype if tensor.is_floating_point() else None
                    self._copies[name] = torch.empty_like(tensor, device="cpu", dtype=floating)
                seen[key] = self._copies[name].copy_(tensor.detach())
            self._copies[name] = seen[key]
        return dict(self._copies)

    def check(self) -> None:
        """Raises what has gone wrong in the background."""
        if self._sending is not None and self._sending.done():
            self._sending.result()

    def settle(self) -> None:
        """Returns when everything is published; raises what has gone wrong."""
        if self._sending is not None:
            self._sending.result()

    def _published(self, version: int) -> bool:
        try:
            self._buffer.weights(version)
        except ServiceError as error:
            if error.status != 404:
                raise
            return False
        return True

    def _send(self, version: int, model: nn.Module, weights: dict[str, Tensor]) -> None:
        started = time.monotonic()
        files = model_files(model, weights, self._source)
        digest = self._store.put_files(f"runs/{self._buffer.run}/weights/v{version}", files)
        self._buffer.publish_weights(version, digest)
        seconds = round(time.monotonic() - started, 3)
        log.info("weights published", extra={"version": version, "seconds": seconds})
