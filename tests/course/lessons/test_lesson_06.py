"""The table of symptoms leads to places that are there, and each leak to find is the script that
its exercise judges.
"""

import re
import sys

import pytest
from support.paths import ROOT

from gradmem_lib.course import catalogue
from gradmem_lib.course.judge.verdict import judge

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
    "id, name",
    [
        ("1.9", "01_memory_accounting"),
        ("3.10", "03_gradient_accumulation"),
        ("5.11", "05_fine_tuning"),
        ("6.7", LESSON),
    ],
)
def test_the_script_that_a_lesson_shows_leaks_as_its_exercise_says(id, name):
    exercise = catalogue.get(id)
    numbered = re.findall(r"^(.*\S)  # (\d+)$", LESSONS[name], re.MULTILINE)
    assert [int(number) for _, number in numbered] == list(range(1, len(numbered) + 1))
    names = dict(vars(sys.modules[exercise.right.__module__]))
    exec("\n".join(line for line, _ in numbered), names)
    line, _ = exercise.right()
    script = names[re.match(r"def (\w+)", numbered[0][0])[1]]
    _, says = next(exercise.wrong_answers())
    assert says in judge(exercise, lambda: (line, script)).line
