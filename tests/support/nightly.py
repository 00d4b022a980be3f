"""Which part of a table of cases runs each time: every night, with ``GRADMEM_ALL=1``, the whole
table does.

``GRADMEM_TURN``, a number, moves the part that runs: with the number of a workflow's run, each case
of a table has run after as many runs as the table has parts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

ALL = bool(os.environ.get("GRADMEM_ALL"))
TURN = int(os.environ.get("GRADMEM_TURN", 0))


def each(nth: int, cases: Iterable, start: int = 0) -> list:
    """Every ``nth`` of ``cases``, from number ``start`` on; every night all of them."""
    if ALL:
        return list(cases)
    return list(cases)[(start + TURN) % nth :: nth]
