"""The checks refuse the solutions of the course, each with one change that nobody wrote down.

Two changes of each quick exercise are judged each time, and many more of all exercises every night.
"""

import ast
from dataclasses import replace

import pytest
from course.judge.toy_exercise import AREA, area
from course.lessons.test_answers import SLOW
from support.changed_solutions import Solution, answer_of, changes_of, solution_of
from support.judge_changes import chosen, equivalents, survivors
from support.nightly import ALL, each

from gradmem_lib.course.catalogue import all_exercises, get
from gradmem_lib.course.judge.exercise import calls
from gradmem_lib.course.judge.verdict import PASSED, judge

SEED = 0
QUICK = (
    *("0.1", "1.1", "1.3", "1.4", "1.5", "3.1", "3.2", "3.3", "3.5", "4.5", "5.1", "6.1", "6.2"),
    *("6.6", "7.1", "7.4", "8.4", "9.1", "9.2", "9.6", "10.1", "10.6"),
)
# The answers of lesson 11 are recipes: they have no statements.
WRITTEN = [exercise.id for exercise in all_exercises() if callable(exercise.right)]


def most_of(id: str) -> int:
    """How many changes of an exercise are judged."""
    if not ALL:
        return 2
    return 8 if id in SLOW else 60


@pytest.mark.parametrize("id", WRITTEN if ALL else QUICK)
def test_no_changed_solution_passes(id):
    changes = chosen(get(id), most_of(id), SEED)
    print(f"seed {SEED}, {len(changes)} changes")  # pytest shows it where the test fails
    assert survivors(get(id), changes) == []


@pytest.mark.parametrize("id", WRITTEN if ALL else QUICK[::4])
def test_the_unchanged_solution_passes(id):
    assert judge(get(id), answer_of(solution_of(get(id)))).outcome == PASSED


def test_every_equivalent_change_is_one_of_its_solution():
    for id, known in each(4, equivalents().items()):
        words = {change.words for change in changes_of(solution_of(get(id)))}
        assert set(known) <= words, id


def words_of(text: str) -> set[str]:
    solution = Solution("f", [], ast.parse(text).body, {})
    return {change.words for change in changes_of(solution)}


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("def f(a, b):\n    c = a + b\n    return c", "`c = a + b` → `c = a - b`"),
        ("def f(a, b):\n    c = a + b\n    return c", "`c = a + b` → `c = b + b`"),
        ("def f(a, b):\n    c = a + b\n    return c", "`c = a + b` → ``"),
        ("def f(a, b):\n    return a < b", "`return a < b` → `return a <= b`"),
        ("def f(a, b):\n    return g(a, b)", "`return g(a, b)` → `return g(b, a)`"),
        ("def f(a, b):\n    return g(a, b=b)", "`return g(a, b=b)` → `return g(a)`"),
        ("def f(a):\n    return a.detach()", "`return a.detach()` → `return a`"),
        ("def f(a):\n    a.mul_(2)", "`a.mul_(2)` → `a.mul(2)`"),
        ("def f(a):\n    return 3, a", "`return (3, a)` → `return (a, 3)`"),
        ("def f(a):\n    with g():\n        a.h()", "`with g():` → `its body alone`"),
        ("def f(a):\n    if a:\n        g()", "`if a:` → `if not a:`"),
        ("def f(a):\n    for b in a:\n        g(b)", "`for b in a:` → `for b in list(a)[-1:]:`"),
        ("def f(a):\n    g()\n    h()", "`g()` → `after h()`"),
        ("@g()\ndef f(a):\n    return a", "`@g()` → ``"),
        ("def f(a):\n    a.b = 1", "`a.b = 1` → `a.b = 2`"),
        (
            "def f(a):\n    return [b for b in a if b]",
            "`return [b for b in a if b]` → `return [b for b in a]`",
        ),
    ],
)
def test_the_changes_are_those_that_people_make(text, change):
    assert change in words_of(text)


def test_what_is_the_same_in_other_words_is_no_change():
    assert "`c = 1` → `after d = 2`" not in words_of("def f():\n    c = 1\n    d = 2\n    return c")
    assert "`return a + b` → `return b + a`" not in words_of("def f(a, b):\n    return a + b")
    assert "`return float(a)` → `return a`" not in words_of("def f(a):\n    return float(a)")


def test_a_check_that_looks_at_too_little_lets_a_change_pass():
    text = "def area(width, height):\n    return width * height"
    changes = changes_of(Solution("area", [], ast.parse(text).body, {}))
    assert survivors(AREA, changes) == []
    lax = replace(AREA, cases=calls((2, 2)))
    assert "`return width * height` → `return width + height`" in survivors(lax, changes)
    assert judge(lax, area).outcome == PASSED
