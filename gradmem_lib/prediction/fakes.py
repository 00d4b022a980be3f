"""A faster fake mode: it caches what an operator returned for the same kind of arguments.

PyTorch's fake tensors compute the shape of every result, which takes most of a tenth of a
millisecond. A model's layers need the same results over and over. Here a result's description
(shape, strides, dtype, storage) is cached under a key that is cheap to compute. Every answer comes
from PyTorch, or from ``corrections.py``.
"""

import operator
from collections.abc import Callable, MutableMapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..compat import operators
from ..compat.dispatch_modes import WithoutDynamoGuard, without_modes
from ..compat.fake_tensors import FakeTensor, FakeTensorMode, fast_fake_tensor
from ..compat.tensors import is_zero_tensor, storage_key
from ..measure.storages import tensors_in
from ..techniques.second_run import version_of
from . import corrections
from .question import CannotTrace

MAX_ANSWERS = 20_000
REAL_TENSOR = (
    "a real tensor that is not a parameter, buffer or batch entry: put it into batch=, or into the "
    "module as a buffer"
)
_PLAIN = {
    int,
    float,
    bool,
    type(None),
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
}
# from (mode, args), builds the cached result
Replay = Callable[["QuickFakeMode", tuple], object]
# Caches of answers, by what stays the same during a trace: its target and the global settings.
# Every answer may be dropped at any time.
answers_by_settings: dict[tuple, dict[tuple | None, Replay]] = {}


def _settings() -> tuple:
    """The settings of the whole process that change what operators return."""
    cuda = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        str(torch.get_default_device()),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )


UNIFORM = "random numbers from 0 to below 1"


def _uniform(mode: "QuickFakeMode", args: tuple) -> str:
    return UNIFORM


def _comparison(compare: Callable[[float, float], bool]) -> Callable:
    """Whether all random numbers are above a bound, as where a module drops itself with
    probability 0. A draw of exactly 0 is left out of account.
    """

    def known(mode: "QuickFakeMode", args: tuple) -> bool | None:
        number, bound = args
        if mode.known_of(number) != UNIFORM or 0 < bound < 1:
            return None
        return compare(0.5, bound)

    return known


def _are_true(mode: "QuickFakeMode", args: tuple) -> bool:
    """Whether the arguments of a distribution are valid: those of a training that works are."""
    return True


_aten = torch.ops.aten
_KNOWN_VALUES: dict[Any, Callable] = {
    _aten.rand.default: _uniform,
    _aten.gt.Scalar: _comparison(operator.gt),
    _aten.ge.Scalar: _comparison(operator.ge),
    _aten.lt.Scalar: _comparison(operator.lt),
    _aten.le.Scalar: _comparison(operator.le),
    operators.all_are_true: _are_true,
}


# Operators that make a range, from numbers alone: its values are known without any tensor.
_RANGES = {_aten.arange.default, _aten.arange.start, _aten.arange.start_step}
# Longer ranges stay without values. Short ones are such as the dimensions that a loss is summed
# over; positions of tokens are more.
LONGEST_KNOWN_RANGE = 8
# One set, since every operator is looked up in it.
_MAY_TELL_VALUES = _KNOWN_VALUES.keys() | _RANGES


class QuickFakeMode(WithoutDynamoGuard, FakeTensorMode):
    """A ``FakeTensorMode`` with a cache. Every result is an ordinary ``FakeTensor``.

    Where PyTorch's fake result differs from that of the real kernels of ``target``, it is corrected
    (see ``corrections.py``). ``value`` is what ``.item()`` returns; with ``None``, as at the
    beginning, ``.item()`` raises an error.
    """

    def __init__(self, target: str | None = None):
        super().__init__(allow_non_fake_inputs=True)
        self._corrections = corrections.by_target(target)
        self.value: float | None = None
        # What is known of tensors without their values: UNIFORM, or the one value in them; and the
        # version of the tensor, which a change in place counts.
        self._known: MutableMapping[Tensor, tuple[Any, int]] = WeakTensorKeyDictionary()
        self._fake_attributes: dict[torch.device, dict] = {}
        self._answers = answers_by_settings.setdefault((target, _settings()), {})
        if len(self._answers) > MAX_ANSWERS:
            self._answers.clear()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is operators.read_device and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if func is operators.read_value:
            value = self._known_value(args[0])
            if value is not None:
                return value
        if func in _MAY_TELL_VALUES:
            return self._compute_known(func, types, args, kwargs or {})
        key = self._key(func, args, kwargs or {})
        if (replay := self._answers.get(key)) is not None:
            return replay(self, args)
        if func in operators.profiler_marks:
            return func(*args, **kwargs or {})  # a profiler's mark, without tensors
        out = self._compute(func, types, args, kwargs or {})
        self._refuse(func, args, out)
        for correct in self._corrections.get(func, ()):
            out = correct(args, out)
        if key is not None:
            self._remember(key, func, args, out)
        return out

    def _remember(self, key: tuple, func: Any, args: tuple, out: Any) -> None:
        """Keep a way to build ``out`` again, if there is a safe one."""
        replay = _make_replay(func, args, out)
        if replay is not None:
            self._answers[key] = replay

    def known_of(self, tensor: Tensor) -> Any:
        """What is known of ``tensor``; ``None`` if nothing is, or if it was changed since."""
        known, version = self._known.get(tensor, (None, 0))
        if version != version_of(tensor):
            return None
        return known

    def _known_value(self, tensor: Tensor) -> Any:
        """The value of a one-element tensor; ``None`` if it is not known."""
        known = self.known_of(tensor)
        return known if isinstance(known, bool) else self.value

    def _refuse(self, func: Any, args: tuple, out: Any) -> None:
        """Refuse operations on tensors that are no part of the module, and sparse results."""
        if any(type(value) is torch.nn.Parameter for value in args):
            raise CannotTrace(
                f"{func} has a parameter that is not in the module: give one module with all "
                "parameters, and none that only a function, a list or a global variable holds"
            )
        if isinstance(out, Tensor) and out.layout != torch.strided:
            raise CannotTrace(
                f"{func} has a result of layout {out.layout}, and only dense ones can be "
                "predicted: give sparse=False to a layer that has it, or measure one real step "
                "with MemoryTracker"
            )
        real_tensor = Tensor in map(type, args) and func is not torch.ops.aten.lift_fresh.default
        if real_tensor and any(r.alias_info is not None for r in operators.returns(func)):
            raise CannotTrace(f"{func} has {REAL_TENSOR}")

    def _range(self, func, types, args, kwargs) -> FakeTensor:
        """A range. A short one has its numbers, which a module or a loss may read."""
        start, stop, step = 0, args[0], 1
        if len(args) > 1:
            start, stop = args[:2]
        if len(args) > 2:
            step = args[2]
        is_long = abs(stop - start) > LONGEST_KNOWN_RANGE * abs(step)
        # The numbers are made for real, and there may be no real card.
        on_card = str(kwargs.get("device") or "cpu") != "cpu"
        if is_long or on_card:
            return self._compute(func, types, args, kwargs)
        with without_modes():
            real = func(*args, **kwargs)
        return self.fake_tensor_converter.from_real_tensor(self, real, make_constant=True)

    def _compute_known(self, func, types, args, kwargs):
        """The result of an operation that may tell something about the values in it."""
        if func in _RANGES:
            return self._range(func, types, args, kwargs)
        out = self._compute(func, types, args, kwargs)
        known = _KNOWN_VALUES[func](self, args)
        if known is not None:
            self._known[out] = known, version_of(out)
        return out

    def fake(self, inside: Tensor, device: torch.device) -> FakeTensor:
        """A fake tensor on ``device`` around ``inside``.

        It gets the attributes of the first fake tensor on that device.
        """
        if device not in self._fake_attributes:
            first = FakeTensor(self, inside, device)
            self._fake_attributes[device] = dict(vars(first))
            return first
        return fast_fake_tensor(inside, device, self._fake_attributes[device])

    def _compute(self, func, types, args, kwargs):
        """Compute the result by PyTorch.

        Its fake of ``grouped_mm`` takes only bf16; the kernels return the same shape for any dtype.
        """
        # PyTorch's cache would keep the first storage. And it would give memory to zeros.
        has_zeros = any(is_zero_tensor(tensor) for tensor in tensors_in((args, kwargs)))
        self.cache_enabled = func not in operators.set_storage and not has_zeros
        if func is not operators.grouped_mm or args[0].dtype == torch.bfloat16:
            return super().__torch_dispatch__(func, types, args, kwargs)
        narrow = [
            a.bfloat16() if type(a) is FakeTensor and a.is_floating_point() else a for a in args
        ]
        return super().__torch_dispatch__(func, types, narrow, kwargs).to(args[0].dtype)

    def _key(self, func, args, kwargs) -> tuple | None:
        """A key of all that the result depends on.

        ``None`` if it depends on more than this function reads. Only a view depends on where in
        its storage an argument begins.
        """
        parts: list = [func, torch.is_grad_enabled()]
        reads_offset = _is_view(func)
        for value in (*args, *kwargs, *kwargs.values()):
            kind = type(value)
            if kind is FakeTensor:
                if not self._has_only_a_shape(value):
                    return None
                parts += _described(value, reads_offset)
            elif kind in (list, tuple):
                kinds = tuple([type(item) for item in value])
                if _PLAIN.issuperset(kinds):
                    parts += (kinds, tuple(value))
                    continue
                for item in value:  # as in torch.cat
                    if not self._has_only_a_shape(item):
                        return None
                    parts += _described(item, reads_offset)
                parts.append(kinds)
            elif kind in _PLAIN:
                parts += (kind, value)  # 1, 1.0 and True are equal, but mean different things
            else:
                return None
        return tuple(parts)

    def _has_only_a_shape(self, value: Any) -> bool:
        """Whether ``value`` is a tensor of this mode of which no value is known."""
        if type(value) is not FakeTensor or value.fake_mode is not self:
            return False
        if is_zero_tensor(value):
            return False  # operators treat such zeros differently from an ordinary tensor
        return value.constant is None and not value.is_complex()


def _described(tensor: FakeTensor, reads_offset: bool) -> tuple:
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.storage_offset() if reads_offset else 0,
        tensor.requires_grad,
        tensor.fake_device,
    )


@cache
def _is_view(func) -> bool:
    """Whether a result of ``func`` may be a view of an argument."""
    return any(
        r.alias_info is not None and not r.alias_info.is_write for r in operators.returns(func)
    )


def _make_replay(func, args, out) -> Replay | None:
    """A function that builds ``out`` for later calls; ``None`` if there is no safe way."""
    if any(
        a.alias_info is not None and a.alias_info.is_write for a in operators.schema(func).arguments
    ):
        # A write does not change a fake tensor, unless it changes the shape or the storage
        # (resize_, squeeze_, set_, ...).
        if torch.Tag.inplace_view in func.tags:
            return None
        if out is None:
            return lambda mode, args: None
        return (lambda mode, args: args[0]) if args and out is args[0] else None
    if type(out) not in (tuple, list):
        return _replay_tensor(out, args)
    kind, parts = type(out), [_replay_tensor(one, args) for one in out]
    tensors = [one for one in out if isinstance(one, Tensor)]
    new = [one for one in tensors if not any(_share_storage(one, value) for value in args)]
    if None in parts or len({storage_key(one.untyped_storage()) for one in new}) < len(new):
        return None  # each part would get a storage of its own
    return lambda mode, args: kind([part(mode, args) for part in parts])


def _replay_tensor(out, args) -> Replay | None:
    """The same for a single result: a new tensor, a view of an argument, an int or ``None``."""
    if out is None or type(out) is int:
        return lambda mode, args: out
    if type(out) is not FakeTensor or out.constant is not None:
        return None
    if out.requires_grad or out.is_complex() or any(out is value for value in args):
        return None
    if is_zero_tensor(out):
        return None  # one that is built again would be an ordinary tensor
    for value in args:
        if isinstance(value, (list, tuple)) and any(_share_storage(out, item) for item in value):
            return None  # a view of a tensor in a list, which has no place among the arguments
    for place, value in enumerate(args):
        if type(value) is FakeTensor and _share_storage(out, value):
            return _replay_view(out, args, place)
    return _replay_new(out)


def _share_storage(out: Tensor, value: Any) -> bool:
    if not isinstance(value, Tensor):
        return False
    return storage_key(out.untyped_storage()) == storage_key(value.untyped_storage())


def _replay_view(out: FakeTensor, args: tuple, place: int) -> Replay:
    """``out`` is a view of the argument at ``place``."""
    shape, stride, dtype, device = out.shape, out.stride(), out.dtype, out.fake_device
    # Counted from the argument's own beginning. Some operators, as _unsafe_view, do not declare
    # that they return a view, so their keys say nothing of where the argument begins.
    after = out.storage_offset() - args[place].storage_offset()

    def view(mode, args):
        whole = args[place]
        inside = torch.empty(0, dtype=dtype, device="meta")
        inside.set_(whole.untyped_storage(), whole.storage_offset() + after, shape, stride)
        return mode.fake(inside, device)

    return view


def _replay_new(out: FakeTensor) -> Replay | None:
    """``out`` has a storage of its own; ``None`` if it does not fill this storage."""
    shape, stride, dtype, device = out.shape, out.stride(), out.dtype, out.fake_device

    def new(mode, args):
        return mode.fake(torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)

    filled = new(out.fake_mode, ()).untyped_storage().nbytes()
    if out.storage_offset() or out.untyped_storage().nbytes() != filled:
        return None
    return new
