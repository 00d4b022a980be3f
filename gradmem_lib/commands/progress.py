"""``gradmem progress``: the exercises that a learner has solved, and the guesses."""

from __future__ import annotations

import argparse

from .terminal import complain, saying


def add(commands) -> None:
    progress = commands.add_parser(
        "progress", help="the exercises you have solved and the guesses you made"
    )
    progress.add_argument(
        "--reset", action="store_true", help="forget all progress and start again"
    )
    progress.add_argument(
        "--all", action="store_true", help="every exercise, every guess, and lesson 11's stars"
    )
    progress.set_defaults(run=_progress)


def _progress(options: argparse.Namespace) -> int:
    from ..course.learner import progress

    try:
        if options.reset:
            print(progress.reset())
        elif options.all:
            from ..course.setup.summary import summary

            with saying("reading all exercises ..."):
                print(summary())
        else:
            from ..course.setup.overview import overview

            print(overview())
    except progress.ProgressError as error:
        complain(error)
        return 1
    return 0
