"""Copies of modules and batches that have no memory behind them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .question import CannotTrace


def batch_leaves(batch) -> list[Tensor]:
    values = batch.values() if isinstance(batch, dict) else [batch] if isinstance(batch, Tensor) else batch
    return (
        [v for v in values if isinstance(v, Tensor)]
        if isinstance(values, (list, tuple)) or isinstance(batch, dict)
        else []
    )


def fake_batch(batch):
    if isinstance(batch, dict):
        return {name: _fake(t, {}) for name, t in batch.items()}
    return _fake(batch, {}) if isinstance(batch, Tensor) else tuple(_fake(t, {}) for t in batch)


def _fake(tensor: Tensor, bases: dict[int, Tensor]) -> Tensor:
    """A fake CPU tensor like ``tensor``; tensors that share a storage get fakes that share one (kept in ``bases``)."""
    storage = tensor.untyped_storage()
    if (
        storage.nbytes() == tensor.numel() * tensor.itemsize
        and tensor.is_contiguous()
        and storage._cdata not in bases
    ):
        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        bases[storage._cdata] = fake
        return fake
    if storage._cdata not in bases:
        bases[storage._cdata] = torch.empty(
            storage.nbytes() // tensor.itemsize, dtype=tensor.dtype, device="cpu"
        )
    base = bases[storage._cdata]
    if base.dtype != tensor.dtype:
        base = base.view(-1).view(tensor.dtype)
    return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class _Copying(torch.overrides.TorchFunctionMode):
    """Inside ``copy.deepcopy``: tensors become fake ones rather than being copied."""

    def __init__(self, bases: dict[int, Tensor]):
        super().__init__()
        self.bases = bases

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = _fake_like(tensor, self.bases)
        return memo[id(tensor)]


def _fake_like(tensor: Tensor, bases: dict[int, Tensor]) -> Tensor:
    if tensor.layout != torch.strided:
        raise CannotTrace(
            f"the model holds a tensor of layout {tensor.layout}, and only dense ones can be predicted: make it dense"
        )
    fake = _fake(tensor, bases)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def fake_copy(model: nn.Module, mode, layers: nn.Module | None = None, keep: int | None = None) -> nn.Module:
    """``model`` with fake tensors in place of its own, on "cpu"; of its ``layers`` only the first ``keep``, if given."""
    memo: dict[int, Any] = {}
    bases: dict[int, Tensor] = {}
    left_out = set() if keep is None else set(list(layers)[keep:])
    for _, module in model.named_modules(left_out):
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = _fake_like(tensor, bases)
    with _Copying(bases):
        if keep is not None:
            kept = [copy.deepcopy(layer, memo) for layer in list(layers)[:keep]]
            memo[id(layers)] = (
                type(layers)(kept) if isinstance(layers, nn.ModuleList) else type(layers)(*kept)
            )
        return copy.deepcopy(model, memo)
