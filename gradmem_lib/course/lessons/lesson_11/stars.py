"""The stars of lesson 11's puzzles: which are solved, and how a learner's recipes compare with the
planner's.
"""

from __future__ import annotations

from html import escape

from ...learner.progress import load, record_puzzle
from .puzzles import PUZZLES, Puzzle, micros, written


class Stars:
    """The table of all puzzles, as text and as HTML."""

    def rows(self) -> list[tuple[str, ...]]:
        """(id, stars, title, a sentence) of each puzzle."""
        progress = load()
        return [_row(p, progress["checks"], progress.get("puzzles", {})) for p in PUZZLES]

    def __repr__(self) -> str:
        return "\n".join(
            f"  {id:<6} {won:<4} {title:<28} {says}".rstrip()
            for id, won, title, says in self.rows()
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            "<tr>"
            + "".join(f"<td style='text-align:left'>{escape(cell)}</td>" for cell in row)
            + "</tr>"
            for row in self.rows()
        )
        heads = "".join(
            f"<th style='text-align:left'>{name}</th>"
            for name in ("", "stars", "puzzle", "time a token, by estimate")
        )
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def stars() -> Stars:
    """The table of stars, from the progress file."""
    return Stars()


def won(puzzle: Puzzle, seconds: float) -> int:
    return puzzle.stars(seconds).count("★")


def award(puzzle: Puzzle, answer) -> str:
    """Record a right answer, and say how it compares with the planner's best."""
    recipe = puzzle.recipe(answer)
    mine, best = puzzle.weigh(recipe).seconds, puzzle.best()[1].seconds
    record_puzzle(puzzle.id, mine, written(recipe))
    return (
        f"{puzzle.stars(mine)} ({micros(mine)} a token, by estimate; the planner's best recipe "
        f"takes {micros(best)})"
    )


def _row(puzzle: Puzzle, checks: dict, solved: dict) -> tuple[str, str, str, str]:
    name = puzzle.id, puzzle.title
    if not puzzle.possible:
        passed = checks.get(puzzle.id, {}).get("outcome") == "passed"
        return name[0], "★★★" if passed else "", name[1], ""
    entry = solved.get(puzzle.id)
    if entry is None:
        return name[0], "", name[1], ""
    mark, _, beaten = puzzle.stars(entry["seconds"]).partition(", ")
    says = f"{micros(entry['seconds'])}, the planner {micros(puzzle.best()[1].seconds)}"
    return name[0], mark, name[1], f"{says}: {beaten}, with {entry['recipe']}" if beaten else says
