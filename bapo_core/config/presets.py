"""Presets: the values of the defaults that each `algorithm` changes.

The method's variants and ablations, and the baselines that the paper compares it with: PPO, GRPO,
GRPO with delayed syncs (v = 5), and DAPO.
"""

from __future__ import annotations

from typing import Any

_GRPO: dict[str, Any] = {
    "sync": {"every": 1},
    "fresh": {"filter": "none"},
    "reevaluate": {"enabled": False},
    "replay": {"enabled": False},
    "loss": {
        "ratio": "behavior",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "aggregation": "seq-mean-token-mean",
        "entropy_coefficient": 0.0,
    },
    "kl": {"coefficient": 0.001, "reference": "initial", "estimator": "k3"},
}

PRESETS: dict[str, dict[str, Any]] = {
    "bapo": {},
    "ba_ppo": {
        "advantage": {"estimator": "gae"},
        "hard_buffer": {"capacity": 64},
        "high_quality_buffer": {"capacity": 64},
        "replay_window": {"direction": "off"},
    },
    "bapo_mini": {
        "reevaluate": {"c1": 0.0},
        "replay_window": {"direction": "off", "c2_range": [0.5, 0.5], "c3_range": [0.5, 0.5]},
    },
    "bapo_without_x2": {"reevaluate": {"enabled": False}},
    "bapo_without_x3": {"replay": {"enabled": False}},
    "bapo_fixed_window": {"replay_window": {"direction": "off"}},
    "ppo": {
        **_GRPO,
        "advantage": {"estimator": "gae"},
        "loss": {**_GRPO["loss"], "aggregation": "token-mean"},
    },
    "grpo": _GRPO,
    "grpo_delayed": {
        **_GRPO,
        "sync": {"every": 5},
        "loss": {**_GRPO["loss"], "clip_center": "current"},
    },
    "dapo": {
        **_GRPO,
        "fresh": {"filter": "range"},
        "rollout": {"max_generation_rounds": 4},
        "loss": {
            "ratio": "behavior",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "dual_clip": None,
            "aggregation": "token-mean",
            "entropy_coefficient": 0.0,
        },
        "kl": {"coefficient": 0.0},
    },
}
"""Name of an algorithm -> the keys whose values differ from the defaults, by section."""
