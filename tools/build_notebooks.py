"""Builds the notebooks from their one source: ``solutions/NN_name.py``, in jupytext's percent
format.

    python tools/build_notebooks.py           build what has changed, and run it where its code has
    python tools/build_notebooks.py 01        build lesson 01, changed or not
    python tools/build_notebooks.py --check   change nothing, fail if anything is out of step

``solutions/NN_name.ipynb`` is the source executed from top to bottom; ``lessons/NN_name.ipynb`` is
what a learner opens: without outputs, with the answers cut out, and with ``tools/first_cell.py`` as
a first cell. An answer is marked in the source in one of four ways:

    ### BEGIN SOLUTION              an indented block, inside a function: becomes a stub that
    ### END SOLUTION                raises NotImplementedError
    raise NotImplementedError  # SOLUTION in FILE
                                    the same, where FILE has the whole function: its body there is
                                    the reference that ``check`` compares with, and stands here
    name = value  # SOLUTION        becomes ``name = ...  # your value here``
    # %% tags=["solution-only"]     the whole cell is left out of the lesson

A figure in prose is written as ``{{expression:format}}``, as in an f-string: "the peak is
{{peak / MiB:.1f}} MiB". Behind a sentence that states an order, such as "half of it stays", stands
``<!-- holds: kept == peak / 2 -->``. Both are computed where all cells have run, in a last cell of
the solution. The figures stand in the prose of both notebooks, and what does not hold fails.
``<!-- picture: first run -->`` becomes the picture of ``opening_picture.py``, whose bytes are in
the stored solutions of several lessons: it is drawn from those, and again after the last of the
notebooks that are built.

Apart from the outputs that running gives, the same source gives the same bytes. Whatever is wrong
in any notebook is collected and shown together at the end.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import re
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import jupytext
import nbformat
import opening_picture
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
FIRST = Path(__file__).with_name("first_cell.py")
MAX_LINES = 15
# seconds; generous, since unpacking SmolLM2 on a slow machine may belong to a cell
CELL_TIMEOUT = 1200
# Still pictures and, where a lesson trains for long, its short form: outputs that a test can
# compare.
FIXED = {"GRADMEM_LIVE": "0", "GRADMEM_SIZE": "ci"}
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
STALE = "out of step with its source; run `make notebooks`"
BEGIN = re.compile(r"(\s*)### BEGIN SOLUTION\s*")
END = re.compile(r"\s*### END SOLUTION\s*")
FIGURE = re.compile(r"\{\{(.+?)\}\}", re.DOTALL)
HOLDS = re.compile(r"\s*<!-- holds: (.+?) -->", re.DOTALL)
PICTURE = "<!-- picture: first run -->"
FIGURES = "# What the text above states, computed from what the cells have left."
IN_FILE = re.compile(r"(\s+)raise NotImplementedError\s*#\s*SOLUTION in (\S+)\s*")
VALUE = re.compile(r"(\s*[A-Za-z_][\w.]*(\[[^\]=]*\])?(\s*:[^=#]+)?\s*=)(?!=).*#\s*SOLUTION\s*")
STRAY = re.compile(r".*#\s*((BEGIN|END)\s+)?SOLUTION\b.*")


class Problem(Exception):
    """Something wrong in a source, in words that say where and what to do."""


def insert_references(source: str, root: Path, where: str) -> str:
    """``source`` with the body that a function has in FILE, between solution marks, in place of
    each ``raise NotImplementedError  # SOLUTION in FILE``. FILE is a path below ``root``.
    """
    lines = []
    for number, line in enumerate(source.split("\n"), 1):
        mark = IN_FILE.fullmatch(line)
        if not mark:
            lines.append(line)
            continue
        here = f"{where}, line {number}"
        indent, file = mark.groups()
        names = [name for name, node in functions_in(source).items() if number in lines_of(node)]
        if not names:
            raise Problem(f"{here}: `# SOLUTION in {file}` stands in no function")
        body = body_of(names[0], root / file, here)
        lines += [f"{indent}### BEGIN SOLUTION"]
        lines += textwrap.indent(body, indent).split("\n")
        lines += [f"{indent}### END SOLUTION"]
    return "\n".join(lines)


def body_of(name: str, path: Path, where: str) -> str:
    """The lines of the function ``name`` (``"step"`` or ``"Adam.step"``) in the file ``path``,
    without its first line and its docstring, and without their indent.
    """
    try:
        text = path.read_text(encoding="utf-8")
        function = functions_in(text)[name]
    except (OSError, KeyError):
        raise Problem(f"{where}: there is no function {name} in {path}") from None
    first = function.body[0].lineno - 1
    if ast.get_docstring(function) is not None:
        first = function.body[0].end_lineno  # the line after the docstring
    return textwrap.dedent("\n".join(text.split("\n")[first : function.end_lineno]))


def functions_in(source: str) -> dict[str, ast.FunctionDef]:
    """The functions of ``source`` by name, and its classes' methods as ``"Adam.step"``."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}": method for method in methods}
    return found


def lines_of(node: ast.FunctionDef) -> range:
    """The numbers of the lines that ``node`` spans."""
    return range(node.lineno, node.end_lineno + 1)


def strip_solution(source: str, where: str) -> str:
    """The lesson's version of a code cell; raises ``Problem`` for marks that do not pair up, naming
    ``where``.
    """
    kept: list[str] = []
    opened = 0
    for number, line in enumerate(source.split("\n"), 1):
        here = f"{where}, line {number}"
        if begin := BEGIN.fullmatch(line):
            kept += stub(begin[1], opened, here)
            opened = number
        elif END.fullmatch(line):
            if not opened:
                raise Problem(f"{here}: END SOLUTION without a BEGIN SOLUTION before it")
            opened = 0
        elif not opened:
            kept.append(learners_line(line, here))
    if opened:
        raise Problem(
            f"{where}, line {opened}: BEGIN SOLUTION is never closed; add ### END SOLUTION"
        )
    return "\n".join(kept)


def stub(indent: str, opened: int, here: str) -> list[str]:
    """What a lesson has in place of a block that begins at ``here``; ``opened`` is the line of a
    block that is open already, or 0.
    """
    if opened:
        raise Problem(
            f"{here}: BEGIN SOLUTION inside the block that line {opened} opened; close that first"
        )
    if not indent:
        raise Problem(
            f"{here}: BEGIN SOLUTION at the left margin, where its stub would stop Run All; put it "
            "inside a function, or mark a value with `name = value  # SOLUTION`"
        )
    return [f"{indent}# your code here", f"{indent}raise NotImplementedError"]


def learners_line(line: str, here: str) -> str:
    """A line outside blocks, without the value that it marks as a solution."""
    if value := VALUE.fullmatch(line):
        return f"{value[1]} ...  # your value here"
    if STRAY.fullmatch(line):
        raise Problem(f"{here}: a SOLUTION mark that is none of the known forms: {line.strip()}")
    return line


def check_python(source: str, where: str) -> None:
    """Raise ``Problem`` unless a lesson's code cell holds something, and Python (with IPython's
    magics) can read it.
    """
    if not source.strip():
        raise Problem(f"{where}: an empty code cell, which no run ever executes; delete it")
    try:
        ast.parse(TransformerManager().transform_cell(source))
    except SyntaxError as error:
        raise Problem(
            f"{where}: what is left for the lesson is not Python (line {error.lineno}: {error.msg})"
        ) from None


def code_lines(source: str) -> int:
    """How many lines of ``source`` hold code: neither blank nor comment alone."""
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") for line in source.split("\n")
    )


def tags(cell: NotebookNode) -> list[str]:
    """The cell's tags, in order."""
    return sorted(cell.metadata.get("tags", []))


def normalise(notebook: NotebookNode, *, keep_outputs: bool = False) -> NotebookNode:
    """A copy without what differs between machines and runs: versions, timings, live widgets and,
    unless kept, outputs.
    """
    cells = []
    for cell in notebook.cells:
        kept = {"cell_type": cell.cell_type, "id": cell.id, "source": cell.source}
        kept["metadata"] = {"tags": tags(cell)} if tags(cell) else {}
        if cell.cell_type == "code":
            kept["execution_count"] = cell.execution_count if keep_outputs else None
            kept["outputs"] = (
                [without_widget(output) for output in cell.outputs] if keep_outputs else []
            )
        cells.append(kept)
    return nbformat.from_dict(
        {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
    )


def without_widget(output: NotebookNode) -> NotebookNode:
    """``output`` without its reference to a live widget, whose state is not saved, where it has
    another form as well.
    """
    data = output.get("data", {})
    if len(data) <= 1:
        return output
    return NotebookNode(output, data={k: data[k] for k in data if k != WIDGET_VIEW})


def to_text(notebook: NotebookNode) -> str:
    """The notebook as it is stored, the same for the same content."""
    return nbformat.writes(notebook, version=nbformat.NO_CONVERT) + "\n"


def read_source(path: Path) -> NotebookNode:
    """The notebook that ``path`` describes, not executed, with the references that it names; cell
    ids follow from the lesson's name and the cells' content. Raises ``Problem``.
    """
    notebook = jupytext.read(path, fmt="py:percent")
    root = path.parent.parent
    lines = [f'print(f"""{{{figure}}}""")' for figure in found_in(notebook, FIGURE)]
    lines += [f"assert {holds}, {holds!r}" for holds in found_in(notebook, HOLDS)]
    if lines:
        metadata = {"tags": ["solution-only"]}
        source = "\n".join([FIGURES, *lines])
        notebook.cells.append(nbformat.v4.new_code_cell(source, metadata=metadata))
    seen: Counter[tuple[str, str]] = Counter()
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "code" and "# SOLUTION in " in cell.source:
            where = f"solutions/{path.name}, cell {number}"
            cell.source = insert_references(cell.source, root, where)
        key = (cell.cell_type, cell.source)
        seen[key] += 1
        cell.id = hashlib.sha256("\0".join((path.stem, *key, str(seen[key]))).encode()).hexdigest()[
            :8
        ]
    return normalise(notebook)


def found_in(notebook: NotebookNode, pattern: re.Pattern) -> list[str]:
    """The expressions that the prose has in places of a pattern, each once, on one line."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            found += [" ".join(expression.split()) for expression in pattern.findall(cell.source)]
    return list(dict.fromkeys(found))


def with_figures(notebook: NotebookNode, solution: NotebookNode | None) -> NotebookNode:
    """``notebook`` with the figures in its prose filled in, as ``solution`` has computed them; a
    question mark where it has not run.
    """
    figures = found_in(notebook, FIGURE)
    values = dict.fromkeys(figures, "?")
    if figures and solution is not None:
        printed = [output.get("text", "") for output in solution.cells[-1].outputs]
        values = dict(zip(figures, "".join(printed).splitlines(), strict=True))
    cells = []
    for cell in notebook.cells:
        cell = NotebookNode(cell)
        if cell.cell_type == "markdown":
            text = HOLDS.sub("", cell.source)
            cell.source = FIGURE.sub(lambda found: values[" ".join(found[1].split())], text)
        cells.append(cell)
    return NotebookNode(notebook, cells=cells)


def with_picture(notebook: NotebookNode, solutions: Path, lesson: str) -> NotebookNode:
    """``notebook`` with the picture that lesson ``lesson`` ("03") opens with, if its source asks
    for one, drawn from what the notebooks in ``solutions`` printed.
    """
    cells = []
    for cell in notebook.cells:
        cell = NotebookNode(cell)
        if cell.cell_type == "markdown" and PICTURE in cell.source:
            cell.source = cell.source.replace(PICTURE, opening_picture.image(solutions, lesson))
        cells.append(cell)
    return NotebookNode(notebook, cells=cells)


def lesson_from(notebook: NotebookNode, name: str) -> tuple[NotebookNode, list[str]]:
    """The learner's version of a source notebook, and what is wrong with its marks."""
    cells, problems = [], []
    for number, cell in enumerate(notebook.cells, 1):
        if "solution-only" in tags(cell):
            continue
        cell = NotebookNode(cell)
        if cell.cell_type == "code":
            where = f"{name}, cell {number}"
            try:
                cell.source = strip_solution(cell.source, where)
                check_python(cell.source, where)
            except Problem as problem:
                problems.append(str(problem))
        cells.append(cell)
    return normalise(NotebookNode(notebook, cells=cells)), problems


def execute(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """The notebook with the outputs of a run in ``folder``: a fresh kernel of this Python, every
    cell, errors kept.
    """
    client = NotebookClient(
        nbformat.from_dict(notebook),
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        allow_errors=True,
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
    )
    with tempfile.TemporaryDirectory() as scratch:
        progress = os.path.join(scratch, "progress.json")
        ran = client.execute(env={**os.environ, **FIXED, "GRADMEM_PROGRESS": progress})
    return normalise(ran, keep_outputs=True)


def failures(notebook: NotebookNode, name: str) -> Iterator[str]:
    """What shows that a notebook was not run to its end, or not without an error."""
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type != "code":
            continue
        if cell.execution_count is None:
            yield f"{name}, cell {number}: never executed; run `make notebooks`"
        for output in cell.outputs:
            if output.output_type == "error" and "raises-exception" not in tags(cell):
                yield f"{name}, cell {number}: raised {output.ename}: {output.evalue}"


def code_of(notebook: NotebookNode) -> str:
    """What a run of ``notebook`` depends on: its code cells, without outputs."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return to_text(normalise(NotebookNode(notebook, cells=cells)))


def stored_solution(path: Path, source: NotebookNode) -> NotebookNode | None:
    """``source`` with the outputs of the notebook at ``path``, if that is as this program stores it
    and ran the same code.
    """
    try:
        text = path.read_bytes().decode()
        notebook = nbformat.reads(text, as_version=nbformat.NO_CONVERT)
        if to_text(normalise(notebook, keep_outputs=True)) != text or code_of(notebook) != code_of(
            source
        ):
            return None
    except (OSError, ValueError, AttributeError, nbformat.reader.NotJSONError):
        return None
    ran = iter([cell for cell in notebook.cells if cell.cell_type == "code"])
    cells = [next(ran) if cell.cell_type == "code" else cell for cell in source.cells]
    return NotebookNode(notebook, cells=cells)


def write(path: Path, text: str) -> None:
    """Store ``text`` with the same line ends everywhere, and leave a file alone that holds it
    already.
    """
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_bytes() != text.encode():
        path.write_text(text, encoding="utf-8", newline="\n")


def with_first_cell(lesson: NotebookNode) -> NotebookNode:
    """``lesson`` after the cell that installs the course where a kernel lacks it, folded in Colab,
    JupyterLab and VS Code.
    """
    folded = {"cellView": "form", "jupyter": {"source_hidden": True}}
    source = FIRST.read_text(encoding="utf-8").rstrip()
    first = nbformat.v4.new_code_cell(source, id="first", metadata=folded)
    return NotebookNode(lesson, cells=[first, *lesson.cells])


def build_lesson(
    lesson: NotebookNode, path: Path, solution: NotebookNode | None, *, check: bool
) -> list[str]:
    """Write the learner's notebook to ``path`` or, with ``check``, only compare it; returns what is
    wrong. ``solution`` has the figures of its prose.
    """
    if solution is None and found_in(lesson, FIGURE):
        return [f"lessons/{path.name}: {STALE}"]
    lesson = with_figures(lesson, solution)
    lesson = with_picture(lesson, path.parent.parent / "solutions", path.name[:2])
    text = to_text(with_first_cell(lesson))
    if not check:
        write(path, text)
    elif not path.exists() or path.read_bytes() != text.encode():
        return [f"lessons/{path.name}: {STALE}"]
    return []


def build_solution(source: NotebookNode, path: Path, *, check: bool, again: bool) -> list[str]:
    """Execute ``source`` into ``path`` if need be or, with ``check``, only compare; returns what is
    wrong.
    """
    name = f"solutions/{path.name}"
    solution = stored_solution(path, source)
    if check:
        if solution is None or any(failures(solution, name)):
            return [f"{name}: {STALE}", *(failures(solution, name) if solution else ())]
        in_step = path.read_bytes() == solution_text(solution, path).encode()
        return [] if in_step else [f"{name}: {STALE}"]
    if again or solution is None or any(failures(solution, name)):
        print(f"running {name} ...", flush=True)
        solution = execute(source, path.parent)
    wrong = list(failures(solution, name))
    if not wrong:
        write(path, solution_text(solution, path))
    return wrong


def solution_text(solution: NotebookNode, path: Path) -> str:
    """What is stored in ``path`` of a solution that has run."""
    return to_text(with_picture(with_figures(solution, solution), path.parent, path.name[:2]))


def orphans(root: Path) -> Iterator[str]:
    """The notebooks that no source makes."""
    for notebook in sorted([*root.glob("solutions/*.ipynb"), *root.glob("lessons/*.ipynb")]):
        if not (root / "solutions" / f"{notebook.stem}.py").exists():
            yield (
                f"{notebook.relative_to(root).as_posix()}: no solutions/{notebook.stem}.py makes "
                "it; delete it or add that"
            )


def chosen(sources: Sequence[Path], names: Sequence[str]) -> list[Path]:
    """The sources that ``names`` mean (``"01"``, ``"01_memory_accounting"`` or a path), or all of
    them without names.
    """
    picked = []
    for stem in [Path(name).stem for name in names]:
        found = [path for path in sources if path.stem == stem or path.stem.startswith(f"{stem}_")]
        if not found:
            raise Problem(
                f"no lesson {stem!r}: there are "
                f"{', '.join(path.stem for path in sources) or 'none'}"
            )
        picked += found
    return picked if names else list(sources)


def warn_of_long_cells(source: NotebookNode, name: str) -> None:
    """Print which code cells have more lines than a learner should read at once."""
    for number, cell in enumerate(source.cells, 1):
        is_long = cell.cell_type == "code" and code_lines(cell.source) > MAX_LINES
        if is_long and not cell.source.startswith(FIGURES):
            print(
                f"warning: {name}, cell {number}: more than {MAX_LINES} lines of code",
                file=sys.stderr,
            )


def build(path: Path, options: argparse.Namespace, *, first: bool = True) -> list[str]:
    """Build or check both notebooks of the source ``path``; returns what is wrong. The second time,
    no cell is warned of, and code that has not changed does not run again.
    """
    name = f"solutions/{path.name}"
    try:
        source = read_source(path)
    except Problem as problem:
        return [str(problem)]
    if first:
        warn_of_long_cells(source, name)
    lesson, wrong = lesson_from(source, name)
    if wrong:
        return wrong
    stored = path.with_suffix(".ipynb")
    if not options.lessons_only:
        again = first and (options.all or bool(options.names))
        wrong += build_solution(source, stored, check=options.check, again=again)
    return wrong + build_lesson(
        lesson,
        path.parent.parent / "lessons" / stored.name,
        stored_solution(stored, source),
        check=options.check,
    )


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Build or check the notebooks under ``root``; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Build solutions/*.ipynb and lessons/*.ipynb from solutions/*.py."
    )
    parser.add_argument(
        "names", nargs="*", help="lessons to run, such as 01; without any, what has changed"
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if a notebook is out of step"
    )
    parser.add_argument(
        "--all", action="store_true", help="run every solution again, changed or not"
    )
    parser.add_argument(
        "--lessons-only",
        action="store_true",
        help="leave the solution notebooks alone; run nothing",
    )
    options = parser.parse_args(arguments)
    try:
        paths = chosen(sorted(root.glob("solutions/*.py")), options.names)
    except Problem as problem:
        parser.error(str(problem))

    problems = list(orphans(root))
    for path in paths:
        problems += build(path, options)
    if not (options.check or problems):
        # A picture may show what a later lesson has printed only now.
        for path in paths:
            problems += build(path, options, first=False)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"lessons: {len(paths)}, problems: {len(problems)}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
