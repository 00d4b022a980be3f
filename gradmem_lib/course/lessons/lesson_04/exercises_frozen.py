"""Lesson 04's exercise about checkpoints after a frozen start."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...judge.compare import difference
from ...judge.exercise import Exercise, Mistake
from ..shared.settings import gradients_of
from .layers import ROWS, WIDTH, count_calls, one_by_one, trained_layers


def _reentrant(layer, x):
    return checkpoint(layer, x, use_reentrant=True)


def from_frozen(embedding, layers, ids):
    """The output of ``layers``, each in a reentrant checkpoint, on the vectors of a frozen
    ``embedding``.
    """
    x = embedding(ids).requires_grad_()
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=True)
    return x


def _thaws(embedding, layers, ids):
    embedding.weight.requires_grad_(True)
    return one_by_one(_reentrant, layers, embedding(ids))


def _first_one_plain(embedding, layers, ids):
    return one_by_one(_reentrant, layers[1:], layers[0](embedding(ids)))


def _too_late(embedding, layers, ids):
    x = _reentrant(layers[0], embedding(ids)).requires_grad_()
    return one_by_one(_reentrant, layers[1:], x)


def _cuts_the_chain(embedding, layers, ids):
    return one_by_one(
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
    longer = _gradients_of_more(candidate)
    with count_calls(layers) as order:
        head(candidate(embedding, layers, ids)).square().sum().backward()
    return {
        "four trained layers after a frozen embedding": {
            f"gradient of layer {i}": gradients_of(layer) for i, layer in enumerate(layers, 1)
        }
        | {"gradient of the head": gradients_of(head)},
        "the embedding": {"gets a gradient (1 is yes)": int(embedding.weight.grad is not None)},
        "forward calls": {f"of layer {i}": n for i, n in enumerate(order.times(layers), 1)},
        # Tells ways in which nothing is learned apart.
        "the first layer's input": {
            "requires a gradient": order.wants or bool(gradients_of(layers).any())
        },
        "layers that record no graph in forward": {"how many": len(order.no_graph)},
        "segments": {
            "layers that run again together": order.segments(layers) if len(order) > 4 else []
        },
        _MORE: {"gradients": longer},
    }


def _gradients_of_more(candidate) -> torch.Tensor:
    """The gradients of another number of layers, which draw random numbers."""
    embedding, _, ids = _frozen_setting()
    layers = trained_layers(6, dropout=0.5)
    out = candidate(embedding, layers, ids)
    if isinstance(out, torch.Tensor) and out.requires_grad:
        out.square().sum().backward()
    return gradients_of(layers)


_MORE = "six layers with dropout"


RANDOM = (
    "with dropout the gradients are wrong, because the second run draws other random numbers: "
    "PyTorch's checkpoint puts the random state back, with preserve_rng_state=True, its default."
)
_NO_NODE = (
    "no layer gets a gradient: a reentrant checkpoint whose input requires no gradient has "
    "no node in the graph. Let the embedding's output require one."
)


def _explain_frozen(got, expected):
    calls = {name.removeprefix("of "): n for name, n in got["forward calls"].items()}
    for name, n in calls.items():
        if n > 2:
            return (
                f"{name} runs {n} times, but with a checkpoint it runs "
                "twice: call each layer once, inside its checkpoint."
            )
    gradients, right = (next(iter(seen.values())) for seen in (got, expected))
    if any(difference(gradients[name], right[name]) for name in right):
        learns = [name for name in right if gradients[name].any()]
        return _why_no_gradient(got, calls, learns, list(right))
    return _why_not_checkpointed(got, expected, calls)


def _why_no_gradient(got, calls, learns, names) -> str | None:
    """``learns``: which of the gradients in ``names`` are not 0."""
    missing = [name for name, n in calls.items() if not n]
    if missing:
        runs = "runs" if len(missing) == 1 else "run"
        return (
            f"{' and '.join(missing)} never {runs}: x goes through all layers, one after the other."
        )
    if got["segments"]["layers that run again together"] == [4] and learns == names:
        return "the layers run in the wrong order: begin with the first one."
    if learns == ["gradient of the head"]:
        if got["the first layer's input"]["requires a gradient"]:
            return (
                "no layer gets a gradient, though the first one's input requires one: is the "
                "output detached, or are the checkpoints under torch.no_grad()?"
            )
        return _NO_NODE
    cut = [name.removeprefix("gradient of ") for name in names if name not in learns]
    if not cut:
        return None
    gets = "gets" if len(cut) == 1 else "get"
    return (
        f"{' and '.join(cut)} {gets} no gradient, though a later one does: pass each layer's "
        "output to the next one, and do not detach it."
    )


def _why_not_checkpointed(got, expected, calls) -> str | None:
    """What is said where all gradients are right."""
    once = [name for name, n in calls.items() if n == 1]
    if once and len(once) < len(calls):
        return (
            f"{once[0]} runs once, without a checkpoint: each layer can have one, the first and "
            "the last too."
        )
    if not got["layers that record no graph in forward"]["how many"] and not once:
        return "these are non-reentrant checkpoints: the exercise asks for use_reentrant=True."
    if once:
        return "the gradients are right, but nothing is checkpointed: no layer runs again."
    if difference(got["segments"], expected["segments"]):
        return "several layers are in one checkpoint: here each layer must have its own."
    if not difference(got[_MORE], expected[_MORE]):
        return None
    learns = got[_MORE]["gradients"].view(6, -1).any(1).tolist()
    if not all(learns):
        return f"with 6 layers only {sum(learns)} learn: the loop goes over all layers."
    return RANDOM


EXERCISES = (
    Exercise(
        id="4.3",
        title="the gradient that never came",
        difficulty=1,
        minutes=5,
        trains="why a reentrant checkpoint needs an input that requires a gradient",
        reference=from_frozen,
        raises=(
            (
                r"only Tensors of floating point",
                (
                    "token ids are whole numbers, and no gradient can reach them: the first tensor "
                    "that can require a gradient is the embedding's output."
                ),
            ),
        ),
        observe=_observe_frozen,
        explain=_explain_frozen,
        mistakes=(
            Mistake(
                "the trap",
                lambda embedding, layers, ids: one_by_one(_reentrant, layers, embedding(ids)),
                _NO_NODE,
            ),
            Mistake(
                "thaws",
                _thaws,
                (
                    "this trains the embedding, which is frozen: let its output require a "
                    "gradient, not its weight."
                ),
            ),
            Mistake(
                "first one plain",
                _first_one_plain,
                (
                    "the gradients are right, but one layer keeps all its activations: every "
                    "layer can be checkpointed, the first one too."
                ),
            ),
            Mistake(
                "all plain",
                lambda embedding, layers, ids: layers(embedding(ids)),
                "the gradients are right, but nothing is checkpointed.",
            ),
            Mistake(
                "too late",
                _too_late,
                (
                    "the first layer gets no gradient: its input must require one, and not just "
                    "its output."
                ),
            ),
            Mistake(
                "cuts the chain",
                _cuts_the_chain,
                (
                    "detaching in front of every layer cuts the chain: only the last layer learns. "
                    "Detach once, in front of the first."
                ),
            ),
        ),
    ),
)
