"""Lesson 03's answers about time and about the learning rate.

Times are not asserted: what costs time is counted (operations, floating-point operations), and the
ratios that ``benchmarks/accumulation.py`` recorded are quoted with their device.
"""

import math
from functools import cache, partial

import torch
from torch.utils.flop_counter import FlopCounterMode

from ...ledger import Finding, answers, bert_large
from ...ledger.finding import Figures, about, each, more
from ..shared.claim_runs import recorded, recorded_times
from ..shared.seen import OperationLog
from ..shared.settings import tiny_llama
from .claims import SIZES, tokens, window


@cache
def _work(k: int):
    """Operations, each at least one kernel to launch, and floating-point operations in matrix
    products, of one window of 32 in ``k`` micro-batches.
    """
    # the counter sees the products of eager attention
    _, _, update = window(32, k, attention="eager")
    update()  # the first step makes Adam's states
    # The inner one is asked first.
    with FlopCounterMode(display=False) as flops, OperationLog() as log:
        tokens(32)  # a window's batch is made in one operation, which counts
        update()
    return len(log.names.split()), flops.get_total_flops()


def _times(way: str) -> dict[str, float]:
    """The recorded times of K micro-batches over one batch, by K."""
    return {k: recorded("accumulation")[way][k] for k in ("2", "4", "16")}


def _recorded_figures(way: str) -> Figures:
    what = f"recorded time of {{}} {way} micro-batches / one batch of 16"
    return recorded_times("accumulation", what, _times(way))


def _published() -> float:
    """Time of 1 x 4 over batch 4 in the primer's table of BERT-large."""
    seconds = {run.name: run.seconds for run in bert_large.RUNS}
    return seconds["1 x 4"] / seconds["batch 4"]


@answers("C16")
def the_same_samples_take_longer() -> Finding:
    one, cut = _work(1)[0], _work(8)[0]
    times = _times("accumulated")
    return Finding(
        own=more("time in C13's table, 1 x 4 / 4", _published()),
        elsewhere=(
            more("time on our CPU, 4 micro-batches", times["4"]),
            more("the same, 16 micro-batches", times["16"]),
        ),
        says=f"""
            only if: micro-batches are too small for the device, as in C13's table; larger ones
                cost little or no time.
            fails: C13's table says otherwise.
            why: The primer says only that it can take longer. The same samples need more and
                smaller operations: {cut / one:.1f} times as many for 8 micro-batches. Accumulation
                is less work than an update after every micro-batch, since the optimizer steps once.
            """,
        figures={"operations, one batch of 32": one, "operations, 8 x 4 accumulated": cut}
        | _recorded_figures("accumulated")
        | _recorded_figures("stepped"),
    )


@answers("C29")
def no_overhead() -> Finding:
    one, cut = _work(1), _work(4)
    added = 3 * sum(p.numel() for p in tiny_llama(*SIZES).parameters())
    return Finding(
        own=about("operations in products, 4 x 8 / 32", "1×", cut[1] / one[1], within=0.001),
        beyond=(
            about("time in C13's table, 1 x 4 / 4", "1×", _published()),
            about(
                "time on our CPU, 4 micro-batches", "1×", _times("accumulated")["4"], within=0.15
            ),
        ),
        says=f"""
            holds: The computation is the same for 32 and for 4 x 8; micro-batches that are too
                small lose time.
            fails: The matrix products of the micro-batches need another number of operations.
            why: Besides the products, there are K - 1 additions to each gradient,
                {added / cut[1]:.1%} of the operations here. For K = 4, {cut[0] / one[0]:.1f} times
                as many operations have to be started, and small operations leave a device partly
                idle.
            """,
        figures={
            "FLOP in matrix products, one batch of 32": one[1],
            "FLOP in matrix products, 4 x 8": cut[1],
            "additions into gradients, 4 x 8": added,
            "operations started, one batch / 4 x 8": f"{one[0]:,} / {cut[0]:,}",
        }
        | _recorded_figures("accumulated"),
    )


def excess_loss(
    optimizer: type[torch.optim.Optimizer], lr: float, batch: int, *, samples: int = 2048
) -> float:
    """Squared distance from the true weights after one pass over ``samples`` noisy examples, mean
    over 64 runs.

    A linear regression in 20 dimensions, float64. The 64 runs have data of their own and train side
    by side.
    """
    generator = torch.Generator().manual_seed(0)
    randn = partial(torch.randn, generator=generator, dtype=torch.float64)
    true = randn(20, 1)
    x = randn(64, samples, 20)
    y = x @ true + 2.0 * randn(64, samples, 1)
    weights = torch.zeros(64, 20, 1, dtype=torch.float64, requires_grad=True)
    steps = optimizer([weights], lr=lr)
    for some_x, some_y in zip(x.split(batch, 1), y.split(batch, 1), strict=True):
        (some_x @ weights - some_y).square().mean(dim=(1, 2)).sum().backward()
        steps.step()
        steps.zero_grad()
    return (weights.detach() - true).square().sum(dim=(1, 2)).mean().item()


LEARNING_RATES = {"SGD": (torch.optim.SGD, 0.008), "Adam": (torch.optim.Adam, 0.02)}


@cache
def learning_rates(name: str):
    """``excess_loss`` at batch 4, and at batch 16 by the factor on the learning rate."""
    optimizer, lr = LEARNING_RATES[name]
    larger = {factor: excess_loss(optimizer, lr * factor, 16) for factor in (1, 2, 4, 8)}
    return excess_loss(optimizer, lr, 4), larger


@answers("C31")
def linear_scaling() -> Finding:
    figures: Figures = {}
    nearest = {}
    for name in LEARNING_RATES:
        base, larger = learning_rates(name)
        figures[f"{name}: error after one pass at batch 4"] = f"{base:.2g}"
        figures |= each(name + ": the same at batch 16, learning rate x {}", larger, "{:.2g}")
        nearest[name] = min(larger, key=lambda factor: abs(math.log(larger[factor] / base)))
    return Finding(
        own=about("rate of equal error, Adam, batch x 4", "4×", nearest["Adam"], within=0),
        where=about("the same, SGD", "4×", nearest["SGD"], within=0),
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
