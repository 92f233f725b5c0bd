"""The optimisation phase on ragged responses against TRL's `GRPOTrainer`, in turns.

The sides of `benchmarks.trl` on a GPU: 16 groups of 8 responses with fp32 master weights, each
measurement in a process of its own. Ours computes in bfloat16; TRL as it comes computes under
autocast, which leaves the residual stream and the norms in fp32. TRL's attention is PyTorch's; the
faster kernels that it can fetch from the hub are not installed. `trl_liger` is TRL with Liger's
norms, rotary embeddings and gated layers; its output layer is TRL's own fused one in both.

Both sides recompute the activations of every layer in the backward pass, and take passes of as many
positions: without recomputation, eight of TRL's rows do not fit into 80 GB. A variant that runs out
of memory is tried again with half as many rows; one that fails otherwise is reported, and the
others go on.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.device import free
from benchmarks.gpu.models import model_config, save_random_model
from benchmarks.gpu.record import Record, spread
from benchmarks.gpu.steps import make_group
from benchmarks.trl import SideFailed, measure_in_process, side_of
from benchmarks.trl_steps import Group, Side, slots, tokens_of, write_batch

VARIANTS = ("ours", "trl", "ours", "trl_liger", "trl")
"""In turns, so that a part that is cut off still has a ratio."""
ROWS_AT_ONCE = 4
"""Rows of TRL's passes: with recomputation about 15,000 positions, in a fifth of 80 GB."""
OUT_OF_MEMORY = "OutOfMemoryError"
TOY_VARIANTS = ("ours", "trl")


def make_groups(toy: bool, vocabulary: int) -> list[Group]:
    """Makes groups with prompts of 256 to 1,024 tokens; responses are log-normal, cut at 4,096."""
    draw = np.random.default_rng(0)
    count, shortest, longest_prompt, median, longest = (
        (2, 4, 16, 8, 32) if toy else (16, 256, 1_024, 600, 4_096)
    )

    def length() -> int:
        return int(np.clip(draw.lognormal(np.log(median), 0.8), 1, longest))

    return [
        make_group(
            draw,
            int(draw.integers(shortest, longest_prompt + 1)),
            [length() for _ in range(8)],
            vocabulary,
        )
        for _ in range(count)
    ]


def measure(record: Record) -> None:
    shape = "toy" if record.toy else "qwen3-0.6b"
    groups = make_groups(record.toy, model_config(shape).vocab_size)
    tokens = tokens_of(groups)
    positions = len(groups) * 8 * slots(groups)
    record.add("batch", {"tokens": tokens, "padding_share_of_trl": 1 - tokens / positions})
    runs: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="bapo-bench-") as directory:
        home = Path(directory)
        save_random_model(shape, home / "model")
        free()  # the other processes need the GPU
        write_batch(home, groups)
        for variant in TOY_VARIANTS if record.toy else VARIANTS:
            try:
                side, figures = measure_variant(variant, home, groups)
            except SideFailed as error:
                record.add(variant, {"failed": str(error)[-3_000:]})
                continue
            runs.setdefault(variant, []).append(figures)
            result = summary(tokens, runs[variant])
            record.add(variant, {**result, "rows_at_once": side.rows_at_once})
            record.add("ratios", ratios(record.new_results))


def measure_variant(
    variant: str, home: Path, groups: list[Group], rows: int = ROWS_AT_ONCE
) -> tuple[Side, dict[str, Any]]:
    """Measures a variant with as many rows at once as fit; returns its settings and figures.

    Raises `SideFailed` if one row does not fit, or for another reason.
    """
    side = side_with(variant, home, groups, rows)
    try:
        return side, measure_in_process(variant, side, home / variant)
    except SideFailed as error:
        if rows == 1 or OUT_OF_MEMORY not in str(error):
            raise
    return measure_variant(variant, home, groups, rows // 2)


def side_with(variant: str, home: Path, groups: list[Group], rows: int) -> Side:
    """Returns a side that recomputes activations, with passes of so many of TRL's rows."""
    return replace(
        side_of(variant, home, groups),
        rows_at_once=rows,
        tokens_at_once=rows * slots(groups),
        gradient_checkpointing=True,
    )


def summary(tokens: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = spread([second for run in runs for second in run["seconds"]])
    return {
        "seconds": seconds,
        "tokens_per_s": tokens / seconds["median"],
        "peak_gib": max(run["peak_mib"] for run in runs) / 1_024,
        "extra_gib": max(run["extra_mib"] for run in runs) / 1_024,
        "losses": runs[0]["losses"],
        "gradient_norms": runs[0]["gradient_norms"],
    }


def ratios(results: dict[str, Any]) -> dict[str, Any]:
    """Returns speed and memory of ours relative to each of TRL's variants that ran."""
    ours = results.get("ours", {})
    return {
        name: {
            "speed": ours["tokens_per_s"] / theirs["tokens_per_s"],
            "extra_memory": ours["extra_gib"] / theirs["extra_gib"],
            "loss_difference": abs(ours["losses"][-1] - theirs["losses"][-1]),
        }
        for name, theirs in results.items()
        if name.startswith("trl") and "tokens_per_s" in theirs and "tokens_per_s" in ours
    }
