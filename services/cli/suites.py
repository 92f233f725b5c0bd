"""Suites of `bapo eval`: evaluation sets that are measured together, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bapo_core.config import RunConfig, merge, override_config, parse_overrides, read_values
from bapo_core.errors import BapoError
from bapo_core.spelling import did_you_mean

SUFFIXES = (".parquet", ".jsonl", ".json")


@dataclass(frozen=True, slots=True)
class Suite:
    """Evaluation sets of a task, and how they are sampled unless the caller says otherwise."""

    task: str
    evaluation: Mapping[str, Any]
    """Keys of the section `evaluation`."""
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names, without suffix, of the file of each set that is read from data."""
    generated: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Keys of each set that the task generates."""


SUITES: Mapping[str, Suite] = {
    # Table 1 has the mean over 32 responses; the temperature is that of MoPPS, because the paper
    # does not state its own.
    "maths": Suite(
        task="math",
        evaluation={"samples": 32, "temperature": 0.6},
        files={
            "aime24": ("aime24", "aime2024", "aime"),
            "aime25": ("aime25", "aime2025"),
            "amc": ("amc",),
            "math500": ("math500", "math"),
            "minerva": ("minerva",),
            "olympiad": ("olympiad", "olympiad_bench", "olympiadbench"),
        },
    ),
    "countdown": Suite(
        task="countdown",
        evaluation={},
        generated={
            "cd-34": {"options": {"numbers": [3, 4]}},
            "cd-4": {"options": {"numbers": [4]}},
        },
    ),
}

ALL_PROMPTS = 1_000_000
"""Limit of the prompts of a set that is read from data, high enough to read all of them; a
`task.test_prompts` of the command line replaces it."""


@dataclass(frozen=True, slots=True)
class SuiteConfig:
    """The configuration that evaluates a suite."""

    config: RunConfig
    left_out: tuple[str, ...]
    """Sets of the suite for which no data was given."""


def suite_config(
    name: str, file: str | None, overrides: Sequence[str], data: Sequence[str]
) -> SuiteConfig:
    """Returns the configuration of a file with the sets of a suite in place of its own.

    data: directories that hold the suite's files, and `SET=ADDRESS` for single sets.

    Raises `BapoError` for data or keys of a set that the suite does not have, and if no set has
    data.
    """
    suite = SUITES[name]
    addresses = _find_data(name, suite, data)
    if suite.files and not addresses:
        raise BapoError(
            f"suite {name} needs data: give --data DIRECTORY with files such as "
            f"{', '.join(f'{names[0]}.json' for names in suite.files.values())}, or --data "
            "SET=ADDRESS, for example --data aime24=hf://organisation/name:split"
        )
    changes = parse_overrides(overrides)
    most = None if "test_prompts" in changes.get("task", {}) else ALL_PROMPTS
    sets = {
        **suite.generated,
        **{key: {"path": path, "prompts": most} for key, path in addresses.items()},
    }
    _refuse_unknown_sets(name, sets, changes)
    values = read_values(file)
    task = values.get("task", {})
    if task.get("name", "countdown") != suite.task or task.get("reward") is not None:
        # They belong to another task.
        values["task"] = {}
    values["task"] = {**values.get("task", {}), "name": suite.task, "test_path": None}
    values["evaluation"] = {**values.get("evaluation", {}), "sets": {}, "primary": None}
    values = merge(values, {"evaluation": {**suite.evaluation, "sets": sets}})
    config = override_config(values, changes, where=file or "config")
    return SuiteConfig(config, tuple(key for key in suite.files if key not in addresses))


def _refuse_unknown_sets(
    name: str, sets: Mapping[str, Mapping[str, Any]], changes: Mapping[str, Any]
) -> None:
    """Raises `BapoError` if overrides change a set that is not measured.

    An override may add a set of its own, which has a path, or options that say what to generate.
    """
    evaluation = changes.get("evaluation")
    changed = evaluation.get("sets") if isinstance(evaluation, Mapping) else None
    for key, values in changed.items() if isinstance(changed, Mapping) else ():
        if key in sets or not isinstance(values, Mapping) or values.keys() & {"path", "options"}:
            continue
        if key in SUITES[name].files:
            raise BapoError(
                f"evaluation.sets.{key}: no data of this set are given; add --data {key}=ADDRESS, "
                "or remove the override"
            )
        known = [*SUITES[name].files, *SUITES[name].generated]
        raise BapoError(
            f"evaluation.sets.{key}: suite {name} has no such set"
            f"{did_you_mean(str(key), known) or ';'} its sets are {', '.join(known)}; give a set "
            "of your own a path, or options by which the task generates it"
        )


def _find_data(name: str, suite: Suite, data: Sequence[str]) -> dict[str, str]:
    """Returns the address of each set that has one; a later one replaces an earlier one."""
    addresses: dict[str, str] = {}
    for entry in data:
        key, separator, address = entry.partition("=")
        if separator and key in suite.files:
            addresses[key] = address
        elif Path(entry).is_dir():
            addresses |= _files_in(suite, Path(entry))
        else:
            known = ", ".join(suite.files) or "none, because the task generates them"
            raise BapoError(
                f"--data {entry}: is no directory and no SET=ADDRESS; the sets of suite {name} "
                f"that are read are {known}"
            )
    return addresses


def _files_in(suite: Suite, directory: Path) -> dict[str, str]:
    files = {}
    for key, stems in suite.files.items():
        paths = [directory / f"{stem}{suffix}" for stem in stems for suffix in SUFFIXES]
        present = next((path for path in paths if path.is_file()), None)
        if present is not None:
            files[key] = str(present)
    return files
