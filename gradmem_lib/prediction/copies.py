"""Copies of modules and batches that have no memory behind them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..techniques.checkpointing import checkpoints_of
from .question import CannotTrace


def batch_leaves(batch) -> list[Tensor]:
    """The tensors in a batch, which may hold flags and numbers beside them."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def fake_batch(batch):
    """``batch`` with fake tensors in place of its own: one for a tensor that is there twice, all else as it is."""
    memo: dict[int, Tensor] = {}
    bases: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in memo:
            memo[id(tensor)] = _fake_like(tensor, bases, "the batch")
        return memo[id(tensor)]

    return tree_map_only(Tensor, fake, batch)


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


def _fake_like(tensor: Tensor, bases: dict[int, Tensor], where: str = "the model") -> Tensor:
    if tensor.layout != torch.strided:
        raise CannotTrace(
            f"{where} holds a tensor of layout {tensor.layout}, and only dense ones can be predicted: make it dense"
        )
    if not tensor.is_leaf and tensor.requires_grad:
        raise CannotTrace(
            f"{where} holds a tensor of shape {tuple(tensor.shape)} that has been computed from others, whose graph a prediction "
            "does not have: detach it, or compute it in the module's forward"
        )
    fake = _fake(tensor, bases)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def fake_copy(model: nn.Module, mode, layers: nn.Module | None = None, keep: int | None = None) -> nn.Module:
    """``model`` with fake tensors in place of its own, on "cpu"; of its ``layers`` only the first ``keep``, if given.

    What ``checkpoint_layers`` has put on the model is put on the copy too."""
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
        made = copy.deepcopy(model, memo)
    for checkpoints in checkpoints_of(model):
        checkpoints.put_on_copy(dict(zip(model.modules(), made.modules(), strict=True)))
    return made
