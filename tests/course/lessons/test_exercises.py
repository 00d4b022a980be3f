"""Every exercise is fit to be given: the right answer does the same each time, and each mistake
fits its text, is wrong in its own way, and hears its own sentence.
"""

import gc
import subprocess
import sys

import pytest
from course.lessons.test_answers import SLOW
from support.nightly import ALL

from gradmem_lib.course.catalogue import UnknownExercise, all_exercises, get
from gradmem_lib.course.judge.verdict import (
    OPEN,
    PASSED,
    WRONG,
    _looks_of,
    judge,
    of_reference,
)
from gradmem_lib.course.learner.check import check
from gradmem_lib.course.learner.titles import titles
from gradmem_lib.course.lessons.shared.settings import quiet

EXERCISES = {exercise.id: exercise for exercise in all_exercises()}


def faults_of(exercise) -> list[str]:
    """What is not ready for learners, a sentence each."""
    faults = []
    expected = of_reference(exercise)
    verdict = judge(exercise, exercise.right, expected)
    if verdict.outcome != PASSED:
        faults.append(f"the right answer does not pass: {verdict.line}")
    looks = list(_looks_of(exercise, "one", exercise.wrong_answers))  # they are taken once
    known = []
    for (answer, says), (_, theirs) in zip(exercise.wrong_answers(), looks, strict=True):
        if answer is None:
            faults.append(f"this does not fit the right answer's text: {says}")
            continue
        for other, seen in [("the right answer", expected), *known]:
            if theirs.same_as(seen, exercise.tolerance):
                faults.append(f"nothing tells these apart: {says} / {other}")
        line = judge(exercise, answer, expected).line
        if says[:80] not in line or not says.endswith("."):
            faults.append(f"this is not said of itself, or has no full stop: {says} / {line}")
        known.append((says, theirs))
    if len(known) > 8:
        faults.append(f"{len(known)} mistakes: eight are enough")
    return faults


@pytest.mark.parametrize("id", [id for id in EXERCISES if ALL or id not in SLOW])
def test_every_exercise_is_fit_to_be_given(id):
    assert faults_of(EXERCISES[id]) == []


@pytest.mark.parametrize("id", EXERCISES)
def test_nobody_has_tried_who_has_not_begun(id):
    exercise = EXERCISES[id]
    stubs = [..., None, judge(exercise, ...).result]

    def raises(*args, **kwargs):
        raise NotImplementedError("your code here")

    if callable(exercise.right):
        stubs += [raises] if not isinstance(exercise.right, type) else []
    else:
        stubs.pop()  # a plain value cannot be recognised
    assert {judge(exercise, stub).outcome for stub in stubs} == {OPEN}


def test_faults_are_found():
    from course.judge.toy_exercise import area, exercise_of

    from gradmem_lib.course.judge.exercise import calls

    toy = exercise_of(
        area,
        calls((3, 5)),
        """
        width + height → width
            this is not in the text.
        width * height → height * width
            this is right.
        width * height → 1
            one.
        width * height → 15 * 1 // 15
            a twin, without a full stop
        """,
    )
    found = "\n".join(faults_of(toy))
    for words in ("does not fit", "apart: this is right", "apart: a twin", "full stop"):
        assert words in found


def test_the_titles_are_those_of_the_exercises():
    assert [title.id for title in titles()] == list(EXERCISES)
    assert all(title.title and title.difficulty in (1, 2, 3) for title in titles())


@pytest.mark.parametrize("id", ["0.9", "99.1", "one", "", 0.1, None])
def test_an_unknown_exercise_is_one_sentence_that_lists_those_there_are(id):
    with pytest.raises(UnknownExercise) as caught:
        check(id, None)
    sentence = str(caught.value)
    assert sentence.startswith(f"there is no exercise {id!r}: ") and "0.1" in sentence


def test_an_exercise_that_moved_is_found_by_its_old_id():
    assert get("5.8") is get("6.5") and get("6.5").name == "recipe_7b"
    assert get(" 0.1 ").id == "0.1"
    assert all_exercises(0) == all_exercises("00") == all_exercises("0") != []


def test_importing_the_check_imports_nothing_heavy():
    code = "import sys, gradmem_lib.course.learner.check as e; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_wrong_and_passed_are_the_words_the_progress_file_keeps():
    from gradmem_lib.course.learner import progress

    check("0.1", ...)
    assert progress.load()["checks"] == {}
    check("0.1", lambda s, b: 1)
    assert progress.load()["checks"]["0.1"] == {"outcome": WRONG, "tries": 1}
    check("0.1", get("0.1").right)
    check("0.1", lambda s, b: 1)
    assert progress.load()["checks"]["0.1"] == {"outcome": PASSED, "tries": 3}


def test_a_trainers_garbage_collection_looks_at_its_own_run_alone():
    with pytest.raises(KeyboardInterrupt), quiet():
        assert gc.get_freeze_count() > 100_000
        raise KeyboardInterrupt
    assert gc.get_freeze_count() == 0
