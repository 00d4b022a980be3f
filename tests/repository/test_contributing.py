"""CONTRIBUTING names files that are there, and its map has every room."""

import re

import pytest
from support.paths import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MUTANTS = (ROOT / "tests" / "mutants.md").read_text(encoding="utf-8")
# Of the repository's root: "solutions/NN_name.py" stands for one file of a kind, and is no path.
STARTS = ("gradmem_lib", "tests", "tools", "teaching", "solutions", "benchmarks", "site", "docs")
PATHS = sorted(
    {
        path.rstrip("/.")
        for path in re.findall(rf"(?<![\w/.-])(?:{'|'.join(STARTS)})/[\w./-]*", TEXT + MUTANTS)
    }
)


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_is_named_exists(path):
    pattern = re.sub(r"\bNN_name\b", "[0-9][0-9]_*", path).replace("lesson_NN", "lesson_06")
    assert list(ROOT.glob(pattern)), path


def test_the_map_has_every_room():
    library = ROOT / "gradmem_lib"
    rooms = [folder for home in (library, library / "course") for folder in home.iterdir()]
    for room in rooms:
        if (room / "__init__.py").exists() and room.name != "course":
            named = room.relative_to(ROOT).as_posix()
            assert f"| `{named}/` |" in TEXT, named


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`make (\w+)", TEXT))))
def test_a_command_that_is_named_is_in_the_makefile(command):
    assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_mutants_are_of_modules_that_exist():
    modules = re.findall(r"^\| `([\w/]+)` \|", MUTANTS, re.MULTILINE)
    assert len(modules) > 40
    for module in modules:
        file = ROOT / "gradmem_lib" / f"{module}.py"
        package = ROOT / "gradmem_lib" / module / "__init__.py"
        assert file.exists() or package.exists(), module
