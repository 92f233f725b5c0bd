"""Measures on a GPU what this project cannot measure without one, and brings the figures home.

    python -m benchmarks.gpu --plan attention|first|second|vllm [--size full|toy] [--out DIR]
    python -m benchmarks.gpu --only PART[:CASE] ... [--size full|toy] [--out DIR]

A plan takes at most eight minutes of the machine. It leaves out what was measured before on this
device and with this code; `--only` measures what it names in any case. Each step of a plan runs in
a process of its own with a time limit, and writes `DIR/PART.json` after every measurement, also
when it fails or is cut off; the next step runs in any case. A result stays in the file until a new
one replaces it. The size `toy` runs the same code on a CPU in seconds. README.md beside this file
has the plans, the parts and what they take.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.gpu.bundle import install
from benchmarks.gpu.digest import digest_of
from benchmarks.gpu.parts import BY_NAME, PARTS, PLANS, Step
from benchmarks.gpu.record import ERROR_CHARACTERS, Record, Size

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/gpu"
TOY_LIMIT_S = 300.0
"""Seconds that a part may take at toy size, on a machine that is busy."""
LONG_TOYS = ("end_to_end", "ragged")
"""Parts that take longest at toy size, and start first."""
LEAST_S = 15.0
"""A step is not started with less time than this left."""


@dataclass(frozen=True, slots=True)
class Suite:
    """How and where the parts of a run are measured."""

    size: Size
    out: Path
    commit: str
    python: Path
    """Interpreter of the parts' processes."""
    device: str = "cpu"
    """Name of the GPU, or `cpu`."""
    packages: str = ""
    """Versions of the packages that matter, as `as_text` has them."""

    def path(self, part: str) -> Path:
        return self.out / f"{part}.json"


def run_step(suite: Suite, step: Step, limit_s: float) -> Record:
    """Measures the step's cases in a new process; returns the part's record, which is in a file."""
    path = suite.path(step.part)
    log = path.with_suffix(".log")
    digest = digest_of(BY_NAME[step.part]) if step.part in BY_NAME else ""
    command = [str(suite.python), "-m", "benchmarks.gpu.child"]
    command += [step.part, suite.size, str(path), suite.commit, digest, *step.cases]
    Record.after(path, step.part, suite.size, suite.commit).write()
    with log.open("w") as output:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(suite.size),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill_group(child)
    output_end = log.read_text(errors="replace")[-ERROR_CHARACTERS:]
    log.unlink()
    record = Record.read(path)
    if code is None:
        record.finish("timed out", f"ended after {limit_s:.0f} s\n{output_end}")
    elif code != 0 and record.status != "failed":
        record.finish("failed", f"ended with exit code {code}\n{output_end}")
    return record


def environment(size: Size) -> dict[str, str]:
    """Returns the variables of the parts' processes."""
    # The project is not installed on the machine, and parts start processes elsewhere.
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    # Batches of many sizes would fragment the memory of a GPU.
    allocator = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    # Two parts run at a time: threads that wait would take the cores from the other part.
    threads = {"OMP_NUM_THREADS": "1"} if size == "toy" else {}
    return {**allocator, **os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths)}


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """Ends the child and whatever it started."""
    with contextlib.suppress(ProcessLookupError):  # all of them have ended
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def take_earlier(suite: Suite, parts: set[str]) -> None:
    """Copies the committed results of the parts to where new ones are written, if there are none.

    Raises `SystemExit` if there are results of another size.
    """
    for part in parts:
        path, committed = suite.path(part), RESULTS / f"{part}.json"
        if not path.exists() and committed.exists() and Record.read(committed).size == suite.size:
            shutil.copyfile(committed, path)
        try:
            Record.after(path, part, suite.size)
        except ValueError as error:
            raise SystemExit(str(error)) from error


def leave_out_current(suite: Suite, step: Step) -> Step | None:
    """Returns the step without the cases that were measured with this code; None if all were."""
    part = BY_NAME[step.part]
    record = Record.after(suite.path(step.part), step.part, suite.size)
    current = (suite.device, suite.packages, digest_of(part))
    cases = step.cases or (step.part,)
    left = tuple(case for case in cases if not record.is_current(case, *current))
    return replace(step, cases=left if step.cases else ()) if left else None


def merged(steps: Sequence[Step]) -> list[Step]:
    """Returns one step for each part, with the cases of all; the longest parts come first."""
    cases: dict[str, tuple[str, ...]] = {}
    for step in steps:
        cases[step.part] = cases.get(step.part, ()) + step.cases
    parts = sorted(cases, key=lambda part: part not in LONG_TOYS)
    return [Step(part, tuple(dict.fromkeys(cases[part]))) for part in parts]


def run_steps(
    suite: Suite, steps: Sequence[Step], seconds: float, *, again: bool = False
) -> list[Record]:
    """Runs the steps in turn, none beyond `seconds` from now; returns the record of each.

    At toy size, where times mean nothing, a part is one step, and two parts run at a time.
    again: whether results that are current are measured again.
    """
    deadline = time.monotonic() + seconds
    suite.out.mkdir(parents=True, exist_ok=True)
    take_earlier(suite, {step.part for step in steps})

    def run(step: Step) -> Record:
        left = step if again else leave_out_current(suite, step)
        if left is None:
            record = Record.read(suite.path(step.part))
            record.status, record.error = "unchanged", None
            return record
        limit = min(deadline - time.monotonic(), limit_of(suite, left))
        names = " ".join(left.cases)
        if limit < LEAST_S:
            record = Record(suite.path(step.part), step.part, suite.size, suite.commit)
            record.status, record.error = "not run", f"the time was up {names}".strip()
            return record
        print(f"== {left.part} {names} (at most {limit:.0f} s)", flush=True)
        record = run_step(suite, left, limit)
        if record.status != "done":
            last = (record.error or "").strip().splitlines()[-1:]
            print(f"{left.part}: {record.status}: {' '.join(last)}", flush=True)
        return record

    if suite.size == "full":
        return [run(step) for step in steps]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, merged(steps)))


def limit_of(suite: Suite, step: Step) -> float:
    """Returns the seconds after which the step's process is ended."""
    return TOY_LIMIT_S if suite.size == "toy" else step.limit_s


def table(records: Sequence[Record]) -> str:
    """Returns one line for each step: its status, seconds, and the part's number of results."""
    lines = [f"{'part':<12} {'status':<10} {'seconds':>8} {'results':>8}"]
    lines += [
        f"{record.part:<12} {record.status:<10} {record.seconds:>8.1f} {len(record.results):>8}"
        for record in records
    ]
    return "\n".join(lines)


def current_commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def current_device() -> str:
    """Returns the name of the GPU, or `cpu`, without importing PyTorch."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return "cpu"
    names = done.stdout.splitlines()
    return names[0].strip() if done.returncode == 0 and names else "cpu"


def current_packages(python: Path) -> str:
    """Returns the versions of the packages that matter, in the environment of this interpreter."""
    program = "from benchmarks.gpu.record import as_text, versions; print(as_text(versions()))"
    done = subprocess.run(
        [python, "-c", program],
        cwd=ROOT,
        env=environment("full"),
        check=True,
        stdout=subprocess.PIPE,
    )
    return done.stdout.decode().strip()


def named_steps(names: Sequence[str]) -> list[Step]:
    """Returns the steps that measure `PART` or `PART:CASE`, in the suite's order.

    Raises `SystemExit` for an unknown part.
    """
    cases: dict[str, tuple[str, ...]] = {}
    for name in names:
        part, _, case = name.partition(":")
        if part not in BY_NAME:
            raise SystemExit(f"there is no part {part!r}; there are {', '.join(BY_NAME)}")
        cases[part] = cases.get(part, ()) + ((case,) if case else ())
    return [
        Step(part.name, cases[part.name], limit_s=part.limit_s)
        for part in PARTS
        if part.name in cases
    ]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0]
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--plan",
        choices=list(PLANS),
        help="; ".join(f"{name}: {plan.title}" for name, plan in PLANS.items()),
    )
    what.add_argument(
        "--only", nargs="+", metavar="PART[:CASE]", help=f"measure again: {', '.join(BY_NAME)}"
    )
    parser.add_argument("--size", choices=("full", "toy"), default="full")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--minutes",
        type=float,
        help="stop by then (default: 60, or what a plan has without the machine's start)",
    )
    parser.add_argument("--commit", default="", help="commit of this checkout, if it has no .git")
    parser.add_argument(
        "--bundle",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="unpack the packages of these archives first",
    )
    return parser.parse_args(arguments)


def main() -> None:
    started = time.monotonic()
    arguments = parse(sys.argv[1:])
    python = Path(sys.executable) if arguments.bundle is None else install(arguments.bundle)
    suite = Suite(
        arguments.size,
        arguments.out.resolve(),
        arguments.commit or current_commit(),
        python,
        current_device(),
        current_packages(python),
    )
    if arguments.plan is not None:
        steps, seconds = PLANS[arguments.plan].steps, PLANS[arguments.plan].limit_s
    else:
        steps, seconds = tuple(named_steps(arguments.only)), 3_600.0
    if arguments.minutes is not None:
        seconds = arguments.minutes * 60
    left = seconds - (time.monotonic() - started)
    records = run_steps(suite, steps, left, again=arguments.plan is None)
    print(table(records))
    sys.exit(0 if all(record.status in ("done", "unchanged") for record in records) else 1)


if __name__ == "__main__":
    main()
