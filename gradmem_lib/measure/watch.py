"""A dispatch mode that passes on every operation, as the tracker of lesson 01 does."""

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ..compat import operators
from ..compat.collectives import collectives, run_collective_synchronously
from ..compat.dispatch_modes import TorchDispatchMode, WithoutDynamoGuard
from ..compat.fake_tensors import FakeTensor
from .storages import own_storage, tensors_in


class Watch(WithoutDynamoGuard, TorchDispatchMode):
    """Passes every dispatched operation to ``observe(func, args, kwargs, out)`` after it
    has run.
    """

    supports_higher_order_operators = True

    def __init__(self, observe: Callable[[Any, tuple, dict | None, Any], None]):
        super().__init__()
        self._observe = observe

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is operators.read_device and type(args[0]) is FakeTensor:
            return args[0].fake_device  # a real run does not have this operation
        if types and any([_wraps(kind, args, kwargs) for kind in types]):
            # DTensors and quantized tensors next dispatch operations on the tensors inside
            return NotImplemented
        run = operator_of(func).run
        out = run(*args, **kwargs) if kwargs else run(*args)
        try:
            self._observe(func, args, kwargs, out)
        except torch.OutOfMemoryError as refused:
            # A card would not have made the result. Whoever keeps the error must not keep it.
            traceback.clear_frames(refused.__traceback__)
            del out, args, kwargs
            raise
        return out


class Operator(NamedTuple):
    """What is known of an operator.

    ``func``: the operator itself. While it is held here, no other one can get its address, which is
    the key. ``run``: what runs it. ``aliases``: it returns an argument or a view of one.

    ``takes_part``: of some rows, columns or blocks of its first argument.

    Two kinds of operators allocate no storage. ``only_views``: all that it returns are views of its
    first argument, and it writes nothing. ``in_place``: it writes into its first argument, and
    returns only this.
    """

    func: Any
    run: Callable
    aliases: bool
    takes_part: bool
    only_views: bool
    in_place: bool


_operators: dict[int, Operator] = {}  # by address: an operator's hash is slow


def operator_of(func: Any) -> Operator:
    """What is known of the operator ``func``."""
    known = _operators.get(id(func))
    if known is None:
        known = _operators[id(func)] = _look_at(func)
    return known


def _look_at(func: Any) -> Operator:
    run = getattr(func, operators.KERNEL, func)
    if func in collectives:
        run = partial(run_collective_synchronously, func)
    aliases = [result.alias_info for result in operators.returns(func)]
    views = [alias for alias in aliases if alias is not None and not alias.is_write]
    return Operator(
        func,
        run,
        aliases=any(alias is not None for alias in aliases),
        takes_part=func in operators.parts_of_a_tensor,
        only_views=len(views) == len(aliases) > 0,
        in_place=len(aliases) == 1 and operators.writes_first_argument(func),
    )


_wrappers: dict[type, bool] = {}


def _wraps(kind: type, args: tuple, kwargs: dict | None) -> bool:
    """Whether tensors of this type are wrappers, with a size but no bytes of their own."""
    if kind not in _wrappers:
        for tensor in tensors_in((args, kwargs or {})):
            if tensor.numel() and type(tensor) is kind:
                _wrappers[kind] = own_storage(tensor) is None
    return _wrappers.get(kind, False)
