"""What every benchmark begins and ends with: its arguments, and the file of its results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def make_parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """Returns the parser of a benchmark's arguments, with the file of its results as `--out`.

    doc: the docstring of the benchmark. name: the file's name without its ending.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(f"benchmarks/results/{name}.json"))
    return parser


def report(result: Mapping[str, Any], out: Path) -> None:
    """Writes the results as JSON and prints them."""
    text = json.dumps(result, indent=2)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(f"{text}\n")
    print(text)
