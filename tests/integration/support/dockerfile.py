"""Parses the Dockerfile, and builds an image's environment without a container engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[3]


@dataclass
class Stage:
    name: str
    base: str
    """Name of the stage or image that it is built on."""
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [text for word, text in self.instructions if word == instruction]


def stages(text: str) -> tuple[dict[str, str], dict[str, Stage]]:
    """Returns the arguments before the first stage, and the stages by name."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    arguments: dict[str, str] = {}
    by_name: dict[str, Stage] = {}
    current: Stage | None = None
    for line in joined.splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            current = by_name[name] = Stage(name, base)
        elif current is None:
            assert word == "ARG", line
            name, _, default = rest.partition("=")
            arguments[name] = default
        else:
            current.instructions.append((word, rest))
    return arguments, by_name


def chain(by_name: dict[str, Stage], name: str, arguments: dict[str, str]) -> list[Stage]:
    """Returns a stage after the stages that it is built on."""
    for argument, value in arguments.items():
        name = name.replace(f"${{{argument}}}", value)
    if name not in by_name:
        return []
    return [*chain(by_name, by_name[name].base, arguments), by_name[name]]


def context() -> list[Path]:
    """Returns the files of the build context, which `.dockerignore` restricts."""
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
        path = ROOT / name
        files += [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
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
    """Runs a stage's commands with `directory` as the root; returns it."""
    defaults, by_name = stages((ROOT / "Dockerfile").read_text())
    values = defaults | arguments
    working_directory = directory / "build"
    working_directory.mkdir(parents=True)
    for ancestor in chain(by_name, stage, values):
        for copied in ancestor.all("COPY"):
            *sources, target = copied.split()
            assert target in ("./", f"./{sources[0]}/")
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, working_directory / source)
                else:
                    shutil.copy(ROOT / source, working_directory)
        for command in ancestor.all("RUN"):
            local = command.replace("/opt/", f"{directory}/opt/")
            environment = {"PATH": os.environ["PATH"], "HOME": str(directory), **arguments}
            environment |= {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
            done = subprocess.run(
                ["/bin/sh", "-ec", local],
                cwd=working_directory,
                env=environment,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}{done.stderr[-2000:]}"
    return directory


def app(directory: Path) -> Path:
    """Copies the project's code as images have it, and returns its directory."""
    for path in context():
        target = directory / "app" / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return directory / "app"
