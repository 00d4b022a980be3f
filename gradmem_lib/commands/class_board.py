"""``gradmem class``: a teacher's board of a class."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .terminal import complain


def add(commands) -> None:
    board = commands.add_parser(
        "class", help="a teacher's board, from a folder with learners' progress files"
    )
    option = board.add_argument
    option(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="a file a learner, or a folder a learner, such as home directories",
    )
    option(
        "--names",
        action="store_true",
        help="show whose progress it is, instead of learner 1, 2, ...",
    )
    option(
        "--hide",
        action="store_true",
        help="show measured values on pages of their own, one click away",
    )
    option("--out", type=Path, default="board.html", metavar="FILE", help="the page (board.html)")
    option("--once", action="store_true", help="write the page once, instead of until Ctrl-C")
    board.set_defaults(run=_class)


def _class(options: argparse.Namespace) -> int:
    folder = options.folder
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        complain(f"{folder} {what}: give the folder that holds the learners' progress files")
        return 2
    try:
        from ..course.teacher.class_board import run_board

        run_board(folder, options.out, once=options.once, names=options.names, hide=options.hide)
    except KeyboardInterrupt:  # before the first page is written
        return 130
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0
