"""Lesson 03's puzzle: rows of unequal length in few micro-batches that fit."""

from ....measure.tracker import MemoryTracker
from ....techniques.losses import next_token_loss
from ...judge.exercise import Exercise
from ...learner.bargains import Bargain, parts_of
from ..shared.settings import text_batch, tiny_llama

LENGTHS = (60, 12, 128, 33, 90, 7, 117, 30, 64, 16)  # tokens of each row


def in_micro_batches(choice):
    """The gradient of all rows, each micro-batch padded to its longest one: its tracker, and the
    number of micro-batches.
    """
    micro_batches = parts_of(choice, LENGTHS)
    model = tiny_llama(1, 1024)
    with MemoryTracker(model, live=False) as tracker:
        for lengths in micro_batches:
            loss, _ = next_token_loss(model, text_batch(*lengths, vocab=1024))
            (loss / (sum(LENGTHS) - len(LENGTHS))).backward()
    return tracker, len(micro_batches)


CUTTING = Bargain(
    [[117, 90], [128], [33, 30, 16, 12], [64, 60, 7]],
    in_micro_batches,
    "5.2 MiB",
    5,
    "micro-batches",
)

IN_MICRO_BATCHES = Exercise(
    "3.11",
    CUTTING.best,
    CUTTING.cases,
    """
    [[60, 12, 128, 33, 90, 7, 117, 30, 64, 16]]
        all rows go through at once, each padded to 128 tokens.
    [[60, 12], [128, 33], [90, 7], [117, 30], [64, 16]]
        rows of unlike lengths share a micro-batch, so most of the shorter one is padding: put rows
        of similar lengths together.
    [[128], [117], [90], [64], [60], [33], [30], [16], [12], [7]]
        it fits, but each row goes alone: short rows fit together.
    [[128], [117, 90], [64, 60, 7], [33, 30, 16, 12]]
        the largest micro-batch comes second, and runs on top of the gradients of the first: put it
        where no gradient is there yet.
    """,
    afterwards=CUTTING.compared,
)
