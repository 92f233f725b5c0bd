"""The optimisation phase against TRL's `GRPOTrainer`: tokens a second and memory.

    make install-trl
    python -m benchmarks.trl [--out benchmarks/results/trl.json]

Both sides get the same weights, prompts, responses, behaviour log-probs and rewards, and do the
same: score the batch under the current policy, weigh each token by that over its behaviour
probability (truncated at 3), then GRPO's clipped loss, its gradient and one AdamW step over the
whole batch, in fp32, with as many threads. That it is the same is checked: losses, gradient norms
and the weights that come out. Response lengths are log-normal and cut at a maximum, as those of RL
are; the model is random.

Each measurement is a process of its own: it loads the model, takes a step on a short batch, after
which the optimizer's state and all libraries are there, and then the step that counts. Memory is
the highest of that step: beyond what was there before it (`extra_mib`), and in all (`peak_mib`).
Sides take turns, so that a busy machine is busy for both; processor time, of all threads, says what
each has worked.

TRL pads every row to the longest prompt and the longest response of the batch. How much goes
through at a time is therefore compared in two ways: `ours` may use as many tokens a pass as TRL's
passes have places, padding included; `ours_same_passes` takes about as many passes as TRL.

TRL's output layer works on padding too where there is no Triton, so on every CPU; on GPUs it does
not. `trl` is TRL as it comes; `trl_responses_only` leaves out there what it would on a GPU. The
variants after that build on it, for they are the harder ones to beat: `checkpointing` is gradient
checkpointing, and `uncorrected` is TRL without the behaviour policy, which spares it the scoring
but is right only on policy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import machine
from benchmarks.random_model import save_random_model
from benchmarks.trl_steps import (
    LEARNING_RATE,
    Group,
    Response,
    Side,
    slots,
    tokens_of,
    write_batch,
)

OURS, THEIRS = "benchmarks.trl_ours", "benchmarks.trl_theirs"
THEIR_PYTHON = Path(".venv-trl/bin/python")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    # A thread that waits for another sleeps: processor time is then of work alone.
    "OMP_WAIT_POLICY": "PASSIVE",
}


@dataclass(frozen=True)
class Size:
    vocabulary: int
    groups: int
    median: int
    """Tokens of a response."""
    longest: int


SIZES = (
    Size(vocabulary=32_000, groups=4, median=96, longest=384),
    Size(vocabulary=151_936, groups=2, median=48, longest=192),
)
GROUP = 8
ROWS_AT_ONCE = 8
SHORTEST_PROMPT, LONGEST_PROMPT = 32, 96
SPREAD = 0.8
"""Of the logarithm of a response's length."""

COMPARED = ("ours", "ours_same_passes", "trl", "trl_responses_only")
"""Every round, with both vocabularies."""
BESIDES = ("ours_checkpointing", "trl_checkpointing", "trl_uncorrected")
"""Once, with the small vocabulary."""


def make_groups(size: Size) -> list[Group]:
    """Behaviour log-probs are spread about a random model's; every group has both rewards."""
    draw = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        found: list[int] = draw.integers(2, size.vocabulary, count).tolist()
        return found

    def response(reward: float) -> Response:
        length = int(np.clip(draw.lognormal(np.log(size.median), SPREAD), 1, size.longest))
        logprobs = -np.log(size.vocabulary) + draw.normal(0.0, 0.3, length)
        return Response(tokens(length), logprobs.tolist(), reward)

    groups = []
    for _ in range(size.groups):
        prompt = tokens(int(draw.integers(SHORTEST_PROMPT, LONGEST_PROMPT + 1)))
        correct = int(draw.integers(1, GROUP))
        rewards = [float(place < correct) for place in range(GROUP)]
        groups.append(Group(prompt, [response(reward) for reward in rewards]))
    return groups


def side_of(variant: str, directory: Path, groups: list[Group]) -> Side:
    passes = len(groups) * GROUP // ROWS_AT_ONCE
    at_once = ROWS_AT_ONCE * slots(groups)
    if variant == "ours_same_passes":
        at_once = max(slots(groups), -(-tokens_of(groups) // passes))
    return Side(
        directory=str(directory),
        rows_at_once=ROWS_AT_ONCE,
        tokens_at_once=at_once,
        gradient_checkpointing=variant.endswith("_checkpointing"),
        corrected=variant != "trl_uncorrected",
        responses_only=variant != "trl",
    )


def apart(variant: str, side: Side, out: Path) -> dict[str, Any]:
    """What a process of its own measures; its weights are beside `out`."""
    ours = variant.startswith("ours")
    done = subprocess.run(
        [
            sys.executable if ours else str(THEIR_PYTHON),
            *("-m", OURS if ours else THEIRS),
            *(json.dumps(asdict(side)), str(out)),
        ],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"{variant} failed:\n{done.stdout[-4000:]}")
    found: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())
    return found


def compare(size: Size, home: Path, rounds: int, besides: tuple[str, ...]) -> dict[str, Any]:
    directory = home / str(size.vocabulary)
    directory.mkdir()
    save_random_model(
        directory / "model",
        vocab_size=size.vocabulary,
        num_hidden_layers=4,
        max_position_embeddings=1_024,
    )
    groups = make_groups(size)
    write_batch(directory, groups)
    runs: dict[str, list[dict[str, Any]]] = {}
    for number in range(rounds):
        for variant in (*COMPARED, *(besides if number == 0 else ())):
            side = side_of(variant, directory, groups)
            found = apart(variant, side, directory / variant)
            runs.setdefault(variant, []).append(found)
            print(size.vocabulary, variant, {name: found[name] for name in SHOWN}, flush=True)
    tokens = tokens_of(groups)
    return {
        "size": asdict(size),
        "tokens": tokens,
        "tokens_with_padding": len(groups) * GROUP * slots(groups),
        "tokens_at_once": {
            name: side_of(name, directory, groups).tokens_at_once
            for name in ("ours", "ours_same_passes")
        },
        "summary": {variant: summary(tokens, each) for variant, each in runs.items()},
        "ratios": ratios(runs),
        "agreement": agreement(runs, directory),
        "runs": runs,
    }


SHOWN = ("seconds", "cpu_seconds", "before_mib", "peak_mib", "extra_mib")


def median(runs: list[dict[str, Any]], name: str) -> float:
    values: list[float] = []
    for run in runs:
        values += run[name] if isinstance(run[name], list) else [run[name]]
    return statistics.median(values)


def fastest(runs: list[dict[str, Any]]) -> float:
    """Seconds of the step that was disturbed the least."""
    return min(float(seconds) for run in runs for seconds in run["seconds"])


def summary(tokens: int, runs: list[dict[str, Any]]) -> dict[str, float]:
    medians = {name: round(median(runs, name), 2) for name in SHOWN}
    return {**medians, "tokens_per_second": round(tokens / median(runs, "seconds"), 1)}


def ratios(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Of each of ours to each of TRL's: tokens a second (by the medians, by the fastest rounds, by
    processor time) and memory."""
    found = {}
    for ours in (name for name in runs if name.startswith("ours")):
        for theirs in (name for name in runs if name.startswith("trl")):
            mine, other = runs[ours], runs[theirs]
            found[f"{ours}/{theirs}"] = {
                "speed": round(median(other, "seconds") / median(mine, "seconds"), 2),
                "speed_of_fastest": round(fastest(other) / fastest(mine), 2),
                "speed_by_cpu_time": round(
                    median(other, "cpu_seconds") / median(mine, "cpu_seconds"), 2
                ),
                "extra_memory": round(median(mine, "extra_mib") / median(other, "extra_mib"), 2),
                "peak_memory": round(median(mine, "peak_mib") / median(other, "peak_mib"), 2),
            }
    return found


def agreement(runs: dict[str, list[dict[str, Any]]], directory: Path) -> dict[str, Any]:
    """How far TRL's losses, gradient norms and weights are from ours."""
    found = {}
    expected = runs["ours"][0]
    weights = torch.load((directory / "ours").with_suffix(".pt"))
    for variant in (name for name in runs if name not in ("ours", "trl_uncorrected")):
        own = torch.load((directory / variant).with_suffix(".pt"))
        found[variant] = {
            "loss": _farthest(runs[variant][0]["losses"], expected["losses"]),
            "gradient_norm": _farthest(
                runs[variant][0]["gradient_norms"], expected["gradient_norms"]
            ),
            "weights_in_learning_rates": max(
                float((own[name] - weight).abs().mean()) / LEARNING_RATE
                for name, weight in weights.items()
            ),
        }
    return found


def _farthest(values: list[float], expected: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(values, expected, strict=True))


def their_versions() -> dict[str, str]:
    names = ("trl", "torch", "transformers", "accelerate")
    program = f"""
import importlib.metadata, json
print(json.dumps({{name: importlib.metadata.version(name) for name in {names}}}))
"""
    done = subprocess.run([THEIR_PYTHON, "-c", program], check=True, stdout=subprocess.PIPE)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/trl.json"))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if not THEIR_PYTHON.exists():
        raise SystemExit(f"{THEIR_PYTHON} is missing: run `make install-trl`")
    result: dict[str, Any] = {
        "machine": machine("torch", "transformers"),
        "theirs": their_versions(),
        "rows_at_once": ROWS_AT_ONCE,
        "threads": os.cpu_count(),
    }
    with tempfile.TemporaryDirectory(prefix="bapo-bench-") as directory:
        for size in SIZES:
            besides = BESIDES if size is SIZES[0] else ()
            found = compare(size, Path(directory), arguments.rounds, besides)
            result[f"vocabulary_{size.vocabulary}"] = found
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
