"""The pool scores any response, and one that hangs or crashes costs only itself."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import wait_until

from bapo_core import outcomes
from bapo_core.errors import PayloadError
from bapo_core.outcomes import Outcome
from services.common.process import ChildProcess
from services.verifier.api.wire import LONGEST_RESPONSE
from services.verifier.pool import SMALLEST_CHUNK, Busy, Draining, TaskRefused, VerifierPool
from services.verifier.process import WorkerProcess
from services.verifier.worker import LOAD_S, Work

OPTIONS = {"template": "short"}
PAYLOAD = {"nums": [1, 2, 3], "target": 6}
ODD = {"n": 7}


def processes() -> list[psutil.Process]:
    """Returns the workers of this process's pools; the stack of other tests has its own."""
    return [child for child in psutil.Process().children() if _is_worker(child)]


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "services.verifier.worker" in process.cmdline()
    except psutil.NoSuchProcess:  # also raised for zombies
        return False


def spare_ready(pool: VerifierPool) -> bool:
    """Whether the pool's spare process has started and prepared the latest task."""
    return pool._spare._ready is not None


def start_pool(workers: int, deadline_s: float, **more: int) -> VerifierPool:
    pool = VerifierPool(workers, deadline_s, **more)
    wait_until(lambda: pool.ready() and spare_ready(pool))
    return pool


def has_begun(pool: VerifierPool) -> bool:
    """Whether the one worker has turned to the first response."""
    process = pool._slots[0]._process
    if process is None:
        return False
    index, since = process.position()
    return index == 0 and since > 0  # both are 0 before any response is handed out


@pytest.fixture
def pool(odd_task: None) -> Iterator[VerifierPool]:
    """A pool of one worker, so that every response goes through the same one."""
    pool = start_pool(1, 2.0, memory_mb=256)
    yield pool
    pool.close()
    assert processes() == []


def statuses(pool: VerifierPool, responses: list[str]) -> list[str]:
    verdicts = pool.verify("countdown", OPTIONS, [(PAYLOAD, response) for response in responses])
    return [verdict.status for verdict in verdicts]


def odd(pool: VerifierPool, responses: list[str]) -> list[str]:
    verdicts = pool.verify("odd", {}, [({"n": n}, text) for n, text in enumerate(responses)])
    for n, verdict in enumerate(verdicts):
        # The extracted answer names the payload, so a verdict on another response would show.
        if verdict.status == "ok":
            assert (verdict.reward, verdict.extracted) == (1.0, str(n))
        else:
            assert verdict.reward == 0.0
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


def test_an_empty_batch_has_no_verdicts(pool: VerifierPool) -> None:
    assert statuses(pool, []) == []


def test_a_response_that_is_too_long_is_not_read(pool: VerifierPool) -> None:
    endless = "9" * (LONGEST_RESPONSE + 1)
    assert statuses(pool, [endless]) == ["too_large"]
    assert statuses(pool, [endless, "1+2+3"]) == ["too_large", "ok"]


@pytest.mark.parametrize("how", ["hang", "spin"])
def test_a_missed_deadline_costs_itself_twice_and_a_second(pool: VerifierPool, how: str) -> None:
    assert odd(pool, ["fine"]) == ["ok"]
    # The first spare started before there was a task; the next one has prepared it.
    assert odd(pool, ["exit"]) == ["crashed"]
    costs: list[float] = []
    # On a busy machine an attempt may wait for a core; the cheapest one shows what it must cost.
    # It is scored a second time, alone in a worker, before it is blamed.
    while not costs or (min(costs) >= 5.0 and len(costs) < 5):
        wait_until(lambda: spare_ready(pool))
        begin = time.monotonic()
        assert odd(pool, ["a", "b", how, "c", "d"]) == ["ok", "ok", "timeout", "ok", "ok"]
        costs.append(time.monotonic() - begin)
    assert 4.0 <= min(costs) < 5.0
    assert pool.restarts["timeout"] == 2 * len(costs)


def test_each_response_has_a_deadline_of_its_own(pool: VerifierPool) -> None:
    assert odd(pool, ["hang", "a", "hang", "b"]) == ["timeout", "ok", "timeout", "ok"]


SCORE_A_SLOW_RESPONSE = """
import time
from services.verifier.pool import VerifierPool
pool = VerifierPool(1, 3.0)
batch = pool.submit("odd", {}, [({"n": 0}, "slow")])
slot = pool._slots[0]
while slot._process is None or slot._process.position()[1] == 0 or slot._process.position()[0] < 0:
    time.sleep(0.01)
print(slot._process.pid, flush=True)
print(batch.done.result()[0][1])
pool.close()
"""


def test_a_pause_of_the_machine_costs_no_response(odd_task: None) -> None:
    # Another process holds the pool, since a stopped pytest would hand the terminal to its shell.
    scorer = subprocess.Popen(
        [sys.executable, "-c", SCORE_A_SLOW_RESPONSE],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert scorer.stdout is not None
    with scorer:
        worker = int(scorer.stdout.readline())
        for pid in (scorer.pid, worker):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(3.5)  # longer than the deadline, which is 3 s
        # The pool goes on first, and must not conclude that the response has had its time.
        os.kill(scorer.pid, signal.SIGCONT)
        time.sleep(0.3)
        os.kill(worker, signal.SIGCONT)
        assert scorer.stdout.read() == "ok\n"


def test_loading_a_payload_does_not_count_against_the_deadline(pool: VerifierPool) -> None:
    slow, quick = {"n": 1, "load_s": 3.0}, {"n": 2, "load_s": 0.0}
    work = [(slow, "a"), (slow, "hang"), (slow, "b"), (quick, "hang"), (quick, "c")]
    begin = time.monotonic()
    verdicts = pool.verify("loading", {}, work)
    assert [verdict.status for verdict in verdicts] == ["ok", "timeout", "ok", "timeout", "ok"]
    # A response that hangs is killed at its deadline, not at the limit of loading.
    assert time.monotonic() - begin < LOAD_S


def test_a_payload_that_is_refused_fails_the_batch_and_not_the_process(pool: VerifierPool) -> None:
    good, bad = {"n": 1, "load_s": 0.0}, {"n": -1, "load_s": 0.0, "more": chr(0xD800)}
    with pytest.raises(PayloadError, match=r"n is -1; make it positive\\ud800"):
        pool.verify("loading", {}, [(good, "a"), (bad, "b"), (good, "c")])
    assert pool.waiting() == 0
    assert pool.verify("loading", {}, [(good, "a")])[0].status == "ok"
    assert sum(pool.restarts.values()) == 0


@pytest.mark.parametrize("how", ["exit", "segfault"])
def test_a_crash_costs_one_response(pool: VerifierPool, how: str) -> None:
    assert odd(pool, ["a", how, "b", how, "c"]) == ["ok", "crashed", "ok", "crashed", "ok"]
    assert pool.restarts["crashed"] == 4  # each twice, the second time alone


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("raise", "KeyError: 'nums'"),
        ("sys.exit", "SystemExit: 3"),
        ("nan", "the reward is nan, with the parts {}; make all finite"),
        ("infinite part", "the parts {'format': inf}; make all finite"),
        ("named part", "give at most 16, named with lower-case letters and _"),
        ("parts", "give at most 16, named with lower-case letters and _"),
        ("status", "lower-case letters"),
    ],
)
def test_the_error_of_a_task_is_in_the_verdict(pool: VerifierPool, how: str, why: str) -> None:
    before = processes()
    verdicts = pool.verify("odd", {}, [(ODD, "a"), (ODD, how), (ODD, "b")])
    assert [verdict.status for verdict in verdicts] == ["ok", "crashed", "ok"]
    assert verdicts[1].detail is not None
    assert why in verdicts[1].detail
    assert processes() == before


def test_partial_credit_and_parts_of_the_reward_are_in_the_verdict(pool: VerifierPool) -> None:
    (verdict,) = pool.verify("odd", {}, [(ODD, "half")])
    assert (verdict.reward, verdict.status, verdict.is_correct(None)) == (0.5, "wrong_value", False)
    assert verdict.parts == {"format": 1.0, "length": -2.5}
    (verdict,) = pool.verify("odd", {}, [(ODD, "a")])
    assert (verdict.reward, verdict.is_correct(None), verdict.parts) == (1.0, True, {})


def test_too_much_memory_costs_one_response(pool: VerifierPool) -> None:
    assert odd(pool, ["a", "memory", "b", "memory"]) == ["ok", "too_large", "ok", "too_large"]
    assert pool.restarts == {"retired": 2}


def test_a_worker_that_dies_between_batches_costs_no_response(pool: VerifierPool) -> None:
    assert statuses(pool, ["1+2+3"]) == ["ok"]
    for process in processes():
        process.kill()
    wait_until(lambda: processes() == [])
    assert statuses(pool, ["1+2+3", "3+2+1"]) == ["ok", "ok"]


def test_a_worker_that_dies_before_it_begins_costs_no_response(pool: VerifierPool) -> None:
    assert statuses(pool, ["1+2+3"]) == ["ok"]
    workers = processes()
    for process in workers:
        process.suspend()
    batch = pool.submit("countdown", OPTIONS, [(PAYLOAD, "1+2+3")])
    wait_until(lambda: not batch.waiting)
    for process in workers:
        process.kill()
    assert [status for _, status, *_ in batch.done.result(300)] == ["ok"]


def test_a_worker_that_dies_while_it_prepares_is_replaced(
    pool: VerifierPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = WorkerProcess.prepare
    deaths = iter([True, True])

    def dies(self: WorkerProcess, task: tuple[str, str]) -> None:
        if next(deaths, False):
            os.kill(self.pid, signal.SIGKILL)
        prepare(self, task)

    monkeypatch.setattr(WorkerProcess, "prepare", dies)
    assert statuses(pool, ["1+2+3"]) == ["ok"]


def test_workers_that_the_system_refuses_are_started_later(
    odd_task: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.verifier.pool._RETRY_START_S", 0.05)
    refusals = iter([BlockingIOError(11, "Resource temporarily unavailable")] * 5)

    def refused(*arguments: Any, **options: Any) -> Any:
        error = next(refusals, None)
        if error is not None:
            raise error
        return ChildProcess(*arguments, **options)

    monkeypatch.setattr("services.verifier.process.ChildProcess", refused)
    pool = VerifierPool(1, 2.0, memory_mb=256)
    try:
        assert statuses(pool, ["1+2+3"]) == ["ok"]
        wait_until(pool.ready)
    finally:
        pool.close()


def test_the_memory_of_a_response_does_not_limit_the_task_that_is_prepared_next(
    pool: VerifierPool,
) -> None:
    assert statuses(pool, ["1+2+3"]) == ["ok"]
    (verdict,) = pool.verify("heavy", {}, [({"n": 1}, "")])
    assert verdict.status == "ok"


def test_code_that_has_changed_is_loaded_again(
    pool: VerifierPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.verifier.process.CODE_CHECK_S", 0.0)
    assert odd(pool, ["right"]) == ["ok"]
    code = tmp_path / "odd_task.py"
    code.write_text(code.read_text().replace("return Verdict(", "return Verdict(0.25 * "))
    (verdict,) = pool.verify("odd", {}, [({"n": 0}, "right")])
    assert verdict.reward == 0.25


def test_a_task_that_is_installed_later_is_found(
    pool: VerifierPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.verifier.process._package_directories", lambda: [str(tmp_path)])
    monkeypatch.setattr("services.verifier.process.CODE_CHECK_S", 0.0)
    with pytest.raises(TaskRefused, match="no task 'later'"):
        pool.verify("later", {}, [({"n": 0}, "right")])
    info = tmp_path / "later-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: later\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[bapo.tasks]\nlater = odd_task:OddTask\n")
    (verdict,) = pool.verify("later", {}, [({"n": 0}, "right")])
    assert verdict.status == "ok"


def test_items_that_no_worker_survives_to_begin_are_given_up(
    pool: VerifierPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch = WorkerProcess.dispatch

    def dies(self: WorkerProcess, work: Sequence[Work]) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        dispatch(self, work)
        os.kill(self.pid, signal.SIGKILL)

    monkeypatch.setattr(WorkerProcess, "dispatch", dies)
    monkeypatch.setattr(outcomes, "UNBEGUN", 4)
    (verdict,) = pool.verify("countdown", OPTIONS, [(PAYLOAD, "1+2+3")])
    assert (verdict.status, verdict.outcome, verdict.reward) == (
        "verifier_lost",
        Outcome.VERIFIER_LOST,
        0.0,
    )


def test_a_task_may_have_statuses_of_its_own_and_long_answers_are_cut(pool: VerifierPool) -> None:
    own, long = pool.verify("odd", {}, [(ODD, "own"), (ODD, "long")])
    assert (own.status, own.extracted) == ("not_funny", "own")
    assert long.extracted == "x" * 1_000


def test_workers_get_no_secret(pool: VerifierPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAPO_TOKEN", "secret")
    with_secret = start_pool(1, 5.0)
    (verdict,) = with_secret.verify("odd", {}, [(ODD, "secret")])
    with_secret.close()
    assert verdict.extracted == "[]"


def test_options_that_a_task_refuses_are_an_error(pool: VerifierPool) -> None:
    with pytest.raises(TaskRefused, match="task odd: reward is 'x'; make it a number"):
        pool.verify("odd", {"reward": "x"}, [(ODD, "a")])
    with pytest.raises(TaskRefused, match="cannot load no_such_module:Task of odd-task"):
        pool.verify("gone", {}, [(ODD, "a")])
    with pytest.raises(TaskRefused, match="ud800 is no text") as refusal:
        pool.verify("refusing", {}, [(ODD, "a")])
    assert str(refusal.value).encode()
    assert odd(pool, ["a"]) == ["ok"]


def test_one_batch_uses_all_workers(odd_task: None) -> None:
    pool = start_pool(2, 60.0)
    try:
        batch = pool.submit("odd", {}, [(ODD, "hang")] * 2 * SMALLEST_CHUNK)
        # A worker that hangs takes no second chunk, so each has one.
        wait_until(lambda: not batch.waiting)
        pool.abandon(batch)
    finally:
        pool.close()


def test_batches_take_turns(odd_task: None) -> None:
    pool = start_pool(1, 1.0)
    try:
        long = pool.submit("odd", {}, [(ODD, "hang")] * 40)
        short = pool.submit("odd", {}, [(ODD, "a")])
        assert [status for _, status, *_ in short.done.result(300)] == ["ok"]
        assert not long.done.done()
        pool.abandon(long)
        assert pool.waiting() == 0
        assert odd(pool, ["a"]) == ["ok"]
    finally:
        pool.close()


def test_a_batch_that_does_not_fit_in_the_queue_is_refused(odd_task: None) -> None:
    pool = start_pool(1, 60.0, queue=10)
    try:
        batch = pool.submit("odd", {}, [(ODD, "hang")] * 8)
        with pytest.raises(Busy, match="3 responses do not fit in the queue, which has 8 of 10"):
            pool.submit("odd", {}, [(ODD, "a")] * 3)
        pool.submit("odd", {}, [(ODD, "a")] * 2)
        pool.abandon(batch)
        with pytest.raises(CancelledError):
            batch.done.result()
        pool.submit("odd", {}, [(ODD, "a")] * 8)
    finally:
        pool.close()


def test_a_drain_finishes_batches_and_refuses_new_ones(odd_task: None) -> None:
    pool = start_pool(1, 1.0)
    try:
        batch = pool.submit("odd", {}, [(ODD, "hang"), (ODD, "a")])
        drained: list[bool] = []
        thread = threading.Thread(target=lambda: drained.append(pool.drain(30.0)))
        thread.start()
        wait_until(lambda: not pool.ready())
        with pytest.raises(Draining):
            pool.submit("odd", {}, [(ODD, "a")])
        thread.join()
        assert drained == [True]
        assert [status for _, status, *_ in batch.done.result(0)] == ["timeout", "ok"]
    finally:
        pool.close()


def test_a_drain_that_times_out_fails_unfinished_batches(odd_task: None) -> None:
    pool = start_pool(1, 60.0)
    batch = pool.submit("odd", {}, [(ODD, "hang")])
    wait_until(lambda: has_begun(pool))
    assert not pool.drain(0.05)
    pool.close()
    with pytest.raises(Draining):
        batch.done.result(0)
    assert processes() == []


HOSTILE = [
    "surrogate answer",
    "surrogate detail",
    "message that raises",
    "answer that raises",
    "reserved status",
    "surrogate status",
    "surrogate part",
    "huge reward",
    "reward beyond float32",
    "part beyond float32",
    "text reward",
    "no verdict",
    "parts that raise",
    "exit",
    "segfault",
    "kill",
    "raise",
    "sys.exit",
    "nan",
    "recursion",
    "closed socket",
]


def test_no_hostile_field_or_death_costs_a_neighbour_its_verdict(pool: VerifierPool) -> None:
    for how in HOSTILE:
        work = ["a"] * 20 + [how] + ["b"] * 20
        verdicts = pool.verify("odd", {}, [(ODD, response) for response in work])
        neighbours = [*verdicts[:20], *verdicts[21:]]
        assert {(v.status, v.reward, v.outcome) for v in neighbours} == {
            ("ok", 1.0, Outcome.SCORED)
        }, how
        assert (verdicts[20].outcome == Outcome.CRASHED) == (how != "surrogate answer"), how
        assert verdicts[20].model_dump_json().encode()


def test_a_worker_that_is_killed_from_outside_costs_no_verdict(
    pool: VerifierPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = WorkerProcess.receive
    rng = random.Random(0)
    kills = []

    def is_killed(self: WorkerProcess, deadline_s: float) -> list[Any]:
        if rng.random() < 0.3:
            os.kill(self.pid, signal.SIGKILL)
            kills.append(self.pid)
        return receive(self, deadline_s)

    monkeypatch.setattr(WorkerProcess, "receive", is_killed)
    responses = ["1+2+3", "1+2", "1*2*3"] * 10
    verdicts = pool.verify("countdown", OPTIONS, [(PAYLOAD, text) for text in responses])
    assert [v.status for v in verdicts] == ["ok", "wrong_numbers", "ok"] * 10
    assert kills
