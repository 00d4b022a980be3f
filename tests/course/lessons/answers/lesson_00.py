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
