"""Short traces that are made in two processes at the same time."""

import multiprocessing
import os
import signal
import sys
import threading

import numpy as np
import pytest
from support.nightly import each

from gradmem_lib import Recipe, plan, predict
from gradmem_lib.course import models
from gradmem_lib.prediction import second_process as module
from gradmem_lib.prediction import short_traces
from gradmem_lib.prediction.predict import source_of
from gradmem_lib.prediction.second_process import can_fork, second_process
from gradmem_lib.prediction.short_traces import trace_few_parts

pytestmark = pytest.mark.skipif(not can_fork(), reason="needs Linux and two cores")

LLAMA = dict(layers=9, hidden=32, heads=4, intermediate=64, vocab=256)


def config(**sizes):
    return models.tiny_llama(**LLAMA | sizes).config


def ask(source, recipe, **more):
    return predict(source, batch_size=4, seq_len=16, recipe=recipe, target="cuda", **more)


@pytest.mark.parametrize(
    "recipe",
    each(
        3,
        [
            Recipe(precision="bf16", accumulation=4, checkpointing="per-layer", chunked_loss=True),
            Recipe(precision="bf16"),
            Recipe(precision="bf16", checkpointing="first-5", lora_rank=4),
            Recipe(precision="float32", sharding="fsdp"),
        ],
    ),
)
def test_two_processes_find_what_one_finds(recipe, spy):
    ranks = 2 if recipe.sharding else None
    alone = ask(source_of(config()), recipe, ranks=ranks)
    traces_here = spy(short_traces, "traced")
    source = source_of(config())
    with second_process(source, trace_few_parts):
        together = ask(source, recipe, ranks=ranks)
        assert 0 < traces_here.call_count < len(together.traced_layers)
        assert together.requests() == alone.requests()
    assert together.peak == alone.peak
    assert together.traced_layers == alone.traced_layers
    assert np.array_equal(together.timeline.rows, alone.timeline.rows)
    assert not multiprocessing.active_children()


def test_a_plan_uses_the_second_process_and_ends_it(monkeypatch):
    started = []

    class Noted(module.SecondProcess):
        def __init__(self, *args):
            super().__init__(*args)
            started.append(self._process.pid)

    sizes = dict(card="1 GiB", seq_len=16, global_batch=2)
    monkeypatch.setattr(module, "can_fork", lambda: False)
    alone = plan(config(), **sizes)
    assert not started
    monkeypatch.undo()
    monkeypatch.setattr(module, "SecondProcess", Noted)
    assert str(plan(config(), **sizes)) == str(alone)
    assert len(started) == 1
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_the_second_process_ends_where_the_block_is_left(error):
    source = source_of(config())
    with pytest.raises(error), second_process(source, trace_few_parts):
        raise error
    assert source.second_process is None
    assert not multiprocessing.active_children()


def questions_about(source, counts=(3, 4)) -> list:
    """One question for each number of layers to keep."""
    (several,) = source.lists
    questions = []
    for count in counts:
        kept = (short_traces.Kept(several, 1, count, len(several)),)
        sizes = source, Recipe(precision="bf16"), 1, 16, "cpu"
        questions.append(short_traces.Question(*sizes, None, None, 1, 0, kept=kept))
    return questions


def layers_kept(question) -> int:
    """In place of a trace: which question it is."""
    return question.kept[0].count


@pytest.mark.parametrize("where", ["ask", "trace", "answer"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_no_answer_is_taken_for_one_to_another_question(where, error, monkeypatch):
    source = source_of(config())
    failed = []
    first = os.getpid()

    def fails_once(question):
        if where == "trace" and os.getpid() == first and not failed:
            failed.append(question)
            raise error
        return layers_kept(question)

    def interrupted(method):
        def once(self, *args):
            if failed:
                return method(self, *args)
            failed.append(method)
            if where == "ask":  # after the first of two questions
                method(self, args[0][:1])
            raise error

        return once

    if where != "trace":
        method = getattr(module.SecondProcess, where)
        monkeypatch.setattr(module.SecondProcess, where, interrupted(method))
    with second_process(source, fails_once):
        with pytest.raises(error):
            module.traces_of(source, questions_about(source, (2, 3, 4)), fails_once)
        assert failed
        counts = (5, 6, 7)
        answers = module.traces_of(source, questions_about(source, counts), fails_once)
        assert answers == list(counts)
    assert not multiprocessing.active_children()


def test_an_error_here_leaves_the_second_process_at_work():
    source = source_of(config())
    first = os.getpid()

    def fails_here(question):
        if os.getpid() == first:
            raise ValueError("here")
        return layers_kept(question)

    with second_process(source, fails_here):
        for _ in range(2):
            with pytest.raises(ValueError, match="here"):
                module.traces_of(source, questions_about(source), fails_here)
            assert source.second_process is not None
        assert not source.second_process._answers.poll()  # no answer is left over


def bytes_in(connection) -> int:
    """How many bytes a pipe holds."""
    import fcntl  # Windows has neither of them, and no forks
    import termios

    answer = fcntl.ioctl(connection.fileno(), termios.FIONREAD, bytes(4))
    return int.from_bytes(answer, sys.byteorder)


def test_a_process_that_is_killed_while_it_sends_is_not_an_error():
    source = source_of(config())

    def long_answer(question):
        return bytes(2**20)  # more than a pipe holds, as a trace is

    with second_process(source, long_answer):
        other = source.second_process
        other.ask(questions_about(source))
        while bytes_in(other._answers) < 2**12:  # it has begun to send, and waits for a reader
            assert other._process.is_alive()
        os.kill(other._process.pid, signal.SIGKILL)
        other._process.join()
        assert other.answer() is None
    assert not multiprocessing.active_children()


def test_where_no_process_can_be_started_this_one_traces(monkeypatch):
    source = source_of(config())

    def refuses(*_):
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuses)
    with second_process(source, layers_kept):
        assert module.traces_of(source, questions_about(source), layers_kept) == [3, 4]


def test_only_the_main_thread_forks():
    """Another thread may hold a lock, which nobody would release in the fork."""
    found = []
    thread = threading.Thread(target=lambda: found.append(can_fork()))
    thread.start()
    thread.join()
    assert found == [False]


def test_the_fork_gets_the_whole_question_and_no_ctrl_c():
    source = source_of(config())

    def who_and_what(question):
        (kept,) = question.kept
        place = [kept.several is one for one in source.lists].index(True)
        return os.getpid(), kept.count, place, question.recipe, question.source is source

    with second_process(source, who_and_what):
        pid = source.second_process._process.pid
        for _ in range(2):
            answers = module.traces_of(source, questions_about(source), who_and_what)
            recipe = Recipe(precision="bf16")
            assert answers == [(pid, 3, 0, recipe, True), (os.getpid(), 4, 0, recipe, True)]
            os.kill(pid, signal.SIGINT)  # a terminal sends it to both processes


def test_the_fork_ends_where_the_first_process_has_ended():
    source = source_of(config())
    with second_process(source, layers_kept):
        other = source.second_process
        other._questions.close()  # as the system does for a process that was killed
        other._process.join(10)
        assert other._process.exitcode == 0


def test_a_process_that_hangs_is_ended(monkeypatch):
    recipe = Recipe(precision="bf16")
    alone = ask(source_of(config()), recipe)
    source = source_of(config())
    monkeypatch.setattr(module, "SECONDS_TO_ANSWER", 0.1)
    with second_process(source, lambda question: signal.pause()):
        assert ask(source, recipe).peak == alone.peak
    assert not multiprocessing.active_children()
