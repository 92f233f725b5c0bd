"""What each rank holds and receives, against the cost model of docs/scaling.md.

    python -m benchmarks.sharding [--out benchmarks/results/sharding.json]

One training step in 1, 2 and 4 processes (torchrun, gloo). Counted are the bytes of the rank's own
weights, gradients and moments, and those of the collectives of its passes. Time is not: the
processes share two cores.
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
from benchmarks.machine import machine
from benchmarks.random_model import save_random_model
from benchmarks.trl_ours import WINDOW, batch_of
from benchmarks.trl_steps import Group, Response
from services.trainer.data import Batch, make_plan
from services.trainer.policy import Policy
from services.trainer.ranks import Ranks, joined
from services.trainer.shard import load_sharded
from services.trainer.update import Clock, Updater

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
                # A rank of four has two groups: one pass; one alone has four passes.
                "microbatch_tokens": 2 * SIZE * (PROMPT + LENGTH),
            },
        }
    )


def groups() -> list[Group]:
    """Equally long, so that every rank takes as many passes."""
    draw = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        found: list[int] = torch.randint(2, VOCABULARY, (count,), generator=draw).tolist()
        return found

    return [
        Group(
            tokens(PROMPT),
            [Response(tokens(LENGTH), [-7.6] * LENGTH, float(place < 2)) for place in range(SIZE)],
        )
        for _ in range(GROUPS)
    ]


class Received:
    """Bytes that this rank gets from the others in its collectives."""

    def __init__(self, ranks: int) -> None:
        self.gathered = self.reduced = 0

        def gathered(output: Tensor) -> None:
            self.gathered += output.nbytes * (ranks - 1) // ranks

        def reduced(output: Tensor) -> None:
            self.reduced += output.nbytes * (ranks - 1)

        # What FSDP calls them differs between versions of PyTorch.
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


def own(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.nbytes


def part_of(batch: Batch, places: list[int], every: list[Group]) -> Batch:
    found = batch_of([every[place] for place in places])
    return replace(found, members=[batch.members[place] for place in places])


def step(ranks: Ranks, model: Path) -> dict[str, float]:
    """This rank's bytes."""
    settings, every = config(), groups()
    policy: Policy = load_sharded(model, ranks, prepare=lambda found: found)
    received = Received(ranks.size)
    updater = Updater(settings, policy, ranks)
    whole = batch_of(every)
    plan = make_plan(settings, 1, whole.members, ranks=ranks.size, width=policy.width)
    batch = part_of(whole, plan.of_rank(ranks.rank), every)
    updater.step(1, batch, plan, WINDOW, Clock())
    state = updater.optimizer.state.values()
    return {
        "parameters": float(sum(each.numel() for each in policy.parameters())),
        "outside_layers": float(
            sum(each.numel() for name, each in policy.named_parameters() if ".layers." not in name)
        ),
        "weights": float(sum(own(each) for each in policy.parameters())),
        "gradients": float(sum(own(p.grad) for p in policy.parameters() if p.grad is not None)),
        "moments": float(
            sum(own(each[key]) for each in state for key in ("exp_avg", "exp_avg_sq"))
        ),
        "gathered": float(received.gathered),
        "reduced": float(received.reduced),
    }


def expected(parameters: float, outside: float, ranks: int) -> dict[str, float]:
    """The cost model, in fp32. A pass that scores gathers the layers once, one that trains once
    more on the way back; what is `outside` of them is gathered after each gradient only."""
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sharding.json"))
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.model is not None:
        with joined() as ranks:
            found = ranks.gathered(step(ranks, arguments.model))
            if ranks.speaks:
                arguments.out.write_text(json.dumps(found))
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
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
