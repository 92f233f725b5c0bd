"""Publishes weights while training goes on.

The weights are copied to the CPU, then uploaded in the background: files, their manifest, and last
the row that makes the version exist. No reader sees a version before that; a process that dies in
between leaves objects without a row, which `bapo gc` deletes.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from services.buffer.api.client import BufferClient, none_if_missing
from services.common import layout
from services.common.objectstore import ObjectStore
from services.trainer.background import Background
from services.trainer.export import as_saved, model_files
from services.trainer.lora import merge_adapter, plain_weights
from services.trainer.nccl_broadcast import NcclBroadcaster
from services.trainer.ranks import Ranks

log = logging.getLogger(__name__)


class WeightPublisher(Background):
    """Publishes one version at a time; the next call raises the error of one that failed."""

    def __init__(
        self,
        buffer: BufferClient,
        store: ObjectStore,
        *,
        source: Path,
        dtype: torch.dtype | None,
        ranks: Ranks,
        broadcaster: NcclBroadcaster | None = None,
    ) -> None:
        """source: directory of the initial model, for its tokenizer. dtype: of the published
        weights; None keeps the model's. broadcaster: sends them to the replicas as well."""
        self._buffer, self._store = buffer, store
        self._source, self._dtype, self._ranks = source, dtype, ranks
        self._broadcaster = broadcaster
        super().__init__("publish")
        self._recorded: Future[None] | None = None
        """Done once the row of the last version exists."""
        self._copies: dict[str, Tensor] = {}
        """Weights on the CPU by name. The memory is reused: new memory is slow to fill."""

    def publish(self, version: int, model: nn.Module) -> None:
        """Copies the weights and returns; the version exists some time later.

        Every rank calls it and contributes its shards; rank 0 uploads. A version that exists is not
        published again. Raises the error of the version before, if that failed.
        """
        if self._ranks.from_main(lambda: self._settled_and_published(version)):
            return
        weights = self._copy(model)
        if self._ranks.is_main:
            self._recorded = Future()
            self.begin(partial(self._upload, version, model, weights, self._recorded))

    def wait_until_recorded(self) -> None:
        """Waits until the version exists; its broadcast may go on. Every rank calls it.

        Raises the error of publishing.
        """
        recorded = self._recorded
        self._ranks.from_main(lambda: None if recorded is None else recorded.result())

    def _copy(self, model: nn.Module) -> dict[str, Tensor]:
        """Copies the weights to the CPU of rank 0; tied weights stay one tensor.

        At most one full tensor at a time is on the device.
        """
        first_names: dict[int, str] = {}
        for name, tensor, adapted in plain_weights(model):
            first_name = first_names.setdefault(id(tensor), name)
            if first_name == name:
                weight = merge_adapter(tensor, adapted)
                if self._ranks.is_main:
                    self._copy_weight(name, weight)
            elif self._ranks.is_main:
                self._copies[name] = self._copies[first_name]
        return dict(self._copies)

    def _copy_weight(self, name: str, tensor: Tensor) -> None:
        if name not in self._copies:
            floating = self._dtype if tensor.is_floating_point() else None
            self._copies[name] = torch.empty_like(tensor, device="cpu", dtype=floating)
        self._copies[name].copy_(tensor)

    def _settled_and_published(self, version: int) -> bool:
        self.settle()
        return none_if_missing(lambda: self._buffer.weights(version)) is not None

    def _upload(
        self, version: int, model: nn.Module, weights: dict[str, Tensor], recorded: Future[None]
    ) -> None:
        started = time.monotonic()
        saved = as_saved(model, weights)
        try:
            files = model_files(model, saved, self._source)
            prefix = layout.weights(self._buffer.run, version, self._buffer.attempt)
            digest = self._store.put_files(prefix, files)
            self._buffer.publish_weights(version, digest)
        except BaseException as error:
            recorded.set_exception(error)
            raise
        recorded.set_result(None)
        seconds = round(time.monotonic() - started, 3)
        log.info("weights published", extra={"version": version, "seconds": seconds})
        if self._broadcaster is not None:
            replicas = self._broadcaster.send(version, digest, saved)
            log.info("weights sent", extra={"version": version, "replicas": replicas})
            if self._broadcaster.stuck:
                self._copies = {}  # a stuck broadcast still reads these tensors: allocate new ones
