"""Short traces that are made in two processes at the same time."""

import multiprocessing
import os
import signal
import threading

import numpy as np
import pytest
from support.nightly import each

from gradmem_lib import Recipe, plan, predict
from gradmem_lib.course import models
from gradmem_lib.prediction import second_process as module
from gradmem_lib.prediction import short_traces
from gradmem_lib.prediction.predict import source_of
from gradmem_lib.prediction.second_process import can_fork, second_process, traces_of
from gradmem_lib.prediction.short_traces import trace_few_parts

pytestmark = pytest.mark.skipif(not can_fork(), reason="needs Linux and two cores")


def config():
    return models.tiny_llama(layers=9, hidden=32, heads=4, intermediate=64, vocab=256).config


def ask(source, recipe, **more):
    return predict(source, batch_size=4, seq_len=16, recipe=recipe, target="cuda", **more)


def traces_here(monkeypatch) -> list:
    """The questions that this process traces, in a list that grows."""
    here = []
    traced = short_traces.traced

    def noted(question, *args, **kwargs):
        here.append(question)
        return traced(question, *args, **kwargs)

    monkeypatch.setattr(short_traces, "traced", noted)
    return here


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
def test_two_processes_find_what_one_finds(recipe, monkeypatch):
    ranks = 2 if recipe.sharding else None
    alone = ask(source_of(config()), recipe, ranks=ranks)
    here = traces_here(monkeypatch)
    source = source_of(config())
    with second_process(source, trace_few_parts):
        together = ask(source, recipe, ranks=ranks)
        assert 0 < len(here) < len(together.traced_layers)
        assert together.requests() == alone.requests()
    assert together.peak == alone.peak
    assert together.traced_layers == alone.traced_layers
    assert np.array_equal(together.timeline.rows, alone.timeline.rows)
    assert not multiprocessing.active_children()


def test_a_plan_uses_the_second_process_and_ends_it(monkeypatch):
    sizes = dict(card="1 GiB", seq_len=16, global_batch=2)
    with monkeypatch.context() as patch:
        patch.setattr(module, "can_fork", lambda: False)
        alone = plan(config(), **sizes)
    asked = []
    sent = module._ask
    monkeypatch.setattr(module, "_ask", lambda *args: asked.append(args) or sent(*args))
    assert str(plan(config(), **sizes)) == str(alone)
    assert asked
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


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_no_answer_is_taken_for_one_to_another_question(error):
    source = source_of(config())
    first, failed = os.getpid(), []

    def fails_once(question):
        if os.getpid() == first and not failed:
            failed.append(question)
            raise error
        return layers_kept(question)

    with second_process(source, fails_once):
        with pytest.raises(error):
            traces_of(source, questions_about(source, (2, 3, 4)), fails_once)
        assert traces_of(source, questions_about(source, (5, 6, 7)), fails_once) == [5, 6, 7]
    assert not multiprocessing.active_children()


def test_what_fails_there_is_traced_here():
    source = source_of(config())
    first = os.getpid()

    def fails_there(question):
        if os.getpid() != first:
            raise ValueError("there")
        return layers_kept(question)

    with second_process(source, fails_there):
        assert traces_of(source, questions_about(source), fails_there) == [3, 4]
        assert source.second_process is not None


def test_where_no_process_can_be_started_this_one_traces(monkeypatch):
    source = source_of(config())

    def refuses(*_):
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuses)
    with second_process(source, layers_kept):
        assert traces_of(source, questions_about(source), layers_kept) == [3, 4]


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

    recipe = Recipe(precision="bf16")
    with second_process(source, who_and_what):
        (process,) = multiprocessing.active_children()
        for _ in range(2):
            answers = traces_of(source, questions_about(source), who_and_what)
            there, here = (process.pid, 3, 0, recipe, True), (os.getpid(), 4, 0, recipe, True)
            assert answers == [there, here]
            os.kill(process.pid, signal.SIGINT)  # a terminal sends it to both processes


@pytest.mark.parametrize("end", [signal.pause, lambda: os.kill(os.getpid(), signal.SIGKILL)])
def test_a_process_that_hangs_or_is_killed_is_ended(end, monkeypatch):
    monkeypatch.setattr(module, "SECONDS_TO_ANSWER", 1)
    source = source_of(config())
    first = os.getpid()

    def ends_there(question):
        if os.getpid() != first:
            end()
        return layers_kept(question)

    counts = 2, 3, 4, 5
    with second_process(source, ends_there):
        assert traces_of(source, questions_about(source, counts), ends_there) == list(counts)
        assert source.second_process is None
    assert not multiprocessing.active_children()
