"""A second process that traces beside this one.

A deep model's trace is computed from two or three traces of a few layers. They do not need each
other, so a plan, which asks for dozens of them, makes them at the same time on two cores.
"""

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from .extrapolation import Trace
from .question import Question, Source

SECONDS_TO_END = 5  # then a process that does not end by itself is ended


class SecondProcess:
    """A fork of this process that answers questions about ``source``, one after the other.

    The fork has the model already. So a question is sent without it, and a list of layers is sent
    as its place in ``source.lists``. ``trace`` is what both processes call.
    """

    def __init__(self, source: Source, trace: Callable[[Question], Trace]):
        self._lists = source.lists  # found before the fork, so that both have the same ones
        fork = multiprocessing.get_context("fork")
        # one pipe for each direction
        questions, self._questions = fork.Pipe(duplex=False)
        self._answers, answers = fork.Pipe(duplex=False)
        not_for_the_fork = [self._questions, self._answers]
        self._process = fork.Process(
            target=_answer_questions,
            args=(source, trace, questions, answers, not_for_the_fork),
            daemon=True,
        )
        self._process.start()
        questions.close()
        answers.close()

    def ask(self, questions: Sequence[Question]) -> None:
        """Ask for traces. The other process begins, and this one goes on."""
        for question in questions:
            places = [self._lists.index(kept.several) for kept in question.kept]
            kept = [one._replace(several=None) for one in question.kept]
            with suppress(OSError):  # it has ended, and `answer` says so
                self._questions.send((replace(question, source=None, kept=()), kept, places))

    def answer(self) -> Trace | None:
        """The trace of the first question that is not answered yet. ``None`` if it failed there:
        traced in this process, it raises its error.
        """
        try:
            return self._answers.recv()
        except EOFError:  # the other process has ended
            return None

    def close(self) -> None:
        with suppress(OSError):  # it may have ended already
            self._questions.send(None)
        self._process.join(SECONDS_TO_END)
        self._process.kill()
        self._process.join()
        self._process.close()
        self._questions.close()
        self._answers.close()


def _answer_questions(
    source: Source,
    trace: Callable[[Question], Trace],
    questions: Connection,
    answers: Connection,
    not_for_the_fork: list[Connection],
) -> None:
    """What the second process does until it is told to end, or the first one has ended."""
    for connection in not_for_the_fork:
        connection.close()  # else the end of the first process would not be seen
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process gets Ctrl-C, and ends this one
    torch.set_num_threads(1)  # the first process's threads do not exist here
    gc.freeze()  # what the first process has made is not garbage here
    while True:
        try:
            message = questions.recv()
        except EOFError:
            return
        if message is None:
            return
        question, kept, places = message
        lists = [source.lists[place] for place in places]
        kept = [one._replace(several=several) for one, several in zip(kept, lists, strict=True)]
        try:
            answer: Any = trace(replace(question, source=source, kept=tuple(kept)))
        except Exception:
            answer = None
        answers.send(answer)


def can_fork() -> bool:
    """Whether a second process helps, and can be forked.

    Forks are safe on Linux. With a card in use, they are not: autograd has threads for it.
    """
    if sys.platform != "linux" or torch.cuda.is_initialized():
        return False
    if multiprocessing.current_process().daemon:  # such a process may not start another one
        return False
    return len(os.sched_getaffinity(0)) > 1


@contextmanager
def second_process(source: Source, trace: Callable[[Question], Trace]) -> Iterator[None]:
    """While the block runs, ``traces_of(source, ...)`` uses a second process, where that is
    possible and of use.
    """
    if not source.lists or not can_fork():
        yield
        return
    source.second_process = SecondProcess(source, trace)
    try:
        yield
    finally:
        source.second_process.close()
        source.second_process = None


def traces_of(
    source: Source, questions: Sequence[Question], trace: Callable[[Question], Trace]
) -> list[Trace]:
    """``trace`` of each question. A second process of ``source`` makes about half of them."""
    other = source.second_process
    can_be_sent = all(one.batch is None and one.loss is None for one in questions)
    if other is None or not can_be_sent or len(questions) < 2:
        return [trace(one) for one in questions]
    there = (len(questions) + 1) // 2  # the shorter ones come first
    other.ask(questions[:there])
    here: list[Trace] = []
    try:
        here += [trace(one) for one in questions[there:]]
    finally:  # what was asked for is answered, even if a trace fails here
        answers = [other.answer() for _ in range(there)]
    traces = []
    for question, answer in zip(questions[:there], answers, strict=True):
        traces.append(trace(question) if answer is None else answer)
    return traces + here
