"""Answers to lesson 04's exercises: right ones in unusual forms, and wrong ones that were once
judged right or that few cases catch.
"""

import math
from functools import reduce

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from gradmem_lib import uniform_segments
from gradmem_lib.course.lessons.lesson_04.exercises import (
    Checkpoint,
    SafeCheckpoint,
    kept_at_peak,
    train_step,
)


class AddedByHand(Checkpoint):
    """The gradients of the weights that have one, by autograd.grad."""

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        weights = [p for p in ctx.run.parameters() if p.requires_grad]
        with torch.enable_grad():
            out = ctx.run(x)
        of_x, *of_weights = torch.autograd.grad(out, [x, *weights], gradient)
        for p, found in zip(weights, of_weights, strict=True):
            p.grad = found if p.grad is None else p.grad + found
        return None, of_x


class WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(run, x):
        return run(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.run, x = inputs
        ctx.save_for_backward(x)

    backward = Checkpoint.backward


class OfPyTorch(Checkpoint):
    """Nothing is written: ``apply`` is PyTorch's checkpoint."""

    @staticmethod
    def apply(run, x):
        return checkpoint(run, x, use_reentrant=False)

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient


class OfItsOwnOutput(Checkpoint):
    """Backward of what forward has returned calls itself."""

    @staticmethod
    def forward(ctx, run, x):
        with torch.enable_grad():
            ctx.x, ctx.out = x, run(x)
        return ctx.out

    @staticmethod
    def backward(ctx, gradient):
        torch.autograd.backward(ctx.out, gradient)
        return None, ctx.x.grad


WAITING = []


class Stack(Checkpoint):
    """What each call needs waits in one list of all calls."""

    @staticmethod
    def forward(ctx, run, x):
        WAITING.append(run)
        return Checkpoint.forward(ctx, run, x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.run = WAITING.pop()
        return Checkpoint.backward(ctx, gradient)


class StatesOnAStack(Checkpoint):
    @staticmethod
    def forward(ctx, run, x):
        WAITING.append(torch.get_rng_state())
        return Checkpoint.forward(ctx, run, x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.state = WAITING.pop()
        return SafeCheckpoint.backward(ctx, gradient)


def frozen_by_a_dummy(embedding, layers, ids):
    """Another argument requires the gradient."""
    x, dummy = embedding(ids), torch.zeros(1, requires_grad=True)
    for layer in layers:
        x = checkpoint(lambda x, _, layer=layer: layer(x), x, dummy, use_reentrant=True)
    return x


def frozen_reduced(embedding, layers, ids):
    x = embedding(ids) + torch.zeros(1, requires_grad=True)
    return reduce(lambda h, layer: checkpoint(layer, h, use_reentrant=True), layers, x)


def recursive(layers, x, k):
    if not len(layers):
        return x
    return recursive(layers[k:], checkpoint(layers[:k], x, use_reentrant=False), k)


def in_groups(layers, x, k):
    """Without slices of the Sequential."""
    for start in range(0, len(layers), k):
        group = list(layers)[start : start + k]
        run = lambda h, group=group: reduce(lambda h, layer: layer(h), group, h)  # noqa: E731
        x = checkpoint(run, x, use_reentrant=False)
    return x


def as_equal_as_possible(layers, x, k):
    """Segments of 4 and 3 where 5 and 2 were asked for."""
    segments = math.ceil(len(layers) / k)
    for start in range(0, len(layers), math.ceil(len(layers) / segments)):
        stop = start + math.ceil(len(layers) / segments)
        x = checkpoint(layers[start:stop], x, use_reentrant=False)
    return x


def peaks(n, a, x):
    return [kept_at_peak(uniform_segments(n, k), a, x) for k in range(1, n + 1)]


def by_hand(layers, x, limit=40):
    """Each segment takes as many layers as fit beside the boundaries before it."""
    h, start, waiting = x, 0, 0
    while start < 63:
        stop = start + (limit - 9 - waiting) // 5
        h = checkpoint(layers[start : min(stop, 63)], h, use_reentrant=False)
        start, waiting = stop, waiting + 1
    loss = layers[-1](h).square().mean()
    loss.backward()
    return loss.detach()


def parked(layers, x, form=torch.Tensor.numpy):
    """What is saved waits in arrays or lists: (form, its shape)."""
    weights = {p.untyped_storage().data_ptr() for p in layers.parameters()}

    def pack(tensor):
        own = tensor.untyped_storage().data_ptr() in weights
        return tensor if own else [form(tensor.detach().clone())]

    def unpack(packed):
        return torch.as_tensor(packed[0]) if isinstance(packed, list) else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = layers(x).square().mean()
    loss.backward()
    return loss.item()


def runs_again_beside_parked(layers, x):
    """The first layer runs twice, and the rest waits elsewhere."""
    checkpoint(layers[0], x.detach().requires_grad_(), use_reentrant=False).sum().backward()
    return parked(layers, x)


DETACHED = "x.detach().requires_grad_()"
SAVED = "ctx.save_for_backward(x)"
LENGTHS = "best_segments(64, [4] * 63 + [25], 1, temporaries=[9] * 63 + [0])"
RIGHT = {
    "4.1": [
        AddedByHand,
        WithSetup,
        "out = ctx.run(x) → out = (ctx.run(x) * gradient).sum()\n"
        "backward(out, gradient) → backward(out)",
        f"{SAVED} → ctx.x = x\n(x,) = ctx.saved_tensors → x = ctx.x",
    ],
    "4.2": [
        "torch.get_rng_state() → torch.default_generator.get_state().clone()",
        "with torch.random.fork_rng(): → with torch.random.fork_rng(devices=[]):",
    ],
    "4.3": [
        frozen_by_a_dummy,
        frozen_reduced,
        f"embedding(ids) → {DETACHED}".replace("x.", "embedding(ids)."),
    ],
    "4.4": [recursive, in_groups],
    "4.5": [
        lambda lengths, a, x: (torch.tensor(lengths) * a + torch.arange(len(lengths)) * x).max(),
        lambda lengths, a, x: float(sorted(i * x + m * a for i, m in enumerate(lengths))[-1]),
        # Of two equal segments, the later one always needs more.
        lambda lengths, a, x: max(
            i * x + m * a for m, i in {m: i for i, m in enumerate(lengths)}.items()
        ),
    ],
    "4.6": [
        lambda n, a, x: np.argmin(peaks(n, a, x)) + 1,
        lambda n, a, x: float(n - np.argmin(peaks(n, a, x)[::-1])),
        lambda n, a, x: min(range(1, n + 1), key=lambda k: n / k * x + k * a),
        # n itself is never better than n - 1, since a >= x.
        "range(1, n + 1) → range(1, max(n, 2))",
    ],
    "4.7": [
        by_hand,
        "loss.backward() →\nreturn loss → loss.backward(); return loss",
        "[25], 1, temporaries=[9] * 63 + [0] → [15], 1",
    ],
}
WRONG = {
    "4.1": [
        OfPyTorch,
        OfItsOwnOutput,
        Stack,
        f"{SAVED} → ctx.save_for_backward(x.clone())",
        f"{SAVED} → ctx.save_for_backward(x); ctx.copies = [p.clone() for p in run.parameters()]",
        f"x = {DETACHED} → x = {DETACHED}; ctx.run.requires_grad_(True)",
        "(out, gradient) → (out, gradient, inputs=[x, *ctx.run.parameters()])",
        "out = ctx.run(x) → ctx.out = out = ctx.run(x)\n"
        "(out, gradient) → (out, gradient, retain_graph=True)",
        "return run(x) → run(x); return run(x)",
        "return run(x) → ctx.out = run(x); return ctx.out",
    ],
    "4.2": [
        "torch.get_rng_state() → torch.Generator().manual_seed(torch.initial_seed()).get_state()",
        "return Checkpoint.forward(ctx, run, x) → run(x); return Checkpoint.forward(ctx, run, x)",
        "return Checkpoint.forward(ctx, run, x) → return Checkpoint.forward(ctx, run, x.clone())",
        "torch.set_rng_state(ctx.state) → ctx.run.eval()",
        StatesOnAStack,
    ],
    "4.3": [
        "for layer in layers: → for layer in layers[:4]:",
        "return x → return x.detach()",
        "for layer in layers: → for layer in [layers[:2], *layers[2:]]:",
        "x = checkpoint(layer, x, use_reentrant=True) → layer(x); "
        "x = checkpoint(layer, x, use_reentrant=True)",
        "x = embedding(ids).requires_grad_() → embedding.register_forward_hook(lambda m, i, out: "
        "out.requires_grad_()); x = embedding(ids)",
    ],
    "4.4": [
        as_equal_as_possible,
        "range(0, len(layers), k) → range(0, len(x), k)",
        "x = checkpoint(layers → x = checkpoint(layers, x, use_reentrant=False); checkpoint(layers",
        "], x, → ], x.detach().requires_grad_(),",
        "return x → return x.clone().detach().requires_grad_()",
        "return x → layers.last = x; return x",
    ],
    "4.5": [
        "i * x → len(lengths) * x",
        "length * a → (length + 1) * a",
        "length * a → sum(lengths[max(0, i - 1) : i + 1]) * a",
        "max(i → min(i",
        "enumerate(lengths)) → enumerate(lengths[:-1] or lengths))",
        "in enumerate(lengths) → in [(lengths.index(max(lengths)), max(lengths))]",
    ],
    "4.6": [
        "range(1, n + 1) → range(1, min(n, 7) + 1)",
        "range(1, n + 1) → range(1, max(n // 2, 1) + 1)",
        "uniform_segments(n, k), a, x) → uniform_segments(n, k), a // x, 1)",
        "kept_at_peak(uniform_segments(n, k), a, x) → math.ceil(n / k) * x + k * a\n"
        "lengths = → import math; lengths =",
        lambda n, a, x: min(peaks(n, a, x)),
        lambda n, a, x: np.argmin(peaks(n, a, x)),
        lambda n, a, x: math.sqrt(n * x / a),
    ],
    "4.7": [
        parked,
        lambda layers, x: parked(layers, x, torch.Tensor.tolist),
        runs_again_beside_parked,
        f"{LENGTHS} → 'best'",
        f"{LENGTHS} → {LENGTHS}[::-1]",
        "loss.backward() →",
        "mean() → sum()",
        lambda layers, x: train_step(layers, x.detach().requires_grad_()),
    ],
}
