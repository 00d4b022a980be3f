"""The command line: ``gradmem lab | doctor | run | explain | predict | plan | progress | class``,
or ``python -m gradmem_lib ...``. Each command is a file of ``commands``.

Arguments are checked before torch is imported, which takes seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from .commands import class_board, doctor, explain, lab, plan, predict, progress, run
from .commands.terminal import complain, wrapped

# What `pip install` brings without an extra; the rest is the course's.
FOR_EVERY_COMMAND = ("torch", "transformers", "numpy", "jinja2", "safetensors")
COMMANDS = (lab, doctor, run, explain, predict, plan, progress, class_board)


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose errors fit the terminal and name the command that explains more."""

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith("?") else "."
        self.exit(2, wrapped(f"{message}{end} See {self.prog} --help") + "\n")

    def parse_known_args(self, args=None, namespace=None):
        """What a command does not know is its own error, which names its help."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"{' '.join(unknown)} is not known")
        return found, unknown


class _Version(argparse.Action):
    """Print the version of the installed library and leave."""

    def __init__(self, option_strings, dest, **settings):
        super().__init__(option_strings, dest, nargs=0, **settings)

    def __call__(self, parser, namespace, values, option_string=None):
        try:
            version = metadata.version("gradmem")
        except metadata.PackageNotFoundError:
            version = "of a folder that is not installed"
        print(f"gradmem {version}")
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """Every command sets ``run``, a function from the parsed options to the exit code."""
    called = "gradmem" if Path(sys.argv[0]).stem == "gradmem" else "python -m gradmem_lib"
    top = Parser(
        prog=called,
        description="Why am I out of memory, and what do I do? A course, and its tools.",
        epilog=f"{called} COMMAND --help explains one command.",
    )
    top.add_argument("--version", action=_Version, help="print the version")
    top.set_defaults(run=None)
    subparsers = top.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        command.add(subparsers)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    made = parser()
    options = made.parse_args(arguments)
    if options.run is None:
        made.print_help()
        return 0
    try:
        code = options.run(options)
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "gradmem_lib"):
            raise
        extra = "." if package in FOR_EVERY_COMMAND else '".[course]"'
        complain(
            f"This command needs {package}, which is not installed in this Python. In the folder "
            f"of gradmem, run: pip install -e {extra}"
        )
        return 2
    except BrokenPipeError:
        # Who reads the output, such as `head`, has read enough. When Python ends it would write the
        # rest, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
