"""``gradmem lab``: the lessons, in a folder of the learner's, and JupyterLab."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add(commands) -> None:
    lab = commands.add_parser(
        "lab", help="put the lessons into a folder of yours and open JupyterLab there"
    )
    lab.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default="gradmem-lessons",
        metavar="FOLDER",
        help="the folder (gradmem-lessons); what you changed in it stays as it is",
    )
    lab.add_argument("--copy", action="store_true", help="put them there, and open nothing")
    lab.set_defaults(run=_lab)


def _lab(options: argparse.Namespace) -> int:
    from ..course.setup.lab import lab

    try:
        return lab(options.folder, copy_only=options.copy)
    except (OSError, RuntimeError) as error:  # RuntimeError: ~nobody, who has no home
        print(f"The lessons cannot be put into {options.folder}: {error}", file=sys.stderr)
        return 2
