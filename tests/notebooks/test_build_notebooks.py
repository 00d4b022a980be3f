"""The notebook builder, on small sources: good ones, and ones broken in every way that it knows."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import ANY

import build_notebooks as builder
import nbformat
import pytest
from support.paths import ROOT

BUILDER = ROOT / "tools" / "build_notebooks.py"
SOURCE = '''\
# %% [markdown]
# # A lesson
# <details><summary>Hint</summary>
#
# Look closer. <details><summary>More</summary>It is twice.</details>
# </details>

# %%
def double(x):
    """Twice x."""
    ### BEGIN SOLUTION
    return 2 * x
    ### END SOLUTION


# %%
guess = 42  # SOLUTION
table = {"a": 1}

# %% tags=["solution-only"]
print(double(21))

# %% tags=["check"]
print(guess)
'''


@pytest.fixture
def course(tmp_path):
    """A function that writes sources into an empty course and returns its root."""
    (tmp_path / "solutions").mkdir()

    def write(text: str = SOURCE, name: str = "01_first") -> Path:
        (tmp_path / "solutions" / f"{name}.py").write_text(text)
        return tmp_path

    return write


def run(root: Path, capfd, *arguments: str) -> tuple[int, str]:
    """The builder's exit code, and what it printed."""
    code = builder.main(arguments, root)
    captured = capfd.readouterr()
    return code, captured.out + captured.err


def notebook(root: Path, folder: str, name: str = "01_first"):
    return nbformat.read(root / folder / f"{name}.ipynb", as_version=nbformat.NO_CONVERT)


def refused(root: Path, capfd, *arguments: str) -> str:
    """What the builder printed, which found something wrong."""
    code, printed = run(root, capfd, *arguments)
    assert code == 1
    return printed


def run_here(notebook, folder: Path):
    """What ``builder.execute`` does, without a kernel."""
    space = {}
    for count, cell in enumerate([c for c in notebook.cells if c.cell_type == "code"], 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(cell.source, space)
        cell.execution_count = count
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=printed.getvalue())]
    return builder.normalise(notebook, keep_outputs=True)


# What comes out.


def test_a_lesson_has_stubs_for_answers_and_keeps_everything_else(course, capfd):
    root = course()
    assert run(root, capfd, "--lessons-only")[0] == 0
    lesson = notebook(root, "lessons")
    first, prose, function, value, check = (cell.source for cell in lesson.cells)
    assert first == builder.FIRST.read_text().rstrip()
    assert prose.count("<details>") == 2 and "It is twice." in prose
    assert (
        function
        == 'def double(x):\n    """Twice x."""\n    # your code here\n    raise NotImplementedError'
    )
    assert value == 'guess = ...  # your value here\ntable = {"a": 1}'
    assert check == "print(guess)"
    assert all(
        cell.execution_count is None and cell.outputs == []
        for cell in [lesson.cells[0], *lesson.cells[2:]]
    )
    assert lesson.cells[-1].metadata == {"tags": ["check"]}


@pytest.mark.parametrize(
    ("line", "stub"),
    [
        ("n: int = 3  # SOLUTION", "n: int = ...  # your value here"),
        ("    total = a == b  # SOLUTION", "    total = ...  # your value here"),
        ('sizes["a"] = "#"  # SOLUTION', 'sizes["a"] = ...  # your value here'),
        ("self.n = f(x=1)  #SOLUTION", "self.n = ...  # your value here"),
    ],
)
def test_a_marked_value_becomes_an_ellipsis(line, stub):
    assert builder.strip_solution(line, "here") == stub


def test_a_stub_stands_where_the_answer_stood():
    source = """\
class A:
    def f(self):
        if x:
            ### BEGIN SOLUTION
            y()
            ### END SOLUTION
        return 1"""
    expected = """\
class A:
    def f(self):
        if x:
            # your code here
            raise NotImplementedError
        return 1"""
    assert builder.strip_solution(source, "here") == expected


def test_figures_in_prose_are_what_the_cells_have_left(course, capfd):
    prose = "# It is {{double(guess) / 7:.2f}}, and {{guess}}; {{table['a'] +\n# 1:,}}.\n"
    prose += "# It is more. <!-- holds: guess > table['a'] -->\n"
    root = course(f"{SOURCE}\n# %% [markdown]\n{prose}")
    assert run(root, capfd)[0] == 0
    for folder in ("solutions", "lessons"):
        (said,) = [c for c in notebook(root, folder).cells if c.source.startswith("It is")]
        assert said.source == "It is 12.00, and 42; 2.\nIt is more."
    assert notebook(root, "solutions").cells[-1].source.startswith(builder.FIGURES)
    assert run(root, capfd, "--check")[0] == 0
    assert "running" not in run(root, capfd)[1]
    path = root / "lessons" / "01_first.ipynb"
    path.write_text(path.read_text().replace("and 42;", "and 43;"))
    refused(root, capfd, "--check")
    course(f"{SOURCE}\n# %% [markdown]\n{prose.replace('guess >', 'guess <')}")
    assert "AssertionError" in refused(root, capfd)


def test_building_runs_the_solution_and_stores_its_outputs(course, capfd, monkeypatch):
    monkeypatch.setenv("GRADMEM_LIVE", "1")
    root = course(
        SOURCE
        + "\n# %%\nimport os\n\nos.environ['GRADMEM_LIVE'], 'GRADMEM_PROGRESS' in os.environ\n"
    )
    assert run(root, capfd)[0] == 0
    solution = notebook(root, "solutions")
    code = [cell for cell in solution.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [1, 2, 3, 4, 5]
    assert [cell.outputs[0].get("text") for cell in code[2:4]] == ["42\n", "42\n"]
    assert code[4].outputs[0].data["text/plain"] == "('0', True)"
    assert solution.metadata == builder.METADATA
    assert all(set(cell.metadata) <= {"tags"} for cell in solution.cells)
    assert run(root, capfd, "--check") == (0, "lessons: 1, problems: 0\n")

    stored = {path: path.read_bytes() for path in root.glob("*/*.ipynb")}
    code, printed = run(root, capfd)
    assert (code, "running" in printed) == (0, False), "nothing changed, nothing to run"
    code, printed = run(root, capfd, "01")
    assert (code, "running" in printed) == (0, True), "a lesson named is run again"
    assert {path: path.read_bytes() for path in root.glob("*/*.ipynb")} == stored, (
        "the same source, the same bytes"
    )


def test_cell_ids_are_distinct_and_stay_when_another_cell_comes_in(course, capfd):
    root = course(SOURCE + "\n# %%\nprint(1)\n\n# %%\nprint(1)\n")
    run(root, capfd, "--lessons-only")
    before = [cell.id for cell in notebook(root, "lessons").cells]
    assert len(set(before)) == len(before)
    course("# %%\n0\n\n" + SOURCE + "\n# %%\nprint(1)\n\n# %%\nprint(1)\n")
    run(root, capfd, "--lessons-only")
    assert [cell.id for cell in notebook(root, "lessons").cells] == [before[0], ANY, *before[1:]]


def test_what_differs_between_machines_is_left_out():
    cell = nbformat.v4.new_code_cell(
        "1", execution_count=1, metadata={"execution": {"iopub.busy": "now"}, "tags": ["b", "a"]}
    )
    view = {builder.WIDGET_VIEW: {"model_id": "random"}, "text/plain": "MemoryTracker plot"}
    cell.outputs = [nbformat.v4.new_output("display_data", data=view)]
    made = nbformat.v4.new_notebook(
        cells=[cell],
        metadata={"widgets": {}, "language_info": {"name": "python", "version": "3.99"}},
    )
    kept = builder.normalise(made, keep_outputs=True)
    assert kept.metadata == builder.METADATA
    assert kept.cells[0].metadata == {"tags": ["a", "b"]}
    assert kept.cells[0].outputs[0].data == {"text/plain": "MemoryTracker plot"}
    assert cell.outputs[0].data == view, "the given notebook is not changed"


def test_names_choose_lessons(course, capfd):
    root = course()
    course(SOURCE, "02_second")
    assert run(root, capfd, "--lessons-only", "02")[0] == 0
    assert [path.name for path in root.glob("lessons/*")] == ["02_second.ipynb"]
    with pytest.raises(SystemExit) as stopped:
        run(root, capfd, "07")
    assert stopped.value.code == 2
    assert "no lesson '07': there are 01_first, 02_second" in capfd.readouterr().err


LIBRARY = '''\
class Twice:
    def forward(self, x):
        """Twice x,

        as in the lesson."""
        # why not x + x
        return 2 * x


def forward(x):
    return x
'''
NAMED = """\
# %%
class Twice(Base):
    def forward(self, x):
        raise NotImplementedError  # SOLUTION in library/twice.py


class Same:
    def __init__(self):
        pass


def forward(x):
    raise NotImplementedError  # SOLUTION in library/twice.py
"""


def test_an_answer_that_the_library_has_is_inserted_from_there(course, capfd):
    root = course(NAMED)
    (root / "library").mkdir()
    (root / "library" / "twice.py").write_text(LIBRARY)
    (cell,) = builder.read_source(root / "solutions" / "01_first.py").cells
    begin, end = "        ### BEGIN SOLUTION\n", "\n        ### END SOLUTION\n"
    body = "        # why not x + x\n        return 2 * x"
    assert f"def forward(self, x):\n{begin}{body}{end}" in cell.source
    assert cell.source.endswith("    ### BEGIN SOLUTION\n    return x\n    ### END SOLUTION")
    assert run(root, capfd, "--lessons-only")[0] == 0
    lesson = notebook(root, "lessons").cells[1].source
    assert lesson.count("    # your code here\n") == 2 and "return" not in lesson


def test_no_import_of_a_solution_is_unused():
    # The sources cannot tell, since a body that is inserted may need it.
    checked = [
        "ruff",
        "check",
        "--isolated",
        "--select",
        "F401",
        *sorted(map(str, ROOT.glob("solutions/*.ipynb"))),
    ]
    done = subprocess.run([sys.executable, "-m", *checked], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# Sources that are broken.

BROKEN = {
    "no such function": (
        "def f():\n    raise NotImplementedError  # SOLUTION in library.py\n",
        "solutions/01_first.py, cell 1, line 2: there is no function f in",
    ),
    "in no function": (
        "if f:\n    raise NotImplementedError  # SOLUTION in library.py\n",
        "cell 1, line 2: `# SOLUTION in library.py` stands in no function",
    ),
    "unclosed": (
        "def f():\n    ### BEGIN SOLUTION\n    return 1\n",
        (
            "solutions/01_first.py, cell 1, line 2: BEGIN SOLUTION is never closed; add ### END "
            "SOLUTION"
        ),
    ),
    "nested": (
        (
            "def f():\n    ### BEGIN SOLUTION\n    x = 1\n    ### BEGIN SOLUTION\n    ### END "
            "SOLUTION\n"
        ),
        "cell 1, line 4: BEGIN SOLUTION inside the block that line 2 opened; close that first",
    ),
    "unopened": (
        "def f():\n    return 1\n    ### END SOLUTION\n",
        "cell 1, line 3: END SOLUTION without a BEGIN SOLUTION before it",
    ),
    "at the margin": (
        "### BEGIN SOLUTION\nx = 1\n### END SOLUTION\n",
        "cell 1, line 1: BEGIN SOLUTION at the left margin, where its stub would stop Run All",
    ),
    "misspelt": (
        "def f():\n    # BEGIN SOLUTION\n    return 1\n",
        "cell 1, line 2: a SOLUTION mark that is none of the known forms: # BEGIN SOLUTION",
    ),
    "no value": (
        "print(1)  # SOLUTION\n",
        "cell 1, line 1: a SOLUTION mark that is none of the known forms: print(1)",
    ),
    "half a value": (
        "x = max(  # SOLUTION\n    1, 2\n)\n",
        "cell 1: what is left for the lesson is not Python",
    ),
    "empty": (
        "\n# %%\nx = 1\n",
        "cell 1: an empty code cell, which no run ever executes; delete it",
    ),
}


@pytest.mark.parametrize("mode", [["--lessons-only"], ["--check"]], ids=["build", "check"])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_source_is_named_with_its_cell_and_line(course, capfd, kind, mode):
    text, message = BROKEN[kind]
    root = course("# %%\n" + text)
    assert message in refused(root, capfd, *mode)
    assert not (root / "lessons").exists(), "nothing is written from a broken source"


def test_a_long_cell_is_a_warning_only(course, capfd):
    root = course(
        "# %%\n# a comment does not count\n" + "\n\n".join(f"x{i} = {i}" for i in range(15)) + "\n"
    )
    assert run(root, capfd, "--lessons-only") == (0, "lessons: 1, problems: 0\n")
    course("# %%\n" + "\n".join(f"x{i} = {i}" for i in range(16)) + "\n")
    code, printed = run(root, capfd, "--lessons-only")
    assert code == 0
    assert "warning: solutions/01_first.py, cell 1: more than 15 lines of code" in printed


def test_a_solution_that_raises_is_reported_and_not_stored(course, capfd):
    text = (
        '# %%\n1 / 0\n\n# %%\nx = 1\n\n# %%\nraise KeyError("second")\n\n# %% '
        'tags=["raises-exception"]\n1 / 0\n'
    )
    root = course(text)
    printed = refused(root, capfd)
    assert "solutions/01_first.ipynb, cell 1: raised ZeroDivisionError: division by zero" in printed
    assert "solutions/01_first.ipynb, cell 3: raised KeyError: 'second'" in printed
    assert "cell 4" not in printed, "an error that the source announces is none"
    assert not (root / "solutions" / "01_first.ipynb").exists()


# Notebooks out of step.


@pytest.fixture
def without_a_kernel(monkeypatch):
    monkeypatch.setattr(builder, "execute", run_here)


@pytest.fixture
def built(course, capfd, without_a_kernel):
    root = course()
    assert run(root, capfd)[0] == 0
    assert run(root, capfd, "--check")[0] == 0
    return root


def edit(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


LESSON, SOLUTION = "lessons/01_first.ipynb", "solutions/01_first.ipynb"
# The file, and the cell and what is written into it; or the whole text of the file.
DRIFT = {
    "lesson changed by hand": (LESSON, 0, {"source": ["# Mine"]}),
    "lesson with an output": (LESSON, 1, {"execution_count": 1}),
    "lesson missing": (LESSON, None, None),
    "source changed": ("solutions/01_first.py", None, SOURCE.replace("2 * x", "x + x")),
    "solution changed by hand": (SOLUTION, 2, {"source": ["guess = 43"]}),
    "solution with timings": (SOLUTION, 2, {"metadata": {"execution": {"iopub": "now"}}}),
    "solution not a notebook": (SOLUTION, None, "{"),
    "solution missing": (SOLUTION, None, None),
}


@pytest.mark.parametrize("kind", DRIFT)
def test_check_fails_on_any_drift(built, capfd, kind):
    name, cell, now = DRIFT[kind]
    if cell is not None:
        edit(built / name, lambda nb: nb["cells"][cell].update(now))
    elif now is not None:
        (built / name).write_text(now)
    else:
        (built / name).unlink()
    printed = refused(built, capfd, "--check")
    folder = "lessons" if kind.startswith("lesson") else "solutions"
    assert f"{folder}/01_first.ipynb: out of step with its source; run `make notebooks`" in printed


def outputs_of(root: Path) -> list:
    return [cell.get("outputs") for cell in notebook(root, "solutions").cells if "outputs" in cell]


def test_other_prose_is_stored_without_a_run(built, capfd):
    before = outputs_of(built)
    (built / "solutions/01_first.py").write_text(
        SOURCE.replace("# # A lesson", "# # Another\n\n# %% [markdown]\n# New.")
    )
    refused(built, capfd, "--check")
    code, printed = run(built, capfd)
    assert (code, "running" in printed) == (0, False)
    assert run(built, capfd, "--check")[0] == 0
    now = (built / "solutions/01_first.ipynb").read_text()
    assert "Another" in now and "A lesson" not in now and "New." in now
    assert outputs_of(built) == before and any(before)


def test_check_fails_on_a_cell_that_was_not_executed(built, capfd):
    edit(built / SOLUTION, lambda nb: nb["cells"][-1].update(execution_count=None))
    said = "solutions/01_first.ipynb, cell 5: never executed"
    assert said in refused(built, capfd, "--check")


@pytest.mark.parametrize("folder", ["solutions", "lessons"])
def test_a_notebook_without_a_source_is_an_orphan(built, capfd, folder):
    (built / folder / "09_gone.ipynb").write_text("{}")
    said = f"{folder}/09_gone.ipynb: no solutions/09_gone.py makes it; delete it or add that"
    assert said in refused(built, capfd, "--check")


def test_a_picture_shows_what_a_later_lesson_has_printed_only_now(course, capfd, without_a_kernel):
    for name, peak in (("01_first", 5), ("02_second", 3)):
        text = f"""\
# %% [markdown]
# # {name[:2]} · A lesson
#
# {builder.PICTURE}

# %%
print("forward 2.5 MiB, backward {peak}.0 MiB, optimizer_step 2.0 MiB\\ncard 3 MiB: fits")
"""
        root = course(text, name)
    assert run(root, capfd)[0] == 0
    words = "01 A lesson 5, 02 A lesson 3. The card has 3. This is lesson 01."
    for folder, cell in (("lessons", 1), ("solutions", 0)):
        assert words in notebook(root, folder).cells[cell].source
    assert run(root, capfd, "--check")[0] == 0
