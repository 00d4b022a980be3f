"""Copies of modules and batches, without memory behind them."""

import copy
from collections.abc import Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.modules import hook_counts
from ..compat.tensors import storage_key
from ..measure.storages import own_storage
from ..techniques.checkpointing import checkpoints_of
from .question import CannotTrace


def fake_batch(batch):
    """``batch`` with fake tensors in place of its own.

    A tensor that occurs twice gets one fake tensor.
    """
    with _Copying({}, "the batch"):
        return copy.deepcopy(batch)


def fake_copy(model: nn.Module, keep: Mapping[nn.Module, int] | None = None) -> nn.Module:
    """A copy of ``model`` with fake tensors on "cpu", for use in a fake mode.

    ``keep``: for a ``ModuleList`` or ``Sequential`` of layers, the number of its first layers to
    copy. The copy gets the same checkpoints that ``checkpoint_layers`` has put on the model.
    """
    keep = keep or {}
    memo: dict[int, Any] = {}
    bases: dict[int, torch.UntypedStorage] = {}
    left_out = {layer for layers, count in keep.items() for layer in list(layers)[count:]}
    for _, module in model.named_modules(left_out):
        for parameter in module.parameters(recurse=False):
            _copy_parameter(parameter, memo, bases)
    with _Copying(bases):
        for layers, count in keep.items():
            first_layers = [copy.deepcopy(layer, memo) for layer in list(layers)[:count]]
            entries = [first_layers] if isinstance(layers, nn.ModuleList) else first_layers
            memo[id(layers)] = type(layers)(*entries)
        copied = copy.deepcopy(model, memo)
        for module in model.modules():
            if id(module) in memo:
                _copy_functions(module, memo)
    for checkpoints in checkpoints_of(model):
        checkpoints.apply_to_copy(dict(zip(model.modules(), copied.modules(), strict=True)))
    return copied


def _copy_parameter(parameter: nn.Parameter, memo: dict, bases: dict) -> None:
    """Put a copy into ``memo``: ``_Copying`` cannot replace how parameters are copied."""
    if any(hook_counts(parameter)):
        raise CannotTrace(
            "a parameter has a hook, which may do anything: remove it (an optimizer in "
            "backward is Recipe(in_backward=True))"
        )
    if id(parameter) in memo:
        return
    memo[id(parameter)] = made = nn.Parameter(_fake_like(parameter, bases), parameter.requires_grad)
    if parameter.grad is not None:  # which stays where the parameter is frozen
        made.grad = _fake_like(parameter.grad, bases)


def _copy_functions(module: nn.Module, memo: dict) -> None:
    """Make the functions among the attributes of the copy of ``module`` use the copy.

    ``copy.deepcopy`` does not look into functions, and a lambda may hold the original's modules.
    """
    for name, value in vars(module).items():
        if isinstance(value, FunctionType) and value.__closure__:
            vars(memo[id(module)])[name] = _copy_function(value, memo)


def _copy_function(function: FunctionType, memo: dict) -> FunctionType:
    cells = []
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # the cell is empty
            cells.append(cell)
            continue
        if isinstance(held, FunctionType):
            held = _copy_function(held, memo)
        elif isinstance(held, (nn.Module, Tensor, MethodType)):
            held = copy.deepcopy(held, memo)
        cells.append(CellType(held))
    made = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells),
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


class _Copying(torch.overrides.TorchFunctionMode):
    """While it is active, ``copy.deepcopy`` makes fake tensors and does not copy the real ones."""

    def __init__(self, bases: dict[int, torch.UntypedStorage], where: str = "the model"):
        super().__init__()
        self.bases, self.where = bases, where

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = _fake_like(tensor, self.bases, self.where)
        return memo[id(tensor)]


def _fake_like(
    tensor: Tensor, bases: dict[int, torch.UntypedStorage], where: str = "the model"
) -> Tensor:
    """A fake CPU tensor like ``tensor``.

    Tensors that share a storage get fakes that share one, too (from ``bases``).
    """
    if tensor.layout != torch.strided:
        raise CannotTrace(
            f"{where} holds a tensor of layout {tensor.layout}, and only dense ones can be "
            "predicted: make it dense"
        )
    if type(tensor).__module__.startswith("bitsandbytes.") or own_storage(tensor) is None:
        raise CannotTrace(
            f"{where} holds a {type(tensor).__name__}, and what its own operations take in a step "
            "is not known: measure one real step with MemoryTracker, or predict the model as it "
            "was before it had 4 bits, with Recipe(precision='bf16', lora_rank=16, "
            "quantized_base=True), or with precision='autocast-bf16' after PEFT's "
            "prepare_model_for_kbit_training"
        )
    if not tensor.is_leaf and tensor.requires_grad:
        raise CannotTrace(
            f"{where} holds a tensor of shape {tuple(tensor.shape)} that has been computed from "
            "others, whose graph a prediction does not have: detach it, or compute it in the "
            "module's forward"
        )
    key, nbytes = storage_key(tensor.untyped_storage()), tensor.untyped_storage().nbytes()
    if key not in bases:
        bases[key] = torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
    fake = torch.empty(0, dtype=tensor.dtype, device="cpu")
    fake.set_(bases[key], tensor.storage_offset(), tensor.shape, tensor.stride())
    return fake.requires_grad_(tensor.requires_grad)
