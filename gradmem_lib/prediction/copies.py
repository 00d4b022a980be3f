"""Copies of modules and batches, without memory behind them."""

import copy
from collections.abc import Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ..compat.modules import hook_counts
from ..compat.tensors import storage_key
from ..measure.storages import own_storage
from ..techniques.checkpointing import checkpoints_of
from .closures import contents, held_by, inside_of, put_inside, tables_of_functions
from .question import CannotTrace


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
        for layers, count in keep.items():
            first_layers = [copy.deepcopy(layer, memo) for layer in list(layers)[:count]]
            entries = [first_layers] if isinstance(layers, nn.ModuleList) else first_layers
            memo[id(layers)] = type(layers)(*entries)
        copied = copy.deepcopy(model, memo)
        _copy_functions(model, memo)
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
        if not parameter.grad.is_leaf:
            raise CannotTrace(
                f"the .grad of a parameter of shape {tuple(parameter.shape)} has a graph, as after "
                "backward with create_graph=True, which a prediction does not have: call "
                "optimizer.zero_grad() before you predict"
            )
        made.grad = _fake_like(parameter.grad, bases)


def _copy_functions(model: nn.Module, memo: dict) -> None:
    """Make the functions among the attributes and hooks of the copy of ``model`` use the copy.

    ``copy.deepcopy`` does not look into functions, and a lambda may hold the original's modules.
    ``memo``: the copies that it has made, by the ``id`` of their originals.
    """
    # deepcopy keeps the originals alive in a list of its own, which it puts into memo as well
    copies = [made for original, made in memo.items() if original != id(memo)]
    for made in copies:
        if type(made) is not tuple:  # a tuple with functions in it has to be made again
            memo[id(made)] = made
    for made in copies:
        # In place: an attribute and a function may hold the same list.
        if type(made) in (list, dict, partial):
            put_inside(made, made, [_copied(item, memo) for item in inside_of(made)])
    for module in model.modules():
        if id(module) not in memo:
            continue  # a layer that is left out
        for functions in tables_of_functions(memo[id(module)]):
            for name, value in functions.items():
                functions[name] = _copied(value, memo)


def _copied(value: Any, memo: dict) -> Any:
    """What the copy of the model holds in place of ``value``; ``value`` itself, if it holds nothing
    of the model.

    What else a function holds stays shared, since other functions may read it. What may hold itself
    comes into ``memo`` empty, and is filled then.
    """
    # In `memo`, a copy stands for itself, so it is followed until then: a tuple that deepcopy has
    # copied, with functions in it, is copied once more.
    while memo.get(id(value), value) is not value:
        value = memo[id(value)]
    if id(value) in memo or not _holds_parts(value, memo, set()):
        return value
    if isinstance(value, FunctionType):
        return _copy_function(value, memo)
    if _is_part(value, memo):
        return copy.deepcopy(value, memo)
    if type(value) in (list, dict):
        made = type(value)()
        memo[id(value)] = memo[id(made)] = made
        put_inside(made, value, [_copied(item, memo) for item in inside_of(value)])
        return made
    inside = inside_of(value)  # of a tuple or a functools.partial
    copied = [_copied(item, memo) for item in inside]
    if id(value) in memo:  # a list in it holds it
        return memo[id(value)]
    if all(new is old for new, old in zip(copied, inside, strict=True)):
        return value
    if type(value) is tuple:
        made = tuple(copied)
    else:
        made = partial(copied[0])
        put_inside(made, value, copied)
    memo[id(value)] = memo[id(made)] = made
    return made


def _copy_function(function: FunctionType, memo: dict) -> FunctionType:
    """``function`` with the copies of what it holds of the model."""
    cells = []
    to_fill: list[tuple[CellType, Any]] = []
    for cell in function.__closure__ or ():
        # Functions that share a variable share it in the copy, too: each sees what another assigns.
        new_cell = memo.get(id(cell), cell)
        for held in contents(cell):
            if new_cell is cell and _holds_parts(held, memo, set()):
                memo[id(cell)] = new_cell = CellType()
                to_fill.append((new_cell, held))
        cells.append(new_cell)
    made = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        None,
        tuple(cells),
    )
    memo[id(function)] = memo[id(made)] = made  # before it is filled, since it may hold itself
    for cell, held in to_fill:
        cell.cell_contents = _copied(held, memo)
    if function.__defaults__ is not None:
        made.__defaults__ = tuple([_copied(held, memo) for held in function.__defaults__])
    if function.__kwdefaults__ is not None:
        named = function.__kwdefaults__.items()
        made.__kwdefaults__ = {name: _copied(held, memo) for name, held in named}
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    made.__doc__, made.__annotations__ = function.__doc__, function.__annotations__
    for name, held in vars(function).items():
        setattr(made, name, _copied(held, memo))
    return made


def _is_part(held: Any, memo: dict) -> bool:
    """Whether ``held`` has a copy, is a method of a module that has one, or is a tensor that can be
    copied.

    Modules of other models, such as a teacher, have none: a step that uses one is refused.
    """
    if id(held) in memo:
        return True
    if isinstance(held, MethodType):
        return isinstance(held.__self__, nn.Module) and id(held.__self__) in memo
    if isinstance(held, nn.Module | nn.Parameter):
        return False
    return isinstance(held, Tensor) and (held.is_leaf or not held.requires_grad)


def _holds_parts(value: Any, memo: dict, seen: set[int]) -> bool:
    """Whether ``value`` is a part of the model, or holds one: a function in its closure, its
    defaults and its attributes, a list in its items.

    ``seen``: what has been asked already, by ``id``.
    """
    if _is_part(value, memo):
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    held = held_by(value) if isinstance(value, FunctionType) else inside_of(value)
    return any(_holds_parts(item, memo, seen) for item in held)


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
