"""Compares the optimisation phase with that of TRL's `GRPOTrainer`: tokens a second and memory.

    make install-trl
    python -m benchmarks.trl [--out benchmarks/results/trl.json]

Both sides get the same weights, prompts, responses, behaviour log-probs and rewards, and do the
same: score the batch under the current policy, weigh each token by its probability under that
policy over its behaviour probability (truncated at 3), then take GRPO's clipped loss, its gradient
and one AdamW step over the whole batch, in fp32, with equally many threads. The benchmark checks
that losses, gradient norms and resulting weights agree. Response lengths are log-normal and cut at
a maximum, as is typical of RL; the model is random.

Each measurement is a process of its own: it loads the model, takes a step on a short batch, which
allocates the optimizer's state and loads all libraries, and then the measured step. Memory is the
peak of that step: beyond what was allocated before it (`extra_mib`), and in total (`peak_mib`). The
sides take turns, so that other load on the machine affects both. Processor time is that of all
threads.

TRL pads every row to the longest prompt and the longest response of the batch. Pass sizes are
therefore compared in two ways: `ours` may use as many tokens a pass as TRL's passes have positions,
padding included; `ours_same_passes` takes about as many passes as TRL.

Without Triton, so on every CPU, TRL's output layer computes padding too; on GPUs it does not. `trl`
is TRL unchanged; `trl_responses_only` leaves out the padding as it would on a GPU. The other
variants build on that one, because it is harder to beat: `checkpointing` is gradient checkpointing,
and `uncorrected` is TRL without the behaviour policy, which saves the scoring pass but is correct
only on policy.
"""

from __future__ import annotations

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

from benchmarks.harness import make_parser, report
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
THEIR_PACKAGES = Path(".trl")
"""Directory with TRL and what only TRL needs, before all other packages on its side."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    # Threads that wait sleep instead of spinning, so that processor time counts work alone.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Passes of different sizes would fragment the memory of a GPU.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}


@dataclass(frozen=True)
class Size:
    vocabulary: int
    groups: int
    median: int
    """Median tokens of a response."""
    longest: int


SIZES = (
    Size(vocabulary=32_000, groups=4, median=96, longest=384),
    Size(vocabulary=151_936, groups=2, median=48, longest=192),
)
GROUP = 8
ROWS_AT_ONCE = 8
SHORTEST_PROMPT, LONGEST_PROMPT = 32, 96
SPREAD = 0.8
"""Standard deviation of the logarithm of a response's length."""

COMPARED = ("ours", "ours_same_passes", "trl", "trl_responses_only")
"""Variants that are measured in every round, with both vocabularies."""
EXTRA = ("ours_checkpointing", "trl_checkpointing", "trl_uncorrected")
"""Variants that are measured once, with the small vocabulary."""


def make_groups(size: Size) -> list[Group]:
    """Makes groups with both rewards, and behaviour log-probs spread around a random model's."""
    draw = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        ids: list[int] = draw.integers(2, size.vocabulary, count).tolist()
        return ids

    def response(reward: float) -> Response:
        length = int(np.clip(draw.lognormal(np.log(size.median), SPREAD), 1, size.longest))
        logprobs = -np.log(size.vocabulary) + draw.normal(0.0, 0.3, length)
        return Response(tokens(length), logprobs.tolist(), reward)

    groups = []
    for _ in range(size.groups):
        prompt = tokens(int(draw.integers(SHORTEST_PROMPT, LONGEST_PROMPT + 1)))
        correct = int(draw.integers(1, GROUP))
        rewards = [float(index < correct) for index in range(GROUP)]
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
        liger=variant == "trl_liger",
    )


class SideFailed(Exception):
    """The process of a variant failed; the message is the end of its output."""


def measure_in_process(variant: str, side: Side, out: Path) -> dict[str, Any]:
    """Measures one variant in a new process, which leaves its weights beside `out`.

    Raises `SideFailed`.
    """
    ours = variant.startswith("ours")
    module, environment = (OURS, os.environ) if ours else (THEIRS, their_environment())
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(asdict(side)), str(out)],
        env={**environment, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise SideFailed(f"{variant} failed:\n{done.stdout[-4000:]}")
    figures: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())
    return figures


def compare(size: Size, home: Path, rounds: int, extra: tuple[str, ...]) -> dict[str, Any]:
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
        for variant in (*COMPARED, *(extra if number == 0 else ())):
            side = side_of(variant, directory, groups)
            figures = measure_in_process(variant, side, directory / variant)
            runs.setdefault(variant, []).append(figures)
            print(size.vocabulary, variant, {name: figures[name] for name in SHOWN}, flush=True)
    tokens = tokens_of(groups)
    differences = agreement(runs, directory)
    check_agreement(differences)
    return {
        "size": asdict(size),
        "tokens": tokens,
        "tokens_with_padding": len(groups) * GROUP * slots(groups),
        "tokens_at_once": {
            name: side_of(name, directory, groups).tokens_at_once
            for name in ("ours", "ours_same_passes")
        },
        "summary": {variant: summary(tokens, figures) for variant, figures in runs.items()},
        "ratios": ratios(runs),
        "agreement": differences,
        "runs": runs,
    }


TOLERANCES = {"loss": 1e-6, "gradient_norm": 1e-5, "weights_in_learning_rates": 1e-2}
"""Largest differences between the variants that count as the same computation."""


def check_agreement(differences: dict[str, Any]) -> None:
    """Exits if a variant computed something else than ours: its figures would mean nothing."""
    for variant, found in differences.items():
        for name, limit in TOLERANCES.items():
            if not found[name] <= limit:
                raise SystemExit(f"{variant}: {name} differs by {found[name]:.1e} (limit {limit})")


SHOWN = ("seconds", "cpu_seconds", "before_mib", "peak_mib", "extra_mib")


def median(runs: list[dict[str, Any]], name: str) -> float:
    values: list[float] = []
    for run in runs:
        values += run[name] if isinstance(run[name], list) else [run[name]]
    return statistics.median(values)


def fastest(runs: list[dict[str, Any]]) -> float:
    """Returns the seconds of the fastest step, which other load disturbed the least."""
    return min(float(seconds) for run in runs for seconds in run["seconds"])


def summary(tokens: int, runs: list[dict[str, Any]]) -> dict[str, float]:
    medians = {name: round(median(runs, name), 2) for name in SHOWN}
    return {**medians, "tokens_per_second": round(tokens / median(runs, "seconds"), 1)}


def ratios(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Returns the ratios of each of our variants to each of TRL's, in speed and memory.

    Speed is in tokens a second: by the medians, by the fastest rounds, and by processor time.
    """
    comparisons = {}
    for ours in (name for name in runs if name.startswith("ours")):
        for theirs in (name for name in runs if name.startswith("trl")):
            our_runs, their_runs = runs[ours], runs[theirs]
            comparisons[f"{ours}/{theirs}"] = {
                "speed": round(median(their_runs, "seconds") / median(our_runs, "seconds"), 2),
                "speed_of_fastest": round(fastest(their_runs) / fastest(our_runs), 2),
                "speed_by_cpu_time": round(
                    median(their_runs, "cpu_seconds") / median(our_runs, "cpu_seconds"), 2
                ),
                "extra_memory": round(
                    median(our_runs, "extra_mib") / median(their_runs, "extra_mib"), 2
                ),
                "peak_memory": round(
                    median(our_runs, "peak_mib") / median(their_runs, "peak_mib"), 2
                ),
            }
    return comparisons


def agreement(runs: dict[str, list[dict[str, Any]]], directory: Path) -> dict[str, Any]:
    """Returns how far the variants' losses, gradient norms and weights are from those of `ours`."""
    differences = {}
    expected = runs["ours"][0]
    weights = torch.load((directory / "ours").with_suffix(".pt"), weights_only=True)
    for variant in (name for name in runs if name not in ("ours", "trl_uncorrected")):
        variant_weights = torch.load((directory / variant).with_suffix(".pt"), weights_only=True)
        differences[variant] = {
            "loss": _largest_difference(runs[variant][0]["losses"], expected["losses"]),
            "gradient_norm": _largest_difference(
                runs[variant][0]["gradient_norms"], expected["gradient_norms"]
            ),
            "weights_in_learning_rates": max(
                float((variant_weights[name] - weight).abs().mean()) / LEARNING_RATE
                for name, weight in weights.items()
            ),
        }
    return differences


def _largest_difference(values: list[float], expected: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(values, expected, strict=True))


def their_environment() -> dict[str, str]:
    """Returns the variables of a process that imports TRL."""
    paths = [str(THEIR_PACKAGES.resolve()), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def their_versions() -> dict[str, str]:
    names = ("trl", "torch", "transformers", "accelerate")
    program = f"""
import importlib.metadata, json
print(json.dumps({{name: importlib.metadata.version(name) for name in {names}}}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=their_environment(),
        check=True,
        stdout=subprocess.PIPE,
    )
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def main() -> None:
    parser = make_parser(__doc__, "trl")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if not THEIR_PACKAGES.exists():
        raise SystemExit(f"{THEIR_PACKAGES} is missing: run `make install-trl`")
    result: dict[str, Any] = {
        "machine": machine("torch", "transformers"),
        "theirs": their_versions(),
        "rows_at_once": ROWS_AT_ONCE,
        "threads": os.cpu_count(),
    }
    with tempfile.TemporaryDirectory(prefix="bapo-bench-") as directory:
        for size in SIZES:
            extra = EXTRA if size is SIZES[0] else ()
            figures = compare(size, Path(directory), arguments.rounds, extra)
            result[f"vocabulary_{size.vocabulary}"] = figures
    report(result, arguments.out)


if __name__ == "__main__":
    main()
