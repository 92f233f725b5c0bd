"""The verifier scores responses to problems of reasoning-gym in its processes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import TOKEN, serving, wait_until

from bapo_core.errors import PayloadError
from bapo_core.tasks import Payload
from bapo_core.tasks.reasoning_gym import CODE_SCORERS, REFUSED, ReasoningGymTask
from services.common.errors import ServiceError
from services.verifier.api.client import VerifierClient
from services.verifier.api.wire import ItemVerdict, VerifyItem
from services.verifier.pool import TaskRefused, VerifierPool
from services.verifier.settings import VerifierSettings

pytest.importorskip("reasoning_gym", reason="`make install-reasoning-gym` installs it")

DEADLINE_S = 20.0
"""Deadline that only a response that hangs misses, also on a busy machine."""

UNKNOWN = {"boxnet", "rush_hour"}
"""Generators without a reference answer, for which any plan that solves the problem is correct."""
EXAMPLES = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}
"""Generators without a reference answer whose metadata have a correct one, under this name."""


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[VerifierPool]:
    """A pool of one worker, whose hashes of strings differ from those of this process."""
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
    pool = VerifierPool(1, DEADLINE_S)
    wait_until(pool.ready)
    yield pool
    pool.close()


def score(
    pool: VerifierPool, problem: ReasoningGymTask, work: list[tuple[Payload, str]]
) -> list[ItemVerdict]:
    options = {
        "dataset": problem.dataset,
        "config": problem.config,
        "allow_code": problem.allow_code,
    }
    return pool.verify(
        "reasoning_gym",
        options,
        [(payload, f"<answer>{answer}</answer>") for payload, answer in work],
    )


def find_correct_answer(problem: ReasoningGymTask, payload: Payload) -> str:
    """Returns the reference answer of a problem, or one of its correct answers."""
    if problem.dataset not in EXAMPLES:
        return str(payload["answer"])
    from reasoning_gym import create_dataset

    entries = create_dataset(problem.dataset, seed=payload["seed"], size=1_000)
    answer = entries[payload["index"]]["metadata"][EXAMPLES[problem.dataset]]
    return answer if isinstance(answer, str) else json.dumps(answer)


def test_the_reference_answer_of_every_generator_is_correct(pool: VerifierPool) -> None:
    from reasoning_gym.factory import DATASETS

    wrong: dict[str, Any] = {}
    for name in sorted(DATASETS.keys() - REFUSED.keys() - {"composite"}):
        problem = ReasoningGymTask(name, allow_code=name in CODE_SCORERS)
        payloads = problem.generate(0, 2)
        work = [(payload, "no such answer") for payload in payloads]
        if name not in UNKNOWN:
            work += [(payload, find_correct_answer(problem, payload)) for payload in payloads]
        verdicts = score(pool, problem, work)
        statuses = [verdict.status for verdict in verdicts]
        if set(statuses[:2]) & {"ok", "crashed", "timeout"} or set(statuses[2:]) - {"ok"}:
            wrong[name] = verdicts
    assert wrong == {}


def test_a_mixture_is_scored_by_its_generators(pool: VerifierPool) -> None:
    config = {"datasets": [{"name": "arc_1d"}, {"name": "power_function"}, {"name": "maze"}]}
    problem = ReasoningGymTask("composite", config=config)
    work = [(payload, str(payload["answer"])) for payload in problem.generate(0, 12)]
    verdicts = score(pool, problem, work)
    assert [verdict.status for verdict in verdicts] == ["ok"] * 12


def test_partial_credit_reaches_the_client(pool: VerifierPool) -> None:
    problem = ReasoningGymTask("power_function")
    payload = problem.generate(0, 1)[0]
    right, close, far = score(
        pool, problem, [(payload, payload["answer"]), (payload, "12345"), (payload, "x")]
    )
    assert (right.reward, right.status, right.parts) == (1.0, "ok", {"format": 1.0})
    assert (close.reward, close.status) == (0.01, "wrong_value")
    assert (far.reward, far.status) == (0.01, "wrong_value")


def test_scoring_that_hangs_is_killed_and_costs_itself() -> None:
    pool = VerifierPool(1, 2.0)
    try:
        problem = ReasoningGymTask("rush_hour")
        payload = problem.generate(0, 1)[0]
        verdicts = score(pool, problem, [(payload, "A+1"), (payload, "B-1")])
        assert {verdict.status for verdict in verdicts} == {"wrong_value"}
        endless = f"A+{10**12}"  # the scorer moves the car so many times
        verdicts = score(pool, problem, [(payload, "A+1"), (payload, endless), (payload, "B-1")])
        assert [verdict.status for verdict in verdicts] == ["wrong_value", "timeout", "wrong_value"]
        # Once among the others, and once alone, which shows that it is the cause.
        assert pool.restarts["timeout"] == 2
    finally:
        pool.close()


def test_another_version_of_the_library_refuses_the_request(pool: VerifierPool) -> None:
    problem = ReasoningGymTask("chain_sum")
    payload = problem.generate(0, 1)[0]
    other = {**payload, "question": "What is 1 + 1?"}
    with pytest.raises(PayloadError, match="has another question than the prompt"):
        score(pool, problem, [(payload, "1"), (other, "2")])
    # The process goes on with the next request.
    assert score(pool, problem, [(payload, payload["answer"])])[0].status == "ok"
    assert sum(pool.restarts.values()) == 0


def test_generators_that_evaluate_answers_are_refused(pool: VerifierPool) -> None:
    with pytest.raises(TaskRefused, match="puzzle24 evaluates responses as Python code"):
        pool.verify("reasoning_gym", {"dataset": "puzzle24"}, [({}, "<answer>1</answer>")])
    evaluated = ReasoningGymTask("puzzle24", allow_code=True).generate(0, 1)[0]
    with pytest.raises(PayloadError, match="puzzle24 evaluates responses as Python code"):
        score(pool, ReasoningGymTask("chain_sum"), [(evaluated, "1")])


def test_a_client_gets_the_reason() -> None:
    payload = dict(ReasoningGymTask("chain_sum").generate(0, 1)[0], answer="another")
    with serving(VerifierSettings(workers=1, deadline_s=DEADLINE_S)) as (_, http):
        client = VerifierClient(str(http.base_url), TOKEN)
        item = VerifyItem(payload=payload, responses=["<answer>1</answer>"])
        with pytest.raises(ServiceError, match="payload: task reasoning_gym: entry 0 of chain_sum"):
            client.verify("reasoning_gym", {"dataset": "chain_sum"}, [item])
        client.close()
