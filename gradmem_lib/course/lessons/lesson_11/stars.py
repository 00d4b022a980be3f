"""The stars of lesson 11's puzzles: which are solved, and how a learner's recipes compare with the
planner's.
"""

from ...learner.progress import load, record_puzzle
from .puzzles import Puzzle, micros, puzzles, written


class Stars:
    """The table of all puzzles."""

    def __repr__(self) -> str:
        progress, lines = load(), []
        for one in puzzles().values():
            entry = progress.get("puzzles", {}).get(one.id)
            won = says = ""
            if entry is not None:
                won, _, beaten = one.stars(entry["seconds"]).partition(", ")
                says = f"{micros(entry['seconds'])}, the planner {micros(one.best()[1].seconds)}"
                if beaten:
                    says += f": {beaten}, with {entry['recipe']}"
            elif progress["checks"].get(one.id, {}).get("outcome") == "passed":
                won = "★★★"  # the impossible one
            lines.append(f"  {one.id:<6} {won:<4} {one.title:<28} {says}".rstrip())
        return "\n".join(lines[1:])  # without the worked example


def stars() -> Stars:
    """The table of stars, from the progress file."""
    return Stars()


def award(puzzle: Puzzle, answer) -> str:
    """Record a right answer, and say how it compares with the planner's best."""
    recipe = puzzle.recipe(answer)
    mine, best = puzzle.weigh(recipe).seconds, puzzle.best()[1].seconds
    record_puzzle(puzzle.id, mine, written(recipe))
    return (
        f"{puzzle.stars(mine)} ({micros(mine)} a token, by estimate; the planner's best recipe "
        f"takes {micros(best)})"
    )
