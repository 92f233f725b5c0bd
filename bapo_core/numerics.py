"""Bounds that keep exponentials of log-ratios finite."""

from __future__ import annotations

MAX_LOG_RATIO = 20.0
"""Largest absolute log-ratio of two policies before `exp`, so that e^20 is the largest ratio.

A ratio beyond it carries no information: clipping and truncation cut it off far below.
"""
MAX_FLOAT64_EXPONENT = 700.0
"""Largest argument of `math.exp` that stays well inside float64, whose limit is 709.78."""
