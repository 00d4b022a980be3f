"""Bytes around a training step: what was there before the block, and what a mode changes."""

from __future__ import annotations

import pytest
import torch
from support.oracle import allocator_peak, nbytes, without_collections
from torch import nn
from torch.nn import functional as F

from gradmem_lib import MemoryTracker


@pytest.mark.parametrize(
    ("changed", "kept"), [("x * 0.5", 1), ("2 * x", 1), ("x / 3", 1), ("x + 1", 0), ("x**2", 0)]
)
def test_only_python_numbers_are_missing(changed, kept, times=3):
    """What the allocator has more than the tracker: 8 bytes for each number that autograd has
    ``kept``, and for that of the operation that runs.
    """
    layer, given = nn.Linear(4, 4), torch.rand(2, 4)
    change = eval(f"lambda x: {changed}")

    def step():
        x = layer(given)
        for _ in range(times):
            x = change(x)
        del x

    expected = allocator_peak(step, before=1)
    with without_collections(), MemoryTracker(layer) as tracker:
        tracker.watch(given, "other")
        start = tracker.current.total
        step()
    more = expected - (tracker.peak.total - start)
    assert more - 8 * kept * times in (0, 8)


def train(model: nn.Module, optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def student():
    model = nn.Linear(8, 8)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class WordTeacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(512, 16), nn.Linear(16, 512, bias=False)

    def forward(self, ids):
        return self.head(self.words(ids))


TEACHERS = {
    "embedding and linear": (WordTeacher, lambda: torch.randint(0, 512, (2, 4))),
    "lstm": (lambda: nn.LSTM(16, 16), lambda: torch.randn(4, 1, 16)),
    "norm": (lambda: nn.BatchNorm1d(64), lambda: torch.randn(3, 64)),
}


@pytest.mark.parametrize("kind", TEACHERS)
def test_a_second_model_counts_with_all_its_weights(kind):
    make, batch = TEACHERS[kind]
    teacher, x = make().requires_grad_(False).eval(), batch()
    weights = nbytes([*teacher.parameters(), *teacher.buffers()])
    used = weights
    if kind == "norm":  # nobody reads the number of batches in evaluation
        used -= teacher.num_batches_tracked.nbytes
    model, optimizer = student()
    with MemoryTracker(model, optimizer) as tracker:
        for _ in range(2):
            with torch.no_grad():
                teacher(x)
            train(model, optimizer, torch.ones(2, 8))
            torch.zeros(1)  # an operation after which what went is drained
    read = [h for h in tracker.holders("now") if h.step == -1 and h.category == "other"]
    assert sum(h.nbytes for h in read) == used + nbytes([x])
    at_peak = [h for h in tracker.holders() if h.op == "first read as a parameter"]
    assert sorted(h.nbytes for h in at_peak) == sorted(p.nbytes for p in teacher.parameters())
    assert all(h.line.file.endswith("test_around_the_step.py") for h in at_peak)
    assert tracker.current.by_category["parameters"] == nbytes(model.parameters())


def average(copies, weights):
    for mine, theirs in zip(copies, weights, strict=True):
        mine.lerp_(theirs, 0.01)


def in_one_call(copies, weights):
    torch._foreach_lerp_(copies, weights, 0.01)  # a list of tensors, written and read


def store(copies, weights):
    for mine, theirs in zip(copies, weights, strict=True):
        mine.copy_(theirs)


@pytest.mark.parametrize("update", [average, in_one_call, store])
def test_a_copy_of_the_weights_from_before_counts_when_it_is_touched(update):
    model, optimizer = student()
    copies = [p.detach().clone() for p in model.parameters()]
    x = torch.ones(2, 8)
    with MemoryTracker(model, optimizer) as tracker:
        train(model, optimizer, x)
        before = tracker.current.total
        with torch.no_grad():
            update(copies, [p.detach() for p in model.parameters()])
        assert tracker.current.total - before == nbytes(copies)


def weighted(prediction, target):
    return (F.cross_entropy(prediction, target, reduction="none") * WEIGHTS).mean()


WEIGHTS = torch.ones(4)
LOSSES = {
    "classes": (F.cross_entropy, lambda: torch.randint(0, 8, (4,))),
    "weighted": (weighted, lambda: torch.randint(0, 8, (4,))),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_targets_that_only_the_loss_gets_are_counted(kind):
    loss, make = LOSSES[kind]
    model, optimizer = student()
    x, y = torch.rand(4, 8), make()
    brought = [x, y, WEIGHTS] if kind == "weighted" else [x, y]
    with MemoryTracker(model, optimizer) as tracker:
        loss(model(x), y).backward()
    found = {h.nbytes for h in tracker.holders("now") if h.category == "other"}
    assert tracker.current.by_category["other"] == nbytes(brought)
    assert found == {t.nbytes for t in brought}


# Compiled code.


def compiled_model(backend):
    return torch.compile(nn.Linear(4, 4), backend=backend)


class Sine(nn.Module):
    def forward(self, x):
        return x.sin()


def compiled_in_place(backend):
    model = Sine()
    model.compile(backend=backend)
    return model


@pytest.mark.parametrize("make", [compiled_model, compiled_in_place])
def test_forced_to_be_eager_compiled_code_is_counted_and_compiles_afterwards(make):
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    function, x = make(backend), torch.ones(2, 4)
    model = function if isinstance(function, nn.Module) else None
    with torch.compiler.set_stance("force_eager"), MemoryTracker(model) as tracker:
        out = function(x)
        assert tracker.current.total >= nbytes([x, out])
    assert not compiled
    function(x)
    assert len(compiled) == 1
    with pytest.raises(RuntimeError, match="set_stance"), MemoryTracker(model):
        function(x)
