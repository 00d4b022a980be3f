"""Answers to the exercises of lesson 04 that nobody had in mind when its checks were written."""

import math

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from gradmem_lib import best_segments, checkpoint_layers, uniform_segments
from gradmem_lib.course.lessons.lesson_04.exercises import Checkpoint
from gradmem_lib.course.lessons.lesson_04.exercises_lengths import kept_at_peak

RIGHT, WRONG = {}, {}


def _function(forward, backward):
    """A class of its own for each answer."""
    return type(
        "Checkpoint",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )


def _keep(ctx, run, x):
    ctx.save_for_backward(x)
    ctx.run = run
    return run(x)


def _again(ctx):
    (x,) = ctx.saved_tensors
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        return x, ctx.run(x)


def _weights_by_grad(ctx, gradient):
    """Gradients by autograd.grad, added to the weights by hand."""
    x, out = _again(ctx)
    weights = [p for p in getattr(ctx.run, "parameters", lambda: [])() if p.requires_grad]
    found = torch.autograd.grad(out, [x, *weights], gradient, allow_unused=True)
    for p, g in zip(weights, found[1:], strict=True):
        if g is not None:
            p.grad = g if p.grad is None else p.grad + g
    return None, found[0]


def _by_vjp(ctx, gradient):
    """The product with the gradient is a number whose backward is asked for."""
    x, out = _again(ctx)
    with torch.enable_grad():
        torch.einsum("i,i->", out.flatten(), gradient.flatten()).backward()
    return None, x.grad


def _setup(run, x):
    return run(x)


def _with_setup():
    def forward(run, x):
        return run(x)

    def setup_context(ctx, inputs, output):
        ctx.run, x = inputs
        ctx.save_for_backward(x)

    def backward(ctx, gradient):
        x, out = _again(ctx)
        out.backward(gradient)
        return None, x.grad

    made = _function(forward, backward)
    made.setup_context = staticmethod(setup_context)
    return made


def _overwrites(ctx, gradient):
    """The weights get the new gradient in place of the sum."""
    x, out = _again(ctx)
    weights = [p for p in getattr(ctx.run, "parameters", lambda: [])()]
    found = torch.autograd.grad(out, [x, *weights], gradient, allow_unused=True)
    for p, g in zip(weights, found[1:], strict=True):
        p.grad = g
    return None, found[0]


def _mean(ctx, gradient):
    x, out = _again(ctx)
    torch.autograd.backward(out, gradient / gradient.numel())
    return None, x.grad


def _ones(ctx, gradient):
    x, out = _again(ctx)
    out.backward(torch.ones_like(out))
    return None, x.grad


def _output_kept(ctx, run, x):
    ctx.run = run
    out = run(x)
    ctx.save_for_backward(x, out)
    return out


def _runs_twice_in_forward(ctx, run, x):
    run(x)
    return _keep(ctx, run, x)


def _plain(ctx, gradient):
    x, out = _again(ctx)
    torch.autograd.backward(out, gradient)
    return None, x.grad


def _plain_of_two(ctx, gradient):
    x = ctx.saved_tensors[0].detach().requires_grad_()
    with torch.enable_grad():
        out = ctx.run(x)
    out.backward(gradient)
    return None, x.grad


RIGHT["4.1"] = {
    "grad, added by hand": _function(_keep, _weights_by_grad),
    "einsum": _function(_keep, _by_vjp),
    "setup_context": _with_setup(),
}
WRONG["4.1"] = {
    "overwrites": (_function(_keep, _overwrites), "replaces the one"),
    "a mean": (_function(_keep, _mean), "incoming gradient"),
    "ones": (_function(_keep, _ones), "incoming gradient"),
    "output kept": (_function(_output_kept, _plain_of_two), "more than x is kept"),
    "twice in forward": (_function(_runs_twice_in_forward, _plain), "more often than needed"),
}


def _safe(forward, backward):
    return _function(forward, backward)


def _forward_state(ctx, run, x):
    ctx.state = torch.random.get_rng_state().clone()
    return Checkpoint.forward(ctx, run, x)


def _forked(ctx, gradient):
    before = torch.random.get_rng_state()
    try:
        torch.random.set_rng_state(ctx.state)
        return Checkpoint.backward(ctx, gradient)
    finally:
        torch.random.set_rng_state(before)


def _seed(ctx, run, x):
    ctx.seed = int(torch.randint(2**31, ()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(ctx.seed)
        return Checkpoint.forward(ctx, run, x)


def _by_seed(ctx, gradient):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(ctx.seed)
        return Checkpoint.backward(ctx, gradient)


def _in_eval(ctx, gradient):
    if hasattr(ctx.run, "eval"):
        ctx.run.eval()
    try:
        return Checkpoint.backward(ctx, gradient)
    finally:
        if hasattr(ctx.run, "train"):
            ctx.run.train()


RIGHT["4.2"] = {"try and finally": _safe(_forward_state, _forked)}
WRONG["4.2"] = {
    "a seed of its own": (_safe(_seed, _by_seed), "seed|forward|other numbers|draws"),
    "in eval mode": (_safe(_forward_state, _in_eval), "draws other masks"),
}


def _frozen(embedding, layers, ids):
    from functools import reduce

    x = embedding(ids)
    x.requires_grad = True
    return reduce(lambda h, layer: checkpoint(layer, h, use_reentrant=True), layers, x)


def _zeros_added(embedding, layers, ids):
    x = embedding(ids) + torch.zeros(1, requires_grad=True)
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=True)
    return x


def _embeds_by_hook(embedding, layers, ids):
    handle = embedding.register_forward_hook(lambda module, args, out: out.requires_grad_())
    x = embedding(ids)
    handle.remove()
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=True)
    return x


def _hook_left(embedding, layers, ids):
    embedding.register_forward_hook(lambda module, args, out: out.requires_grad_())
    x = embedding(ids)
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=True)
    return x


RIGHT["4.3"] = {"reduce": _frozen, "zeros": _zeros_added, "a hook": _embeds_by_hook}
WRONG["4.3"] = {
    "hook left": (_hook_left, "hook"),
    "two copies": (
        lambda embedding, layers, ids: _frozen(embedding, [*layers, layers[-1]], ids),
        "twice|layers",
    ),
}


def _recursive(layers, x, k):
    if not len(layers):
        return x
    return _recursive(layers[k:], checkpoint(layers[:k], x, use_reentrant=False), k)


def _library(layers, x, k):
    with checkpoint_layers(layers, k):
        return layers(x)


def _ceil(layers, x, k):
    n = len(layers)
    pieces = math.ceil(n / k)
    for i in np.array_split(np.arange(n), pieces):
        x = checkpoint(layers[i[0] : i[-1] + 1], x, use_reentrant=False)
    return x


def _nested(layers, x, k):
    def rest(x, start=0):
        x = layers[start : start + k](x)
        return rest(x, start + k) if start + k < len(layers) else x

    return checkpoint(rest, x, use_reentrant=False)


RIGHT["4.4"] = {"recursive": _recursive}
WRONG["4.4"] = {
    "equal parts": (_ceil, "segment|length|layers"),
    "one around all": (_nested, "all at once|one segment|segment"),
}
RIGHT["4.5"] = {
    "numpy": lambda lengths, a, x: int(np.max(np.arange(len(lengths)) * x + np.array(lengths) * a)),
    "sorted": lambda lengths, a, x: sorted(i * x + m * a for i, m in enumerate(lengths))[-1],
}
WRONG["4.5"] = {
    "input not in a": (
        lambda lengths, a, x: max((i + 1) * x + m * (a - x) for i, m in enumerate(lengths)),
        "inputs of the layers",
    ),
    "later ones": (
        lambda lengths, a, x: max(
            (len(lengths) - 1 - i) * x + m * a for i, m in enumerate(lengths)
        ),
        "counted from the end",
    ),
    "longest and all boundaries": (
        lambda lengths, a, x: max(lengths) * a + (len(lengths) - 1) * x,
        "boundaries",
    ),
    "two at once": (
        lambda lengths, a, x: max(i * x + m * a for i, m in enumerate(lengths)) * 2,
        "2 times|twice|two",
    ),
    "layers before": (
        lambda lengths, a, x: max(sum(lengths[:i]) * x + m * a for i, m in enumerate(lengths)),
        "each layer|boundary|layers|segments",
    ),
}


def _ternary(n, a, x):
    peaks = [kept_at_peak(uniform_segments(n, k), a, x) for k in range(1, n + 1)]
    return int(np.argmin(peaks)) + 1


RIGHT["4.6"] = {
    "argmin": _ternary,
    # n itself is never better than n - 1, since a >= x.
    "without n": lambda n, a, x: min(
        range(1, n), key=lambda k: kept_at_peak(uniform_segments(n, k), a, x), default=1
    ),
}
WRONG["4.6"] = {
    "the peak": (
        lambda n, a, x: min(kept_at_peak(uniform_segments(n, k), a, x) for k in range(1, n + 1)),
        "this is the lowest peak, in bytes",
    ),
    "largest": (
        lambda n, a, x: max(
            range(1, n + 1), key=lambda k: kept_at_peak(uniform_segments(n, k), a, x)
        ),
        "the highest peak of all",
    ),
    "an index": (
        lambda n, a, x: int(
            np.argmin([kept_at_peak(uniform_segments(n, k), a, x) for k in range(1, n + 1)])
        ),
        "places are counted from 0",
    ),
    "a and x swapped": (
        lambda n, a, x: min(
            range(1, n + 1), key=lambda k: kept_at_peak(uniform_segments(n, k), x, a)
        ),
        "too long",
    ),
    "powers of two": (
        lambda n, a, x: min(
            (2**i for i in range(n.bit_length()) if 2**i <= n),
            key=lambda k: kept_at_peak(uniform_segments(n, k), a, x),
        ),
        "powers of two",
    ),
}


def _by_hand(layers, x, name=False):
    lengths = best_segments(64, [4] * 63 + [25], 1, temporaries=[9] * 63 + [0])
    at = 0
    for m in lengths:
        x = checkpoint(layers[at : at + m], x, use_reentrant=False)
        at += m
    loss = x.square().mean()
    if not name:
        del x
    loss.backward()
    return loss.detach()


class _Parked:
    """What is saved, as an array of numpy."""

    def __init__(self, tensor):
        self.array = tensor.detach().numpy().copy()


def _in_numpy(layers, x):
    weights = {p.untyped_storage().data_ptr() for p in layers.parameters()}

    def pack(tensor):
        own = tensor.untyped_storage().data_ptr() in weights
        return tensor if own else _Parked(tensor)

    def unpack(packed):
        return torch.from_numpy(packed.array) if isinstance(packed, _Parked) else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = layers(x).square().mean()
    loss.backward()
    return loss.item()


RIGHT["4.7"] = {"by hand": _by_hand}
WRONG["4.7"] = {
    "a name holds the outputs": (
        lambda layers, x: _by_hand(layers, x, name=True),
        "these segments fit",
    ),
    "parked in numpy": (_in_numpy, "arrays that are no tensors"),
    "reentrant without a gradient": (
        lambda layers, x: _reentrant(layers, x),
        "card|gradient|bytes|budget",
    ),
}


def _reentrant(layers, x):
    for i in range(0, 64, 8):
        x = checkpoint(layers[i : i + 8], x, use_reentrant=True)
    loss = x.square().mean()
    loss.backward()
    return loss.item()


WRONG["4.5"] |= {
    "a and x": (
        lambda lengths, a, x: max(i * x + m * (a + x) for i, m in enumerate(lengths)),
        "input is counted twice",
    ),
    "a and x, its own boundary too": (
        lambda lengths, a, x: max((i + 1) * x + m * (a + x) for i, m in enumerate(lengths)),
        "input is counted twice",
    ),
    "a and x, no boundaries": (
        lambda lengths, a, x: max(m * (a + x) for m in lengths),
        "input is counted twice",
    ),
    "a and x, all boundaries": (
        lambda lengths, a, x: max(lengths) * (a + x) + len(lengths) * x,
        "input is counted twice",
    ),
    "least": (
        lambda lengths, a, x: (len(lengths) - 1) * x + min(lengths) * a,
        "needs least",
    ),
}


def _of_all_weights(ctx, gradient):
    """A frozen weight is asked for its gradient too."""
    x, out = _again(ctx)
    weights = list(ctx.run.parameters())
    found = torch.autograd.grad(out, [x, *weights], gradient)
    for p, g in zip(weights, found[1:], strict=True):
        p.grad = g if p.grad is None else p.grad + g
    return None, found[0]


def _thaws(ctx, gradient):
    for p in ctx.run.parameters():
        p.requires_grad_(True)
    return _plain(ctx, gradient)


def _keeps_the_second_run(ctx, gradient):
    x, ctx.out = _again(ctx)
    torch.autograd.backward(ctx.out, gradient, retain_graph=True)
    return None, x.grad


_HELD = []


def _pushes(ctx, run, x):
    _HELD.append(run)
    ctx.save_for_backward(x)
    return run(x)


def _pops(ctx, gradient):
    ctx.run = _HELD.pop()
    return _plain(ctx, gradient)


WRONG["4.1"] |= {
    "all weights": (_function(_keep, _of_all_weights), "may not be asked for one"),
    "thaws": (_function(_keep, _thaws), "a frozen weight gets a gradient"),
    "keeps the second run": (_function(_keep, _keeps_the_second_run), "kept after backward"),
    "a stack": (_function(_pushes, _pops), "in its own ctx"),
}


def _pushes_state(ctx, run, x):
    _HELD.append(torch.get_rng_state())
    return Checkpoint.forward(ctx, run, x)


def _pops_state(ctx, gradient):
    ctx.state = _HELD.pop()
    return _forked(ctx, gradient)


def _state_and_copy(ctx, run, x):
    ctx.state, ctx.run = torch.get_rng_state(), run
    ctx.save_for_backward(x.clone())
    return run(x)


WRONG["4.2"] |= {
    "a stack": (_safe(_pushes_state, _pops_state), "in its own ctx"),
    "a copy of x": (_safe(_state_and_copy, _forked), "no clone or copy"),
}


def _other_random(embedding, layers, ids):
    x = embedding(ids).requires_grad_()
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=True, preserve_rng_state=False)
    return x


WRONG["4.3"] |= {
    "four layers": (lambda e, layers, ids: _frozen(e, layers[:4], ids), "with 6 layers only 4"),
    "other random numbers": (_other_random, "preserve_rng_state=True"),
    "output detached": (lambda *a: _frozen(*a).detach(), "is the output detached"),
}


def _segments_of(layers, x, k, **settings):
    for start in range(0, len(layers), k):
        x = checkpoint(layers[start : start + k], x, use_reentrant=False, **settings)
    return x


def _as_equal_as_possible(layers, x, k):
    segments = math.ceil(len(layers) / k)
    return _segments_of(layers, x, math.ceil(len(layers) / segments))


WRONG["4.4"] |= {
    "other random numbers": (
        lambda layers, x, k: _segments_of(layers, x, k, preserve_rng_state=False),
        "preserve_rng_state=True",
    ),
    "x is detached": (
        lambda layers, x, k: _segments_of(layers, x.detach().requires_grad_(), k),
        "x gets no gradient",
    ),
    "equal lengths": (_as_equal_as_possible, r"should have \[5, 2\]"),
}
# The last place of each length: of two equal segments, the later one always needs more.
RIGHT["4.5"]["a dict of lengths"] = lambda lengths, a, x: max(
    i * x + m * a for m, i in {m: i for i, m in enumerate(lengths)}.items()
)
WRONG["4.5"]["the longest"] = (
    lambda lengths, a, x: max((m, i * x + m * a) for i, m in enumerate(lengths))[1],
    "the longest segment alone",
)


def _once_for_each_n():
    known = {}

    def length(n, a, x):
        return known.setdefault(n, _ternary(n, a, x))

    return length


WRONG["4.6"] |= {
    "kept by n": (_once_for_each_n(), "segments of 6 layers are too long"),
    "a whole ratio": (lambda n, a, x: max(1, round(math.sqrt(n / (a // x)))), "too long"),
    "all boundaries": (
        lambda n, a, x: min(range(1, n + 1), key=lambda k: math.ceil(n / k) * x + k * a),
        "segments of 2 layers are too short",
    ),
    "less than half": (lambda n, a, x: _ternary(n, a, x) if n != 3 else 1, "segments of one layer"),
    "at most 7": (lambda n, a, x: min(7, _ternary(n, a, x)), "segments of 7 layers are too short"),
}
