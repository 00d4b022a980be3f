"""Sizes as text: one function that reads "2 GiB", and one that writes it."""

import re
from typing import Any, TypeGuard

KiB, MiB, GiB, TiB = (1024**n for n in (1, 2, 3, 4))
_FACTORS = {"b": 1, "kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB}
_FACTORS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(
    r"(?i)\s*([0-9][0-9_]*(?:,[0-9]{3})*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*"
)


def parse_bytes(size: int | float | str) -> int:
    """The bytes of ``size``, which is a number of bytes or text.

    Text may be ``"2 GiB"``, ``"500 MB"`` or ``"1.5e9"``.

    Units: B, KB/MB/GB/TB (powers of 1000) and KiB/MiB/GiB/TiB (powers of 1024), in any letter case.
    Raises ``ValueError`` for anything else, zero and negative numbers included.
    """
    amount: Any = size
    factor: Any = 1
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        factor = _FACTORS.get((match[2] or "b").lower()) if match else None
        amount = float(re.sub("[_,]", "", match[1])) if factor else None
    if (
        not isinstance(amount, (int, float))
        or isinstance(amount, bool)
        or not 0 < amount * factor < 2**63
    ):
        raise ValueError(
            f"cannot read {size!r} as a number of bytes: give a positive number of bytes, such as "
            "2147483648, or a number "
            'with a unit, such as "2 GiB" (units: B, KB, MB, GB, TB in powers of 1000; KiB, MiB, '
            "GiB, TiB in powers of 1024)"
        )
    return round(amount * factor)


def format_bytes(nbytes: int) -> str:
    """``nbytes`` for people, in powers of 1024: ``"512 B"``, ``"1.50 GiB"``."""
    for unit, factor in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes} B"


def is_positive_int(value: Any) -> TypeGuard[int]:
    """Whether ``value`` is an int of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_positive_int(name: str, value: Any, example: int, what: str = "") -> int:
    """Return ``value`` if it is an int of at least 1; else raise a ``ValueError``.

    The error names the argument (``name``), what it counts (``what``) and an ``example``.
    """
    if not is_positive_int(value):
        of = f" of {what}, at least 1" if what else " of at least 1"
        raise ValueError(f"{name}={value!r}: give a whole number{of}, such as {name}={example}")
    return value
