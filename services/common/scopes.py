"""Scopes of API tokens: of people and their tools, and of the processes of runs."""

from __future__ import annotations

from typing import Literal, get_args

Scope = Literal["read", "run", "admin", "replica", "collector", "trainer", "pipeline"]
"""Scope of a token. Of people: `read` reads everything, `run` also creates and ends runs, `admin`
may do all. Of processes: `replica`, `collector` and `trainer` make the calls of that process alone;
`pipeline` reads everything, creates runs and ends them."""
SCOPES: tuple[Scope, ...] = get_args(Scope)
PROCESS_SCOPES: tuple[Scope, ...] = ("replica", "collector", "trainer", "pipeline")
"""Scopes of tokens that the service's environment may hold, one for each kind of process."""

_READERS: tuple[Scope, ...] = ("run", "pipeline")
"""Scopes that include `read`."""


def covers(held: Scope, permitted: tuple[Scope, ...]) -> bool:
    """Returns whether a token of the scope `held` may call a route that permits these scopes."""
    includes_read = "read" in permitted and held in _READERS
    return held == "admin" or held in permitted or includes_read
