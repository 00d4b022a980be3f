"""Every sentence of a lesson, of the teacher's notes or of a sheet that states a figure, an order
or an optimum is known in a way that is listed beside this file, and each listed way holds.
"""

from __future__ import annotations

import pytest
from course.stated.stated import (
    HERE,
    is_printed,
    is_quoted_by,
    listed,
    named,
    problem,
    sentences_of,
)

LISTED = sorted(path.stem for path in HERE.glob("*.txt"))


@pytest.mark.parametrize("number", LISTED)
def test_each_stated_figure_is_known(number):
    lesson = named(number)
    known = listed(number)
    sentences = sentences_of(lesson)
    problems = [f"not listed: {sentence}" for sentence in sentences if sentence not in known]
    problems += [f"not in the lesson: {found}" for found in known if found not in sentences]
    for sentence, how in known.items():
        fault = problem(lesson, sentence, how)
        if fault:
            problems.append(f"{sentence}\n    {fault}")
    assert not problems, "\n".join(problems)


class Printed:
    """A lesson of which only the outputs are looked at."""

    def __init__(self, printed: str):
        self.printed = printed


def test_a_figure_is_printed_if_it_is_a_rounded_one():
    lesson = Printed("peak 61,843,210 bytes, 58.98 MiB, 3 layers")
    assert is_printed(lesson, "The peak is at 59.0 MiB in 3 layers.")
    assert not is_printed(lesson, "The peak is at 58.9 MiB.")
    assert not is_printed(lesson, "There are 3 layers.")  # no figure that could be looked up


def test_a_test_must_quote_what_it_shows():
    name = "test_00_the_largest_batch_that_fits"
    sentence = "Four sequences fit, and five do not."
    assert is_quoted_by(f"test_part_one_text.py::{name}", sentence)
    assert not is_quoted_by(f"test_part_one_text.py::{name}", "Five sequences fit, six do not.")
    assert not is_quoted_by("test_part_one_text.py::test_that_does_not_exist", sentence)
