"""Triton kernels for the tiles of `logprobs`: each reads a tile once, and computes in fp32.

A program of `_add_kernel` has a row of the tile, and runs over its columns with a running maximum
(online softmax, arXiv 1805.02867). A program of `_differentiate_kernel` has a row and a block of
its columns, and replaces the logits by their gradient.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from services.trainer.logprobs import RowSlopes, RowSums

BLOCK = 2_048
"""Columns that a program has at a time."""


@triton.jit
def _logits(raw, temperature, cap, HAS_CAP: tl.constexpr):
    logits = raw.to(tl.float32) / temperature
    if HAS_CAP:
        # tanh by exponentials, of the sign that does not overflow
        x = logits / cap
        e = tl.exp(-2.0 * tl.abs(x))
        tangent = (1.0 - e) / (1.0 + e)
        logits = cap * tl.where(x < 0, -tangent, tangent)
    return logits


@triton.jit
def _add_kernel(
    raw,
    stride,
    columns,
    targets,
    largest,
    total,
    weighted,
    target,
    temperature,
    cap,
    HAS_CAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    raw += row * stride
    largest_so_far = tl.load(largest + row)
    total_so_far = tl.load(total + row)
    weighted_so_far = 0.0
    if ENTROPY:
        weighted_so_far = tl.load(weighted + row)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < columns
        logits = _logits(tl.load(raw + offsets, mask=inside, other=0.0), temperature, cap, HAS_CAP)
        new_largest = tl.maximum(
            largest_so_far, tl.max(tl.where(inside, logits, float("-inf")), axis=0)
        )
        exponentials = tl.where(inside, tl.exp(logits - new_largest), 0.0)
        scale = tl.exp(largest_so_far - new_largest)
        total_so_far = total_so_far * scale + tl.sum(exponentials, axis=0)
        if ENTROPY:
            weighted_so_far = weighted_so_far * scale + tl.sum(exponentials * logits, axis=0)
        largest_so_far = new_largest
    tl.store(largest + row, largest_so_far)
    tl.store(total + row, total_so_far)
    if ENTROPY:
        tl.store(weighted + row, weighted_so_far)
    column = tl.load(targets + row)
    if (column >= 0) & (column < columns):
        tl.store(target + row, _logits(tl.load(raw + column), temperature, cap, HAS_CAP))


@triton.jit
def _differentiate_kernel(
    raw,
    stride,
    columns,
    targets,
    normalisers,
    slope,
    entropies,
    entropy_slope,
    temperature,
    cap,
    HAS_CAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < columns
    places = raw + row * stride + offsets
    logits = _logits(tl.load(places, mask=inside, other=0.0), temperature, cap, HAS_CAP)
    row_slope = tl.load(slope + row)
    log_distribution = logits - tl.load(normalisers + row)
    factor = row_slope
    if ENTROPY:
        factor = row_slope + tl.load(entropy_slope + row) * (
            log_distribution + tl.load(entropies + row)
        )
    gradient = -tl.exp(log_distribution) * factor
    gradient += tl.where(offsets == tl.load(targets + row), row_slope, 0.0)
    if HAS_CAP:
        bounded = logits / cap
        gradient *= 1.0 - bounded * bounded
    gradient /= temperature
    tl.store(places, gradient.to(raw.dtype.element_ty), mask=inside)


class FusedTiles:
    """The functions of a tile (`TileFunctions`) as one kernel each."""

    def add(
        self, raw: Tensor, targets: Tensor, temperature: float, cap: float | None, sums: RowSums
    ) -> None:
        count, columns = raw.shape
        _add_kernel[(count,)](
            raw,
            raw.stride(0),
            columns,
            targets,
            sums.largest,
            sums.total,
            sums.total if sums.weighted is None else sums.weighted,
            sums.target,
            temperature,
            1.0 if cap is None else cap,
            HAS_CAP=cap is not None,
            ENTROPY=sums.weighted is not None,
            BLOCK=BLOCK,
        )

    def differentiate(
        self, raw: Tensor, targets: Tensor, temperature: float, cap: float | None, rows: RowSlopes
    ) -> Tensor:
        count, columns = raw.shape
        has_entropy = rows.entropies is not None and rows.entropy_slope is not None
        _differentiate_kernel[(count, triton.cdiv(columns, BLOCK))](
            raw,
            raw.stride(0),
            columns,
            targets,
            rows.normalisers,
            rows.slope,
            rows.entropies if has_entropy else rows.slope,
            rows.entropy_slope if has_entropy else rows.slope,
            temperature,
            1.0 if cap is None else cap,
            HAS_CAP=cap is not None,
            ENTROPY=has_entropy,
            BLOCK=BLOCK,
        )
        return raw
