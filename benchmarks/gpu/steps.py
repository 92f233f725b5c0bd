"""Training steps on made-up groups: the trainer's own update, timed phase by phase."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from bapo_core.config import RunConfig, config_from
from benchmarks.batches import WINDOW, batch_of
from benchmarks.gpu.device import peak_memory, synchronize
from benchmarks.gpu.record import spread
from benchmarks.trl_steps import Group, Response, tokens_of
from services.trainer.data import Batch, make_plan
from services.trainer.memory import MemoryPlan
from services.trainer.phases import PhaseTimer
from services.trainer.policy import Policy
from services.trainer.ranks import Ranks
from services.trainer.update import Updater


def make_group(
    draw: np.random.Generator, prompt: int, responses: list[int], vocabulary: int
) -> Group:
    """Makes a group of these lengths; one half of its responses is right."""

    def tokens(count: int) -> list[int]:
        ids: list[int] = draw.integers(2, vocabulary, count).tolist()
        return ids

    def logprobs(count: int) -> list[float]:
        values: list[float] = (-np.log(vocabulary) + draw.normal(0.0, 0.3, count)).tolist()
        return values

    return Group(
        tokens(prompt),
        [
            Response(tokens(length), logprobs(length), float(index % 2))
            for index, length in enumerate(responses)
        ],
    )


def step_config(groups: list[Group], *, microbatch_tokens: int, **sections: Any) -> RunConfig:
    """Builds the configuration of one update over all groups: GRPO's loss without a KL penalty.

    The penalty would have a second model score the batch.
    """
    longest_prompt = max(len(group.prompt) for group in groups)
    longest = max(len(response.tokens) for group in groups for response in group.responses)
    return config_from(
        {
            "algorithm": "grpo",
            "kl": {"coefficient": 0.0},
            "rollout": {
                "prompts_per_step": len(groups),
                "group_size": len(groups[0].responses),
                "max_prompt_tokens": longest_prompt,
                "max_response_tokens": longest,
            },
            "optimizer": {
                "minibatch_prompts": len(groups),
                "microbatch_tokens": max(microbatch_tokens, longest_prompt + longest),
                "warmup_steps": 0,
            },
            **sections,
        }
    )


class Steps:
    """Takes the same step again and again: scores the batch, then updates the weights once."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        groups: list[Group],
        memory: MemoryPlan | None = None,
    ) -> None:
        """memory: how a step fits the memory, if the policy was built by it."""
        self.policy, self.tokens = policy, tokens_of(groups)
        self.batch: Batch = batch_of(groups)
        self.updater = Updater(config, policy, Ranks(0, 1), memory=memory)
        self.plan = make_plan(config, 1, self.batch.members, ranks=1, width=policy.width)
        self.steps = 0

    def step(self) -> dict[str, float]:
        """Returns the step's metrics, and the seconds of the step and of its phases."""
        self.steps += 1
        timer = PhaseTimer()
        synchronize()
        started = time.perf_counter()
        outcome = self.updater.step(self.steps, self.batch, self.plan, WINDOW, timer)
        synchronize()
        seconds = time.perf_counter() - started
        # The phase's own end does not wait for the optimizer's kernels.
        proximal = timer.seconds.get("proximal", 0.0)  # not every step scores its batch
        return {**outcome.metrics, "step": seconds, "score": proximal, "update": seconds - proximal}

    def measure(self, repeats: int, warm_up: int = 1) -> dict[str, Any]:
        """Returns the spread of seconds and tokens a second, and the peak memory.

        `update` leaves out scoring the batch, which published figures do not include.
        """
        for _ in range(warm_up):
            self.step()
        with peak_memory() as memory:
            steps = [self.step() for _ in range(repeats)]
        seconds = {
            name: spread([step[name] for step in steps]) for name in ("step", "score", "update")
        }
        return {
            "tokens": self.tokens,
            "seconds": seconds,
            "tokens_per_s": {
                name: self.tokens / seconds[name]["median"] for name in ("step", "update")
            },
            "memory": memory.report(),
            "loss": [step["loss"] for step in steps],
            "gradient_norm": [step["gradient_norm"] for step in steps],
        }
