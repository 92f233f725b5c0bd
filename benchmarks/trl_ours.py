"""Runs our side of `benchmarks.trl`: the trainer's own update, as in a run.

python -m benchmarks.trl_ours SIDE OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

from bapo_core.config import RunConfig, config_from
from benchmarks.batches import WINDOW, batch_of
from benchmarks.trl_steps import (
    ADVANTAGE_EPS,
    CLIP,
    GRADIENT_CLIP,
    LEARNING_RATE,
    WARM_UP_TOKENS,
    WEIGHT_CAP,
    Group,
    Instant,
    Meter,
    Side,
    finish,
    read_side,
    slots,
)
from services.trainer.data import make_plan
from services.trainer.phases import PhaseTimer
from services.trainer.ranks import Ranks, init_distributed
from services.trainer.shard import load_sharded
from services.trainer.update import Updater


def config(side: Side, groups: list[Group]) -> RunConfig:
    """Builds GRPO's loss with the importance weights that TRL calls its vLLM correction."""
    longest_prompt = max(len(group.prompt) for group in groups)
    return config_from(
        {
            "algorithm": "grpo",
            "rollout": {
                "prompts_per_step": len(groups),
                "group_size": len(groups[0].responses),
                "max_prompt_tokens": longest_prompt,
                "max_response_tokens": slots(groups) - longest_prompt,
            },
            "advantage": {"std": "sample", "eps": ADVANTAGE_EPS},
            "loss": {
                "objective": {"clip_low": CLIP, "clip_high": CLIP},
                "correction": {"kind": "prox_current", "weight_cap": WEIGHT_CAP},
            },
            "kl": {"coefficient": 0.0},
            "optimizer": {
                "learning_rate": LEARNING_RATE,
                "weight_decay": 0.0,
                "warmup_steps": 0,
                "minibatch_prompts": len(groups),
                "microbatch_tokens": side.tokens_at_once,
                "gradient_clip": GRADIENT_CLIP,
            },
            "trainer": {
                "gradient_checkpointing": "full" if side.gradient_checkpointing else "none"
            },
        }
    )


def run(side: Side, out: Path) -> None:
    groups = side.groups
    settings = config(side, groups)
    with init_distributed() as ranks:
        measure(side, groups, settings, ranks, out)


def measure(side: Side, groups: list[Group], settings: RunConfig, ranks: Ranks, out: Path) -> None:
    policy = load_sharded(
        Path(side.directory) / "model",
        ranks,
        prepare=lambda policy: policy,
        settings=settings.trainer,
    )
    updater = Updater(settings, policy, ranks)
    meter = Meter()
    short = [group.truncate(WARM_UP_TOKENS) for group in groups]
    for number in range(1, side.steps + 2):
        batch = batch_of(groups if number > 1 else short)
        plan = make_plan(settings, number, batch.members, ranks=1, width=policy.width)
        if number == 2:
            meter.reset(policy)
        started = Instant()
        metrics = updater.step(number, batch, plan, WINDOW, PhaseTimer()).metrics
        ended = Instant()
        meter.losses.append(metrics["loss"])
        meter.gradient_norms.append(metrics["gradient_norm"])
        if number > 1:
            meter.add(ended.seconds - started.seconds, ended.cpu_seconds - started.cpu_seconds)
    finish(meter, policy.model, out)


if __name__ == "__main__":
    run(read_side(sys.argv[1]), Path(sys.argv[2]))
