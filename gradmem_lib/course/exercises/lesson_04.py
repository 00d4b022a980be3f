"""Lesson 04's exercises: a checkpoint by hand, its dice, its frozen start, segments, their peak, and a budget."""

from __future__ import annotations

import math
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ...measure.tracker import MemoryTracker
from ...techniques.checkpointing import checkpoint_layers
from ...techniques.schedules import best_segments, uniform_segments
from .. import models
from ..exercise import Exercise, Mistake, calls, measure

ROWS, WIDTH = 16, 8
BOUNDARY = ROWS * WIDTH * 4  # bytes of what one layer hands to the next


def trained_layers(n: int, dropout: float = 0.0) -> nn.Sequential:
    """``n`` residual-free layers (16, 8) -> (16, 8) with weights that are trained, the same ones on each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, WIDTH))
                for _ in range(n)
            )
        )


def _input(requires_grad: bool = True) -> torch.Tensor:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5))
    return x.requires_grad_(requires_grad)


def _gradient(module: nn.Module) -> torch.Tensor:
    """All gradients in a row; zeros where there is none."""
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in module.parameters()]
    )


@contextmanager
def count_calls(layers):
    """A list that grows by a layer's index each time the layer runs forward, again or for the first time."""
    order: list[int] = []
    handles = [
        layer.register_forward_pre_hook(lambda module, args, i=i: order.append(i))
        for i, layer in enumerate(layers)
    ]
    try:
        yield order
    finally:
        for handle in handles:
            handle.remove()


def _one_by_one(run, layers, x):
    for layer in layers:
        x = run(layer, x)
    return x


def _kept(forward, layers, x) -> int:
    """Boundaries that are alive when ``forward(layers, x)`` has returned, its input and its output included."""
    with MemoryTracker(layers, live=False) as tracker:
        out = forward(layers, x)
        weights = sum(p.nbytes for p in layers.parameters())
        kept = tracker.current.total - weights
        del out
    return round(kept / BOUNDARY)


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


def _checkpoint_class(forward=None, backward=None):
    """A wrong ``Checkpoint``. All have the same name, which PyTorch puts into its messages."""
    made = Checkpoint

    class Checkpoint_(torch.autograd.Function):
        pass

    members = {
        "forward": staticmethod(forward or made.forward),
        "backward": staticmethod(backward or made.backward),
    }
    return type(Checkpoint_)("Checkpoint", (torch.autograd.Function,), members)


def _keeps_the_graph():
    def forward(ctx, run, x):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.out = run(ctx.x)
        return ctx.out.detach()

    def backward(ctx, gradient):
        torch.autograd.backward(ctx.out, gradient)
        return None, ctx.x.grad

    return _checkpoint_class(forward, backward)


def _backward_without_grad(ctx, gradient):
    x = ctx.saved_tensors[0].detach().requires_grad_()
    torch.autograd.backward(ctx.run(x), gradient)
    return None, x.grad


def _backward_without_detach(ctx, gradient):
    (x,) = ctx.saved_tensors
    with torch.enable_grad():
        out = ctx.run(x)
    torch.autograd.backward(out, gradient)
    return None, x.grad


def _backward_for_the_input_alone(ctx, gradient):
    x = ctx.saved_tensors[0].detach().requires_grad_()
    with torch.enable_grad():
        out = ctx.run(x)
    return None, torch.autograd.grad(out, x, gradient)[0]


def _backward_of_the_sum(ctx, gradient):
    x = ctx.saved_tensors[0].detach().requires_grad_()
    with torch.enable_grad():
        ctx.run(x).sum().backward()
    return None, x.grad


def _backward_without_requires_grad(ctx, gradient):
    x = ctx.saved_tensors[0].detach()
    with torch.enable_grad():
        out = ctx.run(x)
    torch.autograd.backward(out, gradient)
    return None, x.grad


def _backward_of_one(ctx, gradient):
    return Checkpoint.backward(ctx, gradient)[1]


def _backward_turned_around(ctx, gradient):
    return Checkpoint.backward(ctx, gradient)[::-1]


def _observe_checkpoint(candidate):
    layers, x = trained_layers(4), _input()
    with count_calls(layers) as order:
        out = _one_by_one(candidate.apply, layers, x)
        out.square().sum().backward()
    found = {
        "four layers": {
            "output": out,
            "gradient of the input": torch.zeros_like(x) if x.grad is None else x.grad,
            "gradients of the weights": _gradient(layers),
        }
    }
    kept = _kept(lambda layers, x: _one_by_one(candidate.apply, layers, x), trained_layers(8), _input())
    found["what 8 layers keep"] = {"boundaries alive after forward": kept}
    found["four layers, forward calls"] = {"in forward and backward": len(order)}
    return found


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


def _safe_class(forward=None, backward=None):
    members = {
        "forward": staticmethod(forward or SafeCheckpoint.forward),
        "backward": staticmethod(backward or SafeCheckpoint.backward),
    }
    return type(SafeCheckpoint)("SafeCheckpoint", (torch.autograd.Function,), members)


def _one_seed_for_all():
    def forward(ctx, run, x):
        torch.manual_seed(0)
        return Checkpoint.forward(ctx, run, x)

    def backward(ctx, gradient):
        torch.manual_seed(0)
        return Checkpoint.backward(ctx, gradient)

    return _safe_class(forward, backward)


def _state_too_late(ctx, run, x):
    out = Checkpoint.forward(ctx, run, x)
    ctx.state = torch.get_rng_state()
    return out


def _never_put_back(ctx, gradient):
    torch.set_rng_state(ctx.state)
    return Checkpoint.backward(ctx, gradient)


def _one_state_for_all():
    held = {}

    def forward(ctx, run, x):
        held["state"] = torch.get_rng_state()
        return Checkpoint.forward(ctx, run, x)

    def backward(ctx, gradient):
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(held["state"])
            return Checkpoint.backward(ctx, gradient)

    return _safe_class(forward, backward)


def _without_dropout(ctx, gradient):
    training = ctx.run.training
    ctx.run.eval()
    try:
        return Checkpoint.backward(ctx, gradient)
    finally:
        ctx.run.train(training)


def _observe_dice(candidate):
    layers, x = trained_layers(4, dropout=0.5), _input()
    torch.default_generator.manual_seed(6)
    out = _one_by_one(candidate.apply, layers, x)
    out.square().sum().backward()
    after = torch.rand(3)
    found = {
        "four layers with dropout": {
            "output": out,
            "gradient of the input": torch.zeros_like(x) if x.grad is None else x.grad,
            "gradients of the weights": _gradient(layers),
        },
        "after the step": {"the next random numbers": after},
    }
    kept = _kept(lambda layers, x: _one_by_one(candidate.apply, layers, x), trained_layers(8, 0.5), _input())
    found["what 8 layers keep"] = {"boundaries alive after forward": kept}
    return found


def _reentrant(layer, x):
    return checkpoint(layer, x, use_reentrant=True)


def from_frozen(embedding, layers, ids):
    """The output of ``layers``, each in a reentrant checkpoint, on the vectors of a frozen ``embedding``."""
    x = embedding(ids).requires_grad_()
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=True)
    return x


def _trap(embedding, layers, ids):
    return _one_by_one(_reentrant, layers, embedding(ids))


def _thaws(embedding, layers, ids):
    embedding.weight.requires_grad_(True)
    return _one_by_one(_reentrant, layers, embedding(ids))


def _first_one_plain(embedding, layers, ids):
    return _one_by_one(_reentrant, layers[1:], layers[0](embedding(ids)))


def _all_plain(embedding, layers, ids):
    return _one_by_one(lambda layer, x: layer(x), layers, embedding(ids))


def _too_late(embedding, layers, ids):
    x = _reentrant(layers[0], embedding(ids)).requires_grad_()
    return _one_by_one(_reentrant, layers[1:], x)


def _cuts_the_chain(embedding, layers, ids):
    return _one_by_one(
        lambda layer, x: _reentrant(layer, x.detach().requires_grad_()), layers, embedding(ids)
    )


def _ids_with_grad(embedding, layers, ids):
    return _one_by_one(_reentrant, layers, embedding(ids.requires_grad_()))


def _frozen_setting():
    generator = torch.Generator().manual_seed(7)
    embedding = nn.Embedding(50, WIDTH, _weight=torch.randn(50, WIDTH, generator=generator))
    embedding.requires_grad_(False)
    return embedding, trained_layers(4), torch.randint(0, 50, (ROWS,), generator=generator)


def _observe_frozen(candidate):
    embedding, layers, ids = _frozen_setting()
    head = nn.Linear(WIDTH, 1)
    with torch.no_grad():
        head.weight.fill_(0.5)
        head.bias.fill_(0.1)
    with count_calls(layers) as order:
        head(candidate(embedding, layers, ids)).square().sum().backward()
    embedding_, layers_, ids_ = _frozen_setting()
    kept = _kept(lambda layers, x: candidate(embedding_, layers, ids_), layers_, None)
    return {
        "four trained layers after a frozen embedding": {
            f"gradient of layer {i}": _gradient(layer) for i, layer in enumerate(layers, 1)
        }
        | {"gradient of the head": _gradient(head)},
        "the embedding": {"gets a gradient (1 is yes)": int(embedding.weight.grad is not None)},
        "forward calls": {"of four layers": len(order)},
        "kept": {"boundaries alive after forward": kept},
    }


def run_in_segments(layers, x, k):
    """The output of ``layers`` run in checkpointed segments of ``k``; the last one may be shorter."""
    for start in range(0, len(layers), k):
        x = checkpoint(layers[start : start + k], x, use_reentrant=False)
    return x


def _segments(*parts):
    """A wrong ``run_in_segments``: ``parts(n, k)`` gives (start, stop) pairs."""
    (pairs,) = parts

    def wrong(layers, x, k):
        for start, stop in pairs(len(layers), k):
            x = checkpoint(layers[start:stop], x, use_reentrant=False)
        return x

    return wrong


def _last_takes_the_rest(n, k):
    starts = list(range(0, n - k + 1, k)) or [0]
    return list(zip(starts, [*starts[1:], n], strict=True))


def _sequential(layers, x, k):
    return checkpoint_sequential(layers, -(-len(layers) // k), x, use_reentrant=False)


def _late_binding(layers, x, k):
    for start in range(0, len(layers), k):
        x = checkpoint(lambda h: layers[start : start + k](h), x, use_reentrant=False)  # noqa: B023
    return x


def _every_kth_layer(layers, x, k):
    for i, layer in enumerate(layers):
        x = checkpoint(layer, x, use_reentrant=False) if i % k == 0 else layer(x)
    return x


def _always_the_first_input(layers, x, k):
    for start in range(0, len(layers), k):
        out = checkpoint(layers[start : start + k], x, use_reentrant=False)
    return out


def _last_one_plain(layers, x, k):
    *starts, last = range(0, len(layers), k)
    for start in starts:
        x = checkpoint(layers[start : start + k], x, use_reentrant=False)
    return layers[last:](x)


def _plain_segments(layers, x, k):
    for start in range(0, len(layers), k):
        x = layers[start : start + k](x)
    return x


def _observe_segments(candidate):
    found = {}
    for n, k in ((8, 4), (10, 4), (9, 2), (3, 5)):
        layers, x = trained_layers(n), _input()
        kept = _kept(lambda layers, x, k=k: candidate(layers, x, k), trained_layers(n), _input())
        with count_calls(layers) as order:
            candidate(layers, x, k).square().sum().backward()
        found[f"{n} layers, k = {k}"] = {
            "boundaries alive after forward": kept,
            "forward calls": len(order),
            "layers in the order in which they run": order,
            "gradients": _gradient(layers),
        }
    return found


def kept_at_peak(lengths, a, x):
    """The most bytes kept at once by segments of these lengths: earlier boundaries, and one whole segment."""
    return max(i * x + length * a for i, length in enumerate(lengths))


def best_length(n, a, x):
    """The segment length k with the lowest peak for ``n`` layers that keep ``a`` bytes each, ``x`` of them their input."""
    return min(n, max(1, round(math.sqrt(n * x / a))))


def _observe_length(candidate):
    found = {}
    for name, n, a, x in (
        ("64 layers, a = x", 64, 1000, 1000),
        ("100 layers, a = 4 x", 100, 4000, 1000),
        ("32 layers, a = 23 x (a 7B)", 32, 23_000, 1000),
        ("96 layers, a = 28 x", 96, 28_000, 1000),
        ("4 layers, a = 20 x", 4, 20_000, 1000),
        ("1 layer, a = x", 1, 1000, 1000),
    ):
        k = candidate(n, a, x)
        whole = isinstance(k, int) or (isinstance(k, float) and k.is_integer())
        fits = whole and 1 <= k <= n
        # Two lengths may have the same peak, so the peak is what counts.
        found[name] = {
            "k is a whole number from 1 to n (1 is yes)": int(fits),
            "peak with your k": kept_at_peak(uniform_segments(n, int(k)), a, x) if fits else math.nan,
        }
    return found


DEPTH, KEEPS = 64, 5
CHAIN_ROWS, CHAIN_WIDTH = 256, 32
CHAIN_BOUNDARY = CHAIN_ROWS * CHAIN_WIDTH * 4


def chain_setting() -> tuple[nn.Sequential, torch.Tensor]:
    """64 frozen layers that keep 5 boundaries each (their input is one), and the input, which is what is trained."""
    x = torch.randn(CHAIN_ROWS, CHAIN_WIDTH, generator=torch.Generator().manual_seed(8))
    return models.chain(DEPTH, width=CHAIN_WIDTH, keeps=KEEPS), x.requires_grad_()


def chain_budget() -> int:
    """Bytes: the weights of ``chain_setting`` and 40 boundaries."""
    layers, _ = chain_setting()
    return sum(p.nbytes for p in layers.parameters()) + 40 * CHAIN_BOUNDARY


def train_step(layers, x):
    """Forward and backward of mean(layers(x)²) within the budget, each layer run forward at most twice; the loss."""
    with checkpoint_layers(layers, best_segments(len(layers), internal=KEEPS - 1, boundary=1)):
        loss = layers(x).square().mean()
        loss.backward()
    return loss.item()


def _trains(every, keep_last=None):
    def wrong(layers, x):
        with checkpoint_layers(layers, every, keep_last=keep_last):
            loss = layers(x).square().mean()
            loss.backward()
        return loss.item()

    return wrong


def _steps(forward):
    def wrong(layers, x):
        loss = forward(layers, x).square().mean()
        loss.backward()
        return loss.item()

    return wrong


def _observe_budget(candidate):
    layers, x = chain_setting()
    with count_calls(layers) as order:
        measured = measure(lambda: candidate(layers, x), budget=chain_budget(), model=layers)
    gradient = torch.zeros_like(x) if x.grad is None else x.grad
    return {
        "64 layers": {"loss": measured.value, "gradient of the input": gradient},
        "forward calls": {"more than 2 for each layer (too many)": max(0, len(order) - 2 * DEPTH)},
        "the card": measured,
        # Tells two ways of the same peak apart: none, and a checkpoint around everything.
        "forward calls of a step that does not fit": {"in all": len(order) if measured.over else 0},
    }


EXERCISES = (
    Exercise(
        id="4.1",
        title="a checkpoint by hand",
        difficulty=2,
        minutes=10,
        trains="what autograd keeps, and how to run a layer again inside backward",
        reference=Checkpoint,
        observe=_observe_checkpoint,
        mistakes=(
            Mistake("keeps the graph", _keeps_the_graph(),
                    "the gradients are right, and nothing is saved: forward builds and keeps the graph of run(x); keep x alone, and run again in backward."),
            Mistake("no grad in backward", _checkpoint_class(backward=_backward_without_grad),
                    "backward runs with gradients switched off, so the second run has no graph: put it under torch.enable_grad()."),
            Mistake("no detach", _checkpoint_class(backward=_backward_without_detach),
                    "the saved x still hangs on the graph of earlier layers, and backward runs on into them: detach it, and let it require a gradient."),
            Mistake("the input alone", _checkpoint_class(backward=_backward_for_the_input_alone),
                    "the input gets its gradient and the weights get none: torch.autograd.backward reaches both."),
            Mistake("the gradient of the sum", _checkpoint_class(backward=_backward_of_the_sum),
                    "this takes the gradient of the output's sum: backward is handed the gradient that comes from later layers, so pass it on."),
            Mistake("no requires_grad", _checkpoint_class(backward=_backward_without_requires_grad),
                    "the detached x does not require a gradient, so nothing is handed on to earlier layers: add requires_grad_()."),
            Mistake("one gradient", _checkpoint_class(backward=_backward_of_one),
                    "backward returns one value, and forward took two arguments, run and x: return None for run."),
            Mistake("turned around", _checkpoint_class(backward=_backward_turned_around),
                    "backward returns its values the wrong way round: None belongs to run, which comes first."),
        ),
    ),
    Exercise(
        id="4.2",
        title="the same dice twice",
        difficulty=2,
        minutes=6,
        trains="saving the random state, and leaving the rest of the program alone",
        reference=SafeCheckpoint,
        observe=_observe_dice,
        mistakes=(
            Mistake("not restored", _safe_class(lambda ctx, run, x: Checkpoint.forward(ctx, run, x), lambda ctx, g: Checkpoint.backward(ctx, g)),
                    "the second run draws other dropout masks than the first: the random state is not restored."),
            Mistake("one seed for all", _one_seed_for_all(),
                    "a fixed seed gives every layer the same mask, and every step too: keep the state that was there."),
            Mistake("state too late", _safe_class(forward=_state_too_late),
                    "the random state is taken after the run: the dice are thrown by then."),
            Mistake("never put back", _safe_class(backward=_never_put_back),
                    "the gradients are right, and the rest of the program gets its random numbers twice: torch.random.fork_rng() puts the state back."),
            Mistake("one state for all", _one_state_for_all(),
                    "there is one state for all layers, the last one's: keep it in ctx, which every call has for itself."),
            Mistake("no dropout", _safe_class(backward=_without_dropout),
                    "the second run has no dropout at all: that is the gradient of another network."),
        ),
    ),
    Exercise(
        id="4.3",
        title="the gradient that never came",
        difficulty=1,
        minutes=5,
        trains="why a reentrant checkpoint needs an input that requires a gradient",
        reference=from_frozen,
        observe=_observe_frozen,
        mistakes=(
            Mistake("the trap", _trap,
                    "no layer gets a gradient: a reentrant checkpoint whose input needs none has no node in the graph. Let the embedding's output require one."),
            Mistake("thaws", _thaws,
                    "this trains the embedding, which is frozen: let its output require a gradient, not its weight."),
            Mistake("first one plain", _first_one_plain,
                    "the gradients are right, and the first layer keeps all its activations: with requires_grad_() it can be checkpointed too."),
            Mistake("all plain", _all_plain, "the gradients are right, and nothing is checkpointed."),
            Mistake("too late", _too_late,
                    "the first layer gets no gradient: its input must require one, and not just its output."),
            Mistake("cuts the chain", _cuts_the_chain,
                    "detaching in front of every layer cuts the chain: only the last layer learns. Once, in front of the first, is right."),
            Mistake("ids", _ids_with_grad,
                    "token ids are whole numbers and cannot require a gradient: the vectors that the embedding returns can."),
        ),
    ),
    Exercise(
        id="4.4",
        title="segments",
        difficulty=2,
        minutes=6,
        trains="cutting a list of layers, to its last one",
        reference=run_in_segments,
        observe=_observe_segments,
        mistakes=(
            Mistake("drops the rest", _segments(lambda n, k: [(i * k, i * k + k) for i in range(n // k)] or [(0, 0)]),
                    "layers are left out: where k does not divide the number of layers, a shorter segment is left over."),
            Mistake("the last takes the rest", _segments(_last_takes_the_rest),
                    "the last segment takes whatever is left: it grows too long, where a shorter one of its own was asked for."),
            Mistake("checkpoint_sequential", _sequential,
                    "checkpoint_sequential takes a number of segments, rounds their length down and gives the last one all the rest: 9 layers in 5 segments are 1, 1, 1, 1, 5."),
            Mistake("late binding", _late_binding,
                    "the lambda looks up its variables when it runs again, and by then the loop has moved on: hand the segment itself to checkpoint."),
            Mistake("the whole model", _segments(lambda n, k: [(0, n)]),
                    "the whole model is one segment: in backward all of it is there at once, as if nothing had been done."),
            Mistake("layer by layer", _segments(lambda n, k: [(i, i + 1) for i in range(n)]),
                    "every layer is a segment of its own: k of them belong together."),
            Mistake("every k-th layer", _every_kth_layer,
                    "one layer in k is checkpointed, and the others keep everything: put k layers in a row into one checkpoint."),
            Mistake("one too many", _segments(lambda n, k: [(i, i + k + 1) for i in range(0, n, k)]),
                    "the last layer of each segment runs once more as the first of the next: a slice ends before its second number."),
            Mistake("the first input", _always_the_first_input,
                    "each segment starts from the model's input: hand it what the segment before returned."),
            Mistake("last one plain", _last_one_plain,
                    "a fine idea, which section 7 takes up: the last segment runs without a checkpoint. Here, put it into one as well."),
            Mistake("nothing", _plain_segments, "the segments are right, and none of them is in a checkpoint."),
        ),
    ),
    Exercise(
        id="4.5",
        title="the peak of a schedule",
        difficulty=2,
        minutes=5,
        trains="finding the segment whose backward needs the most",
        reference=kept_at_peak,
        observe=calls(
            ([1, 1, 1, 1], 1000, 1000), ([4, 4, 4, 4], 3000, 1000), ([4, 4, 1], 5000, 1000), ([9], 5000, 1000),
            ([5, 4, 3, 2], 3000, 1000), ([2, 3, 4, 5], 3000, 1000),
        ),
        mistakes=(
            Mistake("boundaries alone", lambda lengths, a, x: len(lengths) * x,
                    "this counts boundaries alone: in backward, a segment that runs again is there in full, with a bytes for each layer."),
            Mistake("the segment alone", lambda lengths, a, x: max(lengths) * a,
                    "this counts the segment that runs again, and not the boundaries of the earlier ones, which are still waiting."),
            Mistake("its own boundary twice", lambda lengths, a, x: max(i * x + m * a for i, m in enumerate(lengths, 1)),
                    "this counts a segment's own boundary twice: a includes the input of its first layer."),
            Mistake("all boundaries", lambda lengths, a, x: len(lengths) * x + max(lengths) * a,
                    "the longest segment does not meet all boundaries: later ones are gone when its backward comes."),
            Mistake("all later boundaries", lambda lengths, a, x: max(i * x + m * a for i, m in enumerate(lengths[::-1])),
                    "the boundaries are counted from the end: when a segment runs again, the earlier ones are those still there."),
            Mistake("the last segment", lambda lengths, a, x: (len(lengths) - 1) * x + lengths[-1] * a,
                    "this looks at the last segment alone: an earlier, longer one may need more."),
            Mistake("the longest", lambda lengths, a, x: lengths.index(max(lengths)) * x + max(lengths) * a,
                    "this looks at the first of the longest segments: a later one of the same length finds more boundaries."),
            Mistake("nothing dropped", lambda lengths, a, x: sum(lengths) * a,
                    "this is what the layers keep without any checkpoint."),
            Mistake("a mean segment", lambda lengths, a, x: len(lengths) * x + sum(lengths) / len(lengths) * a - x,
                    "this takes a segment of mean length: the peak is the largest moment, not the mean one."),
        ),
    ),
    Exercise(
        id="4.6",
        title="the best segment length",
        difficulty=2,
        minutes=6,
        trains="deriving the rule, and knowing when the root of n is not it",
        reference=best_length,
        observe=_observe_length,
        mistakes=(
            Mistake("the root of n", lambda n, a, x: max(1, round(math.sqrt(n))),
                    "this is √n, which is right where a layer keeps no more than its input: with a > x, segments must be shorter."),
            Mistake("the wrong way round", lambda n, a, x: min(n, max(1, round(math.sqrt(n * a / x)))),
                    "a and x are the wrong way round (or this is n / k, the number of segments): the more a layer keeps, the shorter the segments."),
            Mistake("always 1", lambda n, a, x: 1,
                    "one layer is right for most Transformers, and not for every chain: let n, a and x decide."),
            Mistake("down to 0", lambda n, a, x: round(math.sqrt(n * x / a)),
                    "for a shallow network of large layers this rounds to 0: no segment has fewer layers than one."),
            Mistake("a fraction", lambda n, a, x: math.sqrt(n * x / a), "k must be a whole number: round it."),
            Mistake("rounds down", lambda n, a, x: max(1, int(math.sqrt(n * x / a))),
                    "this rounds down where the nearest whole number is above: 1.85 is closer to 2."),
        ),
    ),
    Exercise(
        id="4.7",
        title="64 layers on a card that the root of n exceeds",
        difficulty=3,
        minutes=10,
        trains="choosing segments of unequal length under a budget of bytes and of forward calls",
        reference=train_step,
        observe=_observe_budget,
        mistakes=(
            Mistake("none", _steps(lambda layers, x: layers(x)), "nothing is checkpointed."),
            Mistake("the whole model", _trains([DEPTH], keep_last=False),
                    "one checkpoint around the whole model: all of it is there at once in backward, as without any."),
            Mistake("layer by layer", _trains(1),
                    "every layer is a segment of its own, so 64 boundaries wait: that is more than the card has."),
            Mistake("the root of n", _trains("sqrt"),
                    "segments of √64 = 8 layers are too long where a layer keeps five times its input."),
            Mistake("the best equal ones", _trains(4),
                    "this is the best that equal segments can do, and not enough: early segments find few boundaries, so they may be longer."),
            Mistake("the best equal ones, the last one kept", _trains(uniform_segments(DEPTH, 4)),
                    "this is the best that equal segments can do, and not enough: early segments find few boundaries, so they may be longer."),
            Mistake("short first", _trains(best_segments(DEPTH, KEEPS - 1, 1)[::-1]),
                    "these are the right lengths the wrong way round: the last segments find the most boundaries, so they must be the shortest."),
            Mistake("twice nested", _trains(best_segments(DEPTH, KEEPS - 1, 1, 2.0)),
                    "it fits with room to spare, and layers run forward three times: one extra forward was allowed."),
            Mistake("checkpoint_sequential", _steps(lambda layers, x: checkpoint_sequential(layers, 22, x, use_reentrant=False)),
                    "checkpoint_sequential(layers, 22, x) makes segments of 64 // 22 = 2 layers and leaves 22 for the last."),
            Mistake("without the last four", _steps(lambda layers, x: run_in_segments(layers[:60], x, 4)),
                    "the last four layers never run: the lengths must add up to 64."),
            Mistake("half the rows", lambda layers, x: train_step(layers, x[: len(x) // 2]),
                    "this runs half the rows: it fits, and is another loss."),
        ),
    ),
)  # fmt: skip
