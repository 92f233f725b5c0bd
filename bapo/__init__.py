"""The Python API: trains on this machine, and asks about runs, from a script or a notebook.

>>> import bapo
>>> run = bapo.train("examples/countdown.yaml", steps=20)  # doctest: +SKIP
>>> run.metrics()["reward"].plot()  # doctest: +SKIP

It is thin: `train` is `bapo run`, `evaluate` is `bapo eval`, and the methods of `Run` ask the same
REST API as the other commands, with data frames as answers.
"""

from __future__ import annotations

from bapo.api import evaluate, open_run, runs, train
from bapo.run import Run
from bapo_core.errors import BapoError

__all__ = ["BapoError", "Run", "evaluate", "open_run", "runs", "train"]
