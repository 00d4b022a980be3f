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


class Program:
    """``name``: a script's path, or with ``as_module`` the name of a module."""

    def __init__(self, name: str, arguments: Sequence[str], *, as_module: bool):
        self.name, self.arguments, self.as_module = name, list(arguments), as_module

    def prepare(self) -> None:
        """Set what a program sees of its start: ``sys.argv`` and ``sys.path``.

        Raises ``CannotRun`` for a script that does not exist, and for a notebook.
        """
        if not self.as_module and not os.path.isfile(self.name):
            raise CannotRun(
                f"{self.name}: there is no such file. Give a Python script, or -m MODULE"
            )
        if not self.as_module and self.name.endswith(".ipynb"):
            script = self.name.removesuffix(".ipynb") + ".py"
            raise CannotRun(
                f"{self.name} is a notebook. Make a script of it first: jupyter nbconvert --to "
                f"script {self.name}. Then: gradmem run {script}"
            )
        folder = os.getcwd()
        if not self.as_module:
            folder = os.path.dirname(os.path.realpath(self.name))  # Python follows a link, too
        if not sys.flags.safe_path:
            sys.path[0] = folder
        sys.argv[:] = ["-m" if self.as_module else self.name, *self.arguments]

    def run(self) -> None:
        """Run it as ``__main__``. Raises what it raises, and ``CannotRun`` for what is no
        program.
        """
        code, module = load_module(self.name) if self.as_module else load_script(self.name)
        sys.modules["__main__"] = module
        if self.as_module:
            sys.argv[0] = module.__file__
        exec(code, module.__dict__)


def load_script(path: str) -> tuple[CodeType, ModuleType]:
    """The code of a script, and the module ``__main__`` that it runs in."""
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


def without_frames(
    traceback: TracebackType | None, drop: Callable[[str], bool]
) -> TracebackType | None:
    """A copy of ``traceback`` without the frames whose file ``drop`` names."""
    kept = []
    while traceback is not None:
        if not drop(traceback.tb_frame.f_code.co_filename):
            kept.append(traceback)
        traceback = traceback.tb_next
    rest = None
    for entry in reversed(kept):
        rest = TracebackType(rest, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return rest


def _find(name: str) -> ModuleSpec | None:
    """Where the module is. Finding it imports the packages that it is in, which may fail."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        package = name.rpartition(".")[0]
        if error.name is not None and f"{package}.".startswith(f"{error.name}."):
            return None
        raise
    except ValueError:  # a module without a spec
        return None


def _main_module(file: str | None, spec: ModuleSpec | None) -> ModuleType:
    module = ModuleType("__main__")
    module.__file__, module.__spec__ = file, spec
    module.__package__ = None if spec is None else spec.parent
    module.__dict__["__builtins__"] = builtins
    return module
