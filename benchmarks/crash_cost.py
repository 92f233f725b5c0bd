"""Measures the generation that is lost when a process of a run is killed.

    python -m benchmarks.crash_cost [--out benchmarks/results/crash_cost.json]

A run of the tiny model on real Postgres, S3 and services has two replicas whose groups take 0.5 to
3 s and whose answers differ each time (`crash_cost_engine`). For each kind of process, one is
killed five times in a run, each time at another place of the checkpoint cycle, and is started again
as an operator of Kubernetes would do.

The same with answers that take 20 s (`LONG`), with and without the journal from which another
replica or collector continues them.

What is lost is measured in seconds of generation of a group: the time that all generation took, cut
off or not, minus the time of one generation of each group that the run needed. Groups are generated
side by side, so this is the time lost by the replicas times the number of groups in flight.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from bapo_core.config import RunConfig, config_from
from benchmarks.harness import make_parser, report
from benchmarks.machine import machine
from services.buffer.api.client import BufferClient
from services.common.errors import ServiceUnavailable
from services.common.process import EXIT_RETRYABLE
from services.model.resolve import TINY_MODEL
from tests.integration.support.breakable import PROCESSES, Breakable, breakable_stack
from tests.integration.support.driver import create_run

ROOT = Path(__file__).resolve().parents[1]
PLUG_IN = str(ROOT / "tests/plug_in")
REPLICAS = ("engine-0", "engine-1")
EVERY = 4
"""Steps between two syncs, re-evaluations and checkpoints."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run, and the places where its processes are killed.

    tokens: of each response. seconds: a group takes a time between these two.
    places: where a process is killed: the commit after which, and seconds after it.
    """

    steps: int
    prompts: int
    tokens: int
    seconds: tuple[float, float]
    journal_interval_s: float
    places: dict[str, tuple[int, float]]
    victims: tuple[str, ...]


SHORT = Scenario(
    steps=28,
    prompts=16,
    tokens=6,
    seconds=(0.5, 3.0),
    journal_interval_s=0.0,
    places={
        "after a sync": (4, 0.0),
        "in the window": (9, 0.0),
        "before the window's last step": (14, 0.0),
        "while a checkpoint is written": (19, 0.0),
        "within a step": (22, 0.05),
    },
    victims=("none", "trainer", "buffer", "postgres", "collector", "engine-0"),
)
LONG = Scenario(
    steps=8,
    prompts=8,
    tokens=400,
    seconds=(20.0, 20.0),
    journal_interval_s=1.0,
    places={
        "in the first window": (0, 20.0),
        "in the first window again": (0, 17.0),
        "in the second window": (4, 12.0),
        "in the second window again": (4, 17.0),
    },
    victims=("collector", "engine-0"),
)
SCENARIOS = {
    "short": SHORT,
    "long": LONG,
    "long without a journal": replace(LONG, journal_interval_s=0.0),
}
MEAN_BETWEEN_KILLS_S = 300.0


def configuration(name: str, scenario: Scenario) -> RunConfig:
    return config_from(
        {
            "name": name,
            "steps": scenario.steps,
            "model": {"path": str(TINY_MODEL)},
            "task": {"name": "chance", "train_prompts": 512, "test_prompts": 16},
            "rollout": {
                "engine": {
                    "kind": "vllm",
                    "journal_interval_s": scenario.journal_interval_s,
                },
                "prompts_per_step": scenario.prompts,
                "group_size": 4,
                "max_prompt_tokens": 32,
                "max_response_tokens": scenario.tokens + 10,
                "replicas": len(REPLICAS),
            },
            "sync": {"every": EVERY, "reevaluate_every": EVERY},
            "reevaluate": {"c1": 0.25},
            "optimizer": {"learning_rate": 1e-4, "minibatch_prompts": scenario.prompts // 2},
            "evaluation": {"every": EVERY},
            "checkpoint": {"every": EVERY},
        }
    )


class Run:
    """The processes of a run on a stack whose processes can be killed."""

    def __init__(self, stack: Breakable, name: str, scenario: Scenario, scratch: Path) -> None:
        self.stack, self.scenario, self.log = stack, scenario, scratch / f"{name}.jsonl"
        self.client = BufferClient(stack.endpoints.buffer_url, stack.endpoints.token, run=name)
        create_run(self.client, configuration(name, scenario))
        environment = {
            **stack.endpoints.environment(),
            "BAPO_RUN": name,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        for replica, port in zip(REPLICAS, stack.reserve_ports(len(REPLICAS)), strict=True):
            variables = {
                "BAPO_REPLICA": replica,
                "BAPO_PORT": str(port),
                "BAPO_SCRATCH": str(scratch / name / replica),
            }
            engine = [str(self.log), str(scenario.tokens), *map(str, scenario.seconds)]
            command = [sys.executable, "-m", "benchmarks.crash_cost_engine", *engine]
            stack.start(replica, command, environment=environment | variables)
        for process, module in (
            ("trainer", "services.trainer.loop"),
            ("collector", "services.rollout.collector"),
        ):
            variables = {"BAPO_SCRATCH": str(scratch / name / process)}
            stack.start_python(process, module, environment | variables)

    def train(self, victim: str) -> list[float]:
        """Trains to the end; returns when the victim was killed, once at each place."""
        kills: list[float] = []
        places = [] if victim == "none" else list(self.scenario.places.values())
        while not self._finished():
            if places and self._current_step() >= places[0][0]:
                time.sleep(places.pop(0)[1])
                kills.append(time.time())
                self.stack.kill(victim)
                if victim in PROCESSES:
                    self.stack.revive(victim)
                else:
                    self._start_again(victim)
            time.sleep(0.01)
        return kills

    def _current_step(self) -> int:
        try:
            return self.client.run_state().current_step
        except ServiceUnavailable:
            return 0

    def _finished(self) -> bool:
        """Returns whether trainer and collector have finished; restarts what may be restarted."""
        codes = {}
        for name in (*REPLICAS, "trainer", "collector"):
            codes[name] = self.stack._child(name).process.exit_code
            if codes[name] == EXIT_RETRYABLE:
                self.stack._children.remove(self.stack._child(name))
                self._start_again(name)
            elif codes[name] not in (None, 0):
                raise RuntimeError(f"{name} ended with exit code {codes[name]}")
        return codes["trainer"] == 0 and codes["collector"] == 0

    def _start_again(self, name: str) -> None:
        arguments, options = self.stack._started[name]
        self.stack.start(name, *arguments, **options)

    def stop(self) -> None:
        self.stack.stop(*REPLICAS, "trainer", "collector")


@dataclass
class Generation:
    """The generation of a group, as an engine has logged it."""

    key: tuple[int, int]
    """Policy version and seed, which identify the group."""
    continued_s: float
    """Seconds that the tokens took with which it began."""
    began: float
    ended: float | None = None
    """None if its engine was killed."""
    complete: bool = False

    @property
    def seconds(self) -> float:
        assert self.ended is not None
        return self.ended - self.began


def read_log(path: Path) -> list[Generation]:
    found: dict[int, Generation] = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if "key" in entry:
            key, continued_s = tuple(entry["key"]), entry["continued_s"]
            found[entry["id"]] = Generation(key, continued_s, entry["at"])
        else:
            generation = found[entry["id"]]
            generation.ended, generation.complete = entry["at"], entry["end"] == "done"
    return list(found.values())


def costs(
    generations: Sequence[Generation], places: Sequence[str], kills: Sequence[float]
) -> dict[str, Any]:
    """Returns the seconds of all generation, and of what was lost by the place of the kill.

    A generation that was followed by another of its group lost what the other did not continue, at
    the first kill after its beginning. What an engine had in progress when it was killed ended
    then.
    """
    groups: dict[tuple[int, int], list[Generation]] = {}
    for generation in sorted(generations, key=lambda generation: generation.began):
        if generation.ended is None:
            generation.ended = min(kill for kill in kills if kill >= generation.began)
        groups.setdefault(generation.key, []).append(generation)
    unfinished = [key for key, group in groups.items() if not group[-1].complete]
    if unfinished:
        raise RuntimeError(f"{len(unfinished)} groups were begun and never completed")
    lost = dict.fromkeys(places[: len(kills)], 0.0)
    lost_without_kill = 0.0
    for group in groups.values():
        for generation, following in pairwise(group):
            seconds = generation.continued_s + generation.seconds - following.continued_s
            place = next((n for n, kill in enumerate(kills) if kill >= generation.began), None)
            if place is None:
                lost_without_kill += seconds
            else:
                lost[places[place]] += seconds
    in_flight = concurrency(generations)
    per_kill = sum(lost.values()) / max(1, len(kills))
    return {
        "groups": len(groups),
        "generations": len(generations),
        "generated_s": sum(generation.seconds for generation in generations),
        "groups_in_flight": in_flight,
        "lost_s": lost,
        "lost_s_per_kill": per_kill,
        "lost_s_per_kill_and_group_in_flight": per_kill / in_flight,
        "lost_s_without_kill": lost_without_kill,
        "generated_per_needed_with_a_kill_every_five_minutes": 1
        + per_kill / (MEAN_BETWEEN_KILLS_S * in_flight),
    }


def measure(console: Console, name: str, scenario: Scenario) -> dict[str, Any]:
    """Returns the costs of kills in a scenario by the process that is killed."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bapo-bench-") as directory:
        for victim in scenario.victims:
            with breakable_stack() as stack:
                run = Run(stack, f"crash-{victim}", scenario, Path(directory))
                began = time.time()
                try:
                    kills = run.train(victim)
                finally:
                    run.stop()
                seconds = time.time() - began
                result = costs(read_log(run.log), list(scenario.places), kills)
            results[victim] = {"kills": len(kills), "run_s": seconds, **result}
            console.print(
                f"{name}, {victim}: {result['generations']} generations of {result['groups']} "
                f"groups, {result['lost_s_per_kill']:.2f} s lost per kill with "
                f"{result['groups_in_flight']:.1f} groups in flight",
                highlight=False,
            )
    return results


def concurrency(generations: Sequence[Generation]) -> float:
    """Returns the mean number of groups in flight while at least one is."""
    events = sorted(
        (at, change)
        for generation in generations
        for at, change in ((generation.began, 1), (generation.began + generation.seconds, -1))
    )
    busy = area = 0.0
    in_flight, before = 0, events[0][0]
    for at, change in events:
        if in_flight:
            busy += at - before
            area += in_flight * (at - before)
        in_flight, before = in_flight + change, at
    return area / busy


def main() -> None:
    parser = make_parser(__doc__, "crash_cost")
    parser.add_argument("--only", choices=SCENARIOS, nargs="+", default=list(SCENARIOS))
    arguments = parser.parse_args()
    # The task whose verdicts are drawn by chance; every process imports it.
    sys.path.insert(0, PLUG_IN)
    os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), PLUG_IN))
    result = {"machine": machine()}
    for name in arguments.only:
        result[name] = measure(Console(), name, SCENARIOS[name])
    report(result, arguments.out)


if __name__ == "__main__":
    main()
