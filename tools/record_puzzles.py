"""Writes puzzles.json: for each puzzle the planner's best recipe, then the known mistakes that are
recipes.

    python tools/record_puzzles.py [ID ...]
"""

import json
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gradmem_lib.course import catalogue
from gradmem_lib.course.lessons.lesson_11.exercises import AGAIN, BF16, CHUNKS
from gradmem_lib.course.lessons.lesson_11.puzzles import (
    MISTAKES,
    Allowed,
    Puzzle,
    options_of,
    predicted,
    puzzles,
    versions,
    written,
)
from gradmem_lib.planning.options import METHODS
from gradmem_lib.training.recipe import Recipe

RECORDS = Path(__file__).parent.parent / "gradmem_lib/course/lessons/lesson_11/puzzles.json"
BY_ROWS = BF16 | {"accumulation": 8}
STEPS = [  # of section 2 of the lesson
    BY_ROWS,
    BY_ROWS | AGAIN,
    BY_ROWS | AGAIN | CHUNKS,
    BY_ROWS | CHUNKS | {"optimizer": "adamw-8bit"},
]


def solve(puzzle: Puzzle) -> Recipe:
    """The fastest recipe that the planner finds under the puzzle's condition.

    Raises ``LookupError`` if none fits.
    """
    for asked in (puzzle, replace(puzzle, conditions=())):
        # A new search: the recipes that learners have tried may not be among the planner's.
        here = Allowed(asked)
        here.find(list(METHODS))
        allowed = [option for option in here.fits() if not puzzle.broken(option.recipe)]
        if allowed:
            return min(allowed, key=lambda option: option.seconds).recipe
    raise LookupError(f"{puzzle.id}: the planner finds nothing that fits")


def tempting(one: Puzzle) -> list[Recipe]:
    """The known mistakes that need a prediction; for the example, the steps of the lesson."""
    given: list[Any] = STEPS
    if one.id != "11.0":
        given = [answer for answer, _ in catalogue.get(one.id).wrong_answers()]
    found = []
    for options in given:
        with suppress(*MISTAKES):
            recipe = one.recipe(options)
            if not one.broken(recipe):
                found.append(recipe)
    return found


def in_pieces(one: Puzzle, best: Recipe) -> list[Recipe]:
    """For several cards, whose models take long to predict: the best recipe with checkpoints in
    every layer or of segments, and the rows of a card cut in each way.

    A prediction with segments traces all layers.
    """
    # The best may step in backward, which forbids pieces, or move something to the host.
    plain = replace(best, in_backward=False, offload=None)
    rows, found = one.rows // one.cards, []
    for checkpointing in ("per-layer", "sqrt", 2, 4, 8):
        for pieces in range(1, rows + 1):
            if one.cards > 1 and rows % pieces == 0:
                found.append(replace(plain, checkpointing=checkpointing, accumulation=pieces))
    return found


def record(ids: list[str]) -> None:
    """No ids: all puzzles that are recorded."""
    found = json.loads(RECORDS.read_text(encoding="utf-8"))["puzzles"]
    for id in ids or found:
        one = puzzles()[id]
        best = solve(one)
        print(id, written(best), flush=True)
        rows = []
        for recipe in dict.fromkeys([best, *tempting(one), *in_pieces(one, best)]):
            weighed = asdict(predicted(one, recipe, quickly=False))
            rows.append({"recipe": options_of(recipe), "weighed": weighed})
        found[id] = rows
        text = json.dumps({"versions": versions(), "puzzles": found}, indent=1)
        RECORDS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    record(sys.argv[1:])
