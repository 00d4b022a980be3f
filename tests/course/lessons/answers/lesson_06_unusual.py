"""Answers to the exercises of lesson 06 that nobody had in mind when its checks were written."""

import torch
import torch.nn.functional as F

from gradmem_lib import checkpoint_layers, split

RIGHT, WRONG = {}, {}


def _read(context=None, others=None, in_pieces=None):
    def read_error(asked, total, free, process, allocated, idle):
        given = asked, total, free, process, allocated, idle
        return {
            "context": context(*given) if context else process - (allocated + idle),
            "others": others(*given) if others else total - (free + process),
            "in_pieces": in_pieces(*given) if in_pieces else asked <= free + idle,
        }

    return read_error


RIGHT["6.1"] = {
    "a truth of torch": _read(in_pieces=lambda a, t, f, p, al, i: torch.tensor(f + i) >= a),
}
WRONG["6.1"] = {
    "GiB": (
        _read(
            context=lambda a, t, f, p, al, i: (p - al - i) / 2**30,
            others=lambda a, t, f, p, al, i: (t - f - p) / 2**30,
        ),
        "look like GiB",
    ),
    "free alone": (_read(in_pieces=lambda a, t, f, p, al, i: f >= a), "always False here"),
    "the whole card": (_read(in_pieces=lambda a, t, f, p, al, i: t >= a), "always True here"),
    "others with context": (
        _read(others=lambda a, t, f, p, al, i: t - f - al - i),
        "this process's context",
    ),
    "words": (
        _read(in_pieces=lambda a, t, f, p, al, i: "yes" if f + i >= a else "no"),
        "True or False",
    ),
}


def _rows(step=(), grows=("activations", "temporaries", "other"), factor=None, best=max):
    def with_rows(moments, rows, new):
        f = factor(rows, new) if factor else new / rows
        return best(
            sum(
                n * (f if name in (step if phase == "optimizer_step" else grows) else 1)
                for name, n in parts.items()
            )
            for phase, parts in moments.items()
        )

    return with_rows


RIGHT["6.2"] = {
    "comprehensions": _rows(),
}
WRONG["6.2"] = {
    "whole rows": (_rows(factor=lambda r, n: n // r), "rounded to a whole number"),
    "without other": (_rows(grows=("activations", "temporaries")), "other"),
    "states": (
        _rows(grows=("activations", "temporaries", "other", "optimizer")),
        "states are scaled",
    ),
}


def _summed(model, images, labels):
    return F.cross_entropy(model(images), labels, reduction="sum")


def _small(model, optimizer, images, labels, *, size=6, weight=None, zero="after", drop=False):
    total = 0.0
    pieces = list(zip(images.split(size), labels.split(size), strict=True))
    for x, y in pieces:
        if drop and len(x) < size:
            continue
        part = weight(model, x, y, len(pieces)) if weight else _summed(model, x, y) / len(images)
        part.backward()
        total += part.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


RIGHT["6.3"] = {"splits of 6": _small}
WRONG["6.3"] = {
    "the rest dropped": (lambda *a: _small(*a, size=8, drop=True), "24 of 30 rows"),
    "means of 8": (
        lambda *a: _small(*a, size=8, weight=lambda m, x, y, k: F.cross_entropy(m(x), y) / k),
        "same weight",
    ),
    "sum over the piece": (
        lambda *a: _small(*a, size=8, weight=lambda m, x, y, k: _summed(m, x, y) / 8),
        "divide|30|times",
    ),
}


def _t5(weight, size=2, layers=True):
    def train_t5(model, optimizer, batch):
        n = int((batch["labels"] != -100).sum())
        total = 0.0
        for micro in split(batch, size):
            own = int((micro["labels"] != -100).sum())
            with checkpoint_layers(model, 1):
                part = model(**micro).loss * weight(own, n, len(batch["labels"]) / size)
                part.backward()
            total += part.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return train_t5


RIGHT["6.4"] = {"twos": _t5(lambda own, n, k: own / n)}
WRONG["6.4"] = {
    "upside down": (_t5(lambda own, n, k: n / own / k), "upside down"),
}


def _is_step(phase):
    return phase == "optimizer_step"


def _next(order=None, rows_from=1, takes=None, at_most=True, is_step=_is_step):
    def next_technique(phase, parts, rows, card):
        step = is_step(phase)
        p = parts
        states = p["optimizer"] + (p["temporaries"] if step else 0)
        table = {
            "micro-batches": 0
            if step or rows <= rows_from
            else p["activations"] + p["temporaries"] + (takes == "other" and p.get("other", 0)),
            "checkpointing": 0 if step else p["activations"],
            "8-bit states": states * (0.75 if takes == "three quarters" else 1),
            "LoRA": states + p["gradients"],
            "QLoRA": states
            + p["gradients"]
            + p["parameters"] * (0.75 if takes == "three quarters" else 1),
        }
        whole = sum(p.values())
        for name in order or table:
            left = whole - table[name]
            if left <= card if at_most else left < card:
                return name
        return "none"

    return next_technique


RIGHT["6.6"] = {"a loop": _next()}
WRONG["6.6"] = {
    "below": (_next(at_most=False), "exactly `card`"),
    "forward as the step": (
        _next(is_step=lambda phase: phase != "backward"),
        "forward is treated as the optimizer's step",
    ),
    "8 bits keep a quarter": (_next(takes="three quarters"), "leave a quarter"),
    "checkpoints first": (
        _next(["checkpointing", "micro-batches", "8-bit states", "LoRA", "QLoRA"]),
        "micro-batches are cheaper",
    ),
}


WRONG["6.1"] |= {
    "more than": (_read(in_pieces=lambda a, t, f, p, al, i: f + i > a), "compare with >="),
    "idle blocks added": (
        _read(context=lambda a, t, f, p, al, i: p - al + i),
        "added to the context",
    ),
    "idle blocks of others": (
        _read(others=lambda a, t, f, p, al, i: t - f - p - i),
        "subtracted from the others' memory",
    ),
}
WRONG["6.2"] |= {
    "without the step": (
        lambda moments, rows, new: max(
            sum(n * new / rows if k in ("activations", "temporaries", "other") else n for k, n in m)
            for phase, m in ((phase, parts.items()) for phase, parts in moments.items())
            if phase != "optimizer_step"
        ),
        "the optimizer's step is left out",
    ),
}
