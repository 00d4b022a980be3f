"""What is said of wrong numbers without knowing the exercise is what was seen of them."""

import pytest
import torch
from course.judge.toy_exercise import exercise_of

from gradmem_lib.course.judge.exercise import calls
from gradmem_lib.course.judge.verdict import judge


def nbytes(rows, width):
    return 4 * rows * width


BYTES = exercise_of(nbytes, calls((3, 1000), (20, 7), (5, 80_000), (1, 2**30)))


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ("32 * rows * width", "every number is 8 times too large (these look like bits)"),
        ("4 * rows * width / 2**20", "(these look like MiB): return bytes."),
        ("2 * rows * width", "every number is 2 times too small."),
        ("-4 * rows * width", "every number is the right one with the wrong sign."),
        ("12_000", "the answer is 12,000 for all arguments: it must depend on them."),
        ("4 * width", "`rows` has no effect on your answer."),
        ("f'{4 * rows * width}'", "return one number: this is '12000'."),
        ("rows - width", "the result is negative, but it can never be negative."),
        ("4 * rows * width + 0.5", "return a whole number: this is a fraction."),
        ("float('nan')", "the result is not a number (nan)"),
        ("float('inf')", "the answer is inf for all arguments"),
        ("None + rows", "Something is None here"),
        # Nothing is said where nothing was seen.
        ("4 * rows * width + rows", "For nbytes(3, 1000): got 12,003"),
        ("4 * rows + width", "For nbytes(3, 1000): got 1,012"),
        # What is raised later says nothing of an earlier case.
        ("4 * width + rows if width > 7 else {}[width]", "For nbytes(3, 1000): got 4,003"),
    ],
)
def test_numbers(result, says):
    answer = eval(f"lambda rows, width: {result}")
    assert f"not yet: {says}" in judge(BYTES, answer).line.replace(
        "every number is 1.049e+06 times too small ", ""
    )


def test_one_place_of_several_numbers():
    both = exercise_of(lambda a, b: (a, 2 * b), calls((1, 2), (3, 4), (5, 7)))
    line = judge(both, lambda a, b: [a, 6 * b]).line
    assert "at this place, every number is 3 times too large. For" in line and "item 1" in line
    assert "at this place" not in judge(both, lambda a, b: [a, 6 * b + a]).line


RAMP = torch.arange(1.0, 7.0)


# The right answer, another one, and what is said of it.
OTHER = """
RAMP | RAMP.flip(0) | the right numbers in the reverse order.
RAMP | 3 * RAMP | every number is 3 times too large.
[RAMP, RAMP] | [RAMP, 3 * RAMP] | at this place, every number is 3 times too large.
RAMP | 0 * RAMP | all numbers are 0.
RAMP.reshape(2, 3) | RAMP.reshape(2, 3).t() | the right matrix, transposed.
[1, 2, 4] | [4, 2, 1] | the right entries in the reverse order.
[1, 2] | 3 | return one number for each: this is 3.
{"a": 1} | 1 | return a dict with the names 'a': this is 1.
True | 3 | return True or False: this is 3.
"""


@pytest.mark.parametrize("row", OTHER.strip().splitlines())
def test_other_values(row):
    *values, says = row.split(" | ")
    right, answer = map(eval, values)
    assert says in judge(exercise_of(lambda: right, lambda f: f()), lambda: answer).line


def test_an_answer_that_changes_nothing():
    def halve(x):
        x.mul_(0.5)

    def halved(answer):
        x = torch.ones(3)
        answer(x)
        return x

    halving = exercise_of(halve, halved, changes="x")
    assert "nothing has changed" in judge(halving, lambda x: x.mul(0.5)).line
    assert "nothing has changed" not in judge(halving, lambda x: x.add_(1)).line
