"""MemoryTracker's budget, what is left when a block ends, however it does, and what is refused."""

import contextlib
import gc
import re
import signal
import threading
import traceback
import weakref
from types import SimpleNamespace

import pytest
import torch
from support.steps import build, forward_then_backward
from torch import nn

from gradmem_lib import BudgetExceeded, MemoryTracker
from gradmem_lib.measure import tracker as of_tracker
from gradmem_lib.measure.budget import release_traceback
from gradmem_lib.measure.diagnosis import TECHNIQUES
from gradmem_lib.measure.facts import Facts
from gradmem_lib.measure.paths import who_holds
from gradmem_lib.measure.timeline import Holder, MemorySnapshot
from gradmem_lib.model.structure import Checkpoints, Structure
from gradmem_lib.names import CATEGORIES


def reachable():
    """Every dense tensor that Python can reach, by its storage's address."""
    gc.collect()
    tensors = [
        t
        for t in gc.get_objects()
        if issubclass(type(t), torch.Tensor) and t.layout == torch.strided
    ]
    return {t.untyped_storage()._cdata: t for t in tensors}


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer_step"])
def test_budget_raises_where_it_is_crossed_and_leaks_nothing(where):
    model, opt, batch, step = build("llama")
    with MemoryTracker(model, opt) as tracker:
        step()
    # Each of these phases peaks above the one before.
    budget = tracker.peak_by_phase[where] - 1
    opt.state.clear()
    # A look at who holds the bytes gives Python the tensors of graphs that other tests have left.
    who_holds({0: 1})
    before = reachable()
    with (
        pytest.raises(BudgetExceeded) as caught,
        MemoryTracker(model, opt, budget=budget) as tracker,
    ):
        step()
    error = caught.value
    assert error.snapshot.phase == where
    assert error.snapshot.total > budget == error.budget
    assert error.snapshot.total - error.asked <= budget, "not an allocation too late"
    assert sum(h.nbytes for h in error.everything) == error.snapshot.total
    # `caught` still holds the exception and its traceback, as a notebook does: the tensors must be
    # gone all the same.
    model.zero_grad()
    opt.state.clear()
    leaked = [t.shape for address, t in reachable().items() if address not in before]
    assert leaked == []
    assert tracker.current.by_category["activations"] == 0, (
        "the failed step is gone from the count as well"
    )
    with MemoryTracker(model, opt):
        forward_then_backward(model, (batch[0][:1], batch[1][:1]))()


# Bytes, category, module and operation.
HOLDERS = """
350 activations model.layers.0.mlp.act mul
300 parameters embed read
150 activations model.layers.0.attention mm
85 temporaries head mm
60 activations model.layers.1.mlp mul
40 activations model.layers.2.mlp mul
15 temporaries (backward) mm
"""
MESSAGE = """\
out of budget by 600 bytes: 1,000 live (1000 B), 400 allowed (400 B)
  asked for 60 bytes: mul, in forward
  live by category:
                 300 bytes  parameters
                 600 bytes  activations
                 100 bytes  temporaries
  largest holders:
                 500 bytes  activations  model.layers.0
                 300 bytes  parameters   embed
                  85 bytes  temporaries  head
                  60 bytes  activations  model.layers.1
                  40 bytes  activations  model.layers.2
  What could bring this moment within the budget: {could}.
  What could not: {could_not}.
  A card of that size would be out of memory."""


def test_the_message_has_every_figure():
    everything = []
    for row in HOLDERS.strip().splitlines():
        nbytes, category, module, op = row.split()
        everything.append(Holder(int(nbytes), category, module, op))
    parts = dict.fromkeys(CATEGORIES, 0)
    parts |= {"parameters": 300, "activations": 600, "temporaries": 100}
    snapshot = MemorySnapshot(1000, parts, "forward")
    layers = frozenset(f"model.layers.{i}" for i in range(3))
    none = frozenset()
    structure = Structure(layers, {}, {}, none, none, Checkpoints())
    facts = Facts(snapshot, holders=everything, structure=structure)
    # Without activations 400 bytes are left, and without what else belongs to the batch 300.
    error = BudgetExceeded(400, 60, "mul", snapshot, everything, facts)
    assert error.everything == everything and error.holders == everything[:5]
    could = [
        "smaller micro-batches, or shorter rows",
        "checkpointing",
        "moving activations off the card",
    ]
    could_not = [t.name for t in TECHNIQUES if t.name not in could]
    assert re.sub(r"\n {6}(?=\S)", " ", str(error)) == MESSAGE.format(
        could="; ".join(could), could_not="; ".join(could_not)
    )
    assert max(map(len, str(error).splitlines())) <= 80
    none = BudgetExceeded(299, 60, "mul", snapshot, everything, facts)
    assert "the budget: none of these by itself." in " ".join(str(none).split())


def fails_where_it_closes_over(found):
    kept, local = torch.ones(1), torch.ones(1)
    found.extend(map(weakref.ref, (kept, local)))

    def inside():
        raise ZeroDivisionError(kept.shape)

    inside()


def fails_twice(found):
    also = torch.ones(1)
    found.append(weakref.ref(also))
    try:
        fails_where_it_closes_over(found)
    except ZeroDivisionError as error:
        raise RuntimeError("caused") from error


@pytest.mark.parametrize("said", [True, False])
def test_an_error_that_is_kept_keeps_no_tensors(said):
    found: list[weakref.ref] = []
    with pytest.raises(RuntimeError) as caught:
        fails_twice(found)
    error, first = caught.value, caught.value.__cause__
    if not said:
        error.__cause__ = None  # as "during handling of the above exception"
    first.__context__ = error  # round and round
    del caught
    gc.collect()
    assert any(each() is not None for each in found)
    release_traceback(error)
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)][1:] == [
        "fails_twice"
    ]
    assert [frame.name for frame in traceback.extract_tb(first.__traceback__)] == [
        "fails_twice",
        "fails_where_it_closes_over",
    ]
    gc.collect()
    assert [each() for each in found] == [None] * 3


def test_a_budget_equal_to_the_peak_is_enough():
    model, opt, _, step = build("llama")
    step()
    with MemoryTracker(model, opt) as tracker:
        step()
    with MemoryTracker(model, opt, budget=tracker.peak.total):
        step()
    # code that handles a card's error handles this one
    with (
        pytest.raises(torch.OutOfMemoryError),
        MemoryTracker(model, opt, budget=tracker.peak.total - 1),
    ):
        step()


def hook_counts(model):
    from torch.nn.modules import module as m
    from torch.optim import optimizer as o

    return (
        len(m._global_forward_pre_hooks),
        len(m._global_forward_hooks),
        len(o._global_optimizer_pre_hooks),
        len(o._global_optimizer_post_hooks),
        len(model._forward_pre_hooks),
        sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()),
        torch._C._len_torch_dispatch_stack(),
    )


# How a block ends: the budget, the error, and its words.
ENDS = {
    "end": (None, None, None),
    "exception": (None, ZeroDivisionError, None),
    "ctrl_c": (None, KeyboardInterrupt, None),
    "budget": ("1 MiB", BudgetExceeded, "in training forward"),
    "at_the_door": (1, BudgetExceeded, "before the first step"),
}


@pytest.mark.parametrize("how", ENDS)
def test_everything_is_uninstalled(how, interruptible):
    budget, error, words = ENDS[how]
    model, opt, _, step = build("llama")
    before = hook_counts(model)
    with (
        pytest.raises(error, match=words) if error else contextlib.nullcontext(),
        MemoryTracker(model, opt, budget=budget),
    ):
        assert how != "at_the_door"
        if how == "ctrl_c":
            threading.Timer(0.05, signal.raise_signal, [signal.SIGINT]).start()
            while True:
                step()
        step()
        if how == "exception":
            raise ZeroDivisionError
    assert hook_counts(model) == before
    assert MemoryTracker._running is None


def test_trackers_do_not_nest_and_do_not_run_twice():
    with MemoryTracker() as tracker:
        with pytest.raises(RuntimeError, match="running already"), MemoryTracker():
            pass
        torch.zeros(10)
    with pytest.raises(RuntimeError, match="make a new one"), tracker:
        pass


def test_a_function_that_compiles_nothing_is_let_through():
    only_compiled = torch._dynamo.run(lambda x: torch.ones_like(x))  # of which there is nothing
    with MemoryTracker() as tracker:
        out = only_compiled(torch.zeros(5))
    assert tracker.peak.total == 40 and out.sum() == 5


def test_a_model_that_moves_to_another_device_is_refused():
    model = nn.Linear(4, 4)
    with (
        pytest.raises(RuntimeError, match="moved while it was tracked"),
        MemoryTracker(model),
    ):
        model.to("meta")
        model(torch.zeros(1, 4, device="meta"))


ON_TWO_DEVICES = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"model": {"weights": 1}}, TypeError, "takes a torch.nn.Module, and was given dict"),
        ({"model": ON_TWO_DEVICES}, ValueError, "several devices"),
        ({"optimizer": "adam"}, TypeError, "takes a torch.optim.Optimizer or a list"),
        ({"budget": "2 gigs"}, ValueError, 'such as "2 GiB"'),
        ({"budget": -1}, ValueError, "positive number of bytes"),
    ],
)
def test_bad_arguments_get_a_sentence(given, error, words):
    with pytest.raises(error, match=words.replace(".", r"\.")):
        MemoryTracker(**given)


def test_bad_names_get_a_sentence():
    with (
        MemoryTracker() as tracker,
        pytest.raises(ValueError, match="choose one of 'parameters'"),
    ):
        tracker.watch(torch.zeros(1), "weights")


def test_who_watches_gets_frames_and_an_end_and_nobody_else_draws(monkeypatch):
    told = []

    class Plot:
        def __init__(self, **settings):
            told.append(("made", settings["budget"]))

        def __getattr__(self, action):
            return lambda *figures: told.append((action, *figures))

    def run(live, **settings):
        told.clear()
        with MemoryTracker(live=live, **settings) as tracker:
            kept = torch.ones(1000)
        del kept
        return tracker, [what for what, *_ in told]

    monkeypatch.setattr(of_tracker, "pictures", lambda: SimpleNamespace(LivePlot=Plot))
    monkeypatch.setattr(of_tracker, "LIVE_FRAME_SECONDS", -1.0)
    for seen, live in ((False, None), (False, True), (True, False)):
        monkeypatch.setattr(of_tracker, "has_viewer", lambda seen=seen: seen)
        assert run(live)[1] == []
    monkeypatch.setattr(of_tracker, "has_viewer", lambda: True)
    tracker, actions = run(None, budget=10**6)
    assert actions[:3] == ["made", "start", "push"] and actions[-1] == "finish"
    assert told[0][1] == 10**6 and max(told[-1][1].totals) == tracker.peak.total == 4000
    assert any(figures[-1].total == 4000 for what, *figures in told if what == "push")


@pytest.mark.parametrize("seconds", [0.001, 1.0])
def test_frames_take_a_fifth_of_the_time_at_most(monkeypatch, seconds):
    """On a clock of our own, an operation takes 10 ms, and a frame takes ``seconds``."""
    clock = SimpleNamespace(now=0.0, frames=0)

    class Plot:
        def __init__(self, **settings):
            self.start = self.finish = lambda *figures: None

        def push(self, *figures):
            clock.frames += 1
            clock.now += seconds

    monkeypatch.setattr(of_tracker, "pictures", lambda: SimpleNamespace(LivePlot=Plot))
    monkeypatch.setattr(of_tracker, "has_viewer", lambda: True)
    monkeypatch.setattr(of_tracker.time, "perf_counter", lambda: clock.now)
    with MemoryTracker():
        for _ in range(1200):
            clock.now += 0.01
            torch.ones(1)
    at_most = clock.now / (seconds + 0.1)  # ten a second
    assert 2 <= clock.frames <= at_most + 1
    assert (clock.frames - 1) * seconds <= of_tracker.FRAMES_SHARE * clock.now


def test_an_error_that_is_kept_does_not_keep_what_a_budget_has_refused():
    """A card would not have made it, nor would it have what it was to be computed from."""
    with MemoryTracker(budget=20_000) as tracker:
        x = torch.zeros(1000)
        with pytest.raises(BudgetExceeded) as kept:
            (x + 1).repeat(10)
        assert tracker.current.total == x.numel() * 4
    assert kept.value.asked == 40_000
