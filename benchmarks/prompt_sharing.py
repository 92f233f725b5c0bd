"""Measures what it saves to compute a prompt once for all responses of its group.

    python -m benchmarks.prompt_sharing [--out benchmarks/results/prompt_sharing.json]

Runs forward and backward passes of the trainer's policy over groups of 8 responses, packed as the
trainer packs them, and packed with a prompt for each response. The passes alternate; a figure is
the median of each. Both give the same log-probs, which is checked, too.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import make_parser, report
from benchmarks.machine import machine
from benchmarks.random_model import save_random_model
from services.buffer.api.trajectories import TrajectoryGroup, TrajectoryResponse, table_of
from services.trainer.data import Batch, collate, microbatches
from services.trainer.load_policy import load_policy
from services.trainer.policy import Policy, response_logprobs

SIZE, VOCABULARY, TOKEN_BUDGET = 8, 4_096, 2_048
CASES = {
    "short responses": (48, 16, 16),
    "equal": (128, 128, 4),
    "long responses": (128, 1_024, 1),
}
"""Tokens of a prompt and of a response, and the number of groups."""


def make_batch(prompt: int, response: int, groups: int) -> Batch:
    """Returns groups of random tokens."""
    draw = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(2, VOCABULARY, (count,), generator=draw).tolist()

    def group() -> TrajectoryGroup:
        responses = [
            TrajectoryResponse(tokens(response), [0.0] * response, 0.0, "stop", "", correct=False)
            for _ in range(SIZE)
        ]
        return TrajectoryGroup("", tokens(prompt), 1, responses)

    return collate(None, table_of([group() for _ in range(groups)]))


def run_passes(policy: Policy, batch: Batch) -> tuple[float, torch.Tensor]:
    """Returns the seconds of a forward and backward pass over all rows, and the log-probs."""
    logprobs = torch.zeros_like(batch.behavior_logprobs)
    started = time.perf_counter()
    for rows in microbatches(batch, torch.arange(len(batch.lengths)), TOKEN_BUDGET):
        scores, _ = response_logprobs(policy, batch, rows, 1.0)
        scores.sum().backward()  # type: ignore[no-untyped-call]
        logprobs[rows] = scores.detach()
    return time.perf_counter() - started, logprobs


def measure(policy: Policy, batch: Batch, repeats: int) -> dict[str, Any]:
    """Compares the batch with one whose rows are members of their own, which share nothing."""
    apart = replace(batch, member=torch.arange(len(batch.member)))
    seconds: dict[str, list[float]] = {"shared": [], "apart": []}
    for _ in range(repeats + 1):
        policy.zero_grad()
        shared_seconds, shared = run_passes(policy, batch)
        apart_seconds, alone = run_passes(policy, apart)
        seconds["shared"].append(shared_seconds)
        seconds["apart"].append(apart_seconds)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return {
        "tokens_shared": batch.packed_tokens,
        "tokens_apart": apart.packed_tokens,
        "seconds_shared": medians["shared"],
        "seconds_apart": medians["apart"],
        "speedup": medians["apart"] / medians["shared"],
        "largest_difference": float((shared - alone).abs().max()),
    }


def main() -> None:
    parser = make_parser(__doc__, "prompt_sharing")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": machine("torch")}
    with tempfile.TemporaryDirectory(prefix="bapo-bench-") as directory:
        save_random_model(
            Path(directory),
            vocab_size=VOCABULARY,
            num_hidden_layers=6,
            max_position_embeddings=2_048,
        )
        policy = load_policy(Path(directory))
        for name, sizes in CASES.items():
            prompt, response, groups = sizes
            result[name] = {"prompt": prompt, "response": response, "groups": groups} | measure(
                policy, make_batch(*sizes), arguments.repeats
            )
    report(result, arguments.out)


if __name__ == "__main__":
    main()
