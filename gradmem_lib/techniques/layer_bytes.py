"""What one layer keeps and needs, in bytes, found by running it forward and backward once, alone."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..compat import TorchDispatchMode, storage_key, tree_leaves, tree_map_only


class LayerBytes(NamedTuple):
    """Of one layer, in bytes.

    Attributes:
        boundary: its input, which a checkpoint keeps.
        internal: what its backward needs besides the input and the weights.
        temporaries: the most that its forward or its backward has beside these at once: the gradient of its output, that of
            its input, those of its weights, and what lies between.
        gradients: of its weights, those that are not there yet. They wait for the optimizer's step.
        trained: whether a gradient goes through it. One that has none keeps nothing, and never runs again.
    """

    boundary: int
    internal: int
    temporaries: int
    gradients: int
    trained: bool


def layer_bytes(layer: nn.Module, args: tuple, kwargs: dict, x: Any) -> tuple[LayerBytes, Any]:
    """The bytes of ``layer(*args, **kwargs)``, whose input ``x`` is one of these; and its output, without a graph.

    Nothing is left behind but the output: no gradient, and every buffer is what it was. Hooks on the layer do not fire. The
    caller looks after random states.
    """
    args, kwargs = _cut_off((args, kwargs))
    weights = [p for p in layer.parameters() if p.requires_grad]
    leaves = [t for t in _tensors((args, kwargs)) if t.requires_grad] + weights
    buffers = [(b, b.clone()) for b in layer.buffers()]
    try:
        internal, temporaries, trained = _forward_and_backward(layer, args, kwargs, leaves)
        with (
            torch.no_grad()
        ):  # only now: beside a backward, no layer's output waits but the one it began with
            out = _cut_off(layer.forward(*args, **kwargs))
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    for tensor, needed in zip(_tensors(out), trained, strict=True):
        tensor.requires_grad_(needed)
    if not any(trained):
        return LayerBytes(nbytes(x), 0, 0, 0, False), out
    waiting = sum(p.nbytes for p in weights if p.grad is None)
    return LayerBytes(nbytes(x), internal, temporaries, waiting, True), out


def _forward_and_backward(
    layer: nn.Module, args: tuple, kwargs: dict, leaves: list[Tensor]
) -> tuple[int, int, list[bool]]:
    """Bytes kept, the most beside them at once, and which tensors of the output have a gradient."""
    device = next((t.device.type for t in (*leaves, *_tensors((args, kwargs)))), "cpu")
    on = torch.is_autocast_enabled(device)
    # Without autocast's cache, in which casts would stay that no backward needs.
    dtype = torch.get_autocast_dtype(device)
    with _Live() as live:
        with torch.autocast(device, dtype=dtype, enabled=on, cache_enabled=False):
            out = layer.forward(*args, **kwargs)
        internal = live.now - live.bytes_of(out)  # the output is the next layer's boundary
        trained = [t.requires_grad for t in _tensors(out)]
        outputs = [t for t in _tensors(out) if t.requires_grad]
        # While a layer runs again, the gradient of its output waits beside it.
        most = live.most + sum(t.nbytes for t in outputs)
        if outputs:
            edges = [torch.autograd.graph.get_gradient_edge(t) for t in outputs]
            gradients = [torch.zeros_like(t) for t in outputs]
            del out, outputs
            live.most = live.now
            with torch.autocast(device, enabled=False):  # as a loss's backward, which comes after the block
                torch.autograd.grad(edges, leaves, gradients, allow_unused=True)
            most = max(most, live.most)
    return internal, most - internal, trained


class _Live(TorchDispatchMode):
    """Counts the bytes of storages that operations make in this block: ``now``, and the ``most`` there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._made: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = storages((args, kwargs))
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            key = storage_key(storage)
            if key not in given and key not in self._made and storage.nbytes():  # not a view of an argument
                self._made[key] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, key).atexit = False
        self.most = max(self.most, self.now)
        return out

    def _free(self, key: int) -> None:
        self.now -= self._made.pop(key)

    def bytes_of(self, value: Any) -> int:
        """Bytes behind the tensors in ``value`` that were made here."""
        return sum(self._made.get(key, 0) for key in storages(value))


def storages(value: Any) -> dict[int, int]:
    """The storages behind the tensors in ``value``: their address and bytes."""
    found = (tensor.untyped_storage() for tensor in _tensors(value))
    return {storage_key(storage): storage.nbytes() for storage in found}


def nbytes(value: Any) -> int:
    """Bytes of the storages behind the tensors in ``value``, each counted once."""
    return sum(storages(value).values())


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _cut_off(value: Any) -> Any:
    """The same tensors without the graph behind them."""
    return tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), value)
