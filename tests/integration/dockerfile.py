"""The Dockerfile as its instructions, by stage, and what builds an image's environment without an
engine for containers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass
class Stage:
    name: str
    base: str
    """Another stage, or an image."""
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [text for word, text in self.instructions if word == instruction]


def stages(text: str) -> tuple[dict[str, str], dict[str, Stage]]:
    """(arguments before the first stage, stages by name)."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    arguments: dict[str, str] = {}
    found: dict[str, Stage] = {}
    current: Stage | None = None
    for line in joined.splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            current = found[name] = Stage(name, base)
        elif current is None:
            assert word == "ARG", line
            name, _, default = rest.partition("=")
            arguments[name] = default
        else:
            current.instructions.append((word, rest))
    return arguments, found


def chain(found: dict[str, Stage], name: str, arguments: dict[str, str]) -> list[Stage]:
    """A stage and what it builds on, the first one first."""
    for argument, value in arguments.items():
        name = name.replace(f"${{{argument}}}", value)
    if name not in found:
        return []
    return [*chain(found, found[name].base, arguments), found[name]]


def context() -> list[Path]:
    """The files that `.dockerignore` lets through."""
    patterns = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    kept = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    dropped = [pattern for pattern in patterns if not pattern.startswith("!")]
    assert dropped[0] == "*"
    files = []
    for name in kept:
        place = ROOT / name
        files += (
            [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
        )
    return [
        path
        for path in files
        if not any(
            fnmatch(part, pattern.removeprefix("**/"))
            for pattern in dropped[1:]
            for part in path.parts
        )
    ]


def build(stage: str, arguments: dict[str, str], directory: Path) -> Path:
    """Runs a stage's commands with `directory` for the root; that of its files."""
    defaults, found = stages((ROOT / "Dockerfile").read_text())
    values = defaults | arguments
    here = directory / "here"
    here.mkdir(parents=True)
    for each in chain(found, stage, values):
        for copied in each.all("COPY"):
            *sources, target = copied.split()
            assert target == "./"
            for source in sources:
                shutil.copy(ROOT / source, here)
        for command in each.all("RUN"):
            local = command.replace("/opt/", f"{directory}/opt/")
            environment = {"PATH": os.environ["PATH"], "HOME": str(directory), **arguments}
            environment |= {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
            done = subprocess.run(
                ["/bin/sh", "-ec", local], cwd=here, env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}{done.stderr[-2000:]}"
    return directory


def app(directory: Path) -> Path:
    """The project's code as images have it: the context's files alone."""
    for path in context():
        target = directory / "app" / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return directory / "app"
