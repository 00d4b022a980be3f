"""The command line: ``gradmem lab | doctor | predict | plan | progress | class``, or ``python -m
gradmem_lib ...``.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from .names import ATTENTION, CHECKPOINTING, OFFLOAD, OPTIMIZERS, PRECISIONS, SELECTIVE, SHARDING


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
    from .course.setup.summary import summary

    try:
        print(progress.reset() if options.reset else summary())
    except progress.ProgressError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _class(options: argparse.Namespace) -> int:
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


def _predict(options: argparse.Namespace) -> int:
    from .planning.models import find_model
    from .prediction.predict import predict
    from .training.recipe import Recipe

    recipe = Recipe(**{name: getattr(options, name) for name in Recipe.__dataclass_fields__})
    config, title = find_model(options.model)
    prediction = predict(
        config,
        batch_size=options.batch_size,
        seq_len=options.seq_len,
        recipe=recipe,
        target=options.target,
        ranks=options.ranks,
        rank=options.rank,
    )
    shown = title, prediction, options.ranks or 1
    print(json.dumps(_as_dict(*shown), indent=2) if options.json else _as_text(*shown))
    return 0


def _name(text: str) -> str | None:
    return None if text in ("none", "None") else text


def _schedule(text: str) -> str | int | list[int] | None:
    """``none``, ``per-layer``, ``sqrt``, ``best``; ``4`` for segments of four layers; ``4,3,2`` for
    a list of them.
    """
    if _name(text) is None:
        return None
    parts = text.split(",")
    if all(part.strip().isdigit() for part in parts):
        return int(text) if len(parts) == 1 else [int(part) for part in parts]
    return text


def _as_dict(title: str, prediction, ranks: int) -> dict:
    from .planning.cost import overhead_of_prediction

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
    from .planning.cost import overhead_of_prediction
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

    made = plan(
        options.model,
        card=options.card,
        seq_len=options.seq_len,
        global_batch=options.global_batch,
        method=options.method,
        target=options.target,
        cards=options.cards,
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
    from transformers.utils import logging as transformers_logging

    from .prediction.question import CannotTrace

    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)

    try:
        return options.command(options)
    except (ValueError, TypeError, CannotTrace) as error:
        print(error, file=sys.stderr)
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        what = f"{options.model}: {type(error).__name__}: {error}"
        print(
            (
                f"{what}\nNo check has foreseen this. `python -X dev -m gradmem_lib` shows where "
                "it "
                "happens"
            ),
            file=sys.stderr,
        )
    return 2


_MODEL = (
    "a well-known model (Qwen2.5-7B, GPT-2 XL, ...), a folder, a config.json, or a hub id "
    "(needs a network)"
)


def parser() -> argparse.ArgumentParser:
    """Every subcommand sets ``run``, a function from the parsed options to the exit code."""
    called = "gradmem" if Path(sys.argv[0]).stem == "gradmem" else "python -m gradmem_lib"
    top = argparse.ArgumentParser(prog=called, description="The gradmem course.")
    commands = top.add_subparsers(title="commands", metavar="command", required=True)

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

    _add_predict(commands)
    _add_plan(commands)

    progress = commands.add_parser(
        "progress", help="the exercises you have solved and the guesses you made"
    )
    progress.add_argument(
        "--reset", action="store_true", help="forget all progress and start again"
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


def _add_predict(commands) -> None:
    """Every option but the first three and the last four is a field of ``Recipe``, by the same
    name.
    """
    predict = commands.add_parser("predict", help="the peak of a training step, without running it")
    add = predict.add_argument
    add("model", help=_MODEL)
    add("--batch-size", type=int, required=True, metavar="N", help="rows of one optimizer step")
    add("--seq-len", type=int, metavar="N", help="tokens in a row (not for images)")
    add("--precision", type=_name, default="float32", metavar="P", help=", ".join(PRECISIONS))
    add("--optimizer", default="adamw", metavar="O", help=", ".join(OPTIMIZERS))
    add("--momentum", type=float, default=0.0, metavar="M", help="of sgd")
    add(
        "--in-backward",
        action="store_true",
        help="step each parameter in backward and free its gradient",
    )
    add(
        "--attention",
        type=_name,
        default="fused",
        metavar="A",
        help=", ".join((*ATTENTION, "none")),
    )
    schedules = (
        ", ".join((*CHECKPOINTING, *SELECTIVE)) + ", layers in a segment (4), or segments (4,3,2)"
    )
    add("--checkpointing", type=_schedule, metavar="C", help=schedules)
    add("--every-n-layers", type=int, metavar="N", help="checkpoint one layer in N")
    add(
        "--offload",
        type=_name,
        metavar="O",
        help="moved away until backward: " + ", ".join(OFFLOAD),
    )
    add(
        "--sharding", type=_name, metavar="S", help="over several processes: " + ", ".join(SHARDING)
    )
    add(
        "--accumulation",
        type=int,
        default=1,
        metavar="K",
        help="micro-batches that the batch is cut into",
    )
    add("--lora-rank", type=int, metavar="R", help="train low-rank additions and freeze the rest")
    add(
        "--lora-targets",
        nargs="+",
        default=(),
        metavar="NAME",
        help="layers that get one, such as q_proj",
    )
    add(
        "--quantized-base",
        action="store_true",
        help="keep the frozen layers in 4 bits (with --lora-rank)",
    )
    add("--chunked-loss", action="store_true", help="never hold all logits at once")
    add(
        "--ranks",
        type=int,
        metavar="N",
        help="of so many ranks that train together (with --sharding), one",
    )
    add("--rank", type=int, default=0, metavar="R", help="which one of them, from 0")
    add("--target", metavar="T", help="cpu or cuda (the default where there is a card)")
    add("--json", action="store_true", help="print JSON")
    predict.set_defaults(run=_asked, command=_predict)


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
    add("--cards", type=int, default=1, metavar="N", help="so many of them in one machine")
    add("--seq-len", type=int, metavar="N", help="tokens in a row")
    add("--global-batch", type=int, required=True, metavar="N", help="rows of one optimizer step")
    add("--method", default="full", metavar="M", help="full (the default), lora, qlora or any")
    add("--target", default="cuda", metavar="T", help="cuda (the default) or cpu")
    add("--json", action="store_true", help="print JSON")
    plan.set_defaults(run=_asked, command=_plan)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    options = parser().parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
