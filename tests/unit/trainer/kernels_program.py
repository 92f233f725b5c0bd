"""Runs the Triton kernels in Triton's interpreter; prints the differences to plain operations.

A process of its own, because the interpreter is chosen when a kernel is defined.
"""

from __future__ import annotations

import itertools
import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from services.trainer.logprobs import PLAIN, RowSlopes, RowSums, TileFunctions
from services.trainer.logprobs_kernels import FusedTiles

SHAPES = ((1, 1), (3, 2_048), (2, 2_049), (5, 4_500))
TILES = 2
"""Tiles of a row, the second of which changes the running maximum."""


def results(
    functions: TileFunctions, raw: Tensor, targets: Tensor, cap: float | None, entropy: bool
) -> list[Tensor]:
    """Returns log-probs, entropies and gradients of rows of two tiles."""
    rows, width = raw.shape[1:]
    values = torch.linspace(-1, 2, rows)
    sums = RowSums.empty(values, entropy=entropy)
    for tile in range(TILES):
        functions.add(raw[tile].clone(), targets - tile * width, 0.7, cap, sums)
    logprobs, normalisers, entropies = sums.results()
    slopes = RowSlopes(
        normalisers,
        values,
        entropies if entropy else None,
        values.flip(0).contiguous() if entropy else None,
    )
    gradients = [
        functions.differentiate(raw[tile].clone(), targets - tile * width, 0.7, cap, slopes)
        for tile in range(TILES)
    ]
    return [logprobs, entropies, *(gradient.float() for gradient in gradients)]


def main() -> None:
    differences = {}
    draw = torch.Generator().manual_seed(0)
    for (rows, width), cap, entropy, dtype in itertools.product(
        SHAPES, (None, 5.0), (False, True), (torch.float32, torch.bfloat16)
    ):
        raw = torch.randn(TILES, rows, width, generator=draw) * 6
        raw[1, 0] += 20
        targets = torch.randint(TILES * width, (rows,), generator=draw)
        one, other = (
            results(functions, raw.to(dtype), targets, cap, entropy)
            for functions in (PLAIN, FusedTiles())
        )
        name = f"{rows}x{width} cap={cap} entropy={entropy} {dtype}"
        differences[name] = max(
            float((a - b).abs().max() / a.abs().max().clamp(min=1e-3))
            for a, b in zip(one, other, strict=True)
        )
    sys.stdout.write(json.dumps(differences))


if __name__ == "__main__":
    main()
