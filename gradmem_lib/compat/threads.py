"""What every thread runs, also one whose class has a ``run`` of its own.

Seen in Python 3.11 to 3.13. Without it, the tensors that a script's other threads make are counted
only when its first thread reads them.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch


def threads_run_in(context: Callable[[], AbstractContextManager]) -> Any:
    """While its block runs, each new thread runs inside of a ``context()`` of its own."""
    bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def _bootstrap_inner(thread):
        with context():
            bootstrap(thread)

    return patch.object(threading.Thread, "_bootstrap_inner", _bootstrap_inner)
