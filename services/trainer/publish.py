"""Publishing weights while training goes on.

The weights are copied at once and sent in the background: shards, then their manifest, then the row
that makes the version exist. Nobody sees a version before that, and a process that dies in between
leaves objects without a row.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from services.buffer.api.client import BufferClient, none_if_missing
from services.common import layout
from services.common.objectstore import ObjectStore
from services.trainer.background import Background
from services.trainer.export import as_saved, model_files
from services.trainer.lora import merged, plain_weights
from services.trainer.nccl_broadcast import NcclBroadcaster
from services.trainer.ranks import Ranks

log = logging.getLogger(__name__)


class WeightPublisher(Background):
    """Sends one version at a time; a failure is raised by the next call."""

    def __init__(
        self,
        buffer: BufferClient,
        store: ObjectStore,
        *,
        source: Path,
        dtype: torch.dtype | None,
        ranks: Ranks,
        direct: NcclBroadcaster | None = None,
    ) -> None:
        """`source` has the tokenizer and the configuration; `dtype` None keeps the model's. What is
        stored is sent to the replicas by `direct` as well."""
        self._buffer, self._store = buffer, store
        self._source, self._dtype, self._ranks, self._direct = source, dtype, ranks, direct
        super().__init__("publish")
        self._copies: dict[str, Tensor] = {}
        """Kept from version to version: memory that is new each time is slow to fill."""

    def publish(self, version: int, model: nn.Module) -> None:
        """Returns when the weights are copied; the version exists some time after.

        Every rank calls it and gives its shards; rank 0 sends.
        """
        self.settle()
        if self._ranks.shared(lambda: self._published(version)):
            return
        copied = self._copy(model)
        if self._ranks.speaks:
            self.begin(partial(self._send, version, model, copied))

    def _copy(self, model: nn.Module) -> dict[str, Tensor]:
        """On the CPU, where training does not change it. What is tied stays one tensor.

        No more than one whole tensor at a time is on the device; only rank 0 keeps them.
        """
        first: dict[int, str] = {}
        for name, tensor, adapted in plain_weights(model):
            owner = first.setdefault(id(tensor), name)
            if owner == name:
                found = merged(tensor, adapted)
                if self._ranks.speaks:
                    self._keep(name, found)
            elif self._ranks.speaks:
                self._copies[name] = self._copies[owner]
        return dict(self._copies)

    def _keep(self, name: str, tensor: Tensor) -> None:
        if name not in self._copies:
            floating = self._dtype if tensor.is_floating_point() else None
            self._copies[name] = torch.empty_like(tensor, device="cpu", dtype=floating)
        self._copies[name].copy_(tensor)

    def _published(self, version: int) -> bool:
        return none_if_missing(lambda: self._buffer.weights(version)) is not None

    def _send(self, version: int, model: nn.Module, weights: dict[str, Tensor]) -> None:
        started = time.monotonic()
        saved = as_saved(model, weights)
        files = model_files(model, saved, self._source)
        digest = self._store.put_files(layout.weights(self._buffer.run, version), files)
        self._buffer.publish_weights(version, digest)
        seconds = round(time.monotonic() - started, 3)
        log.info("weights published", extra={"version": version, "seconds": seconds})
        if self._direct is not None:
            served = self._direct.send(version, digest, saved)
            log.info("weights sent", extra={"version": version, "replicas": served})
            if self._direct.stuck:
                self._copies = {}  # these are not ours alone any more
