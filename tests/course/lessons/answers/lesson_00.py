"""Answers to the exercise of lesson 00 as people write them: right ones in several forms, wrong
ones with what helps them.

``WRONG[id][name]`` is the answer and a pattern: what a message about it must say.
"""

import math
from functools import reduce

import numpy as np
import torch

RIGHT, WRONG = {}, {}

RIGHT["0.1"] = {
    "reduce": lambda shape, size: reduce(lambda a, b: a * b, shape, size),
    "numpy": lambda shape, size: np.prod(shape, dtype=np.int64) * size,
    "a meta tensor": lambda shape, size: (
        torch.empty(shape, dtype=torch.int8, device="meta").numel() * size
    ),
}
WRONG["0.1"] = {
    "8 bytes": (lambda shape, size: math.prod(shape) * 8, r"`bytes_per_element` has no effect"),
    "first side": (lambda shape, size: shape[0] * size, "any number of sides"),
    "last side": (lambda shape, size: (shape[-1] if shape else 1) * size, "only the last side"),
    "all but the first": (
        lambda shape, size: math.prod(shape[1:]) * size,
        "first side is left out",
    ),
    "max": (lambda shape, size: max(shape) * size, r"shape|sides"),
    "square": (
        lambda shape, size: math.prod(shape) * size**2,
        r"twice the `bytes_per_element`|too large",
    ),
    "kilobytes": (
        lambda shape, size: math.prod(shape) * size / 1024,
        r"1,024 times too small",
    ),
    "a tuple": (lambda shape, size: (math.prod(shape), size), "return one number"),
    "bits": (lambda shape, size: math.prod(shape) * size * 8, "bits"),
}
WRONG["0.1"] |= {
    "int32": (
        lambda shape, size: int(
            np.prod(np.array(shape, np.int32), dtype=np.int32) * np.int32(size)
        ),
        "wrapped around",
    ),
    "int32, as a tensor": (
        lambda shape, size: torch.tensor(shape).prod(dtype=torch.int32).item() * size,
        "wrapped around",
    ),
    "float32": (
        lambda shape, size: int(torch.tensor(shape).float().prod().item() * size),
        "float32 holds 24 bits",
    ),
}
RIGHT["0.1"] |= {
    "int64, as a tensor": lambda shape, size: torch.tensor(shape, dtype=torch.int64).prod() * size,
    "float64": lambda shape, size: np.prod(np.array(shape, float)) * size,
    "an untouched tensor": lambda shape, size: torch.empty(shape, dtype=torch.int8).numel() * size,
    "torch.Size": lambda shape, size: torch.Size(shape).numel() * size,
}


def _unpacks_two(shape, size):
    rows, columns = shape
    return rows * columns * size


def _returns_in_the_loop(shape, size):
    total = 1
    for side in shape:
        total *= side
        return total * size  # one level too deep
    return None


WRONG["0.1"] |= {
    "unpacks two": (_unpacks_two, "any number of sides"),
    "returns in the loop": (_returns_in_the_loop, "only the first side"),
    "all but the last": (
        lambda shape, size: math.prod(shape[:-1]) * size,
        "the last side is left out",
    ),
    "added": (lambda shape, size: math.prod(shape) + size, "this adds bytes_per_element"),
    "the number of sides": (lambda shape, size: len(shape) * size, "counts the sides"),
}
