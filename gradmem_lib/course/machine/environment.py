"""Settings by environment variables. They are read when they are needed, so a notebook may set them
too.

``GRADMEM_LIVE=0``
    Still pictures instead of moving plots and input boxes, and no lines about what takes long:
    quicker on a slow connection, and the same words on every machine. ``display``, which stands
    below the course, reads it as well.
``GRADMEM_SIZE=ci``
    Lesson 05 trains for one update of at most two micro-batches instead of sixteen whole ones; no
    peak in MiB depends on it. Lesson 07 trains for one short update instead of eight, and lesson
    09's table makes one short update of one layer at one rate, instead of eight of six layers at
    three. ``smollm2_runs`` and a cell of lesson 07 read it.
``GRADMEM_CACHE``
    The folder for unpacked models; without it, the user's cache folder.
``GRADMEM_PROGRESS``
    The file for a learner's progress; without it, ``progress.json`` in the user's data folder.
"""

from __future__ import annotations

import os
from pathlib import Path

from ... import display


def quiet() -> bool:
    """Whether outputs are to be the same on every machine: ``GRADMEM_LIVE=0``."""
    return not display.live_allowed()


def cache_folder() -> Path | None:
    """The folder that ``GRADMEM_CACHE`` names."""
    return _path("GRADMEM_CACHE")


def progress_file() -> Path | None:
    """The file that ``GRADMEM_PROGRESS`` names; a ``~`` in it is not looked up yet."""
    return _path("GRADMEM_PROGRESS")


def is_set(variable: str) -> bool:
    """Whether a variable has a value."""
    return bool(os.environ.get(variable))


def _path(variable: str) -> Path | None:
    named = os.environ.get(variable)
    return Path(named) if named else None
