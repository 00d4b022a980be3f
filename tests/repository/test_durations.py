"""Recorded durations: they are of files that exist, long ones run first, ``--quick`` leaves them
out, and a run records them.
"""

import json
import os
import shutil

import pytest
from support.paths import ROOT

DURATIONS = json.loads((ROOT / "tests" / "durations.json").read_text(encoding="utf-8"))
pytest_plugins = ["pytester"]


def test_every_recorded_file_exists():
    assert not [file for file in DURATIONS if not (ROOT / file).exists()]


@pytest.fixture
def run(pytester, monkeypatch):
    """A run of the long file ``tests/test_b.py`` and the short file ``tests/test_a.py``, with this
    project's conftest.
    """
    shutil.copy(ROOT / "conftest.py", pytester.path)
    folder = pytester.mkdir("tests")
    for name in ("a", "b"):
        (folder / f"test_{name}.py").write_text("def test_one(): pass\n")
    (folder / "durations.json").write_text('{"tests/test_b.py": 30, "tests/test_gone.py": 30}')
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tools")]))
    options = ("--rootdir", pytester.path, "-p", "no:cacheprovider", "-v")
    return lambda *more: pytester.runpytest_subprocess(*options, *more)


def test_the_long_file_runs_first(run):
    run().stdout.fnmatch_lines(["*test_b.py::*", "*test_a.py::*"])


def test_quick_leaves_the_long_file_out(run):
    result = run("--quick")
    result.stdout.fnmatch_lines(["*test_a.py::*"])
    result.stdout.no_fnmatch_line("*test_b.py::*")


def test_a_run_records_what_it_took(run, pytester):
    run("--record-durations")
    recorded = json.loads((pytester.path / "tests" / "durations.json").read_text())
    assert recorded == {}, "test_b.py is quick now, and test_gone.py is no file"
