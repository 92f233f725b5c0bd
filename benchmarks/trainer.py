"""Measures what a training step costs beyond its model passes, and how long checkpoints stall it.

    python -m benchmarks.trainer [--out benchmarks/results/trainer.json]

Runs the trainer's own loop with the real services, on trajectories that were stored beforehand: it
reads batches, scores, updates, commits, publishes weights and saves checkpoints as in any run. Its
passes through the model (forward, backward, optimizer) are timed in the same process; the ratio is
that of the steps' time to the passes' time. The stall is the share of the steps' time that copies
checkpoints; uploads run in the background.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import AdamW

from bapo_core.config import RunConfig, config_from
from benchmarks.harness import make_parser, report
from benchmarks.machine import machine
from benchmarks.random_model import save_random_model
from benchmarks.runs import begin_run
from services.buffer.api.client import BufferClient
from services.buffer.api.trajectories import TrajectoryGroup, TrajectoryResponse, encode_groups
from services.buffer.api.wire import StepDigests
from services.common.objectstore import ObjectStore
from services.stack.stack import Endpoints, running_stack
from services.trainer.loop import train
from services.trainer.policy import Policy
from services.trainer.ranks import init_distributed
from services.trainer.steps import TrainerContext
from tools.tiny_models.text import build_tokenizer

GROUPS, SIZE, LONGEST = 16, 8, 160
VOCABULARY = 4_096
SKIPPED = 2
"""Steps that are not measured: the first ones are slower."""


def config(model: Path, steps: int, every: int) -> RunConfig:
    """Builds a GRPO run whose one version of the weights serves all steps, so no step waits."""
    return config_from(
        {
            "name": "trainer-benchmark",
            "algorithm": "grpo",
            "steps": steps,
            "model": {"path": str(model)},
            "task": {"options": {"template": "short"}, "train_prompts": 512, "test_prompts": 1},
            "rollout": {
                "prompts_per_step": GROUPS,
                "group_size": SIZE,
                "max_prompt_tokens": 32,
                "max_response_tokens": LONGEST,
            },
            "sync": {"every": 2 * steps, "reevaluate_every": 2 * steps},
            "optimizer": {"minibatch_prompts": GROUPS // 4, "microbatch_tokens": 2_048},
            "evaluation": {"every": 2 * steps},
            "checkpoint": {"every": every},
        }
    )


def prepare(stack: Endpoints, settings: RunConfig) -> BufferClient:
    """Creates the run with trajectories for every step: ragged, both rewards in each group."""
    client = BufferClient(stack.buffer_url, stack.token, run=settings.name)
    begin_run(client, settings)
    draw = np.random.default_rng(0)
    for step in range(1, settings.steps + 1):
        prompts = client.step_prompts(step).prompts
        groups = [group(prompt.uid, draw) for prompt in prompts]
        client.post_groups(step, "fresh", encode_groups(groups))
    return client


def group(uid: str, draw: np.random.Generator) -> TrajectoryGroup:
    responses = []
    correct = int(draw.integers(1, SIZE))
    for index in range(SIZE):
        length = int(np.clip(draw.lognormal(np.log(48), 0.8), 1, LONGEST))
        tokens = draw.integers(2, VOCABULARY, length).tolist()
        logprobs = (-np.log(VOCABULARY) + draw.normal(0.0, 0.3, length)).tolist()
        reward = float(index < correct)
        responses.append(TrajectoryResponse(tokens, logprobs, reward, "stop", "1+1", reward > 0))
    return TrajectoryGroup(uid, draw.integers(2, VOCABULARY, 24).tolist(), 1, responses)


class Stopwatch:
    """Adds up the seconds spent in the functions that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - started

        return call


def measure(stack: Endpoints, settings: RunConfig, model: Path, scratch: Path) -> dict[str, Any]:
    client = prepare(stack, settings)
    passes = Stopwatch()
    Policy.forward = passes.timed(Policy.forward)  # type: ignore[method-assign]
    torch.Tensor.backward = passes.timed(torch.Tensor.backward)  # type: ignore[method-assign]
    AdamW.step = passes.timed(AdamW.step)  # type: ignore[method-assign]
    marks: list[tuple[float, float]] = []
    commit = client.commit

    def marked(step: int, metrics: dict[str, float], digests: StepDigests | None = None) -> Any:
        result = commit(step, metrics, digests)
        marks.append((time.perf_counter(), passes.seconds))
        return result

    client.commit = marked  # type: ignore[method-assign]
    with init_distributed() as ranks:
        train(
            settings,
            TrainerContext(client, ObjectStore(stack.object_store), model, scratch),
            ranks,
        )
    (started, passes_before), (ended, passes_after) = marks[SKIPPED - 1], marks[-1]
    steps = client.steps()[SKIPPED:]
    phases: dict[str, float] = {}
    for step in steps:
        for name, value in step.metrics.items():
            if name.startswith("seconds/"):
                phases[name[8:]] = phases.get(name[8:], 0.0) + value
    return {
        "steps": len(steps),
        "seconds": ended - started,
        "seconds_in_passes": passes_after - passes_before,
        "ratio": (ended - started) / (passes_after - passes_before),
        "tokens_per_second": statistics.median(
            step.metrics["trainer/tokens_per_second"] for step in steps
        ),
        "checkpoint_stall": phases.get("checkpoint", 0.0) / (ended - started),
        "phases": phases,
    }


def main() -> None:
    parser = make_parser(__doc__, "trainer")
    parser.add_argument("--steps", type=int, default=22)
    parser.add_argument("--checkpoint-every", type=int, default=5)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="bapo-bench-") as directory,
        running_stack(Path(directory) / "home", 0) as stack,
    ):
        model, scratch = Path(directory) / "model", Path(directory) / "scratch"
        scratch.mkdir()
        save_random_model(
            model, vocab_size=VOCABULARY, num_hidden_layers=6, max_position_embeddings=512
        )
        build_tokenizer().save_pretrained(model)
        settings = config(model, arguments.steps, arguments.checkpoint_every)
        result = {"machine": machine("torch"), **measure(stack, settings, model, scratch)}
    report(result, arguments.out)


if __name__ == "__main__":
    main()
