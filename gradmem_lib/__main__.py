"""The command line: ``python -m gradmem_lib doctor | progress``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def _doctor(options: argparse.Namespace) -> int:
    from gradmem_lib import doctor

    findings = doctor.examine()
    print(doctor.report(findings))
    return 0 if doctor.can_run(findings) else 1


def _progress(options: argparse.Namespace) -> int:
    from gradmem_lib.exercises import progress

    try:
        print(progress.reset() if options.reset else progress.summary())
    except progress.ProgressError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """Every subcommand sets ``run``, a function from the parsed options to the exit code."""
    top = argparse.ArgumentParser(prog="python -m gradmem_lib", description="The gradmem course.")
    commands = top.add_subparsers(title="commands", metavar="command", required=True)

    doctor = commands.add_parser(
        "doctor", help="what of the course works here, and what to do about the rest"
    )
    doctor.set_defaults(run=_doctor)

    progress = commands.add_parser("progress", help="the exercises you have solved and the guesses you made")
    progress.add_argument("--reset", action="store_true", help="forget them and start anew")
    progress.set_defaults(run=_progress)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    options = parser().parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
