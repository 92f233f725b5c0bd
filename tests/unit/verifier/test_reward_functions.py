"""The functions of a reward file are called as TRL calls them, and fail with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from bapo_core.errors import BapoError
from bapo_core.outcomes import Outcome
from bapo_core.reward_files import digest_of_text
from services.verifier.api.wire import ItemVerdict
from services.verifier.pool import TaskRefused, VerifierPool

ROW = {"prompt": "6 * 7 =", "columns": {"answer": "42", "tags": ["a", "b"]}}
CHAT = {"prompt": [{"role": "user", "content": "6 * 7 ="}], "columns": {"answer": "42"}}


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    pool = VerifierPool(1, 2.0, memory_mb=256)
    yield pool
    pool.close()


def verdicts(
    pool: VerifierPool,
    source: str,
    responses: list[str],
    payload: dict[str, Any] = ROW,
    reward: str | list[str] = "rewards.py:score",
) -> list[ItemVerdict]:
    options = {"reward": reward, "source": source}
    return pool.verify("function", options, [(payload, response) for response in responses])


def rewards(*arguments: Any, **more: Any) -> list[float]:
    found = verdicts(*arguments, **more)
    assert [verdict.detail for verdict in found] == [None] * len(found)
    return [verdict.reward for verdict in found]


def failure(pool: VerifierPool, source: str, **more: Any) -> str:
    (verdict,) = verdicts(pool, source, ["42"], **more)
    assert (verdict.reward, verdict.status, verdict.failed) == (0.0, "crashed", True)
    return verdict.failure


def test_a_function_of_trl_is_called_with_completions_prompts_and_columns(
    pool: VerifierPool,
) -> None:
    source = """
def score(prompts, completions, answer, **kwargs):
    assert prompts == ["6 * 7 ="] and kwargs == {"tags": [["a", "b"]]}, (prompts, kwargs)
    return [1.0 if text == right else 0.25 for text, right in zip(completions, answer)]
"""
    assert rewards(pool, source, ["42", "41"]) == [1.0, 0.25]


def test_completions_are_messages_if_the_prompt_is(pool: VerifierPool) -> None:
    source = """
def score(completions, prompts, **columns):
    assert prompts == [[{"role": "user", "content": "6 * 7 ="}]]
    (message,) = completions[0]
    return [float(message == {"role": "assistant", "content": columns["answer"][0]})]
"""
    assert rewards(pool, source, ["42", "41"], CHAT) == [1.0, 0.0]


def test_a_function_gets_only_the_columns_that_it_names(pool: VerifierPool) -> None:
    assert rewards(pool, "def score(completions): return [float(len(completions[0]))]", ["ab"]) == [
        2.0
    ]


def test_a_response_is_correct_from_a_reward_of_1_on(pool: VerifierPool) -> None:
    source = "def score(completions, **columns): return [float(completions[0])]"
    found = verdicts(pool, source, ["1", "0.99", "3"])
    assert [verdict.status for verdict in found] == ["ok", "wrong_value", "ok"]


def test_further_functions_are_parts_of_the_reward(pool: VerifierPool) -> None:
    source = """
def score(completions, **columns): return [0.5]
def shortness(completions, **columns): return [-len(text) for text in completions]
"""
    found = verdicts(pool, source, ["abc"], reward=["rewards.py:score", "rewards.py:shortness"])
    assert [(verdict.reward, verdict.parts) for verdict in found] == [(0.5, {"shortness": -3.0})]


def test_asynchronous_functions_arrays_and_the_standard_library_work(pool: VerifierPool) -> None:
    source = """
from __future__ import annotations
import asyncio, re
from dataclasses import dataclass
import numpy as np

@dataclass
class Found:
    text: str

async def score(completions, **columns):
    await asyncio.sleep(0)
    return np.array([len(Found(text).text) / 2 for text in completions], dtype=np.float32)
"""
    assert rewards(pool, source, ["abc"]) == [1.5]


def test_what_a_function_changes_does_not_reach_the_next_response(pool: VerifierPool) -> None:
    source = """
def score(completions, tags, **columns):
    tags[0].append("c")
    return [float(len(tags[0]))]
"""
    assert rewards(pool, source, ["x", "x"]) == [3.0, 3.0]


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ("0.5", "rewards.py:score returned 0.5; return a list with one number for each"),
        ("None", "rewards.py:score returned None; return a list"),
        ("'1'", "rewards.py:score returned '1'; return a list"),
        ("[]", "rewards.py:score returned 0 rewards for 1 completion"),
        ("[1.0, 0.0]", "rewards.py:score returned 2 rewards for 1 completion"),
        ("[None]", "rewards.py:score returned [None]; return a number for each"),
        ("['1']", "rewards.py:score returned ['1']; return a number for each"),
        ("[float('nan')]", "rewards.py:score returned [nan]; return a finite number"),
        ("[float('inf')]", "rewards.py:score returned [inf]; return a finite number"),
    ],
)
def test_a_wrong_return_is_a_failure_that_says_what_is_right(
    pool: VerifierPool, returned: str, reason: str
) -> None:
    found = failure(pool, f"def score(completions, **columns): return {returned}")
    assert found.startswith(reason)


def test_an_exception_is_a_failure_with_its_line(pool: VerifierPool) -> None:
    source = """
import json

def score(completions, **columns):
    return [json.loads(text)["reward"] for text in completions]
"""
    assert failure(pool, source) == (
        "rewards.py:score raised TypeError: 'int' object is not subscriptable (rewards.py, line 5)"
    )
    assert "raised SystemExit: 3" in failure(pool, "def score(**columns): raise SystemExit(3)")


def test_a_function_that_hangs_costs_its_response_alone(pool: VerifierPool) -> None:
    source = """
import time
def score(completions, **columns):
    if completions[0] == "hang":
        time.sleep(3600)
    return [1.0]
"""
    found = verdicts(pool, source, ["a", "hang", "b"])
    assert [verdict.status for verdict in found] == ["ok", "timeout", "ok"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def score(completions:", "rewards.py, line 1: "),
        ("import helpers", "line 1); a reward file is one file, which may import what is"),
        ("raise SystemExit(2)", "rewards.py raised SystemExit: 2 (rewards.py, line 1)"),
        ("score = 1.0", "rewards.py: score is float, and no function"),
        ("other = 1", "rewards.py: score is NoneType, and no function"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused(
    pool: VerifierPool, source: str, reason: str
) -> None:
    with pytest.raises(TaskRefused) as refused:
        verdicts(pool, source, ["42"])
    assert reason in str(refused.value)


def test_a_text_of_another_digest_is_refused(pool: VerifierPool) -> None:
    source = "def score(completions, **columns): return [1.0]"
    stored = f"rewards.py:score@{digest_of_text(source)}"
    assert rewards(pool, source, ["42"], reward=stored) == [1.0]
    with pytest.raises(TaskRefused, match="send the file that is stored"):
        verdicts(pool, source + "\n", ["42"], reward=stored)


SPOILER = """
import bapo_core.tasks.countdown, sys
worker = sys.modules["__main__"]
worker.score = lambda *_: (1.0, "ok", None, None, {})
"""
COUNTDOWN = ({"nums": [1, 2, 3], "target": 6}, "no answer at all")


def test_a_reward_file_has_no_part_in_the_verdicts_of_other_tasks(pool: VerifierPool) -> None:
    """A file that changes the worker's own functions gives every verdict of its own run, and none
    of another one, whether its process was prepared, refused the file, or is the spare."""
    source = f"{SPOILER}\ndef score(completions, **columns): return [0.0]"
    assert rewards(pool, source, ["42"]) == [1.0]  # it has spoilt its own process
    for prepared in (source, f"{SPOILER}\nraise ValueError"):
        if prepared != source:
            with pytest.raises(TaskRefused):
                verdicts(pool, prepared, ["42"])
        for _ in range(2):
            (verdict,) = pool.verify("countdown", {"template": "short"}, [COUNTDOWN])
            assert verdict.reward == 0.0
    honest = "def score(completions, **columns): return [0.25]"
    assert rewards(pool, source, ["42"]) == [1.0]
    assert rewards(pool, honest, ["42"]) == [0.25]


@pytest.mark.parametrize("message", [b"[5]", b"[" * 100_000, b'["\\u0000"]'])
def test_a_reward_file_that_answers_for_its_worker_costs_only_its_own_run(
    pool: VerifierPool, message: bytes
) -> None:
    source = f"""
import os, struct, sys
message = {message!r}
os.write(int(sys.argv[1]), struct.pack("!i", len(message)) + message)
def score(completions, **columns): return [1.0]
"""
    with suppress(BapoError):  # A list of names is an answer; what follows it is none.
        (verdict,) = verdicts(pool, source, ["42"])
        # Its process is lost before the response is begun, or while it is scored.
        assert verdict.status in ("crashed", "verifier_lost")
        assert verdict.outcome != Outcome.SCORED
    (verdict,) = pool.verify("countdown", {"template": "short"}, [COUNTDOWN])
    assert verdict.status == "parse_error"
    assert pool._spare.is_alive()


@pytest.mark.parametrize(
    "message",
    [
        b"[[[NaN, 'ok', null, null, {}]], false, null]".replace(b"'", b'"'),
        b"[[[1.0, 5, null, null, {}]], false, null]",
        b'[[[1.0, "ok", null]], false, null]',
        b"[{}, false, null]",
        b"5",
    ],
)
def test_results_that_are_none_are_not_taken(pool: VerifierPool, message: bytes) -> None:
    source = f"""
import os, struct, sys
message = {message!r}
def score(completions, **columns):
    os.write(int(sys.argv[1]), struct.pack("!i", len(message)) + message)
    return [1.0]
"""
    (verdict,) = verdicts(pool, source, ["42"])
    assert (verdict.status, verdict.reward) == ("crashed", 0.0)
