"""Lesson 09's exercise about a loss whose logits never exist as a whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ....names import IGNORED
from ...judge.compare import difference
from ...judge.exercise import Exercise, HiddenCase, Mistake, measure
from ..lesson_08.exercises import PRODUCTS, Operations

LOSS_CARD = 8_000_000  # bytes; the logits alone are 12,000,000
CHUNK = 64


class ChunkedLoss(torch.autograd.Function):
    """``apply(hidden, weight, labels, cap)``: the mean cross-entropy of ``cap * tanh(hidden @
    weight.T / cap)``, in chunks.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, cap):
        return _forward()(ctx, hidden, weight, labels, cap)

    @staticmethod
    def backward(ctx, d_loss):
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * d_loss, d_weight * d_loss, None, None


def _forward(*, chunk=CHUNK, slope=True, capped=True, everyone=False, of_means=False):
    def forward(ctx, hidden, weight, labels, cap):
        count = len(labels) if everyone else (labels != IGNORED).sum()
        total, d_hidden, d_weight = (
            hidden.new_zeros(()),
            torch.empty_like(hidden),
            torch.zeros_like(weight),
        )
        for start in range(0, len(hidden), chunk):
            rows, target = hidden[start : start + chunk], labels[start : start + chunk]
            counted = (target != IGNORED)[:, None]
            share = 1 / count if not of_means else chunk / len(hidden) / counted.sum()
            bent = torch.tanh(rows @ weight.T / cap)
            log_p = (cap * bent if capped else rows @ weight.T).log_softmax(1)
            target = target.clamp(min=0)[:, None]
            total -= (log_p.gather(1, target) * counted).sum() * share
            d_logits = log_p.exp_().scatter_add_(1, target, -torch.ones_like(rows[:, :1]))
            d_logits.mul_(counted * share)
            if slope and capped:
                d_logits.mul_(1 - bent.square_())
            d_hidden[start : start + chunk] = d_logits @ weight
            d_weight.addmm_(d_logits.T, rows)
            del bent, log_p, d_logits
        ctx.save_for_backward(d_hidden, d_weight)
        return total

    return forward


def _but(backward=ChunkedLoss.backward, **wrong):
    members = {"forward": staticmethod(_forward(**wrong)), "backward": staticmethod(backward)}
    return type(torch.autograd.Function)("ChunkedLoss", (torch.autograd.Function,), members)


def _batch(tokens: int, width: int, vocab: int, dtype: torch.dtype, seed: int):
    """Hidden states, output matrix and labels, of which some, and all of the second 50,
    are -100.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator, dtype=dtype)
    weight = torch.randn(vocab, width, generator=generator, dtype=dtype) / width**0.5
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    hidden[: tokens // 3] *= 2  # the first third has a larger loss
    labels[torch.arange(tokens) % 7 == seed] = IGNORED
    labels[tokens // 2 : tokens // 2 + tokens // 10] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def _loss(candidate, batch, cap, times, other=None) -> dict:
    """``other``: a batch whose forward runs between this one's forward and backward."""
    hidden, weight, labels = batch
    loss = candidate.apply(hidden, weight, labels, cap)
    if other is not None:
        candidate.apply(*other, cap)
    with Operations() as ran:
        (times * loss).backward()
    products = sum(op in PRODUCTS for op in ran.ops)
    return {
        "matrix products in backward": products,
        "loss": loss.detach(),
        "hidden.grad": hidden.grad,
        "weight.grad": weight.grad,
    }


def _two_losses(candidate) -> dict:
    """The gradients of a loss whose backward runs after the forward of another one, and how many of
    the arguments have changed meanwhile.
    """
    sizes = (150, 6, 20, torch.float64)
    batch, other = _batch(*sizes, 3), _batch(*sizes, 4)
    before = [t.detach().clone() for t in batch]
    found = _loss(candidate, batch, 2.0, 1.0, other)
    changed = [not torch.equal(t, was) for t, was in zip(batch, before, strict=True)]
    return {
        "arguments that have changed": sum(changed),
        "hidden.grad": found["hidden.grad"],
        "weight.grad": found["weight.grad"],
    }


_TWO = "a loss whose backward runs after another loss's forward"


# Of each case: the sizes of its batch, the cap, and by what its loss is multiplied.
_CASES = {
    "150 tokens, cap 2": ((150, 6, 20, torch.float64, 3), 2.0, 1.0),
    "three times the loss, cap 0.7": ((201, 5, 30, torch.float64, 1), 0.7, 3.0),
    HiddenCase("cap 30"): ((64, 4, 9, torch.float64, 2), 30.0, 0.5),
}


def _observe(candidate):
    found = {}
    for name, (sizes, cap, times) in _CASES.items():
        found[name] = _loss(candidate, _batch(*sizes), cap, times)
    found[_TWO] = _two_losses(candidate)
    large = _batch(1000, 32, 3000, torch.float32, 5)
    run = measure(lambda: _loss(candidate, large, 5.0, 1.0), budget=LOSS_CARD)
    # The norms alone: what is kept of a run is compared for every mistake.
    found["1,000 tokens"] = {
        name: t.norm().item() for name, t in run.value.items() if isinstance(t, torch.Tensor)
    }
    found["the card"] = type(run)(None, run.peak, run.budget)
    return found


_WHOLE = (
    "too many logits exist at once: take fewer rows of hidden at a time, and free their "
    "logits before the next rows."
)
_MEANS = (
    "every chunk has the same weight (a mean of means): divide each sum by the number of "
    "labels in all chunks, not in its own."
)


def _explain(got, expected):
    name = next(iter(expected))
    mine, right = got[name], expected[name]
    for part in ("hidden.grad", "weight.grad"):
        if mine[part] is None:
            return (
                f"{part} is None: backward returns the gradients of hidden and weight, then "
                "None for labels and cap. If forward takes them by autograd, it must also cut and "
                "multiply inside torch.enable_grad(): a piece that is cut outside has no graph."
            )
    says = _why_loss(mine["loss"], right["loss"])
    if says:
        return says
    if got["the card"].over and difference(mine, right) is None:
        return _WHOLE
    if mine["matrix products in backward"]:
        return (
            "backward computes again: forward makes both gradients, and backward multiplies "
            "them by a number."
        )
    return _why_scaled(got, expected) or _why_gradients(mine, right) or _why_later(got, expected)


def _why_scaled(got, expected) -> str | None:
    """What is said if the gradients of the first two cases are multiplied or divided by the cap, or
    multiplied by the number of labels that count.
    """
    names = list(expected)[:2]
    caps = [_CASES[name][1] for name in names]
    slope = (
        "the derivative of cap * tanh(z / cap) is 1 - tanh(z / cap)**2, since the 1 / cap inside "
        "cancels the cap outside."
    )
    if _are_times(got, expected, dict(zip(names, caps, strict=True))):
        return f"both gradients are multiplied by cap: {slope}"
    if _are_times(got, expected, {name: 1 / _CASES[name][1] for name in names}):
        return f"both gradients are divided by cap: {slope}"
    counts = []
    for name in names:
        labels = _batch(*_CASES[name][0])[2]
        counts.append(int((labels != IGNORED).sum()))
    if _are_times(got, expected, dict(zip(names, counts, strict=True))):
        return (
            "the loss is a mean, but both gradients are those of the sum over the tokens: divide "
            "them too by the number of labels that are not -100."
        )
    return None


def _are_times(got, expected, factors: dict) -> bool:
    """Is each case's loss right, and are both its gradients multiplied by the case's factor?"""
    for name, factor in factors.items():
        if difference(got[name]["loss"], expected[name]["loss"]):
            return False
        for part in ("hidden.grad", "weight.grad"):
            if difference(got[name][part], factor * expected[name][part]):
                return False
    return True


def _why_later(got, expected) -> str | None:
    """What is said where the first case is right: of the number that backward gets, of what is
    kept between two losses, of changed arguments.
    """
    name = list(expected)[1]  # three times the loss
    mine, right = got[name]["hidden.grad"], expected[name]["hidden.grad"]
    if _lacks_the_last(mine, right):
        return _LAST_ROWS
    if difference(got[name]["loss"], expected[name]["loss"]) is None:
        for times in (1 / 9, 3):
            if difference(mine, times * right) is None:
                return _ONCE
    if got[_TWO]["arguments that have changed"]:
        return (
            "hidden, weight or labels have changed: do not change an argument in place, work on a "
            "copy."
        )
    if difference(got[name], expected[name]) is None and difference(got[_TWO], expected[_TWO]):
        return (
            "the gradients are those of the last forward, whichever loss runs its backward: keep "
            "them in ctx, which each loss has of its own."
        )
    return None


_ONCE = "backward multiplies both gradients by the number that it is given, once."


def _why_loss(loss, right) -> str | None:
    hidden, weight, labels = _batch(150, 6, 20, torch.float64, 3)
    count = (labels != IGNORED).sum()
    if abs((loss / right).item() / int(count) - 1) < 1e-6:
        return (
            "this is the sum over the tokens: divide it, and the gradients, by the number of "
            "labels that are not -100."
        )
    with torch.no_grad():
        z = hidden @ weight.T
        logits = 2 * torch.tanh(z / 2)
        bent = (
            *(z.clamp(-2, 2), 2 * z.tanh(), 30 * torch.tanh(z / 30)),
            *(torch.tanh(z / 2), torch.tanh(z / 2) / 2, 2 * torch.tanh(2 * z)),
        )
        others = [F.cross_entropy(other, labels) for other in bent]
        every = F.cross_entropy(logits, labels.clamp(min=0), reduction="sum") / count
    if any(difference(loss, other) is None for other in others):
        return "the logits are wrong: use cap * tanh(z / cap), with the given cap."
    if difference(loss, every) is None:
        return (
            "labels of -100 count here as label 0: ignore them, in the loss and in both gradients."
        )
    divisor = (right / loss).item() * int(count)
    if abs(divisor - round(divisor)) < 1e-6 * divisor and round(divisor) != int(count):
        return (
            f"the sum over the tokens is divided by {round(divisor)}, and not by the number of "
            f"labels that are not -100, which is {int(count)} here."
        )
    return None


_LAST_ROWS = "the last rows are left out: the last chunk may be shorter than the others."


def _lacks_the_last(gradient, wanted) -> bool:
    """Do some rows of hidden have a gradient here, and the last one has none, but should?"""
    if gradient is None:
        return False
    return bool(gradient.any() and wanted[-1].any() and not gradient[-1].any())


def _why_gradients(mine, right) -> str | None:
    hidden, wanted = mine["hidden.grad"], right["hidden.grad"]
    if difference(hidden, -wanted) is None:
        return "both gradients have the wrong sign: they are those of the loss."
    if difference(hidden, wanted + 1) is None:
        return _ONCE
    if _lacks_the_last(hidden, wanted):
        return _LAST_ROWS
    if difference(hidden, 2 * wanted) is None:
        return (
            "the gradients are added twice, by backward and by the chunks: detach() hidden and "
            "weight in forward."
        )
    alike = [part for part in mine if difference(mine[part], right[part]) is None]
    if {"loss", "hidden.grad"} <= set(alike) and "weight.grad" not in alike:
        return "weight.grad is not the sum over all chunks: every chunk adds its own."
    there = wanted.abs().amax(1) > 0
    shares = (hidden * wanted).sum(1)[there] / wanted.square().sum(1)[there]
    parallel = torch.allclose(hidden[there], shares[:, None] * wanted[there])
    return _MEANS if parallel and shares.max() > 1.01 * shares.min() > 0 else None


EXERCISES = (
    Exercise(
        id="9.7",
        title="a loss in chunks",
        difficulty=3,
        minutes=5,
        trains="a gradient made on the way forward, so that the logits need not come back",
        reference=ChunkedLoss,
        observe=_observe,
        explain=_explain,
        tolerance=1e-4,
        raises=(
            (
                r"Tensor' and 'NoneType'|NoneType' and 'Tensor'",
                (
                    "a gradient that forward took by autograd is None: cut and multiply inside "
                    "torch.enable_grad(), since a piece that is cut outside has no graph."
                ),
            ),
            (
                r"returned an invalid gradient",
                (
                    "backward returns the gradients in the order of forward's arguments: that of "
                    "hidden, that of weight, None, None."
                ),
            ),
            (
                r"incorrect number of gradients",
                (
                    "backward returns one thing for each argument of forward: two gradients, and "
                    "None for labels and cap."
                ),
            ),
        ),
        mistakes=(
            Mistake("whole", _but(chunk=1000), _WHOLE),
            Mistake(
                "cap not derived",
                _but(slope=False),
                (
                    "the loss is right, but its gradient leaves out the cap: the derivative of "
                    "cap * tanh(z / cap) is 1 - tanh(z / cap)**2."
                ),
            ),
            Mistake(
                "no cap",
                _but(capped=False),
                "the cap has no effect: the logits are cap * tanh(hidden @ weight.T / cap).",
            ),
            Mistake(
                "upstream",
                _but(lambda ctx, d_loss: (*ctx.saved_tensors, None, None)),
                (
                    "backward leaves out the gradient that it is given: multiply by it, or "
                    "scaling the loss afterwards has no effect on the gradients."
                ),
            ),
            Mistake(
                "all rows",
                _but(everyone=True),
                "this divides by all rows: labels of -100 are ignored, so do not count them.",
            ),
            Mistake("mean of means", _but(of_means=True), _MEANS),
        ),
    ),
)
