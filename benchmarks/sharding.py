"""Compares the bytes that each rank holds and receives with the cost model of docs/scaling.md.

    python -m benchmarks.sharding [--out benchmarks/results/sharding.json]

Takes one training step in 1, 2 and 4 processes (torchrun, gloo), and counts the bytes of the rank's
shards of weights, gradients and moments, and of the collectives in its passes. It measures no time,
because the processes share two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from bapo_core.config import RunConfig, config_from
from benchmarks.batches import WINDOW, batch_of
from benchmarks.harness import make_parser, report
from benchmarks.machine import machine
from benchmarks.random_model import save_random_model
from benchmarks.trl_steps import Group, Response
from services.trainer.data import Batch, make_plan
from services.trainer.phases import PhaseTimer
from services.trainer.policy import Policy
from services.trainer.ranks import Ranks, init_distributed
from services.trainer.shard import load_sharded
from services.trainer.update import Updater

SIZES = (1, 2, 4)
LAYERS, WIDTH, INNER, VOCABULARY = 4, 128, 512, 2_048
GROUPS, SIZE, LENGTH, PROMPT = 8, 4, 24, 8
FP32 = 4


def config() -> RunConfig:
    return config_from(
        {
            "algorithm": "grpo",
            "rollout": {
                "prompts_per_step": GROUPS,
                "group_size": SIZE,
                "max_prompt_tokens": PROMPT,
                "max_response_tokens": LENGTH,
            },
            "kl": {"coefficient": 0.0},
            "optimizer": {
                "minibatch_prompts": GROUPS,
                # Each of four ranks has two groups, one pass; a single rank has four passes.
                "microbatch_tokens": 2 * SIZE * (PROMPT + LENGTH),
            },
        }
    )


def groups() -> list[Group]:
    """Makes groups of equal length, so that every rank takes equally many passes."""
    draw = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        ids: list[int] = torch.randint(2, VOCABULARY, (count,), generator=draw).tolist()
        return ids

    return [
        Group(
            tokens(PROMPT),
            [Response(tokens(LENGTH), [-7.6] * LENGTH, float(index < 2)) for index in range(SIZE)],
        )
        for _ in range(GROUPS)
    ]


class Received:
    """Counts the bytes that this rank gets from the others in its collectives."""

    def __init__(self, ranks: int) -> None:
        self.gathered = self.reduced = 0

        def gathered(output: Tensor) -> None:
            self.gathered += output.nbytes * (ranks - 1) // ranks

        def reduced(output: Tensor) -> None:
            self.reduced += output.nbytes * (ranks - 1)

        # FSDP calls different ones in different versions of PyTorch.
        for name, count in (
            ("all_gather_single", gathered),
            ("all_gather_into_tensor", gathered),
            ("reduce_scatter_single", reduced),
            ("reduce_scatter_tensor", reduced),
        ):
            if hasattr(dist, name):
                setattr(dist, name, counted(getattr(dist, name), count))


def counted(collective: Callable[..., Any], count: Callable[[Tensor], None]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        count(arguments[0] if arguments else options["output"])
        return collective(*arguments, **options)

    return call


def local_bytes(tensor: Tensor) -> int:
    """Returns the bytes of this rank's shard."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.nbytes


def batch_of_rank(batch: Batch, positions: list[int], all_groups: list[Group]) -> Batch:
    """Returns the batch of a rank that has these groups."""
    local = batch_of([all_groups[position] for position in positions])
    return replace(local, members=[batch.members[position] for position in positions])


def step(ranks: Ranks, model: Path) -> dict[str, float]:
    """Takes one step; returns the bytes that this rank holds and receives."""
    settings, all_groups = config(), groups()
    policy: Policy = load_sharded(model, ranks, prepare=lambda policy: policy)
    received = Received(ranks.size)
    updater = Updater(settings, policy, ranks)
    full_batch = batch_of(all_groups)
    plan = make_plan(settings, 1, full_batch.members, ranks=ranks.size, width=policy.width)
    batch = batch_of_rank(full_batch, plan.of_rank(ranks.rank), all_groups)
    updater.step(1, batch, plan, WINDOW, PhaseTimer())
    state = updater.optimizer.state.values()
    return {
        "parameters": float(sum(p.numel() for p in policy.parameters())),
        "outside_layers": float(
            sum(p.numel() for name, p in policy.named_parameters() if ".layers." not in name)
        ),
        "weights": float(sum(local_bytes(p) for p in policy.parameters())),
        "gradients": float(
            sum(local_bytes(p.grad) for p in policy.parameters() if p.grad is not None)
        ),
        "moments": float(
            sum(local_bytes(moments[key]) for moments in state for key in ("exp_avg", "exp_avg_sq"))
        ),
        "gathered": float(received.gathered),
        "reduced": float(received.reduced),
    }


def expected(parameters: float, outside: float, ranks: int) -> dict[str, float]:
    """Returns the bytes by the cost model, in fp32.

    A scoring pass gathers the layers once, a training pass twice (forward and backward). Parameters
    `outside` of layers are gathered once a training pass.
    """
    passes = GROUPS // ranks // 2
    share = (ranks - 1) / ranks
    layers = parameters - outside
    return {
        "weights": FP32 * parameters / ranks,
        "gradients": FP32 * parameters / ranks,
        "moments": 2 * FP32 * parameters / ranks,
        "gathered": FP32 * share * passes * (3 * layers + outside),
        "reduced": FP32 * share * passes * parameters,
    }


def main() -> None:
    parser = make_parser(__doc__, "sharding")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.model is not None:
        with init_distributed() as ranks:
            by_rank = ranks.gather_to_main(step(ranks, arguments.model))
            if ranks.is_main:
                arguments.out.write_text(json.dumps(by_rank))
        return
    result: dict[str, Any] = {"machine": machine("torch")}
    with tempfile.TemporaryDirectory(prefix="bapo-bench-") as directory:
        model, out = Path(directory) / "model", Path(directory) / "out.json"
        save_random_model(
            model,
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_key_value_heads=4,
            max_position_embeddings=64,
        )
        for size in SIZES:
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            launch += ["--nproc-per-node", str(size), "-m", "benchmarks.sharding"]
            subprocess.run([*launch, "--model", str(model), "--out", str(out)], check=True)
            measured = json.loads(out.read_text())
            first = measured[0]
            by_model = expected(first["parameters"], first["outside_layers"], size)
            largest = {name: max(rank[name] for rank in measured) for name in by_model}
            result[str(size)] = {
                name: {"model": by_model[name], "measured": largest[name]} for name in by_model
            } | {"parameters": first["parameters"]}
    report(result, arguments.out)


if __name__ == "__main__":
    main()
