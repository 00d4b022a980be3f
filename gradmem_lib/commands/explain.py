"""``gradmem explain``: what an out-of-memory error says; with a model, a prediction beside it."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from .model_step import answer
from .predict import as_text, predicted
from .readers import count
from .step_options import MODEL, add_step_options
from .terminal import complain, wrapped

LONGEST_PATH = 4096  # a longer text cannot be the name of a file


def add(commands) -> None:
    explain = commands.add_parser(
        "explain",
        help="an out-of-memory error: its figures, which case it is, what helps",
        description="What an out-of-memory error says. With --model and --batch-size it lays the "
        "prediction for a training step beside it.",
    )
    option = explain.add_argument
    option(
        "text",
        nargs="*",
        metavar="TEXT",
        help="a file (a whole log is fine) or the error itself; without it, standard input",
    )
    option("--model", help=MODEL)
    option("--batch-size", type=count, metavar="N", help="rows of one optimizer step")
    add_step_options(option)
    explain.set_defaults(
        run=_explain,
        command=_lay_prediction_beside,
        says="predicting the step ...",
        ranks=None,
        rank=0,
    )


def _explain(options: argparse.Namespace) -> int:
    from ..view.explanation import explain

    try:
        text = _text_of(options.text)
    except FileNotFoundError as error:
        complain(f"{error.filename}: there is no such file")
        return 2
    except OSError as error:
        complain(f"{' '.join(options.text)}: {error.strerror}")
        return 2
    explanation = explain(
        text, model=options.model, batch_size=options.batch_size, seq_len=options.seq_len
    )
    if options.model is None or explanation.error is None:
        print(explanation.for_terminal())
        return 0 if explanation.error else 1
    print(explanation)
    print()
    options.error = explanation.error
    return answer(options)


def _text_of(words: list[str]) -> str:
    """The error: from a file, from standard input, or the words themselves."""
    given = " ".join(words)
    if given in ("", "-"):
        if sys.stdin.isatty():
            print("Paste the error, and end it with Ctrl-D:", file=sys.stderr)
        return sys.stdin.read()
    path = Path(given)
    if len(given) < LONGEST_PATH and path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    is_one_word = len(words) == 1 and not re.search(r"\s", given)
    if is_one_word:  # no error is one word, so it was meant as a file
        raise FileNotFoundError(None, None, given)
    return given


def _lay_prediction_beside(options: argparse.Namespace) -> int:
    """Print the prediction for a model, and how it compares with the error's card."""
    from ..planning.held import overhead_of_prediction
    from ..units import format_bytes
    from ..view.error_rows import shown

    options.target = "cuda"
    title, prediction = predicted(options)
    print(as_text(title, prediction, 1))
    beyond = overhead_of_prediction(prediction, cards=1)
    needs = prediction.peak.total + sum(beyond.values())
    total = options.error.total
    if total is None or options.error.kind == "budget":  # the error names no card's memory
        return 0
    if shown(needs) > shown(total):
        verdict = (
            f"This run needs {format_bytes(needs)}. It does not fit the error's card of "
            f"{format_bytes(total)}, also by itself."
        )
    else:
        verdict = (
            f"By the prediction this run needs {format_bytes(needs)} and fits the error's card of "
            f"{format_bytes(total)}. So look for what it does not count: other processes, a leak, "
            "evaluation, or other options than those given here."
        )
    print(wrapped(verdict))
    return 0
