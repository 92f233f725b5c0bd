"""The pool scores whatever comes, and what hangs or crashes costs only itself."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator

import pytest

from services.verifier.pool import LONGEST_RESPONSE, VerifierPool

OPTIONS = {"template": "short"}
PAYLOAD = {"nums": [1, 2, 3], "target": 6}


@pytest.fixture
def pool() -> Iterator[VerifierPool]:
    pool = VerifierPool(workers=1, deadline_s=10.0)
    yield pool
    pool.close()
    assert multiprocessing.active_children() == []


def statuses(pool: VerifierPool, responses: list[str]) -> list[str]:
    verdicts = pool.verify("countdown", OPTIONS, [(PAYLOAD, response) for response in responses])
    return [verdict.status for verdict in verdicts]


def test_verdicts_come_in_order(pool: VerifierPool) -> None:
    verdicts = pool.verify(
        "countdown", OPTIONS, [(PAYLOAD, r) for r in ("1+2+3", "1+2", "1+2*3", "1*2*3", "2**3")]
    )
    assert [v.reward for v in verdicts] == [1, 0, 0, 1, 0]
    assert [v.status for v in verdicts] == [
        "ok",
        "wrong_numbers",
        "wrong_value",
        "ok",
        "parse_error",
    ]
    assert verdicts[0].extracted == "1+2+3"


def test_nothing_to_do_is_no_error(pool: VerifierPool) -> None:
    assert statuses(pool, []) == []


def test_an_endless_response_is_not_read(pool: VerifierPool) -> None:
    assert statuses(pool, ["9" * (LONGEST_RESPONSE + 1), "1+2+3"]) == ["too_large", "ok"]


def test_a_missed_deadline_costs_one_response_and_a_process(pool: VerifierPool) -> None:
    (process,) = multiprocessing.active_children()
    assert statuses(pool, ["1+2+3"]) == ["ok"]
    assert process.pid is not None
    # A stopped process is one that hangs.
    os.kill(process.pid, signal.SIGSTOP)
    pool.deadline_s = 0.2
    assert statuses(pool, ["1+2+3"])[0] == "timeout"
    pool.deadline_s = 10.0
    assert statuses(pool, ["1+2+3", "3+2+1"]) == ["ok", "ok"]
    assert process not in multiprocessing.active_children()


def test_a_crash_costs_one_response(pool: VerifierPool) -> None:
    assert statuses(pool, ["1+2+3"]) == ["ok"]
    (process,) = multiprocessing.active_children()
    process.kill()
    process.join()
    assert statuses(pool, ["1+2+3", "3+2+1"]) == ["crashed", "ok"]
