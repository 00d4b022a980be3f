"""Lesson 03's exercise about layers that draw random numbers: a fair test of an accumulation."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ....techniques.accumulation import accumulate_gradients, split
from ...judge.compare import difference
from ...judge.exercise import Exercise, Mistake, Seen
from ..shared.residual_net import labelled_rows, residual_net
from ..shared.settings import gradients_of

ROWS, PIECE = 12, 3


def fair_error(model, batch, accumulate) -> float:
    """The relative error of the gradient of ``batch`` in pieces of 3 rows, with all layers in
    evaluation mode.

    Afterwards each module is in the mode in which it was, and no gradient is left.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    gradients = []
    for pieces in ([batch], list(split(batch, PIECE))):
        model.zero_grad()
        accumulate(pieces)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    model.zero_grad()
    for module, mode in modes.items():
        module.training = mode
    once, cut = gradients
    return ((cut - once).norm() / once.norm()).item()


def _answer(
    model, batch, accumulate, *, evaluate=True, back=True, size=PIECE, zero=True, end=True, ratio=0
):
    """A wrong ``fair_error``: what it does otherwise."""
    modes = {module: module.training for module in model.modules()}
    if evaluate:
        model.eval()
    gradients = []
    for pieces in ([batch], list(split(batch, size))):
        if zero or not gradients:
            model.zero_grad()
        accumulate(pieces)
        gradients.append(gradients_of(model))
    if end:
        model.zero_grad()
    if back == "all":
        model.train()
    elif back:
        for module, mode in modes.items():
            module.training = mode
    once, cut = gradients
    off = (cut - once).norm().item()
    lengths = (cut.norm() / once.norm() - 1).abs().item()
    relative = off / once.norm().item()
    each = _mean_of_errors(model, once, cut)
    return [relative, off, lengths, off / cut.norm().item(), relative**2, each][ratio]


def _mean_of_errors(model, once, cut) -> float:
    """The mean of each parameter's own relative error."""
    sizes = [p.numel() for p in model.parameters()]
    pairs = zip(once.split(sizes), cut.split(sizes), strict=True)
    errors = [((mine - whole).norm() / whole.norm()).item() for whole, mine in pairs]
    return sum(errors) / len(errors)


def _setting(rows: int = ROWS, *, before: bool = False):
    """``before``: with a gradient of something before, no part of the comparison."""
    model = residual_net(dtype=torch.float64)
    model.blocks[0].eval()  # it was so before, and stays so
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.01) if before else None
    return model, labelled_rows(rows, dtype=torch.float64)


def _ways(model, rows: int = ROWS):
    """Ways to accumulate, by name: two that are right, and two that are not."""

    def summed(micro):
        outputs = model(micro["x"])
        return F.cross_entropy(outputs, micro["labels"], reduction="sum"), len(outputs)

    def whole_windows(pieces):
        accumulate_gradients(pieces, summed)

    def first_piece_counts_double(pieces):
        for i, piece in enumerate(pieces):
            loss, _ = summed(piece)
            weight = 2 if i == 0 and len(pieces) > 1 else 1
            (weight * loss / rows).backward()

    def compares_rows(pieces):
        for piece in pieces:
            outputs = model(piece["x"])
            spread = (outputs - outputs.mean(dim=0)).square().sum()
            (spread / rows).backward()

    def loss_by_k(pieces):
        for piece in pieces:
            loss, count = summed(piece)
            (loss / count / len(pieces)).backward()

    return {
        "a loop that divides once": whole_windows,
        "equal pieces and loss / K": loss_by_k,
        "a loop that counts the first piece double": first_piece_counts_double,
        "a loss that compares the rows of a piece": compares_rows,
    }


def _observe(candidate):
    cases = {name: (name, ROWS) for name in _ways(nn.Module())}
    cases[_MORE] = ("a loss that compares the rows of a piece", 17)
    found, pieces = {}, {}
    for case, (name, rows) in cases.items():
        model, batch = _setting(rows, before=case == _MORE)
        way, draws = _ways(model, rows)[name], []

        def accumulate(given, case=case, model=model, way=way, draws=draws):
            given = list(given)
            pieces[case] = [len(piece["labels"]) for piece in given]
            draws.append(any(module.training for module in model.modules()))
            way(given)

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            error = candidate(model, batch, accumulate)
        found[case] = {
            "error": round(float(error), 6),
            "modules in training mode": sum(module.training for module in model.modules()),
            "gradients that are left": sum(
                p.grad is not None and bool(p.grad.any()) for p in model.parameters()
            ),
        }
    return Seen(found, pieces=pieces, draws=any(draws))


_MORE = "17 rows, a loss that compares the rows of a piece"
_DRAWS = (
    "dropout and drop path draw other numbers in each forward, so even a right loop is off: switch "
    "these layers off for the comparison, by model.eval()."
)
_MODES = (
    "the model is not as it was: note `training` of each module before model.eval(), and set it "
    "again, since a block that was in evaluation mode has to stay there."
)


def _explain(got, expected):
    right = "a loop that divides once"
    if got[right]["error"] > 0.05 and got.notes["draws"]:
        return _DRAWS
    for case, rows in ((right, ROWS), (_MORE, 17)):
        pieces, all_of_them = got.notes["pieces"][case], expected.notes["pieces"][case]
        if sorted(pieces) not in (sorted(all_of_them), [rows]):
            return (
                f"of {rows} rows the pieces have {pieces} rows, but should have {all_of_them}: "
                "split(batch, 3) cuts them, the last one too."
            )
    if all(seen["error"] == 0 for seen in got.values()):
        return (
            "the error is 0 for every loop, also for those whose gradients differ: compare the "
            "gradient of [batch] with that of the pieces, and keep each in a tensor of its own."
        )
    if any(seen["gradients that are left"] for seen in got.values()):
        return "gradients are left behind: zero them when both are compared."
    if all(difference(got[case], expected[case]) is None for case in expected if case != _MORE):
        return (
            "the model had a gradient before, and it is in the first measurement: call zero_grad "
            "before both."
        )
    return None


EXERCISES = (
    Exercise(
        id="3.9",
        title="a fair test of your loop",
        difficulty=2,
        minutes=6,
        trains="comparing gradients where layers draw random numbers",
        reference=fair_error,
        observe=_observe,
        explain=_explain,
        changes=("model.mode",),
        mistakes=(
            Mistake("in training mode", partial(_answer, evaluate=False), _DRAWS),
            Mistake("left in evaluation mode", partial(_answer, back=False), _MODES),
            Mistake("all in training mode afterwards", partial(_answer, back="all"), _MODES),
            Mistake(
                "not zeroed between the two",
                partial(_answer, zero=False),
                (
                    "the second gradient is added to the first one: call zero_grad between the two "
                    "measurements."
                ),
            ),
            Mistake(
                "an absolute difference",
                partial(_answer, ratio=1),
                (
                    "this is the length of the difference: divide it by the length of the full "
                    "batch's gradient."
                ),
            ),
            Mistake(
                "lengths compared",
                partial(_answer, ratio=2),
                (
                    "this compares the lengths of the two gradients: two of the same length may "
                    "point elsewhere, so take the length of their difference."
                ),
            ),
            Mistake(
                "divided by the gradient in pieces",
                partial(_answer, ratio=3),
                (
                    "this divides by the length of the gradient in pieces: divide by that of the "
                    "full batch's."
                ),
            ),
            Mistake(
                "not rooted",
                partial(_answer, ratio=4),
                (
                    "this is the square of the error: a length is the root of the sum of the "
                    "squares."
                ),
            ),
            Mistake(
                "each parameter by itself",
                partial(_answer, ratio=5),
                (
                    "this is a mean of the parameters' own errors, where a small one counts as "
                    "much as a large one: take all gradients as one vector."
                ),
            ),
            Mistake(
                "not cut",
                partial(_answer, size=ROWS),
                "the batch is not cut: the second gradient must be that of pieces of 3 rows.",
            ),
        ),
    ),
)
