"""What ``tracker.watch`` takes, and what it refuses."""

from __future__ import annotations

import collections
import types

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


# What is given, and how many times 256 numbers it has.
TAKEN = {
    "numbers()": 1,
    "[numbers(), numbers()]": 2,
    "(OrderedDict(w=numbers()), numbers())": 2,
    "MappingProxyType({'w': numbers()})": 1,
    "(numbers() for _ in range(3))": 3,
    "{'w': numbers()}.values()": 1,
    "deque([numbers()])": 1,
    "{'decay': 0.9, 'names': ['w'], 'shadow': [numbers()]}": 1,
    "module()": 2,
    "ModuleList([module(), module()])": 4,
    "{'teacher': module()}": 2,
    "[]": 0,
}
NAMES = vars(collections) | vars(types) | vars(nn) | {"numbers": numbers, "module": module}


@pytest.mark.parametrize("text", TAKEN)
def test_each_tensor_of_what_is_given_counts_once(text):
    given = eval(text, dict(NAMES))
    again = given
    if isinstance(given, types.GeneratorType):
        again = list(given)
        given = iter(again)
    with MemoryTracker(device="cpu") as tracker:
        tracker.watch(given, "other")
        tracker.watch(again, "other")
    assert tracker.peak.by_category["other"] == TAKEN[text] * ONE


# What is given, and what is said that it was.
REFUSED = {
    "3.5": "float",
    "'weights'": "str",
    "None": "NoneType",
    "numbers().numpy()": "ndarray",
    "{'decay': 0.9}": "dict with float only",
    "[object()]": "list with a object",
    "torch.optim.SGD([numbers()], lr=0.1)": "SGD",
}


@pytest.mark.parametrize("text", REFUSED)
def test_anything_else_is_refused_with_what_was_given_and_what_is_expected(text):
    tracker = MemoryTracker(device="cpu")
    with tracker, pytest.raises(TypeError, match=r"takes a tensor, a torch.nn.Module") as caught:
        tracker.watch(eval(text), "other")
    assert REFUSED[text] in str(caught.value)
