"""The table of symptoms leads to places that are there, and each leak to find is the script that
its exercise judges.
"""

import inspect
import re

import pytest
from support.paths import ROOT

from gradmem_lib.course.lessons.lesson_01.exercises_leak import with_history
from gradmem_lib.course.lessons.lesson_03.exercises_leak import with_entropy
from gradmem_lib.course.lessons.lesson_05.exercises_leak import resume
from gradmem_lib.course.lessons.lesson_06.exercises import evaluate

LESSONS = {path.stem: path.read_text(encoding="utf-8") for path in ROOT.glob("solutions/[0-9]*.py")}
LESSON = "06_before_you_rent"


def test_each_symptom_leads_to_a_section_or_an_exercise_that_is_there():
    table = LESSONS[LESSON].partition("| what you see |")[2].partition("\n#\n")[0]
    places = re.findall(r"\]\((\w+)\.ipynb\), \"(.+?)\"", table)
    places += [(LESSON, title) for title in re.findall(r"below, \"(.+?)\"", table)]
    assert len(places) >= table.count("\n# | ") - 1
    for name, title in places:
        heading = rf"^# ##+ (\d+|Exercise [\d.]+|Optional)( ·|:) {re.escape(title)}$"
        assert re.search(heading, LESSONS[name], re.MULTILINE), (name, title)


@pytest.mark.parametrize(
    "script, name",
    [
        (with_history, "01_memory_accounting"),
        (with_entropy, "03_gradient_accumulation"),
        (resume, "05_fine_tuning"),
        (evaluate, LESSON),
    ],
)
def test_the_script_of_a_leak_is_the_one_in_its_lesson_with_its_lines_numbered(script, name):
    lines = inspect.getsource(script).splitlines()
    del lines[1]  # its docstring
    shown = [f"{line}  # {number}" for number, line in enumerate(lines, 1)]
    assert "\n".join(shown) in LESSONS[name]
