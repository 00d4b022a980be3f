"""A right answer passes in every natural form: whatever calls it, and whatever kind of number,
sequence or dict it returns.
"""

from collections import OrderedDict
from functools import partial
from numbers import Real

import numpy as np
import pytest
import torch
from course.lessons.test_changed_solutions import QUICK
from support.nightly import each

from gradmem_lib.course.catalogue import get
from gradmem_lib.course.judge.verdict import PASSED, judge, of_reference


class Helper:
    """An object that is called like a function, with a state of its own."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.function(*args, **kwargs)

    def method(self, *args):
        return self.function(*args)


def named(function, *args):
    return function(*args)


def as_numpy(value):
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return np.float64(value) if isinstance(value, float) else np.int64(value)


def as_tensors(value):
    """A number as a tensor of one number; a fraction keeps its 64 bits."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def whole_as_floats(value):
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def everywhere(change, value):
    """``value`` with ``change`` in all its places, and with other kinds of containers."""
    if isinstance(value, dict):
        entries = [(key, everywhere(change, entry)) for key, entry in value.items()]
        return OrderedDict(reversed(entries))
    if isinstance(value, list):
        return tuple(everywhere(change, entry) for entry in value)
    if type(value) is tuple:
        return [everywhere(change, entry) for entry in value]
    return change(value)


CALLED = {
    "a lambda": lambda function: lambda *args: function(*args),
    "a partial": lambda function: partial(named, function),
    "an object": Helper,
    "a method": lambda function: Helper(function).method,
}
RETURNED = {
    "numpy's numbers": as_numpy,
    "tensors of one number": as_tensors,
    "whole floats": whole_as_floats,
}
# Their arguments may be given by name, which a plain *args does not take.
FUNCTIONS = [id for id in QUICK if not isinstance(get(id).right, type)]


@pytest.mark.parametrize("id", each(2, FUNCTIONS))
def test_a_right_answer_passes_however_it_is_called_and_whatever_it_returns(id):
    exercise = get(id)
    expected, reference = of_reference(exercise), exercise.right
    answers = {name: around(reference) for name, around in CALLED.items()}
    for name, change in RETURNED.items():
        answers[name] = lambda *args, c=change: everywhere(c, reference(*args))
    lines = {name: judge(exercise, answer, expected) for name, answer in answers.items()}
    assert {name: v.line for name, v in lines.items() if v.outcome != PASSED} == {}
