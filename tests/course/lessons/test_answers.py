"""Answers that were once judged wrongly, or that nobody had in mind: right ones pass, wrong ones do
not. Each file of ``answers/`` has them for one lesson.

An answer is a function, a class or a value; or a text of changes of the right answer, ``was → now``
in each line. Slow exercises are judged every night.
"""

from importlib import import_module
from pathlib import Path

import pytest
from support.nightly import ALL

from gradmem_lib.course.catalogue import all_exercises, get
from gradmem_lib.course.judge.verdict import PASSED, WRONG, judge, of_reference

TABLES = [
    import_module(f"course.lessons.answers.{path.stem}")
    for path in sorted(Path(__file__).with_name("answers").glob("lesson_*.py"))
]
RIGHT = {id: answers for table in TABLES for id, answers in table.RIGHT.items()}
FALSE = {id: answers for table in TABLES for id, answers in table.WRONG.items()}
SLOW = {
    *("1.6", "1.9", "3.4", "3.7", "3.8", "4.7", "5.2", "5.4", "5.5", "5.6", "5.9"),
    *("6.3", "6.4", "6.5", "7.7", "9.8", "10.4", "10.7", "10.8"),
    *(f"11.{number}" for number in range(1, 12)),
}


def answer_of(id: str, written):
    if not isinstance(written, str) or " →" not in written:
        return written
    answer = get(id).changed([line.strip() for line in written.strip().splitlines()])
    assert answer is not None, f"{id}: this does not fit the right answer's text: {written}"
    return answer


@pytest.mark.parametrize("id", [id for id in {**RIGHT, **FALSE} if ALL or id not in SLOW])
def test_right_answers_pass_and_wrong_ones_do_not(id):
    exercise, faults = get(id), []
    expected = of_reference(exercise)
    for answers, outcome in ((RIGHT.get(id, ()), PASSED), (FALSE.get(id, ()), WRONG)):
        for written in answers:
            verdict = judge(exercise, answer_of(id, written), expected)
            if verdict.outcome != outcome or "\n" in verdict.line:
                faults.append(f"{written}: {verdict.line}")
    assert faults == []


def test_the_tables_are_of_the_exercises():
    assert {*RIGHT, *FALSE} <= {exercise.id for exercise in all_exercises()}
