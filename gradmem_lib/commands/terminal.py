"""What the commands write to a terminal: lines that fit it, and what takes so long."""

from __future__ import annotations

import shutil
import sys
import textwrap
import threading
from contextlib import contextmanager

WIDTH = 80
SILENT_SECONDS = 2  # after these, a line says what takes so long


def wrapped(message: object) -> str:
    """A message at most 80 columns wide, broken between words."""
    lines = []
    for line in str(message).splitlines():
        parts = textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False)
        lines += parts or [""]  # an empty line stays
    return "\n".join(lines)


def complain(message: object) -> None:
    """Write a message to stderr."""
    print(wrapped(message), file=sys.stderr)


@contextmanager
def saying(what: str):
    """Write ``what`` to stderr if the block takes longer than two seconds."""
    timer = threading.Timer(SILENT_SECONDS, complain, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def progress_line():
    """A function that shows a sentence in the last line of a terminal, in place of the one before;
    elsewhere it shows nothing.
    """

    def show(sentence: str) -> None:
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{sentence[:width]:<{width}}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        show("")
        if sys.stderr.isatty():
            print("\r", end="", file=sys.stderr, flush=True)
