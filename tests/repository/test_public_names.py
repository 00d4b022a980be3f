"""Public names import from the library's root and say their types, and lessons use nothing else."""

import ast
import inspect
import pkgutil
from operator import attrgetter

import pytest
from support.paths import ROOT

import gradmem_lib
from gradmem_lib import course

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
    "explain",
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


def test_no_module_takes_the_place_of_a_public_name():
    """Importing a module sets an attribute of its package, so a function of that name would be
    gone as soon as somebody imports the module.
    """
    for package in (gradmem_lib, course, course.claims):
        modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
        assert not modules & {*package.__all__}, package.__name__


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
