"""Answers to lesson 00's exercise in unusual forms, and wrong ones that only one case catches."""

import math

import numpy as np
import torch


def one_by_one(shape, bytes_per_element):
    nbytes = 0
    for _ in np.ndindex(*shape):
        nbytes += bytes_per_element
    return nbytes


def makes_it(shape, bytes_per_element):
    dtypes = {1: torch.uint8, 2: torch.float16, 4: torch.float32, 8: torch.float64}
    return torch.zeros(shape, dtype=dtypes[bytes_per_element]).nbytes


def returns_in_the_loop(shape, bytes_per_element):
    for side in shape:
        return side * bytes_per_element
    return bytes_per_element


RIGHT = {
    "0.1": [
        one_by_one,
        makes_it,
        lambda shape, size: torch.tensor(shape, dtype=torch.long).prod() * size,
        lambda shape, size: torch.empty(shape, device="meta").numel() * float(size),
    ]
}
WRONG = {
    "0.1": [
        returns_in_the_loop,
        lambda shape, size: torch.tensor(shape, dtype=torch.float32).prod() * size,
        lambda shape, size: math.prod(shape[1:]) * size,
        lambda shape, size: math.prod(side or 1 for side in shape) * size,
        lambda shape, size: 24,
    ]
}
