"""A run whose reward is a function of a file, from JSONL with a prompt and columns."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bapo_core.reward_files import digest_of_text
from services.stack.stack import Endpoints
from tests.e2e.test_run import TIMEOUT_S, Bapo, _committed, _wait_until
from tests.micro import save_micro_vision_model

SOURCE = '''
import re

def score(completions, prompts, word, **columns):
    """The share of letters of a word that a response has, for prompts that are chat messages."""
    assert [messages[-1]["content"] for messages in prompts] == word
    texts = [message["content"] for (message,) in completions]
    return [sum(letter in text for letter in each) / len(each) for text, each in zip(texts, word)]


def shortness(completions, **columns):
    if re.search("^[^ ]", completions[0][0]["content"]) is None:
        raise ValueError("the response begins with a blank, or is empty")
    return [-len(message["content"]) for (message,) in completions]
'''
ROWS = [
    {
        "prompt": [{"role": "system", "content": "Spell."}, {"role": "user", "content": word}],
        "word": word,
        "number": number,
    }
    for number, word in enumerate(
        ["abcdefghij", "klmnopqrst", "uvwxyzabcd", "0123456789", "ACEGIKMOQS"]
    )
]


def configuration(name: str, model: Path) -> dict[str, Any]:
    return {
        "name": name,
        "algorithm": "grpo",
        "seed": 5,
        "steps": 2,
        "model": {"path": str(model)},
        "task": {
            "reward": ["rewards.py:score", "rewards.py:shortness"],
            "train_path": "train.jsonl",
            "test_path": "test.jsonl",
        },
        "reward": {"weights": {"shortness": 0.01}},
        "rollout": {
            "prompts_per_step": 4,
            "group_size": 4,
            "max_prompt_tokens": 64,
            "max_response_tokens": 12,
        },
        "optimizer": {"learning_rate": 1e-4, "minibatch_prompts": 4, "microbatch_tokens": 2048},
        "evaluation": {"every": 2, "samples": 2},
        "checkpoint": {"every": 1},
    }


@pytest.fixture(scope="module")
def bapo(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str], stack: Endpoints
) -> Bapo:
    directory = tmp_path_factory.mktemp("runs")
    (directory / "rewards.py").write_text(SOURCE)
    (directory / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS[:4])))
    (directory / "test.jsonl").write_text("\n".join(map(json.dumps, ROWS[4:])))
    # Its tokens are the characters of ASCII.
    model = save_micro_vision_model(tmp_path_factory.mktemp("model"))
    return Bapo(directory, environment, stack, model, configuration)


def test_a_function_that_fails_is_found_before_the_run_is_created(bapo: Bapo) -> None:
    process = bapo.start("refused")
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "rewards.py:shortness raised ValueError: the response begins with a blank" in errors
    assert "tried with row 1" in errors
    assert "refused" not in [run.name for run in bapo.client("").runs()]


def test_a_response_has_the_reward_of_the_function_and_a_resumed_run_its_stored_file(
    bapo: Bapo,
) -> None:
    source = SOURCE.replace("is None:", "is None and completions[0][0]['content']:")
    (bapo.directory / "rewards.py").write_text(source)
    client = bapo.client("spelling")
    process = bapo.start("spelling")
    _wait_until(lambda: _committed(client) >= 1, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIMEOUT_S)
    changed = source.replace("return [-len", "return [-2 * len")
    (bapo.directory / "rewards.py").write_text(changed)
    longer = replace(bapo, configure=lambda *of: configuration(*of) | {"steps": 100})
    printed = longer.run("spelling", "--resume")
    # Warnings are about the configuration that the run has, and not about the file's.
    assert "note: optimizer.warmup_steps is 10 and steps is 2: no step has" in printed
    kept, now = digest_of_text(source), digest_of_text(changed)
    assert kept in printed
    assert now in printed
    config = client.run_state().config
    assert config.task.reward == [f"rewards.py:{name}@{kept}" for name in ("score", "shortness")]
    checked = 0
    for prompt in client.all_prompts():
        for attempt in client.prompt_history(prompt.uid).attempts:
            group = client.group(attempt.group_id)
            word = group.payload["columns"]["word"]
            for response in group.responses:
                share = sum(letter in response.text for letter in word) / len(word)
                if re.search("^ ", response.text):
                    assert response.reward_parts["failed"] == 1.0
                    assert "rewards.py:shortness raised ValueError" in str(response.failure)
                    continue
                parts = {"answer": share, "shortness": -float(len(response.text))}
                assert response.reward_parts == pytest.approx(parts)
                assert response.reward == pytest.approx(share - 0.01 * len(response.text))
                assert response.correct == (share >= 1.0)
                checked += 1
    assert checked >= 2 * 4 * 4 // 2
