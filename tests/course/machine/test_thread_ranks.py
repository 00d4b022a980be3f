"""Ranks that are threads: their numbers, and how they end when their code does not."""

import sys
import threading

import pytest
import torch
import torch.distributed as dist

from gradmem_lib.course.judge import time_limit
from gradmem_lib.course.machine.thread_ranks import APART, on_ranks


def summed(rank: int):
    x = torch.full((2,), float(rank))
    dist.all_reduce(x)
    return x.tolist()


def test_ranks_talk_and_leave_no_group():
    hook = sys.excepthook
    assert on_ranks(summed, 3) == [[3.0, 3.0]] * 3
    assert not dist.is_initialized() and sys.excepthook is hook


@pytest.mark.parametrize("calls", [(1, 2), (2, 1), (0, 1)])
def test_ranks_that_do_not_make_the_same_calls_hear_it(calls):
    with pytest.raises(RuntimeError, match=APART):
        on_ranks(lambda rank: [summed(rank) for _ in range(calls[rank])], 2)
    assert on_ranks(summed, 2) == [[1.0, 1.0]] * 2


def test_a_rank_that_never_ends_is_ended():
    def endless(rank):
        while True:
            pass

    before = threading.active_count()
    with pytest.raises(time_limit.TooLong), time_limit.stopped_after(0.3):
        on_ranks(endless, 2)
    assert threading.active_count() == before
