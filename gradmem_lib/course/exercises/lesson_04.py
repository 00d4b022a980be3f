"""Lesson 04's exercises about one checkpoint: by hand, with its random numbers, and after a frozen start."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...measure.tracker import MemoryTracker
from ..exercise import Exercise, Mistake
from .settings import gradients_of

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


def first_input(requires_grad: bool = True) -> torch.Tensor:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5))
    return x.requires_grad_(requires_grad)


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


def kept_boundaries(forward, layers, x) -> int:
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


def _but(made, **members):
    """A wrong ``Checkpoint`` or ``SafeCheckpoint``, of the same name, which PyTorch puts into its messages."""
    members = {name: staticmethod(function) for name, function in members.items()}
    given = {name: staticmethod(getattr(made, name)) for name in ("forward", "backward")}
    return type(torch.autograd.Function)(made.__name__, (torch.autograd.Function,), given | members)


def _keeps_the_graph():
    def forward(ctx, run, x):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.out = run(ctx.x)
        return ctx.out.detach()

    def backward(ctx, gradient):
        torch.autograd.backward(ctx.out, gradient)
        return None, ctx.x.grad

    return _but(Checkpoint, forward=forward, backward=backward)


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


def _backward_without_requires_grad(ctx, gradient):
    x = ctx.saved_tensors[0].detach()
    with torch.enable_grad():
        out = ctx.run(x)
    torch.autograd.backward(out, gradient)
    return None, x.grad


def _backward_of_one(ctx, gradient):
    return Checkpoint.backward(ctx, gradient)[1]


def _observe_checkpoint(candidate):
    layers, x = trained_layers(4), first_input()
    with count_calls(layers) as order:
        out = _one_by_one(candidate.apply, layers, x)
        out.square().sum().backward()
    found = {
        "four layers": {
            "output": out,
            "gradient of the input": torch.zeros_like(x) if x.grad is None else x.grad,
            "gradients of the weights": gradients_of(layers),
        }
    }
    kept = kept_boundaries(
        lambda layers, x: _one_by_one(candidate.apply, layers, x), trained_layers(8), first_input()
    )
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


def _one_seed_for_all(ctx, *arguments, run):
    torch.manual_seed(0)
    return run(ctx, *arguments)


def _state_too_late(ctx, run, x):
    out = Checkpoint.forward(ctx, run, x)
    ctx.state = torch.get_rng_state()
    return out


def _never_put_back(ctx, gradient):
    torch.set_rng_state(ctx.state)
    return Checkpoint.backward(ctx, gradient)


class _Everyone:
    """A ctx whose random state is everybody's."""


def _one_state_for_all(ctx, gradient):
    ctx.state = _Everyone.state
    return SafeCheckpoint.backward(ctx, gradient)


def _state_of_everyone(ctx, run, x):
    _Everyone.state = torch.get_rng_state()
    return Checkpoint.forward(ctx, run, x)


def _observe_dice(candidate):
    layers, x = trained_layers(4, dropout=0.5), first_input()
    torch.default_generator.manual_seed(6)
    out = _one_by_one(candidate.apply, layers, x)
    out.square().sum().backward()
    after = torch.rand(3)
    found = {
        "four layers with dropout": {
            "output": out,
            "gradient of the input": torch.zeros_like(x) if x.grad is None else x.grad,
            "gradients of the weights": gradients_of(layers),
        },
        "after the step": {"the next random numbers": after},
    }
    kept = kept_boundaries(
        lambda layers, x: _one_by_one(candidate.apply, layers, x), trained_layers(8, 0.5), first_input()
    )
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


def _thaws(embedding, layers, ids):
    embedding.weight.requires_grad_(True)
    return _one_by_one(_reentrant, layers, embedding(ids))


def _first_one_plain(embedding, layers, ids):
    return _one_by_one(_reentrant, layers[1:], layers[0](embedding(ids)))


def _too_late(embedding, layers, ids):
    x = _reentrant(layers[0], embedding(ids)).requires_grad_()
    return _one_by_one(_reentrant, layers[1:], x)


def _cuts_the_chain(embedding, layers, ids):
    return _one_by_one(
        lambda layer, x: _reentrant(layer, x.detach().requires_grad_()), layers, embedding(ids)
    )


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
    kept = kept_boundaries(lambda layers, x: candidate(embedding_, layers, ids_), layers_, None)
    return {
        "four trained layers after a frozen embedding": {
            f"gradient of layer {i}": gradients_of(layer) for i, layer in enumerate(layers, 1)
        }
        | {"gradient of the head": gradients_of(head)},
        "the embedding": {"gets a gradient (1 is yes)": int(embedding.weight.grad is not None)},
        "forward calls": {"of four layers": len(order)},
        "kept": {"boundaries alive after forward": kept},
    }


EXERCISES = (
    Exercise(
        id="4.1", title="a checkpoint by hand", difficulty=2, minutes=10,
        trains="what autograd keeps, and how to run a layer again inside backward",
        reference=Checkpoint,
        observe=_observe_checkpoint,
        mistakes=(
            Mistake("keeps the graph", _keeps_the_graph(),
                    "the gradients are right, and nothing is saved: forward builds and keeps the graph of run(x); keep x alone, and run again in backward."),
            Mistake("no grad in backward", _but(Checkpoint, backward=_backward_without_grad),
                    "backward runs with gradients switched off, so the second run has no graph: put it under torch.enable_grad()."),
            Mistake("no detach", _but(Checkpoint, backward=_backward_without_detach),
                    "the saved x still hangs on the graph of earlier layers, and backward runs on into them: detach it, and let it require a gradient."),
            Mistake("the input alone", _but(Checkpoint, backward=_backward_for_the_input_alone),
                    "the input gets its gradient and the weights get none: torch.autograd.backward reaches both."),
            Mistake("no requires_grad", _but(Checkpoint, backward=_backward_without_requires_grad),
                    "the detached x does not require a gradient, so nothing is handed on to earlier layers: add requires_grad_()."),
            Mistake("one gradient", _but(Checkpoint, backward=_backward_of_one),
                    "backward returns one value, and forward took two arguments, run and x: return None for run."),
        ),
    ),
    Exercise(
        id="4.2", title="the same dice twice", difficulty=2, minutes=6,
        trains="saving the random state, and leaving the rest of the program alone",
        reference=SafeCheckpoint,
        observe=_observe_dice,
        mistakes=(
            Mistake("not restored", _but(SafeCheckpoint, forward=Checkpoint.forward, backward=Checkpoint.backward),
                    "the second run draws other dropout masks than the first: the random state is not restored."),
            Mistake("one seed for all", _but(SafeCheckpoint, forward=partial(_one_seed_for_all, run=Checkpoint.forward), backward=partial(_one_seed_for_all, run=Checkpoint.backward)),
                    "a fixed seed gives every layer the same mask, and every step too: keep the state that was there."),
            Mistake("state too late", _but(SafeCheckpoint, forward=_state_too_late),
                    "the random state is taken after the run: the dice are thrown by then."),
            Mistake("never put back", _but(SafeCheckpoint, backward=_never_put_back),
                    "the gradients are right, and the rest of the program gets its random numbers twice: torch.random.fork_rng() puts the state back."),
            Mistake("one state for all", _but(SafeCheckpoint, forward=_state_of_everyone, backward=_one_state_for_all),
                    "there is one state for all layers, the last one's: keep it in ctx, which every call has for itself."),
        ),
    ),
    Exercise(
        id="4.3", title="the gradient that never came", difficulty=1, minutes=5,
        trains="why a reentrant checkpoint needs an input that requires a gradient",
        reference=from_frozen,
        observe=_observe_frozen,
        mistakes=(
            Mistake("the trap", lambda embedding, layers, ids: _one_by_one(_reentrant, layers, embedding(ids)),
                    "no layer gets a gradient: a reentrant checkpoint whose input needs none has no node in the graph. Let the embedding's output require one."),
            Mistake("thaws", _thaws,
                    "this trains the embedding, which is frozen: let its output require a gradient, not its weight."),
            Mistake("first one plain", _first_one_plain,
                    "the gradients are right, and one layer keeps all its activations: every layer can be checkpointed, the first one too."),
            Mistake("all plain", lambda embedding, layers, ids: layers(embedding(ids)),
                    "the gradients are right, and nothing is checkpointed."),
            Mistake("too late", _too_late,
                    "the first layer gets no gradient: its input must require one, and not just its output."),
            Mistake("cuts the chain", _cuts_the_chain,
                    "detaching in front of every layer cuts the chain: only the last layer learns. Once, in front of the first, is right."),
        ),
    ),
)  # fmt: skip
