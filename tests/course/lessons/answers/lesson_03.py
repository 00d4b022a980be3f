"""Answers to the exercises of lesson 03 as people write them; see lesson_00.py."""

import gc
import math
from functools import partial
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from gradmem_lib.techniques.accumulation import accumulate_gradients, split
from gradmem_lib.techniques.losses import count_targets

RIGHT, WRONG = {}, {}


def _plan(t, m, s, g, *, up=math.ceil, at_once=None):
    at_once = m * s * g if at_once is None else at_once
    return up(t / at_once), up(t / at_once) * at_once


RIGHT["3.1"] = {
    "plus one less": lambda t, m, s, g: (
        (t + m * s * g - 1) // (m * s * g),
        (t + m * s * g - 1) // (m * s * g) * m * s * g,
    ),
    "loop": lambda t, m, s, g: next(
        (k, k * m * s * g) for k in range(1, t + 1) if k * m * s * g >= t
    ),
    "array": lambda t, m, s, g: np.array(_plan(t, m, s, g)),
}
WRONG["3.1"] = {
    "down": (partial(_plan, up=math.floor), "rounds down"),
    "one GPU": (lambda t, m, s, g: _plan(t, m, s, 1), "forgets the GPUs"),
    "plus one": (
        partial(_plan, up=lambda n: int(n) + 1),
        "even where the division has no remainder",
    ),
    "fraction": (partial(_plan, up=lambda n: n), "fraction"),
    "steps alone": (lambda t, m, s, g: math.ceil(t / (m * s * g)), "list|sequence"),
    "swapped": (lambda t, m, s, g: _plan(t, m, s, g)[::-1], "reverse order"),
    "asked": (lambda t, m, s, g: (_plan(t, m, s, g)[0], t), "those asked for"),
    "down, asked": (lambda t, m, s, g: (t // (m * s * g), t), "rounds down"),
}

RIGHT["3.2"] = {
    "ge": lambda labels: (labels[:, 1:] >= 0).sum(),
    "float": lambda labels: labels[:, 1:].ne(-100).float().sum().item(),
    "rows": lambda labels: sum(int((row[1:] != -100).sum()) for row in labels),
}
WRONG["3.2"] = {
    "all": (lambda labels: labels.numel(), "padding"),
    "the ignored": (
        lambda labels: int((labels[:, 1:] == -100).sum()),
        "not yet: this counts the labels that are ignored",
    ),
    "no shift": (lambda labels: int((labels != -100).sum()), "position 0"),
    "last": (lambda labels: int((labels[:, :-1] != -100).sum()), "last label"),
    "wrong dimension": (lambda labels: int((labels[1:] != -100).sum()), "second dimension"),
    "flat": (lambda labels: int((labels.flatten()[1:] != -100).sum()), "for the whole batch"),
    "last, positive": (lambda labels: int((labels[:, :-1] > 0).sum()), "last label"),
    "one sequence": (lambda labels: int((labels[0, 1:] != -100).sum()), "got"),
    "a row": (lambda labels: (labels[:, 1:] != -100).sum(1).tolist(), "count for each row"),
    "positive": (lambda labels: int((labels[:, 1:] > 0).sum()), "token 0"),
}


def _window(
    micro_batches,
    f,
    *,
    part=lambda loss, n, total, k: loss / total,
    says=lambda ls, ns: sum(ls) / sum(ns),
    keep=False,
):
    counts, losses, kept = [int(f(m)[1]) for m in micro_batches], [], []
    for i, micro in enumerate(micro_batches):
        loss, n = f(micro)
        part(loss, n, sum(counts), len(counts)).backward(retain_graph=keep)
        losses.append(loss.item())
        kept.append(loss if keep else i)
    return says(losses, counts)


def _no_grad_first(micro_batches, f):
    with torch.no_grad():
        total = sum(f(m)[1] for m in micro_batches)
    value = torch.zeros((), dtype=torch.float64)
    for m in micro_batches:
        part = f(m)[0] / total
        part.backward()
        value += part.detach()
    return value


def _scaled_after(parameters_of):
    def answer(micro_batches, f):
        losses, counts = [], []
        for m in micro_batches:
            loss, n = f(m)
            loss.backward()
            losses.append(float(loss.detach()))
            counts.append(n)
        for p in parameters_of(f):
            p.grad /= sum(counts)
        return sum(losses) / sum(counts)

    return answer


def _one_sum(micro_batches, f):
    pairs = [f(m) for m in micro_batches]
    loss = sum(loss for loss, _ in pairs) / sum(n for _, n in pairs)
    loss.backward()
    return loss.item()


RIGHT["3.3"] = {
    "no_grad first": _no_grad_first,
    "share": partial(_window, part=lambda loss, n, total, k: loss * (1 / total)),
    "tensor": lambda mbs, f: torch.tensor(_window(mbs, f)),
}
WRONG["3.3"] = {
    "by K": (partial(_window, part=lambda loss, n, total, k: loss / max(n, 1) / k), "same weight"),
    "summed means": (
        partial(_window, part=lambda loss, n, total, k: loss / max(n, 1)),
        "adds up the means",
    ),
    "mean of none": (
        partial(_window, says=lambda ls, ns: sum(loss / n for loss, n in zip(ls, ns, strict=True))),
        "not yet: a micro-batch may have 0 items",
    ),
    "sum over K": (partial(_window, part=lambda loss, n, total, k: loss / k), "gradient|comes out"),
    "uphill": (partial(_window, part=lambda loss, n, total, k: -loss / total), "wrong sign"),
    "twice": (lambda mbs, f: (_window(mbs, f), _window(mbs, f))[0], "twice"),
    "every graph": (_one_sum, "graphs of several micro-batches"),
    "kept": (partial(_window, keep=True), "graphs of several micro-batches"),
    "last loss": (partial(_window, says=lambda ls, ns: ls[-1] / ns[-1]), "last micro-batch"),
    "mean of losses": (partial(_window, says=lambda ls, ns: sum(ls) / len(ls)), "divided by K"),
}


def _epoch(
    model,
    optimizer,
    micro_batches,
    window,
    f,
    *,
    fill=lambda held, window: True,
    one=_window,
    zero=True,
    step=True,
    says=None,
):
    losses, rest = [], iter(micro_batches)
    while held := list(islice(rest, window)):
        if fill(held, window):
            losses.append(one(held, f))
            if step:
                optimizer.step()
            if zero:
                optimizer.zero_grad()
    return says(losses) if says else losses


def _counted(model, optimizer, micro_batches, window, f):
    held, losses = [], []
    for i, micro in enumerate(micro_batches, 1):
        held += [micro]
        if i % window == 0:
            losses, held = [*losses, _step(optimizer, held, f)], []
    return [*losses, _step(optimizer, held, f)] if held else losses


def _step(optimizer, held, f):
    optimizer.zero_grad(set_to_none=False)
    loss = accumulate_gradients(held, f).loss
    optimizer.step()
    return loss


def _by_another(model, optimizer, micro_batches, window, f):
    other = torch.optim.SGD(model.parameters(), lr=0.5)
    return _epoch(model, other, micro_batches, window, f)


def _over_before_it_begins(model, optimizer, micro_batches, window, f):
    total, losses = sum(f(micro)[1] for micro in micro_batches), []
    for i, micro in enumerate(micro_batches, 1):
        (f(micro)[0] / total).backward()
        if i % window == 0:
            optimizer.step()
            losses.append(1.0)
    return losses


def _by_all(model, optimizer, micro_batches, window, f):
    micro_batches = list(micro_batches)
    total = sum(f(micro)[1] for micro in micro_batches)
    return _epoch(
        model,
        optimizer,
        iter(micro_batches),
        window,
        f,
        one=lambda held, f: _window(held, f, part=lambda loss, *_: loss / total),
    )


def _by_length(model, optimizer, micro_batches, window, f):
    return [
        _step(optimizer, micro_batches[i : i + window], f)
        for i in range(0, len(micro_batches), window)
    ]


def _after_the_update(model, optimizer, micro_batches, window, f):
    losses = []
    while held := list(islice(micro_batches, window)):
        _step(optimizer, held, f)
        losses.append(_no_grad_first(held, f))
        optimizer.zero_grad()
    return losses


def _as_they_come(model, optimizer, micro_batches, window, f):
    yield from _epoch(model, optimizer, micro_batches, window, f)


RIGHT["3.4"] = {
    "counted": _counted,
    "tuple": partial(_epoch, says=tuple),
    "listed first": lambda m, o, mbs, w, f: _epoch(
        m, o, list(mbs), w, f, one=_no_grad_first, says=lambda x: [float(v) for v in x]
    ),
}
WRONG["3.4"] = {
    "full windows": (
        partial(_epoch, fill=lambda held, window: len(held) == window),
        "drops the last window",
    ),
    "a last window of none": (
        lambda m, o, mbs, w, f: [*_epoch(m, o, mbs, w, f), _window([], f)],
        "not yet: where `window` divides the number of micro-batches, nothing is left",
    ),
    "no zero": (partial(_epoch, zero=False), "zero_grad between windows"),
    "no step": (partial(_epoch, step=False), r"step\(\) is missing"),
    "another optimizer": (_by_another, "not by the given optimizer"),
    "over before it begins": (
        _over_before_it_begins,
        "not yet: nothing was read: micro_batches is an iterator",
    ),
    "by all": (_by_all, "not yet: this divides by the items of all micro-batches"),
    "by length": (_by_length, "not yet: micro_batches is an iterator, which has no length"),
    "after the update": (_after_the_update, "before the update"),
    "by K again": (
        partial(_epoch, one=lambda held, f: _window(held, f) / len(held)),
        "updates are right; the first of the losses is the mean, divided by K once more",
    ),
    "a loss less": (
        partial(_epoch, says=lambda losses: losses[:-1]),
        "there must be 2 entries, but there are 1",
    ),
    "yields": (_as_they_come, "`yield`.*runs nothing"),
    "one, then three": (
        lambda m, o, mbs, w, f: [*_epoch(m, o, [next(mbs)], 1, f), *_epoch(m, o, mbs, w, f)],
        "first update is made of 1 micro-batch,",
    ),
    "every one": (lambda m, o, mbs, w, f: _epoch(m, o, mbs, 1, f), "steps after every micro-batch"),
    "by K": (partial(_epoch, one=WRONG["3.3"]["by K"][0]), "same weight"),
    "window less one": (lambda m, o, mbs, w, f: _epoch(m, o, mbs, w - 1, f), "window"),
    "mean": (partial(_epoch, says=lambda x: sum(x) / len(x)), "list"),
    "by the full": (
        lambda m, o, mbs, w, f: _epoch(
            m,
            o,
            mbs,
            w,
            f,
            one=lambda held, f: _window(held, f, part=lambda loss, n, t, k: loss / t * k / w),
        ),
        "last window|last one",
    ),
}

RIGHT["3.5"] = {
    "loop": lambda means, counts: (
        sum(means[i] * counts[i] for i in range(len(means))) / sum(counts)
    ),
    "numpy": lambda means, counts: np.dot(means, counts) / np.sum(counts),
    "shares": lambda means, counts: sum(
        m * (c / sum(counts)) for m, c in zip(means, counts, strict=True)
    ),
}
WRONG["3.5"] = {
    "mean": (lambda means, counts: np.mean(means), "without weights|same weight"),
    "median": (
        lambda means, counts: sorted(means)[len(means) // 2],
        "this is the median of the means",
    ),
    "median of items": (
        lambda means, counts: np.median(np.repeat(means, counts)),
        "this is the median of all items' means",
    ),
    "sum": (lambda means, counts: np.dot(means, counts), "divide it by their number"),
    "largest": (lambda means, counts: max(means), "this is the largest of the means"),
    "pairs": (lambda means, counts: list(zip(means, counts, strict=True)), "one number"),
    "by K": (lambda means, counts: np.dot(means, counts) / len(counts), "divided by K"),
    "first": (lambda means, counts: means[0], "only the first micro-batch"),
}


def _clipped(model, optimizer, mbs, f, max_norm, *, clip=None, before=None, zero=True, back=None):
    loss = _window(mbs, f)
    parameters = list(model.parameters())
    if before:
        before(optimizer)
    norm = clip(parameters, max_norm) if clip else clip_grad_norm_(parameters, max_norm)
    optimizer.step()
    if zero:
        optimizer.zero_grad()
    return back(norm, loss) if back else norm.item()


def _copies(parameters, max_norm):
    clip_grad_norm_([torch.nn.Parameter(p.detach().clone()) for p in parameters], max_norm)
    return get_total_norm([p.grad for p in parameters])


def _each(parameters, max_norm):
    norm = get_total_norm([p.grad for p in parameters])
    for p in parameters:
        clip_grad_norm_(p, max_norm)
    return norm


def _values(parameters, max_norm):
    norm = get_total_norm([p.grad for p in parameters])
    clip_grad_value_(parameters, max_norm)
    return norm


def _after(parameters, max_norm):
    clip_grad_norm_(parameters, max_norm)
    return get_total_norm([p.grad for p in parameters])


RIGHT["3.6"] = {
    "tensor": partial(_clipped, back=lambda norm, loss: norm),
    "foreach": partial(_clipped, clip=lambda ps, n: clip_grad_norm_(ps, n, foreach=False)),
    "zero first": lambda m, o, mbs, f, n: (o.zero_grad(), _clipped(m, o, mbs, f, n, zero=False))[1],
}
WRONG["3.6"] = {
    "copies": (partial(_clipped, clip=_copies), "unclipped"),
    "each": (partial(_clipped, clip=_each), "by its own norm"),
    "values": (partial(_clipped, clip=_values), "each number by itself"),
    "after": (partial(_clipped, clip=_after), "after clipping"),
    "loss": (partial(_clipped, back=lambda norm, loss: loss), "not the gradient's norm"),
    "no zero": (partial(_clipped, zero=False), r"zero_grad\(\) is missing"),
    "zero before": (
        partial(_clipped, before=lambda o: o.zero_grad(set_to_none=False)),
        "although backward ran before it",
    ),
    "one": (partial(_clipped, clip=lambda ps, n: clip_grad_norm_(ps, n, 1)), "sum of magnitudes"),
    "inf": (
        partial(_clipped, clip=lambda ps, n: clip_grad_norm_(ps, n, float("inf"))),
        "infinity norm",
    ),
}


def _64(model, optimizer, batch, f, *, size=8, one=None, steps=1, zero=True):
    for _ in range(steps):
        loss = (one or (lambda mbs, f: accumulate_gradients(mbs, f).loss))(
            list(split(batch, size)), f
        )
        optimizer.step()
        if zero:
            optimizer.zero_grad()
    return loss


RIGHT["3.7"] = {
    "rows": partial(_64, size=2),
    "by hand": partial(_64, one=_window),
    "uneven": partial(_64, size=7),
}
WRONG["3.7"] = {
    "whole": (partial(_64, size=64), "all 64|too many"),
    "16": (partial(_64, size=16), "16 rows|16 sequences"),
    "no zero": (partial(_64, one=_window, zero=False), r"zero_grad\(\) is missing"),
    "twice": (partial(_64, steps=2), "2 updates"),
    "a part": (
        lambda m, o, b, f: _64(m, o, {name: t[:8] for name, t in b.items()}, f),
        "8 of the 64 rows",
    ),
    "by K, None": (
        partial(_64, one=lambda mbs, f: WRONG["3.3"]["by K"][0](mbs, f) and None),
        "dividing by K",
    ),
    "uphill": (partial(_64, one=WRONG["3.3"]["uphill"][0]), "wrong sign"),
    "by K": (partial(_64, one=WRONG["3.3"]["by K"][0]), "dividing by K"),
    "one sum": (partial(_64, one=_one_sum), "keeps every micro-batch's graph"),
}


def _asked(
    model,
    batch,
    *,
    numbers=(2, 3),
    told=False,
    when=lambda a, b: math.isclose(a, b, rel_tol=1e-6),
    back=True,
):
    model.eval()
    losses = [model(**batch, num_items_in_batch=torch.tensor(n)).loss.item() for n in numbers]
    if when(*losses):
        model.accepts_loss_kwargs = told
    return model if back else None


def _without_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


RIGHT["3.8"] = {
    "close": _asked,
    "far numbers": partial(_asked, numbers=(1, 10**6)),
    "both ways": lambda model, batch: _asked(_asked(model, batch), batch),
    "in train mode afterwards": lambda model, batch: _asked(model, batch).train(),
}
WRONG["3.8"] = {
    "nothing": (lambda model, batch: model, "still multiplied"),
    "always": (partial(_asked, when=lambda a, b: True), "does use the number"),
    "other way": (partial(_asked, when=lambda a, b: a != b), "opposite value"),
    "true": (partial(_asked, told=True), "still multiplied"),
    "no return": (partial(_asked, back=False), "return"),
    "dropout off": (lambda model, batch: _asked(_without_dropout(model), batch), "another dropout"),
    "first weight frozen": (
        lambda model, batch: (next(model.parameters()).requires_grad_(False), _asked(model, batch))[
            1
        ],
        "another requires_grad",
    ),
    "cache off": (
        lambda model, batch: (
            setattr(model.config, "use_cache", not model.config.use_cache),
            _asked(model, batch),
        )[1],
        "config.use_cache",
    ),
    "class": (
        lambda model, batch: (setattr(type(model), "accepts_loss_kwargs", False), model)[1],
        "on the class|does use the number",
    ),
}


def answer(line, script):
    return lambda: (line, script)


def window_of(figure, size=8, *, last=False, end=float, each=False):
    def script(model, optimizer, batch):
        entropy, rows = 0.0, len(batch[1])
        for x, y in split(batch, size):
            logits = model(x)
            loss = F.cross_entropy(logits, y, reduction="sum") / rows
            loss.backward()
            new = figure(logits) / rows
            entropy = new if last else entropy + new
            if each:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        return end(entropy)

    return script


def entropy_of(logits):
    p = logits.softmax(-1)
    return -(p * p.log()).sum()


def entropy_without_graph(logits):
    with torch.no_grad():
        return torch.distributions.Categorical(logits=logits).entropy().sum()


def by_the_library(model, optimizer, batch):
    entropies = []

    def loss_and_count(micro):
        logits = model(micro[0])
        entropies.append(entropy_of(logits.detach()).item())
        return F.cross_entropy(logits, micro[1], reduction="sum"), len(micro[1])

    accumulate_gradients(list(split(batch, 8)), loss_and_count, total_items=len(batch[1]))
    optimizer.step()
    optimizer.zero_grad()
    return sum(entropies) / len(batch[1])


def second_pass(model, optimizer, batch):
    """The entropy first, without gradients; then the training."""
    rows = len(batch[1])
    with torch.no_grad():
        entropy = sum(entropy_of(model(x)).item() for x, _ in split(batch, 8)) / rows
    for x, y in split(batch, 8):
        (F.cross_entropy(model(x), y, reduction="sum") / rows).backward()
    optimizer.step()
    optimizer.zero_grad()
    return entropy


def zeroes(when):
    """The window with ``zero_grad`` "first", or "never"."""

    def script(model, optimizer, batch):
        if when == "first":
            optimizer.zero_grad()
        entropy, rows = 0.0, len(batch[1])
        for x, y in split(batch, 8):
            logits = model(x)
            (F.cross_entropy(logits, y, reduction="sum") / rows).backward()
            entropy += entropy_of(logits.detach()).item() / rows
        optimizer.step()
        return entropy

    return script


RIGHT["3.10"] = {
    "item": answer(8, window_of(lambda logits: entropy_of(logits).item())),
    "detach at the sum": answer(8, window_of(lambda logits: entropy_of(logits).detach())),
    "no_grad for the log": answer(8, window_of(entropy_without_graph)),
    "the library's loop": answer(8, by_the_library),
    "two passes": answer(8, second_pass),
    "gradients are zeroed first": answer(8, zeroes("first")),
}


def deleted(model, optimizer, batch):
    entropy, rows = 0.0, len(batch[1])
    for x, y in split(batch, 8):
        logits = model(x)
        loss = F.cross_entropy(logits, y, reduction="sum") / rows
        loss.backward()
        p = logits.softmax(-1)
        entropy = entropy - (p * p.log()).sum() / rows
        del p, logits, loss
        gc.collect()
    optimizer.step()
    optimizer.zero_grad()
    return entropy.detach().item()


def one_backward(model, optimizer, batch):
    total, entropy, rows = 0.0, 0.0, len(batch[1])
    for x, y in split(batch, 8):
        logits = model(x)
        total = total + F.cross_entropy(logits, y, reduction="sum") / rows
        entropy += entropy_of(logits.detach()).item() / rows
    total.backward()
    optimizer.step()
    optimizer.zero_grad()
    return entropy


def adds_up_later(keep, entropy_of_kept):
    """A script that keeps something of each micro-batch, and adds it up after the window."""

    def script(model, optimizer, batch):
        kept, rows = [], len(batch[1])
        for x, y in split(batch, 8):
            logits = model(x)
            (F.cross_entropy(logits, y, reduction="sum") / rows).backward()
            kept.append(keep(logits.detach().softmax(-1)))
        optimizer.step()
        optimizer.zero_grad()
        return sum(map(entropy_of_kept, kept)) / rows

    return script


def entropy_of_array(p):
    p = np.asarray(p)
    return float(-(p * np.log(p)).sum())


def entropy_of_list(p):
    return -sum(x * math.log(x) for row in p.tolist() for x in row)


RIGHT["3.10"] |= {
    "in numpy, each at once": answer(8, adds_up_later(entropy_of_array, float)),
    "in lists, each at once": answer(8, adds_up_later(entropy_of_list, float)),
}


def no_gradients(model, optimizer, batch):
    with torch.no_grad():
        return window_of(entropy_of)(model, optimizer, batch)


WRONG["3.10"] = {
    "detach at the end": (
        answer(8, window_of(entropy_of, end=lambda sum: sum.detach().item())),
        "the sum still has a graph",
    ),
    "deleted and collected": (answer(8, deleted), r"gc\.collect\(\)|still has a graph"),
    "smaller pieces": (answer(8, window_of(entropy_of, 2)), "smaller|still has a graph"),
    "the last alone": (
        answer(8, window_of(lambda logits: entropy_of(logits).item(), last=True)),
        "only the last micro-batch",
    ),
    "a step each": (
        answer(8, window_of(lambda logits: entropy_of(logits).item(), each=True)),
        "after each micro-batch|weights at the end",
    ),
    "one backward": (answer(8, one_backward), "graph|too many"),
    "the loss's line": (answer(5, window_of(entropy_without_graph)), "freed in the next line"),
    "backward": (answer(6, window_of(entropy_without_graph)), "as it should"),
    "the probabilities": (answer(7, window_of(entropy_without_graph)), "take their place"),
    "the end": (answer(11, window_of(entropy_without_graph)), "the window has ended"),
    "no gradients": (answer(8, no_gradients), "no_grad around the forward"),
    "never zeroed": (answer(8, zeroes("never")), "zero_grad.. is missing"),
    "not normalized": (
        answer(8, window_of(lambda logits: entropy_of(logits).item() * 8)),
        "something else|8",
    ),
    "arrays of all": (
        answer(8, adds_up_later(lambda p: p.numpy().copy(), entropy_of_array)),
        "arrays or lists.*Outside of tensors there are about",
    ),
    "lists of all": (
        answer(8, adds_up_later(torch.Tensor.tolist, entropy_of_array)),
        "arrays or lists.*Outside of tensors there are about",
    ),
}


def _gradient(model):
    return torch.cat([p.grad.detach().clone().flatten() for p in model.parameters()])


def _fair(model, batch, accumulate, *, wrap=None, error=None, cut=None, undo=True, clear=True):
    """A ``fair_error`` from parts that may be wrong."""
    noted = [(module, module.training) for module in model.modules()]
    (wrap or nn.Module.eval)(model)
    found = []
    for pieces in ([batch], (cut or (lambda b: list(split(b, 3))))(batch)):
        for p in model.parameters():
            p.grad = None
        accumulate(pieces)
        found.append(_gradient(model))
    if clear:
        for p in model.parameters():
            p.grad = None
    if undo:
        for module, mode in noted:
            module.training = mode
    whole, pieces = found
    measure = error or (lambda a, b: ((a - b).norm() / b.norm()).item())
    return measure(pieces, whole)


def _sliced(batch):
    rows = len(batch["labels"])
    return [{k: v[i : i + 3] for k, v in batch.items()} for i in range(0, rows, 3)]


def _pieces_first(model, batch, accumulate):
    noted = [(module, module.training) for module in model.modules()]
    model.eval()
    model.zero_grad()
    accumulate(list(split(batch, 3)))
    pieces = _gradient(model)
    model.zero_grad()
    accumulate([batch])
    whole = _gradient(model)
    model.zero_grad(set_to_none=False)
    for module, mode in noted:
        module.training = mode
    return torch.linalg.vector_norm(pieces - whole) / torch.linalg.vector_norm(whole)


RIGHT["3.9"] = {
    "slices": partial(_fair, cut=_sliced),
    "pieces first, a tensor": _pieces_first,
    "squares": partial(
        _fair, error=lambda a, b: ((a - b).square().sum() / b.square().sum()).sqrt().item()
    ),
}


def _only_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()


def _seeded(model, batch, accumulate):
    """The same seed before each: the pieces still draw other numbers for their rows."""

    def again(pieces):
        torch.manual_seed(0)
        accumulate(pieces)

    return _fair(model, batch, again, wrap=lambda model: None)


WRONG["3.9"] = {
    "seeded": (_seeded, "draw other numbers"),
    "dropout alone": (partial(_fair, wrap=_only_dropout), "draw other numbers"),
    "modes not set back": (partial(_fair, undo=False), "not as it was|mode"),
    "gradients left": (partial(_fair, clear=False), "gradients are left behind"),
    "divided by the pieces": (
        partial(_fair, error=lambda a, b: ((a - b).norm() / a.norm()).item()),
        "length of the gradient in pieces",
    ),
    "largest difference": (
        partial(_fair, error=lambda a, b: (a - b).abs().max().item()),
        "error",
    ),
    "pieces of 6": (partial(_fair, cut=lambda b: list(split(b, 6))), "error"),
    "cosine": (
        partial(_fair, error=lambda a, b: 1 - F.cosine_similarity(a, b, dim=0).item()),
        "error",
    ),
}


def _clips_64(clip, each=False):
    """Exercise 3.7's update, clipped by ``clip(parameters)``, which nobody asked for."""

    def train_64(model, optimizer, batch, loss_and_count):
        pieces, loss_sum = list(split(batch, 8)), 0.0
        total = sum(int((piece["labels"][:, 1:] != -100).sum()) for piece in pieces)
        for piece in pieces:
            loss, _ = loss_and_count(piece)
            (loss / total).backward()
            loss_sum += loss.item()
            if each:
                clip(list(model.parameters()))
        if not each:
            clip(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        return loss_sum / total

    return train_64


_AFTER_ALL = "is clipped to .*no clipping"
WRONG["3.7"] |= {
    "clipped to 1": (_clips_64(lambda p: clip_grad_norm_(p, 1.0)), _AFTER_ALL),
    "clipped to 10": (_clips_64(lambda p: clip_grad_norm_(p, 10.0)), _AFTER_ALL),
    "each clipped to 1": (_clips_64(lambda p: clip_grad_norm_(p, 1.0), each=True), _AFTER_ALL),
    "values clipped to 1": (_clips_64(lambda p: clip_grad_value_(p, 1.0)), _AFTER_ALL),
}
RIGHT["3.7"] |= {
    "clipped to infinity": _clips_64(lambda p: clip_grad_norm_(p, math.inf)),
    "the norm looked at": _clips_64(lambda p: get_total_norm([q.grad for q in p])),
}


def _counts_itself(labels_of):
    """Exercise 3.3's answer, which looks for the labels in a micro-batch by itself."""

    def accumulate(micro_batches, loss_and_count):
        total = sum(count_targets(labels_of(micro)) for micro in micro_batches)
        loss_sum = 0.0
        for micro in micro_batches:
            loss, _ = loss_and_count(micro)
            (loss / total).backward()
            loss_sum += loss.item()
        return loss_sum / total

    return accumulate


def _clips_what_it_counts(model, optimizer, micro_batches, loss_and_count, max_norm):
    _counts_itself(lambda micro: micro["labels"])(micro_batches, loss_and_count)
    norm = clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


_ANYTHING = "not yet: a micro-batch may be anything that loss_and_count takes"
_KEY, _ATTRIBUTE = _counts_itself(lambda m: m["labels"]), _counts_itself(lambda m: m.labels)
WRONG["3.3"] |= {"labels by key": (_KEY, _ANYTHING), "labels by name": (_ATTRIBUTE, _ANYTHING)}
WRONG["3.4"] |= {"labels by key": (partial(_epoch, one=_KEY), _ANYTHING)}
WRONG["3.6"] |= {"labels by key": (_clips_what_it_counts, _ANYTHING)}
RIGHT["3.3"] |= {"labels, where they are the micro-batch": _counts_itself(lambda micro: micro)}


def _mean_and_gradient(micro_batches, loss_and_count):
    total, loss_sum = sum(loss_and_count(micro)[1] for micro in micro_batches), 0.0
    for micro in micro_batches:
        loss, count = loss_and_count(micro)
        if count:
            (loss / total).backward()
            loss_sum += loss.item()
    return loss_sum / total


def _by_closures(model, optimizer, micro_batches, window, loss_and_count):
    losses, rest = [], iter(micro_batches)
    while held := list(islice(rest, window)):

        def closure(held=held):
            optimizer.zero_grad()
            losses.append(_mean_and_gradient(held, loss_and_count))
            return losses[-1]

        optimizer.step(closure)
    optimizer.zero_grad()
    return losses


def _clips_in_a_closure(model, optimizer, micro_batches, loss_and_count, max_norm):
    norms = []

    def closure():
        loss = _mean_and_gradient(micro_batches, loss_and_count)
        norms.append(clip_grad_norm_(model.parameters(), max_norm).item())
        return loss

    optimizer.step(closure=closure)
    optimizer.zero_grad()
    return norms[0]


def _clips_after_a_closure(model, optimizer, micro_batches, loss_and_count, max_norm):
    optimizer.step(lambda: _mean_and_gradient(micro_batches, loss_and_count))
    norm = clip_grad_norm_(model.parameters(), max_norm).item()
    optimizer.zero_grad()
    return norm


def _stops_at_an_empty_one(micro_batches, loss_and_count):
    total, loss_sum = sum(loss_and_count(micro)[1] for micro in micro_batches), 0.0
    for micro in micro_batches:
        loss, count = loss_and_count(micro)
        if not count:
            break
        (loss / total).backward()
        loss_sum += loss.item()
    return loss_sum / total


def _one_too_early(model, optimizer, micro_batches, window, loss_and_count):
    losses, held = [], []
    for number, micro in enumerate(micro_batches):
        held.append(micro)
        if number % window == 0:
            losses.append(_mean_and_gradient(held, loss_and_count))
            optimizer.step()
            optimizer.zero_grad()
            held = []
    return losses


RIGHT["3.1"] |= {"ceil of numpy": lambda t, m, s, g: [np.ceil(t / m / s / g), _plan(t, m, s, g)[1]]}
RIGHT["3.3"] |= {"skips what is empty": _mean_and_gradient}
RIGHT["3.4"] |= {"closures": _by_closures}
RIGHT["3.6"] |= {"a closure that clips": _clips_in_a_closure}
WRONG["3.3"] |= {"stops at an empty one": (_stops_at_an_empty_one, "the last one")}
WRONG["3.4"] |= {"counts from 0": (_one_too_early, "first update is made of 1 micro-batch")}
WRONG["3.6"] |= {"clips after the closure": (_clips_after_a_closure, "unclipped gradient")}


def _steps_first(model, optimizer, micro_batches, window, loss_and_count):
    losses, rest = [], iter(micro_batches)
    while held := list(islice(rest, window)):
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_window(held, loss_and_count))
    return losses


def _zeroes_before_it_steps(model, optimizer, micro_batches, window, loss_and_count):
    losses, rest = [], iter(micro_batches)
    while held := list(islice(rest, window)):
        losses.append(_window(held, loss_and_count))
        optimizer.zero_grad()
        optimizer.step()
    return losses


def _sliced_windows(
    model, optimizer, micro_batches, window, f, *, stops=0, back=0, loss=lambda mean, held: mean
):
    """Windows as slices of a list. ``stops``: so many micro-batches before the end. ``back``: how
    far a last slice that is not full begins before its place.
    """
    micro_batches, losses = list(micro_batches), []
    for start in range(0, len(micro_batches) - stops * window, window):
        held = micro_batches[start : start + window]
        if len(held) < window:
            held = micro_batches[start - back :]
        losses.append(loss(_window(held, f), held))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _never_empties(model, optimizer, micro_batches, window, loss_and_count):
    losses, held = [], []

    def update():
        losses.append(_window(held, loss_and_count))
        optimizer.step()
        optimizer.zero_grad()

    for micro in micro_batches:
        held.append(micro)
        if len(held) % window == 0:
            update()
    if len(held) % window:
        update()
    return losses


def _no_step_for_the_rest(model, optimizer, micro_batches, window, loss_and_count):
    losses, rest = [], iter(micro_batches)
    while held := list(islice(rest, window)):
        losses.append(_window(held, loss_and_count))
        if len(held) == window:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def _read_twice(micro_batches, loss_and_count):
    pairs = map(loss_and_count, micro_batches)
    total = sum(count for _, count in pairs)
    mean = 0.0
    for loss, _ in pairs:
        (loss / total).backward()
        mean += loss.item() / total
    return mean


def _of_new_tensors(micro_batches, loss_and_count):
    total = sum(loss_and_count(micro)[1] for micro in micro_batches)
    mean = 0.0
    for micro in micro_batches:
        loss = torch.tensor(loss_and_count(micro)[0].item() / total, requires_grad=True)
        loss.backward()
        mean += loss.item()
    return mean


def _running_sum(micro_batches, loss_and_count):
    total = sum(loss_and_count(micro)[1] for micro in micro_batches)
    mean = 0.0
    for micro in micro_batches:
        mean = mean + loss_and_count(micro)[0] / total
        mean.backward(retain_graph=True)
    return mean.item()


WRONG["3.1"] |= {
    "shifted": (lambda t, m, s, g: _plan(t, m, s - 1, g), "seq_len - 1 tokens for each sequence"),
}
WRONG["3.2"] |= {
    "one less a row, down to 0": (
        lambda labels: max(0, int((labels != -100).sum()) - len(labels)),
        "subtracts one for every sequence",
    ),
}


def _split_read_twice(model, optimizer, batch, loss_and_count):
    loss = _mean_and_gradient(split(batch, 8), loss_and_count)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _64_in_another_order(order):
    def train_64(model, optimizer, batch, loss_and_count):
        for what in order:
            if what == "backward":
                loss = _window(list(split(batch, 8)), loss_and_count)
            else:
                getattr(optimizer, what)()
        return loss

    return train_64


RIGHT["3.4"] |= {"slices": _sliced_windows}
WRONG["3.3"] |= {
    "a new tensor of the loss": (_of_new_tensors, "no backward goes through a loss"),
    "a running sum": (_running_sum, "first micro-batch counts 4 times in the gradient"),
    "a map, read twice": (
        _read_twice,
        "not yet: no backward goes through a loss of loss_and_count. If",
    ),
}
WRONG["3.4"] |= {
    "steps first": (_steps_first, r"not yet: step\(\) runs before backward"),
    "zeroes before it steps": (_zeroes_before_it_steps, "although backward ran before it"),
    "never empties": (
        _never_empties,
        "update 2 is made of micro-batches 1, 2, 3, 4, 5 and 6, and should be made of "
        "micro-batches 4, 5 and 6",
    ),
    "a last slice that begins early": (
        partial(_sliced_windows, back=3),
        "update 3 is made of micro-batches 4, 5, 6 and 7, and should be made of micro-batch 7:",
    ),
    "stops before a full window": (
        partial(_sliced_windows, stops=1),
        "windows of 3 the last window is full, and no update is made of it",
    ),
    "no step for the rest": (_no_step_for_the_rest, r"has its loss in the list, but no step\(\)"),
    "pairs": (
        partial(_sliced_windows, loss=lambda mean, held: (mean, len(held))),
        "updates are right, but the first of the losses is a sequence of length 2",
    ),
}
WRONG["3.7"] |= {
    "split, read twice": (
        _split_read_twice,
        "not yet: no backward goes through a loss of loss_and_count. If",
    ),
    "step first": (
        _64_in_another_order(("step", "zero_grad", "backward")),
        r"not yet: step\(\) runs before backward",
    ),
    "zero first": (
        _64_in_another_order(("backward", "zero_grad", "step")),
        "although backward ran before it",
    ),
}
RIGHT["3.7"] |= {
    "zeroes first": _64_in_another_order(("zero_grad", "backward", "step", "zero_grad"))
}


def _no_copies(model, batch, accumulate):
    """Both lists hold the same tensors."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    found = []
    for pieces in ([batch], list(split(batch, 3))):
        model.zero_grad(set_to_none=False)
        accumulate(pieces)
        found.append([p.grad for p in model.parameters()])
    off = sum((a - b).square().sum() for a, b in zip(*found, strict=True)).sqrt()
    model.zero_grad()
    for module, mode in modes.items():
        module.training = mode
    return off.item()


WRONG["3.9"] |= {"no copies": (_no_copies, "not yet: the error is 0 for every loop")}


def _after_the_step(model, optimizer, batch):
    rows = len(batch[1])
    for x, y in split(batch, 8):
        (F.cross_entropy(model(x), y, reduction="sum") / rows).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        return sum(entropy_of(model(x)).item() for x, _ in split(batch, 16)) / rows


def _keeps_the_logits(model, optimizer, batch):
    rows, logits = len(batch[1]), []
    for x, y in split(batch, 8):
        outputs = model(x)
        (F.cross_entropy(outputs, y, reduction="sum") / rows).backward()
        logits.append(outputs.detach())
    optimizer.step()
    optimizer.zero_grad()
    return entropy_of(torch.cat(logits)).item() / rows


WRONG["3.10"] |= {
    "after the step": (answer(8, _after_the_step), "entropy is that of the model after the step"),
    "keeps the logits": (
        answer(8, _keeps_the_logits),
        "logits or probabilities of too many rows are alive at once",
    ),
}


def _sliding_windows(model, optimizer, micro_batches, window, loss_and_count):
    """Each update begins one micro-batch after the update before it."""
    given, losses = list(micro_batches), []
    for i in range(len(given)):
        losses.append(_window(given[i : i + window], loss_and_count))
        optimizer.step()
        optimizer.zero_grad()
    return losses


WRONG["3.4"] |= {"sliding windows": (_sliding_windows, "micro-batches are in several of them")}


def _clips_added_means(model, optimizer, micro_batches, loss_and_count, max_norm):
    for micro in micro_batches:
        loss, count = loss_and_count(micro)
        (loss / max(count, 1)).backward()
    norm = clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


WRONG["3.6"] |= {"added means": (_clips_added_means, "the mean over all items of the window")}
