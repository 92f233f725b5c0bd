"""Scopes of API tokens."""

from __future__ import annotations

from typing import Literal, get_args

Scope = Literal["read", "run", "admin"]
"""Scope of a token: `read` reads everything, `run` also changes runs, `admin` also manages tokens
and stored objects."""
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""All scopes, smallest first. Each includes the ones before it."""
