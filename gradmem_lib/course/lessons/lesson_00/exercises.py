"""Lesson 00's one exercise: the bytes of one tensor, the sum that every other sum in the course is
made of.
"""

import math
from collections.abc import Sequence

from ...judge.exercise import Exercise, calls

# 0.1


def tensor_bytes(shape: Sequence[int], bytes_per_element: int) -> int:
    """Bytes of a dense tensor of ``shape``: its number of elements times the bytes of one."""
    return math.prod(shape) * bytes_per_element


BYTES = Exercise(
    "0.1",
    tensor_bytes,
    # The empty shape is a single number, and a side of 0 leaves no elements at all. Float32 cannot
    # write the product of the two odd sides. Nothing is too large to be made, as a tensor, on the
    # way to its bytes.
    calls(
        *(((2, 3), 4), ((1024,), 2), ((8, 128, 256), 2), ((), 4), ((0, 5), 4), ((4099, 4097), 1)),
        hidden=[((5, 3, 7, 2), 8)],
    ),
    """
    math.prod(shape) * bytes_per_element → 8 * math.prod(shape) * bytes_per_element
        this counts bits: a byte is 8 of them, and the element size is in bytes already.
    math.prod(shape) * bytes_per_element → math.prod(shape)
        this counts elements: each of them takes bytes_per_element bytes.
    math.prod(shape) → sum(shape)
        this adds the sides of the shape: a 2 × 3 tensor has 6 elements, not 5.
    math.prod(shape) → 0
        this is always 0: a product that starts at 0 stays 0, so start from 1.
    math.prod(shape) → shape[0] * shape[1]
        this multiplies exactly two sides: a shape may have one, three or none.
    * bytes_per_element → + bytes_per_element
        this adds bytes_per_element to the number of elements: multiply by it.
    """,
)
