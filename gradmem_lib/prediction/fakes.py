"""Fake tensors, quickly: what an operator returned for such arguments once, it returns again.

PyTorch's fake tensors work out the shape of every result, and take most of a tenth of a millisecond to do so. A model's
layers ask the same thing over and over. Here the answer (shape, strides, dtype, and whose storage it is) is kept under a
key that costs little to make. Whatever the key cannot describe goes PyTorch's own way, so this is a shortcut and no
second opinion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .. import compat

DEVICE = torch.ops.prim.device.default  # asked for some ten times an operation, by autograd
VALUE = torch.ops.aten._local_scalar_dense.default  # .item()
KEPT = 20_000
_PLAIN = frozenset(
    (int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format)
)
_known: dict[
    tuple, dict
] = {}  # by what is the same for a whole trace: corrections, and what is set around it


def settings() -> tuple:
    """What is set for the whole process and changes what operators return."""
    cuda = torch.backends.cuda
    return (
        torch.get_default_dtype(), str(torch.get_default_device()), torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled, cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
    )  # fmt: skip


def forget() -> None:
    """Drop all answers."""
    _known.clear()


class _New(NamedTuple):
    """A result with a storage of its own, as large as its shape and strides need."""

    shape: tuple
    stride: tuple
    dtype: torch.dtype
    device: torch.device


class _View(NamedTuple):
    """A result that lies in the storage of argument ``of``."""

    of: int
    shape: tuple
    stride: tuple
    offset: int
    dtype: torch.dtype
    device: torch.device


class _Plain(NamedTuple):
    value: int | None


class _Written(NamedTuple):
    """The first argument itself, written to, its form unchanged."""


class QuickFakeMode(FakeTensorMode):
    """``FakeTensorMode`` that remembers. Everything that comes out is an ordinary ``FakeTensor``.

    ``corrected(func, args, out)`` returns what the operator's real kernel returns where PyTorch's fake is wrong about it.
    ``value`` is what ``.item()`` returns; ``None``, as at the beginning, leaves that an error.
    """

    def __init__(self, corrected: Callable | None = None):
        super().__init__(allow_non_fake_inputs=True)
        self._corrected = corrected
        self.value: float | None = None
        self._answers = _known.setdefault((corrected, settings()), {})
        if len(self._answers) > KEPT:
            self._answers.clear()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard costs more than the work

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if func is VALUE and self.value is not None:
            return self.value
        key = self._key(func, args, kwargs)
        found = self._answers.get(key)
        if found is not None:
            if type(found) in (tuple, list):
                return type(found)([self._made(one, args) for one in found])
            return self._made(found, args)
        first = args[0] if args and type(args[0]) is FakeTensor else None
        before = first is not None and key is not None and _form(first)
        out = self._asked(func, types, args, kwargs or {})
        if self._corrected is not None:
            out = self._corrected(func, args, out)
        if key is not None and key not in self._answers:
            self._answers[key] = _noted(func, args, out, before)
        return out

    def _asked(self, func, types, args, kwargs):
        """PyTorch's own answer. Its fake of ``grouped_mm`` knows bf16 alone; the kernels return the same shape for any dtype."""
        if func is not compat.grouped_mm or args[0].dtype == torch.bfloat16:
            return super().__torch_dispatch__(func, types, args, kwargs)
        narrow = [a.bfloat16() if type(a) is FakeTensor and a.is_floating_point() else a for a in args]
        return super().__torch_dispatch__(func, types, narrow, kwargs).to(args[0].dtype)

    def _key(self, func, args, kwargs) -> tuple | None:
        """What the result depends on; ``None`` where that is more than is looked at here."""
        parts: list = [func]
        for value in args:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self or value.constant is not None or not _ordinary(value):
                    return None  # another mode's, or one that knows its values
                parts += (
                    value.shape, value.stride(), value.dtype, value.storage_offset(), value.requires_grad,
                    value.fake_device,
                )  # fmt: skip
            elif kind in (list, tuple):
                kinds = tuple([type(item) for item in value])
                if not _PLAIN.issuperset(kinds):
                    return None
                parts += (kinds, tuple(value))
            elif kind in _PLAIN:
                parts += (kind, value)  # 1, 1.0 and True are equal, and do not mean the same
            else:
                return None
        for name, value in (kwargs or {}).items():
            if type(value) not in _PLAIN:
                return None
            parts += (name, type(value), value)
        return tuple(parts)

    def _made(self, found, args):
        if type(found) is _New:
            shape, stride, dtype, device = found
            return FakeTensor(self, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)
        if type(found) is _View:
            of, shape, stride, offset, dtype, device = found
            inside = torch.empty(0, dtype=dtype, device="meta")
            inside.set_(args[of].untyped_storage(), offset, shape, stride)
            return FakeTensor(self, inside, device)
        return args[0] if type(found) is _Written else found.value


def _ordinary(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.dtype.is_complex


def _form(tensor: Tensor) -> tuple | None:
    if not _ordinary(tensor):
        return None
    storage = tensor.untyped_storage()
    return (
        tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset(), storage._cdata, storage.nbytes(),
    )  # fmt: skip


def _noted(func, args, out, before):
    """How to make ``out`` again; ``None`` where that is not known."""
    written = [a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if written:
        # Writing does not change a fake tensor, unless it changes its form (resize_, squeeze_, ...).
        first = len(written) == 1 and written[0] is func._schema.arguments[0] and args and out is args[0]
        return _Written() if first and before == _form(out) else None
    if type(out) in (tuple, list):
        parts = [_result(one, args) for one in out]
        own = [one.untyped_storage()._cdata for one, p in zip(out, parts, strict=True) if type(p) is _New]
        return None if None in parts or len(set(own)) < len(own) else type(out)(parts)
    return _result(out, args)


def _result(out, args):
    if out is None or type(out) is int:
        return _Plain(out)
    if type(out) is not FakeTensor or out.constant is not None or out.requires_grad or not _ordinary(out):
        return None
    if any(out is value for value in args):
        return None
    storage = out.untyped_storage()
    for i, value in enumerate(args):
        if type(value) is FakeTensor and value.untyped_storage()._cdata == storage._cdata:
            return _View(i, out.shape, out.stride(), out.storage_offset(), out.dtype, out.fake_device)
    dense = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="meta").untyped_storage()
    if out.storage_offset() or storage.nbytes() != dense.nbytes():
        return None
    return _New(out.shape, out.stride(), out.dtype, out.fake_device)
