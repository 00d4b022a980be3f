"""Compares two answers, however they are written, and finds the first place where they differ, in
exact numbers.

An answer is a number, text, a tensor, or lists, tuples, dicts and sets of those. Python numbers,
numpy scalars and 0-d tensors count as the same kind; so do lists, tuples and shapes, and tensors
and arrays of any dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import numpy
import torch

_is_tensor = torch.is_tensor


@dataclass(frozen=True)
class Measured:
    """What some code returned, its peak of live bytes, and its budget (both in bytes). ``says``:
    the sentence for too many bytes.
    """

    value: Any
    peak: int
    budget: int
    says: str

    @property
    def over(self) -> int:
        """Bytes over the budget; 0 when it fits."""
        return max(0, self.peak - self.budget)


@dataclass(frozen=True)
class Difference:
    """The first place where an answer departs from the expected one.

    ``path`` names the place, from the outside in. ``said`` shows the expected value, ``hinted``
    keeps it back.
    """

    path: tuple[Any, ...]
    said: str
    hinted: str


def difference(got: Any, expected: Any, tolerance: float = 1e-5) -> Difference | None:
    """The first difference between two answers, or ``None``. Whole numbers must be equal;
    ``tolerance`` is relative and holds for floats, for a tensor relative to the largest expected
    entry.
    """
    if isinstance(got, Measured) and isinstance(expected, Measured):
        return _measured_difference(got, expected, tolerance)

    got, expected = plain(got), plain(expected)
    if _is_tensor(expected) and isinstance(got, tuple):
        got = _as_tensor(got)
    if _is_tensor(got) and isinstance(expected, tuple):
        got = plain(got.tolist())

    if isinstance(expected, Real) and isinstance(got, Real):
        if _equal_numbers(got, expected, tolerance):
            return None
        return _number_difference(got, expected)
    if _is_tensor(expected) and _is_tensor(got):
        return _tensor_difference(got, expected, tolerance)
    if isinstance(expected, dict) and isinstance(got, dict):
        return _dict_difference(got, expected, tolerance)
    if isinstance(expected, tuple) and isinstance(got, tuple):
        return _tuple_difference(got, expected, tolerance)
    return _other_difference(got, expected)


def _measured_difference(got: Measured, expected: Measured, tolerance: float) -> Difference | None:
    found = difference(got.value, expected.value, tolerance)
    # Within the budget, any peak is accepted. Beyond it, the exact peak tells one mistake from
    # another.
    same_peak = got.over == expected.over == 0 or got.peak == expected.peak
    if found is None and not same_peak:
        return Difference((), got.says, got.says)
    return found


def _other_difference(got: Any, expected: Any) -> Difference | None:
    """For text, which may be written in other letters, and for values of different kinds."""
    if isinstance(expected, str) and isinstance(got, str):
        same = got.strip().casefold() == expected.strip().casefold()
    else:
        same = isinstance(expected, type(got)) and bool(got == expected)
    if same:
        return None
    return _plain_difference(describe(got), describe(expected))


def shortened(text: str, most: int) -> str:
    """``text``, cut at ``most`` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def describe(value: Any) -> str:
    """A few words for any value: the same words on every run, so never its address, and few for a
    long one.
    """
    return shortened(_describe(value), 80)


def _describe(value: Any) -> str:
    value = plain(value)
    if value is None or isinstance(value, (bool, torch.dtype, torch.device)):
        return str(value)
    if isinstance(value, Real):
        return _describe_number(value)
    if isinstance(value, str):
        return repr(shortened(value, 40))
    if _is_tensor(value):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, frozenset)):
        return _describe_several(value)
    return f"a value of type {type(value).__name__}"


def _describe_several(value: tuple | frozenset) -> str:
    if len(value) > 12 or any(map(_is_tensor, value)):
        return f"a sequence of length {len(value)}"
    words = map(_describe, value)
    if isinstance(value, frozenset):
        words = sorted(words)
    return f"[{', '.join(words)}]"


def _describe_number(value: Real) -> str:
    if isinstance(value, Integral):
        return f"{int(value):,}"
    value = float(value)
    if abs(value) < 1e15 and value.is_integer():
        return f"{value:,.0f}"
    return f"{value:,.1f}" if 1e6 <= abs(value) < 1e15 else f"{value:.6g}"


def plain(value: Any) -> Any:
    """The one form under which different spellings of a value are compared."""
    if isinstance(value, (numpy.generic, numpy.ndarray)):
        value = _as_tensor(value)
    if _is_tensor(value):
        if value.is_meta:
            return f"a tensor without numbers, of shape {tuple(value.shape)}"
        value = value.detach().to_dense().cpu()
        return value.item() if value.ndim == 0 else value
    if isinstance(value, (list, tuple)):
        return tuple(value)
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    if isinstance(value, int) and type(value) not in (int, bool):
        value = int(value)  # a subclass may compare as it likes
    # no float is as large, and floats are compared
    if type(value) is int and abs(value) >= 2**1024:
        value = math.inf if value > 0 else -math.inf
    if isinstance(value, Mapping):
        value = dict(value)
    return value


def plain_int(value: Any) -> Any:
    """``plain(value)``, and a whole number as an ``int``, however it is written: 4.0 too."""
    value = plain(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _as_tensor(value: Any) -> Any:
    """A tensor of nested numbers, or ``value`` itself when it is not that."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return value


def _equal_numbers(got: Real, expected: Real, tolerance: float) -> bool:
    if isinstance(expected, Integral):
        # 1e-12 forgives float arithmetic on the way to a whole number, and is under half a byte up
        # to 500 GB.
        return got == expected or (
            not isinstance(got, Integral) and math.isclose(got, expected, rel_tol=1e-12)
        )
    if math.isnan(expected):
        return math.isnan(got)
    return math.isclose(got, expected, rel_tol=tolerance, abs_tol=1e-12)


def _number_difference(got: Real, expected: Real) -> Difference:
    shown, wanted = describe(got), describe(expected)
    if isinstance(expected, bool):  # True and False have no size
        return _plain_difference(shown, wanted)
    if shown == wanted:
        shown, wanted = repr(got), repr(expected)
    size = "is too large"
    if math.isnan(got):
        size = "is not a number"
    elif got < expected:
        size = "is too small"
    return Difference((), f"got {shown}, expected {wanted}", f"{shown} {size}")


def _plain_difference(got: str, expected: str) -> Difference:
    return Difference((), f"got {got}, expected {expected}", f"{got} is not it")


def _tensor_difference(got, expected, tolerance: float) -> Difference | None:
    if got.shape != expected.shape:
        return _plain_difference(describe(got), describe(expected))
    ours, theirs = expected.to(torch.float64), got.to(torch.float64)
    slack = 0.0
    if expected.is_floating_point() and expected.numel():
        slack = tolerance * (ours.nan_to_num().abs().max().item() or 1.0)
    far = ~torch.isclose(theirs, ours, rtol=0.0, atol=slack, equal_nan=True)
    if not far.any():
        return None
    index = far.nonzero()[0].tolist()
    found = _number_difference(theirs[tuple(index)].item(), ours[tuple(index)].item())
    return replace(found, path=(f"at index {index}",))


def _dict_difference(got: dict, expected: dict, tolerance: float) -> Difference | None:
    for key in expected:
        if key not in got:
            return Difference((key,), "it is missing", "it is missing")
    for key in got:
        if key not in expected:
            return Difference((key,), "this name was not asked for", "this name was not asked for")
    return _first(((key, got[key], expected[key]) for key in expected), tolerance)


def _tuple_difference(got: tuple, expected: tuple, tolerance: float) -> Difference | None:
    if len(got) != len(expected):
        return _plain_difference(describe(got), describe(expected))
    return _first(((f"item {i}", got[i], expected[i]) for i in range(len(expected))), tolerance)


def _first(pairs: Iterable[tuple[Any, Any, Any]], tolerance: float) -> Difference | None:
    for place, got, expected in pairs:
        found = difference(got, expected, tolerance)
        if found is not None:
            return replace(found, path=(place, *found.path))
    return None
