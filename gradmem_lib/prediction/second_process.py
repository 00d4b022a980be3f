"""A second process that traces beside this one.

A deep model's trace is computed from two or three traces of a few layers. They do not need each
other, so a plan, which asks for dozens of them, makes them at the same time on two cores.
"""

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.pool import AsyncResult, Pool

import torch

from .extrapolation import Trace
from .question import Question, Source

# Then the other process is taken to hang, as where a lock was held when it was forked (Jupyter has
# threads of its own), or to have been killed.
SECONDS_TO_ANSWER = 120


# In the second process alone: what its questions are about, and what answers them.
_asked: list[tuple[Source, Callable[[Question], Trace]]] = []


def _begin(source: Source, trace: Callable[[Question], Trace]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process gets Ctrl-C, and ends this one
    torch.set_num_threads(1)  # the first process's threads do not exist here
    gc.freeze()  # what the first process has made is not garbage here
    _asked.append((source, trace))


def _answer(question: Question, places: list[int]) -> Trace:
    ((source, trace),) = _asked
    kept = []
    for one, place in zip(question.kept, places, strict=True):
        kept.append(one._replace(several=source.lists[place]))
    return trace(replace(question, source=source, kept=tuple(kept)))


def _ask(other: Pool, question: Question) -> AsyncResult:
    """Ask for a trace. The other process, a fork, has the model already: the question is sent
    without it, and a list of layers as its place in ``source.lists``.
    """
    places, kept = [], []
    for one in question.kept:
        places.append(question.source.lists.index(one.several))
        kept.append(one._replace(several=None))
    return other.apply_async(_answer, (replace(question, source=None, kept=tuple(kept)), places))


def can_fork() -> bool:
    """Whether a second process helps, and can be forked.

    Forks are safe on Linux. With a card in use, they are not: autograd has threads for it. And the
    fork has only the thread that makes it. Where that is not the main thread, the main thread may
    hold a lock, which nobody would release in the fork.
    """
    if sys.platform != "linux" or torch.cuda.is_initialized():
        return False
    if threading.current_thread() is not threading.main_thread():
        return False
    if multiprocessing.current_process().daemon:  # such a process may not start another one
        return False
    return len(os.sched_getaffinity(0)) > 1


@contextmanager
def second_process(source: Source, trace: Callable[[Question], Trace]) -> Iterator[None]:
    """While the block runs, ``traces_of(source, ...)`` uses a second process, where that is
    possible and of use. It answers with ``trace``.
    """
    if source.lists and can_fork():  # the lists are found before the fork: both have the same ones
        with suppress(OSError):  # no memory or number is left for one more process
            fork = multiprocessing.get_context("fork")
            source.second_process = fork.Pool(1, _begin, (source, trace))
    try:
        yield
    finally:
        _end_second_process(source)


def _end_second_process(source: Source) -> None:
    """End it at once, whatever it is doing: it has nothing to save."""
    other = source.second_process
    source.second_process = None
    if other is not None:
        other.terminate()
        other.join()


def traces_of(
    source: Source, questions: Sequence[Question], trace: Callable[[Question], Trace]
) -> list[Trace]:
    """``trace`` of each question. A second process of ``source`` makes about half of them."""
    other = source.second_process
    can_be_sent = all(one.batch is None and one.loss is None for one in questions)
    if other is None or not can_be_sent or len(questions) < 2:
        return [trace(one) for one in questions]
    middle = (len(questions) + 1) // 2
    sent = questions[:middle]  # one more than here, since short traces come before longer ones
    answers = [_ask(other, one) for one in sent]
    here = [trace(one) for one in questions[middle:]]
    there = []
    for question, answer in zip(sent, answers, strict=True):
        try:
            if source.second_process is None:
                raise multiprocessing.TimeoutError
            there.append(answer.get(SECONDS_TO_ANSWER))
        except Exception as error:  # a trace in this process works, or raises the error
            if isinstance(error, multiprocessing.TimeoutError):
                _end_second_process(source)
            there.append(trace(question))
    return there + here
