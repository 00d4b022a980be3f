"""Lesson 04's answers about kinds: of layers that a checkpoint runs again, and of torch's two checkpoints."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

from ...compat import checkpoint_hook
from .. import models
from . import Finding, answers
from .lesson_04 import WIDTH, inputs, on


def architectures() -> tuple[str, dict[str, int | float | str]]:
    """For C30: what checkpointing does to layers that depend on more than their input; a sentence, and figures."""
    figures: dict[str, int | float | str] = {}
    equal = {}
    with torch.random.fork_rng(devices=[]):
        for name, extra in (
            ("dropout", nn.Dropout(0.5)),
            ("layer norm", nn.LayerNorm(8)),
            ("batch norm", nn.BatchNorm1d(8)),
        ):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Sequential(nn.Linear(8, 8), extra, nn.ReLU()), nn.Linear(8, 1))
            x = torch.randn(32, 8, requires_grad=True)
            gradients = []
            for every in (None, [1, 1]):
                net.zero_grad()
                torch.manual_seed(1)
                with on(net, every):
                    net(x).square().sum().backward()
                gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
            equal[name] = torch.equal(*gradients)
            figures[f"checkpointing, {name}: gradient the same to the bit"] = "yes" if equal[name] else "no"
    updates = int(extra.num_batches_tracked) - 1
    figures["checkpointing, batch norm: updates of its running statistics in one step"] = updates
    tied = models.tiny_gpt2(layers=2, hidden=32, heads=2, vocab=64, tied=True)
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    gradients = []
    for every in (None, 1):
        tied.zero_grad()
        with on(tied, every):
            tied(input_ids=ids).logits.square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in tied.parameters()]))
    equal["tied weights"] = torch.equal(*gradients)
    figures["checkpointing, GPT-2 with tied weights: gradient the same to the bit"] = (
        "yes" if equal["tied weights"] else "no"
    )
    return (
        "Checkpointing leaves the gradient as it is to the bit"
        + ("" if all(equal.values()) else " (not here!)")
        + f", but batch norm's running statistics are updated {updates} times in a step, and layers must do the same when run again.",
        figures,
    )


def _learns(reentrant: bool) -> bool:
    """Does a layer get its gradient when its input requires none?"""
    import warnings

    layer = nn.Linear(4, 4)
    head = nn.Linear(4, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = torch_checkpoint.checkpoint(layer, torch.ones(2, 4), use_reentrant=reentrant)
    head(out).sum().backward()
    return layer.weight.grad is not None


def _takes_names(reentrant: bool) -> bool:
    try:
        torch_checkpoint.checkpoint(lambda x, *, by: x * by, inputs(), by=2, use_reentrant=reentrant)
    except ValueError:
        return False
    return True


def _allows_grad(reentrant: bool) -> bool:
    """Does ``torch.autograd.grad`` work through it?"""
    x = inputs()
    out = torch_checkpoint.checkpoint(torch.sin, x, use_reentrant=reentrant)
    try:
        torch.autograd.grad(out.sum(), x)
    except RuntimeError:
        return False
    return True


def _compiles(reentrant: bool) -> bool:
    """Does one graph hold a compiled function with a checkpoint in it, and is its gradient right?"""
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
    x, y = inputs(), inputs()
    call = torch.compile(
        lambda x: torch_checkpoint.checkpoint(layer, x, use_reentrant=reentrant),
        backend="eager",
        fullgraph=True,
    )
    call(x).sum().backward()
    layer(y).sum().backward()
    return torch.allclose(x.grad, y.grad)


@answers("C42")
def which_kind() -> Finding:
    tests = {
        "a layer learns although its input requires no gradient": _learns,
        "keyword arguments": _takes_names,
        "torch.autograd.grad": _allows_grad,
    }
    found = {(name, kind): test(kind) for name, test in tests.items() for kind in (False, True)}
    hooks = issubclass(checkpoint_hook, saved_tensors_hooks)
    compiled = _compiles(False)
    figures = {
        f"use_reentrant={kind}: {name}": "yes" if worked else "no" for (name, kind), worked in found.items()
    }
    figures["use_reentrant=False: made of saved-tensor hooks"] = "yes" if hooks else "no"
    figures["use_reentrant=False: compiles into one graph"] = "yes" if compiled else "no"
    better = all(found[name, False] and not found[name, True] for name in tests)
    return Finding(
        "holds" if better and hooks and compiled else "holds only if",
        "The reentrant kind silently gives no gradient where the input requires none, takes no keyword arguments and breaks "
        "torch.autograd.grad; the other one does all three, stops its second run early, and compiles into one graph.",
        figures,
    )
