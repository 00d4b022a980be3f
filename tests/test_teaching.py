"""The teacher's kit: sheets for the wall and TEACHING.md say what lessons and exercises say today."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import sheets
from lesson_facts import lessons
from sheet_facts import sheet

LESSONS = lessons()
every_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.number)


def test_the_sheets_are_those_of_the_lessons():
    made = sheets.sheets()
    assert sorted(made) == sorted(sheets.FOLDER.iterdir())
    stale = [path.name for path, text in made.items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run python tools/sheets.py"


@every_lesson
def test_a_sheet_is_read_from_two_metres(lesson):
    facts = sheet(lesson)
    assert len(facts.numbers) == 3
    for _, words in facts.numbers:
        assert len(sheets.lines_of(words, 109, sheets.LABEL)) <= 2, words
    assert len(sheets.lines_of(facts.rule, 172, 9.5, sheets.BOLD)) <= 3
    texts = list(ElementTree.fromstring(sheets.draw(lesson, facts)).iter("{http://www.w3.org/2000/svg}text"))
    assert len(texts) > 10
    for text in texts:
        wide = len(text.text) * float(text.get("font-size")) * 0.5
        x, anchor = float(text.get("x")), text.get("anchor") or text.get("text-anchor")
        left = x - {"start": 0, "middle": wide / 2, "end": wide}[anchor]
        assert left > 5 and left + wide < 205, text.text
    assert sum(float(text.get("font-size")) < 4.4 for text in texts) == 1  # the line at the foot


def test_a_figure_that_a_lesson_prints_no_more_is_missed():
    lesson = next(lesson for lesson in LESSONS if lesson.number == "04")
    lesson.printed = re.sub("boundaries,", "limits,", lesson.printed)
    with pytest.raises(LookupError, match=r"04_gradient_checkpointing.py prints nothing like"):
        sheet(lesson)
    del lesson.printed  # read again
    assert sheet(lesson).numbers


@every_lesson
def test_every_prediction_has_its_question_and_its_answer(lesson):
    ids = re.findall(r"predict_first\(\s*\"(\d+\.\w)\"", "\n".join(cell.source for cell in lesson.cells))
    assert [asked.id for asked in lesson.asked] == ids
    for asked in lesson.asked:
        assert asked.question and asked.before and asked.found


@every_lesson
def test_sections_add_up_to_the_lesson(lesson):
    assert sum(part.total for part in lesson.sections.values()) == pytest.approx(lesson.minutes.total)
