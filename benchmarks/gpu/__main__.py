"""Measures on a GPU what this project cannot measure without one, and brings the figures home.

    python -m benchmarks.gpu [--only PART ...] [--size full|toy] [--out DIR]

Each part runs in a process of its own with a time limit, and writes `DIR/PART.json` after every
measurement, also when it fails or is cut off; the next part runs in any case. The size `toy` runs
the same code on a CPU in seconds. README.md beside this file has the parts and what they take.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.bundle import install
from benchmarks.gpu.parts import NAMES, Part, choose
from benchmarks.gpu.record import Record, Size

ROOT = Path(__file__).resolve().parents[2]
TOY_LIMIT_S = 300.0
"""Seconds that a part may take at toy size, on a machine that is busy."""
LEAST_S = 20.0
"""A part is not started with less time than this left."""
ERROR_CHARACTERS = 6_000
"""Characters of a failed part's output that its result keeps."""


@dataclass(frozen=True, slots=True)
class Suite:
    """How and where the parts of a run are measured."""

    size: Size
    out: Path
    commit: str
    python: Path
    """Interpreter of the parts' processes."""


def run_part(suite: Suite, part: Part, limit_s: float) -> Record:
    """Runs a part in a new process; returns its record, which is also in a file."""
    path, log = suite.out / f"{part.name}.json", suite.out / f"{part.name}.log"
    path.unlink(missing_ok=True)
    command = [str(suite.python), "-m", "benchmarks.gpu.child"]
    command += [part.name, suite.size, str(path), suite.commit]
    with log.open("w") as output:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            # The project is not installed on the machine, and parts start processes elsewhere.
            env={**os.environ, "PYTHONPATH": import_path()},
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
    record = (
        Record.read(path) if path.exists() else Record(path, part.name, suite.size, suite.commit)
    )
    if code is None:
        record.finish("timed out", f"ended after {limit_s:.0f} s\n{output_end}")
    elif code != 0 and record.status != "failed":
        record.finish("failed", f"ended with exit code {code}\n{output_end}")
    return record


def import_path() -> str:
    """Returns the import path of the environment with this checkout before it."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """Ends the child and whatever it started."""
    with contextlib.suppress(ProcessLookupError):  # all of them have ended
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def run_parts(suite: Suite, parts: Sequence[Part], seconds: float) -> list[Record]:
    """Runs the parts in turn, none beyond `seconds` from now."""
    deadline = time.monotonic() + seconds
    records = []
    for part in parts:
        left = deadline - time.monotonic()
        limit = min(left, part.limit_s if suite.size == "full" else TOY_LIMIT_S)
        if limit < LEAST_S:
            path = suite.out / f"{part.name}.json"
            record = Record(path, part.name, suite.size, suite.commit)
            record.finish("not run", "the time was up")
        else:
            print(f"== {part.name}: {part.title} (at most {limit:.0f} s)", flush=True)
            record = run_part(suite, part, limit)
        if record.status != "done":
            last = (record.error or "").strip().splitlines()[-1:]
            print(f"{part.name}: {record.status}: {' '.join(last)}", flush=True)
        records.append(record)
    return records


def table(records: Sequence[Record]) -> str:
    """Returns one line for each part: its status, seconds, and number of results."""
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


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--only", nargs="+", choices=NAMES, default=[], metavar="PART", help=", ".join(NAMES)
    )
    parser.add_argument("--size", choices=("full", "toy"), default="full")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop by then (default: 60)")
    parser.add_argument("--commit", default="", help="commit of this checkout, if it has no .git")
    parser.add_argument(
        "--bundle", type=Path, metavar="FILE", help="unpack the packages of this archive first"
    )
    return parser.parse_args(arguments)


def main() -> None:
    started = time.monotonic()
    arguments = parse(sys.argv[1:])
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    python = Path(sys.executable) if arguments.bundle is None else install(arguments.bundle)
    commit = arguments.commit or current_commit()
    suite = Suite(arguments.size, out, commit, python)
    seconds = arguments.minutes * 60 - (time.monotonic() - started)
    records = run_parts(suite, choose(arguments.only), seconds)
    print(table(records))
    sys.exit(0 if all(record.status == "done" for record in records) else 1)


if __name__ == "__main__":
    main()
