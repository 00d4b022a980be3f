"""Two answers are the same however they are written, or differ in exact numbers."""

import math

import pytest
import torch
from torch import nn

from gradmem_lib.course.judge import compare
from gradmem_lib.course.judge.compare import describe, difference

SAME = """
[1, 2] | (1, 2)
torch.Size([1, 2]) | [1, 2]
torch.tensor([1, 2]) | (1, 2)
[1.0, 2.0] | torch.tensor([1.0, 2.0])
torch.tensor([[1, 2]]).numpy() | torch.tensor([[1.0, 2.0]])
torch.ones(3, dtype=torch.bfloat16) | torch.ones(3)
torch.ones((), requires_grad=True) | 1
{"b": 2.0, "a": 1} | {"a": 1, "b": 2}
{"a", "b"} | frozenset("ba")
" Forward" | "forward"
12_884_901_888.0 | 12_884_901_888
True | 1
math.nan | math.nan
torch.tensor([math.nan]) | [math.nan]
torch.tensor([1.0, math.nan]) | torch.tensor([1.0, math.nan])
torch.float32 | torch.float32
None | None
compare.Measured(3, 10, 20, "over") | compare.Measured(3.0, 15, 20, "over")
"""
# What was got, what was expected, and what is said of it.
OTHER = """
12_884_901_889 | 12_884_901_888 | got 12,884,901,889, expected 12,884,901,888
12_884_901_887.0 | 12_884_901_888 | got 12,884,901,887, expected 12,884,901,888
0.30001 | 0.3 | got 0.30001, expected 0.3
math.nan | 0.3 | got nan, expected 0.3
None | 3 | got None, expected 3
(1, 2, 3) | (1, 2) | got [1, 2, 3], expected [1, 2]
ones(2, 3) | ones(3, 2) | got a tensor of shape (2, 3), expected a tensor of shape (3, 2)
torch.tensor([1.0, 3.0]) | torch.tensor([1.0, 2.0]) | got 3, expected 2
torch.tensor([math.nan]) | torch.tensor([2.0]) | got nan, expected 2
["a", [1]] | torch.ones(2) | got ['a', [1]], expected a tensor of shape (2,)
{"a": 1} | {"a": 1, "b": 2} | it is missing
{"a": 1, "b": 2} | {"a": 1} | this name was not asked for
"backward" | "forward" | got 'backward', expected 'forward'
torch.float32 | torch.bfloat16 | got torch.float32, expected torch.bfloat16
object() | 3 | got a value of type object, expected 3
(lambda: 0) | {"a"} | got a value of type function, expected ['a']
compare.Measured(3, 21, 20, "over") | compare.Measured(3, 15, 20, "over") | over
compare.Measured(4, 21, 20, "over") | compare.Measured(3, 15, 20, "over") | got 4, expected 3
"""
NAMES = {"torch": torch, "ones": torch.ones, "math": math, "compare": compare}


@pytest.mark.parametrize("row", SAME.strip().splitlines())
def test_the_same_value_in_another_form_is_equal(row):
    got, expected = row.split(" | ")
    assert difference(eval(got, NAMES), eval(expected, NAMES)) is None


@pytest.mark.parametrize("row", OTHER.strip().splitlines())
def test_a_difference_is_said_in_exact_numbers(row):
    got, expected, said = row.split(" | ")
    assert difference(eval(got, NAMES), eval(expected, NAMES)).said == said


@pytest.mark.parametrize(
    "odd",
    [10**400, -(10**400), torch.empty(3, device="meta"), torch.empty((), device="meta")],
    ids=["large", "far below", "on meta", "a number on meta"],
)
def test_what_no_float_holds_or_has_no_numbers_is_another_answer(odd):
    for expected in (3, 2.5, torch.ones(3), "text", None, (1, 2)):
        assert difference(odd, expected) and len(describe(odd)) < 60
    assert difference({"a": odd}, {"a": 1.5})


def test_the_tolerance_of_a_tensor_is_relative_to_its_largest_entry():
    expected = torch.tensor([1000.0, 0.0])
    assert difference(torch.tensor([1000.0, 0.001]), expected, 1e-5) is None
    found = difference(torch.tensor([1000.0, 0.1]), expected, 1e-5)
    assert found.path == ("at index [1]",) and found.said == "got 0.1, expected 0"


def test_a_description_never_holds_an_address():
    assert "0x" not in describe(object()) + describe(nn.Linear(2, 2)) + describe([object()])
