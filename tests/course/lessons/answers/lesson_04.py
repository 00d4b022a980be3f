"""Answers to the exercises of lesson 04 as people write them; see lesson_00.py."""

import math
from functools import partial

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from gradmem_lib import best_segments, checkpoint_layers
from gradmem_lib.techniques.schedules import uniform_segments

RIGHT, WRONG = {}, {}


def _function(forward=None, backward=None):
    def keeps(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    made = {"forward": staticmethod(forward or keeps), "backward": staticmethod(backward or _again)}
    return type("Checkpoint", (torch.autograd.Function,), made)


def _again(
    ctx,
    gradient,
    *,
    change=lambda x: x.detach().requires_grad_(),
    back=lambda x: (None, x.grad),
    times=1,
):
    x = change(ctx.saved_tensors[0])
    for _ in range(times):
        with torch.enable_grad():
            out = ctx.run(x)
    torch.autograd.backward(out, gradient)
    return back(x)


def _held(ctx, run, x):
    ctx.run, ctx.x = run, x
    return run(x)


def _of_held(ctx, gradient):
    x = ctx.x.detach().clone().requires_grad_(True)
    with torch.set_grad_enabled(True):
        ctx.run(x).backward(gradient)
    return None, x.grad


def _by_parameters(ctx, gradient):
    x = ctx.saved_tensors[0].detach().requires_grad_()
    with torch.enable_grad():
        out = ctx.run(x)
    held = [p for p in ctx.run.parameters() if p.requires_grad]
    first, *rest = torch.autograd.grad(out, [x, *held], gradient)
    for p, g in zip(held, rest, strict=True):
        p.grad = g if p.grad is None else p.grad + g
    return None, first


def _clone(ctx, run, x):
    ctx.run = run
    ctx.save_for_backward(x * 1.0)
    return run(x)


def _no_output(ctx, run, x):
    ctx.run = run
    ctx.save_for_backward(x)
    return x.clone()


def _everything(ctx, run, x):
    ctx.run = run
    ctx.kept = []
    for part in run:
        ctx.kept.append(x)
        x = part(x)
    ctx.save_for_backward(ctx.kept[0])
    return x


def _from_no_gradient(ctx, gradient):
    x = ctx.saved_tensors[0].detach().requires_grad_()
    with torch.enable_grad():
        out = ctx.run(x)
    out.backward()
    return None, x.grad


RIGHT["4.1"] = {
    "attribute": _function(_held, _of_held),
    "autograd.grad": _function(backward=_by_parameters),
    "backward of out": _function(backward=_of_held, forward=_held),
}
WRONG["4.1"] = {
    "a copy of x": (_function(_clone), "no clone or copy"),
    "no output": (_function(_no_output), "output is not that of run"),
    "everything": (_function(_everything), "keep"),
    "twice again": (_function(backward=partial(_again, times=2)), "more often than needed"),
    "the incoming": (
        _function(backward=lambda ctx, g: _again(ctx, g, back=lambda x: (None, g))),
        "not that of x",
    ),
    "swapped": (
        _function(backward=lambda ctx, g: _again(ctx, g, back=lambda x: (x.grad, None))),
        "in their order",
    ),
    "three values": (
        _function(backward=lambda ctx, g: _again(ctx, g, back=lambda x: (None, x.grad, x.grad))),
        "not yet: backward returns a gradient for each argument of forward",
    ),
    "no incoming gradient": (
        _function(backward=_from_no_gradient),
        "not yet: the output is no single number: backward on it starts from the incoming",
    ),
    "the tuple": (
        _function(backward=lambda ctx, g: (None, ctx.saved_tensors.detach())),
        "not yet: ctx.saved_tensors is a tuple",
    ),
    "saves run": (
        _function(lambda ctx, run, x: (ctx.save_for_backward(run, x), run(x))[1]),
        "not yet: save_for_backward keeps tensors only",
    ),
    "no detach": (_function(backward=partial(_again, change=lambda x: x)), "detach|earlier layers"),
}


def _safe(before=torch.get_rng_state, backward=None, run=lambda run, x: run(x)):
    def forward(ctx, run_, x):
        ctx.state, ctx.run = before(), run_
        ctx.save_for_backward(x)
        return run(run_, x)

    return _function(forward, backward or _from_state)


def _from_state(ctx, gradient):
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(ctx.state)
        return _again(ctx, gradient)


def _put_back(ctx, gradient):
    now = torch.get_rng_state()
    try:
        torch.set_rng_state(ctx.state)
        return _again(ctx, gradient)
    finally:
        torch.set_rng_state(now)


def _not_put_back(ctx, gradient):
    torch.set_rng_state(ctx.state)
    return _again(ctx, gradient)


def _seeded(run, x):
    torch.manual_seed(1)
    return run(x)


def _twice(run, x):
    run(x)
    return run(x)


def _no_state(ctx, gradient):
    with torch.random.fork_rng(devices=[]):
        return _again(ctx, gradient)


RIGHT["4.2"] = {
    "cloned": _safe(lambda: torch.get_rng_state().clone()),
    "put back": _safe(backward=_put_back),
    "generator": _safe(torch.default_generator.get_state),
}
WRONG["4.2"] = {
    "no state": (_safe(backward=_no_state), "other (dropout )?masks"),
    "not put back": (_safe(backward=_not_put_back), "rest of the program"),
    "seeded": (_safe(run=_seeded), "first run"),
    "run twice": (_safe(run=_twice), "first run"),
    "initial seed": (
        _safe(lambda: torch.Generator().manual_seed(torch.initial_seed() % 1000).get_state()),
        "other masks",
    ),
    "plain": (_safe(backward=_again), "other (dropout )?masks"),
}


def _frozen(
    embedding, layers, ids, *, first=lambda x: x.requires_grad_(), each=None, reentrant=True
):
    x = first(embedding(ids))
    for i, layer in enumerate(layers):
        x = each(i, layer, x) if each else checkpoint(layer, x, use_reentrant=reentrant)
    return x


def _all_from_the_first(e, layers, ids):
    x = out = e(ids).requires_grad_()
    for layer in layers:
        out = checkpoint(layer, x, use_reentrant=True)
    return out


def _detached_once(i, layer, x):
    return checkpoint(layer, x.detach().requires_grad_() if i == 2 else x, use_reentrant=True)


def _looked_at_before(i, layer, x):
    layer(x)
    return checkpoint(layer, x, use_reentrant=True)


def _each_twice(i, layer, x):
    return checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)


RIGHT["4.3"] = {
    "detached": partial(_frozen, first=lambda x: x.detach().requires_grad_(True)),
    "clone": partial(_frozen, first=lambda x: x.clone().requires_grad_()),
    "added": partial(_frozen, first=lambda x: x + torch.zeros_like(x, requires_grad=True)),
}
WRONG["4.3"] = {
    "other kind": (partial(_frozen, first=lambda x: x, reentrant=False), "non-reentrant"),
    "other kind, required": (partial(_frozen, reentrant=False), "non-reentrant"),
    "trap": (partial(_frozen, first=lambda x: x), "no layer gets a gradient"),
    "early": (
        lambda e, layers, ids: _frozen(e, layers[:1], ids),
        "layer 2 and layer 3 and layer 4 never run",
    ),
    "backwards": (lambda e, layers, ids: _frozen(e, layers[::-1], ids), "wrong order"),
    "no grad": (lambda *a: torch.no_grad()(_frozen)(*a), r"torch.no_grad\(\)"),
    "plain": (partial(_frozen, each=lambda i, layer, x: layer(x)), "nothing is checkpointed"),
    "last plain": (
        partial(
            _frozen,
            each=lambda i, layer, x: (
                layer(x) if i == 3 else checkpoint(layer, x, use_reentrant=True)
            ),
        ),
        "layer 4 runs once",
    ),
    "one for all": (
        lambda e, layers, ids: checkpoint(layers, e(ids).requires_grad_(), use_reentrant=True),
        "have its own",
    ),
    "all from the first": (
        _all_from_the_first,
        "not yet: layer 1 and layer 2 and layer 3 get no gradient",
    ),
    "detached once": (
        partial(_frozen, each=_detached_once),
        "not yet: layer 1 and layer 2 get no gradient",
    ),
    "looked at before": (partial(_frozen, each=_looked_at_before), "not yet: layer 1 runs 3 times"),
    "each twice": (partial(_frozen, each=_each_twice), "not yet: layer 1 runs 4 times"),
    "outputs alone": (
        partial(
            _frozen,
            first=lambda x: x,
            each=lambda i, layer, x: checkpoint(layer, x, use_reentrant=True).requires_grad_(),
        ),
        "the first layer gets no gradient",
    ),
    "two and two": (
        lambda e, layers, ids: _frozen(e, [layers[:2], layers[2:]], ids),
        "several layers are in one checkpoint",
    ),
    "detached in between": (
        partial(
            _frozen,
            each=lambda i, layer, x: checkpoint(
                layer, x.detach().requires_grad_(), use_reentrant=True
            ),
        ),
        "cuts the chain",
    ),
}


def _segments(
    layers,
    x,
    k,
    *,
    starts=lambda n, k: range(0, n, k),
    length=lambda k: k,
    reentrant=False,
    before=lambda x: x,
):
    for start in starts(len(layers), k):
        x = checkpoint(layers[start : start + length(k)], before(x), use_reentrant=reentrant)
    return x


def _chunked(layers, x, k):
    groups = [list(layers)[i : i + k] for i in range(0, len(layers), k)]

    def through(group):
        def run(h):
            for layer in group:
                h = layer(h)
            return h

        return run

    for group in groups:
        x = checkpoint(through(group), x, use_reentrant=False)
    return x


RIGHT["4.4"] = {
    "groups": _chunked,
    "while": lambda layers, x, k: _segments(
        layers, x, k, starts=lambda n, k: [i for i in range(n) if i % k == 0]
    ),
    "as it stands": _segments,
}
WRONG["4.4"] = {
    "floor": (
        partial(_segments, starts=lambda n, k: range(0, n - n % k, k)),
        "left out|IndexError|never run",
    ),
    "one too short": (partial(_segments, length=lambda k: k - 1), "left out"),
    "overlap": (partial(_segments, length=lambda k: k + 1), "run|layers|segments"),
    "reentrant": (partial(_segments, reentrant=True), "use_reentrant=False"),
    "required": (
        partial(
            _segments, reentrant=True, before=lambda x: x if x.requires_grad else x.requires_grad_()
        ),
        "changed `x` in place",
    ),
    "not handed on": (
        lambda layers, x, k: [
            checkpoint(layers[i : i + k], x, use_reentrant=False) for i in range(0, len(layers), k)
        ][-1],
        "what the one before returned",
    ),
    "unused": (
        lambda layers, x, k: (_segments(layers, x, k), x)[1],
        "not what the last checkpoint returned",
    ),
    "detached": (partial(_segments, before=lambda x: x.detach().requires_grad_()), "detach"),
    "layer by layer": (lambda layers, x, k: _segments(layers, x, 1), r"your segments have \[1, 1"),
    "all at once": (
        lambda layers, x, k: checkpoint(layers, x, use_reentrant=False),
        r"your segments have \[8\]",
    ),
}

RIGHT["4.5"] = {
    "loop": lambda m, a, x: max([m[i] * a + x * i for i in range(len(m))]),
    "float": lambda m, a, x: float(max(i * x + n * a for i, n in enumerate(m))),
    "tensor": lambda m, a, x: (torch.tensor(m) * a + torch.arange(len(m)) * x).max(),
}
WRONG["4.5"] = {
    "sum": (lambda m, a, x: sum(m) * a, "all layers"),
    "from one": (
        lambda m, a, x: max(i * x + n * a for i, n in enumerate(m, 1)),
        "own boundary twice",
    ),
    "inside": (
        lambda m, a, x: max(i * x + n * (a - x) for i, n in enumerate(m)),
        "x is taken off a",
    ),
    "longest": (lambda m, a, x: max(m) * a, "segment that runs again"),
    "first": (lambda m, a, x: (len(m) - 1) * x + m[0] * a, "first length"),
    "mean": (lambda m, a, x: (len(m) - 1) * x + sum(m) / len(m) * a, "mean length"),
    "not the largest": (lambda m, a, x: (len(m) - 1) * x + max(m) * a, "adds all boundaries"),
    "minimum": (lambda m, a, x: min(i * x + n * a for i, n in enumerate(m)), "needs least"),
    "the first longest": (
        lambda m, a, x: m.index(max(m)) * x + max(m) * a,
        "^(?!.*(no effect|not the boundaries))",
    ),
}


def _root(n, a, x, whole=round):
    return min(n, max(1, whole(math.sqrt(n * x / a))))


RIGHT["4.6"] = {
    "by trying": lambda n, a, x: min(
        range(1, n + 1),
        key=lambda k: max(i * x + m * a for i, m in enumerate(uniform_segments(n, k))),
    ),
    "numpy": lambda n, a, x: (
        np.argmin(
            [
                max(i * x + m * a for i, m in enumerate(uniform_segments(n, k)))
                for k in range(1, n + 1)
            ]
        )
        + 1
    ),
    "float": lambda n, a, x: float(RIGHT["4.6"]["by trying"](n, a, x)),
}
WRONG["4.6"] = {
    "ceil": (partial(_root, whole=math.ceil), "rounds up"),
    "floor": (partial(_root, whole=math.floor), "rounds down"),
    "root of n": (lambda n, a, x: max(1, math.isqrt(n)), "√n"),
    "swapped": (lambda n, a, x: round(math.sqrt(n * a / x)), "not yet: a and x are swapped"),
    "number of segments": (lambda n, a, x: n // _root(n, a, x), "number of segments|peak"),
    "none": (lambda n, a, x: math.sqrt(n) < 0 or None, "return"),
    "fraction": (lambda n, a, x: math.sqrt(n * x / a), "whole number"),
    "n": (lambda n, a, x: n, "peak"),
    "root of the bytes": (
        lambda n, a, x: max(1, min(n, round(math.sqrt(a * n) / x))),
        "segments of one layer are too short",
    ),
}


COUNTED = best_segments(64, internal=[4] * 63 + [25], boundary=1, temporaries=[9] * 63 + [0])


def _step(layers, x, every=COUNTED, loss=lambda out: out.square().mean()):
    with checkpoint_layers(layers, every):
        found = loss(layers(x))
        found.backward()
    return found.item()


def _filled(layers, x, limit=40):
    """By hand: each segment takes as many layers as fit beside the boundaries before it."""
    h, start, waiting = x, 0, 0
    while start < 63:
        length = (limit - 9 - waiting) // 5
        h = checkpoint(layers[start : min(start + length, 63)], h, use_reentrant=False)
        start, waiting = start + length, waiting + 1
    loss = layers[-1](h).square().mean()
    loss.backward()
    return loss.detach()


def _head_apart(layers, x):
    lengths = best_segments(63, 4, 1, temporaries=9, tail=25, keep_last=False)
    with checkpoint_layers(layers[:63], lengths, keep_last=False):
        loss = (layers(x) ** 2).mean()
        loss.backward()
    return np.float64(loss.item())


RIGHT["4.7"] = {
    "with": _step,
    "by hand": _filled,
    "head apart": _head_apart,
    "logits three times": partial(
        _step, every=best_segments(64, internal=[4] * 63 + [15], boundary=1)
    ),
}
WRONG["4.7"] = {
    "layers alone": (
        partial(_step, every=best_segments(64, internal=4, boundary=1)),
        "layers alone",
    ),
    "logits twice": (
        partial(_step, every=best_segments(64, internal=[4] * 63 + [10], boundary=1)),
        "17 boundaries are kept",
    ),
    "sixes": (partial(_step, every=6), "equal segments of 6"),
    "layers": (partial(_step, every=1), "its own segment"),
    "reversed": (partial(_step, every=COUNTED[::-1]), "15 boundaries|The last segment needs most"),
    "too long": (
        partial(_step, every=best_segments(64, internal=[4] * 63 + [22], boundary=1)),
        "gradients take",
    ),
    "sum": (partial(_step, loss=lambda out: out.square().sum()), "loss"),
    "measured": (partial(_step, every="best"), "times, and twice is the limit"),
    "no backward": (lambda layers, x: layers(x).square().mean().item(), "gradient of the input"),
}


def _leaves(what):
    """Segments, and ``what(layers, segment, x)`` after each of them."""

    def run_in_segments(layers, x, k):
        for start in range(0, len(layers), k):
            segment = layers[start : start + k]
            x = checkpoint(segment, x, use_reentrant=False)
            what(layers, segment, x)
        return x

    return run_in_segments


def _wraps(layers, segment, x):
    segment[0].forward = segment[0].forward


WRONG["4.4"] |= {
    "an output on the layers": (
        _leaves(lambda layers, segment, x: setattr(layers, "last", x)),
        "an attribute 'last' that was not there",
    ),
    "a forward of its own": (_leaves(_wraps), "an attribute 'forward' that was not there"),
}
RIGHT["4.4"] |= {
    "a number on the layers": _leaves(lambda layers, segment, x: setattr(layers, "k", 1)),
    "a local name": _leaves(lambda layers, segment, x: len(segment)),
}


def _backward_after_the_block(layers, x):
    lengths = best_segments(64, [4] * 63 + [25], 1, temporaries=[9] * 63 + [0])
    with checkpoint_layers(layers, lengths):
        loss = layers(x).square().mean()
    loss.backward()
    return loss.item()


RIGHT["4.7"] |= {"backward after the block": _backward_after_the_block}


def _least(n, a, x, *, of=min, peak=False):
    """The length with the lowest peak, or that peak."""
    peaks = {}
    for k in range(n, 0, -1):
        segments = [k] * (n // k) + [n % k] * (n % k > 0)
        peaks[k] = max(i * x + m * a for i, m in enumerate(segments))
    best = of(peaks, key=peaks.get)
    return peaks[best] if peak else best


def _clamped(length):
    return lambda n, a, x: min(n, max(1, round(length(n, a, x))))


RIGHT["4.6"] |= {
    "from the longest one": _least,
    "a number of numpy": lambda *given: np.int32(_least(*given)),
    "two costs": lambda n, a, x: min(range(1, n + 1), key=lambda k: n / k * x + k * a),
}
WRONG["4.6"] |= {
    "the peak": (partial(_least, peak=True), "this is the lowest peak, in bytes"),
    "the highest": (partial(_least, of=max), "the highest peak of all"),
    "no root": (_clamped(lambda n, a, x: n * x / a), "the root is missing"),
    "bytes in boundaries": (_clamped(lambda n, a, x: a / x), "does not depend on n"),
    "twice the root": (_clamped(lambda n, a, x: math.sqrt(4 * n * x / a)), r"twice √"),
    "a logarithm": (_clamped(lambda n, a, x: math.log2(n)), "the logarithm of n"),
    "how many segments": (lambda *given: -(-given[0] // _least(*given)), "number of segments"),
}


def _at_most(layers):
    """``layers``: of segment i, from all lengths."""
    return lambda lengths, a, x: max(i * x + layers(lengths, i) * a for i in range(len(lengths)))


RIGHT["4.5"] |= {
    "sorted": lambda lengths, a, x: sorted(i * x + m * a for i, m in enumerate(lengths))[-1],
    "tensors": lambda lengths, a, x: (
        torch.tensor(lengths) * a + torch.arange(len(lengths)) * x
    ).max(),
}
WRONG["4.5"] |= {
    "one layer more": (_at_most(lambda lengths, i: lengths[i] + 1), "one layer too many"),
    "with the one before": (
        _at_most(lambda lengths, i: sum(lengths[max(0, i - 1) : i + 1])),
        "two segments are counted in full at once",
    ),
}


def _keeps_its_own_output(ctx, run, x):
    with torch.enable_grad():
        ctx.x, ctx.out = x, run(x)
    return ctx.out


def _of_its_own_output(ctx, gradient):
    torch.autograd.backward(ctx.out, gradient)
    return None, ctx.x.grad


def _nothing_saved(ctx, run, x):
    ctx.run = run
    return run(x)


def _unpacked(ctx, gradient):
    (x,) = ctx.saved_tensors
    return _again(ctx, gradient, change=lambda _: x.detach().requires_grad_())


def _replaces_those_that_require_one(ctx, gradient):
    x = ctx.saved_tensors[0].detach().requires_grad_()
    with torch.enable_grad():
        out = ctx.run(x)
    held = [p for p in ctx.run.parameters() if p.requires_grad]
    first, *rest = torch.autograd.grad(out, [x, *held], gradient)
    for p, g in zip(held, rest, strict=True):
        p.grad = g
    return None, first


def _sets_gradients_to_none(ctx, gradient):
    ctx.run.zero_grad()
    return _again(ctx, gradient)


WRONG["4.1"] |= {
    "backward of the output that forward returns": (
        _function(_keeps_its_own_output, _of_its_own_output),
        "not yet: backward calls itself",
    ),
    "no return": (
        _function(backward=lambda ctx, g: _again(ctx, g, back=lambda x: None)),
        "Without a `return` it returns one value",
    ),
    "nothing saved": (
        _function(_nothing_saved, _unpacked),
        "not yet: ctx.saved_tensors is empty if forward",
    ),
    "replaces gradients": (
        _function(backward=_replaces_those_that_require_one),
        r"the gradient that a weight had in .grad before is lost",
    ),
    "gradients to None": (
        _function(backward=_sets_gradients_to_none),
        r"the gradient that a weight had in .grad before is lost",
    ),
}
WRONG["4.3"] |= {
    "ids that require a gradient": (
        lambda e, layers, ids: _frozen(e, layers, ids.requires_grad_()),
        "not yet: token ids are whole numbers",
    ),
}


def _functions_of_a_loop(layers, x, k):
    functions = []
    for start in range(0, len(layers), k):
        functions.append(lambda h: layers[start : start + k](h))  # noqa: B023
    for function in functions:
        x = checkpoint(function, x, use_reentrant=False)
    return x


WRONG["4.4"] |= {
    "a list of functions": (
        _functions_of_a_loop,
        "not yet: the last segment runs in place of every segment",
    ),
    "checkpoint_sequential in k segments": (
        lambda layers, x, k: checkpoint_sequential(layers, k, x, use_reentrant=False),
        "not yet: the step of a range is 0",
    ),
    "called in the argument": (
        lambda layers, x, k: checkpoint(layers[:k](x), x, use_reentrant=False),
        "not yet: a tensor is called like a function",
    ),
    "the last segment alone": (
        lambda layers, x, k: checkpoint(layers[-k:], x, use_reentrant=False),
        "not yet: 4 of 8 layers are left out",
    ),
}
WRONG["4.5"] |= {
    "whole mean": (
        lambda m, a, x: (len(m) - 1) * x + sum(m) // len(m) * a,
        "not yet: the mean length is used",
    ),
    "segments for layers": (
        lambda m, a, x: (len(m) - 1) * x + len(m) * a,
        "not yet: segments are counted where their layers should be",
    ),
    "the last one not run again": (
        lambda m, a, x: max([i * x + n * a for i, n in enumerate(m[:-1])], default=0),
        "not yet: the last segment is left out",
    ),
}


def _named_output(layers, x):
    with checkpoint_layers(layers, COUNTED):
        out = layers(x)
        loss = out.square().mean()
        loss.backward()
    return loss.item()


def _every_second_layer(layers, x):
    for i, layer in enumerate(layers):
        x = checkpoint(layer, x, use_reentrant=False) if i % 2 else layer(x)
    loss = x.square().mean()
    loss.backward()
    return loss.item()


WRONG["4.7"] |= {
    "a name for the output": (
        _named_output,
        "not yet: these segments fit, and something else is alive",
    ),
    # As many bytes at the peak as the best lengths for the layers alone.
    "sixes and fives": (
        partial(_step, every=[6] * 8 + [5] * 3 + [1]),
        "not yet: your segments have .* 5, 1 layers. Segment 8 needs most, 46 boundaries",
    ),
    "threes": (partial(_step, every=[3] * 21 + [1]), "not yet: equal segments of 3"),
    # As many bytes at the peak as the best equal segments.
    "a head of 30": (
        partial(_step, every=best_segments(64, [4] * 63 + [30], 1, temporaries=[9] * 63 + [0])),
        "not yet: your segments have .* Segment 5 needs most, 43 boundaries",
    ),
    "short ones first": (
        partial(_step, every=[1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 8, 9, 10]),
        "9, 10 layers. The last segment needs most",
    ),
    "every second layer": (_every_second_layer, "the numbers are right, the bytes are too many"),
}
