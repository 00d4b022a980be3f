"""``gradmem run``: a script unchanged, with its memory measured."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .readers import count, size
from .terminal import complain

DESCRIPTION = """\
Run a script unchanged, measure its memory, and write one HTML report. Options
of this command come before the script's name.

The script prints, returns and learns what it would without this command. At
its end, at Ctrl-C and at an error, stderr gets the peak by category and by
moment, the causes with their lines, and what to do next. The report has the
same, the memory over time, the peak of each step and the largest storages.
The models are found from the modules that the script calls and from the
optimizers that step. Once the script uses a GPU, only the GPU's bytes count.
Code that torch.compile has compiled runs uncompiled."""
EPILOG = """\
Several processes write a report each, with the rank in its name:
  torchrun --nproc-per-node 2 -m gradmem_lib run train.py
  accelerate launch -m gradmem_lib run train.py
Processes that the script starts itself are not measured. There is no report if
os._exit or a signal that the script does not handle ends the process."""


def add(commands) -> None:
    measured = commands.add_parser(
        "run",
        help="run a script unchanged, and report its memory",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--budget SIZE] [--steps N] [--out FILE] [--snapshot FILE]\n"
        "       (SCRIPT | -m MODULE) [ARGUMENTS ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    option = measured.add_argument
    option(
        "--budget",
        type=size,
        metavar="SIZE",
        help="raise an out-of-memory error in the script at the first allocation that exceeds "
        "SIZE, such as 8GiB; without it, the script never fails because of this command",
    )
    option(
        "--steps",
        type=count,
        metavar="N",
        help="measure N optimizer steps: the report comes before the next forward, and the script "
        "goes on without being measured",
    )
    option(
        "--out",
        type=Path,
        metavar="FILE",
        help="the report (gradmem-SCRIPT.html in the current folder)",
    )
    option(
        "--snapshot",
        type=Path,
        metavar="FILE",
        help="also write a snapshot for PyTorch's viewer, https://pytorch.org/memory_viz; it has "
        "the latest 200,000 allocations and frees",
    )
    option(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="MODULE",
        help="run a module, as python -m does, with the arguments that follow",
    )
    option(
        "script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="a script, and the arguments that follow are its own",
    )
    measured.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from ..run.program import CannotRun
    from ..run.session import run

    words = options.module or options.script
    if not words:
        print("gradmem run needs a script, or -m MODULE. See gradmem run --help", file=sys.stderr)
        return 2
    try:
        return run(
            words,
            as_module=options.module is not None,
            out=options.out,
            snapshot=options.snapshot,
            budget=options.budget,
            steps=options.steps,
        )
    except CannotRun as error:
        complain(error)
        return 2
