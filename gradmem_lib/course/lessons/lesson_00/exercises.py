"""Lesson 00's one exercise: the bytes of one tensor, the sum that every other sum in the course is
made of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...judge.exercise import Exercise, Mistake, calls


def tensor_bytes(shape: Sequence[int], bytes_per_element: int) -> int:
    """Bytes of a dense tensor of ``shape``: its number of elements times the bytes of one."""
    return math.prod(shape) * bytes_per_element


def _in_bits(shape, bytes_per_element):
    return math.prod(shape) * bytes_per_element * 8


def _elements_only(shape, bytes_per_element):
    return math.prod(shape)


def _sum_of_sides(shape, bytes_per_element):
    return sum(shape) * bytes_per_element


def _product_from_zero(shape, bytes_per_element):
    total = 0
    for side in shape:
        total *= side
    return total * bytes_per_element


def _two_sides(shape, bytes_per_element):
    return shape[0] * shape[1] * bytes_per_element


_MORE_THAN_32_BITS = (46_341, 46_349)  # odd sides, whose product float32 cannot write


def _explain(got, expected):
    wrong = [case for case in expected if got[case] != expected[case]]
    if wrong == [f"({_MORE_THAN_32_BITS}, 1)"]:
        return (
            "float32 holds 24 bits, too few for the bytes of a tensor this large: multiply whole "
            "numbers."
        )
    if wrong == ["((0, 5), 4)"]:
        return "a side of 0 leaves no elements: a tensor of shape (0, 5) takes no bytes."
    if wrong == ["((), 4)"]:
        return "the empty shape () is one number, and takes the bytes of one."
    sides = got["((2, 3), 4)"], got["((8, 128, 256), 2)"]
    if sides == (3 * 4, 256 * 2):
        return "this uses only the last side: multiply all of them."
    if sides == (3 * 4, 128 * 256 * 2):
        return "the first side is left out: multiply all of them."
    if sides == (2 * 4, 8 * 2):
        return (
            "this uses only the first side: multiply all of them (is the `return` inside of the "
            "loop?)."
        )
    if sides == (2 * 4, 8 * 128 * 2):
        return "the last side is left out: multiply all of them."
    return _why_this_sum(sides)


def _why_this_sum(sides) -> str | None:
    """What is said of two results: of (2, 3) with 4 bytes, and of (8, 128, 256) with 2."""
    if sides == (2 * 3 + 4, 8 * 128 * 256 + 2):
        return "this adds bytes_per_element to the number of elements: multiply by it."
    if sides == (2 * 4, 3 * 2):
        return "this counts the sides of the shape: multiply their lengths."
    return None


EXERCISES = (
    Exercise(
        id="0.1",
        title="the bytes of one tensor",
        difficulty=1,
        minutes=2,
        trains="turning a shape and a dtype into bytes",
        reference=tensor_bytes,
        # The empty shape is a single number, and a side of 0 leaves no elements at all.
        observe=calls(
            *(((2, 3), 4), ((1024,), 2), ((8, 128, 256), 2), ((), 4), ((0, 5), 4)),
            (_MORE_THAN_32_BITS, 1),
            hidden=(((5, 3, 7, 2), 8), ((6, 1), 1)),
        ),
        explain=_explain,
        raises=(
            (
                "IndexError|empty|values to unpack",
                "a shape may have any number of sides, none, one or three: go through all of them.",
            ),
            (
                "allocate memory|not enough memory",
                (
                    "this makes the tensor itself, and a shape may be larger than your memory: "
                    "multiply its sides, or make it on the meta device."
                ),
            ),
        ),
        mistakes=(
            Mistake(
                "bits",
                _in_bits,
                "this counts bits: a byte is 8 of them, and the element size is in bytes already.",
            ),
            Mistake(
                "elements only",
                _elements_only,
                "this counts elements: each of them takes bytes_per_element bytes.",
            ),
            Mistake(
                "sum of the sides",
                _sum_of_sides,
                "this adds the sides of the shape: a 2 × 3 tensor has 6 elements, not 5.",
            ),
            Mistake(
                "a product that starts at 0",
                _product_from_zero,
                "this is always 0: a product that starts at 0 stays 0, so start from 1.",
            ),
            Mistake(
                "two sides",
                _two_sides,
                "this multiplies exactly two sides: a shape may have one, three or none.",
            ),
        ),
    ),
)
