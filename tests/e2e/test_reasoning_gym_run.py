"""A run on generators of reasoning-gym: its rewards are the scores of the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bapo_core.tasks import get_task
from services.stack.stack import Endpoints
from tests.e2e.test_run import Bapo
from tests.micro import save_micro_vision_model

pytest.importorskip("reasoning_gym", reason="`make install-reasoning-gym` installs it")

OPTIONS = {"dataset": "power_function", "template": "short"}
"""A generator that scores every answer with at least 0.01, so that partial credit does not depend
on what the model happens to answer."""
SUMS = {"dataset": "chain_sum", "config": {"max_digits": 2}}


def configuration(name: str, model: Path) -> dict[str, Any]:
    return {
        "name": name,
        "seed": 5,
        "steps": 1,
        "model": {"path": str(model)},
        "task": {
            "name": "reasoning_gym",
            "options": OPTIONS,
            "train_prompts": 24,
            "test_prompts": 4,
        },
        "rollout": {
            "prompts_per_step": 8,
            "group_size": 4,
            "max_prompt_tokens": 256,
            "max_response_tokens": 12,
        },
        "sync": {"every": 1, "reevaluate_every": 1},
        "optimizer": {"learning_rate": 1e-4, "minibatch_prompts": 4, "microbatch_tokens": 2048},
        "evaluation": {
            "every": 2,
            "samples": 2,
            "sets": {"powers": {}, "sums": {"options": SUMS}},
        },
    }


@pytest.fixture(scope="module")
def bapo(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str], stack: Endpoints
) -> Bapo:
    # Its tokens are the characters of ASCII.
    model = save_micro_vision_model(tmp_path_factory.mktemp("model"))
    return Bapo(tmp_path_factory.mktemp("runs"), environment, stack, model, configuration)


def test_the_reward_of_a_response_is_the_score_of_the_library(bapo: Bapo) -> None:
    bapo.run("gym")
    client, task = bapo.client("gym"), get_task("reasoning_gym", **OPTIONS)
    responses = [
        (group.payload, response)
        for prompt in client.all_prompts()
        for attempt in client.prompt_history(prompt.uid).attempts
        for group in [client.group(attempt.group_id)]
        for response in group.responses
    ]
    assert len(responses) >= 8 * 4
    for payload, response in responses:
        verdict = task.verify(payload, response.text)
        assert response.reward_parts["answer"] == pytest.approx(verdict.reward)
        assert response.correct == (verdict.status == "ok")
    assert 0.01 in {round(response.reward, 6) for _, response in responses}
    assert {stored.name for stored in client.evaluation_sets()} == {"powers", "sums"}
