"""Lesson 04's answers about kinds: of layers that a checkpoint runs again, and of torch's two
checkpoints.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

from ...ledger import Finding, answers
from ...ledger.finding import Figures, in_unit, yes
from ...machine.compat import checkpoint_hook
from ...material import models
from ..shared.claim_runs import gradient, seeded, token_ids
from .claims import WIDTH, inputs, on


def architectures() -> tuple[bool, int, Figures]:
    """For C30, under checkpoints: whether layers that depend on more than their input have the same
    gradient to the bit, how often batch normalization's running statistics are updated in a step,
    and figures.
    """
    figures: Figures = {}
    equal = []

    def compare(name, net, run) -> None:
        """Note whether ``run`` gives ``net`` the same gradient with checkpoints."""
        gradients = []
        for every in (None, 1):
            torch.manual_seed(1)
            with on(net, every):
                run().backward()
            gradients.append(gradient(net))
        equal.append(torch.equal(*gradients))
        figures[f"checkpointing, {name}: gradient the same to the bit"] = in_unit(equal[-1], "yes")

    with seeded():
        for name, extra in (
            ("dropout", nn.Dropout(0.5)),
            ("layer norm", nn.LayerNorm(8)),
            ("batch norm", nn.BatchNorm1d(8)),
        ):
            net = nn.Sequential(nn.Sequential(nn.Linear(8, 8), extra, nn.ReLU()), nn.Linear(8, 1))
            x = torch.randn(32, 8, requires_grad=True)
            compare(name, net, lambda net=net, x=x: net(x).square().sum())
        updates = int(extra.num_batches_tracked) - 1
        figures["checkpointing, batch norm: updates of its running statistics in one step"] = (
            updates
        )
        tied = models.tiny_gpt2(layers=2, hidden=32, heads=2, vocab=64, tied=True)
        ids = token_ids(2, 8, 64)
        compare("GPT-2 with tied weights", tied, lambda: tied(input_ids=ids).logits.square().mean())
    return all(equal), updates, figures


def _learns(reentrant: bool) -> tuple[bool, bool]:
    """Does a layer get its gradient when its input requires none, and does a warning say so?"""
    layer, head = nn.Linear(4, 4), nn.Linear(4, 1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        out = torch_checkpoint.checkpoint(layer, torch.ones(2, 4), use_reentrant=reentrant)
    head(out).sum().backward()
    return layer.weight.grad is not None, any("requires_grad" in str(w.message) for w in told)


def _takes_names(reentrant: bool) -> bool:
    try:
        torch_checkpoint.checkpoint(
            lambda x, *, by: x * by, inputs(), by=2, use_reentrant=reentrant
        )
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
    """Does one graph hold a compiled function with a checkpoint in it, and is its
    gradient right?
    """
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
    learns = {kind: _learns(kind) for kind in (False, True)}
    found = {
        ("a layer learns although its input requires no gradient", kind): learns[kind][0]
        for kind in learns
    }
    for name, test in (
        ("keyword arguments", _takes_names),
        ("torch.autograd.grad", _allows_grad),
        ("compiles into one graph", _compiles),
    ):
        found |= {(name, kind): test(kind) for kind in (False, True)}
    figures = {
        f"use_reentrant={kind}: {name}": in_unit(worked, "yes")
        for (name, kind), worked in found.items()
    }
    figures["use_reentrant=True: warns where the input requires no gradient"] = in_unit(
        learns[True][1], "yes"
    )
    lost = [name for name, kind in found if kind and not found[name, True]]
    return Finding(
        own=(
            yes(
                "does what the reentrant kind cannot",
                bool(lost) and all(found[name, False] for name in lost),
            ),
            yes("made of saved-tensor hooks", issubclass(checkpoint_hook, saved_tensors_hooks)),
            yes("compiles into one graph", found["compiles into one graph", False]),
        ),
        says="""
            holds: It does everything that the reentrant kind does, and more.
            fails: It cannot do all of that here.
            why: The reentrant kind gives no gradient where the input requires none (it warns),
                takes no keyword arguments and breaks torch.autograd.grad. It compiles, too. The
                other kind stops its recomputation early.
            """,
        figures=figures,
    )
