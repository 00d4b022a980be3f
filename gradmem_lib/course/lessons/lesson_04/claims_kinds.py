"""Lesson 04's answer about torch's two kinds of checkpoints."""

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ...ledger import Finding, answers
from ...ledger.finding import each, yes
from ...machine.compat import checkpoint_hook
from ..shared.claim_runs import error_of
from .claims import WIDTH, inputs


def _learns(again: Callable):
    """Does a layer get its gradient when its input requires none, and does a warning say so?"""
    layer, head = nn.Linear(4, 4), nn.Linear(4, 1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        out = again(layer, torch.ones(2, 4))
    head(out).sum().backward()
    return layer.weight.grad is not None, any("requires_grad" in str(w.message) for w in told)


def _compiles(again: Callable) -> bool:
    """Does one graph hold a compiled function with a checkpoint in it, and is its
    gradient right?
    """
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
    x, y = inputs(), inputs()
    call = torch.compile(lambda x: again(layer, x), backend="eager", fullgraph=True)
    call(x).sum().backward()
    layer(y).sum().backward()
    return torch.allclose(x.grad, y.grad)


def _abilities(reentrant: bool) -> dict[str, bool]:
    """What a kind of checkpoint can do, by name."""
    again, x = partial(checkpoint, use_reentrant=reentrant), inputs()
    learns, warns = _learns(again)
    by_name = error_of(lambda: again(torch.mul, x, other=2))
    by_grad = error_of(lambda: torch.autograd.grad(again(torch.sin, x).sum(), x))
    return {
        "a layer learns although its input requires no gradient": learns,
        "keyword arguments": not by_name,
        "torch.autograd.grad": not by_grad,
        "compiles into one graph": _compiles(again),
        "warns where the input requires no gradient": warns,
    }


@answers("C42")
def which_kind() -> Finding:
    ours, reentrant = _abilities(False), _abilities(True)
    lost = [name for name, able in reentrant.items() if not able]
    return Finding(
        own=(
            yes(
                "does what the reentrant kind cannot",
                bool(lost) and all(ours[name] for name in lost),
            ),
            yes("made of saved-tensor hooks", issubclass(checkpoint_hook, saved_tensors_hooks)),
            yes("compiles into one graph", ours["compiles into one graph"]),
        ),
        says="""
            holds: It does everything that the reentrant kind does, and more.
            fails: It cannot do all of that here.
            why: The reentrant kind gives no gradient where the input requires none (it warns),
                takes no keyword arguments and breaks torch.autograd.grad. It compiles, too. The
                other kind stops its recomputation early.
            """,
        figures=each("use_reentrant=False: {}", ours) | each("use_reentrant=True: {}", reentrant),
    )
