"""Lesson 03's answers about time and about the learning rate.

Times are not asserted: what costs time is counted (operations, floating-point operations), and the
ratios that ``benchmarks/accumulation.py`` recorded are quoted with their device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from ....compat.dispatch_modes import TorchDispatchMode
from ....techniques.accumulation import split
from ....techniques.losses import next_token_loss
from ...ledger import Finding, answers, bert_large
from ...ledger.finding import Figure, Figures, about, more
from ..shared.claim_runs import recorded, where_recorded
from .claims import tokens, window


class _Count(TorchDispatchMode):
    """How many operations are dispatched: each is at least one kernel to launch."""

    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **(kwargs or {}))


@cache
def _work(k: int, step_each: bool = False) -> tuple[int, int, int]:
    """Operations, floating-point operations in matrix products, and additions to gradients, of one
    window of 32.
    """
    batch = tokens(32)
    # the counter sees the products of eager attention
    model, optimizer, update = window(batch, k, attention="eager")
    if step_each:

        def update():
            for micro in split(batch, 32 // k):
                loss, count = next_token_loss(model, micro)
                (loss / count).backward()
                optimizer.step()
                optimizer.zero_grad()

    update()  # the first step makes Adam's states
    with FlopCounterMode(display=False) as flops, _Count() as count:  # the inner one is asked first
        tokens(32)  # a window's batch is made in one operation, which counts
        update()
    additions = 0 if step_each else (k - 1) * sum(p.numel() for p in model.parameters())
    return count.operations, flops.get_total_flops(), additions


def _recorded_figures(*ways: str) -> dict[str, str]:
    found = recorded("accumulation")
    if found is None:
        return {"recorded times": "none here: run benchmarks/accumulation.py"}
    where = where_recorded(found)
    return {
        f"recorded time of {k} {way} micro-batches / one batch of 16 ({where})": f"{ratio:.2f}"
        for way in ways
        for k, ratio in found[way].items()
        if k in ("2", "4", "16")
    }


def _recorded(k: int, kind: Callable[[str, float], Figure]) -> tuple[Figure, ...]:
    """The recorded time of k accumulated micro-batches over one batch, as a figure; nothing where
    there is no record.
    """
    found = recorded("accumulation")
    ratios = found["accumulated"] if found else {}
    return (kind(f"our CPU record, {k} micro-batches", ratios[str(k)]),) if str(k) in ratios else ()


def _published() -> float:
    """Time of 1 x 4 over batch 4 in the primer's table of BERT-large."""
    seconds = {run.name: run.seconds for run in bert_large.RUNS}
    return seconds["1 x 4"] / seconds["batch 4"]


@answers("C16")
def the_same_samples_take_longer() -> Finding:
    one, cut, stepped = _work(1), _work(8), _work(8, step_each=True)
    return Finding(
        own=(more("time in its table, 1 x 4 / 4", _published()),),
        elsewhere=_recorded(4, more) + _recorded(16, more),
        says=f"""
            only if: micro-batches are too small for the device, as the rows of its table;
                larger ones cost little or no time.
            fails: Its own table says otherwise.
            why: The same samples need more and smaller operations: {cut[0] / one[0]:.1f} times
                as many for 8 micro-batches. Accumulation is less work than an update after every
                micro-batch, since the optimizer steps once.
            """,
        figures={
            "operations, one batch of 32": one[0],
            "operations, 8 x 4 accumulated": cut[0],
            "operations, 8 x 4 with an update each": stepped[0],
            **_recorded_figures("accumulated", "stepped"),
        },
    )


@answers("C29")
def no_overhead() -> Finding:
    one, cut = _work(1), _work(4)
    return Finding(
        own=(
            about("operations in products, 4 x 8 / 32", 1, cut[1] / one[1], "times", within=0.001),
        ),
        beyond=(
            about("time in C13's table, 1 x 4 / 4", 1, _published(), "times"),
            *_recorded(4, _as_long),
        ),
        says=f"""
            holds: The computation is the same for 32 and for 4 x 8; micro-batches that are too
                small lose time.
            fails: The matrix products of the micro-batches need another number of operations.
            why: Besides the products, there are K - 1 additions to each gradient,
                {cut[2] / cut[1]:.1%} of the operations here. For K = 4, {cut[0] / one[0]:.1f} times
                as many operations have to be started, and small operations leave a device partly
                idle.
            """,
        figures={
            "FLOP in matrix products, one batch of 32": one[1],
            "FLOP in matrix products, 4 x 8": cut[1],
            "additions into gradients, 4 x 8": cut[2],
            "operations started, one batch / 4 x 8": f"{one[0]:,} / {cut[0]:,}",
            **_recorded_figures("accumulated"),
        },
    )


def _as_long(what: str, found: float) -> Figure:
    return about(what, 1, found, "times", within=0.15)


def excess_loss(
    optimizer: type[torch.optim.Optimizer], lr: float, batch: int, *, samples: int = 2048
) -> float:
    """Squared distance from the true weights after one pass over ``samples`` noisy examples, mean
    over 64 runs.

    A linear regression in 20 dimensions, float64. The 64 runs have data of their own and train side
    by side.
    """
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(20, 1, generator=generator, dtype=torch.float64)
    x = torch.randn(64, samples, 20, generator=generator, dtype=torch.float64)
    y = x @ true + 2.0 * torch.randn(64, samples, 1, generator=generator, dtype=torch.float64)
    weights = torch.zeros(64, 20, 1, dtype=torch.float64, requires_grad=True)
    steps = optimizer([weights], lr=lr)
    for i in range(0, samples, batch):
        error = x[:, i : i + batch] @ weights - y[:, i : i + batch]
        error.square().mean(dim=(1, 2)).sum().backward()
        steps.step()
        steps.zero_grad()
    return (weights.detach() - true).square().sum(dim=(1, 2)).mean().item()


LEARNING_RATES = {"SGD": (torch.optim.SGD, 0.008), "Adam": (torch.optim.Adam, 0.02)}


@cache
def learning_rates(name: str) -> dict[tuple[int, int], float]:
    """``excess_loss`` by (batch, factor on the learning rate): batch 4 at factor 1, and batch 16 at
    1, 2, 4 and 8.
    """
    optimizer, lr = LEARNING_RATES[name]
    runs = [(4, 1), *((16, factor) for factor in (1, 2, 4, 8))]
    return {(batch, factor): excess_loss(optimizer, lr * factor, batch) for batch, factor in runs}


@answers("C31")
def linear_scaling() -> Finding:
    figures: Figures = {}
    nearest = {}
    for name in LEARNING_RATES:
        found = learning_rates(name)
        base = found[4, 1]
        figures[f"{name}: error after one pass at batch 4"] = f"{base:.2g}"
        for factor in (1, 2, 4, 8):
            figures[f"{name}: the same at batch 16, learning rate x {factor}"] = (
                f"{found[16, factor]:.2g}"
            )
        nearest[name] = min(
            (1, 2, 4, 8), key=lambda factor: abs(math.log(found[16, factor] / base))
        )
    return Finding(
        own=(
            about("learning rate, Adam, 4 times the batch", 4, nearest["Adam"], "times", within=0),
        ),
        where=(about("the same, SGD", 4, nearest["SGD"], "times", within=0),),
        says="""
            only if: the optimizer is SGD and the batch is small enough to be noisy; the
                document's own loop uses Adam, whose rate grows with the square root.
            holds: for Adam, which the document's own loop uses.
            fails: Neither SGD nor Adam follows this rule.
            why: Adam already divides by the gradient's size. You do not have to follow any
                rule: an unchanged learning rate is safe, only slower.
            """,
        figures=figures,
    )
