"""Measures the overhead of the services: one training through the stack and as a bare loop.

    python -m benchmarks.stack [--out benchmarks/results/stack.json]

The bare loop is `examples/bare_loop.py` with the sampler and the update of the services: one
process, buffers in lists, no HTTP, database, object store or checkpoints. Both draw the same
prompts and samples and so do the same work; whether their batches are equal is checked. They run in
turn. The ratio is that of the medians, over the repeats, of the seconds of a step after the first
ones.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bapo_core.config import RunConfig, load_config
from bapo_core.types import BatchMember, TrainingBatch
from benchmarks.harness import make_parser, report
from benchmarks.machine import machine
from examples.bare_loop import train
from services.buffer.api.client import BufferClient
from services.buffer.api.trajectories import TrajectoryGroup, TrajectoryResponse, table_of
from services.buffer.api.wire import ManifestMember
from services.model.resolve import ensure_model
from services.rollout.api.wire import PromptRequest, Sampling
from services.rollout.transformers_engine import TransformersEngine
from services.stack.settings import default_home
from services.stack.stack import running_stack
from services.trainer.data import collate, make_plan
from services.trainer.load_policy import load_policy
from services.trainer.phases import PhaseTimer
from services.trainer.ranks import Ranks
from services.trainer.update import Updater

SKIPPED = 5
"""Steps before the clock starts, after which caches are warm and the first sync is done."""


class ServiceLearner:
    """The trainer's update in place of the bare loop's own."""

    def __init__(self, config: RunConfig, model: Path) -> None:
        self.config = config
        self.updater = Updater(config, load_policy(model), Ranks(0, 1))
        self.model = self.updater.policy.model

    def step(self, t: int, batch: TrainingBatch, groups: Sequence[Any]) -> None:
        """Trains on the groups of a batch, which are (prompt, responses, rewards)."""
        members = [_member(member) for member in batch.members]
        trajectories = [
            TrajectoryGroup(
                member.prompt_uid,
                prompt,
                member.policy_version,
                [
                    TrajectoryResponse(tokens, logprobs, reward, "stop", "", reward > 0)
                    for (tokens, logprobs), reward in zip(responses, rewards, strict=True)
                ],
            )
            for member, (prompt, responses, rewards) in zip(members, groups, strict=True)
        ]
        plan = make_plan(self.config, t, members, ranks=1, width=self.updater.policy.width)
        self.updater.step(
            t, collate(members, table_of(trajectories)), plan, batch.window, PhaseTimer()
        )


def sample_with_engine(
    config: RunConfig, policy: Any, prompts: Sequence[list[int]], seeds: Sequence[int]
) -> list[list[tuple[list[int], list[float]]]]:
    """Samples by the rollout engine in place of the bare loop's own sampler."""
    rollout = config.rollout
    engine = TransformersEngine()
    engine.use(policy, 1)
    generated = engine.generate(
        [
            PromptRequest(prompt_token_ids=ids, seed=seed)
            for ids, seed in zip(prompts, seeds, strict=True)
        ],
        Sampling(
            temperature=rollout.temperature,
            max_tokens=rollout.max_response_tokens,
            group_size=rollout.group_size,
        ),
        policy_version=1,
    )
    return [
        [(response.token_ids, response.logprobs) for response in group.responses]
        for group in generated
    ]


def run_bare(config: RunConfig, model: Path) -> tuple[float, list[list[str]]]:
    """Runs the bare loop; returns the seconds of a step and the composition of every batch."""
    loop = train(config, model, sample_with_engine, ServiceLearner(config, model))
    compositions, started = [], 0.0
    for batch in loop:
        compositions.append(
            [f"{m.source.value} {m.group.prompt_uid} {m.group.correct}" for m in batch.members]
        )
        if len(compositions) == SKIPPED:
            started = time.perf_counter()
        if len(compositions) == config.steps:
            break
    return (time.perf_counter() - started) / (config.steps - SKIPPED), compositions


def _member(member: BatchMember) -> ManifestMember:
    group = member.group
    return ManifestMember(
        group_id=group.group_id,
        source=member.source.value,
        prompt_uid=group.prompt_uid,
        step=group.step,
        policy_version=group.policy_version,
        correct=group.correct,
        size=group.size,
        object_key="",
        object_digest="",
        row_start=0,
        row_count=group.size,
    )


def bare(config: RunConfig, model: Path) -> tuple[float, list[list[str]]]:
    """Runs the bare loop in a process of its own, as the parts of the stack do."""
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from benchmarks.stack import run_bare\n"
        "from bapo_core.config import RunConfig\n"
        "config = RunConfig.model_validate_json(sys.argv[1])\n"
        "print(json.dumps(run_bare(config, Path(sys.argv[2]))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, config.model_dump_json(), str(model)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(os.cpu_count()), "OMP_WAIT_POLICY": "PASSIVE"},
    )
    # The lines before the last are progress.
    seconds, compositions = json.loads(done.stdout.splitlines()[-1])
    return seconds, compositions


def run_through_stack(
    config: RunConfig, home: Path, client: BufferClient
) -> tuple[float, list[list[str]]]:
    """Runs the same training by `bapo run`; returns what `run_bare` does."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run.yaml"
        path.write_text(config.model_dump_json())
        subprocess.run(
            [sys.executable, "-m", "services.cli", "run", str(path)],
            check=True,
            cwd=directory,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "BAPO_HOME": str(home), "PYTHONPATH": os.getcwd()},
        )
    client.run = config.name
    steps = client.steps()
    span = steps[-1].committed_at - steps[SKIPPED - 1].committed_at
    compositions = [
        [f"{m.source} {m.prompt_uid} {m.correct}" for m in client.recorded_batch(s.step).members]
        for s in steps
    ]
    return span.total_seconds() / (len(steps) - SKIPPED), compositions


def measure(repeats: int, steps: int, console: Console) -> dict[str, Any]:
    config = load_config("examples/countdown.yaml", [f"steps={steps}", "evaluation.every=100000"])
    model = ensure_model(config, default_home())
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(model)})}
    )
    alone, through, equal = [], [], True
    with (
        tempfile.TemporaryDirectory(prefix="bapo-bench-") as directory,
        running_stack(Path(directory), 0) as endpoints,
    ):
        client = BufferClient(endpoints.buffer_url, endpoints.token)
        for repeat in range(repeats):
            seconds, expected = bare(config, model)
            alone.append(seconds)
            named = config.model_copy(update={"name": f"bench-{repeat}"})
            seconds, compositions = run_through_stack(named, Path(directory), client)
            through.append(seconds)
            equal = equal and compositions == expected
            console.print(f"bare {alone[-1]:.3f} s/step, stack {through[-1]:.3f} s/step")
    return {
        "steps": steps,
        "bare_seconds_per_step": alone,
        "stack_seconds_per_step": through,
        "ratio_of_medians": statistics.median(through) / statistics.median(alone),
        "same_batches": equal,
        "machine": machine("torch", "transformers"),
    }


def main() -> None:
    parser = make_parser(__doc__, "stack")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    result = measure(arguments.repeats, arguments.steps, Console())
    report(result, arguments.out)
    if not result["same_batches"]:
        raise SystemExit("the stack and the bare loop made different batches")


if __name__ == "__main__":
    main()
