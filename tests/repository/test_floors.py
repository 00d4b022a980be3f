"""What the linters cannot say of the house: ruff and import-linter (pyproject.toml) hold the rest.

import-linter follows import statements. A name in a string reaches up without one.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support.paths import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS = {c["name"]: c for c in PYPROJECT["tool"]["importlinter"]["contracts"]}
# A floor is a line such as "units : rows : optimizers".
FLOORS = {
    name
    for line in CONTRACTS["The floors of the library"]["layers"]
    for name in line.split(" : ")
    if name != "__main__"
}
LIBRARY = ROOT / "gradmem_lib"
BELOW_THE_COURSE = sorted(
    path
    for path in LIBRARY.rglob("*.py")
    if path.relative_to(LIBRARY).parts[0]
    not in ("course", "commands", "__init__.py", "__main__.py")
)
OURS = sorted(
    path
    for folder in ("gradmem_lib", "tools", "teaching", "benchmarks", "site", "tests")
    for path in (ROOT / folder).rglob("*.py")
    # Answers stand as people write them, and a cell of every lesson is short.
    if "answers" not in path.parts and path.name != "first_cell.py"
)


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def expressions() -> list[tuple[Path, ast.AST]]:
    """Each part of each file of ours that may hold a loop or a choice, with its file."""
    found = []
    for path in OURS:
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.Expr, ast.IfExp)):
                found.append((path, node))
    return found


def strings(tree: ast.Module) -> Iterator[ast.Constant]:
    """The text constants of a file, without its docstrings."""
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in docstrings:
            yield node


def lines_that_reach_up(tree: ast.Module) -> Iterator[int]:
    for constant in strings(tree):
        for name in re.findall(r"\bgradmem_lib\.(\w+)", constant.value):
            if name in FLOORS:
                yield constant.lineno
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if ast.unparse(node.func).endswith(("import_module", "__import__")):
            name = node.args[0]
            if not isinstance(name, ast.Constant) or name.value.startswith((".", "gradmem")):
                yield node.lineno


def test_no_file_below_the_course_reaches_up_by_a_name_in_a_string():
    found = []
    for path in BELOW_THE_COURSE:
        for line in lines_that_reach_up(parsed(path)):
            found.append(f"{short(path)}:{line}")
    assert BELOW_THE_COURSE
    assert not found, "\n".join(found)


def test_no_conditional_expression_stands_in_another():
    nested = []
    for path, node in expressions():
        if isinstance(node, ast.IfExp):
            inner = [part for part in ast.walk(node) if isinstance(part, ast.IfExp)]
            if len(inner) > 1:
                nested.append(f"{short(path)}:{node.lineno}")
    assert not nested, "write an if statement"


def hides_a_loop(value: ast.expr) -> bool:
    """Whether an expression is a loop: ``all(...)``, ``list(map(...))``, ``[... for ...]``."""
    if isinstance(value, (ast.ListComp, ast.SetComp, ast.DictComp)):
        return True
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Name):
        return False
    if value.func.id in ("all", "any", "map"):
        return True
    of_a_loop = any(
        isinstance(argument, ast.GeneratorExp) or hides_a_loop(argument) for argument in value.args
    )
    return value.func.id in ("list", "set", "tuple") and of_a_loop


def test_no_loop_hides_in_an_expression_whose_result_is_dropped():
    dropped = [
        f"{short(path)}:{node.lineno}"
        for path, node in expressions()
        if isinstance(node, ast.Expr) and hides_a_loop(node.value)
    ]
    assert not dropped, "write a loop"


def test_the_scripts_in_pages_keep_their_rules():
    """As ``.oxlintrc.json`` has them: each name is defined, and used, and each import is right."""
    linter = Path(sys.executable).with_name("oxlint")
    done = subprocess.run([linter, "gradmem_lib"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
