"""Compares log-probs by tiles with those from the full (tokens x vocabulary) matrix of logits.

    python -m benchmarks.logprobs [--out benchmarks/results/logprobs.json]

Measures time and memory of forward and backward, with the vocabulary and width of a 0.5 B model, in
fp32. Each measurement is a process of its own; memory is its peak beyond what the inputs take, and
includes gradients. The time is compared at a size where the full matrix fits.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import psutil
import torch
from torch.nn.functional import linear

from benchmarks.harness import make_parser, report
from benchmarks.machine import machine
from services.trainer.logprobs import token_logprobs

VOCABULARY, WIDTH = 151_936, 896
COMPARED_TOKENS, MANY_TOKENS = 1_024, 16_384


def measure(kind: str, tokens: int) -> dict[str, float]:
    """Returns seconds and MiB of one forward and backward pass in this process."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH).mul_(0.02).requires_grad_()
    targets = torch.randint(VOCABULARY, (tokens,))
    # The first use loads libraries.
    small = torch.randn(64, 64, requires_grad=True)
    token_logprobs(small, small, torch.arange(64))[0].sum().backward()
    before = psutil.Process().memory_info().rss
    started = time.perf_counter()
    if kind == "chunked":
        logprobs, entropies = token_logprobs(hidden, weight, targets, entropy=True)
    else:
        distribution = torch.log_softmax(linear(hidden, weight), dim=-1)
        logprobs = distribution.gather(1, targets[:, None])[:, 0]
        entropies = -(distribution.exp() * distribution).sum(dim=-1)
    (logprobs.sum() + 0.001 * entropies.sum()).backward()
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {"seconds": seconds, "extra_mib": (peak - before) / (1 << 20)}


def measure_in_process(kind: str, tokens: int) -> dict[str, float]:
    """Runs `measure` in a new process, because peak memory is that of a process."""
    command = [sys.executable, "-m", "benchmarks.logprobs", "--one", kind, str(tokens)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> None:
    parser = make_parser(__doc__, "logprobs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("KIND", "TOKENS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one[0], int(arguments.one[1]))))
        return
    result: dict[str, Any] = {
        "machine": machine("torch"),
        "vocabulary": VOCABULARY,
        "width": WIDTH,
    }
    compared: dict[str, list[dict[str, float]]] = {"naive": [], "chunked": []}
    for _ in range(arguments.repeats):
        for kind, runs in compared.items():
            runs.append(measure_in_process(kind, COMPARED_TOKENS))
    result[f"{COMPARED_TOKENS}_tokens"] = compared
    medians = {
        kind: statistics.median(run["seconds"] for run in runs) for kind, runs in compared.items()
    }
    result["time_ratio"] = medians["chunked"] / medians["naive"]
    result[f"{MANY_TOKENS}_tokens"] = measure_in_process("chunked", MANY_TOKENS)
    report(result, arguments.out)


if __name__ == "__main__":
    main()
