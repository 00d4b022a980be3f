"""Short traces that are made in two processes at the same time."""

import multiprocessing
import os
import signal

import numpy as np
import pytest

from gradmem_lib.course import models
from gradmem_lib.planning.plan import plan
from gradmem_lib.prediction import second_process as module
from gradmem_lib.prediction import short_traces
from gradmem_lib.prediction.predict import predict, source_of
from gradmem_lib.prediction.question import CannotTrace
from gradmem_lib.prediction.second_process import can_fork, second_process
from gradmem_lib.prediction.short_traces import trace_few_parts
from gradmem_lib.training.recipe import Recipe

pytestmark = pytest.mark.skipif(not can_fork(), reason="needs Linux and two cores")

LLAMA = dict(layers=9, hidden=32, heads=4, intermediate=64, vocab=256)


def config(**sizes):
    return models.tiny_llama(**LLAMA | sizes).config


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
    [
        Recipe(precision="bf16"),
        Recipe(precision="bf16", accumulation=4, checkpointing="per-layer", chunked_loss=True),
        Recipe(precision="bf16", checkpointing="first-5", lora_rank=4),
        Recipe(precision="float32", sharding="fsdp"),
    ],
    ids=["plain", "accumulated", "first layers", "sharded"],
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


def test_a_process_that_was_killed_is_not_waited_for():
    recipe = Recipe(precision="bf16")
    alone = ask(source_of(config()), recipe)
    source = source_of(config())
    with second_process(source, trace_few_parts):
        pid = source.second_process._process.pid
        os.kill(pid, signal.SIGKILL)
        for _ in range(2):
            assert ask(source, recipe).peak == alone.peak
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_the_second_process_ends_where_the_block_is_left(error):
    source = source_of(config())
    with pytest.raises(error), second_process(source, trace_few_parts):
        raise error
    assert source.second_process is None
    assert not multiprocessing.active_children()


def test_an_error_is_the_one_of_this_process():
    """A trace that fails in the other process fails here, with the same words."""
    source = source_of(config())
    recipe = Recipe(precision="bf16")

    def fails(question):
        raise CannotTrace(f"{len(question.kept)} lists")

    with second_process(source, fails), pytest.raises(CannotTrace, match="1 lists"):
        questions = [
            short_traces.Question(source, recipe, 1, 16, "cpu", None, None, 1, 0, kept=kept)
            for kept in all_kept(source)
        ]
        module.traces_of(source, questions, fails)


def all_kept(source):
    (several,) = source.lists
    return [(short_traces.Kept(several, 1, n, len(several)),) for n in (3, 4)]
