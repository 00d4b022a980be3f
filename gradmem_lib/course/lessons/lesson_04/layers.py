"""Layers for the exercises of lesson 04, and what is seen of them: which run when, and what is
kept.
"""

from contextlib import contextmanager

import torch
from torch import nn

from ....measure.tracker import MemoryTracker
from ..shared.settings import seeded

ROWS, WIDTH = 16, 8
BOUNDARY = ROWS * WIDTH * 4  # bytes of what one layer hands to the next


def trained_layers(n: int, dropout: float = 0.0) -> nn.Sequential:
    """``n`` residual-free layers (16, 8) -> (16, 8) with weights that are trained, the same ones on
    each call.
    """
    layers = nn.Sequential()
    with seeded(4):
        for _ in range(n):
            wide, narrow = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
            layers.append(nn.Sequential(wide, nn.GELU(), nn.Dropout(dropout), narrow))
    return layers


def first_input(rows: int = ROWS) -> torch.Tensor:
    with seeded(5):
        return torch.randn(rows, WIDTH, requires_grad=True)


class Order(list):
    """The layers in the order in which they run, by index; ``no_graph``: those whose first run
    recorded none.
    """

    def __init__(self):
        super().__init__()
        self.no_graph: set[int] = set()

    def note(self, i: int) -> None:
        if i not in self and not torch.is_grad_enabled():
            self.no_graph.add(i)
        self.append(i)

    def times(self, layers) -> list[int]:
        """How often each layer runs."""
        return [self.count(i) for i in range(len(layers))]

    def segments(self, layers) -> list[int]:
        """The lengths of the segments that run again in backward, the first one first."""
        lengths: list[int] = []
        again = self[len(layers) :]
        for i, before in zip(again, [len(layers), *again], strict=False):
            if i == before + 1:
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

        def forward(x, i=i, original=layer.forward):
            order.note(i)
            return original(x)

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


def alive_after(forward, layers, rows: int = ROWS) -> int:
    """Bytes that are alive when ``forward(layers, x)`` has returned, its input and its output
    included.
    """
    x = first_input(rows=rows)
    with MemoryTracker(layers, live=False) as tracker:
        out = forward(layers, x)
        held = tracker.current.total
    del out
    return held


def kept_boundaries(forward, layers) -> int:
    """The same in boundaries, from two inputs, one twice as large: what does not grow with the
    input, such as a weight or a random state, is none.
    """
    more = alive_after(forward, layers, 2 * ROWS) - alive_after(forward, layers)
    return round(more / BOUNDARY)
