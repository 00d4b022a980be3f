"""Finds the course's own files: at the root of a checkout, or inside this package in an installed
wheel.
"""

from __future__ import annotations

from pathlib import Path

# The folder that holds ``gradmem_lib``: a checkout's root, or an environment's site-packages.
IMPORT_ROOT = Path(__file__).resolve().parents[3]
# What a wheel contains besides the library; pyproject.toml puts it there.
_IN_WHEEL = Path(__file__).resolve().parents[1] / "files"


def course_folder(name: str) -> Path:
    """A folder of the course, by its name in a checkout: ``"lessons"``, ``"solutions"``,
    ``"benchmarks/results"``.
    """
    return (IMPORT_ROOT if in_checkout() else _IN_WHEEL) / name


def in_checkout() -> bool:
    """Whether this is a clone of the course, with its ``requirements.txt``, and not an installed
    wheel.
    """
    return not _IN_WHEEL.is_dir()
