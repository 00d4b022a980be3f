"""run_ranks: one function in several processes, which end with their cell whatever happens."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from gradmem_lib.course import RanksFailed, run_ranks


def reduced(start: int):
    total = torch.ones(3) * (start + dist.get_rank())
    dist.all_reduce(total)
    print("the sum is", total[0].item())
    if dist.get_rank():
        warnings.warn("from rank 1", stacklevel=1)
    return total, torch.get_num_threads(), os.environ["RANK"], os.environ["WORLD_SIZE"]


def test_each_rank_returns_and_the_first_prints(capfd):
    found = run_ranks(reduced, 5)
    assert [told for _, *told in found] == [[1, "0", "2"], [1, "1", "2"]]
    assert all(torch.equal(total, torch.full((3,), 11.0)) for total, *_ in found)
    assert capfd.readouterr() == ("the sum is 11.0\n", "")


def test_on_request_all_print_one_after_the_other(capfd):
    run_ranks(reduced, 0, ranks=4, everyone=True)
    assert capfd.readouterr().out == "".join(f"rank {rank}: the sum is 6.0\n" for rank in range(4))


def test_a_function_may_be_a_closure_and_return_what_the_cell_defined():
    @dataclass
    class Found:
        rank: int

    assert run_ranks(lambda: Found(dist.get_rank()), ranks=3) == [Found(0), Found(1), Found(2)]


def test_one_error_arrives_and_names_its_rank():
    def fail():
        if dist.get_rank() == 1:
            raise ValueError("no such batch")
        dist.barrier()

    with pytest.raises(RanksFailed, match=r"in fail\n(.|\n)*rank 1 of 2: ValueError: no such batch$"):
        run_ranks(fail)


def test_what_it_cannot_run_it_refuses():
    with pytest.raises(TypeError, match="takes a function, and was given int"):
        run_ranks(3)
    with pytest.raises(ValueError, match="at least 1"):
        run_ranks(print, ranks=0)
