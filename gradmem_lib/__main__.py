"""The command line: ``gradmem lab | doctor | run | explain | predict | plan | progress | class``,
or ``python -m gradmem_lib ...``.

Arguments are checked before torch is imported, which takes seconds.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

from .hf_names import PICTURES_ALONE
from .names import (
    ATTENTION,
    CHECKPOINTING,
    LOOP_KEEPS,
    OFFLOAD,
    OPTIMIZERS,
    PRECISIONS,
    SELECTIVE,
    SHARDING,
    ZERO_GRAD,
)

WIDTH = 80
RUN_DOES = """\
Run a script unchanged, measure its memory, and write one HTML report. Options
of this command come before the script's name.

The script prints, returns and learns what it would without this command. At
its end, at Ctrl-C and at an error, stderr gets the peak by category and by
moment, the causes with their lines, and what to do next. The report has the
same, the memory over time, the peak of each step and the largest storages.
The models are found from the modules that the script calls and from the
optimizers that step. Once the script uses a GPU, only the GPU's bytes count.
Code that torch.compile has compiled runs uncompiled."""
RUN_ENDS = """\
Several processes write a report each, with the rank in its name:
  torchrun --nproc-per-node 2 -m gradmem_lib run train.py
  accelerate launch -m gradmem_lib run train.py
Processes that the script starts itself are not measured. There is no report if
os._exit or a signal that the script does not handle ends the process."""
SILENT_SECONDS = 2  # after these, a line says what takes so long


def wrapped(message: object) -> str:
    """A message at most 80 columns wide, broken between words."""
    lines = []
    for line in str(message).splitlines():
        lines += textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False) or [""]
    return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose errors fit the terminal and name the command that explains more."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, wrapped(f"{message}. See {self.prog} --help") + "\n")


@contextmanager
def saying(what: str):
    """Write ``what`` to stderr if the block takes longer than two seconds."""
    timer = threading.Timer(SILENT_SECONDS, lambda: print(wrapped(what), file=sys.stderr))
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


def _lab(options: argparse.Namespace) -> int:
    from .course.setup.lab import lab

    try:
        return lab(options.folder, copy_only=options.copy)
    except (OSError, RuntimeError) as error:  # RuntimeError: ~nobody, who has no home
        print(f"The lessons cannot be put into {options.folder}: {error}", file=sys.stderr)
        return 2


def _doctor(options: argparse.Namespace) -> int:
    from .course.setup import doctor

    findings = doctor.examine()
    print(doctor.report(findings))
    return 0 if doctor.can_run(findings) else 1


def _progress(options: argparse.Namespace) -> int:
    from .course.learner import progress

    try:
        if options.reset:
            print(progress.reset())
        elif options.all:
            from .course.setup.summary import summary

            with saying("reading all exercises ..."):
                print(summary())
        else:
            from .course.setup.overview import overview

            print(overview())
    except progress.ProgressError as error:
        print(wrapped(error), file=sys.stderr)
        return 1
    return 0


def _class(options: argparse.Namespace) -> int:
    if not options.folder.is_dir():
        what = "is not a folder" if options.folder.exists() else "does not exist"
        print(
            wrapped(
                f"{options.folder} {what}: give the folder that holds the learners' progress files"
            ),
            file=sys.stderr,
        )
        return 2
    try:
        from .course.teacher.class_board import run_board

        look = {"names": options.names, "hide": options.hide}
        run_board(options.folder, options.out, once=options.once, **look)
    except KeyboardInterrupt:  # before the first page is written
        return 130
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _explain(options: argparse.Namespace) -> int:
    from .view.explanation import explain

    given = " ".join(options.text)
    path = Path(given) if given not in ("", "-") and len(given) < 4096 else None
    try:
        if given in ("", "-"):
            if sys.stdin.isatty():
                print("Paste the error, and end it with Ctrl-D:", file=sys.stderr)
            given = sys.stdin.read()
        elif path is not None and path.is_file():
            given = path.read_text(encoding="utf-8", errors="replace")
        elif len(options.text) == 1 and not re.search(r"\s", given):
            print(wrapped(f"{given}: there is no such file"), file=sys.stderr)
            return 2
    except OSError as error:
        print(wrapped(f"{given}: {error.strerror}"), file=sys.stderr)
        return 2
    explanation = explain(given)
    print(explanation)
    if explanation.error is None:
        return 1
    if options.model is None:
        return 0
    print()
    options.error = explanation.error
    return _asked(options)


def _run(options: argparse.Namespace) -> int:
    from .run.program import CannotRun
    from .run.session import run

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
        print(wrapped(error), file=sys.stderr)
        return 2


def _size(text: str) -> int:
    from .units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _beside(options: argparse.Namespace) -> int:
    """The prediction for a model, beside the figures of an error."""
    from .planning.held import overhead_of_prediction
    from .units import format_bytes

    options.target = "cuda"
    title, prediction = _predicted(options)
    print(_as_text(title, prediction, 1))
    extra = sum(overhead_of_prediction(prediction, cards=1).values())
    needs = prediction.peak.total + extra
    total = options.error.total
    if total is not None and options.error.kind != "budget":
        card = format_bytes(total)
        if needs > total:
            print(wrapped(f"This run does not fit the error's card of {card}, also by itself."))
        else:
            print(
                wrapped(
                    f"By the prediction this run fits the error's card of {card}. So look for "
                    "what it does not count: other processes, a leak, evaluation, or other "
                    "options than those given here."
                )
            )
    return 0


def _predicted(options: argparse.Namespace) -> tuple[str, Any]:
    from .planning.models import find_model
    from .prediction.loop import Loop
    from .prediction.predict import predict
    from .training.recipe import Recipe

    recipe = Recipe(**{name: getattr(options, name) for name in Recipe.__dataclass_fields__})
    loop = Loop(**{name: getattr(options, name) for name in Loop.__dataclass_fields__})
    config, title = find_model(options.model)
    prediction = predict(
        config,
        batch_size=options.batch_size,
        seq_len=options.seq_len,
        recipe=recipe,
        target=options.target,
        ranks=options.ranks,
        rank=options.rank,
        loop=loop,
        rope_factor=options.rope_factor,
    )
    return title, prediction


def _predict(options: argparse.Namespace) -> int:
    title, prediction = _predicted(options)
    shown = title, prediction, options.ranks or 1
    print(json.dumps(_as_dict(*shown), indent=2) if options.json else _as_text(*shown))
    return 0


def _name(text: str) -> str | None:
    return None if text in ("none", "None") else text


def _count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.strip().isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _rank(text: str) -> int:
    if not text.strip().isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _one_of(names: Iterable[str], *, or_none: bool = False) -> Callable[[str], str | None]:
    """A reader of one of these names; ``or_none``: "none" is allowed, too."""
    known = list(names)

    def read(text: str) -> str | None:
        if or_none and _name(text) is None:
            return None
        if text not in known:
            listed = ", ".join([*known, "none"] if or_none else known)
            raise argparse.ArgumentTypeError(f"{text!r} is none of {listed}")
        return text

    return read


def _with_spaces(names: Iterable[str]) -> Callable[[str], str | None]:
    """A reader of one of these names, which a command line writes with dashes for spaces."""
    dashed = _one_of([name.replace(" ", "-") for name in names])
    return lambda text: dashed(text.replace(" ", "-")).replace("-", " ")


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _schedule(text: str) -> str | int | list[int] | None:
    """``none``, ``per-layer``, ``sqrt``, ``best``; ``4`` for segments of four layers; ``4,3,2`` for
    a list of them.
    """
    if _name(text) is None:
        return None
    parts = text.split(",")
    if all(part.strip().isdigit() for part in parts):
        return int(text) if len(parts) == 1 else [int(part) for part in parts]
    known = (*CHECKPOINTING, *SELECTIVE)
    if text not in known:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(known)}, none, a number of layers (4) or segments "
            "(4,3,2)"
        )
    return text


def _as_dict(title: str, prediction, ranks: int) -> dict:
    from .planning.held import overhead_of_prediction

    peak, extra = prediction.peak, overhead_of_prediction(prediction, cards=ranks)
    return {
        "model": title,
        "target": prediction.target,
        "peak": {"total": peak.total, "phase": peak.phase, "by_category": peak.by_category},
        "peak_by_phase": prediction.peak_by_phase,
        "between_steps": prediction.current.total,
        "moved": prediction.offload_traffic_bytes,
        "beyond_the_peak": extra,
        "needs": peak.total + sum(extra.values()),
    }


def _as_text(title: str, prediction, ranks: int) -> str:
    from .planning.held import overhead_of_prediction
    from .units import format_bytes

    peak, extra = prediction.peak, overhead_of_prediction(prediction, cards=ranks)
    rows = [(name, n) for name, n in peak.by_category.items() if n]
    rows += [("peak, live bytes", peak.total)]
    if prediction.offload_traffic_bytes:
        rows.append(("moved", prediction.offload_traffic_bytes))
    if extra:
        rows += [*extra.items(), ("needs", peak.total + sum(extra.values()))]
    width = max(len(name) for name, _ in rows)
    lines = [
        f"{title}, predicted for {prediction.target}; the peak is in {peak.phase.replace('_', ' ')}"
    ]
    for name, n in rows:
        if name in ("peak, live bytes", "needs"):
            lines.append("  " + "-" * (width + 33))
        lines.append(f"  {name:{width}} {n:>20,} {format_bytes(n):>11}")
    return "\n".join(lines)


def _plan(options: argparse.Namespace) -> int:
    from .planning.plan import plan

    with progress_line() as show:
        made = plan(
            options.model,
            card=options.card,
            seq_len=options.seq_len,
            global_batch=options.global_batch,
            method=options.method,
            target=options.target,
            cards=options.cards,
            margin=options.margin,
            notify=show,
        )
    if options.json:
        print(json.dumps(made.to_dict(), indent=2))
    else:
        print(made)
        if made.code:
            print(f"\nCode for the first one (train_dataset is yours):\n\n{made.code}", end="")
    return 0 if made.fits else 1


def _asked(options: argparse.Namespace) -> int:
    """Run a command whose bad input is a sentence on stderr and exit code 2."""
    if problem := problem_of(options):
        print(wrapped(problem), file=sys.stderr)
        return 2
    with saying(options.says):
        return _run_asked(options)


def problem_of(options: argparse.Namespace) -> str:
    """What is wrong with the options together, as far as it can be said without torch."""
    if options.seq_len is None and is_known_text_model(options.model):
        return (
            f"--seq-len is missing: {options.model} reads or writes text. Give --seq-len, such as "
            "2048, or 448 for a speech model"
        )
    card = getattr(options, "card", None)
    if card is not None:
        from .planning.cards import find_card

        try:
            find_card(card)
        except ValueError as error:
            return command_words(str(error), ["card"])
        if options.global_batch % options.cards:
            return (
                f"--global-batch {options.global_batch} is not dealt evenly to {options.cards} "
                "cards: give a multiple"
            )
        return ""
    if options.batch_size is None:
        return "--batch-size is missing: give the rows of one optimizer step, such as 8"
    if options.batch_size % options.accumulation:
        return (
            f"--batch-size {options.batch_size} cannot be cut into {options.accumulation} equal "
            f"micro-batches: give a multiple of {options.accumulation}, or another --accumulation"
        )
    if options.in_backward and options.accumulation > 1:
        return (
            "--in-backward frees each gradient as soon as it is complete, and --accumulation "
            f"{options.accumulation} adds them up: choose one of the two"
        )
    return ""


def is_known_text_model(name: str) -> bool:
    """Whether ``name`` is in the table of well-known models, and its rows have tokens."""
    table = json.loads(
        files(f"{__package__}.planning").joinpath("models.json").read_text(encoding="utf-8")
    )
    for known, row in table.items():
        spellings = [known, *row["ids"], *(hub.rpartition("/")[2] for hub in row["ids"])]
        same = [other for other in spellings if _letters(other) == _letters(name)]
        if same:
            return row["model_type"] not in PICTURES_ALONE
    return False


def _letters(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower())


def command_words(message: str, names: Iterable[str]) -> str:
    """A message of the library with its arguments spelled as options: ``--seq-len 0`` for
    ``seq_len=0``.
    """
    for name in names:
        option = "--" + name.replace("_", "-")
        message = re.sub(rf"\b{name}=None:", f"{option} is not given:", message)
        message = re.sub(rf"\b{name}=True\b", option, message)
        message = re.sub(rf"\b{name}='([^']*)'", rf"{option} '\1'", message)
        message = re.sub(rf"\b{name}=", f"{option} ", message)
        if "_" in name:
            message = re.sub(rf"\b{name}\b", option, message)
    return message


def _run_asked(options: argparse.Namespace) -> int:
    from transformers.utils import logging as transformers_logging

    from .prediction.question import CannotTrace

    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)

    try:
        return options.command(options)
    except (ValueError, TypeError, CannotTrace) as error:
        print(wrapped(command_words(str(error), vars(options))), file=sys.stderr)
    except Exception as error:
        if sys.flags.dev_mode or isinstance(error, BrokenPipeError):
            raise
        what = f"{options.model}: {type(error).__name__}: {error}"
        where = "No check has foreseen this. `python -X dev -m gradmem_lib` shows where it happens"
        print(wrapped(f"{what}\n{where}"), file=sys.stderr)
    return 2


_MODEL = (
    "a well-known model (Qwen2.5-7B, GPT-2 XL, ...), a folder, a config.json, or a hub id "
    "(needs a network)"
)


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
    """Every subcommand sets ``run``, a function from the parsed options to the exit code."""
    called = "gradmem" if Path(sys.argv[0]).stem == "gradmem" else "python -m gradmem_lib"
    top = Parser(
        prog=called,
        description="Why am I out of memory, and what do I do? A course, and its tools.",
        epilog=f"{called} COMMAND --help explains one command.",
    )
    top.add_argument("--version", action=_Version, help="print the version")
    top.set_defaults(run=None)
    commands = top.add_subparsers(title="commands", metavar="COMMAND")

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

    doctor = commands.add_parser(
        "doctor", help="what of the course works here, and what to do about the rest"
    )
    doctor.set_defaults(run=_doctor)

    _add_run(commands)
    _add_explain(commands)
    _add_predict(commands)
    _add_plan(commands)

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

    board = commands.add_parser(
        "class", help="a teacher's board, from a folder with learners' progress files"
    )
    add = board.add_argument
    add(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="a file a learner, or a folder a learner, such as home directories",
    )
    add(
        "--names",
        action="store_true",
        help="show whose progress it is, instead of learner 1, 2, ...",
    )
    add(
        "--hide",
        action="store_true",
        help="show measured values on pages of their own, one click away",
    )
    add("--out", type=Path, default="board.html", metavar="FILE", help="the page (board.html)")
    add("--once", action="store_true", help="write the page once, instead of until Ctrl-C")
    board.set_defaults(run=_class)
    return top


def _add_run(commands) -> None:
    measured = commands.add_parser(
        "run",
        help="run a script unchanged, and report its memory",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--budget SIZE] [--steps N] [--out FILE] [--snapshot FILE]\n"
        "       (SCRIPT | -m MODULE) [ARGUMENTS ...]",
        description=RUN_DOES,
        epilog=RUN_ENDS,
    )
    add = measured.add_argument
    add(
        "--budget",
        type=_size,
        metavar="SIZE",
        help="raise an out-of-memory error in the script at the first allocation that exceeds "
        "SIZE, such as 8GiB; without it, the script never fails because of this command",
    )
    add(
        "--steps",
        type=_count,
        metavar="N",
        help="measure N optimizer steps: the report comes before the next forward, and the script "
        "goes on without being measured",
    )
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="the report (gradmem-SCRIPT.html in the current folder)",
    )
    add(
        "--snapshot",
        type=Path,
        metavar="FILE",
        help="also write a snapshot for PyTorch's viewer, https://pytorch.org/memory_viz; it has "
        "the latest 200,000 allocations and frees",
    )
    add(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="MODULE",
        help="run a module, as python -m does, with the arguments that follow",
    )
    add(
        "script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="a script, and the arguments that follow are its own",
    )
    measured.set_defaults(run=_run)


def _add_explain(commands) -> None:
    explain = commands.add_parser(
        "explain",
        help="an out-of-memory error: its figures, which case it is, what helps",
        description="What an out-of-memory error says. With --model and --batch-size it lays the "
        "prediction for a training step beside it.",
    )
    add = explain.add_argument
    add(
        "text",
        nargs="*",
        metavar="TEXT",
        help="a file (a whole log is fine) or the error itself; without it, standard input",
    )
    add("--model", help=_MODEL)
    add("--batch-size", type=_count, metavar="N", help="rows of one optimizer step")
    _add_recipe(add)
    _add_loop(add)
    explain.set_defaults(
        run=_explain, command=_beside, says="predicting the step ...", ranks=None, rank=0
    )


def _add_predict(commands) -> None:
    predict = commands.add_parser("predict", help="the peak of a training step, without running it")
    add = predict.add_argument
    add("model", help=_MODEL)
    add("--batch-size", type=_count, required=True, metavar="N", help="rows of one optimizer step")
    _add_recipe(add)
    _add_loop(add)
    add(
        "--ranks",
        type=_count,
        metavar="N",
        help="of so many ranks that train together (with --sharding), one",
    )
    add("--rank", type=_rank, default=0, metavar="R", help="which one of them, from 0")
    add(
        "--target",
        type=_one_of(("cpu", "cuda")),
        metavar="T",
        help="cpu or cuda (the default where there is a card)",
    )
    add("--json", action="store_true", help="print JSON")
    predict.set_defaults(
        run=_asked, command=_predict, says="reading the model and predicting its step ..."
    )


def _add_recipe(add) -> None:
    """Every option but the first one is a field of ``Recipe``, by the same name."""
    add("--seq-len", type=_count, metavar="N", help="tokens in a row (not for images)")
    add(
        "--precision",
        type=_one_of(PRECISIONS, or_none=True),
        default="float32",
        metavar="P",
        help=", ".join(PRECISIONS),
    )
    add(
        "--optimizer",
        type=_one_of(OPTIMIZERS),
        default="adamw",
        metavar="O",
        help=", ".join(OPTIMIZERS),
    )
    add("--momentum", type=float, default=0.0, metavar="M", help="of sgd")
    add(
        "--in-backward",
        action="store_true",
        help="step each parameter in backward and free its gradient",
    )
    add(
        "--attention",
        type=_one_of(ATTENTION, or_none=True),
        default="fused",
        metavar="A",
        help=", ".join((*ATTENTION, "none")),
    )
    schedules = (
        ", ".join((*CHECKPOINTING, *SELECTIVE)) + ", layers in a segment (4), or segments (4,3,2)"
    )
    add("--checkpointing", type=_schedule, metavar="C", help=schedules)
    add("--every-n-layers", type=_count, metavar="N", help="checkpoint one layer in N")
    add(
        "--layers",
        type=_names,
        default=(),
        metavar="NAMES",
        help="only these lists of layers, such as model.decoder.layers",
    )
    add(
        "--offload",
        type=_one_of(OFFLOAD, or_none=True),
        metavar="O",
        help="moved away until backward: " + ", ".join(OFFLOAD),
    )
    add(
        "--sharding",
        type=_one_of(SHARDING, or_none=True),
        metavar="S",
        help="over several processes: " + ", ".join(SHARDING),
    )
    add(
        "--accumulation",
        type=_count,
        default=1,
        metavar="K",
        help="micro-batches that the batch is cut into",
    )
    add(
        "--lora-rank", type=_count, metavar="R", help="train low-rank additions and freeze the rest"
    )
    add(
        "--lora-targets",
        type=_names,
        default=(),
        metavar="NAMES",
        help="layers that get one, such as q_proj,v_proj, or all-linear",
    )
    add("--lora-alpha", type=float, metavar="A", help="their scale times the rank")
    add("--lora-dropout", type=float, default=0.0, metavar="P", help="of their inputs")
    add(
        "--quantized-base",
        action="store_true",
        help="keep the frozen layers in 4 bits (with --lora-rank)",
    )
    add("--chunked-loss", action="store_true", help="never hold all logits at once")
    add(
        "--float32-sums",
        action="store_true",
        help="add up gradients of 16 bits in float32 over the micro-batches",
    )


def _add_loop(add) -> None:
    """Every option but the first one is a field of ``Loop``, by the same name."""
    add(
        "--rope-factor",
        type=float,
        metavar="F",
        help="RoPE scaling: the model takes F times as many tokens in a row as its config says",
    )
    add(
        "--zero-grad",
        type=_with_spaces(ZERO_GRAD),
        default=ZERO_GRAD[0],
        metavar="W",
        help="where the loop frees gradients: "
        + ", ".join(name.replace(" ", "-") for name in ZERO_GRAD),
    )
    add(
        "--keeps",
        type=_one_of(LOOP_KEEPS, or_none=True),
        metavar="K",
        help="what a variable of the loop holds until the next step: " + ", ".join(LOOP_KEEPS),
    )
    add("--clips", action="store_true", help="clip the norm of the gradients before the step")
    add(
        "--shifted-logits",
        action="store_true",
        help="the loss of transformers before 4.45, with float32 copies of the logits",
    )


def _add_plan(commands) -> None:
    plan = commands.add_parser(
        "plan", help="the recipe that fits a card, and why faster ones do not"
    )
    add = plan.add_argument
    add("model", help=_MODEL)
    add(
        "--card",
        required=True,
        metavar="C",
        help="a name (RTX 4090, T4, A100 80GB, ...) or bytes (24GiB)",
    )
    add("--cards", type=_count, default=1, metavar="N", help="so many of them in one machine")
    add("--seq-len", type=_count, metavar="N", help="tokens in a row (not for images)")
    add("--global-batch", type=_count, required=True, metavar="N", help="rows of one step")
    add(
        "--method",
        type=_one_of(("full", "lora", "qlora", "any")),
        default="full",
        metavar="M",
        help="full (the default), lora, qlora or any",
    )
    add(
        "--target",
        type=_one_of(("cuda", "cpu")),
        default="cuda",
        metavar="T",
        help="cuda (the default) or cpu",
    )
    add(
        "--margin",
        type=float,
        metavar="M",
        help="share of what is needed that stays free (0.03; several cards 0.045; 0: none)",
    )
    add("--json", action="store_true", help="print JSON")
    plan.set_defaults(
        run=_asked,
        command=_plan,
        says="reading the model and trying its recipes, up to a minute ...",
    )


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
    except BrokenPipeError:
        # Who reads the output, such as `head`, has read enough. When Python ends it would write the
        # rest, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
