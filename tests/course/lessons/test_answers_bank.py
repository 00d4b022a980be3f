"""A second bank of answers, beside the known mistakes of each exercise: right ones pass, wrong ones
hear what helps them.

The exercises that train a model for a while are judged by ``GRADMEM_ALL=1``; one of them each time.
``answers/lesson_01.py`` has answers as people write them, and ``answers/lesson_01_unusual.py`` has
those that nobody had in mind: of these, a part is judged each time, and all of them every night.
"""

import os
import re
from importlib import import_module
from pathlib import Path

import pytest
from support.nightly import each

from gradmem_lib.course.catalogue import all_exercises, get
from gradmem_lib.course.judge.verdict import PASSED, WRONG, judge, of_reference

BANKS = [
    import_module(f"course.lessons.answers.{path.stem}")
    for path in sorted(Path(__file__).with_name("answers").glob("*.py"))
]
RIGHT, FALSE = {}, {}
for bank in BANKS:
    unusual = bank.__name__.endswith("_unusual")
    for both, own in ((RIGHT, bank.RIGHT), (FALSE, bank.WRONG)):
        for id, answers in own.items():
            if unusual:
                answers = {f"unusual: {name}": answer for name, answer in answers.items()}
                answers = dict(each(4, answers.items()))
            assert not both.get(id, {}).keys() & answers.keys(), (
                f"{id}: two answers have the same name"
            )
            both[id] = both.get(id, {}) | answers
SLOW = {
    "1.6",
    "3.7",
    "3.8",
    "4.7",
    "5.2",
    "5.4",
    "5.5",
    "5.6",
    "5.9",
    "6.3",
    "6.4",
    "6.5",
    "9.8",
    "10.4",
    "10.7",
    *(f"11.{i}" for i in range(2, 12)),
}
CHOSEN = [id for id in RIGHT if os.environ.get("GRADMEM_ALL") or id not in SLOW]


def test_every_exercise_has_three_right_and_six_wrong_answers_in_the_bank():
    few = {
        e.id: (len(RIGHT.get(e.id, ())), len(FALSE.get(e.id, ())))
        for e in all_exercises()
        if len(RIGHT.get(e.id, ())) < 3 or len(FALSE.get(e.id, ())) < 6
    }
    assert not few


@pytest.mark.parametrize("bank", BANKS, ids=lambda bank: bank.__name__.rpartition(".")[2])
def test_a_file_has_the_answers_of_the_lesson_that_it_is_named_by(bank):
    of = {f"lesson_{int(id.partition('.')[0]):02}" for id in (*bank.RIGHT, *bank.WRONG)}
    assert of == {bank.__name__.rpartition(".")[2].removesuffix("_unusual")}


@pytest.mark.parametrize("id", CHOSEN)
def test_right_answers_pass_in_any_form(id):
    expected = of_reference(get(id))
    lines = {name: judge(get(id), answer, expected) for name, answer in RIGHT[id].items()}
    assert {name: v.line for name, v in lines.items() if v.outcome != PASSED} == {}


@pytest.mark.parametrize("id", CHOSEN)
def test_wrong_answers_hear_what_is_wrong(id):
    unsaid, expected = {}, of_reference(get(id))
    for name, (answer, says) in FALSE[id].items():
        verdict = judge(get(id), answer, expected)
        if verdict.outcome != WRONG or not re.search(says, verdict.line) or "\n" in verdict.line:
            unsaid[name] = verdict.line
    assert unsaid == {}
