"""``"best"``: each layer runs alone and is measured, and the measured bytes give the schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..compat.trees import tree_leaves
from .layer_arguments import join_input
from .layer_bytes import LayerBytes, layer_bytes
from .module_state import Contents
from .schedules import Schedule, safe_segments
from .second_run import FirstRun, version_of
from .segments import IN_PLACE, Chain


class Measurement:
    """The layers of one forward that measures them, in the order in which they are called.

    Attributes: for each call, ``order`` has the layer's index, ``sizes`` its bytes, and
    ``continues`` whether it may share a segment with the layer that was called before it.
    """

    def __init__(self, chain: Chain):
        self.chain = chain
        self.order: list[int] = []
        self.sizes: list[LayerBytes] = []
        self.continues: list[bool] = []

    def forward(self, run: Callable[[], Any]) -> None:
        """Measure while ``run`` calls the layers. Random states do not change."""
        weights = [p for layer in self.chain.layers for p in layer.parameters()]
        cards = {p.device for p in weights if p.device.type == "cuda"}
        # copies cast before the layers would be alive during each layer's backward
        torch.clear_autocast_cache()
        first = FirstRun(self.chain.layers)
        with torch.random.fork_rng(devices=list(cards)), first.found_again():
            run()

    def call_layer(self, i: int, x: Any, rest: tuple, *, continues: bool) -> Any:
        """Measure layer ``i`` with input ``x``. Returns its output, without a graph."""
        layer = self.chain.layers[i]
        if any(hasattr(p, "placements") for p in layer.parameters()):
            raise RuntimeError(
                'every="best" measures one layer alone, and here FSDP has spread its weights over '
                "processes: give an int, "
                '"sqrt" or a list of segment lengths (best_segments finds them from the bytes of '
                "an unspread layer)"
            )
        given, values = Contents([x, rest]), tree_leaves((x, rest))
        versions = list(map(version_of, values))
        try:
            size, out = layer_bytes(layer, *join_input(x, rest), x, self.chain.hidden)
        except RuntimeError as error:
            if self._changes_its_input(i, x, rest):
                raise RuntimeError(IN_PLACE.format(i)) from error
            raise
        finally:
            given.put_back()
        if list(map(version_of, values)) != versions:
            raise RuntimeError(IN_PLACE.format(i))
        self.order.append(i)
        self.sizes.append(size)
        self.continues.append(continues)
        return out

    def _changes_its_input(self, i: int, x: Any, rest: tuple) -> bool:
        if not isinstance(x, Tensor):
            return False
        copy = x.detach().clone()
        before = version_of(copy)
        with torch.no_grad():
            self.chain.call_layer(i, copy, rest)
        return version_of(copy) != before

    def schedule(self, keep_last: bool | None, *, same_kind: bool) -> tuple[Schedule, bool]:
        """The segments, and whether the last one is kept.

        ``same_kind``: the layers get the same arguments, so that they may share a segment.
        """
        every_layer_once = self.order == list(range(len(self.chain.layers)))
        if same_kind and every_layer_once and all(self.continues[1:]):
            return safe_segments(self.sizes, keep_last)
        return [1] * len(self.chain.layers), bool(keep_last)
