"""Several ranks for a check, as threads of the notebook's own process: no port is opened, and no
process group that the learner has is touched. Numbers are those of real ranks; bytes are measured
on one rank of a group whose others are not there.
"""

import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .compat import groups_of_threads

APART = "the ranks do not make the same calls"
UNFIT = "the ranks' tensors do not fit together in a call"


class _Ended:
    """What a rank that has ended hands to a call which the others still make: no tensors, so that
    the call fails at once.
    """

    def wait_for(self, *_):
        raise RuntimeError(f"{APART}: one has ended, and another waits for it")

    __getitem__ = __len__ = __iter__ = wait_for


class _AllEnded:
    """The call that every rank makes at last."""

    def work(self, data: list) -> None:
        if not all(type(each) is _Ended for each in data):
            _Ended().wait_for()


def _compare(one, other) -> None:
    names = {type(call).__name__ for call in (one, other)} - {"_AllEnded"}
    if len(names) > 1:
        raise RuntimeError(f"{APART}: {' meets '.join(sorted(names))}")
    if "work" in vars(one):
        return
    work = one.work

    def named(data: list) -> None:
        # A learner's own code may raise the same errors, where it joins tensors.
        try:
            work(data)
        except NotImplementedError:
            raise
        except RuntimeError as error:
            if APART in str(error):
                raise
            raise RuntimeError(f"{UNFIT}: {error}") from error

    one.work = named


def _end(threads: list[threading.Thread]) -> None:
    """Let the ranks follow rank 0 to their end, and end those that compute on and on."""
    for thread in threads:
        thread.join(0.2)
    for _ in range(5):
        for thread in filter(threading.Thread.is_alive, threads):
            ident = ctypes.c_ulong(thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
            thread.join(0.05)


def on_ranks(function: Callable[[int], Any], ranks: int) -> list:
    """``function(rank)`` on so many ranks at once, each a thread with a process group; what each
    returns.

    Rank 0 is the calling thread. Where ranks raise, the first of them does here. Models are made
    outside: threads share the generator of random numbers.
    """
    results: list[Any] = [None] * ranks
    errors: list[BaseException | None] = [None] * ranks
    store = dist.HashStore()
    with groups_of_threads(_compare) as (meet, stop):

        def run(rank: int) -> None:
            try:
                dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
                results[rank] = function(rank)
                meet(dist.group.WORLD, rank, _AllEnded(), _Ended())
            except BaseException as error:
                errors[rank] = error
                stop(error)
            finally:
                with contextlib.suppress(Exception):
                    dist.destroy_process_group()

        threads = [
            threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(1, ranks)
        ]
        for thread in threads:
            thread.start()
        run(0)
        _end(threads)
    # A rank that waits for one which has failed leaves by SystemExit, which says nothing.
    raised = sorted(filter(None, errors), key=lambda error: isinstance(error, SystemExit))
    if raised:
        raise raised[0]
    return results
