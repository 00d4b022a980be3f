"""The teacher's kit: sheets for the wall and docs/teaching.md say what lessons and exercises
say today.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

import build_page
import pytest
import sheets
from build_notebooks import ROOT, Problem
from lesson_facts import lessons
from sheet_facts import sheet

from gradmem_lib.__main__ import parser
from gradmem_lib.course.catalogue import all_exercises

NUMBERS = sorted(path.name[:2] for path in ROOT.glob("solutions/[0-9][0-9]_*.ipynb"))


@pytest.fixture(params=NUMBERS)
def lesson(request):
    return next(lesson for lesson in lessons() if lesson.number == request.param)


def test_the_sheets_are_those_of_the_lessons():
    made = sheets.sheets()
    assert sorted(made) == sorted(sheets.FOLDER.iterdir())
    stale = [path.name for path, text in made.items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run make notebooks"


def test_a_sheet_is_read_from_two_metres(lesson):
    facts = sheet(lesson)
    assert len(facts.numbers) == 3
    for _, words in facts.numbers:
        assert len(sheets.lines_of(words, 109, sheets.LABEL)) <= 2, words
    assert len(sheets.lines_of(facts.rule, 172, 9.5, sheets.BOLD)) <= 3
    texts = list(
        ElementTree.fromstring(sheets.draw(lesson, facts)).iter("{http://www.w3.org/2000/svg}text")
    )
    assert len(texts) > 10
    for text in texts:
        wide = len(text.text) * float(text.get("font-size")) * 0.5
        x, anchor = float(text.get("x")), text.get("anchor") or text.get("text-anchor")
        left = x - {"start": 0, "middle": wide / 2, "end": wide}[anchor]
        assert left > 5 and left + wide < 205, text.text
    assert sum(float(text.get("font-size")) < 4.4 for text in texts) == 1  # the line at the foot


def test_a_figure_that_a_lesson_prints_no_more_is_missed():
    lesson = next(lesson for lesson in lessons() if lesson.number == "04")
    lesson.printed = re.sub("boundaries,", "limits,", lesson.printed)
    with pytest.raises(LookupError, match=r"04_gradient_checkpointing.py prints nothing like"):
        sheet(lesson)
    del lesson.printed  # read again
    assert sheet(lesson).numbers


def test_every_prediction_has_its_question_and_its_answer(lesson):
    ids = re.findall(
        r"predict_first\(\s*\"(\d+\.\w)\"", "\n".join(cell.source for cell in lesson.cells)
    )
    assert [asked.id for asked in lesson.asked] == ids
    for asked in lesson.asked:
        assert asked.question and asked.before and asked.found


def test_sections_add_up_to_the_lesson(lesson):
    assert sum(part.total for part in lesson.sections.values()) == pytest.approx(
        lesson.minutes.total
    )


def test_the_teachers_page_is_that_of_the_lessons():
    stale = [
        path.name
        for path, text in build_page.pages().items()
        if path.read_text(encoding="utf-8") != text
    ]
    assert not stale, "run make notebooks"


def test_every_known_mistake_is_on_the_page_where_its_exercise_is():
    page = build_page.PAGE.read_text(encoding="utf-8")
    parts = re.split(r"<summary>(\d+\.\d+) ", page)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    shown = {lesson.number for lesson in lessons()}
    exercises = [e for e in all_exercises() if e.id.partition(".")[0].zfill(2) in shown]
    assert list(found) == [exercise.id for exercise in exercises]
    for exercise in exercises:
        for mistake in exercise.mistakes:
            assert build_page._plain(mistake.says) in found[exercise.id], mistake.name


def test_what_the_page_points_to_is_there():
    page = build_page.PAGE.read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-")
        for line in page.splitlines()
        if line[:1] == "#"
    }
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page):
        file, _, anchor = target.partition("#")
        assert (build_page.PAGE.parent / file).exists() and (file or anchor in headings), target
    assert page.count("<details>") == page.count("</details>")


def test_the_commands_on_the_page_are_commands():
    page = build_page.PAGE.read_text(encoding="utf-8")
    commands = set(re.findall(r"(?:^|`)gradmem ([^`\n]+)", page, re.MULTILINE))
    assert len(commands) >= 5 and not re.search(r"`gradmem\n|-m gradmem_lib ", page)
    for command in commands:
        assert parser().parse_args(command.split()).run, command


def test_a_run_sheet_that_takes_too_long_is_refused():
    found = {lesson.number: lesson for lesson in lessons()}
    table = build_page.run_sheet(60, "10 | hello\nL01 0-3 | in pairs", found)
    took = (
        sum(part.total for name, part in found["01"].sections.items() if name[0] in "0123") + 2 * 2
    )
    assert (
        "| 0:10 | 25 | **01 Memory accounting, to the end of section 3.** in pairs |" in table
        and 20 < took <= 25
    )
    with pytest.raises(Problem, match="of 60 minutes takes 80"):
        build_page.run_sheet(60, "10 | hello\nL01 | all of it", found)
    with pytest.raises(Problem, match="no sections 7-20"):
        build_page.run_sheet(60, "L01 7-20 | beyond its end", found)
