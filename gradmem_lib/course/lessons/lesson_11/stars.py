"""The stars of lesson 11's puzzles: which are solved, and how a learner's recipes compare with the
planner's.
"""

from __future__ import annotations

from html import escape

from ...learner.progress import load, record_puzzle
from .puzzles import Puzzle, micros, puzzles, written


class Stars:
    """The table of all puzzles, as text and as HTML."""

    def rows(self) -> list[tuple[str, ...]]:
        """(id, stars, title, a sentence) of each puzzle."""
        progress, found = load(), []
        for one in puzzles().values():
            entry = progress.get("puzzles", {}).get(one.id)
            mark = says = ""
            if entry is not None:
                mark, _, beaten = one.stars(entry["seconds"]).partition(", ")
                says = f"{micros(entry['seconds'])}, the planner {micros(one.best()[1].seconds)}"
                if beaten:
                    says += f": {beaten}, with {entry['recipe']}"
            elif progress["checks"].get(one.id, {}).get("outcome") == "passed":
                mark = "★★★"  # the impossible one
            found.append((one.id, mark, one.title, says))
        return found[1:]  # without the worked example

    def __repr__(self) -> str:
        lines = [f"  {id:<6} {won:<4} {title:<28} {says}" for id, won, title, says in self.rows()]
        return "\n".join(line.rstrip() for line in lines)

    def _repr_html_(self) -> str:
        table = ""
        for cells in [("", "stars", "puzzle", "time a token, by estimate"), *self.rows()]:
            kind = "td" if table else "th"
            line = ""
            for cell in cells:
                line += f"<{kind} style='text-align:left'>{escape(cell)}</{kind}>"
            table += f"<tr>{line}</tr>"
        return f"<table>{table}</table>"


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
