"""The library stands in floors: a file uses its own floor and those below it, and nothing goes round in a circle."""

import ast
from pathlib import Path

import pytest

import gradmem_lib

HOME = Path(gradmem_lib.__file__).parent
FLOORS = (
    ("units", "names", "compat"),
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
FILES = {path.relative_to(HOME).with_suffix("").as_posix(): path for path in sorted(HOME.rglob("*.py"))}


def imports(module: str) -> list[tuple[str, int]]:
    """(module, line) of everything inside the library that ``module`` imports, wherever in the file it does so."""
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
                for name in (whole, f"{whole}/__init__", home, f"{home}/__init__" if home else "__init__"):
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
        f"{module}.py:{line} uses {name}" for name, line in imports(module) if level(name) > level(module)
    ]
    assert not upward, "\n".join(upward)


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
