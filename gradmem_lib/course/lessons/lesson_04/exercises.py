"""Lesson 04's exercises about one checkpoint: by hand, and with its random numbers."""

from __future__ import annotations

from functools import partial

import torch

from ...judge.compare import difference
from ...judge.exercise import Exercise, Mistake
from ..shared.settings import gradients_of
from .layers import (
    copies_of_weights,
    count_calls,
    first_input,
    kept_boundaries,
    one_by_one,
    trained_layers,
)


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
    """A wrong ``Checkpoint`` or ``SafeCheckpoint``, of the same name, which PyTorch puts into its
    messages.
    """
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


def apply_of(candidate):
    """``apply`` as ``torch.autograd.Function`` has it, which runs the candidate's forward and
    backward, whatever its class has under that name.
    """
    return partial(torch.autograd.Function.apply.__func__, _that_ends(candidate))


_RUNS_ITSELF = "backward runs itself again"
_DEEPEST = 40  # an answer that goes on into earlier layers is as deep as there are layers


def _that_ends(candidate):
    """``candidate`` with a backward that stops where it has called itself without end, which
    PyTorch would follow for minutes.
    """
    original = candidate.backward
    if original is torch.autograd.Function.backward:
        return candidate
    inside = []

    def backward(ctx, *gradients):
        if len(inside) > _DEEPEST:
            raise RecursionError(_RUNS_ITSELF)
        inside.append(None)
        try:
            return original(ctx, *gradients)
        finally:
            inside.pop()

    members = {"backward": staticmethod(backward)}
    return type(candidate)(candidate.__name__, (candidate,), members)


def _backward_that_overwrites(ctx, gradient):
    x = ctx.saved_tensors[0].detach().requires_grad_()
    with torch.enable_grad():
        out = ctx.run(x)
    weights = list(ctx.run.parameters())
    of_x, *of_weights = torch.autograd.grad(out, [x, *weights], gradient)
    for weight, found in zip(weights, of_weights, strict=True):
        weight.grad = found
    return None, of_x


def _copies_the_weights(ctx, run, x):
    ctx.copies = [p.clone() for p in run.parameters()]
    return Checkpoint.forward(ctx, run, x)


def _observe_checkpoint(candidate):
    layers, x = trained_layers(4), first_input()
    apply = apply_of(candidate)
    with count_calls(layers) as order:
        out = one_by_one(apply, layers, x)
        out.square().sum().backward()
    found = {
        "four layers": {
            "output": out,
            "gradient of the input": torch.zeros_like(x) if x.grad is None else x.grad,
            "gradients of the weights": gradients_of(layers),
        }
    }
    kept = kept_boundaries(lambda layers, x: one_by_one(apply, layers, x), trained_layers(8))
    found["what 8 layers keep"] = {"boundaries alive after forward": kept}
    found[_ONE] = {"boundaries alive after forward": _kept_by_one(apply)}
    found["copies of weights"] = {"alive after forward": copies_of_weights(apply)}
    found["four layers, forward calls"] = {"in forward and backward": len(order)}
    found[_BEFORE] = {"gradients of the weights": _added_gradients(apply)}
    found[_FROZEN] = _beside_frozen(apply)
    found[_ORDER] = {"gradients of the weights": _gradients_first_come(apply)}
    found[_AFTER] = {"boundaries that are still alive": _kept_after_backward(apply)}
    return found


def _beside_frozen(apply) -> dict:
    """The gradients of three layers, where the second one is frozen, and what stopped the answer
    there.
    """
    layers = trained_layers(3)
    layers[1].requires_grad_(False)
    stopped = ""
    try:
        one_by_one(apply, layers, first_input()).square().sum().backward()
    except RuntimeError as error:
        stopped = str(error)
    return {"stopped by": stopped, "gradients of the weights": gradients_of(layers)}


def _gradients_first_come(apply, dropout: float = 0.0) -> torch.Tensor:
    """The gradients of two layers beside each other, whose backwards run in the order of their
    forwards.
    """
    layers, x = trained_layers(2, dropout), first_input()
    for out in [apply(layer, x) for layer in layers]:
        out.square().sum().backward()
    return gradients_of(layers)


def _kept_after_backward(apply) -> int:
    """Boundaries of 8 layers that are alive after backward; 0 where they are no more than what
    was kept for it.
    """

    def step(layers, x):
        out = one_by_one(apply, layers, x)
        out.square().sum().backward()
        return out

    kept = kept_boundaries(step, trained_layers(8))
    return kept if kept > 2 * 8 else 0


def _kept_by_one(apply) -> int:
    """Boundaries that one layer keeps whose output nobody else keeps, with its input."""

    def summed(layers, x):
        return one_by_one(apply, layers, x).sum()

    return kept_boundaries(summed, trained_layers(1))


def _added_gradients(apply) -> torch.Tensor:
    """The gradients of layers whose weights have a gradient of ones before."""
    layers = trained_layers(2)
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter)
    one_by_one(apply, layers, first_input()).square().sum().backward()
    return gradients_of(layers)


_BEFORE = "weights that have a gradient already"
_FROZEN = "a frozen layer between two others"
_ORDER = "two layers side by side, whose backwards run in the order of their forwards"
_AFTER = "8 layers after backward"


_COPIES = (
    "copies of the weights are kept in ctx: keep only x; run has its weights when it runs again."
)
_OWN = (
    "backwards need not run in the reverse order of the forwards: keep what each call needs in its "
    "own ctx, not in a list of all calls."
)
_KEPT = "what 8 layers keep"
_ONE = "what one layer keeps"


def _explain_kept(got, expected):
    kept, right = (seen[_KEPT]["boundaries alive after forward"] for seen in (got, expected))
    if kept > 2 * right:
        return "the graph of the first run is kept: keep only x, and run again in backward."
    more = got.get(_ONE) != expected.get(_ONE)
    if kept > right or more:
        return (
            "more than x is kept for each layer: save x itself, no clone or copy of it, and not "
            "the output."
        )
    return None


def _explain_checkpoint(got, expected):
    mine, right = got["four layers"], expected["four layers"]
    if difference(mine["output"], right["output"]):
        return "the output is not that of run(x): forward returns what run(x) returns."
    if not mine["gradients of the weights"].any():
        return (
            "the weights inside run get no gradient: torch.autograd.backward(out, gradient) "
            "reaches them, and x."
        )
    if difference(mine["gradient of the input"], right["gradient of the input"]):
        return (
            "the gradient that backward returns is not that of x: run again from "
            "x.detach().requires_grad_(), call backward once on the output with the incoming "
            "gradient, and return x.grad."
        )
    calls, wanted = (
        seen["four layers, forward calls"]["in forward and backward"] for seen in (got, expected)
    )
    if calls > wanted:
        return "layers run more often than needed: once in forward, and once more in backward."
    if got["copies of weights"]["alive after forward"]:
        return _COPIES
    return _explain_elsewhere(got, expected) or _explain_kept(got, expected)


def _explain_elsewhere(got, expected):
    """What is said of frozen weights, of another order, and of what is left after backward."""
    if "does not require grad" in got[_FROZEN]["stopped by"]:
        return (
            "a frozen weight gets no gradient, and may not be asked for one: take those of the "
            "weights that require one, or let torch.autograd.backward(out, gradient) find them."
        )
    if difference(got[_FROZEN], expected[_FROZEN]):
        return "a frozen weight gets a gradient: leave requires_grad of the weights as it is."
    of_weights = "gradients of the weights"
    if difference(got[_BEFORE][of_weights] + 1, expected[_BEFORE][of_weights]) is None:
        # Each had a gradient of ones.
        return (
            "the gradient that a weight had in .grad before is lost: backward adds to it, as "
            "accumulation needs."
        )
    if difference(got[_ORDER], expected[_ORDER]):
        return _OWN
    if got[_AFTER]["boundaries that are still alive"]:
        return (
            "the graph of the second run is kept after backward, so the layers pile up: put "
            "nothing into ctx in backward."
        )
    return None


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
    apply = apply_of(candidate)
    out = one_by_one(apply, layers, x)
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
    kept = kept_boundaries(lambda layers, x: one_by_one(apply, layers, x), trained_layers(8, 0.5))
    found["what 8 layers keep"] = {"boundaries alive after forward": kept}
    torch.default_generator.manual_seed(7)
    found[_ORDER] = {"gradients of the weights": _gradients_first_come(apply, dropout=0.5)}
    return found


def _explain_dice(got, expected):
    name = "four layers with dropout"
    mine, right = got[name], expected[name]
    if difference(mine["output"], right["output"]):
        return (
            "the first run, in forward, draws other random numbers than a plain run of the "
            "layers: set no seed and use no fork_rng there; only save the state, and run."
        )
    if difference(mine, right):
        return (
            "the second run draws other masks than the first: it needs the torch.get_rng_state() "
            "from just before the first run, not a seed, and not the state of another moment."
        )
    if difference(got["after the step"], expected["after the step"]):
        return (
            "the gradients are right, but the rest of the program gets other random numbers: "
            "restore the state from before backward's run."
        )
    if difference(got[_ORDER], expected[_ORDER]):
        return _OWN
    return _explain_kept(got, expected)


EXERCISES = (
    Exercise(
        id="4.1",
        title="a checkpoint by hand",
        difficulty=2,
        minutes=10,
        trains="what autograd keeps, and how to run a layer again inside backward",
        reference=Checkpoint,
        observe=_observe_checkpoint,
        explain=_explain_checkpoint,
        raises=(
            (
                r"gradient different than None at position|incorrect number of gradients",
                (
                    "backward returns a gradient for each argument of forward, in their order: "
                    "None for run, then x.grad."
                ),
            ),
            (
                r"save_for_backward can only save variables",
                "save_for_backward keeps tensors only: keep run by ctx.run = run.",
            ),
            (
                r"implicitly created only for scalar",
                (
                    "the output is no single number: backward on it starts from the incoming "
                    "gradient, torch.autograd.backward(out, gradient)."
                ),
            ),
            (
                r"not enough values to unpack \(expected 1, got 0\)",
                ("ctx.saved_tensors is empty if forward has not called ctx.save_for_backward(x)."),
            ),
            (
                _RUNS_ITSELF,
                (
                    "backward calls itself: the output that it calls backward on is the one that "
                    "forward returned. Run again in backward, from x.detach().requires_grad_(), "
                    "and call backward on this new output."
                ),
            ),
            (
                r"'tuple' object has no attribute",
                "ctx.saved_tensors is a tuple: (x,) = ctx.saved_tensors.",
            ),
        ),
        mistakes=(
            Mistake("copies", _but(Checkpoint, forward=_copies_the_weights), _COPIES),
            Mistake(
                "overwrites",
                _but(Checkpoint, backward=_backward_that_overwrites),
                (
                    "a weight's gradient replaces the one that was in .grad before: backward adds "
                    "to it, as accumulation needs."
                ),
            ),
            Mistake(
                "keeps the graph",
                _keeps_the_graph(),
                (
                    "the gradients are right, but no memory is saved: forward builds and keeps the "
                    "graph of run(x); keep only x, and run again in backward."
                ),
            ),
            Mistake(
                "no grad in backward",
                _but(Checkpoint, backward=_backward_without_grad),
                (
                    "autograd is off inside backward, and what you call backward on has no graph: "
                    "run again under torch.enable_grad(), and hand the output of this run, with "
                    "the incoming gradient, to torch.autograd.backward."
                ),
            ),
            Mistake(
                "no detach",
                _but(Checkpoint, backward=_backward_without_detach),
                (
                    "the saved x is still part of the graph of earlier layers, and backward "
                    "continues into them: detach x, and let it require a gradient."
                ),
            ),
            Mistake(
                "the input alone",
                _but(Checkpoint, backward=_backward_for_the_input_alone),
                (
                    "the input gets its gradient and the weights get none: torch.autograd.backward "
                    "reaches both."
                ),
            ),
            Mistake(
                "no requires_grad",
                _but(Checkpoint, backward=_backward_without_requires_grad),
                (
                    "the detached x does not require a gradient, so earlier layers get no "
                    "gradient: add requires_grad_()."
                ),
            ),
            Mistake(
                "one gradient",
                _but(Checkpoint, backward=_backward_of_one),
                (
                    "backward must return two values, because forward took two arguments, run and "
                    "x: return None, x.grad. Without a `return` it returns one value, None."
                ),
            ),
        ),
    ),
    Exercise(
        id="4.2",
        title="the same random numbers twice",
        difficulty=2,
        minutes=6,
        trains="saving the random state, and leaving the rest of the program alone",
        reference=SafeCheckpoint,
        observe=_observe_dice,
        explain=_explain_dice,
        mistakes=(
            Mistake(
                "not restored",
                _but(SafeCheckpoint, forward=Checkpoint.forward, backward=Checkpoint.backward),
                (
                    "the second run draws other dropout masks than the first: the random state is "
                    "not restored."
                ),
            ),
            Mistake(
                "one seed for all",
                _but(
                    SafeCheckpoint,
                    forward=partial(_one_seed_for_all, run=Checkpoint.forward),
                    backward=partial(_one_seed_for_all, run=Checkpoint.backward),
                ),
                (
                    "a fixed seed gives every layer and every step the same mask: save the random "
                    "state instead."
                ),
            ),
            Mistake(
                "state too late",
                _but(SafeCheckpoint, forward=_state_too_late),
                (
                    "the random state is saved after the run, when the random numbers are already "
                    "drawn."
                ),
            ),
            Mistake(
                "never put back",
                _but(SafeCheckpoint, backward=_never_put_back),
                (
                    "the gradients are right, but the rest of the program gets the same random "
                    "numbers twice: torch.random.fork_rng() restores the state."
                ),
            ),
            Mistake(
                "one state for all",
                _but(SafeCheckpoint, forward=_state_of_everyone, backward=_one_state_for_all),
                (
                    "all layers share one state, the last layer's: keep the state in ctx, because "
                    "every call has its own ctx."
                ),
            ),
        ),
    ),
)
