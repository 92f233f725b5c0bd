"""Presets: the values of the defaults that each `algorithm` changes.

They are the method's variants and ablations, the baselines that the paper compares it with, and
further methods of the field, most of which train on all groups of a step and no others.
"""

from __future__ import annotations

from typing import Any

_ON_POLICY: dict[str, Any] = {
    "sync": {"every": 1},
    "fresh": {"filter": "none"},
    "reevaluate": {"enabled": False},
    "replay": {"select": "off"},
    "loss": {"correction": "behavior", "aggregation": "token-mean", "entropy_coefficient": 0.0},
    "kl": {"coefficient": 0.0},
}


def _on_policy(
    objective: str | dict[str, Any] = "ppo",
    *,
    aggregation: str = "token-mean",
    **sections: dict[str, Any],
) -> dict[str, Any]:
    """Returns a preset without KL penalty and entropy bonus; `sections` are added to it.

    objective: a kind, or what differs from a clip range of 0.2 without a dual clip.
    """
    if objective == "ppo" or not isinstance(objective, str):
        changes = {} if isinstance(objective, str) else objective
        objective = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, **changes}
    loss = {**_ON_POLICY["loss"], "aggregation": aggregation, "objective": objective}
    return {**_ON_POLICY, **sections, "loss": {**loss, **sections.get("loss", {})}}


_GRPO = _on_policy(
    aggregation="seq-mean-token-mean",
    kl={"coefficient": 0.001, "reference": "initial", "estimator": "k3"},
)

PRESETS: dict[str, dict[str, Any]] = {
    "bapo": {},
    "ba_ppo": {
        "advantage": {"estimator": "gae"},
        "hard_buffer": {"capacity": 64},
        "replay": {"buffer": {"capacity": 64}, "window": {"direction": "fixed"}},
    },
    "bapo_mini": {
        "reevaluate": {"c1": 0.0},
        "replay": {
            "window": {"direction": "fixed", "c2_range": [0.5, 0.5], "c3_range": [0.5, 0.5]}
        },
    },
    "bapo_on_policy": {
        "sync": {"every": 1},
        "reevaluate": {"enabled": False},
        "replay": {"select": "mixed", "buffer": {"max_age": None}},
    },
    "bapo_without_x2": {"reevaluate": {"enabled": False}},
    "bapo_without_x3": {"replay": {"select": "off"}},
    "bapo_fixed_window": {"replay": {"window": {"direction": "fixed"}}},
    "ppo": _on_policy(advantage={"estimator": "gae"}, kl=_GRPO["kl"]),
    "grpo": _GRPO,
    "grpo_delayed": {
        **_GRPO,
        "sync": {"every": 5},
        "loss": {
            **_GRPO["loss"],
            "objective": {**_GRPO["loss"]["objective"], "clip_center": "current"},
        },
    },
    "dapo": _on_policy(
        {"clip_high": 0.28},
        fresh={"filter": "range"},
        rollout={"max_generation_rounds": 4},
        reward={"wrong": -1.0, "overlong_share": 0.2},
        loss={"mask_truncated": True},
    ),
    "dr_grpo": _on_policy(aggregation="seq-mean-token-sum-norm", advantage={"scale": "none"}),
    "rloo": _on_policy(
        aggregation="seq-mean-token-sum",
        advantage={"estimator": "rloo"},
    ),
    "reinforce_pp": _on_policy(
        advantage={"estimator": "reinforce_pp"},
        kl={"coefficient": 0.001, "placement": "reward", "reference": "initial"},
    ),
    "opo": _on_policy(advantage={"estimator": "opo"}),
    "maxrl": _on_policy(advantage={"estimator": "maxrl"}),
    "gspo": _on_policy(
        "gspo",
        aggregation="seq-mean-token-mean",
        loss={"correction": {"kind": "prox_current", "weight_level": "geometric"}},
    ),
    "cispo": _on_policy("cispo"),
    "sapo": _on_policy("sapo", aggregation="seq-mean-token-mean"),
    "gmpo": _on_policy("gmpo", aggregation="seq-mean-token-mean"),
    "topr": _on_policy("topr", aggregation="seq-mean-token-sum", advantage={"scale": "none"}),
    "m2po": _on_policy("m2po", sync={"every": 5}),
    "clip_cov": _on_policy("clip_cov"),
    "kl_cov": _on_policy("kl_cov"),
    "bapo_adaptive_clipping": _on_policy("adaptive_clipping"),
    "mopps": _on_policy(
        {"clip_high": 0.28, "dual_clip": 10.0},
        aggregation="token-mean",
        sampler={"kind": "mopps", "decay": 0.5},
        loss={"entropy_coefficient": 0.001},
    ),
    "dots": _on_policy(
        aggregation="seq-mean-token-mean",
        sampler={"kind": "dots", "half_life": 34.0},
        replay={"select": "mixed", "buffer": {"capacity": 512, "max_age": None}},
        batch={"fresh_fraction": 0.5},
        advantage={"scale": "none"},
    ),
    "areal_async": _on_policy(
        sync={"every": 1, "lag": 4, "interrupt_rollouts": True},
        loss={"correction": {"kind": "prox_current", "weight_cap": 5.0, "weight_mode": "mask"}},
    ),
    "remix_grpo": _on_policy(
        {"clip_center": "current"},
        aggregation="seq-mean-token-mean",
        replay={
            "select": "mixed",
            "last_step": 50,
            "buffer": {"capacity": 1024, "max_age": 2},
        },
        batch={"fresh_fraction": 0.6},
        optimizer={"epochs": 2},
        kl={
            "coefficient": 0.001,
            "reference": "initial",
            "estimator": "k3",
            "convex": {},
            "reset_after": 50,
        },
    ),
    "repo": _on_policy(
        aggregation="seq-mean-token-mean",
        response_replay={"groups": "all"},
        advantage={"std": "sample", "eps": 1e-4},
    ),
    "arpo": _on_policy(
        {"clip_high": 0.3},
        response_replay={
            "groups": "unsolved",
            "candidates": 8,
            "min_candidates": 1,
            "count": 1,
            "only_correct": True,
            "strategy": "random",
            "advantages": "mixed",
            "replace": True,
        },
        loss={"correction": {"kind": "prox_current", "weight_mode": "unit"}},
    ),
    "luffy": _on_policy(
        {"clip_low": None, "clip_high": None},
        aggregation="seq-mean-token-sum-norm",
        demonstrations={"join": "all"},
        advantage={"scale": "none"},
        loss={
            "by_source": {"demonstrated": {"shaping": 0.1}},
            "entropy_coefficient": 0.001,
        },
    ),
    "relift": _on_policy(
        {"clip_low": None, "clip_high": None},
        aggregation="seq-mean-token-sum-norm",
        reevaluate={"enabled": False, "c1": 0.0},
        hard_buffer={"capacity": 1024},
        demonstrations={"supervise_every": 128},
        advantage={"scale": "none"},
        loss={"entropy_coefficient": 0.001},
    ),
    "exgrpo": _on_policy(
        {"clip_low": None, "clip_high": None},
        aggregation="seq-mean-token-sum-norm",
        sampler={"kind": "exgrpo"},
        response_replay={
            "groups": "revisited",
            "candidates": 64,
            "min_candidates": 1,
            "count": 1,
            "only_correct": True,
            "strategy": "most_likely",
            "advantages": "mixed",
            "replace": True,
        },
        advantage={"scale": "none"},
        loss={
            "by_source": {"replayed": {"shaping": 0.1}},
            "entropy_coefficient": 0.001,
        },
    ),
}
"""Name of an algorithm -> the keys whose values differ from the defaults, by section."""

SUMMARIES: dict[str, str] = {
    "bapo": "Batch adaptation (arXiv 2602.20722): fresh, re-evaluated and replayed groups.",
    "ba_ppo": "Batch adaptation with a critic (arXiv 2602.20722, A.9).",
    "bapo_mini": "Batch adaptation without parameters: hard prompts are those that nothing solved, "
    "and groups with half of the responses correct are replayed (arXiv 2602.20722).",
    "bapo_on_policy": "Batch adaptation (arXiv 2602.20722) whose fresh groups are of the current "
    "policy (v = 1), with replays of the last 256 mixed groups and without re-evaluations: the "
    "rule of R10, R11 and R18 to R20 in docs/reproduction.md.",
    "bapo_without_x2": "The ablation without re-evaluated groups (arXiv 2602.20722).",
    "bapo_without_x3": "The ablation without replayed groups (arXiv 2602.20722).",
    "bapo_fixed_window": "The ablation with a replay window that does not move (arXiv 2602.20722).",
    "ppo": "PPO with a critic and GAE, on policy (arXiv 1707.06347).",
    "grpo": "Group-relative advantages, on policy (arXiv 2402.03300).",
    "grpo_delayed": "GRPO whose rollout policy is synced every v = 5 steps (arXiv 2505.22257).",
    "dapo": "Clip-higher, token mean, dynamic sampling, rewards of +1 and -1, overlong filtering "
    "and soft overlong punishment (arXiv 2503.14476).",
    "dr_grpo": "GRPO without its two biases: no division by the standard deviation or by a "
    "response's length (arXiv 2503.20783).",
    "rloo": "The mean reward of the other responses as the baseline (arXiv 2402.14740), with PPO's "
    "clip, as minibatches after the first are off-policy.",
    "reinforce_pp": "Returns by token, with the KL penalty in the reward, whitened over the batch "
    "(arXiv 2501.03262).",
    "opo": "The baseline of least variance, weighted by length (arXiv 2505.23585). It is derived "
    "for exactly on-policy updates: set `optimizer.minibatch_prompts` to the batch's size.",
    "maxrl": "Advantages divided by the mean reward, which approximates maximum likelihood "
    "(arXiv 2602.02710).",
    "gspo": "One ratio and one clip for a response (arXiv 2507.18071). The ratio is to theta_t; "
    "a response of another policy has an importance weight.",
    "cispo": "Weights of gradients are clipped instead of losses (arXiv 2506.13585).",
    "sapo": "A soft gate in place of the clip (arXiv 2511.20347).",
    "gmpo": "The geometric mean of a response's ratios (arXiv 2507.20673).",
    "topr": "No ratio for better responses, a truncated one for worse (arXiv 2503.14286); the "
    "group's mean reward is the baseline.",
    "m2po": "A bound on the second moment of the log-ratio (arXiv 2510.01161), for stale data: the "
    "rollout policy is synced every 5 steps.",
    "clip_cov": "The gradient of a few tokens of high covariance is cut off (arXiv 2505.22617).",
    "kl_cov": "A KL penalty on the tokens of highest covariance (arXiv 2505.22617).",
    "bapo_adaptive_clipping": "The other BAPO (arXiv 2510.18927): clip bounds that are searched in "
    "each update, so that tokens with positive advantages keep their share. With batch adaptation: "
    "`algorithm: bapo`, `loss.objective: adaptive_clipping`, `loss.correction: behavior`.",
    "mopps": "GRPO on the prompts whose Thompson draws are nearest to one half "
    "(arXiv 2507.04632), with the paper's settings for Countdown but for `sampler.candidates`, "
    "which are 8 there; for mathematics, it has `sampler.decay: 1` and `sampler.candidates: 16`.",
    "dots": "Prompts of medium difficulty, and half of each batch from the mixed groups of earlier "
    "steps (arXiv 2506.05316). The posterior's mean stands for the paper's predictor, which needs "
    "an embedding model; its results fade with a half-life of 34 steps, because the predictor "
    "follows the present policy.",
    "areal_async": "Rollouts run four steps ahead of the trainer, with the decoupled objective "
    "(arXiv 2505.24298). The staleness is fixed and not only bounded, so that a resumed run is the "
    "same run, as far as the engine repeats itself; with `vllm`, new weights interrupt rollouts.",
    "remix_grpo": "Two fifths of each batch from the last two policies, with a clip around the "
    "previous policy, two passes and a KL in part to it; after step 50, on policy with the policy "
    "as the new reference (arXiv 2507.06892, from its abstract and secondary sources).",
    "repo": "Responses of earlier steps beside the fresh ones to the same prompt "
    "(arXiv 2506.09340). With its cache of 16 responses, nothing is replayed before a prompt's "
    "third epoch.",
    "luffy": "A demonstration in place of one response of each group, with a shaped ratio "
    "(arXiv 2504.14945). It needs demonstrations, which `countdown` composes and other data have "
    "in a column.",
    "relift": "Supervised updates on the demonstrations of prompts that stay unsolved "
    "(arXiv 2506.07527).",
    "exgrpo": "Prompts that were solved in part are revisited, with a success of their past in "
    "place of a fresh response (arXiv 2510.02245). The mean log-prob at sampling time stands for "
    "the entropy under the current policy, by which the paper chooses the success.",
    "arpo": "A stored correct response joins a group that has none (arXiv 2505.16282), with the "
    "paper's weight of 1; `loss.correction.weight_mode: truncate` corrects for its age.",
}
"""Name of an algorithm -> what it is, and its source, for docs/methods.md."""
