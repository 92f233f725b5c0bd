"""Micro-batches: the rows of one forward pass, packed and placed on the device that computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.data import PADDING, Batch, Packed, pack
from services.trainer.transfer import send


@dataclass(frozen=True, slots=True)
class TokenGrid:
    """Places of the K response tokens of some rows in the (n, R) tensors of those rows."""

    positions: Tensor
    """(K,) indexes into the flattened rows."""
    shape: tuple[int, int]
    """(n, R)"""

    @classmethod
    def of(cls, mask: Tensor) -> TokenGrid:
        """Returns the places where `mask`, (n, R), is true."""
        return cls(torch.nonzero(mask.flatten())[:, 0], (mask.shape[0], mask.shape[1]))

    def to(self, device: torch.device) -> TokenGrid:
        """Returns a copy on `device`."""
        return TokenGrid(send([self.positions], device)[0], self.shape)

    def spread(self, values: Tensor) -> Tensor:
        """Returns values (K,) of the tokens as (n, R), with 0 elsewhere; gradients flow."""
        count = self.shape[0] * self.shape[1]
        return values.new_zeros(count).index_copy(0, self.positions, values).view(self.shape)

    def gather(self, values: Tensor) -> Tensor:
        """Returns the values (K,) of the tokens from values (n, R)."""
        return values.flatten()[self.positions]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass; padding where other ranks have more rows than this one."""

    rows: Tensor | None
    """(n,) indexes into the batch, on the CPU; None is padding."""
    packed: Packed
    grid: TokenGrid

    @classmethod
    def of(cls, batch: Batch, rows: Tensor | None, device: torch.device) -> MicroBatch:
        """Packs `rows` and places them on `device`; None packs padding."""
        if rows is None:
            return cls(None, PADDING.to(device), TokenGrid.of(torch.ones(1, 1)).to(device))
        return cls(rows, pack(batch, rows).to(device), TokenGrid.of(batch.mask[rows]).to(device))

    @property
    def count(self) -> int:
        """Number of rows; 0 for padding."""
        return 0 if self.rows is None else len(self.rows)


def row_order(micro_batches: Sequence[MicroBatch]) -> Tensor:
    """Returns the rows of all micro-batches, one after another, (n,)."""
    rows = [part.rows for part in micro_batches if part.rows is not None]
    return torch.cat([torch.empty(0, dtype=torch.long), *rows])


def row_slices(micro_batches: Sequence[MicroBatch]) -> list[slice]:
    """Returns the places of each micro-batch's rows in `row_order`."""
    slices, start = [], 0
    for part in micro_batches:
        slices.append(slice(start, start + part.count))
        start += part.count
    return slices
