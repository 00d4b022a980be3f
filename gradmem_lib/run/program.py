"""A script or a module, run as ``python script.py`` or ``python -m module`` would run it."""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType, TracebackType


class CannotRun(ValueError):
    """What was given is no program: the message says why."""


def load_script(path: str) -> tuple[CodeType, ModuleType]:
    """The code of a script, and the module ``__main__`` that it runs in."""
    if not os.path.isfile(path):
        raise CannotRun(f"{path}: there is no such file. Give a Python script, or -m MODULE")
    full = os.path.abspath(path)
    with io.open_code(full) as file:
        # dont_inherit: this file's `from __future__` lines are not the script's
        code = compile(file.read(), full, "exec", dont_inherit=True)
    module = _main_module(full, None)
    module.__loader__ = SourceFileLoader("__main__", full)
    return code, module


def load_module(name: str) -> tuple[CodeType, ModuleType]:
    """The code of ``python -m name``, and the module ``__main__`` that it runs in."""
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find(f"{name}.__main__")
    get_code = getattr(getattr(spec, "loader", None), "get_code", None)
    code = get_code(spec.name) if spec is not None and get_code is not None else None
    if code is None:
        raise CannotRun(f"-m {name}: there is no such module, or it cannot be run")
    module = _main_module(spec.origin, spec)
    module.__loader__ = spec.loader
    return code, module


def run_as_main(code: CodeType, module: ModuleType, arguments: Sequence[str], folder: str) -> None:
    """Run ``code`` as ``__main__``. ``folder``: where its imports are looked for first."""
    sys.modules["__main__"] = module
    sys.argv[:] = arguments
    if not sys.flags.safe_path:
        sys.path[0] = folder
    exec(code, module.__dict__)


def without_frames(
    traceback: TracebackType | None, drop: Callable[[str], bool]
) -> TracebackType | None:
    """A copy of ``traceback`` without the frames whose file ``drop`` names."""
    if traceback is None:
        return None
    rest = without_frames(traceback.tb_next, drop)
    if drop(traceback.tb_frame.f_code.co_filename):
        return rest
    return TracebackType(rest, traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno)


def _find(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _main_module(file: str | None, spec: ModuleSpec | None) -> ModuleType:
    module = ModuleType("__main__")
    module.__file__, module.__spec__ = file, spec
    module.__package__ = None if spec is None else spec.parent
    module.__dict__["__builtins__"] = builtins
    return module
