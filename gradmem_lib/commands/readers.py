"""Readers of what stands behind an option: each turns its text into a value, or refuses it in a
sentence (argparse's ``type=``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

from ..names import QUANTIZED
from ..rows import nearest_word
from ..units import parse_bytes


def size(text: str) -> int:
    """Bytes, such as ``8GiB``."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.strip().isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def rank(text: str) -> int:
    """A whole number of at least 0."""
    if not text.strip().isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def names(text: str) -> tuple[str, ...]:
    """Names with commas between them."""
    parts = [part.strip() for part in text.split(",")]
    return tuple(part for part in parts if part)


def dashed(name: str) -> str:
    """A name as a command line writes it: ``after-step`` for ``after step``."""
    return name.replace(" ", "-")


def one_of(known: Iterable[str], *, or_none: bool = False) -> Callable[[str], str | None]:
    """A reader of one of these names, also with dashes for spaces; ``or_none``: "none" is allowed,
    too.
    """
    values: dict[str, str | None] = {}
    for name in known:
        values[dashed(name)] = name
    allowed = list(values)
    if or_none:
        allowed.append("none")

    def read(text: str) -> str | None:
        if or_none and _is_none(text):
            return None
        if text not in known and text not in values:
            near = nearest_word(text, values)
            if near is not None:
                raise argparse.ArgumentTypeError(f"{text!r} is not known: did you mean {near}?")
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(allowed)}")
        return values[dashed(text)]

    return read


def attention(text: str) -> str | None:
    """``none``, or a name, which ``Recipe`` checks: kernels have many."""
    return None if _is_none(text) else text


def storage(text: str) -> str | bool:
    """How a base in few bits is stored; the option alone is ``True``."""
    if text in QUANTIZED:
        return text
    near = nearest_word(text, QUANTIZED)
    meant = f"did you mean {near}?" if near else f"choose one of {', '.join(QUANTIZED)}"
    raise argparse.ArgumentTypeError(
        f"{text!r} is no way to store weights: {meant} If it is the model, give it first"
    )


def schedule(text: str) -> str | int | list[int] | None:
    """``none``; ``4`` for segments of four layers; ``4,3,2`` for a list of them; or a name, which
    ``Recipe`` checks.
    """
    if _is_none(text):
        return None
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        return text
    if len(parts) == 1:
        return int(text)
    return [int(part) for part in parts]


def _is_none(text: str) -> bool:
    return text in ("none", "None")
