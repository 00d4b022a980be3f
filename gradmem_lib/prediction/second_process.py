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
from multiprocessing.connection import Connection

import torch

from .extrapolation import Trace
from .question import Question, Source

# Then the other process is taken to hang, as where a lock was held when it was forked: Jupyter has
# threads of its own.
SECONDS_TO_ANSWER = 120


class SecondProcess:
    """A fork of this process that answers questions about ``source`` with ``trace(question)``, in
    the order in which they are asked.

    The fork has the model already. So a question is sent without it, and a list of layers is sent
    as its place in ``source.lists``.
    """

    def __init__(self, source: Source, trace: Callable[[Question], Trace]):
        self._lists = source.lists  # found before the fork, so that both have the same ones
        fork = multiprocessing.get_context("fork")
        # One pipe for each direction: first its end that reads, then its end that writes.
        questions, self._questions = fork.Pipe(duplex=False)
        self._answers, answers = fork.Pipe(duplex=False)
        ends_of_this_process = [self._questions, self._answers]
        self._process = fork.Process(
            target=_answer_questions,
            args=(source, trace, questions, answers, ends_of_this_process),
            daemon=True,
        )
        self._process.start()
        questions.close()
        answers.close()

    def ask(self, questions: Sequence[Question]) -> None:
        """Ask for traces. The other process begins, and this one goes on."""
        for question in questions:
            places = [self._lists.index(one.several) for one in question.kept]
            kept = [one._replace(several=None) for one in question.kept]
            question = replace(question, source=None, kept=())
            with suppress(OSError):  # the other process has ended: `answer` finds that out
                self._questions.send((question, kept, places))

    def answer(self) -> Trace | None:
        """The trace of the first question that is not answered yet.

        ``None`` if the trace failed in the other process, or if that process has ended or hangs. A
        trace in this process then works, or raises the error.
        """
        try:
            if not self._answers.poll(SECONDS_TO_ANSWER):
                self._process.kill()
            return self._answers.recv()
        except (EOFError, OSError):  # it has ended; with OSError, in the middle of an answer
            return None

    def close(self) -> None:
        """End the process at once, whatever it is doing: it has nothing to save."""
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
    ends_of_first_process: list[Connection],
) -> None:
    """What the second process does until the first one ends it, or has ended itself."""
    for connection in ends_of_first_process:
        connection.close()  # a pipe ends only where nobody has its other end open
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process gets Ctrl-C, and ends this one
    torch.set_num_threads(1)  # the first process's threads do not exist here
    gc.freeze()  # what the first process has made is not garbage here
    while True:
        try:
            question, kept, places = questions.recv()
        except EOFError:  # the first process has ended
            return
        whole = []
        for one, place in zip(kept, places, strict=True):
            whole.append(one._replace(several=source.lists[place]))
        answer: Trace | None = None
        with suppress(Exception):  # the first process traces it again, and raises the error
            answer = trace(replace(question, source=source, kept=tuple(whole)))
        try:
            answers.send(answer)
        except OSError:  # the first process has ended
            return


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
    possible and of use.
    """
    if source.lists and can_fork():
        with suppress(OSError):  # no memory or number is left for one more process
            source.second_process = SecondProcess(source, trace)
    try:
        yield
    finally:
        _end_second_process(source)


def _end_second_process(source: Source) -> None:
    other = source.second_process
    source.second_process = None
    if other is not None:
        other.close()


def traces_of(
    source: Source, questions: Sequence[Question], trace: Callable[[Question], Trace]
) -> list[Trace]:
    """``trace`` of each question. A second process of ``source`` makes about half of them."""
    other = source.second_process
    can_be_sent = all(one.batch is None and one.loss is None for one in questions)
    if other is None or not can_be_sent or len(questions) < 2:
        return [trace(one) for one in questions]
    middle = (len(questions) + 1) // 2
    there = questions[:middle]  # one more than here, since short traces come before longer ones
    here: list[Trace] = []
    error: Exception | None = None
    try:
        other.ask(there)
        try:
            for question in questions[middle:]:
                here.append(trace(question))
        except Exception as raised:
            error = raised  # it is raised below: first, what was asked for has to be answered
        answers = [other.answer() for _ in there]
    except BaseException:  # such as Ctrl-C
        # The next answer would be taken for one to another question.
        _end_second_process(source)
        raise
    if error is not None:
        raise error
    traces = []
    for question, answer in zip(there, answers, strict=True):
        traces.append(trace(question) if answer is None else answer)
    return traces + here
