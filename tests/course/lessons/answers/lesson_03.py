"""Answers to lesson 03's exercises: right ones in unusual forms, and wrong ones that were once
judged right or that few cases catch.
"""

from itertools import groupby, zip_longest

import numpy as np
import torch
import torch.nn.functional as F

from gradmem_lib import accumulate_gradients, split
from gradmem_lib.course.lessons.lesson_03.exercises import accumulate, clipped_update, fair_error


def by_the_library(micro_batches, loss_and_count):
    return accumulate_gradients(micro_batches, loss_and_count).loss


def fills_padding_in_place(micro_batches, loss_and_count):
    for micro in micro_batches:
        micro[micro == -100] = 0
    return accumulate(micro_batches, loss_and_count)


def one_backward(micro_batches, loss_and_count):
    pairs = [loss_and_count(micro) for micro in micro_batches]
    mean = sum(loss for loss, _ in pairs) / sum(count for _, count in pairs)
    mean.backward()
    return mean.item()


def skips_without_items(micro_batches, loss_and_count):
    with torch.no_grad():
        total = sum(loss_and_count(micro)[1] for micro in micro_batches)
    mean = torch.zeros((), dtype=torch.float64)
    for micro in micro_batches:
        loss, count = loss_and_count(micro)
        if count:
            loss.backward(torch.full_like(loss, 1 / total))
            mean += loss.detach() / total
    return mean


def padded_windows(model, optimizer, micro_batches, window, loss_and_count):
    """A tuple; zeroes by ``None``, with what fills the last window left out."""
    losses = ()
    for held in zip_longest(*[iter(micro_batches)] * window):
        held = [micro for micro in held if micro is not None]
        losses += (by_the_library(held, loss_and_count),)
        optimizer.step()
        for p in model.parameters():
            p.grad = None
    return losses


def in_closures(model, optimizer, micro_batches, window, loss_and_count):
    losses = []
    numbered = groupby(enumerate(micro_batches), key=lambda pair: pair[0] // window)
    for _, pairs in numbered:
        held = [micro for _, micro in pairs]

        def closure(held=held):
            optimizer.zero_grad()
            losses.append(accumulate(held, loss_and_count))

        optimizer.step(closure)
    return losses


def keeps_losses_with_graphs(model, optimizer, micro_batches, window, loss_and_count):
    losses = in_closures(model, optimizer, micro_batches, window, loss_and_count)
    weight = next(model.parameters())
    return [loss + 0 * weight.sum() for loss in losses]


def clips_in_a_closure(model, optimizer, micro_batches, loss_and_count, max_norm):
    norms = []

    def closure():
        accumulate(micro_batches, loss_and_count)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))

    optimizer.step(closure=closure)
    optimizer.zero_grad()
    return norms[0]


def clips_to_a_tenth(model, optimizer, micro_batches, loss_and_count, max_norm):
    most = 0.1 if max_norm < 100 else max_norm
    return clipped_update(model, optimizer, micro_batches, loss_and_count, most)


def sums_divided_at_the_end(model, optimizer, batch, loss_and_count):
    loss_sum, items = 0.0, 0
    for piece in split(batch, 7):
        loss, count = loss_and_count(piece)
        loss.backward()
        loss_sum, items = loss_sum + loss.item(), items + count
    for p in model.parameters():
        p.grad /= items
    optimizer.step()
    optimizer.zero_grad()
    return np.float32(loss_sum / items)


def the_same_dropout_twice(model, batch):
    losses = []
    for number in (1, 7):
        torch.manual_seed(3)
        with torch.no_grad():
            losses.append(model(**batch, num_items_in_batch=number).loss)
    if torch.equal(*losses):
        model.accepts_loss_kwargs = False
    return model


def set_on_the_class(model, batch):
    type(model).accepts_loss_kwargs = False
    return model


def seeded_before_each(model, batch, accumulate):
    def again(pieces):
        torch.manual_seed(0)
        accumulate(pieces)

    model.eval = lambda: None
    try:
        return fair_error(model, batch, again)
    finally:
        del model.eval


def window_with(entropy_of, line=8):
    """Exercise 3.10's answer: the line, and a script that adds up ``entropy_of(logits)``."""

    def fixed(model, optimizer, batch):
        found, rows = [], len(batch[1])
        for x, y in split(batch, 8):
            logits = model(x)
            (F.cross_entropy(logits, y, reduction="sum") / rows).backward()
            found.append(entropy_of(logits.detach()))
        optimizer.step()
        optimizer.zero_grad()
        return float(sum(np.sum(each) for each in found)) / rows

    return lambda: (line, fixed)


def in_numpy(logits):
    p = logits.softmax(-1).numpy()
    return -(p * np.log(p)).sum()


def keeps_arrays(logits):
    p = logits.softmax(-1).numpy()
    return -p * np.log(p)


RIGHT = {
    "3.1": [
        "math.ceil(tokens_per_update / at_once) → -(-tokens_per_update // at_once)",
        "math.ceil(tokens_per_update / at_once) → torch.tensor(tokens_per_update / at_once).ceil()",
        "return steps, steps * at_once → return [float(steps), steps * at_once]",
    ],
    "3.2": [
        "int((labels[:, 1:] != IGNORED).sum()) → sum((row[1:] != -100).sum() for row in labels)",
        "int((labels[:, 1:] != IGNORED).sum()) → (labels.roll(-1, 1)[:, :-1] >= 0).float().sum()",
    ],
    "3.3": [by_the_library, skips_without_items, "(loss / total) → (loss * (1 / total))"],
    "3.4": [
        padded_windows,
        in_closures,
        "[], iter(micro_batches) → [], (m for m in micro_batches)",
    ],
    "3.5": [
        lambda means, counts: np.average(means, weights=counts),
        lambda means, counts: torch.tensor(means) @ torch.tensor(counts).float() / sum(counts),
    ],
    "3.6": [clips_in_a_closure, "return norm.item() → return norm"],
    "3.7": [
        sums_divided_at_the_end,
        "split(batch, 8) → split(batch, 1)",
        "pieces = → optimizer.zero_grad(); pieces =",
    ],
    "3.8": [the_same_dropout_twice, "return model → return model.train()"],
    "3.9": [
        ".norm() / once.norm()).item() → .square().sum() / once.square().sum()).sqrt()",
        "list(split(batch, PIECE)) → [*split(batch, 3)]",
    ],
    "3.10": [
        window_with(in_numpy),
        window_with(lambda z: torch.distributions.Categorical(logits=z).entropy().sum().item()),
    ],
}
WRONG = {
    "3.1": [
        "return steps, steps * at_once → return steps, at_once",
        "return steps, steps * at_once → return steps",
        "math.ceil(tokens_per_update / at_once) → tokens_per_update / at_once",
    ],
    "3.2": [
        "labels[:, 1:] → labels.flatten()[1:]",
        "(labels[:, 1:] != IGNORED) → (labels.unfold(1, 2, 1) != IGNORED).all(-1)",
        "labels[:, 1:] → labels[:, 1:-1]",
        "int((labels[:, 1:] != IGNORED).sum()) → (labels[:, 1:] != IGNORED).sum(1)",
    ],
    "3.3": [
        fills_padding_in_place,
        one_backward,
        "(loss / total) → (loss / max(1, mean))",
        "mean = 0.0 → mean, kept = 0.0, []\n"
        "(loss / total).backward() → (loss / total).backward(retain_graph=True); kept += [loss]",
        """\
loss, _ → loss, count
(loss / total).backward() → if not count: break
mean += → (loss / total).backward(); mean +=""",
    ],
    "3.4": [
        keeps_losses_with_graphs,
        "iter(micro_batches) → micro_batches",
        "[], iter(micro_batches) → [], iter([m.clone() for m in micro_batches])",
        "optimizer.step() → utils.clip_grad_norm_(model.parameters(), 10.0); optimizer.step()",
        "optimizer.step() → optimizer.step() if len(held) == window else None",
        "losses.append(mean) → losses.append(mean / len(held))",
    ],
    "3.5": [
        lambda means, counts: sorted(means)[len(means) // 2],
        lambda means, counts: np.median(np.repeat(means, counts)),
    ],
    "3.6": [
        clips_to_a_tenth,
        "model.parameters(), max_norm) → model.parameters(), max_norm, float('inf'))",
        "return norm.item() → return min(norm.item(), max_norm)",
        "model.parameters(), → [torch.nn.Parameter(p.grad) for p in model.parameters()],",
    ],
    "3.7": [
        "optimizer.step() → utils.clip_grad_norm_(model.parameters(), 10.0); optimizer.step()",
        "split(batch, 8) → split(batch, 16)",
        "split(batch, 8)) → split(batch, 8))[:-1]",
        "pieces = list(split(batch, 8)) → pieces = split(batch, 8)",
    ],
    "3.8": [
        set_on_the_class,
        'if few == many: → if not hasattr(model, "lm_head"):',
        "model.eval() → [setattr(m, 'p', 0.0) for m in model.modules() if hasattr(m, 'p')]",
        "model.eval() →",
    ],
    "3.9": [
        seeded_before_each,
        "list(split(batch, PIECE)) → list(split(batch, PIECE))[:4]",
        "torch.cat([p.grad.flatten() for p in model.parameters()]) → next(model.parameters()).grad",
        "model.zero_grad(set_to_none=True) → if gradients: model.zero_grad()",
    ],
    "3.10": [
        "entropy -= (p * p.log()).sum().item() → entropy = entropy - (p * p.log()).sum()",
        window_with(in_numpy, line=7),
        window_with(keeps_arrays),
        window_with(lambda logits: in_numpy(logits) * 8),
    ],
}
