"""The line of the user's script that an operation comes from."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

# Files in these folders are no one's script: Python's own modules, installed packages, and this
# library.
_NOT_SCRIPTS = tuple(
    folder + os.sep
    for folder in {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        str(Path(__file__).resolve().parent.parent),
    }
)
_is_script: dict[str, bool] = {}  # by file; asked after every allocation, so remembered


class SourceLine(NamedTuple):
    """A line of a script: its file (a cell, in a notebook), its number, and the function."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}"
        if self.file.startswith("Cell "):
            where = f"{self.file}, line {self.line}"
        return where if self.function == "<module>" else f"{where}, in {self.function}"


def calling_line(depth: int = 1) -> tuple[CodeType, int] | None:
    """The innermost frame of a script among those that are running, as its code and line number.

    ``None`` if there is none, as in a thread of autograd. ``depth``: frames to pass over.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        if is_of_a_script(frame.f_code.co_filename):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None


def source_line(found: tuple[CodeType, int] | None) -> SourceLine | None:
    """What ``calling_line`` has found, with a name that people know the file by."""
    if found is None:
        return None
    code, line = found
    return SourceLine(_known_as(code.co_filename), line, code.co_qualname)


def is_of_a_script(filename: str) -> bool:
    """Whether a file is the user's own: no module of Python's, of a package or of this library."""
    found = _is_script.get(filename)
    if found is None:
        if filename.startswith("<"):  # made by exec, such as the methods of a dataclass
            found = filename == "<stdin>" or filename.startswith("<ipython-input")
        else:
            found = bool(filename) and not os.path.abspath(filename).startswith(_NOT_SCRIPTS)
        _is_script[filename] = found
    return found


def _known_as(filename: str) -> str:
    """A cell of a notebook by its number, a file by its path from the current folder."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        name_of_code = getattr(shell.compile, "format_code_name", None)
        named = name_of_code(filename) if name_of_code is not None else None
        if named is not None:
            return " ".join(named)
    here = os.getcwd() + os.sep
    path = os.path.abspath(filename)
    return path.removeprefix(here) if path.startswith(here) else os.path.basename(filename)
