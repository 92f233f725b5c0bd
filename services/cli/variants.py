"""The runs of a comparison: labelled sets of overrides, each with every seed."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bapo_core.config import (
    PRESETS,
    ConfigError,
    RunConfig,
    merge,
    override_config,
    parse_overrides,
    read_values,
)
from services.buffer.api.wire import ForkRequest, RunState

NAME_LENGTH = 63
"""Characters of a run's name."""
DIGEST_LENGTH = 6


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the compared settings."""

    label: str
    values: Mapping[str, Any]
    """Values that replace those of the configuration that all variants share, by section."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run of a comparison: one variant with one seed."""

    label: str
    config: RunConfig
    fork: ForkRequest | None = None
    """The fork that it is; None for a run that begins at step 1."""
    fork_of: str = ""
    """Name of the run that it is a fork of; empty without `fork`."""


def algorithm_variant(name: str) -> Variant:
    """Returns the variant that takes the preset of an algorithm. Raises `ConfigError`."""
    if name not in PRESETS:
        raise ConfigError(f"algorithm {name!r} is not one of {', '.join(sorted(PRESETS))}")
    return Variant(name, {"algorithm": name})


def algorithm_variants(names: str) -> list[Variant]:
    """Returns the variants of algorithms that are separated by commas, or of `all`.

    Raises `ConfigError` for an unknown one.
    """
    return [algorithm_variant(name) for name in (PRESETS if names == "all" else names.split(","))]


def parse_variant(text: str) -> Variant:
    """Parses `LABEL: KEY=VALUE ...`; without keys, the variant changes nothing.

    Raises `ConfigError`.
    """
    label, colon, overrides = text.partition(":")
    if not colon or not label.strip():
        raise ConfigError(
            f"variant {text!r}: write LABEL: KEY=VALUE ..., for example 'v10: sync.every=10'"
        )
    try:
        parts = shlex.split(overrides)
    except ValueError as error:
        raise ConfigError(f"variant {text!r}: {error}; close the quotation") from error
    return Variant(label.strip(), parse_overrides(parts))


def read_variants(path: str) -> list[Variant]:
    """Reads a YAML file whose keys are labels, and whose values are configurations to lay over.

    Raises `ConfigError` if it holds anything else.
    """
    variants = []
    for label, values in read_values(path).items():
        if values is not None and not isinstance(values, Mapping):
            raise ConfigError(
                f"{path}: {label}: must hold keys of the configuration, not {values!r}; write, for "
                "example, `v10: {sync: {every: 10}}`"
            )
        variants.append(Variant(str(label), values or {}))
    return variants


def plan_runs(
    file: str | Path | None,
    overrides: Sequence[str],
    variants: Sequence[Variant],
    seeds: Sequence[int],
) -> list[PlannedRun]:
    """Returns the runs, all variants with the first seed first.

    What a variant does not change is what the user set, in the file or on the command line, and
    otherwise the preset of the variant's algorithm.

    Raises `ConfigError` for a wrong configuration, a label or seed that appears twice, and two
    variants that are the same configuration.
    """
    values, shared = read_values(file), parse_overrides(overrides)

    def configure(variant: Variant, seed: int) -> RunConfig:
        # Not the variant's name: the runs that it shares a configuration with would differ.
        changes = (shared, variant.values, {"seed": seed})
        where = f"{file or 'config'}, variant {variant.label}"
        return override_config(values, *changes, where=where)

    return _plan(variants, seeds, configure)


def plan_forks(
    parent: RunState,
    step: int,
    overrides: Sequence[str],
    variants: Sequence[Variant],
    seeds: Sequence[int],
) -> list[PlannedRun]:
    """Returns forks of a run at a step, all variants with the first seed first.

    What a variant does not change is the parent's configuration. The seed is that of the draws
    after the fork.

    Raises `ConfigError` as `plan_runs` does, and for keys that the parent's past depends on.
    """
    shared, history = parse_overrides(overrides), parent.history

    def values_of(variant: Variant, seed: int) -> dict[str, Any]:
        return merge(merge(shared, variant.values), {"seed": seed})

    def configure(variant: Variant, seed: int) -> RunConfig:
        change = history.plan_fork(values_of(variant, seed), step, f"{parent.name[:50]}-{step}")
        return history.with_change(change)

    by_label = {variant.label: variant for variant in variants}
    return [
        replace(
            planned,
            fork_of=parent.name,
            fork=ForkRequest(
                name=planned.config.name,
                step=step,
                values=values_of(by_label[planned.label], planned.config.seed),
            ),
        )
        for planned in _plan(variants, seeds, configure)
    ]


def _plan(
    variants: Sequence[Variant],
    seeds: Sequence[int],
    configure: Callable[[Variant, int], RunConfig],
) -> list[PlannedRun]:
    """Returns a run for each variant and seed, each with a name of its own configuration."""
    _refuse_repetition([variant.label for variant in variants], "label")
    _refuse_repetition(seeds, "seed")
    runs = []
    for seed in seeds:
        labels: dict[str, str] = {}
        for variant in variants:
            config = configure(variant, seed)
            digest = digest_of_config(config)
            if digest in labels:
                raise ConfigError(
                    f"variants {labels[digest]!r} and {variant.label!r} are the same "
                    "configuration; change or remove one"
                )
            labels[digest] = variant.label
            name = run_name(config.name, variant.label, seed, digest)
            runs.append(PlannedRun(variant.label, config.model_copy(update={"name": name})))
    return runs


def _refuse_repetition(values: Sequence[Any], what: str) -> None:
    for index, value in enumerate(values):
        if value in values[:index]:
            raise ConfigError(f"the {what} {value!r} is given twice; give each once")


def digest_of_config(config: RunConfig) -> str:
    """Returns the digest of everything but the name."""
    values = config.model_dump(mode="json", exclude={"name"})
    data = json.dumps(values, sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()[:DIGEST_LENGTH]


def run_name(base: str, label: str, seed: int, digest: str) -> str:
    """Returns a valid name, which another configuration does not get: `base-label-s1-0a1b2c`."""
    end = f"-s{seed}-{digest}"
    slug = re.sub(r"[^a-z0-9]+", "-", f"{base}-{label}".lower()).strip("-")
    return slug[: NAME_LENGTH - len(end)].rstrip("-") + end
