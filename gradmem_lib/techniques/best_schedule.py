"""``"best"``: each layer runs alone and is measured, and the measured bytes give the schedule."""

from __future__ import annotations

from typing import Any

import torch

from ..compat.trees import tree_leaves
from .layer_arguments import join_input
from .layer_bytes import LayerBytes, layer_bytes
from .module_state import Contents
from .schedules import Schedule, safe_segments
from .second_run import FirstRun, version_of
from .segments import IN_PLACE, Chain


def measured_layers(chain: Chain, x: Any, rest: tuple) -> list[LayerBytes]:
    """The bytes of the layers, each with the output of the one before and the same other
    arguments: up to the first layer whose output nobody knows how to hand on. Random states do not
    change.
    """
    weights = [p for layer in chain.layers for p in layer.parameters()]
    if any(hasattr(p, "placements") for p in weights):
        raise RuntimeError(
            'every="best" measures one layer alone, and here FSDP has spread its weights over '
            'processes: give an int, "sqrt" or a list of segment lengths (best_segments finds them '
            "from the bytes of an unspread layer)"
        )
    cards = {p.device for p in weights if p.device.type == "cuda"}
    # copies cast before the layers would be alive during each layer's backward
    torch.clear_autocast_cache()
    first = FirstRun(chain.layers)
    found: list[LayerBytes] = []
    with torch.random.fork_rng(devices=list(cards)), first.found_again():
        for i in range(len(chain.layers)):
            size, out = _measured(chain, i, x, rest)
            found.append(size)
            if chain.has_extra_outputs(out):
                break
            x = chain.hidden(out)
    return found


def _measured(chain: Chain, i: int, x: Any, rest: tuple) -> tuple[LayerBytes, Any]:
    """The bytes of layer ``i`` with input ``x``; and its output, without a graph."""
    given, values = Contents([x, rest]), tree_leaves((x, rest))
    versions = list(map(version_of, values))
    try:
        found = layer_bytes(chain.layers[i], *join_input(x, rest), x, chain.hidden)
    finally:
        given.put_back()
    if list(map(version_of, values)) != versions:
        raise RuntimeError(IN_PLACE.format(i))
    return found


def best_schedule(
    sizes: list[LayerBytes], layers: int, keep_last: bool | None
) -> tuple[Schedule, bool]:
    """The segments of so many ``layers``, and whether the last one is kept. Layers without a size
    are no segment together.
    """
    if len(sizes) == layers:
        return safe_segments(sizes, keep_last)
    return [1] * layers, bool(keep_last)
