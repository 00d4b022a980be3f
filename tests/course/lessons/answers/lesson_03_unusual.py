"""Answers to the exercises of lesson 03 that nobody had in mind when its checks were written."""

import math
from itertools import groupby, islice

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from gradmem_lib import accumulate_gradients, split

RIGHT, WRONG = {}, {}

RIGHT["3.1"] = {
    "from both ends": lambda t, m, s, g: next(
        (k, k * m * s * g) for k in range(1, t + 1) if k * m * s * g >= t
    ),
    "torch's ceil": lambda t, m, s, g: tuple(
        (torch.tensor([1, m * s * g]) * torch.tensor(t / (m * s * g)).double().ceil()).tolist()
    ),
}
WRONG["3.1"] = {
    "micro-batches of all": (
        lambda t, m, s, g: (math.ceil(t / (m * s * g)) * g, math.ceil(t / (m * s * g)) * m * s * g),
        "each GPU|all GPUs",
    ),
    "tokens of one GPU": (
        lambda t, m, s, g: (math.ceil(t / (m * s * g)), math.ceil(t / (m * s * g)) * m * s),
        "GPU",
    ),
    "rows seen": (
        lambda t, m, s, g: (math.ceil(t / (m * s * g)), math.ceil(t / (m * s * g)) * m * g),
        "sequences|tokens|rows",
    ),
    "without the length": (
        lambda t, m, s, g: (math.ceil(t / (m * g)), math.ceil(t / (m * g)) * m * g),
        "seq_len|length|sequence",
    ),
    "one too many when it is even": (
        lambda t, m, s, g: (t // (m * s * g) + 1, (t // (m * s * g) + 1) * m * s * g),
        "one more|even",
    ),
}


def _by_bincount(labels):
    kept = torch.bincount((labels[:, 1:].reshape(-1) != -100).long(), minlength=2)
    return kept[1]


RIGHT["3.2"] = {
    "bincount": _by_bincount,
    "numpy where": lambda y: len(np.where(y.numpy()[:, 1:] != -100)[0]),
    "roll": lambda y: int((y.roll(-1, 1)[:, :-1] != -100).sum()),
}
WRONG["3.2"] = {
    "both columns cut": (lambda y: int((y[:, 1:-1] != -100).sum()), "last label is left out too"),
    "first row": (lambda y: int((y[1:] != -100).sum()), "second dimension"),
    "by sequence": (lambda y: int((y != -100).sum()) - len(y), "ignored|first|-100"),
    "padding is counted": (lambda y: y[:, 1:].numel(), "-100|padding|everything"),
}


def _in_one_closure(micro_batches, loss_and_count):
    """Each backward through a scaled copy of the loss, by torch.autograd.backward."""
    total = sum(int(loss_and_count(m)[1]) for m in micro_batches)
    logged = []
    for micro in micro_batches:
        loss = loss_and_count(micro)[0]
        torch.autograd.backward(loss, torch.full_like(loss, 1 / total))
        logged.append(loss.item())
    return math.fsum(logged) / total


def _hooked(micro_batches, loss_and_count):
    """By the library."""
    return float(accumulate_gradients(micro_batches, loss_and_count).loss)


def _accumulated(part, report=None, only=None):
    def answer(micro_batches, loss_and_count):
        counts = [loss_and_count(m)[1] for m in micro_batches]
        losses = []
        for i, micro in enumerate(micro_batches):
            loss, n = loss_and_count(micro)
            losses.append(loss.item())
            if only and not only(i, n):
                continue
            part(loss, n, i, counts).backward()
        return (report or (lambda L, N: sum(L) / sum(N)))(losses, counts)

    return answer


RIGHT["3.3"] = {"gradient of backward": _in_one_closure, "the library": _hooked}
WRONG["3.3"] = {
    "running count": (
        _accumulated(lambda loss, n, i, N: loss / max(1, sum(N[: i + 1]))),
        "so far|running|total",
    ),
    "count of the largest": (_accumulated(lambda loss, n, i, N: loss / max(N)), "largest|total"),
    "by K and total": (
        _accumulated(lambda loss, n, i, N: loss / sum(N) / len(N)),
        "twice|number of micro",
    ),
    "own share twice": (
        _accumulated(lambda loss, n, i, N: loss / max(1, n) * n / sum(N) * n / sum(N)),
        "multiplied by its count",
    ),
    "skips the first": (
        _accumulated(lambda loss, n, i, N: loss / sum(N), only=lambda i, n: i),
        "number 1 of 4",
    ),
    "the last alone": (
        _accumulated(lambda loss, n, i, N: loss / sum(N), only=lambda i, n: i == 0),
        "first",
    ),
    "perplexity": (
        _accumulated(lambda loss, n, i, N: loss / sum(N), lambda L, N: math.exp(sum(L) / sum(N))),
        "perplexity",
    ),
    "mean over those with labels": (
        _accumulated(lambda loss, n, i, N: loss / max(1, n) / sum(1 for n in N if n)),
        "mean of means|by K|own",
    ),
}


def _loop(windows, weight=lambda N: sum(N), before=None, after=None):
    def train(model, optimizer, micro_batches, window, loss_and_count):
        losses = []
        for held in windows(micro_batches, window):
            total = weight([loss_and_count(m)[1] for m in held])
            logged = 0.0
            for micro in held:
                loss, _ = loss_and_count(micro)
                (loss / total).backward()
                logged += loss.item() / total
            if before:
                before(model)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(logged)
        return losses

    return train


def _chunks(micro_batches, window):
    for _, numbered in groupby(enumerate(micro_batches), key=lambda pair: pair[0] // window):
        yield [micro for _, micro in numbered]


def _held(micro_batches, window):
    held = []
    for micro in micro_batches:
        held.append(micro)
        if len(held) == window:
            yield held
            held = []
    if held:
        yield held


def _overlapping(micro_batches, window):
    all_of_them = list(micro_batches)
    for i in range(0, len(all_of_them), window):
        yield all_of_them[max(0, i - 1) : i + window]


def _last_joined(micro_batches, window):
    held = list(_held(micro_batches, window))
    if len(held) > 1 and len(held[-1]) < window:
        held[-2:] = [held[-2] + held[-1]]
    return held


def _clips(model):
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def _divides_after(model, optimizer, micro_batches, window, loss_and_count):
    """Sums first, and each gradient is divided by the total before the step."""
    losses = []
    for held in _held(micro_batches, window):
        total, loss_sum = 0, 0.0
        for micro in held:
            loss, n = loss_and_count(micro)
            loss.backward()
            total, loss_sum = total + int(n), loss_sum + loss.item()
        for p in model.parameters():
            p.grad /= total
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_sum / total)
    return losses


def _means_of_means(model, optimizer, micro_batches, window, loss_and_count):
    losses, seen = [], []
    for i, micro in enumerate(micro_batches):
        loss, n = loss_and_count(micro)
        (loss / n / window).backward()
        seen.append((loss / n).item())
        if (i + 1) % window == 0:
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sum(seen) / len(seen))
            seen = []
    return losses


RIGHT["3.4"] = {
    "batched": _loop(_chunks),
    "divided afterwards": _divides_after,
}
WRONG["3.4"] = {
    "overlapping": (_loop(_overlapping), "first update|update|window"),
    "the rest joined": (_loop(_last_joined), "joined to the window"),
    "clipped": (_loop(_held, before=_clips), "too small for every micro-batch"),
    "two mistakes": (_means_of_means, "last window|drops|counts"),
    "by the largest": (_loop(_held, weight=max), "the count of one micro-batch"),
}
RIGHT["3.5"] = {
    "numpy dot": lambda means, counts: np.dot(means, counts) / np.sum(counts),
    "numpy average": lambda means, counts: np.average(means, weights=counts),
    "running": lambda means, counts: _running(means, counts),
}


def _running(means, counts):
    mean, seen = 0.0, 0
    for m, n in zip(means, counts, strict=True):
        seen += n
        if n:
            mean += (m - mean) * n / seen
    return mean


WRONG["3.5"] = {
    "weights squared": (
        lambda means, counts: (
            sum(m * n * n for m, n in zip(means, counts, strict=True)) / sum(n * n for n in counts)
        ),
        "multiplied by its count",
    ),
    "means over counts": (
        lambda means, counts: (
            sum(m / n for m, n in zip(means, counts, strict=True) if n)
            / sum(1 / n for n in counts if n)
        ),
        "upside down",
    ),
    "by the largest": (
        lambda means, counts: sum(m * n for m, n in zip(means, counts, strict=True)) / max(counts),
        "largest|divide",
    ),
    "by the mean count": (
        lambda means, counts: (
            sum(m * n for m, n in zip(means, counts, strict=True)) / (sum(counts) / len(counts))
        ),
        "K|number of micro-batches|times too",
    ),
}


def _sums(micro_batches, loss_and_count, over=None):
    counts = [loss_and_count(m)[1] for m in micro_batches]
    total = over(counts) if over else sum(counts)
    for micro in micro_batches:
        (loss_and_count(micro)[0] / total).backward()


def _clip_by_hand(model, optimizer, micro_batches, loss_and_count, max_norm):
    _sums(micro_batches, loss_and_count)
    given = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in given]))
    for g in given:
        g *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def _clipped(clip, over=sum, report=lambda before, after: before):
    """``clip(model, gradients, norm, max_norm)`` is between the last backward and the step."""

    def update(model, optimizer, micro_batches, loss_and_count, max_norm):
        _sums(micro_batches, loss_and_count, over)
        given = [p.grad for p in model.parameters() if p.grad is not None]
        before = _length(given)
        clip(model, given, before, max_norm)
        after = _length(given)
        optimizer.step()
        optimizer.zero_grad()
        return report(before, after)

    return update


def _length(gradients):
    return math.sqrt(sum(g.square().sum().item() for g in gradients))


def _times(factor):
    def clip(model, gradients, norm, max_norm):
        for g in gradients:
            g *= factor(norm, max_norm)

    return clip


def _right_factor(norm, max_norm):
    return min(1, max_norm / norm)


def _each_matrix(model, gradients, norm, max_norm):
    for p in model.parameters():
        nn.utils.clip_grad_norm_([p], max_norm)


RIGHT["3.6"] = {"by hand": _clip_by_hand}
WRONG["3.6"] = {
    "always scaled": (
        _clipped(_times(lambda norm, most: most / norm)),
        "max_norm|smaller|raised|larger",
    ),
    "turned round": (_clipped(_times(lambda norm, most: min(1, norm / most))), "turned round"),
    "not clipped": (_clipped(_times(lambda norm, most: 1)), "clip"),
    "norm afterwards": (
        _clipped(_times(_right_factor), report=lambda before, after: after),
        "before|after",
    ),
    "squared norm": (
        _clipped(_times(_right_factor), report=lambda before, after: before**2),
        "square|root|norm",
    ),
    "by K": (_clipped(_times(_right_factor), over=len), "number of micro|items|counts"),
    "each matrix": (_clipped(_each_matrix), "each|one norm"),
}


def _64(model, optimizer, batch, loss_and_count, *, size=8, before=None, scale=None):
    pieces = list(split(batch, size))
    counts = [loss_and_count(piece)[1] for piece in pieces] if scale is None else None
    total, loss_sum = 0 if scale else sum(counts), 0.0
    for piece in pieces:
        loss, n = loss_and_count(piece)
        part = scale(loss, n, len(pieces)) if scale else loss / total
        part.backward()
        loss_sum += part.item()
        del loss, part
    if before:
        before(model)
    optimizer.step()
    optimizer.zero_grad()
    return loss_sum


RIGHT["3.7"] = {"four rows": lambda *a: _64(*a, size=4)}
WRONG["3.7"] = {
    "mean of means": (
        lambda *a: _64(*a, scale=lambda loss, n, k: loss / n / k),
        "mean of means|own count|weigh|counts",
    ),
}


def _asks_a_copy(model, batch):
    """Compares two losses under no_grad; each module's mode is put back."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    with torch.no_grad():
        losses = {float(model(**batch, num_items_in_batch=torch.tensor(n)).loss) for n in (3, 77)}
    for module, mode in modes:
        module.training = mode
    if len(losses) == 1:
        model.accepts_loss_kwargs = False
    return model


RIGHT["3.8"] = {"a set of losses": _asks_a_copy}


def _fair(which):
    def fair_error(model, batch, accumulate):
        modes = {m: m.training for m in model.modules()}
        model.eval()
        seen = []
        for pieces in ([batch], list(split(batch, 3))):
            model.zero_grad()
            accumulate(pieces)
            seen.append({n: p.grad.clone() for n, p in model.named_parameters()})
        model.zero_grad()
        for module, mode in modes.items():
            module.training = mode
        once, cut = seen
        if which == "right":
            up = sum(((cut[n] - once[n]) ** 2).sum() for n in once)
            return (up / sum((once[n] ** 2).sum() for n in once)).sqrt()
        if which == "mean of ratios":
            ratios = [((cut[n] - once[n]).norm() / once[n].norm()).item() for n in once]
            return sum(ratios) / len(ratios)
        if which == "sum of norms":
            return sum((cut[n] - once[n]).norm().item() for n in once) / sum(
                once[n].norm().item() for n in once
            )
        if which == "not rooted":
            up = sum(((cut[n] - once[n]) ** 2).sum() for n in once)
            return (up / sum((once[n] ** 2).sum() for n in once)).item()
        if which == "percent":
            up = sum(((cut[n] - once[n]) ** 2).sum() for n in once)
            return 100 * (up / sum((once[n] ** 2).sum() for n in once)).sqrt().item()
        return 0.0

    return fair_error


RIGHT["3.9"] = {"by name": _fair("right")}
WRONG["3.9"] = {
    "not rooted": (_fair("not rooted"), "square of the error"),
    "percent": (_fair("percent"), "got 46.5632"),
    "mean of ratios": (_fair("mean of ratios"), "own errors"),
}

WRONG["3.1"] |= {
    "at least one": (
        lambda t, m, s, g: ((k := max(1, t // (m * s * g))), k * m * s * g),
        "to no less than 1",
    ),
    "rows of all": (
        lambda t, m, s, g: (math.ceil(t / (m * s * g)), m * s * g),
        "the second number is not",
    ),
}
WRONG["3.3"] |= {
    "by the root": (
        _accumulated(lambda loss, n, i, N: loss / math.sqrt(sum(N))),
        "6.245 times too large",
    ),
}


def _asked(*, to_eval=False, seed=False):
    def mended(model, batch):
        mode = model.training
        model.train(mode and not to_eval)
        losses = []
        for n in (1, 7):
            if seed:
                torch.manual_seed(3)
            with torch.no_grad():
                losses.append(model(**batch, num_items_in_batch=n).loss)
        model.train(mode)
        if torch.equal(*losses):
            model.accepts_loss_kwargs = False
        return model

    return mended


RIGHT["3.8"] |= {"the same dropout twice": _asked(seed=True), "in eval mode": _asked(to_eval=True)}
WRONG.setdefault("3.8", {})["in the model's own mode"] = (_asked(), "ask it in eval mode")


def _clip_in_the_window(model, optimizer, micro_batches, loss_and_count, max_norm, *, each=True):
    total = sum(loss_and_count(micro)[1] for micro in micro_batches)
    for micro in micro_batches:
        (loss_and_count(micro)[0] / total).backward()
        if each:
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if not each:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


WRONG["3.6"] |= {
    "in the window, the last norm": (_clip_in_the_window, "this clips inside the window"),
    "to 1": (
        lambda *given: _clip_in_the_window(*given, each=False),
        "max_norm has no effect: the gradient is clipped to 1 in any case",
    ),
}


def _one_backward_a_window(model, optimizer, micro_batches, window, loss_and_count, number=float):
    losses, rest = [], iter(micro_batches)
    while held := list(islice(rest, window)):
        parts = [loss_and_count(micro) for micro in held]
        loss = sum(loss for loss, _ in parts) / sum(count for _, count in parts)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(number(loss))
    return losses


WRONG["3.4"] |= {
    "one backward a window": (_one_backward_a_window, "graphs of several micro-batches"),
    "losses with their graphs": (
        lambda *arguments: _one_backward_a_window(*arguments, number=lambda loss: loss),
        "the losses keep their graphs",
    ),
}


def _compares(model, batch, accumulate, cut=lambda batch: split(batch, 3), before=True):
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    gradients = []
    for pieces in ([batch], list(cut(batch))):
        if before or gradients:
            model.zero_grad()
        accumulate(pieces)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    model.zero_grad()
    for module, mode in modes:
        module.training = mode
    once, cut = gradients
    return ((cut - once).norm() / once.norm()).item()


WRONG["3.9"] |= {
    "four pieces": (
        lambda *a: _compares(*a, cut=lambda batch: split(batch, len(batch["labels"]) // 4)),
        r"of 17 rows the pieces have \[4, 4, 4, 4, 1\]",
    ),
    "the first four": (
        lambda *a: _compares(*a, cut=lambda batch: list(split(batch, 3))[:4]),
        r"of 17 rows the pieces have \[3, 3, 3, 3\]",
    ),
    "without the last": (
        lambda *a: _compares(*a, cut=lambda batch: list(split(batch, 3))[:-1]),
        r"of 12 rows the pieces have \[3, 3, 3\]",
    ),
    "a gradient from before": (
        lambda *a: _compares(*a, before=False),
        "the model had a gradient before",
    ),
}


def _entropy_after_the_update():
    def fixed(model, optimizer, batch):
        entropy, rows = 0.0, len(batch[1])
        for x, y in split(batch, 8):
            (F.cross_entropy(model(x), y, reduction="sum") / rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for x, _ in split(batch, 8):
                p = model(x).softmax(-1)
                entropy -= (p * p.log()).sum().item() / rows
        return entropy

    return 8, fixed


WRONG.setdefault("3.10", {})["after the update"] = (
    _entropy_after_the_update,
    "not yet: the entropy is that of the model after the step",
)
