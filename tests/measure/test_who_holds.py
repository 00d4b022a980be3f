"""Who holds a storage: the path from a name of the script, for each way to hold one; and asking
changes nothing.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import types
import weakref
from collections import deque

import pytest
import torch
from support import oom
from support.oom import graphs, growth

from gradmem_lib import MemoryTracker, diagnose
from gradmem_lib.compat.tensors import storage_key
from gradmem_lib.measure.meter import Meter
from gradmem_lib.measure.paths import who_holds
from gradmem_lib.measure.walks import Walks


@pytest.fixture
def script(tmp_path):
    """A function that runs a text as a module of the user's own, and returns the module."""
    names = []

    def run(text: str) -> types.ModuleType:
        file = tmp_path / f"script_{len(names)}.py"
        file.write_text(text)
        module = types.ModuleType(file.stem)
        module.__file__ = str(file)
        sys.modules[file.stem] = module
        names.append(file.stem)
        exec(
            compile("import torch\nfrom torch import nn\n" + text, str(file), "exec"), vars(module)
        )
        return module

    yield run
    for name in names:
        del sys.modules[name]


WAYS = {
    "kept = torch.zeros(9)": "kept",
    "kept = [torch.zeros(9), torch.ones(9)]": "kept[…]",
    "kept = {'best': (torch.zeros(9),), 4: 1}": "kept['best'][…]",
    "kept = {'step_3': torch.zeros(9)}": "kept[…]",
    "kept = {torch.zeros(9): 'a key'}": "kept[…]",
    "import weakref\nclass Run: pass\nrun = Run()\nweakref.finalize(run, print, torch.zeros(9))": (
        "weakref.finalize['_registry'][…].args[…]"
    ),
    "class Run:\n    best = torch.zeros(9)": "Run.best",
    "class Run:\n    __slots__ = ['best']\nrun = Run()\nrun.best = torch.zeros(9)": "run.best",
    "net = nn.Linear(9, 9)": "net.weight",
    "net = nn.Linear(9, 9)\nnet(torch.ones(9)).sum().backward()": "net.weight.grad",
    "x = torch.ones(9, requires_grad=True) * 2\nx.retain_grad()\nx.sum().backward()": "x.grad",
    "net = nn.Sequential(nn.Linear(9, 9))\nfor layer in net:\n    pass": "net.0.weight",
    "def f(x=torch.zeros(9)): pass": "f → a default of f",
    "def f():\n    x = torch.zeros(9)\n    return lambda: x\ng = f()": (
        "g → x of the closure <lambda>"
    ),
    "def f():\n    x = torch.zeros(9)\n    yield x\ng = f()\nnext(g)": "g → x in f()",
    "import functools\ng = functools.partial(print, torch.zeros(9))": (
        "g → arguments of the partial[…]"
    ),
    "import functools\n@functools.lru_cache\ndef f(n):\n    return torch.zeros(9)\nf(1)": (
        "f → its cache"
    ),
    "def f():\n    x = torch.zeros(9)\n    1 / 0\ntry: f()\nexcept Exception as e: kept = e": (
        "kept.__traceback__ → x in f()"
    ),
    "import collections\nkept = collections.deque([torch.zeros(9)], maxlen=1)": "kept[…]",
    "_private = torch.zeros(9)\nkept = [_private]": "kept[…]",
}


@pytest.mark.parametrize("text", WAYS)
def test_the_path_from_a_name_of_the_script(script, text):
    with MemoryTracker() as tracker:
        module = script(text)
    live = tracker._recording.live
    found = who_holds({key: entry.nbytes for key, entry in live.items()})
    assert WAYS[text] in set(map(str, found.values()))
    assert module


def test_a_graph_has_the_path_of_its_tensor(script):
    module = script(
        """\
w = torch.ones(9, requires_grad=True)
total = 0
for _ in range(3):
    total = total + (w * 2).exp().sum()
"""
    )
    exp = module.total.grad_fn.next_functions[1][0].next_functions[0][0]
    key = storage_key(exp._raw_saved_result.data.untyped_storage())
    assert str(who_holds({key: 36})[key]) == "the graph of total"


def test_variables_of_functions_that_run(script):
    module = script("def f(ask):\n    x = torch.zeros(9)\n    return ask(x)\n")

    def ask(tensor):
        key = storage_key(tensor.untyped_storage())
        del tensor
        return str(who_holds({key: 36}, sys._getframe())[key])

    assert module.f(ask) == "x in f()"


def test_what_the_collector_would_free_is_a_reference_cycle(script):
    module = script(
        "class Batch:\n    def __init__(self):\n        self.me, self.x = self, torch.zeros(9)\n"
    )
    gc.collect()
    gc.disable()
    try:
        module.batch = module.Batch()
        key = storage_key(module.batch.x.untyped_storage())
        gone = weakref.ref(module.batch)
        assert str(who_holds({key: 36})[key]) == "batch.x"
        del module.batch
        assert str(who_holds({key: 36}, everywhere=True)[key]) == "nothing but a reference cycle"
        assert gone() is not None  # nothing was freed
    finally:
        gc.enable()
    gc.collect()
    assert gone() is None  # and nothing is kept


class Asks:
    """It counts who asks for what it does not have."""

    asked = 0

    def __init__(self):
        self.kept = [torch.zeros(9)]

    def __getattr__(self, name):
        Asks.asked += 1
        raise AttributeError(name)

    @property
    def computed(self):
        Asks.asked += 1
        return torch.zeros(9)

    @property
    def __class__(self):
        Asks.asked += 1
        return Asks


def test_no_code_of_the_script_runs_and_nothing_is_unpacked(script):
    asks = Asks()
    unpacked = []
    w = torch.ones(9, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: ("packed", t), unpacked.append):
        loss = w.exp().sum()
    key = storage_key(asks.kept[0].untyped_storage())
    Asks.asked = 0
    found = who_holds({key: 36, 1: 10**9}, sys._getframe())
    assert str(found[key]) == f"asks.kept[…] in {sys._getframe().f_code.co_name}()"
    assert Asks.asked == 0 and not unpacked and loss.requires_grad


def test_the_walk_leaves_nothing_behind():
    """A variable of a frame that was walked is free as soon as it is deleted."""

    def inner(x):
        gone = weakref.ref(x.untyped_storage())
        who_holds({1: 10**9}, sys._getframe())
        return gone

    def outer():
        x, y = torch.zeros(9), torch.zeros(7)
        gone = [inner(x), weakref.ref(y.untyped_storage())]
        del x
        assert gone[0]() is None and gone[1]() is not None
        return gone

    assert all(reference() is None for reference in outer())
    assert gc.isenabled()


def test_what_a_generator_lets_go_of_is_free_after_a_walk(script):
    module = script(
        """\
def batches():
    x = torch.zeros(9)
    yield x.untyped_storage()
    del x
    yield
"""
    )
    running = module.batches()
    gone = weakref.ref(next(running))
    for _ in range(2):
        who_holds({1: 10**9}, sys._getframe())
    next(running)
    assert gone() is None


def test_a_view_of_a_weight_that_was_updated_is_no_error(script):
    module = script(
        """\
net = nn.Linear(9, 9)
with torch.no_grad():
    row = net.weight[0]
    net.weight += 1
"""
    )
    key = storage_key(module.net.weight.untyped_storage())
    assert str(who_holds({key: 324, 1: 10**9})[key]) in ("net.weight", "row")


def test_a_class_that_a_function_makes_is_not_kept():
    def f():
        big = torch.ones(9)

        class Times(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * big

        y = Times.apply(torch.ones(9, requires_grad=True))
        who_holds({1: 10**9}, sys._getframe())
        return weakref.ref(Times), y.sum().item()

    gone, _ = f()
    gc.collect()
    assert gone() is None


def test_what_a_graph_ends_at_has_the_graphs_name_with_its_gradient(script):
    """A penalty's graph keeps the input that it was taken of."""
    with MemoryTracker() as tracker:
        module = script(
            """\
def penalty():
    x = torch.ones(9, requires_grad=True)
    loss = (x * 2).sum()
    loss.backward()
    return loss
kept = [penalty()]"""
        )
        paths = [str(holder.held) for holder in tracker.facts.at_peak if holder.shape == (9,)]
    assert module.kept and paths.count("the graph of kept[…]") == 2, paths


def test_names_that_the_script_asks_for_stay_in_their_dict():
    x = torch.zeros(9)
    mine = locals()
    who_holds({1: 10**9}, sys._getframe())
    assert mine["x"] is x


@pytest.mark.parametrize("program", [growth.errors_that_are_kept, graphs.inner_steps])
def test_a_run_has_the_same_bytes_with_walks(program, monkeypatch):
    monkeypatch.setattr(Walks, "walk", lambda *_, **__: None)
    without = program.__wrapped__().timeline.totals
    monkeypatch.undo()
    monkeypatch.setattr(Meter, "seconds_for_walks", 999)
    monkeypatch.setattr("gradmem_lib.measure.walks.HIGHER", 0)
    tracker = program.__wrapped__()
    assert tracker._meter.walks.count >= 1
    assert tracker.timeline.totals == without


def test_a_machine_that_runs_something_else_takes_no_walk_away(monkeypatch):
    monkeypatch.setattr(Meter, "seconds_for_walks", 999)
    monkeypatch.setattr("time.perf_counter", itertools.count(0, 1000).__next__)
    with MemoryTracker() as tracker:
        tracker._meter.walks.walk(None)
        assert tracker._meter.walks.has_time()


def test_a_tracker_does_not_count_what_the_walk_asks_for():
    sparse = torch.eye(5).to_sparse()
    with MemoryTracker() as tracker:
        kept = torch.zeros(9)
        before = tracker.current.total
        who_holds({1: 10**9}, sys._getframe())
        assert tracker.current.total == before == kept.nbytes
    assert sparse.is_sparse


def test_a_window_is_no_list_that_grows():
    """Also before it is full: it will not grow for ever."""
    full, filling = deque([torch.zeros(9)], maxlen=1), deque([torch.zeros(9)], maxlen=2)
    kinds = []
    for kept in (full, filling):
        key = storage_key(kept[0].untyped_storage())
        kinds.append(who_holds({key: 36}, sys._getframe())[key].kind)
    assert kinds == ["window", "window"]


def test_a_search_ends_when_almost_all_is_found(monkeypatch):
    """Libraries are asked only for what the script's own names do not lead to."""
    asked = []
    keeps = functools.partial(asked.append, 1)
    kept = torch.zeros(9)
    key = storage_key(kept.untyped_storage())
    monkeypatch.setattr("gradmem_lib.measure.paths._in_circles", lambda: asked.append(1) or [])
    assert key in who_holds({key: 36}, sys._getframe(), everywhere=True) and not asked
    monkeypatch.setattr("gradmem_lib.measure.paths.MOST_OBJECTS", 1000)
    who_holds({key: 36, 1: 36}, sys._getframe(), everywhere=True)
    assert asked and keeps


def test_what_a_function_had_that_an_error_has_ended_is_not_kept_by_the_error():
    """Also where the diagnosis is asked while the error is handled."""
    net = oom.Net()
    optimizer = oom.sgd(net)

    def train():
        outputs = []
        for _ in range(8):
            out = net(torch.randn(512, 64))
            outputs.append(out.detach())
            oom.stepped(out.square().mean(), optimizer)
        raise ZeroDivisionError

    try:
        with MemoryTracker(net, optimizer) as tracker:
            train()
    except ZeroDivisionError:
        [cause, *_] = diagnose(tracker).causes
    assert cause.name == oom.GROWS and "`outputs`" in cause.evidence
