"""No garbage collection while a step is traced."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """While the block runs, Python does not look for garbage by itself.

    It would look at all objects of the process several times in a prediction, and most of them are
    those of imported libraries: a tenth of a plan's time. And tensors in a reference cycle would be
    freed at a moment that is another one in each run.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
