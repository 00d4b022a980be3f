"""Lesson 04's exercises, in the order of their numbers: a checkpoint, segments of checkpoints, and
their best lengths.
"""

import contextlib
import inspect

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ....techniques.checkpointing import checkpoint_layers
from ....techniques.schedules import best_segments, uniform_segments
from ...judge.compare import plain_int
from ...judge.exercise import Exercise, calls, measured, outside_torch
from ...material import models
from ..shared.seen import gradient_of
from ..shared.settings import gradients_of, seeded
from .layers import (
    ROWS,
    WIDTH,
    alive_after,
    count_calls,
    first_input,
    kept_boundaries,
    one_by_one,
    trained_layers,
)

# 4.1


class Checkpoint(torch.autograd.Function):
    """``Checkpoint.apply(run, x)`` is ``run(x)``, of which nothing is kept but ``x``."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x)
        torch.autograd.backward(out, gradient)
        return None, x.grad


DEEPEST = 40  # an answer that goes on into earlier layers is as deep as there are layers


def apply_of(answer):
    """``apply`` as PyTorch has it, whatever the answer has under that name, with a backward that
    stops where it calls itself without end: PyTorch would follow it for minutes.
    """
    depth = 0

    def backward(ctx, *gradients):
        nonlocal depth
        if depth > DEEPEST:
            raise RecursionError("backward runs itself again")
        depth += 1
        try:
            return answer.backward(ctx, *gradients)
        finally:
            depth -= 1

    apply = inspect.getattr_static(torch.autograd.Function, "apply")
    members = {"backward": staticmethod(backward), "apply": apply}
    return type(answer)(answer.__name__, (answer,), members).apply


def backward_of_squares(out: torch.Tensor) -> None:
    if out.requires_grad:
        out.square().sum().backward()


def checkpoint_cases(answer):
    apply = apply_of(answer)
    layers, x = trained_layers(4), first_input()
    with count_calls(layers) as order:
        out = one_by_one(apply, layers, x)
        yield "the output of four layers", out
        backward_of_squares(out)
    yield "the gradient of x, before all layers", gradient_of(x)
    yield "the gradients of the weights inside run", gradients_of(layers)
    yield "boundaries alive after forward of one layer, its input among them", kept_by_one(apply)
    layers = trained_layers(2)
    weights = sum(p.nbytes for p in layers.parameters())
    held = alive_after(lambda layers, x: one_by_one(apply, layers, x), layers, rows=1)
    yield "whether there are copies of the weights after forward", held > 1.5 * weights
    yield "how often the layers run, in forward and backward together", order.times(layers)
    for p in layers.parameters():
        p.grad = torch.ones_like(p)
    backward_of_squares(one_by_one(apply, layers, first_input()))
    yield (
        "weights that have a .grad of ones already, to which the new one is added",
        gradients_of(layers),
    )
    layers = trained_layers(3)
    layers[1].requires_grad_(False)
    with contextlib.suppress(RuntimeError):  # an answer may ask for the gradients of all weights
        backward_of_squares(one_by_one(apply, layers, first_input()))
    yield "a frozen layer between two others, the gradients", gradients_of(layers)
    gradients = gradients_of_two(apply)
    yield "two calls whose backwards run in the order of their forwards, the gradients", gradients

    def step(layers, x):
        out = apply(layers, x)
        backward_of_squares(out)
        return out

    # x, its gradient and the output are alive, and some answers keep what they saved for longer
    freed = kept_boundaries(step, trained_layers(1)) <= 5
    yield "whether the graph of the second run is freed after backward", freed


def kept_by_one(apply, dropout: float = 0.0) -> int:
    """Boundaries alive after forward of one layer whose output nobody else keeps."""
    (layer,) = trained_layers(1, dropout)
    return kept_boundaries(lambda layer, x: apply(layer, x).sum(), layer)


def gradients_of_two(apply, dropout: float = 0.0) -> torch.Tensor:
    layers, x = trained_layers(2, dropout), first_input()
    for out in [apply(layer, x) for layer in layers]:
        backward_of_squares(out)
    return gradients_of(layers)


CHECKPOINT = Exercise(
    "4.1",
    Checkpoint,
    checkpoint_cases,
    """
    enable_grad() → no_grad()
        autograd is off inside backward, and what you call backward on has no graph: run again under
        torch.enable_grad(), and hand the output of this run, with the incoming gradient, to
        torch.autograd.backward.
    x = x.detach().requires_grad_() →
        the saved x is still part of the graph of earlier layers, and backward continues into them:
        detach x, and let it require a gradient.
    x.detach().requires_grad_() → x.detach()
        the detached x does not require a gradient, so earlier layers get no gradient: add
        requires_grad_().
    torch.autograd.backward(out, gradient) → torch.autograd.backward(out)
        the output is no single number: backward on it starts from the incoming gradient,
        torch.autograd.backward(out, gradient).
    torch.autograd.backward(out, gradient) → (x.grad,) = torch.autograd.grad(out, x, gradient)
        the input gets its gradient and the weights get none: torch.autograd.backward reaches both.
    torch.autograd.backward(out, gradient) → ctx.run.zero_grad(); out.backward(gradient)
        a weight's gradient replaces the one that was in .grad before: backward adds to it, as
        accumulation needs.
    return None, x.grad → return x.grad
        backward must return two values, because forward took two arguments, run and x: return None,
        x.grad. Without a `return` it returns one value, None.
    torch.no_grad() → torch.enable_grad()
    (x,) = ctx.saved_tensors →
    x = x.detach().requires_grad_() → x = ctx.x
    out = ctx.run(x) → out = ctx.out
    ctx.save_for_backward(x) → ctx.x = x.detach().requires_grad_()
    return run(x) → ctx.out = run(ctx.x); return ctx.out.detach()
        no memory is saved: forward builds and keeps the graph of run(x). Keep only x, and run again
        in backward.
    """,
)

# 4.2


class SafeCheckpoint(torch.autograd.Function):
    """``Checkpoint``, whose second run draws the random numbers of the first."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.state = torch.get_rng_state()
        return Checkpoint.forward(ctx, run, x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.random.fork_rng():
            torch.set_rng_state(ctx.state)
            return Checkpoint.backward(ctx, gradient)


def dice_cases(answer):
    apply = apply_of(answer)
    layers, x = trained_layers(4, dropout=0.5), first_input()
    out = one_by_one(apply, layers, x)
    yield (
        "the output of four layers with dropout, which the first run draws as a plain run does",
        out,
    )
    backward_of_squares(out)
    after = torch.rand(3)
    yield "the gradient of x, by a second run that drops the same values", gradient_of(x)
    yield "the gradients of the weights, by the same second run", gradients_of(layers)
    yield "the random numbers of the rest of the program, after backward", after
    kept = kept_by_one(apply, dropout=0.5)
    yield "boundaries alive after forward of one layer, its input among them", kept
    gradients = gradients_of_two(apply, dropout=0.5)
    yield "two calls whose backwards run in the order of their forwards, the gradients", gradients


DICE = Exercise(
    "4.2",
    SafeCheckpoint,
    dice_cases,
    """
    ctx.state = torch.get_rng_state() →
    torch.set_rng_state(ctx.state) →
    with torch.random.fork_rng(): → if True:
        the second run draws other dropout masks than the first: the random state is not restored.
    ctx.state = torch.get_rng_state() → torch.manual_seed(0)
    torch.set_rng_state(ctx.state) → torch.manual_seed(0)
        a fixed seed gives every layer and every step the same mask: save the random state instead.
    ctx.state = torch.get_rng_state() → out = Checkpoint.forward(ctx, run, x)
    return Checkpoint.forward(ctx, run, x) → ctx.state = torch.get_rng_state(); return out
        the random state is saved after the run, when the random numbers are already drawn.
    with torch.random.fork_rng(): → if True:
        the gradients are right, but the rest of the program gets the same random numbers twice:
        torch.random.fork_rng() restores the state.
    ctx.state = torch.get_rng_state() → SafeCheckpoint.state = torch.get_rng_state()
    set_rng_state(ctx.state) → set_rng_state(SafeCheckpoint.state)
        all layers share one state, the last layer's: keep the state in ctx, because every call has
        its own ctx.
    """,
)

# 4.3


def from_frozen(embedding, layers, ids):
    """The output of ``layers``, each in a reentrant checkpoint, on the vectors of a frozen
    ``embedding``.
    """
    x = embedding(ids).requires_grad_()
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=True)
    return x


def frozen_cases(answer):
    with seeded(7):
        embedding = nn.Embedding(50, WIDTH).requires_grad_(False)
        ids = torch.randint(0, 50, (ROWS,))
        head = nn.Linear(WIDTH, 1)
    layers = trained_layers(4)
    with count_calls(layers) as order:
        out = answer(embedding, layers, ids)
        yield "layers that run in forward, in this order", order[:]
        head(out).square().sum().backward()
    for i, layer in enumerate(layers, 1):
        yield f"the gradient of layer {i} of 4", gradients_of(layer)
    yield "the gradient of what comes after the layers", gradients_of(head)
    yield "whether the embedding gets a gradient", embedding.weight.grad is not None
    yield "how often each layer runs, in forward and backward together", order.times(layers)
    yield "layers whose first run records no graph, as in a reentrant checkpoint", order.no_graph
    yield "lengths of the segments that run again, one checkpoint a layer", order.segments(layers)
    layers = trained_layers(6, dropout=0.5)
    backward_of_squares(answer(embedding, layers, ids))
    yield "six layers with dropout, the gradients", gradients_of(layers)


FROZEN = Exercise(
    "4.3",
    from_frozen,
    frozen_cases,
    """
    embedding(ids).requires_grad_() → embedding(ids)
        no layer gets a gradient: a reentrant checkpoint whose input requires no gradient has no
        node in the graph. Let the embedding's output require one.
    x = embedding(ids).requires_grad_() → embedding.weight.requires_grad_(); x = embedding(ids)
        this trains the embedding, which is frozen: let its output require a gradient, not its
        weight.
    embedding(ids).requires_grad_() → layers[0](embedding(ids))
    in layers: → in layers[1:]:
        the gradients are right, but one layer keeps all its activations: every layer can be
        checkpointed, the first one too.
    checkpoint(layer, x, use_reentrant=True) → layer(x)
        the gradients are right, but nothing is checkpointed.
    use_reentrant=True) → use_reentrant=True).requires_grad_()
    embedding(ids).requires_grad_() → embedding(ids)
        the first layer gets no gradient: its input must require one, and not just its output.
    checkpoint(layer, x, → checkpoint(layer, x.detach().requires_grad_(),
        detaching in front of every layer cuts the chain: only the last layer learns. Detach once,
        in front of the first.
    use_reentrant=True → use_reentrant=False
        these are non-reentrant checkpoints: the exercise asks for use_reentrant=True.
    use_reentrant=True → use_reentrant=True, preserve_rng_state=False
        the second run draws other random numbers: PyTorch's checkpoint puts the random state back,
        with preserve_rng_state=True, its default.
    """,
)

# 4.4


def run_in_segments(layers, x, k):
    """The output of ``layers`` run in checkpointed segments of ``k``; the last one may be
    shorter.
    """
    for start in range(0, len(layers), k):
        x = checkpoint(layers[start : start + k], x, use_reentrant=False)
    return x


def by_checkpoint_sequential(layers, x, k):
    return checkpoint_sequential(layers, -(-len(layers) // k), x, use_reentrant=False)


def segment_cases(answer):
    # More layers than rows too: an answer that counts rows for layers leaves some out there.
    for n, k, rows in ((8, 4, ROWS), (9, 2, 3), (7, 5, ROWS)):
        layers, x, name = trained_layers(n), first_input(rows=rows), f"{n} layers and k = {k}"
        with count_calls(layers) as order:
            out = answer(layers, x, k)
            yield f"{name}, layers that run in forward, in this order", order[:]
            backward_of_squares(out)
        yield f"{name}, the gradients of the layers", gradients_of(layers)
        yield f"{name}, the gradient of x", gradient_of(x)
        yield f"{name}, lengths of the segments that run again", order.segments(layers)
    layers = trained_layers(4, dropout=0.5)
    backward_of_squares(answer(layers, first_input(), 2))
    yield (
        "layers with dropout, which draw the same numbers again, the gradients",
        gradients_of(layers),
    )
    layers = trained_layers(4)
    backward_of_squares(answer(layers, first_input().detach(), 2))
    yield "an x that needs no gradient, the gradients of the layers", gradients_of(layers)


SEGMENTS = Exercise(
    "4.4",
    run_in_segments,
    segment_cases,
    """
    range(0, len(layers), k) → range(0, len(layers) - k + 1, k)
        layers are left out: where k does not divide their number, there is one shorter segment.
    range(0, len(layers), k) → range(0, max(1, len(layers) - k + 1), k)
    start + k], → start + k if start + 2 * k <= len(layers) else len(layers)],
        the last segment takes all remaining layers and is too long: make one more, shorter one.
    by_checkpoint_sequential
        checkpoint_sequential takes a number of segments, gives the last one all the rest, and runs
        it without a checkpoint: 9 layers in 5 segments are 1, 1, 1, 1, 5.
    (layers[start : start + k], x → (lambda h: layers[start : start + k](h), x
        the function looks up its variables when it runs again, and by then the loop has moved on:
        pass the segment itself to checkpoint.
    checkpoint(layers[start : start + k], → layers[start + 1 : start + k](checkpoint(layers[start],
    use_reentrant=False) → use_reentrant=False))
        one layer in k is checkpointed, and the others keep everything: put k layers in a row into
        one checkpoint.
    use_reentrant=False) → use_reentrant=False) if start + k < len(layers) else layers[start:](x)
        the last segment runs without a checkpoint. Section 6 uses this good idea; here, put the
        last segment into a checkpoint as well.
    use_reentrant=False → use_reentrant=True
        this is a reentrant checkpoint, which needs an input that requires a gradient:
        use_reentrant=False.
    use_reentrant=False → use_reentrant=False, preserve_rng_state=False
        the second run draws other random numbers: PyTorch's checkpoint puts the random state back,
        with preserve_rng_state=True, its default.
    """,
)

# 4.5


def kept_at_peak(lengths, a, x):
    """The most bytes kept at once by segments of these lengths: earlier boundaries, and one whole
    segment.
    """
    return max(i * x + length * a for i, length in enumerate(lengths))


PEAK = Exercise(
    "4.5",
    kept_at_peak,
    calls(
        ([1, 1, 1, 1], 1000, 1000),
        ([4, 4, 1], 5000, 1000),
        ([5, 4, 3, 2], 3000, 1000),
        ([2, 3, 4, 5], 3000, 1000),
        hidden=[([7, 3, 6, 1, 2], 2500, 700), ([3, 2, 2, 2], 1000, 800)],
    ),
    """
    i * x → (len(lengths) - 1) * x
        this adds all boundaries but the last to the longest segment: those of later segments are
        freed before its backward.
    i * x → (i + 1) * x
        one boundary too many: a already includes the input of the segment's first layer.
    i * x + →
        the boundaries of earlier segments are left out: each keeps one until its backward.
    i * x → sum(lengths[:i]) * x
        a boundary is counted for each earlier layer: each earlier segment keeps one, its input.
    length * a → length * (a - x)
        x is taken off a: when a segment runs again, each of its layers keeps all of a, its input
        included.
    length * a → length * (a + x)
        each layer's input is counted twice: a includes x, so m layers keep m * a.
    i * x → (len(lengths) - 1 - i) * x
        the boundaries are counted from the end: when a segment runs again, the boundaries of
        earlier segments are still kept.
    max(i * x + length * a → max((length, i * x + length * a)
    in enumerate(lengths)) → in enumerate(lengths))[1]
        this looks at the longest segment alone: a shorter, later one has more boundaries before it,
        and may need more.
    """,
)

# 4.6


def best_length(n, a, x):
    """The segment length k with the lowest peak for ``n`` layers that keep ``a`` bytes each, ``x``
    of them their input.
    """
    lengths = range(1, n + 1)
    return min(lengths, key=lambda k: kept_at_peak(uniform_segments(n, k), a, x))


# None of them but the one of 1 layer has k = n as its only best length. There is no other: a
# includes x, so two segments never need more than one segment of all layers.
CHAINS = (
    (64, 1000, 1000),
    (32, 23_000, 1000),  # a 7B
    (4, 20_000, 1000),
    (1, 1000, 1000),
    (16, 1, 1),  # k is larger than a and x here
    (96, 28_000, 1000),
    (96, 1900, 1000),  # as many layers as above, and no whole ratio
    (3, 1000, 1000),  # the best is more than half of all
    (400, 1000, 1000),
)


def length_cases(answer):
    for n, a, x in CHAINS:
        name, k = f"n = {n}, a = {a} and x = {x}", plain_int(answer(n, a, x))
        is_length = k in range(1, n + 1)
        yield f"{name}, your length", "a whole number from 1 to n" if is_length else k
        # Two lengths may have the same peak, so the peak is what counts.
        peak = kept_at_peak(uniform_segments(n, k), a, x) if is_length else None
        yield f"{name}, the peak of segments of your length", peak


LENGTH = Exercise(
    "4.6",
    best_length,
    length_cases,
    """
    lengths = range(1, n + 1) → return max(1, round(n**0.5))
        this is √n, which is right where a layer keeps no more than its input: with a > x, segments
        must be shorter.
    lengths = range(1, n + 1) → return round((n * a / x) ** 0.5)
        a and x are swapped: the more a layer keeps, the shorter the segments.
    lengths = range(1, n + 1) → return 1
        segments of one layer are right for most Transformers, but not for every model: the length
        depends on n, a and x.
    lengths = range(1, n + 1) → return round((n * x / a) ** 0.5)
        for 4 layers with a = 20 x your k is 0: √(n · x / a) is 0.45 there, and a segment has at
        least one layer.
    lengths = range(1, n + 1) → return max(1, int((n * x / a) ** 0.5))
        this rounds down, but the nearest whole number is above: 1.85 is closer to 2.
    lengths = range(1, n + 1) → return -int(-((n * x / a) ** 0.5) // 1)
        this rounds up, but the nearest whole number is below: round √(n · x / a) to the nearest.
    range(1, n + 1) → [k for k in range(1, n + 1) if n % k == 0]
        the last segment may be shorter than the others: try every length, by uniform_segments.
    range(1, n + 1) → [2**i for i in range(n.bit_length())]
        only powers of two are tried: every whole number from 1 to n is a length.
    """,
)

# 4.7


def train_step(layers, x):
    """Forward and backward of mean(layers(x)²) within the budget, each layer run forward at most
    twice; the loss.
    """
    lengths = best_segments(64, [4] * 63 + [25], 1, temporaries=[9] * 63 + [0])
    with checkpoint_layers(layers, lengths):
        loss = layers(x).square().mean()
        loss.backward()
    return loss.item()


# The last layer is a head, whose logits are VOCAB times as wide as a boundary.
DEPTH, KEEPS, VOCAB = 64, 5, 5
CHAIN_ROWS, CHAIN_WIDTH = 256, 32
CHAIN_BOUNDARY = CHAIN_ROWS * CHAIN_WIDTH * 4
CHAIN_CARD = 41.5  # boundaries beside the weights


def chain_setting() -> tuple:
    """63 frozen layers that keep 5 boundaries each (their input is one), a frozen head, and the
    input, which is what is trained.
    """
    layers = models.chain(DEPTH - 1, width=CHAIN_WIDTH, keeps=KEEPS)
    with seeded(8):
        layers.append(nn.Linear(CHAIN_WIDTH, VOCAB * CHAIN_WIDTH, bias=False).requires_grad_(False))
        return layers, torch.randn(CHAIN_ROWS, CHAIN_WIDTH, requires_grad=True)


def chain_budget() -> int:
    """Bytes: the weights of ``chain_setting`` and ``CHAIN_CARD`` boundaries."""
    layers, _ = chain_setting()
    return sum(p.nbytes for p in layers.parameters()) + int(CHAIN_CARD * CHAIN_BOUNDARY)


def budget_cases(answer):
    layers, x = chain_setting()
    with count_calls(layers) as order:
        run = measured(
            lambda: answer(layers, x), chain_budget(), "boundaries", CHAIN_BOUNDARY, layers
        )
    often = max(order.times(layers))
    yield "the loss", run.value
    yield "the gradient of x", gradient_of(x)
    yield "the most often that a layer runs forward, where this is more than twice", max(often, 2)
    yield "the card", run
    # Two schedules may need as many bytes.
    yield "the segments of a step that does not fit", order.segments(layers) if run.over else []
    # What is not kept is computed again: where no layer runs twice, it has waited elsewhere.
    yield "whether layers run again, as nothing may wait elsewhere", often > 1
    again, rows = chain_setting()
    yield "the bytes that wait elsewhere", outside_torch(lambda: answer(again, rows), 4_000_000)


CARD = Exercise(
    "4.7",
    train_step,
    budget_cases,
    """
    best_segments(64, [4] * 63 + [25], 1, temporaries=[9] * 63 + [0]) → 1
        every layer is its own segment, so 64 boundaries are kept: they do not fit on the card.
    best_segments(64, [4] * 63 + [25], 1, temporaries=[9] * 63 + [0]) → "sqrt"
        segments of √64 = 8 layers are too long where a layer keeps five times its input.
    best_segments(64, [4] * 63 + [25], 1, temporaries=[9] * 63 + [0]) → 4
        these are the best equal segments, and they are not enough: when an early segment runs
        again, few boundaries are kept, so it may be longer.
    [4] * 63 + [25], 1, temporaries=[9] * 63 + [0] → 4, 1
        these lengths are the best for the layers alone. But all boundaries are still kept when the
        logits and their loss need 25 more: use fewer, longer segments.
    , temporaries=[9] * 63 + [0] →
        the head and its loss are counted. The gradients in a layer's backward, 9 boundaries, are
        not counted, or they are counted for the head too, whose 25 already include everything. Now
        the first segments are too long.
    [4] * 63 + [25], 1, temporaries=[9] * 63 + [0] → 4, 1, 2.0
        lists inside the list: layers run forward three times, but only one extra forward was
        allowed.
    lengths = best_segments(64, [4] * 63 + [25], 1, temporaries=[9] * 63 + [0]) → lengths = [64]
        nothing is checkpointed: no layer runs again.
    loss = layers(x).square().mean() → out = layers(x); loss = out.square().mean()
        the segments fit, and something else is alive beside them: in backward no name may hold the
        head's outputs, and the loss is layers(x).square().mean().
    """,
)
