"""Lets a measurement show a picture without importing the code that draws it.

A floor above registers that code once.

Nothing here imports torch, so that ``python -m gradmem_lib doctor`` works where torch does not
import.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

_load: Callable[[], Any] | None = None
_has_viewer = False


def register(load: Callable[[], Any], *, has_viewer: bool = False) -> None:
    """Register ``load``, which returns the module with the drawing functions.

    It is called on first use. ``has_viewer``: this process draws for a Jupyter kernel in another
    process.
    """
    global _load, _has_viewer
    _load, _has_viewer = load, has_viewer


def pictures() -> Any:
    """The registered module of drawing functions.

    Raises ``RuntimeError`` if nothing was registered.
    """
    if _load is None:
        raise RuntimeError(
            "there is nobody to draw: import gradmem_lib, which registers its pictures"
        )
    return _load()


def shell() -> Any:
    """The IPython that runs this, or ``None``."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def in_kernel() -> bool:
    """Whether this runs in a Jupyter kernel, where there is a front end to draw in."""
    return getattr(shell(), "kernel", None) is not None


def cell_id() -> str | None:
    """The name that the front end gives the cell that runs; ``None`` if it gives none."""
    if not hasattr(shell(), "get_parent"):
        return None
    return shell().get_parent().get("metadata", {}).get("cellId")


def has_viewer() -> bool:
    """Whether somebody sees pictures while this runs.

    This is so in a kernel, and in a process whose pictures a kernel shows.
    """
    return _has_viewer or in_kernel()


def live_enabled() -> bool:
    """Whether plots may move: in a Jupyter kernel, unless the environment forbids it."""
    return in_kernel() and live_allowed()


def live_allowed() -> bool:
    """Whether the environment allows moving plots.

    It does unless ``GRADMEM_LIVE=0`` is set (see ``course.settings``).
    """
    return os.environ.get("GRADMEM_LIVE", "1") != "0"
