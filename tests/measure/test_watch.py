"""What ``tracker.watch`` takes, and what it refuses."""

from __future__ import annotations

from collections import OrderedDict, deque
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn

from gradmem_lib import MemoryTracker

ONE = 4 * 256  # bytes of 256 numbers


def numbers() -> torch.Tensor:
    return torch.zeros(256)


def module() -> nn.Module:
    layer = nn.Linear(255, 1)  # 256 numbers
    layer.register_buffer("mask", numbers())
    return layer


TAKEN = {
    "a tensor": (numbers, 1),
    "a list": (lambda: [numbers(), numbers()], 2),
    "an ordered dict in a tuple": (lambda: (OrderedDict(w=numbers()), numbers()), 2),
    "a mapping that is no dict": (lambda: MappingProxyType({"w": numbers()}), 1),
    "a generator": (lambda: (numbers() for _ in range(3)), 3),
    "values of a dict": (lambda: {"w": numbers()}.values(), 1),
    "a deque": (lambda: deque([numbers()]), 1),
    "a state with numbers": (lambda: {"decay": 0.9, "names": ["w"], "shadow": [numbers()]}, 1),
    "a module": (module, 2),
    "modules": (lambda: nn.ModuleList([module(), module()]), 4),
    "a module in a dict": (lambda: {"teacher": module()}, 2),
    "nothing": (list, 0),
}


@pytest.mark.parametrize("name", TAKEN)
def test_each_tensor_of_what_is_given_counts_once(name):
    make, times = TAKEN[name]
    given = make()
    if name == "a generator":
        given = list(given)
    with MemoryTracker(device="cpu") as tracker:
        tracker.watch(given if name != "a generator" else iter(given), "other")
        tracker.watch(given, "other")
    assert tracker.peak.by_category["other"] == times * ONE


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (3.5, "float"),
        ("weights", "str"),
        (None, "NoneType"),
        (np.zeros(4), "ndarray"),
        ({"decay": 0.9}, "dict with float only"),
        ([object()], "list with a object"),
        (torch.optim.SGD([numbers()], lr=0.1), "SGD"),
    ],
    ids=["a number", "text", "None", "an array", "numbers", "an object", "an optimizer"],
)
def test_anything_else_is_refused_with_what_was_given_and_what_is_expected(given, words):
    tracker = MemoryTracker(device="cpu")
    with tracker, pytest.raises(TypeError, match=r"takes a tensor, a torch.nn.Module") as caught:
        tracker.watch(given, "other")
    assert words in str(caught.value)
