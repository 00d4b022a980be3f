"""A faster fake mode: it caches what an operator returned for the same kind of arguments.

PyTorch's fake tensors compute the shape of every result, which takes most of a tenth of a
millisecond. A model's layers need the same results over and over. Here a result's description
(shape, strides, dtype, storage) is cached under a key that is cheap to compute. Every answer comes
from PyTorch, or from ``corrections.py``.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .. import compat
from ..compat import FakeTensor, storage_key
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


class QuickFakeMode(compat.WithoutDynamoGuard, compat.FakeTensorMode):
    """A ``FakeTensorMode`` with a cache. Every result is an ordinary ``FakeTensor``.

    Where PyTorch's fake result differs from that of the real kernels of ``target``, it is corrected
    (see ``corrections.py``). ``value`` is what ``.item()`` returns; with ``None``, as at the
    beginning, ``.item()`` raises an error.
    """

    def __init__(self, target: str | None = None):
        super().__init__(allow_non_fake_inputs=True)
        self._corrections = corrections.BY_TARGET.get(target, {})
        self.value: float | None = None
        self._fake_attributes: dict[torch.device, dict] = {}
        self._answers = answers_by_settings.setdefault((target, _settings()), {})
        if len(self._answers) > MAX_ANSWERS:
            self._answers.clear()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is compat.read_device and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if func is compat.read_value and self.value is not None:
            return self.value
        key = self._key(func, args, kwargs or {})
        if (replay := self._answers.get(key)) is not None:
            return replay(self, args)
        if func in compat.profiler_marks:
            return func(*args, **kwargs or {})  # a profiler's mark, without tensors
        out = self._compute(func, types, args, kwargs or {})
        other_parameter = any(type(value) is torch.nn.Parameter for value in args)
        if other_parameter or (isinstance(out, Tensor) and out.layout != torch.strided):
            what = "another module's parameter"
            if not other_parameter:
                what = f"a result of layout {out.layout}"
            raise CannotTrace(
                f"{func} has {what}: give one module with all parameters, and sparse=False"
            )
        real_tensor = Tensor in map(type, args) and func is not torch.ops.aten.lift_fresh.default
        if real_tensor and any(r.alias_info is not None for r in compat.returns(func)):
            raise CannotTrace(f"{func} has {REAL_TENSOR}")
        if func in self._corrections:
            out = self._corrections[func](args, out)
        if (replay := None if key is None else _make_replay(func, args, out)) is not None:
            self._answers[key] = replay
        return out

    def fake(self, inside: Tensor, device: torch.device) -> FakeTensor:
        """A fake tensor on ``device`` around ``inside``.

        It gets the attributes of the first fake tensor on that device.
        """
        if device not in self._fake_attributes:
            first = FakeTensor(self, inside, device)
            self._fake_attributes[device] = dict(vars(first))
            return first
        return compat.fast_fake_tensor(inside, device, self._fake_attributes[device])

    def _compute(self, func, types, args, kwargs):
        """Compute the result by PyTorch.

        Its fake of ``grouped_mm`` takes only bf16; the kernels return the same shape for any dtype.
        """
        # PyTorch's cache would keep the first storage
        self.cache_enabled = func not in compat.set_storage
        if func is not compat.grouped_mm or args[0].dtype == torch.bfloat16:
            return super().__torch_dispatch__(func, types, args, kwargs)
        narrow = [
            a.bfloat16() if type(a) is FakeTensor and a.is_floating_point() else a for a in args
        ]
        return super().__torch_dispatch__(func, types, narrow, kwargs).to(args[0].dtype)

    def _key(self, func, args, kwargs) -> tuple | None:
        """A key of all that the result depends on.

        ``None`` if it depends on more than this function reads.
        """
        parts: list = [func, torch.is_grad_enabled()]
        for value in (*args, *kwargs.items()):
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self or value.constant is not None or value.is_complex():
                    return None  # of another mode, or one that knows its values
                parts += (
                    value.shape,
                    value.stride(),
                    value.dtype,
                    value.storage_offset(),
                    value.requires_grad,
                    value.fake_device,
                )
            elif kind in (list, tuple):
                kinds = tuple([type(item) for item in value])
                if not _PLAIN.issuperset(kinds):
                    return None
                parts += (kinds, tuple(value))
            elif kind in _PLAIN:
                parts += (kind, value)  # 1, 1.0 and True are equal, but mean different things
            else:
                return None
        return tuple(parts)


def _make_replay(func, args, out) -> Replay | None:
    """A function that builds ``out`` for later calls; ``None`` if there is no safe way."""
    if any(
        a.alias_info is not None and a.alias_info.is_write for a in compat.schema(func).arguments
    ):
        # A write does not change a fake tensor, unless it changes the shape or the storage
        # (resize_, squeeze_, set_, ...).
        same = args and out is args[0] and torch.Tag.inplace_view not in func.tags
        return (lambda mode, args: args[0]) if same else None
    if type(out) not in (tuple, list):
        return _replay_tensor(out, args)
    kind, parts = type(out), [_replay_tensor(one, args) for one in out]
    storages = [storage_key(one.untyped_storage()) for one in out if isinstance(one, Tensor)]
    if None in parts or len(set(storages)) < len(storages):
        return None
    return lambda mode, args: kind([part(mode, args) for part in parts])


def _replay_tensor(out, args) -> Replay | None:
    """The same for a single result: a new tensor, a view of an argument, an int or ``None``."""
    if out is None or type(out) is int:
        return lambda mode, args: out
    if (
        type(out) is not FakeTensor
        or out.constant is not None
        or out.requires_grad
        or out.is_complex()
    ):
        return None
    if any(out is value for value in args):
        return None
    offset, shape, stride, dtype = out.storage_offset(), out.shape, out.stride(), out.dtype
    device, storage = out.fake_device, out.untyped_storage()
    keys = [storage_key(a.untyped_storage()) if type(a) is FakeTensor else None for a in args]
    if storage_key(storage) in keys:
        of = keys.index(storage_key(storage))

        def view(mode, args):
            inside = torch.empty(0, dtype=dtype, device="meta")
            return mode.fake(inside.set_(args[of].untyped_storage(), offset, shape, stride), device)

        return view

    def new(mode, args):
        return mode.fake(torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)

    return (
        None
        if offset or storage.nbytes() != new(out.fake_mode, ()).untyped_storage().nbytes()
        else new
    )
