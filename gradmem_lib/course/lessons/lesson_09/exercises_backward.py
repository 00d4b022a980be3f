"""Lesson 09's exercise about steps in backward whose gradient is clipped by its whole norm."""

from __future__ import annotations

import math

import torch
from torch import nn

from ...judge.compare import difference, plain
from ...judge.exercise import Exercise, HiddenCase, Mistake, Seen, measure
from ..shared.settings import flat

CLIP_CARD = 3_200_000  # bytes: eight matrices of 262,144, and a few at a time beside them
LAYERS, WIDTH = 8, 256
ALL_GRADIENTS = 3_900_000  # bytes: the weights, and at once most of their gradients


def clip_in_backward(model, loss_of, lr, max_norm) -> float:
    """One step of gradient descent by the gradient, clipped to ``max_norm``, that never exists as a
    whole; its norm.
    """
    return _two_passes()(model, loss_of, lr, max_norm)


def _in_backward(model, loss_of, hook, unhook=True) -> None:
    """A backward in which ``hook(p)`` gets every gradient of a trained parameter when it is
    complete.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    handles = [p.register_post_accumulate_grad_hook(hook) for p in trained]
    loss_of(model).backward()
    for handle in handles if unhook else ():
        handle.remove()


def _two_passes(*, free=True, unhook=True, factor_of=lambda norm, most: min(1.0, most / norm)):
    def clip(model, loss_of, lr, max_norm):
        squares = []

        def look(p):
            squares.append(p.grad.square().sum().item())
            if free:
                p.grad = None

        _in_backward(model, loss_of, look)
        norm = math.sqrt(sum(squares))
        factor = factor_of(norm + 1e-6, max_norm)

        @torch.no_grad()
        def move(p):
            p.add_(p.grad, alpha=-lr * factor)
            p.grad = None

        _in_backward(model, loss_of, move, unhook)
        return norm

    return clip


def _one_pass(so_far):
    def wrong(model, loss_of, lr, max_norm):
        squares = []

        @torch.no_grad()
        def move(p):
            squares.append(p.grad.square().sum().item())
            norm = math.sqrt(sum(squares) if so_far else squares[-1])
            p.add_(p.grad, alpha=-lr * min(1.0, max_norm / (norm + 1e-6)))
            p.grad = None

        _in_backward(model, loss_of, move)
        return math.sqrt(sum(squares))

    return wrong


def _waiting(model, loss_of, lr, max_norm):
    loss_of(model).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    norm = nn.utils.clip_grad_norm_(trained, max_norm)
    with torch.no_grad():
        for p in trained:
            p.add_(p.grad, alpha=-lr)
            p.grad = None
    return norm.item()


def clip_setting(seed: int = 4, second_divided_by: float = 1.0) -> tuple[nn.Module, torch.Tensor]:
    """Eight linear layers of which the last is the first once more and the third is frozen, and
    rows (16, 256). The smaller the second layer's weights, the more of the norm is its gradient's.
    """
    generator = torch.Generator().manual_seed(seed)
    layers = [nn.Linear(WIDTH, WIDTH, bias=i == 5) for i in range(LAYERS)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.randn(WIDTH, WIDTH, generator=generator) / 12)
            if layer.bias is not None:
                layer.bias.zero_()
        layers[1].weight.div_(second_divided_by)
    layers[2].requires_grad_(False)
    return nn.Sequential(*layers, layers[0]), torch.randn(16, WIDTH, generator=generator)


def _observe(candidate):
    found: dict = {}
    for name, lr, share, seed, divided_by in (
        ("a norm above max_norm", 0.01, 0.1, 4, 1),
        ("below", 0.003, 10.0, 4, 1),
        (HiddenCase("other weights"), 0.02, 0.5, 5, 1),
        # Errors of a sum in bf16 do not cancel here, where one gradient is nearly all of the norm.
        (_ONE_LARGEST, 0.01, 0.1, 12, 30),
    ):
        with torch.random.fork_rng(devices=[]):
            model, x = clip_setting(seed, divided_by)

        def loss_of(model, x=x):
            return model(x).square().mean()

        trained = [p for p in model.parameters() if p.requires_grad]
        before = flat(model.parameters())
        squares = sum(g.square().sum().item() for g in torch.autograd.grad(loss_of(model), trained))
        max_norm = share * math.sqrt(squares)
        waiting: list[int] = []
        watches = [
            p.register_hook(lambda g, t=trained, w=waiting: w.append(_with_gradient(t)))
            for p in trained
        ]
        run = measure(
            lambda m=model, f=loss_of, lr=lr, most=max_norm: candidate(m, f, lr, most),
            budget=CLIP_CARD,
            model=model,
        )
        for watch in watches:
            watch.remove()
        found[name] = {
            "norm": plain(run.value),
            "change of the weights, in learning rates": (flat(model.parameters()) - before)[
                :: WIDTH + 3
            ]
            / lr,
        }
        if name == "a norm above max_norm":
            found["the card"] = type(run)(None, run.peak, run.budget)
            # One call for each trained weight in the first backward, and then those of others.
            in_first = max(waiting[: len(trained)], default=0)
            in_later = max(waiting[len(trained) :], default=0)
            # The hook of the last gradient sees all others. An answer within the budget may do so.
            all_wait = in_first >= len(trained) - 1 and run.over > 0
        left = sum(p.grad is not None for p in trained)
        now = flat(model.parameters())
        loss_of(model).backward()
        found[f"{name}, afterwards"] = {
            "gradients left in .grad": left,
            "a later backward moves weights (1 is yes)": int(
                not torch.equal(now, flat(model.parameters()))
            ),
        }
    found["all gradients wait in the first backward (1 is yes)"] = int(all_wait)
    return Seen(found, in_first=in_first, in_later=in_later)


def _with_gradient(parameters) -> int:
    return sum(p.grad is not None for p in parameters)


_ONE_LARGEST = HiddenCase("one gradient is nearly all of the norm")
_ROUNDED = (
    "the norm is right to two digits only: a sum of squares in bf16 or float16 is rounded, so add "
    "them up in float32, or as Python's numbers."
)
_WIDE = (
    "no gradient waits, and still too much is there at once: for the square, the second pass or a "
    "copy, make no more than one tensor as large as a gradient, and in its own dtype."
)
_MADE_LARGER = "a gradient whose norm is below max_norm is made larger: the factor is at most 1."
_UNMOVED = "no weight has moved: `p = ...` names a new tensor; change p in place, as p.add_ does."
_WAITS = (
    "every gradient waits until the norm is known: measure the norm in one backward that "
    "frees each gradient at once, and step in a second backward."
)

_WAITS_LATER = (
    "in the second backward, gradients wait for each other: give it hooks too, each of which steps "
    "and sets p.grad = None."
)


def _explain(got, expected):
    above, right = got["a norm above max_norm"], expected["a norm above max_norm"]
    if above["norm"] is None:
        return "return the norm of the whole gradient, before it was clipped."
    says = _why_norm(above["norm"], right["norm"])
    if says:
        return says
    if not above["change of the weights, in learning rates"].any():
        return _UNMOVED
    afterwards = got["a norm above max_norm, afterwards"]
    return _why_moves(got, expected) or _why_left(afterwards) or _why_rounded(got, expected)


def _why_rounded(got, expected) -> str | None:
    """What is said of a norm that is right to two digits where one gradient is most of it."""
    norm, whole = got[_ONE_LARGEST]["norm"], expected[_ONE_LARGEST]["norm"]
    if difference(norm, whole, 1e-4) and not difference(norm, whole, 1e-2):
        return _ROUNDED
    return None


def _why_left(after) -> str | None:
    """What is said of gradients and hooks that are left, where the weights move as they should."""
    if after["gradients left in .grad"]:
        return "a gradient is left in .grad: the second pass frees each one too, p.grad = None."
    return _why_hooked(after)


def _why_hooked(after) -> str | None:
    if after["a later backward moves weights (1 is yes)"]:
        return "a hook is still on a parameter, so a later backward steps too: remove each handle."
    return None


def _why_norm(norm, whole) -> str | None:
    if difference(norm, whole**2, 1e-3) is None:
        return "this is the sum of the squares, and not the norm: the root is missing."
    if abs(norm / whole - math.sqrt(2)) < 1e-3:
        return "the squares of both passes are in the norm: measure only in the first pass."
    if abs(norm / whole - 0.1) < 1e-3:
        return "this is the norm after clipping: return the norm before it."
    if difference(norm, whole, 1e-4) and not difference(norm, whole, 1e-2):
        return _ROUNDED
    if difference(norm, whole, 1e-3):
        return (
            "the norm is that of all gradients as one vector: add up the squares of all "
            "numbers, then take the root."
        )
    return None


def _why_moves(got, expected) -> str | None:
    """What is said of how the weights move, where the norm is right."""
    change = "change of the weights, in learning rates"
    moves, wanted = (seen["a norm above max_norm"][change] for seen in (got, expected))
    below, unclipped = (seen["below"][change] for seen in (got, expected))
    over = got["the card"].over
    along = (moves @ wanted / wanted.square().sum()).item()
    if abs(along + 1) < 1e-3:
        return "the step has the wrong sign: it increases the loss."
    if abs(along - 10) < 1e-2 and difference(below, unclipped, 1e-3) is None:
        return "max_norm has no effect: the step uses the unclipped gradient."
    if over and difference(moves, wanted) is None:
        # A wrong gradient or a hook that stays is told first, and the bytes after it.
        afterwards = got["a norm above max_norm, afterwards"]
        return _why_below(below, unclipped) or _why_hooked(afterwards) or _why_over(got)
    if abs(along - 100) < 0.1:
        return "lr has no effect: each parameter moves by lr * factor * gradient."
    if difference(moves, wanted, 1e-3) and not over:
        return _some_or_all(moves, wanted)
    return _why_below(below, unclipped)


def _why_below(below, unclipped) -> str | None:
    """What is said of the weights' moves where the norm is below ``max_norm``."""
    if not below.any():
        return (
            "a gradient whose norm is below max_norm takes no step: it is not clipped, so its "
            "factor is 1."
        )
    if (below @ unclipped / unclipped.square().sum()).item() > 1.01:
        return _MADE_LARGER
    return None


def _some_or_all(moves, wanted) -> str:
    """What is said of wrong weights: some do not move, or all are wrong."""
    if ((moves == 0) & (wanted != 0)).any():
        return (
            "some trained weights do not move: each parameter that requires a gradient gets a "
            "hook, a bias too."
        )
    return (
        "the weights are wrong: the first pass only measures, and the second moves each weight by "
        "lr * factor * gradient."
    )


def _why_over(got) -> str:
    """What is said of too many bytes, where the weights are right."""
    if got["a norm above max_norm, afterwards"]["gradients left in .grad"]:
        return (
            "the second pass leaves its gradients in .grad, where they wait, if only as zeros: "
            "set p.grad = None in its hook too."
        )
    if got.notes["in_first"] > 1:
        return _WAITS
    if got.notes["in_later"] > 1:
        return _WAITS_LATER
    # Or in a list, as torch.autograd.grad returns one.
    elsewhere = got["the card"].peak > ALL_GRADIENTS
    return _WAITS if elsewhere else _WIDE


EXERCISES = (
    Exercise(
        id="9.4",
        title="clipping where no gradient waits",
        difficulty=3,
        minutes=6,
        trains="steps in backward, and what the whole norm costs where gradients are freed",
        reference=clip_in_backward,
        observe=_observe,
        explain=_explain,
        changes=("model.hook",),
        tolerance=1e-4,
        raises=(
            (
                "modified by an inplace",
                (
                    "the second pass needs a forward of its own: call loss_of(model) again, since "
                    "a graph cannot run twice once its weights have moved."
                ),
            ),
            (
                "not NoneType|'NoneType'",
                (
                    "p.grad is None here: a hook of the first pass is still there and frees it, "
                    "or the parameter is frozen."
                ),
            ),
            (
                "cannot register a hook|does not require grad",
                (
                    "a hook was put on a frozen parameter, which gets no gradient: use only "
                    "parameters with requires_grad."
                ),
            ),
        ),
        mistakes=(
            Mistake("waits", _waiting, _WAITS),
            Mistake(
                "each its own",
                _one_pass(False),
                (
                    "each gradient is clipped by its own norm: all gradients must shrink by the "
                    "same factor, that of the whole norm."
                ),
            ),
            Mistake(
                "so far",
                _one_pass(True),
                (
                    "each gradient is clipped by the norm of the gradients so far: the whole norm "
                    "is known when backward has ended, so it needs a separate first pass."
                ),
            ),
            Mistake(
                "hooks stay",
                _two_passes(unhook=False),
                (
                    "the hooks are still on the parameters, so every later backward steps too: "
                    "remove each handle."
                ),
            ),
            Mistake(
                "not freed",
                _two_passes(free=False),
                (
                    "the first pass leaves its gradients in p.grad, where they wait, and the "
                    "second adds to them: set p.grad = None in both hooks."
                ),
            ),
            Mistake(
                "always",
                _two_passes(factor_of=lambda norm, most: most / norm),
                _MADE_LARGER,
            ),
            Mistake(
                "turned round",
                _two_passes(factor_of=lambda norm, most: min(1.0, norm / most)),
                "the factor is turned round: it is max_norm / norm, and at most 1.",
            ),
        ),
    ),
)
