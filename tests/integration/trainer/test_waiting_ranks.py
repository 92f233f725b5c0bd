"""Ranks wait for one of them longer than a collective may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException

from services.trainer import ranks as module
from services.trainer.ranks import Ranks, init_distributed
from tests.forked import run_ranks

COLLECTIVE_S = 3.0
"""Seconds after which a collective fails in these tests; half an hour otherwise."""


def main_takes_longer(ranks: Ranks) -> None:
    def work() -> str:
        time.sleep(2 * COLLECTIVE_S)
        return f"from rank {ranks.rank}"

    assert ranks.from_main(work) == "from rank 0"


def the_last_takes_longer(ranks: Ranks) -> None:
    done = time.monotonic() + 2 * COLLECTIVE_S

    def work() -> int:
        if ranks.rank == 1:
            time.sleep(2 * COLLECTIVE_S)
        return ranks.rank

    assert ranks.wait_for_all(work) == ranks.rank
    assert time.monotonic() >= done - 1.0  # rank 0 has waited for rank 1


def main_fails(ranks: Ranks) -> None:
    ranks.from_main(partial(int, "no number"))


def call(function: Callable[[Ranks], None]) -> None:
    init = dist.init_process_group
    dist.init_process_group = partial(init, timeout=timedelta(seconds=COLLECTIVE_S))
    module.KEEP_ALIVE_S = 0.5
    with init_distributed() as ranks:
        function(ranks)


@pytest.mark.parametrize("function", [main_takes_longer, the_last_takes_longer])
def test_a_long_call_of_one_rank_ends_no_collective(function: Callable[[Ranks], None]) -> None:
    run_ranks(2, call, function)


def test_an_error_of_rank_0_ends_the_others_too() -> None:
    with pytest.raises(ProcessRaisedException, match=r"no number|Connection closed by peer"):
        run_ranks(2, call, main_fails)
