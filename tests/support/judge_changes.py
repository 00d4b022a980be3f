"""Judges changed solutions of an exercise, and says which of them pass.

    PYTHONPATH=tests python -m support.judge_changes 7.1 7.4 --most 40 --seed 0

It prints every change that passes and is not in ``course/lessons/equivalent_solutions.md``.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

from support.changed_solutions import Change, answer_of, changes_of, solution_of
from support.paths import ROOT

from gradmem_lib.course.catalogue import all_exercises, get
from gradmem_lib.course.judge import time_limit
from gradmem_lib.course.judge.exercise import Exercise
from gradmem_lib.course.judge.verdict import PASSED, Look, judge, of_reference

EQUIVALENT = Path(ROOT, "tests", "course", "lessons", "equivalent_solutions.md")
SECONDS = 5.0  # that a changed solution may run, or ten times as long as the reference takes


def chosen(exercise: Exercise, most: int, seed: int) -> list[Change]:
    """At most so many of an exercise's changes, the same ones for the same seed."""
    changes = changes_of(solution_of(exercise))
    picked = random.Random(f"{exercise.id} {seed}")
    return changes if len(changes) <= most else picked.sample(changes, most)


def survivors(exercise: Exercise, changes: list[Change]) -> list[str]:
    """The changes that the check lets pass, and that nobody has argued to be right answers."""
    known = equivalents().get(exercise.id, {})
    unnamed = replace(exercise, mistakes="")  # whether it is refused does not depend on its name
    expected = of_reference(exercise)
    found = []
    for change in changes:
        if change.words not in known and passes(unnamed, change, expected):
            found.append(change.words)
    return found


def passes(exercise: Exercise, change: Change, expected: Look) -> bool:
    try:
        answer = answer_of(change.solution)
    except Exception:
        return False  # its cell raises
    limit, time_limit.SECONDS = time_limit.SECONDS, SECONDS
    try:
        return judge(exercise, answer, expected).outcome == PASSED
    finally:
        time_limit.SECONDS = limit


@cache
def equivalents() -> dict[str, dict[str, str]]:
    """``{"7.1": {"`was` → `now`": "why this is a right answer"}}``."""
    found: dict[str, dict[str, str]] = {}
    id = ""
    for line in EQUIVALENT.read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"## (\d+\.\d+)", line):
            id = heading[1]
        elif entry := re.fullmatch(r"- (`.*` → `.*`): (.+)", line):
            found.setdefault(id, {})[entry[1]] = entry[2]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ids", nargs="*")
    parser.add_argument("--most", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    exercises = [get(id) for id in asked.ids] or all_exercises()
    print(f"seed {asked.seed}, at most {asked.most} changes an exercise")
    for exercise in exercises:
        if not callable(exercise.right):
            continue  # a value has no statements
        began = time.monotonic()
        changes = chosen(exercise, asked.most, asked.seed)
        left = survivors(exercise, changes)
        seconds = time.monotonic() - began
        print(f"{exercise.id}: {len(left)} of {len(changes)} pass ({seconds:.0f} s)", flush=True)
        for words in left:
            print(f"  - {words}", flush=True)


if __name__ == "__main__":
    main()
