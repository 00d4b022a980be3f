"""Lesson 01's puzzle: the lines of a first update, in an order that fits."""

import re

import torch

from ....measure.tracker import MemoryTracker
from ...judge.exercise import Exercise, Unusable
from ...learner.bargains import Bargain
from ..shared.settings import adamw, rows, tiny_llama

TRAINED, EVALUATED, TOKENS = 8, 24, 24  # rows, rows, and tokens of each
LINE = re.compile("(forward|backward|step|zero_grad|evaluate) ?([0-9]*)")
UPDATE = re.compile("((forward )+backward )+step zero_grad")


def in_order(lines):
    """The first update of a small Llama and an evaluation, line by line: its tracker, and its
    passes through the model.
    """
    pairs = [(name, int(number or 0)) for name, number in LINE.findall(str(lines))]
    update = [pair for pair in pairs if pair[0] != "evaluate"]
    trained = sum(number for _, number in update)
    evaluated = sum(number for _, number in pairs) - trained
    names = " ".join(name for name, _ in update)
    if not UPDATE.fullmatch(names) or (trained, evaluated) != (TRAINED, EVALUATED):
        raise Unusable(
            f"{TRAINED} rows go forward, a backward follows, then come step and zero_grad; "
            f"{EVALUATED} rows are evaluated, at any place"
        )
    return tracked(pairs), len(pairs) - 2  # all but step and zero_grad


def tracked(pairs) -> MemoryTracker:
    model = tiny_llama(2, 256)
    optimizer = adamw(model)
    ids = rows(*EVALUATED * [TOKENS], vocab=256)
    waiting = []  # losses that have no backward yet
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for name, number in pairs:
            if name in ("step", "zero_grad"):
                getattr(optimizer, name)()
            elif name == "backward":
                sum(waiting).backward()
                waiting.clear()
            else:
                with torch.set_grad_enabled(name == "forward"):
                    loss = model(input_ids=ids[:number], labels=ids[:number]).loss
                if name == "forward":
                    waiting.append(loss * number / TRAINED)
    return tracker


LINES = Bargain(
    "evaluate 24, forward 5, backward, forward 3, backward, step, zero_grad",
    in_order,
    "2.4 MB",
    6,
    "passes",
)

IN_ORDER = Exercise(
    "1.10",
    LINES.best,
    LINES.cases,
    """
    "evaluate 24, forward 8, backward, step, zero_grad"
        all 8 rows at once are too many: the peak is at the loss, where everything grows with them.
    "forward 5, backward, forward 3, backward, step, zero_grad, evaluate 24"
        the evaluation comes last, where the optimizer's states are alive. They are not there yet
        before the step.
    "forward 5, backward, forward 3, backward, evaluate 24, step, zero_grad"
        the evaluation comes while all gradients are alive. They are not there yet
        before the first backward.
    "evaluate 24, forward 4, backward, forward 4, backward, step, zero_grad"
        the second forward is as large as the first, and runs beside the gradients of the first: let
        the first one have more rows.
    "evaluate 24, " + 4 * "forward 2, backward, " + "step, zero_grad"
        it fits, but takes nine passes: larger pieces need fewer.
    """,
    afterwards=LINES.compared,
)
