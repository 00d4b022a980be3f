"""Writes the teacher's pages from teaching/notes.md: docs/teaching.md with run sheets and habits,
and docs/teaching/NN.md for each lesson, with its questions and the wrong answers to expect.

``make notebooks`` runs this file. It also writes gradmem_lib/course/teacher/questions.json, which
the class board reads, gradmem_lib/course/learner/exercises.json with the exercises' titles, and the
minutes in README.md.

In the text, a block "```run 90" is a run sheet of at most 90 minutes. Its lines are "10 | what" for
ten minutes, or "L01 1-3 | what" for sections of a lesson ("L01" for all of it). What stands under
"### 01" goes to that lesson's own page; the first of these headings becomes the list of all pages.
"{{06: Explore}}" is what lesson 06 says under that heading, from the second paragraph on.
"""

from __future__ import annotations

import json
import re
from html import escape
from math import ceil
from pathlib import Path

from build_notebooks import ROOT, Problem, write
from lesson_facts import Asked, Lesson, StatedExercise, lessons
from sheet_facts import sheet

from gradmem_lib.course.catalogue import get
from gradmem_lib.course.judge.exercise import parsed

TEXT, PAGE = ROOT / "teaching" / "notes.md", ROOT / "docs" / "teaching.md"
FOLDER = ROOT / "docs" / "teaching"  # a page for each lesson
QUESTIONS = ROOT / "gradmem_lib" / "course" / "teacher" / "questions.json"
README = ROOT / "README.md"
TITLES = ROOT / "gradmem_lib" / "course" / "learner" / "exercises.json"
ASKING = 1  # minute more that a room takes for a prediction: the picture, and a word about it
STEP = 5  # rows of a run sheet are whole multiples
RUN = re.compile(r"^```run (\d+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OF_LESSON = re.compile(r"^### (\d\d)\n(.*?)(?=^###? |\Z)", re.MULTILINE | re.DOTALL)
MADE = "<!-- make notebooks builds this page from teaching/notes.md -->"


def page(found: list[Lesson], text: str) -> str:
    """docs/teaching.md from its handwritten part."""
    by_number = {lesson.number: lesson for lesson in found}
    text = RUN.sub(lambda match: run_sheet(int(match[1]), match[2], by_number), text)
    text = re.sub(
        r"\{\{(\d\d): (.*?)\}\}", lambda match: by_number[match[1]].cell_under(match[2]), text
    )
    first = OF_LESSON.search(text).start()
    text = text[:first] + table_of(found) + OF_LESSON.sub("", text[first:])
    return f"{MADE}\n\n{text.rstrip()}\n"


def lesson_pages(found: list[Lesson], text: str) -> dict[Path, str]:
    """docs/teaching/NN.md for each lesson."""
    notes = dict(OF_LESSON.findall(text))
    lacking = [lesson.number for lesson in found if lesson.number not in notes]
    if lacking:
        raise Problem(
            f"{TEXT.name} has no notes for {', '.join(lacking)}: add a heading '### "
            f"{lacking[0]}' to it"
        )
    return {
        FOLDER / f"{lesson.number}.md": of_lesson(lesson, notes[lesson.number].strip())
        for lesson in found
    }


def table_of(found: list[Lesson]) -> str:
    """The lessons with their minutes, each linked to its own page."""
    lines = ["| lesson | alone | optional | with a room |", "|---|---|---|---|"]
    for lesson in found:
        minutes, optional = lesson.minutes.stated
        name = f"[{lesson.number} · {lesson.title}](teaching/{lesson.number}.md)"
        lines.append(f"| {name} | {minutes} | {optional or ''} | {part_of(lesson, '')[0]} |")
    return "\n".join(lines) + "\n\n"


def run_sheet(most: int, rows: str, found: dict[str, Lesson]) -> str:
    """A table of rows that begin when the one before ends.

    ``Problem`` if they take more than ``most`` minutes.
    """
    lines, at = ["| from | minutes | what |", "|---|---|---|"], 0
    for row in rows.strip().splitlines():
        left, _, what = (part.strip() for part in row.partition("|"))
        if left.isdigit():
            took = int(left)
        elif lesson := re.fullmatch(r"L(\d\d) ?([\d-]*)", left):
            number, sections = lesson.groups()
            if number not in found:  # not run yet
                continue
            took, where = part_of(found[number], sections)
            what = f"**{where}.** {what}".strip()
        else:
            raise Problem(
                "a run sheet's row begins with minutes or a lesson, such as 10 or L01 1-3, not "
                f"{left!r}"
            )
        lines.append(f"| {at // 60}:{at % 60:02} | {took} | {what} |")
        at += took
    if at > most:
        raise Problem(f"a run sheet of {most} minutes takes {at}:\n{rows}")
    return "\n".join([*lines, f"| {at // 60}:{at % 60:02} | | the end |"])


def part_of(lesson: Lesson, sections: str) -> tuple[int, str]:
    """Minutes that a room takes for some sections ("1-3"; "" for all), in steps, and their name."""
    name = f"{lesson.number} {lesson.title}"
    parts = {
        title: part.total
        for title, part in lesson.sections.items()
        if title[0].isdigit()  # not "More practice", nor what is optional
    }
    if sections:
        first, _, last = sections.partition("-")
        wanted = range(int(first), int(last or first) + 1)
        parts = {title: n for title, n in parts.items() if int(title.partition(" ")[0]) in wanted}
        if len(parts) != len(wanted):
            raise Problem(f"lesson {lesson.number} has no sections {sections}")
        name += (
            f", to the end of section {last}"
            if first == "0"
            else f", section{'s' * bool(last)} {sections.replace('-', ' to ')}"
        )
    asked = sum(asked.section in parts for asked in lesson.asked)
    return ceil(round(sum(parts.values()) + ASKING * asked, 3) / STEP) * STEP, name


def of_lesson(lesson: Lesson, notes: str) -> str:
    """The page about one lesson."""
    minutes, optional = lesson.minutes.stated
    more = f", {optional} more for optional exercises" if optional else ""
    room = part_of(lesson, "")[0]
    # Written for one page: a bold line is a heading here, and the other headings are elsewhere.
    notes = notes.replace("**Where rooms get stuck**", "## Where rooms get stuck")
    notes = notes.replace("](#", "](../teaching.md#")
    return "\n".join(
        [
            MADE,
            "",
            f"# Teaching {lesson.number} · {escape(lesson.title)}",
            "",
            (
                f"{minutes} minutes{more}; about {room} with a room. [All lessons, and the run "
                "sheets](../teaching.md#lesson-by-lesson)."
            ),
            "",
            (
                f"**Learners need** {lesson.needs}{_seconds(lesson)} [With answers and "
                f"outputs](../../solutions/{lesson.source.stem}.ipynb)."
            ),
            "",
            (
                f"**What should stick:** {sheet(lesson).rule} ([sheet for the "
                f"wall](../sheets/{lesson.number}.svg))"
            ),
            "",
            notes,
            "",
            "## Ask, and wait for the guesses, before the cell runs",
            "",
            "| | where | question | before the cell | the lesson finds |",
            "|---|---|---|---|---|",
            *(
                f"| {asked.id} | {_where(asked)} | {_cell(asked.question)} "
                f"| `{_cell(asked.before)}` | {_cell(asked.found)}"
                f"{', in its short form' if asked.differs else ''} |"
                for asked in lesson.asked
            ),
            "",
            "## Exercises: wrong answers to expect, and what `check` says",
            "",
            "Each line is a change of the right answer, and what is said of it.",
            "",
            *(line for stated in lesson.exercises for line in _exercise(stated)),
        ]
    )


def _where(asked: Asked) -> str:
    number, _, rest = asked.section.partition(" ")
    if number == "Optional:":
        return f"optional: {_cell(rest)}"
    return f"section {number}, minute {asked.minute}"


def _seconds(lesson: Lesson) -> str:
    """What the README's table of the course says of the time that Run All takes."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    row = re.search(
        rf"^\| \[.*?\]\(lessons/{lesson.source.stem}\.ipynb\).*\| (.*?) \|$", readme, re.MULTILINE
    )
    return f" Run All takes {row[1]} on two CPU cores." if row else ""


def _exercise(stated: StatedExercise) -> list[str]:
    optional = " · optional" if stated.optional else ""
    lines = [
        f"### {stated.id} {escape(stated.title)}",
        "",
        f"{stated.dots} · {stated.minutes} minutes{optional}",
        "",
    ]
    for changes, says in parsed(get(stated.id).mistakes):
        written = ", ".join(f"`{change}`" for change in changes)
        lines.append(f"- {written}: “{_plain(says)}”")
    return [*lines, ""]


def _plain(words: str) -> str:
    return re.sub(r"([*`$])", r"\\\1", escape(words, quote=False))


def _cell(words: str) -> str:
    return words.replace("|", "\\|")


def questions(found: list[Lesson]) -> str:
    """What each prediction asks, by its id: the class board shows it beside the guesses."""
    asked = {asked.id: asked.question for lesson in found for asked in lesson.asked}
    return json.dumps(asked, indent=1, ensure_ascii=False) + "\n"


def titles(found: list[Lesson]) -> str:
    """Id, title and difficulty of every exercise, in order."""
    rows = []
    for lesson in found:
        for stated in lesson.exercises:
            row = {"id": stated.id, "title": stated.title, "difficulty": stated.dots.count("●")}
            rows.append(json.dumps(row, ensure_ascii=False))
    return "[\n" + ",\n".join(rows) + "\n]\n"


def readme(found: list[Lesson], text: str) -> str:
    """README.md with the minutes that each lesson states in its table of lessons."""
    for lesson in found:
        row = rf"^(\| \[[^]]*\]\(lessons/{lesson.source.stem}\.ipynb\) \|[^|]*\|) \d+ \|"
        text = re.sub(row, rf"\1 {lesson.minutes.stated[0]} |", text, flags=re.MULTILINE)
    return text


def pages() -> dict:
    """What belongs into which file."""
    found, text = lessons(), TEXT.read_text(encoding="utf-8")
    return {PAGE: page(found, text), **lesson_pages(found, text)} | {
        QUESTIONS: questions(found),
        TITLES: titles(found),
        README: readme(found, README.read_text(encoding="utf-8")),
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, content in pages().items():
        write(path, content)
