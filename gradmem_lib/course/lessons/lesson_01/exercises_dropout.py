"""Lesson 01's exercise about dropout: what an MLP in plain PyTorch saves, in training and in
evaluation mode.
"""

from __future__ import annotations

import torch
from torch import nn

from ...judge.exercise import Exercise, Mistake, calls
from ...judge.hints import shares
from .exercises import saved_bytes

FLOAT32 = 4  # bytes


def mlp_bytes(tokens: int, hidden: int, training: bool) -> int:
    """Bytes of the storages that the MLP of exercise 1.8 saves for backward, by asking a real one.

    Its sizes are ``hidden`` outside and four times that inside, in float32 on the CPU.
    """
    mlp = nn.Sequential(
        nn.Linear(hidden, 4 * hidden),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(4 * hidden, hidden),
        nn.Dropout(0.1),
    )
    x = torch.randn(tokens, hidden, requires_grad=True)
    with torch.random.fork_rng(devices=[]):
        return saved_bytes(mlp.train(training), x)


# What is saved, in multiples of tokens * hidden: the input of the first Linear, ReLU's result, the
# two masks, and the first dropout's result, which is the second Linear's input.
IN_TRAINING = 1 + 4 + 4 + 4 + 1
IN_EVALUATION = 1 + 4  # ReLU's result is the second Linear's input


def _counts(training, evaluation, size=FLOAT32):
    """A wrong ``mlp_bytes``: multiples of tokens * hidden in either mode."""

    def answer(tokens, hidden, in_training):
        multiple = training if in_training else evaluation
        return int(multiple * tokens * hidden * size)

    return answer


def _explain(got, expected):
    by_mode: dict[bool, dict] = {True: {}, False: {}}
    numbers: dict[bool, dict] = {True: {}, False: {}}
    for case in expected:
        tokens, hidden, training = (part.strip() for part in case.strip("()").split(","))
        by_mode[training == "True"][case] = got[case]
        numbers[training == "True"][case] = FLOAT32 * int(tokens) * int(hidden)
    for training, right in ((False, IN_EVALUATION), (True, IN_TRAINING)):
        found = shares(by_mode[training], numbers[training])
        if found is None:
            return (
                "the bytes are not a multiple of 4 * tokens * hidden: all that is saved has "
                "float32 numbers, `hidden` or 4 * `hidden` a token."
            )
        if found[0] != right:
            mode = "training" if training else "evaluation"
            if found[0] == 0:
                return (
                    f"in {mode} mode this counts nothing: the two Linear layers and ReLU save what "
                    "their backward needs in both modes."
                )
            return (
                f"in {mode} mode this counts {found[0]:g} * hidden numbers a token: ask each "
                "module what its backward needs, and count a storage once."
            )
    return None


EXERCISES = (
    Exercise(
        id="1.8",
        title="what dropout keeps",
        difficulty=2,
        minutes=5,
        trains="counting masks and results, and the mode that a model is in",
        reference=mlp_bytes,
        observe=calls(
            (8, 16, True),
            (8, 16, False),
            (12, 10, True),
            hidden=((12, 10, False), (33, 6, True), (5, 24, False), (1, 40, True)),
        ),
        explain=_explain,
        mistakes=(
            Mistake(
                "no masks",
                _counts(IN_EVALUATION, IN_EVALUATION),
                (
                    "`training` has no effect: in training mode each dropout keeps its mask, and "
                    "the first one makes a new tensor, which the second Linear keeps."
                ),
            ),
            Mistake(
                "masks in evaluation too",
                _counts(IN_TRAINING, IN_TRAINING),
                (
                    "`training` has no effect: in evaluation mode dropout hands its input on, and "
                    "keeps nothing."
                ),
            ),
            Mistake(
                "a byte of mask",
                _counts(1 + 4 + 1 + 4 + 0.25, IN_EVALUATION),
                (
                    "this counts one byte for each number of a mask, as on CUDA: on the CPU the "
                    "mask is float32."
                ),
            ),
            Mistake(
                "the dropped result left out",
                _counts(1 + 4 + 4 + 1, IN_EVALUATION),
                (
                    "in training mode the second Linear's input is missing: dropout makes a new "
                    "tensor of ReLU's result, and both are kept."
                ),
            ),
            Mistake(
                "the last mask left out",
                _counts(1 + 4 + 4 + 4, IN_EVALUATION),
                "the second dropout's mask is missing: it has `hidden` numbers a token.",
            ),
            Mistake(
                "ReLU keeps both",
                _counts(IN_TRAINING + 4, IN_EVALUATION + 4),
                "ReLU's input is counted too: its backward needs its result alone.",
            ),
            Mistake(
                "elements",
                _counts(IN_TRAINING, IN_EVALUATION, size=1),
                "this counts numbers: each is a float32 of 4 bytes.",
            ),
        ),
    ),
)
