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
from gradmem_lib.course.judge.exercise import parsed

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


def test_the_page_of_run_sheets_is_read_in_twenty_minutes():
    assert build_page.PAGE.stat().st_size <= 25_000


def test_every_exercise_and_its_mistakes_are_on_the_lessons_page(lesson):
    page = (build_page.FOLDER / f"{lesson.number}.md").read_text(encoding="utf-8")
    parts = re.split(r"^### (\d+\.\d+) ", page, flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    exercises = all_exercises(lesson.number)
    assert list(found) == [exercise.id for exercise in exercises]
    for exercise in exercises:
        for _, says in parsed(exercise.mistakes):
            assert build_page._plain(says) in found[exercise.id]


def test_no_page_is_left_of_a_lesson_that_is_gone():
    written = [path for path in build_page.pages() if path.parent == build_page.FOLDER]
    assert sorted(written) == sorted(build_page.FOLDER.iterdir())


def headings(page: str) -> set[str]:
    """Of a page in markdown, as links name them."""
    return {
        re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-")
        for line in page.splitlines()
        if line[:1] == "#"
    }


def test_what_the_pages_point_to_is_there():
    for path in [build_page.PAGE, *build_page.FOLDER.iterdir()]:
        page = re.sub(r"`[^`\n]*`", "", path.read_text(encoding="utf-8"))  # code has no links
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page):
            file, _, anchor = target.partition("#")
            other = (path.parent / file).resolve() if file else path
            assert other.exists(), (path.name, target)
            if anchor:
                assert anchor in headings(other.read_text(encoding="utf-8")), (path.name, target)


ADAPTERS = re.compile(r"\bQ?LoRA\b|lora|4 bits|NF4|quantized_base")
TEACH_ADAPTERS = {("05", "9"), ("09", "6")}  # LoRA: lesson and section


def sections_of(row: str, found: dict) -> list[tuple[str, str, str]]:
    """The sections of lessons that a run sheet's row goes through: lesson, number, text."""
    what = re.match(r"L(\d\d) ?(?:(\d+)(?:-(\d+))?)?", row)
    if not what:
        return [("", "", row)]
    lesson = found[what[1]]
    texts: dict[str, str] = {}
    section = "0"
    for cell in lesson.cells:
        parts = re.split(r"^(?=## )", cell.source, flags=re.MULTILINE)
        for part in parts if cell.cell_type == "markdown" else [cell.source]:
            if cell.cell_type == "markdown" and part.startswith("## "):
                section = part.split()[1]
            texts[section] = texts.get(section, "") + part
    wanted = range(int(what[2]), int(what[3] or what[2]) + 1) if what[2] else range(1, 99)
    return [(what[1], name, text) for name, text in texts.items() if name in map(str, wanted)]


def meets_adapters_too_early(rows: list[str], found: dict) -> list[tuple[str, str]]:
    """The sections with adapters that come before the one that teaches them."""
    early = []
    for row in rows:
        for lesson, section, text in sections_of(row, found):
            if (lesson, section) in TEACH_ADAPTERS:
                return early
            if ADAPTERS.search(text):
                early.append((lesson, section))
    return early


def test_no_run_sheet_needs_adapters_before_it_teaches_them():
    found = {lesson.number: lesson for lesson in lessons()}
    text = build_page.TEXT.read_text(encoding="utf-8")
    before, _, week = text.partition("### A week")
    sheets = [match[2].splitlines() for match in build_page.RUN.finditer(before)]
    # the mornings of a week are one course
    sheets.append([row for m in build_page.RUN.finditer(week) for row in m[2].splitlines()])
    assert len(sheets) == 5
    for rows in sheets:
        assert meets_adapters_too_early(rows, found) == [], rows
    assert "Each technique comes before the lesson that needs it" in " ".join(text.split())
    assert meets_adapters_too_early(["L06 4 | the cards", "L09 6-7 | LoRA"], found) == [("06", "4")]


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
        sum(part.total for name, part in found["01"].sections.items() if name[0] in "0123")
        + 2 * build_page.ASKING
    )
    assert (
        "| 0:10 | 30 | **01 Memory accounting, to the end of section 3.** in pairs |" in table
        and 25 < took <= 30
    )
    with pytest.raises(Problem, match="of 60 minutes takes 75"):
        build_page.run_sheet(60, "10 | hello\nL01 | all of it", found)
    with pytest.raises(Problem, match="no sections 7-20"):
        build_page.run_sheet(60, "L01 7-20 | beyond its end", found)
