"""CONTRIBUTING and the recorded durations name files that are there, and the map has every room."""

import re

from support.paths import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MUTANTS = (ROOT / "tests" / "mutants.md").read_text(encoding="utf-8")
DURATIONS = (ROOT / "tests" / "durations.json").read_text(encoding="utf-8")
NAMED = TEXT + MUTANTS + DURATIONS
# Of the repository's root: "solutions/NN_name.py" stands for one file of a kind, and is no path.
STARTS = ("gradmem_lib", "tests", "tools", "teaching", "solutions", "benchmarks", "site", "docs")
PATHS = sorted(
    {
        path.rstrip("/.")
        for path in re.findall(
            rf"(?<![\w/.-])(?:{'|'.join(STARTS)})/[\w./-]*", TEXT + MUTANTS + DURATIONS
        )
    }
)


def test_every_path_that_is_named_exists():
    assert len(PATHS) > 40
    missing = []
    for path in PATHS:
        pattern = re.sub(r"\bNN_name\b", "[0-9][0-9]_*", path).replace("lesson_NN", "lesson_06")
        if not list(ROOT.glob(pattern)):
            missing.append(path)
    assert not missing


def test_the_map_has_every_room():
    library = ROOT / "gradmem_lib"
    missing = []
    for home in (library, library / "course"):
        for init in home.glob("*/__init__.py"):
            room = init.parent.relative_to(ROOT).as_posix()
            if room != "gradmem_lib/course" and f"| `{room}/` |" not in TEXT:
                missing.append(room)
    assert not missing


def test_every_command_that_is_named_is_in_the_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^(\w+):", makefile, re.MULTILINE)
    named = re.findall(r"`make (\w+)", TEXT)
    assert named
    missing = {*named} - {*targets}
    assert not missing
