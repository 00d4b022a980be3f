"""How a measurement comes to its picture without knowing who draws it: the floor above says so, once.

Nothing here imports torch, so that ``python -m gradmem_lib doctor`` can speak where torch does not import.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

_load: Callable[[], Any] | None = None
_watched = False


def register(load: Callable[[], Any], *, watched: bool = False) -> None:
    """``load()`` returns what has the functions that are asked for by name; it is called on first use.

    ``watched``: a kernel elsewhere shows what is drawn.
    """
    global _load, _watched
    _load, _watched = load, watched


def pictures() -> Any:
    """What has been registered. Raises ``RuntimeError`` where nothing was."""
    if _load is None:
        raise RuntimeError("there is nobody to draw: import gradmem_lib, which registers its pictures")
    return _load()


def in_kernel() -> bool:
    """Whether this runs in a Jupyter kernel, where there is a front end to draw in."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def watched() -> bool:
    """Whether somebody sees what is drawn while this runs: in a kernel, or in a process that a kernel watches."""
    return _watched or in_kernel()


def live_enabled() -> bool:
    """Whether plots may move: in a Jupyter kernel, unless the environment forbids it."""
    return in_kernel() and live_wanted()


def live_wanted() -> bool:
    """Whether the environment allows what moves: it does, but for ``GRADMEM_LIVE=0`` (see ``course.settings``)."""
    return os.environ.get("GRADMEM_LIVE", "1") != "0"
