"""The names of the built-in methods, for a configuration that is checked without torch."""

from __future__ import annotations

ESTIMATOR_NAMES = (
    "group",
    "gae",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "opo",
    "maxrl",
)
"""The built-in estimators of advantages."""
ESTIMATOR_ENTRY_POINTS = "bapo.estimators"
"""The group of entry points of estimators: name -> `bapo_core.advantages.Estimator`."""
