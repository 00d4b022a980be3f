"""The library stands in floors: a file uses its own floor and those below it, and nothing goes
round in a circle.

Its public names import from its root, and lessons use nothing
deeper.
"""

import ast
import inspect
import re
from operator import attrgetter
from pathlib import Path

import pytest

import gradmem_lib
from gradmem_lib import course

HOME = Path(gradmem_lib.__file__).parent
FLOORS = (
    ("units", "names", "compat", "display"),
    ("measure",),
    ("techniques",),
    ("training",),
    ("prediction",),
    ("planning",),
    ("view",),
    ("course",),
    ("__init__", "__main__"),
)
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names}
ROOT = HOME.parent
FILES = {
    path.relative_to(HOME).with_suffix("").as_posix(): path for path in sorted(HOME.rglob("*.py"))
}


def imports(module: str) -> list[tuple[str, int]]:
    """(module, line) of everything inside the library that ``module`` imports, wherever in the file
    it does so.
    """
    package = module.split("/")[:-1]
    found = []
    for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            own = [] if node.level == 0 else package[: len(package) - node.level + 1]
            parts = own + [part for part in (node.module or "").split(".") if part]
            if node.level == 0 and parts[:1] != ["gradmem_lib"]:
                continue
            parts = parts[1:] if node.level == 0 else parts
            for alias in node.names:
                whole = "/".join([*parts, alias.name])
                home = "/".join(parts)
                for name in (
                    whole,
                    f"{whole}/__init__",
                    home,
                    f"{home}/__init__" if home else "__init__",
                ):
                    if name in FILES:
                        found.append((name, node.lineno))
                        break
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("gradmem_lib") for alias in node.names), (
                module,
                node.lineno,
            )
    return [(name, line) for name, line in found if name != module]


def level(module: str) -> int:
    return LEVEL[module.split("/")[0]]


@pytest.mark.parametrize("module", FILES)
def test_a_file_uses_only_its_own_floor_and_those_below(module):
    upward = [
        f"{module}.py:{line} uses {name}"
        for name, line in imports(module)
        if level(name) > level(module)
    ]
    assert not upward, "\n".join(upward)


@pytest.mark.parametrize("module", [name for name in FILES if level(name) < LEVEL["course"]])
def test_no_file_below_the_course_reaches_up_by_a_name_in_a_string(module):
    tree = ast.parse(FILES[module].read_text(encoding="utf-8"))
    said = [
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value not in said
        ):
            named = re.findall(r"\bgradmem_lib\.([\w.]+)", node.value)
            assert not [name for name in named if name.split(".")[0] in LEVEL], (
                module,
                node.lineno,
            )
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            given = node.args[0]
            assert isinstance(given, ast.Constant) and not given.value.startswith(
                (".", "gradmem")
            ), (
                module,
                node.lineno,
            )


def test_no_circle_of_imports():
    below = {module: {name for name, _ in imports(module)} for module in FILES}
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for name in sorted(below[module]):
                walk(name, (*path, module))
            done.add(module)

    for module in FILES:
        walk(module, ())


# Public names, and lessons that use nothing else.

PUBLIC = [
    "MemoryTracker",
    "MemorySnapshot",
    "Timeline",
    "BudgetExceeded",
    "Adam",
    "AdamW",
    "accumulate_gradients",
    "Accumulated",
    "checkpoint_layers",
    "best_segments",
    "schedule_peak",
    "Recipe",
    "make_trainer",
    "MemoryCallback",
    "merge_adapters",
    "predict",
    "Prediction",
    "plan",
    "Plan",
    "check",
    "predict_first",
    "format_bytes",
    "parse_bytes",
    "accounting",
    "LoRALinear",
]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_imports_from_the_root(name):
    assert name in gradmem_lib.__all__
    assert getattr(gradmem_lib, name) is not None


@pytest.mark.parametrize(
    "name", [*gradmem_lib.__all__, *(f"course.{name}" for name in course.__all__)]
)
def test_what_is_public_says_the_types_of_what_it_takes_and_returns(name):
    thing = attrgetter(name)(gradmem_lib)
    methods = [
        value.fget if isinstance(value, property) else value
        for own, value in (vars(thing).items() if inspect.isclass(thing) else ())
        if own == "__init__" or not own.startswith("_")
    ]
    for function in [thing, *methods]:
        ours = inspect.isfunction(function) and function.__module__.startswith("gradmem_lib")
        if not ours or function.__name__ == "<lambda>":
            continue
        signature = inspect.signature(function)
        without = [
            p.name
            for p in signature.parameters.values()
            if p.annotation is p.empty and p.name != "self"
        ]
        assert not without, f"{function.__qualname__}: {without}"
        returns = (
            function.__name__ == "__init__"
            or signature.return_annotation is not inspect.Signature.empty
        )
        assert returns, function.__qualname__


def test_every_listed_name_is_there():
    for module in (gradmem_lib, course):
        for name in module.__all__:
            assert getattr(module, name) is not None, name
            assert name in dir(module)


@pytest.mark.parametrize("source", sorted(ROOT.glob("solutions/*.py")), ids=lambda path: path.stem)
def test_a_lesson_uses_the_library_as_a_user_would(source):
    found = []
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    ours = {name for name in found if name.split(".")[0] == "gradmem_lib"}
    assert ours <= {"gradmem_lib", "gradmem_lib.course"}
