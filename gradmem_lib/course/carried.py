"""Finds the course's own files: at the root of a checkout, or inside this package in an installed
wheel.
"""

from __future__ import annotations

from pathlib import Path

_CARRIED = Path(__file__).with_name(
    "files"
)  # made by pyproject.toml: what a wheel contains besides the library
_CHECKOUT = Path(__file__).resolve().parents[2]


def carried(folder: str) -> Path:
    """A folder of the course, by its name in a checkout: ``"lessons"``, ``"solutions"``,
    ``"benchmarks/results"``.
    """
    return (_CHECKOUT if in_checkout() else _CARRIED) / folder


def in_checkout() -> bool:
    """Whether this is a clone of the course, with its ``requirements.txt``, and not an installed
    wheel.
    """
    return not _CARRIED.is_dir()
