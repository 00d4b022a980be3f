"""Layers for the exercises of lesson 04, and what is seen of them: which run when, and what is
kept.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import nn

from ....measure.tracker import MemoryTracker

ROWS, WIDTH = 16, 8
BOUNDARY = ROWS * WIDTH * 4  # bytes of what one layer hands to the next


def trained_layers(n: int, dropout: float = 0.0) -> nn.Sequential:
    """``n`` residual-free layers (16, 8) -> (16, 8) with weights that are trained, the same ones on
    each call.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return nn.Sequential(
            *(
                nn.Sequential(
                    nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, WIDTH)
                )
                for _ in range(n)
            )
        )


def first_input(requires_grad: bool = True, rows: int = ROWS) -> torch.Tensor:
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(5))
    return x.requires_grad_(requires_grad)


class Order(list):
    """The layers in the order in which they run, by index; ``no_graph``: those whose first run
    recorded none; ``wants``: whether the first layer's input required a gradient.
    """

    def __init__(self):
        super().__init__()
        self.no_graph: set[int] = set()
        self.wants = False

    def note(self, i: int) -> None:
        if i not in self and not torch.is_grad_enabled():
            self.no_graph.add(i)
        self.append(i)

    def times(self, layers) -> list[int]:
        """How often each layer runs."""
        return [self.count(i) for i in range(len(layers))]

    def segments(self, layers) -> list[int]:
        """The lengths of the segments that run again in backward, the first one first."""
        again, lengths = self[len(layers) :], []
        for before, i in zip([None, *again], again, strict=False):
            if before is not None and i == before + 1:
                lengths[-1] += 1
            else:
                lengths.append(1)
        return lengths[::-1]


@contextmanager
def count_calls(layers):
    """An ``Order`` that grows by a layer's index each time the layer runs forward, again or for the
    first time.
    """
    order = Order()
    for i, layer in enumerate(layers):

        def forward(*args, i=i, original=layer.forward, **kwargs):
            order.note(i)
            order.wants |= i == 0 and args[0].requires_grad
            return original(*args, **kwargs)

        layer.forward = forward  # no hook: some measure a layer by its forward alone
    try:
        yield order
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def one_by_one(run, layers, x):
    for layer in layers:
        x = run(layer, x)
    return x


def kept_boundaries(forward, layers, rows_of=first_input) -> int:
    """Boundaries that are alive when ``forward(layers, x)`` has returned, its input and its output
    included.

    From two inputs, ``rows_of(rows=…)``, one twice as large: what does not grow with the input,
    such as a random state, is none.
    """
    live = []
    for rows in (ROWS, 2 * ROWS):
        x = rows_of(rows=rows)
        with MemoryTracker(layers, live=False) as tracker:
            out = forward(layers, x)
            live.append(tracker.current.total)
            del out
    return round((live[1] - live[0]) / BOUNDARY)


def copies_of_weights(run) -> int:
    """How many weights of layers that are larger than their inputs have a copy that is alive after
    ``run(layer, x)``.
    """
    layers, x = trained_layers(2), first_input(rows=1)
    weights = sum(p.nbytes for layer in layers for p in layer.parameters()) // len(layers)
    with MemoryTracker(layers, live=False) as tracker:
        out = one_by_one(run, layers, x)
        held = tracker.current.total - sum(p.nbytes for p in layers.parameters())
    del out
    return held // weights
