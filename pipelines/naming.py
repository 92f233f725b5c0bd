"""Names of the runs that pipelines train."""

from __future__ import annotations

import re

from bapo_core.errors import ConfigError
from services.buffer.api.wire import RUN_NAME, RUN_NAME_RULE

LONGEST_MADE = 48
"""Characters of a name that is made of Kubeflow's; the rest is left to the names of pods."""


def name_run(given: str, kubeflow_run: str, workflow: str) -> str:
    """Returns the name of the run that a pipeline trains.

    given: the parameter `bapo_run`. If it is empty, the name is made of Kubeflow's name of the run
    and the end of its workflow's name, which differs for each run of Kubeflow, also for clones and
    recurring runs, and stays the same when one is retried.
    """
    if given:
        return given
    suffix = workflow.rpartition("-")[2]
    words = re.findall(r"[a-z0-9]+", kubeflow_run.lower())
    name = "-".join([*words])[: LONGEST_MADE - len(suffix) - 1].strip("-")
    if not name or not name[0].isalpha():
        name = f"bapo-{name}".rstrip("-")
    return f"{name}-{suffix}".rstrip("-")


def check_run_name(name: str) -> None:
    """Raises `ConfigError`, with a name that is valid, unless `name` is one."""
    reason = ""
    if not re.fullmatch(RUN_NAME, name):
        reason = RUN_NAME_RULE
    elif name.endswith("-"):
        reason = "it ends with a hyphen, which no label of Kubernetes may"
    if reason:
        raise ConfigError(
            f"bapo_run is {name!r}: {reason}; give for example {name_run('', name, '')!r}, or "
            "leave it empty for a new run"
        )
