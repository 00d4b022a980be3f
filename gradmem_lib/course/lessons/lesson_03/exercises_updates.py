"""Lesson 03's exercises about one update: clipping, and a batch that does not fit."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from ....techniques.accumulation import split
from ....techniques.losses import count_targets, next_token_loss
from ...judge.compare import difference, plain
from ...judge.exercise import Exercise, Mistake, Seen, measure
from ...judge.hints import times
from ..shared.gradient_weights import (
    ANOTHER_STEP,
    NO_BACKWARD,
    NO_STEP,
    STEP_FIRST,
    ZEROED,
    Graphs,
    before_each_update,
    count_backwards,
    parts_of,
    weights_of,
    why,
    why_clipped,
)
from ..shared.settings import Bigrams, bigram_loss, flat, gradients_of, with_large_gradients
from .exercises import (
    COUNTS_ITSELF,
    GRAPHS_KEPT,
    accumulate,
    accumulates,
    mean_of_means,
    step_and_zero,
    unequal,
)
from .settings import CARD, batch_setting


def clipped_update(model, optimizer, micro_batches, loss_and_count, max_norm) -> float:
    """One update on a list of micro-batches, its gradient clipped to ``max_norm``; the norm before
    clipping.
    """
    accumulate(micro_batches, loss_and_count)
    norm = clip_grad_norm_(model.parameters(), max_norm)
    step_and_zero(optimizer)
    return norm.item()


def _clips_inside(model, optimizer, micro_batches, loss_and_count, max_norm):
    total = sum(loss_and_count(micro)[1] for micro in micro_batches)
    for micro in micro_batches:
        (loss_and_count(micro)[0] / total).backward()
        norm = clip_grad_norm_(model.parameters(), max_norm)
    step_and_zero(optimizer)
    return norm.item()


def _clips_each(model, optimizer, micro_batches, loss_and_count, max_norm):
    parameters = list(model.parameters())
    kept = [torch.zeros_like(p) for p in parameters]
    total = sum(loss_and_count(micro)[1] for micro in micro_batches)
    for micro in micro_batches:
        (loss_and_count(micro)[0] / total).backward()
        norm = clip_grad_norm_(parameters, max_norm)
        kept = [held + p.grad for held, p in zip(kept, parameters, strict=True)]
        optimizer.zero_grad()
    for held, parameter in zip(kept, parameters, strict=True):
        parameter.grad = held
    step_and_zero(optimizer)
    return norm.item()


def _clips_too_late(model, optimizer, micro_batches, loss_and_count, max_norm):
    accumulate(micro_batches, loss_and_count)
    optimizer.step()
    norm = clip_grad_norm_(model.parameters(), max_norm)
    optimizer.zero_grad()
    return norm.item()


def _clips_by_the_inverse(model, optimizer, micro_batches, loss_and_count, max_norm):
    accumulate(micro_batches, loss_and_count)
    norm = gradients_of(model).norm().item()
    for parameter in model.parameters():
        parameter.grad *= min(1.0, norm / max_norm)
    step_and_zero(optimizer)
    return norm


def _clips_the_sum(model, optimizer, micro_batches, loss_and_count, max_norm):
    total = sum(loss_and_count(micro)[1] for micro in micro_batches)
    for micro in micro_batches:
        loss_and_count(micro)[0].backward()
    norm = clip_grad_norm_(model.parameters(), max_norm)
    for parameter in model.parameters():
        parameter.grad /= total
    step_and_zero(optimizer)
    return norm.item()


def _clips_to_a_share(model, optimizer, micro_batches, loss_and_count, max_norm):
    share = max_norm / len(micro_batches)
    return clipped_update(model, optimizer, micro_batches, loss_and_count, share)


def _clips_values(model, optimizer, micro_batches, loss_and_count, max_norm):
    accumulate(micro_batches, loss_and_count)
    norm = gradients_of(model).norm()
    clip_grad_value_(model.parameters(), max_norm)
    step_and_zero(optimizer)
    return norm.item()


_CLIPPED, _UNCLIPPED = "a norm that is too large", "a norm that is small enough"


def _observe_clip(candidate):
    found = {}
    backwards = {}
    for name, max_norm in ((_CLIPPED, 0.1), (_UNCLIPPED, 100.0)):
        model = Bigrams()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        steps: list[torch.Tensor] = []
        graphs = Graphs(bigram_loss(model))
        # For each backward, how many updates had been made before it.
        order: list[int] = []
        graphs.note = lambda order=order, steps=steps: order.append(len(steps))
        backwards[name] = order
        before_each_update(optimizer, lambda m=model, steps=steps: steps.append(gradients_of(m)))
        norm = candidate(model, optimizer, unequal(), graphs, max_norm)
        found[name] = {
            "weights": flat(model.parameters()),
            "norm": norm,
            "updates": len(steps),
            "gradient at the step": steps[0]
            if steps
            else torch.zeros_like(flat(model.parameters())),
            "graphs that are kept at once": graphs.kept,
        }
        candidate(model, optimizer, unequal(), bigram_loss(model), max_norm)
        found[f"{name}, a second update"] = {"weights": flat(model.parameters())}
    return Seen(found, backwards=backwards)


def _explain_clip(got, expected):
    whole = expected[_UNCLIPPED]["gradient at the step"]
    mine, right = got[_CLIPPED], expected[_CLIPPED]
    if not mine["updates"]:
        return (
            ANOTHER_STEP if difference(mine["weights"], flat(Bigrams().parameters())) else NO_STEP
        )
    if mine["updates"] > 1:
        return f"{mine['updates']} updates are made: the exercise asks for one."
    if not mine["gradient at the step"].norm():
        return _why_nothing(got.notes["backwards"][_CLIPPED])
    says = _why_clipped(mine["gradient at the step"], whole, 0.1)
    size = got[_UNCLIPPED]["gradient at the step"].norm().item()
    if not says and math.isclose(size, 100.0, rel_tol=1e-4):
        return (
            "every gradient is scaled to max_norm, even a small one: clip only where the norm "
            "is larger, and do not change the others."
        )
    says = says or _why_fixed(mine["gradient at the step"], size, whole, 0.1)
    if not says and difference(got[_UNCLIPPED]["gradient at the step"], whole):
        model = Bigrams()
        parts, counts = parts_of(bigram_loss(model), unequal(), list(model.parameters()))
        weights = weights_of(got[_UNCLIPPED]["gradient at the step"], parts)
        says = why(weights, counts) if weights else None
    if says:
        return says
    if difference(mine["norm"], right["norm"]) and not difference(
        mine["weights"], right["weights"]
    ):
        return _why_norm(plain(mine["norm"]), whole)
    if not difference(mine["weights"], right["weights"]) and any(
        seen.get("updates") == 1 for seen in got.values()
    ):
        return GRAPHS_KEPT if mine["graphs that are kept at once"] else NEVER_ZEROED
    return None


NEVER_ZEROED = (
    "the first update is right and a second one repeats its gradient: zero_grad() is missing."
)


def _why_clipped(gradient, whole, max_norm) -> str | None:
    size, right = gradient.norm().item(), whole.norm().item()
    factors = [(size / part.norm().item()) if part.norm() else 1.0 for part in (whole,)]
    parallel = torch.allclose(gradient / size, whole / right, atol=1e-6)
    halves = [half.norm().item() for half in gradient.chunk(2)]
    if not parallel and all(math.isclose(half, max_norm, rel_tol=1e-3) for half in halves):
        return (
            "each parameter is clipped by its own norm: use one norm, that of all parameters "
            "together."
        )
    if parallel and math.isclose(factors[0], 1.0, rel_tol=1e-6):
        return (
            "the update used the unclipped gradient: clip .grad itself, after the last backward "
            "and before the step."
        )
    others = {
        "the largest number (the infinity norm)": math.inf,
        "the sum of magnitudes (the 1-norm)": 1,
    }
    for other, power in others.items():
        if parallel and math.isclose(
            size, max_norm * right / whole.norm(power).item(), rel_tol=1e-3
        ):
            return f"this clips by {other}: the norm here is the root of the sum of squares."
    return None


def _why_fixed(gradient, other_size, whole, max_norm) -> str | None:
    """What is said of a gradient that is clipped to another number than ``max_norm``, or to it and
    in another direction. ``other_size``: of the gradient where ``max_norm`` is large.
    """
    size = gradient.norm().item()
    # both have the length 1, so that they are equal if they point in the same direction
    parallel = torch.allclose(gradient / size, whole / whole.norm(), atol=1e-5)
    if parallel and math.isclose(size, other_size, rel_tol=1e-4):
        return f"max_norm has no effect: the gradient is clipped to {size:.3g} in any case."
    if not parallel and math.isclose(size, max_norm, rel_tol=1e-3):
        return (
            "the clipped gradient has the right norm and another direction: before it is clipped, "
            "it has to be the mean over all items of the window. So each loss is a sum divided by "
            "the window's count, and you clip once, after the last backward."
        )
    return None


def _why_norm(norm, whole) -> str:
    if not isinstance(norm, (int, float)):
        return "the update is right; return the norm before clipping, a float."
    if norm <= 0.1001:
        return (
            "the update is right; the returned norm is the norm after clipping: return the norm "
            "before it, as clip_grad_norm_ does."
        )
    if math.isclose(norm, whole.square().sum().item(), rel_tol=1e-4):
        return "the update is right; the returned number is the square of the norm."
    return (
        "the update is right; the returned number is not the gradient's norm before clipping "
        "(is it the loss?)."
    )


def train_64(model, optimizer, batch, loss_and_count) -> float:
    """One update on all rows of ``batch``, in micro-batches that fit; the mean loss over all
    tokens.
    """
    loss = accumulate(list(split(batch, 8)), loss_and_count)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _updates(size, accumulate=accumulate):
    def wrong(model, optimizer, batch, loss_and_count):
        loss = accumulate(list(split(batch, size)), loss_and_count)
        step_and_zero(optimizer)
        return loss

    return wrong


def _one_backward(micro_batches, loss_and_count):
    pairs = [loss_and_count(micro) for micro in micro_batches]
    loss = sum(loss for loss, _ in pairs) / sum(count for _, count in pairs)
    loss.backward()
    return loss.item()


def _retains_every_graph(micro_batches, loss_and_count):
    total, losses = sum(count_targets(m["labels"]) for m in micro_batches), []
    for micro in micro_batches:
        loss, _ = loss_and_count(micro)
        (loss / total).backward(retain_graph=True)
        losses.append(loss)
    return sum(loss.item() for loss in losses) / total


def _steps_each(model, optimizer, batch, loss_and_count):
    loss_sum = items = 0
    for micro in split(batch, 8):
        loss, count = loss_and_count(micro)
        (loss / count).backward()
        step_and_zero(optimizer)
        loss_sum, items = loss_sum + loss.item(), items + count
    return loss_sum / items


def _setting_64():
    """A batch that does not fit whole, and a model whose gradients are longer than what people clip
    to.
    """
    model, optimizer, batch = batch_setting()
    with_large_gradients(model.lm_head, 100)
    return model, optimizer, batch


def _observe_64(candidate):
    model, optimizer, batch = _setting_64()
    updates: list[None] = []
    optimizer.register_step_post_hook(lambda *_: updates.append(None))
    # How many updates had been made at each backward.
    backwards: list[int] = []

    def moments():
        # Adam's first step moves every weight by about the learning rate, whatever its gradient's
        # size: look at m.
        kept = [optimizer.state[p].get("exp_avg", torch.zeros_like(p)) for p in model.parameters()]
        return 10 * flat(kept)

    rows: list[int] = []

    def loss_and_count(micro):
        rows.append(len(micro["labels"]))
        loss, count = next_token_loss(model, micro)
        count_backwards(loss, lambda: backwards.append(len(updates)))
        return loss, count

    def run():
        return candidate(model, optimizer, batch, loss_and_count)

    measured = measure(run, budget=CARD, model=model, optimizer=optimizer)
    first, first_backwards = sum(rows), list(backwards)
    found = {
        "64 sequences": {"gradient": moments(), "loss": measured.value, "updates": len(updates)},
        "the card": replace(measured, value=None),
    }
    most_rows = max(rows, default=0)
    stays = False
    if not measured.over:
        # Gradients that the first update left behind show in the second one, a thousand times as
        # large.
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1000)
        sizes = [found["64 sequences"]["gradient"].norm().item()]
        handle = before_each_update(
            optimizer, lambda: sizes.append(gradients_of(model).norm().item())
        )
        run()
        handle.remove()
        stays = sizes[-1] > 100 * sizes[0] > 0
    found["a second update"] = {"the first one's gradient is in it (1 is yes)": int(stays)}
    return Seen(found, rows=most_rows, all_rows=first, backwards=first_backwards)


FITS = 12  # rows at a time, about: 10 do, and 16 do not


def _explain_64(got, expected):
    mine, right = got["64 sequences"], expected["64 sequences"]
    if not mine["updates"]:
        return NO_STEP
    if mine["updates"] > 1:
        return (
            f"{mine['updates']} updates are made with this batch: the exercise asks for one, on "
            "all 64 rows."
        )
    if (seen := got.notes["all_rows"]) < 64:
        return f"{seen} of the 64 rows go through the model: the update must use all of them."
    if not mine["gradient"].norm():
        return _why_nothing(got.notes["backwards"])
    if difference(mine["gradient"], right["gradient"], 1e-4):
        return _why_64(mine["gradient"], right["gradient"], got.notes["rows"])
    if difference(mine["loss"], right["loss"], 1e-4):
        return "the gradient is right; the returned loss is not the mean over all tokens."
    return _why_too_many(got.notes["rows"]) if got["the card"].over else NEVER_ZEROED


def _why_nothing(backwards: list[int]) -> str:
    """What is said where the step has no gradient. ``backwards``: how many updates had been made
    at each backward.
    """
    if not backwards:
        return NO_BACKWARD
    return ZEROED if min(backwards) == 0 else STEP_FIRST


def _why_too_many(rows: int) -> str:
    if rows > FITS:
        return (
            f"{rows} rows at a time are too many for this card: the logits and activations of "
            "each piece must fit, so halve the piece."
        )
    return (
        "the pieces are small enough, but something of each is kept for the next: a graph, or "
        "logits; keep only loss.item()."
    )


BY_K = (
    "it fits, but dividing by K weights the sequences wrongly: their lengths differ, so divide by "
    "the tokens of all 64."
)


def _gradient_by_k(rows: int) -> torch.Tensor:
    """The mean of the mean gradients of pieces of so many rows."""
    model, _, batch = _setting_64()
    pieces = list(split(batch, rows))
    for piece in pieces:
        loss, count = next_token_loss(model, piece)
        (loss / count / len(pieces)).backward()
    return gradients_of(model)


def _why_64(gradient, right, rows) -> str | None:
    if not difference(gradient, _gradient_by_k(rows), 1e-4):
        return BY_K
    if says := why_clipped(gradient, right):
        return says
    ratio = (gradient.norm() / right.norm()).item() * (1 if gradient @ right > 0 else -1)
    if torch.allclose(gradient, ratio * right, atol=1e-4 * right.abs().max().item() * abs(ratio)):
        sign = "the gradient has the wrong sign: this increases the loss."
        return (
            sign
            if math.isclose(ratio, -1, rel_tol=1e-3)
            else f"the gradient is {times(ratio)}: divide by the tokens of all 64 rows."
        )
    return None


EXERCISES = (
    Exercise(
        id="3.6",
        title="clipping, in its place",
        difficulty=2,
        minutes=5,
        trains="clipping the gradient of the update, not its parts",
        reference=clipped_update,
        observe=_observe_clip,
        explain=_explain_clip,
        raises=(COUNTS_ITSELF,),
        mistakes=(
            Mistake(
                "inside",
                _clips_inside,
                (
                    "this clips inside the window: the accumulated gradient is clipped again and "
                    "again, and early micro-batches lose most."
                ),
            ),
            Mistake(
                "each",
                _clips_each,
                (
                    "this clips each micro-batch by itself: their sum is not the clipped "
                    "gradient, and can be longer than max_norm."
                ),
            ),
            Mistake(
                "too late",
                _clips_too_late,
                (
                    "the update used the unclipped gradient: clip after the last backward and "
                    "before the step."
                ),
            ),
            Mistake(
                "turned round",
                _clips_by_the_inverse,
                "the factor is turned round: it is max_norm / norm, and at most 1.",
            ),
            Mistake(
                "the sum",
                _clips_the_sum,
                "this clips before dividing: max_norm is meant for the norm of the mean.",
            ),
            Mistake(
                "max_norm / K",
                _clips_to_a_share,
                (
                    "this clips to max_norm / K: the gradient is that of one update, so it gets "
                    "the whole max_norm."
                ),
            ),
            Mistake(
                "values",
                _clips_values,
                (
                    "this clips each number by itself, which changes the gradient's direction: "
                    "clip its norm."
                ),
            ),
        ),
    ),
    Exercise(
        id="3.7",
        title="a batch of 64 where 16 do not fit",
        difficulty=3,
        minutes=10,
        trains="choosing a micro-batch by its bytes, and letting go of each graph",
        reference=train_64,
        observe=_observe_64,
        explain=_explain_64,
        tolerance=1e-4,
        mistakes=(
            Mistake(
                "all at once",
                _updates(64),
                "all 64 sequences go through at once: that is the batch that does not fit.",
            ),
            Mistake(
                "micro-batches of 16",
                _updates(16),
                "the micro-batch has 16 sequences, and 16 are too many for this card.",
            ),
            Mistake(
                "one backward",
                _updates(8, _one_backward),
                (
                    "one backward at the end keeps every micro-batch's graph until then: that is "
                    "the full batch again."
                ),
            ),
            Mistake(
                "retains every graph",
                _updates(8, _retains_every_graph),
                "retain_graph=True and a list of losses keep every graph alive: keep loss.item().",
            ),
            Mistake(
                "by K",
                _updates(
                    8, accumulates(lambda loss, count, k, total: loss / count / k, mean_of_means)
                ),
                BY_K,
            ),
            Mistake(
                "steps each",
                _steps_each,
                "it fits, but it makes eight updates: the exercise asks for one.",
            ),
        ),
    ),
)
