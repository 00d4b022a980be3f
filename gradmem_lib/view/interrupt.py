"""Shortens the traceback of an interrupted cell to the learner's own lines.

An interrupt arrives anywhere inside torch. Its traceback is then long, and says nothing about a
mistake, since there is none.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

_HERE = str(Path(__file__).parent.parent)
_LIBRARIES = (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), _HERE)


def keep_own_lines() -> None:
    """Cut the lines of libraries out of the ``KeyboardInterrupt`` that is being handled, if one is.

    Every other exception keeps all its lines.
    """
    interrupt = sys.exception()
    if not isinstance(interrupt, KeyboardInterrupt):
        return
    last = None
    entry = interrupt.__traceback__
    while entry is not None:
        if not entry.tb_frame.f_code.co_filename.startswith(_LIBRARIES):
            if last is not None:
                last.tb_next = entry
            last = entry
        entry = entry.tb_next
    if last is not None:
        last.tb_next = None
