"""Public names import from the library's root and say their types, and lessons use nothing else."""

import ast
import inspect
import pkgutil

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


def test_public_names_import_from_the_root():
    missing = [name for name in PUBLIC if name not in gradmem_lib.__all__]
    assert not missing


def functions_of(thing) -> list:
    """A function, or the public methods and properties of a class, as far as they are ours."""
    found = [thing]
    if inspect.isclass(thing):
        for name, value in vars(thing).items():
            if name == "__init__" or not name.startswith("_"):
                found.append(value.fget if isinstance(value, property) else value)
    ours = []
    for function in found:
        if not inspect.isfunction(function) or function.__name__ == "<lambda>":
            continue
        if function.__module__.startswith("gradmem_lib"):
            ours.append(function)
    return ours


def untyped(function) -> list[str]:
    """What a function takes or returns without saying its type."""
    found = []
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        if parameter.annotation is parameter.empty and parameter.name != "self":
            found.append(f"{function.__qualname__}({parameter.name})")
    if signature.return_annotation is signature.empty and function.__name__ != "__init__":
        found.append(f"{function.__qualname__} -> ?")
    return found


def test_what_is_public_says_the_types_of_what_it_takes_and_returns():
    found = []
    for module in (gradmem_lib, course):
        for name in module.__all__:
            for function in functions_of(getattr(module, name)):
                found += untyped(function)
    assert not found, "\n".join(found)


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


def test_lessons_use_the_library_as_a_user_would():
    inside = []
    for source in ROOT.glob("solutions/*.py"):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            imported = []
            if isinstance(node, ast.ImportFrom):
                imported = [node.module or ""]
            elif isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            for name in imported:
                is_ours = name.split(".")[0] == "gradmem_lib"
                if is_ours and name not in ("gradmem_lib", "gradmem_lib.course"):
                    inside.append(f"{source.name}:{node.lineno} imports {name}")
    assert not inside, "\n".join(inside)
