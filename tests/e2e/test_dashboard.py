"""The dashboard in a real browser, on the real service, with a run whose rewards are made up."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from bapo_core.seeding import derive_rng
from services.buffer import wire
from services.buffer.trajectories import TrajectoryGroup, TrajectoryResponse, encode_groups
from services.local.stack import Endpoints
from tests.integration.driver import Driver, small_config

CHROMIUM = "/usr/bin/chromium"
STEPS = 14
END_OF_SEQUENCE = 1

HOSTILE = (
    "<img src=x onerror=\"window.hacked=1\"><script>window.hacked=1</script>"
    "<a href=\"javascript:window.hacked=1\">x</a> שלום عالم 🧮\u202e 👩‍👩‍👧 " + "W" * 3000
)
"""What a model might write: markup, both directions of text, emoji, no place to break a line."""

pytestmark = pytest.mark.skipif(not Path(CHROMIUM).exists(), reason=f"needs {CHROMIUM}")


# ---- a run to look at ---------------------------------------------------------------------------


class Play(Driver):
    """A run whose policy gets better: hard prompts stay unsolved for long, easy ones do not."""

    hostile: str = ""
    """Text of every response, instead of an arithmetic expression."""

    def groups(self, step: int, kind: wire.Kind = "fresh") -> list[TrajectoryGroup]:
        prompts = self.client.step_prompts(step, kind)
        return [
            self._group(prompt, prompts.policy_version, step, kind) for prompt in prompts.prompts
        ]

    def _group(
        self, prompt: wire.PromptItem, version: int, step: int, kind: wire.Kind
    ) -> TrajectoryGroup:
        rng = derive_rng(self.config.seed, "rewards", kind, step, prompt.uid)
        hardness = derive_rng(0, "hardness", prompt.uid).random()
        skill = 0.1 + 0.8 * (1 - math.exp(-3 * version / self.config.steps))
        ability = 1 / (1 + math.exp(10 * (hardness - skill)))
        responses = [self._response(prompt, rng, rng.random() < ability) for _ in range(self.size)]
        return TrajectoryGroup(prompt.uid, [2, 3, 4], version, responses)

    @property
    def size(self) -> int:
        return self.config.rollout.group_size

    def _response(
        self, prompt: wire.PromptItem, rng: random.Random, right: bool
    ) -> TrajectoryResponse:
        text = self.hostile or _expression(prompt.payload["nums"], rng)
        ids = [ord(character) % 30_000 + 2 for character in text] + [END_OF_SEQUENCE]
        logprobs = [-rng.expovariate(1.5) for _ in ids]
        return TrajectoryResponse(ids, logprobs, float(right), "stop", text)

    def evaluate(self, version: int) -> None:
        self.client.post_groups(
            version, "evaluation", encode_groups(self.groups(version, "evaluation"))
        )

    def run_step(self, step: int) -> wire.BatchManifest:
        if self.config.evaluates_at(step):
            self.evaluate(step)
        self.roll_out(step)
        manifest = self.client.batch(step)
        self.client.commit(step, self._metrics(step, manifest))
        self.client.report_replica("engine-0", manifest.members[0].policy_version)
        return manifest

    def _metrics(self, step: int, manifest: wire.BatchManifest) -> dict[str, float]:
        rng = derive_rng(self.config.seed, "metrics", step)
        stale = [step - member.policy_version for member in manifest.members]
        return {
            "loss": rng.gauss(0.02, 0.01),
            "entropy": 0.35 + 0.9 * math.exp(-2 * step / self.config.steps) + rng.gauss(0, 0.03),
            "gradient_norm": 0.4 + rng.random() / 4,
            "kl": 0.001 + rng.random() / 500,
            "staleness_mean": sum(stale) / len(stale),
            "staleness_max": float(max(stale)),
            "seconds/wait": 0.7 + rng.random() / 3,
            "seconds/proximal": 0.25 + rng.random() / 10,
            "seconds/update": 0.9 + rng.random() / 4,
            "seconds/read": 0.04,
            "seconds/commit": 0.05,
            **({"seconds/publish": 0.3} if step % 2 == 0 else {}),
        }


def _expression(numbers: list[int], rng: random.Random) -> str:
    shuffled = rng.sample(numbers, len(numbers))
    text = str(shuffled[0])
    for number in shuffled[1:]:
        text = f"{text}{rng.choice('+-*/')}{number}"
        if rng.random() < 0.3:
            text = f"({text})"
    return text
