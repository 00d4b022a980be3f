"""The bytes that one layer keeps and needs, measured by running its forward and backward once,
alone.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..compat.trees import tree_map_only
from ..measure.storages import storages_of, tensors_in
from ..measure.watch import Watch
from .module_state import left_as_it_was


class LayerBytes(NamedTuple):
    """The bytes of one layer.

    Attributes:
        boundary: its input, which a checkpoint keeps.
        internal: what its backward needs besides the input and the weights.
        temporaries: the most bytes besides these at one time of its forward or backward: the
            gradients of its output, of its input and of its weights, and those in between.
        gradients: the gradients of its weights that do not exist yet. They stay until the
            optimizer's step.
        trained: whether a gradient passes through it. A layer without one keeps nothing, and is
            never recomputed.
    """

    boundary: int
    internal: int
    temporaries: int
    gradients: int
    trained: bool


def layer_bytes(
    layer: nn.Module, args: tuple, kwargs: dict, x: Any, hidden: Any
) -> tuple[LayerBytes, Any]:
    """The bytes of ``layer(*args, **kwargs)``, and its output without a graph. ``x`` is the
    argument that is the layer's input.

    ``hidden(output)`` is the part of the output that the next layer gets, and that has a gradient.
    Only the output stays: no gradients are left, and what the layer keeps is put back. Hooks on
    the layer do not fire. The caller restores random states.
    """
    args, kwargs = _detached((args, kwargs))
    weights = [p for p in layer.parameters() if p.requires_grad]
    autocast = _autocast_without_cache([*weights, *tensors_in((args, kwargs))])
    with left_as_it_was(layer):
        internal, temporaries, has_gradient = _forward_and_backward(
            layer, args, kwargs, weights, hidden, autocast
        )
        # After the backward, so that no second output is alive beside it. With gradients, which a
        # layer may ask for itself.
        with autocast:
            out = _detached(layer.forward(*args, **kwargs))
    for tensor, needed in zip(tensors_in((out,)), has_gradient, strict=True):
        tensor.requires_grad_(needed)
    boundary = _nbytes(set(storages_of(x)))
    if not any(has_gradient):
        return LayerBytes(boundary, 0, 0, 0, trained=False), out
    new_gradients = sum(p.nbytes for p in weights if p.grad is None)
    return LayerBytes(boundary, internal, temporaries, new_gradients, trained=True), out


def _autocast_without_cache(tensors: list[Tensor]) -> torch.autocast:
    """Autocast as it is set on the device of these tensors.

    Its cache would keep copies that no backward needs.
    """
    device = tensors[0].device.type if tensors else "cpu"
    dtype = torch.get_autocast_dtype(device)
    enabled = torch.is_autocast_enabled(device)
    return torch.autocast(device, dtype, enabled, cache_enabled=False)


def _forward_and_backward(
    layer: nn.Module,
    args: tuple,
    kwargs: dict,
    weights: list[Tensor],
    hidden: Any,
    autocast: torch.autocast,
) -> tuple[int, int, list[bool]]:
    """Run both, and measure the bytes.

    Returns the bytes that are saved for backward, the peak of all other bytes, and which tensors of
    the output have a gradient.
    """
    live = _LiveStorages()
    with Watch(live.observe):
        with autocast:
            out = layer.forward(*args, **kwargs)
        # The output is the next layer's boundary, and not what this layer keeps.
        internal = _nbytes(live.alive.difference(storages_of(hidden(out))))
        has_gradient = [t.requires_grad for t in tensors_in((out,))]
        outputs = [t for t in tensors_in((hidden(out),)) if t.requires_grad]
        # While a layer is recomputed, the gradient of its output is alive too.
        peak = live.peak + sum(t.nbytes for t in outputs)
        if outputs:
            edges = [torch.autograd.graph.get_gradient_edge(t) for t in outputs]
            gradients = [torch.zeros_like(t) for t in outputs]
            del out, outputs  # as in training, where only the graph is left
            live.peak = _nbytes(live.alive)
            inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
            # a real backward runs after the autocast block
            with torch.autocast(autocast.device, enabled=False):
                torch.autograd.grad(edges, inputs + weights, gradients, allow_unused=True)
            peak = max(peak, live.peak)
    return internal, peak - internal, has_gradient


class _LiveStorages:
    """The storages that operations made and that are still alive, and the peak of their bytes."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet = weakref.WeakSet()
        self.peak = 0

    def observe(self, func: Any, args: tuple, kwargs: dict | None, out: Any) -> None:
        # What shares a storage with an argument is a view of it, or was written in place.
        made = set(storages_of(out)).difference(storages_of((args, kwargs)))
        self.alive |= made
        self.peak = max(self.peak, _nbytes(self.alive))


def _nbytes(storages: Any) -> int:
    return sum(storage.nbytes() for storage in storages)


def _detached(value: Any) -> Any:
    """The same tensors, detached from the graph behind them."""
    return tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), value)
