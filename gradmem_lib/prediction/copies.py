"""Copies of modules and batches, without memory behind them."""

import copy
from collections.abc import Container, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ..compat.copying import deepcopied_by
from ..compat.modules import hook_counts
from ..compat.tensors import storage_key
from ..measure.storages import own_storage
from ..techniques.checkpointing import checkpoints_of
from .question import CannotTrace
from .surroundings import contents, functions_near, reached_from


def fake_batch(batch):
    """``batch`` with fake tensors in place of its own.

    A tensor that occurs twice gets one fake tensor.
    """
    with _Copying({}, "the batch"):
        return copy.deepcopy(batch)


def fake_copy(
    model: nn.Module,
    keep: Mapping[nn.Module, int] | None = None,
    without_graph: list[ref[Tensor]] | None = None,
) -> nn.Module:
    """A copy of ``model`` with fake tensors on "cpu", for use in a fake mode.

    ``keep``: for a ``ModuleList`` or ``Sequential`` of layers, the number of its first layers to
    copy. The copy gets the same checkpoints that ``checkpoint_layers`` has put on the model.

    ``without_graph``: a list to be filled with references to the copies of tensors that have a
    graph, such as the weight that ``torch.nn.utils.weight_norm`` keeps. The graphs are not copied,
    so a step is right only after the model has computed these tensors again. If it is ``None``,
    such a model is refused.
    """
    keep = keep or {}
    memo: dict[int, Any] = {}
    bases: dict[int, torch.UntypedStorage] = {}
    left_out = {layer for layers, count in keep.items() for layer in list(layers)[count:]}
    for _, module in model.named_modules(left_out):
        for parameter in module.parameters(recurse=False):
            _copy_parameter(parameter, memo, bases)
    with _Copying(bases, without_graph=without_graph):
        copied, parts = _deepcopy(model, keep, memo)
        functions = _Functions(parts)
        # Functions that hold parts of the model are copied too, and with them the model once more:
        # which parts these are is known only after a copy.
        if any(map(functions.holds_parts, functions_near(model))):
            copiers = {CellType: functions.copy_cell, FunctionType: functions.copy_function}
            with deepcopied_by(copiers):
                copied, _ = _deepcopy(model, keep, memo)
    for checkpoints in checkpoints_of(model):
        checkpoints.apply_to_copy(dict(zip(model.modules(), copied.modules(), strict=True)))
    return copied


def _deepcopy(
    model: nn.Module, keep: Mapping[nn.Module, int], parameters: dict[int, Any]
) -> tuple[nn.Module, dict[int, Any]]:
    """The copy of ``model``, and all that is copied, by the ``id`` of the originals.
    ``parameters``: those that exist already.
    """
    memo = dict(parameters)
    for layers, count in keep.items():
        first_layers = [copy.deepcopy(layer, memo) for layer in list(layers)[:count]]
        entries = [first_layers] if isinstance(layers, nn.ModuleList) else first_layers
        memo[id(layers)] = type(layers)(*entries)
    return copy.deepcopy(model, memo), memo


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
        if not parameter.grad.is_leaf:
            raise CannotTrace(
                f"the .grad of a parameter of shape {tuple(parameter.shape)} has a graph, as after "
                "backward with create_graph=True, which a prediction does not have: call "
                "optimizer.zero_grad() before you predict"
            )
        made.grad = _fake_like(parameter.grad, bases)


class _Functions:
    """How ``copy.deepcopy``, which shares functions, copies those that hold parts of the model.

    A lambda may hold the original's modules. What else a function holds stays shared, since other
    functions may read it. ``parts``: the model's modules, their parameters and all that is copied
    with them, by ``id``.
    """

    def __init__(self, parts: Container[int]):
        self.parts = parts

    def holds_parts(self, value: Any) -> bool:
        return any(map(self._is_part, reached_from([value])))

    def _is_part(self, held: Any) -> bool:
        """Whether ``held`` is copied with the model, is a method of a module that is, or is a
        tensor that can be copied.

        Modules of other models, such as a teacher, are not: a step that uses one is refused.
        """
        if id(held) in self.parts:
            return True
        if isinstance(held, MethodType):
            return isinstance(held.__self__, nn.Module) and id(held.__self__) in self.parts
        if isinstance(held, nn.Module | nn.Parameter):
            return False
        return isinstance(held, Tensor) and (held.is_leaf or not held.requires_grad)

    def copy_cell(self, cell: CellType, memo: dict) -> CellType:
        """A variable that several functions share is shared by their copies too."""
        held = contents(cell)
        if not self.holds_parts(held):
            return cell
        memo[id(cell)] = made = CellType()  # before it is filled, since it may hold itself
        made.cell_contents = copy.deepcopy(held[0], memo)
        return made

    def copy_function(self, function: FunctionType, memo: dict) -> FunctionType:
        if not self.holds_parts(function):
            return function
        cells = tuple([copy.deepcopy(cell, memo) for cell in function.__closure__ or ()])
        code, variables = function.__code__, function.__globals__
        memo[id(function)] = made = FunctionType(code, variables, function.__name__, None, cells)
        made.__defaults__ = self._copied(function.__defaults__, memo)
        made.__kwdefaults__ = self._copied(function.__kwdefaults__, memo)
        vars(made).update(self._copied(vars(function), memo))
        return made

    def _copied(self, value: Any, memo: dict) -> Any:
        return copy.deepcopy(value, memo) if self.holds_parts(value) else value


class _Copying(torch.overrides.TorchFunctionMode):
    """While it is active, ``copy.deepcopy`` makes fake tensors and does not copy the real ones."""

    def __init__(
        self,
        bases: dict[int, torch.UntypedStorage],
        where: str = "the model",
        without_graph: list[ref[Tensor]] | None = None,
    ):
        super().__init__()
        self.bases, self.where, self.without_graph = bases, where, without_graph

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) in memo:
            return memo[id(tensor)]
        memo[id(tensor)] = fake = _fake_like(tensor, self.bases, self.where)
        if tensor.requires_grad and not tensor.is_leaf:
            if self.without_graph is None:
                raise missing_graph_error(self.where, tensor)
            self.without_graph.append(ref(fake))
        return fake


def missing_graph_error(where: str, tensor: Tensor) -> CannotTrace:
    """The refusal of a ``tensor`` in ``where``, which has been computed from others."""
    return CannotTrace(
        f"{where} holds a tensor of shape {tuple(tensor.shape)} that has been computed from "
        "others, whose graph a prediction does not have: detach it, or compute it in the module's "
        "forward"
    )


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
            "was before it had 4 bits, with the BitsAndBytesConfig, as "
            "Recipe(lora_rank=16, quantized_base=config), and precision='autocast-bf16' for a "
            "training with autocast"
        )
    key, nbytes = storage_key(tensor.untyped_storage()), tensor.untyped_storage().nbytes()
    if key not in bases:
        bases[key] = torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
    fake = torch.empty(0, dtype=tensor.dtype, device="cpu")
    fake.set_(bases[key], tensor.storage_offset(), tensor.shape, tensor.stride())
    return fake.requires_grad_(tensor.requires_grad)
