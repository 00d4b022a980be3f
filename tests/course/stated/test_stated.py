"""Each sentence of a lesson, the teacher's notes, the ledger or a sheet that states a figure, an
order or an optimum is known in a way that is listed beside this file, and each listed way holds.
"""

from __future__ import annotations

import pytest
from course.stated.sentences import Source, claims, sources, stated_in
from course.stated.ways import HERE, is_computed, is_printed, listed, problem

LISTED = sorted(path.stem for path in HERE.glob("*.txt"))


@pytest.mark.parametrize("name", LISTED)
def test_each_stated_figure_is_known(name):
    known = listed(name)
    problems, found = [], set()
    for source in sources(name):
        for sentence in source.sentences:
            found.add(sentence)
            if sentence not in known:
                problems.append(f"not listed: {sentence}")
            elif fault := problem(source, sentence, known[sentence]):
                problems.append(f"{sentence}\n    {fault}")
    problems += [f"stated nowhere: {sentence}" for sentence in known if sentence not in found]
    assert not problems, "\n".join(problems)


def test_where_a_sentence_ends():
    text = """The idea is old ([Dettmers et al. 2022](https://arxiv.org/abs/2110.02861), with
blocks of 2,048). It keeps, on the tiny Llama, 8.4 of
29.4 MB. Budget for rank 8:
**1.4 MB**. Most is weights.

- `again | {"accumulation": 8}` needs 28.2 GiB.
- Nothing.
1. Half of it stays.
"""
    assert stated_in([text]) == [
        "The idea is old ([Dettmers et al. 2022](https://arxiv.org/abs/2110.02861), with blocks "
        "of 2,048).",
        "It keeps, on the tiny Llama, 8.4 of 29.4 MB.",
        "**1.4 MB**.",
        "Most is weights.",
        '- `again | {"accumulation": 8}` needs 28.2 GiB.',
        "Half of it stays.",
    ]


def test_a_figure_is_printed_if_it_is_a_rounded_one():
    lesson = Source([], "peak 61,843,210 bytes, 58.98 MiB, 3 layers")
    assert is_printed(lesson, "The peak is at 59.0 MiB in 3 layers.")
    assert not is_printed(lesson, "The peak is at 58.9 MiB.")
    assert not is_printed(lesson, "There are 3 layers.")  # no figure that could be looked up


def test_what_is_computed_when_the_lesson_is_built_need_not_be_listed():
    (lesson,) = sources("02")
    assert "In bf16, v climbs to 0.5 and **stops**." not in lesson.sentences
    assert not any("half of what v reached" in sentence for sentence in lesson.sentences)


def test_a_claims_figure_is_computed_if_nobody_typed_it():
    first = claims()[0]
    assert is_computed(first, "Pure bf16 keeps 53.9 GB, with Adam's states in bf16.")
    assert not is_computed(first, "Both need 16 bytes a parameter.")
    assert not is_computed(first, "Nothing is said.")
