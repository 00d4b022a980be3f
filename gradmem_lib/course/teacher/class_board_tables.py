"""The two tables of a class's board: which lesson each learner has reached, and which exercises
hold them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

from ..learner.titles import Title, titles

# A learner's label; and their "checks", (passed, tries) by exercise, and "guesses",
# (guess, measured or None, unit) by prediction.
Rows = list[tuple[str, dict[str, Any]]]

_MOST_EXERCISES = 8  # in the table of what holds people
_MOST_NAMED = 3  # exercises in the sentence above it


def learners(n: int) -> str:
    """``n`` learners, in words."""
    return "1 learner" if n == 1 else f"{n} learners"


def where_everybody_is(rows: Rows) -> str:
    """Lessons x learners: the number of passed exercises. A frame marks each learner's last lesson
    with any entry.
    """
    if not rows:
        return (
            "<p>There is no progress file in this folder yet. Learners appear as soon as theirs "
            "is there.</p>"
        )
    known = {exercise.id: _lesson(exercise.id) for exercise in titles()}
    totals = Counter(known.values())  # exercises by lesson, in the course's order
    here: Counter[str | None] = Counter()  # learners by their last lesson; None: not begun
    body = []
    for label, found in rows:
        checks, guesses = found["checks"], found["guesses"]
        passed = Counter(known[id] for id, (done, _) in checks.items() if done and id in known)
        touched = {_lesson(id) for id in (*checks, *guesses)} & set(totals)
        last = max(touched, default=None)
        here[last] += 1
        cells = [f'<th scope="row" class="who">{escape(label)}</th>']
        for lesson, total in totals.items():
            if lesson in touched:
                cells.append(_touched_cell(passed[lesson], total, is_last=lesson == last))
            else:
                cells.append('<td class="n"></td>')
        body.append(_row(cells))
    body.append(_learners_here(here, totals))
    head = ['<th class="who">lesson</th>']
    head += [f'<th scope="col" class="n">{lesson}</th>' for lesson in totals]
    note = (
        "Exercises passed, optional ones included, by lesson. A frame marks the last lesson in "
        "which a learner has made a guess or tried an exercise."
    )
    if here[None]:
        note += f" Not begun: {here[None]}."
    return f'<h2>Where everybody is</h2><p class="note">{note}</p>{_table(head, body)}'


def _lesson(id: str) -> str:
    """The lesson of an exercise or a prediction: "03" for "3.2" and "3.a"."""
    return id.partition(".")[0].zfill(2)


def _touched_cell(passed: int, total: int, *, is_last: bool) -> str:
    """A lesson with any entry of a learner: the greener, the more exercises are passed."""
    opacity = 0.08 + 0.42 * (passed / total)
    look = "n here" if is_last else "n"
    tint = f"background:rgba(27,152,128,{opacity:.2f})"
    return f'<td class="{look}" style="{tint}">{passed}/{total}</td>'


def _learners_here(here: Counter, lessons: Counter) -> str:
    """The last row: how many learners have which lesson as their last; nothing where none has."""
    cells = ['<th scope="row" class="who"><b>learners here</b></th>']
    cells += [f'<td class="n">{here[lesson] or ""}</td>' for lesson in lessons]
    return _row(cells)


@dataclass(frozen=True)
class _Held:
    """An exercise that somebody has tried and not passed."""

    exercise: Title
    held: int  # learners who have tried it and not passed
    tried: int  # learners who have tried it
    tries: float  # median number of tries of those whom it holds

    @property
    def name(self) -> str:
        return f"{self.exercise.id}, {escape(self.exercise.title)}"


def what_holds(rows: Rows) -> str:
    """The exercises that most learners have tried and not passed."""
    if not rows:
        return ""
    exercises = _held_exercises(rows)
    if not exercises:
        return "<h2>What holds people</h2><p>Nobody has tried an exercise without passing it.</p>"
    head = [
        '<th scope="col">exercise</th>',
        '<th scope="col" class="n">held</th>',
        '<th scope="col" class="n">tried</th>',
        '<th scope="col" class="n">their tries (median)</th>',
    ]
    body = []
    for each in exercises[:_MOST_EXERCISES]:
        cells = [
            f'<th scope="row">{each.name}</th>',
            f'<td class="n">{each.held}</td>',
            f'<td class="n">{each.tried}</td>',
            f'<td class="n">{each.tries:g}</td>',
        ]
        body.append(_row(cells))
    sentence = _what_holds_most(exercises, len(rows))
    return f"<h2>What holds people</h2><p>{sentence}</p>{_table(head, body)}"


def _held_exercises(rows: Rows) -> list[_Held]:
    """Those that hold most learners first; equals in the course's order."""
    exercises = []
    for exercise in titles():
        entries = [
            found["checks"][exercise.id] for _, found in rows if exercise.id in found["checks"]
        ]
        tries = [n for passed, n in entries if not passed]
        if tries:
            exercises.append(_Held(exercise, len(tries), len(entries), median(tries)))
    return sorted(exercises, key=lambda each: -each.held)


def _what_holds_most(exercises: list[_Held], n_learners: int) -> str:
    held = exercises[0].held
    top = [each for each in exercises if each.held == held]
    which = " and ".join(f"<b>{each.name}</b>" for each in top[:_MOST_NAMED])
    if len(top) == 1:
        holds, what = "holds most people", "it"
    else:
        holds, what = "hold most people", "each"
    if len(top) > _MOST_NAMED:
        holds += f" ({len(top) - _MOST_NAMED} more as many)"
    return (
        f"{which} {holds}: {held} of {learners(n_learners)} have tried {what} and not passed yet."
    )


def _row(cells: list[str]) -> str:
    return f"<tr>{''.join(cells)}</tr>"


def _table(head: list[str], body: list[str]) -> str:
    """A table of the cells of its head and the rows of its body, which scrolls by itself."""
    return (
        f'<div class="wide"><table><thead>{_row(head)}</thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )
