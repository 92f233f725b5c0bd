"""What the services cost: the same training through the whole stack and as a bare loop.

    python -m benchmarks.stack [--out benchmarks/results/stack.json]

The bare loop is engine and trainer in one process, buffers in lists: no HTTP, no database, no
object store, no checkpoints. Both draw the same prompts and the same samples, so they do the same
work; that their batches are equal is checked. They run in turn; the ratio is of the medians over
the repeats, of the time a step takes once both are under way.
"""

from __future__ import annotations

import argparse
import copy
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
from transformers import AutoTokenizer

from bapo_core.batch import build_batch
from bapo_core.buffers import (
    admit_hard,
    admit_high,
    choose_reevaluated,
    eligible_high,
    evict_solved,
    promoted,
)
from bapo_core.config import RunConfig, load_config
from bapo_core.filters import range_filter
from bapo_core.sampling import prompt_positions
from bapo_core.seeding import derive_rng, derive_seed
from bapo_core.tasks import get_task
from bapo_core.thresholds import replay_window, running_reward
from bapo_core.types import GroupSummary
from benchmarks.machine import machine
from services.buffer.api.client import BufferClient
from services.buffer.api.trajectories import TrajectoryGroup, TrajectoryResponse, table_of
from services.buffer.api.wire import ManifestMember, PromptItem
from services.datasets import load_datasets
from services.model.resolve import ensure_model
from services.rollout.api.wire import PromptRequest, Sampling
from services.rollout.collector import tokenize_conversation
from services.rollout.transformers_engine import TransformersEngine
from services.stack.settings import default_home
from services.stack.stack import running_stack
from services.trainer.data import collate, make_plan
from services.trainer.phases import PhaseTimer
from services.trainer.policy import load_policy
from services.trainer.ranks import Ranks
from services.trainer.update import Updater

SKIPPED = 5
"""Steps before the clock starts: everything is warm, and the first sync is over."""


class BareLoop:
    """Algorithm 1 in one process."""

    def __init__(self, config: RunConfig, model: Path) -> None:
        self.config = config
        self.updater = Updater(config, load_policy(model), Ranks(0, 1))
        self.engine = TransformersEngine()
        self.behavior = copy.deepcopy(self.updater.policy.model)
        self.engine.use(self.behavior, 1)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.task = get_task(config.task.name, **config.task.options)
        train, _ = load_datasets(config)
        self.prompts = list(train.prompts)
        self.by_uid = {prompt.uid: prompt for prompt in self.prompts}
        self.groups: list[TrajectoryGroup] = []
        self.hard: list[GroupSummary] = []
        self.high: list[GroupSummary] = []

    def run(self) -> tuple[float, list[list[str]]]:
        """(seconds a step, composition of every batch)."""
        compositions, started = [], 0.0
        for step in range(1, self.config.steps + 1):
            if step == SKIPPED + 1:
                started = time.perf_counter()
            compositions.append(self.step(step))
        seconds = time.perf_counter() - started
        return seconds / (self.config.steps - SKIPPED), compositions

    def step(self, step: int) -> list[str]:
        config = self.config
        if config.schedule.syncs_at(step):
            self.behavior.load_state_dict(self.updater.policy.model.state_dict())
            self.engine.use(self.behavior, step)
        positions = prompt_positions(
            config.seed,
            step,
            0,
            dataset_size=len(self.prompts),
            prompts_per_step=config.rollout.prompts_per_step,
            max_rounds=1,
        )
        fresh = self.roll_out(step, "fresh", [self.prompts[position] for position in positions])
        x2 = self.reevaluate(step)
        r_tot = running_reward("batch", fresh, None, [])
        settings = config.replay_window
        window = replay_window(r_tot, settings.c2_range, settings.c3_range)
        age = config.high_quality_buffer.max_age
        batch = build_batch(
            range_filter(fresh),
            x2,
            eligible_high(self.high, step=step, window=window, max_age=age),
            capacity=config.batch_capacity,
            window=window,
            c1=config.reevaluate.c1,
            rng=derive_rng(config.seed, "batch", step),
        )
        members = [_member(each.group, each.source.value) for each in batch.members]
        groups = [self.groups[member.group_id] for member in members]
        plan = make_plan(config, step, members, ranks=1, width=self.updater.policy.width)
        self.updater.step(step, collate(members, table_of(groups)), plan, window, PhaseTimer())
        self.hard = admit_hard(
            self.hard, fresh, c1=config.reevaluate.c1, capacity=config.hard_capacity
        ).apply(self.hard)
        self.high = admit_high(
            self.high,
            fresh,
            window=window,
            capacity=config.high_quality_buffer.capacity,
            max_age=age,
            step=step,
        ).apply(self.high)
        return [f"{member.source} {member.prompt_uid} {member.correct}" for member in members]

    def reevaluate(self, step: int) -> list[GroupSummary]:
        """X2; solved prompts leave the hard buffer."""
        config = self.config
        if not config.schedule.reevaluates_at(step):
            return []
        rng = derive_rng(config.seed, "reevaluate", step)
        chosen = choose_reevaluated(self.hard, limit=config.reevaluate.max_prompts, rng=rng)
        uids = [entry.prompt_uid for entry in chosen]
        new = self.roll_out(step, "reevaluation", [self.by_uid[uid] for uid in uids])
        c1 = config.reevaluate.c1
        solved = evict_solved(self.hard, {g.prompt_uid: g for g in new}, c1=c1)
        gone = {entry.group_id for entry, _ in solved}
        self.hard = [entry for entry in self.hard if entry.group_id not in gone]
        return [g for old, g in zip(chosen, new, strict=True) if promoted(old, g, c1=c1)]

    def roll_out(self, step: int, kind: str, prompts: Sequence[PromptItem]) -> list[GroupSummary]:
        rollout = self.config.rollout
        ids = [
            tokenize_conversation(self.tokenizer, self.task.render(prompt.payload))
            for prompt in prompts
        ]
        requests = [
            PromptRequest(
                prompt_token_ids=tokens,
                seed=derive_seed(self.config.seed, kind, step, prompt.uid),
            )
            for tokens, prompt in zip(ids, prompts, strict=True)
        ]
        generated = self.engine.generate(
            requests,
            Sampling(
                temperature=rollout.temperature,
                max_tokens=rollout.max_response_tokens,
                group_size=rollout.group_size,
            ),
            policy_version=self.engine.version,
        )
        found = []
        for prompt, tokens, group in zip(prompts, ids, generated, strict=True):
            texts = self.tokenizer.batch_decode(
                [response.token_ids for response in group.responses], skip_special_tokens=True
            )
            responses = [
                TrajectoryResponse(
                    response.token_ids,
                    response.logprobs,
                    self.task.verify(prompt.payload, text).reward,
                    response.finish_reason,
                    text,
                )
                for response, text in zip(group.responses, texts, strict=True)
            ]
            self.groups.append(TrajectoryGroup(prompt.uid, tokens, self.engine.version, responses))
            found.append(
                GroupSummary(
                    group_id=len(self.groups) - 1,
                    prompt_uid=prompt.uid,
                    step=step,
                    correct=self.groups[-1].correct,
                    size=len(responses),
                    policy_version=self.engine.version,
                )
            )
        return found


def _member(group: GroupSummary, source: str) -> ManifestMember:
    return ManifestMember(
        group_id=group.group_id,
        source=source,
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
    """The bare loop in a process of its own, as the stack's parts are."""
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from benchmarks.stack import BareLoop\n"
        "from bapo_core.config import RunConfig\n"
        "config = RunConfig.model_validate_json(sys.argv[1])\n"
        "print(json.dumps(BareLoop(config, Path(sys.argv[2])).run()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, config.model_dump_json(), str(model)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(os.cpu_count()), "OMP_WAIT_POLICY": "PASSIVE"},
    )
    seconds, compositions = json.loads(done.stdout)
    return seconds, compositions


def whole(config: RunConfig, home: Path, client: BufferClient) -> tuple[float, list[list[str]]]:
    """The same through `bapo run`."""
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
    model = ensure_model(config, default_home(), console)
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
            seconds, found = whole(named, Path(directory), client)
            through.append(seconds)
            equal = equal and found == expected
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/stack.json"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    result = measure(arguments.repeats, arguments.steps, Console())
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
