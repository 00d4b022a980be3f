"""How ``copy.deepcopy`` copies values of a type that it would share, such as functions.

Seen in Python 3.11 to 3.13. Without it, the copy of a module calls the original's layers.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch


def deepcopied_by(
    copiers: dict[type, Callable[[Any, dict], Any]],
) -> AbstractContextManager:
    """While its block runs, ``copy.deepcopy`` calls ``copiers[type(value)](value, memo)``."""
    return patch.dict(copy._deepcopy_dispatch, copiers)  # type: ignore[attr-defined]
