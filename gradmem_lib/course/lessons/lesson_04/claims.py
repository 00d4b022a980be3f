"""Lesson 04's answers: what checkpointing saves at the peak, and for which chains the root of n is
right.

Bytes and forward calls are counted on chains and on a tiny Llama; larger models by lesson 01's
closed forms. Work is counted in floating-point operations.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from ....measure.tracker import MemoryTracker
from ....techniques.checkpointing import checkpoint_layers
from ....techniques.schedules import best_segments, uniform_segments
from ...ledger import Finding, answers
from ...ledger.finding import Figure, Figures, about, less, more
from ...material import accounting, models
from ..shared.claim_runs import token_ids

ROWS, WIDTH = 16, 16
X = ROWS * WIDTH * 4  # bytes of a boundary of the chains
_GPT = {"gated": False, "norm": "layer", "biases": True}
SEVEN, GPT2_XL = accounting.SHAPES["Llama-2-7B"], accounting.SHAPES["GPT-2 XL"]
GPT3 = accounting.Shape("GPT-3", 50257, 12288, 96, 96, 96, 49152, **_GPT)
BERT_LARGE = accounting.Shape("BERT-large", 30522, 1024, 24, 16, 16, 4096, **_GPT)


def on(layers, every):
    return nullcontext() if every is None else checkpoint_layers(layers, every)


def inputs() -> torch.Tensor:
    return torch.ones(ROWS, WIDTH, requires_grad=True)


@cache
def chain(n: int, keeps: int, every: int | tuple | None) -> tuple[int, int]:
    """Peak of a step beyond the weights in bytes, and forward calls of a layer, for a chain with a
    = ``keeps`` x.
    """
    layers, x, calls = models.chain(n, width=WIDTH, keeps=keeps), inputs(), []
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, args: calls.append(1))
    schedule = list(every) if isinstance(every, tuple) else every
    with on(layers, schedule), MemoryTracker(layers, live=False) as tracker:
        layers(x).square().sum().backward()
    return tracker.peak.total - sum(p.nbytes for p in layers.parameters()), len(calls)


def _best_equal(n: int, keeps: int) -> tuple[int, int]:
    """The length of equal segments (n is a multiple of it) with the lowest measured peak, and that
    peak in bytes.
    """
    lengths = [k for k in range(1, n + 1) if n % k == 0]
    k = min(lengths, key=lambda k: chain(n, keeps, k)[0])
    return k, chain(n, keeps, k)[0]


def _llama(layers: int, attention: str):
    model = models.tiny_llama(
        layers=layers, hidden=64, heads=4, intermediate=172, vocab=128, attention=attention
    )
    ids = token_ids(4, vocab=128)
    return model, ids


@cache
def llama_bytes(layers: int, every: int | None) -> int:
    """Most bytes of activations in a step of a tiny Llama, all parameters trained."""
    model, ids = _llama(layers, "sdpa")
    with on(model, every), MemoryTracker(model, live=False) as tracker:
        model(input_ids=ids, labels=ids).loss.backward()
    return max(tracker.timeline.by_category["activations"])


@cache
def _llama_flops(layers: int, every: int | None) -> int:
    """Floating-point operations in the matrix products of the same step, eager: the counter sees
    none in fused attention.
    """
    model, ids = _llama(layers, "eager")
    with on(model, every), FlopCounterMode(display=False) as flops:
        model(input_ids=ids, labels=ids).loss.backward()
    return flops.get_total_flops()


def llama_work(layers: int, every: int) -> float:
    """How much more than without checkpoints, as a share."""
    return _llama_flops(layers, every) / _llama_flops(layers, None) - 1


def block_bytes(
    shape: accounting.Shape, precision: str = "bf16", tokens: tuple[int, int] = (1, 1024)
) -> int:
    """Bytes that a block keeps, its input included."""
    return sum(accounting.block_activations(shape, *tokens, precision=precision).values())


def input_bytes(
    shape: accounting.Shape, precision: str = "bf16", tokens: tuple[int, int] = (1, 1024)
) -> int:
    """Bytes of a block's input, which a checkpoint keeps."""
    return accounting.PRECISIONS[precision].residual * math.prod(tokens) * shape.hidden


def left(shape: accounting.Shape, every: int, **setting) -> int:
    """Bytes of the blocks at the peak with equal segments of ``every``: earlier inputs, and one
    segment in full.
    """
    a, x = block_bytes(shape, **setting), input_bytes(shape, **setting)
    return max(i * x + m * a for i, m in enumerate(uniform_segments(shape.layers, every)))


def share_left(shape: accounting.Shape, every: int) -> float:
    return left(shape, every) / (shape.layers * block_bytes(shape))


def best_length(shape: accounting.Shape) -> int:
    return min(range(1, shape.layers + 1), key=lambda every: left(shape, every))


@answers("C19")
def root_of_depth() -> Finding:
    ways = {
        "no checkpoint": lambda n: None,
        "a checkpoint a layer": lambda n: 1,
        "segments of the root": math.isqrt,
    }
    figures: Figures = {}
    power = {}
    for way, every in ways.items():
        few, many = (chain(n, 1, every(n))[0] for n in (16, 256))
        power[way] = math.log(many / few) / math.log(256 / 16)
        figures[f"16 layers, a = x, {way}: bytes at the peak"] = few
        figures[f"256 layers, a = x, {way}: bytes at the peak"] = many
    return Finding(
        own=(
            about(
                "activations grow as n to the power", 0.5, power["segments of the root"], within=0.2
            ),
            about("the same, no checkpoint", 1, power["no checkpoint"]),
        ),
        elsewhere=(about("power of n, a checkpoint a layer", 0.5, power["a checkpoint a layer"]),),
        says="""
            only if: there is a checkpoint every sqrt(n) layers, its own schedule; with the
                libraries' default, one per layer, memory still grows with n.
            fails: Activations grow differently.
            why: One checkpoint per layer keeps the n inputs of the layers, and each input is
                small. Only the layers' activations shrink: parameters, gradients and logits stay
                the same.
            """,
        figures=figures,
    )


@answers("C21")
def whole_model_in_one() -> Finding:
    layers = models.chain(16, width=WIDTH)
    weights = sum(p.nbytes for p in layers.parameters())
    alive, peak = {}, {}
    for name, every in (("nothing", None), ("each layer", 1), ("the whole model", 16)):
        with on(layers, every), MemoryTracker(layers, live=False) as tracker:
            out = layers(inputs())
            alive[name] = tracker.current.total - weights
            out.square().sum().backward()
            del out
        peak[name] = tracker.peak.total - weights
    return Finding(
        own=(
            about(
                "peak, one checkpoint / one a layer",
                1,
                peak["the whole model"] / peak["each layer"],
                "times",
            ),
        ),
        beyond=(less("peak, one checkpoint / none", peak["the whole model"] / peak["nothing"]),),
        says="""
            fails: One checkpoint around the whole model saves nothing at the peak.
            holds: Both save the same at the peak.
            why: Backward recomputes the whole model at once. One checkpoint looks best only if
                you measure right after forward.
            """,
        figures={
            f"16 layers, a = 5 x, checkpoint around {name}: bytes after forward": n
            for name, n in alive.items()
        }
        | {
            f"16 layers, a = 5 x, checkpoint around {name}: bytes at the peak": n
            for name, n in peak.items()
        },
    )


@answers("C26")
def more_checkpoints() -> Finding:
    found = {k: chain(64, 1, k) for k in (1, 4, 8, 16, 64)}
    each, few = llama_bytes(16, 1), llama_bytes(16, 4)
    work = {k: llama_work(16, k) for k in (1, 4)}
    return Finding(
        own=(
            more("memory of a Llama, 16 / 4 checkpoints", each / few),
            less("work added to it, 16 / 4", work[1] / work[4]),
        ),
        where=(more("memory of small layers, 64 / 8", found[1][0] / found[8][0]),),
        says="""
            only if: layers keep little besides their input and segments are shorter than
                sqrt(n); in Transformers, more checkpoints need less memory.
            holds: in Transformers, too.
            fails: The opposite is true even for layers that keep little.
            why: A recomputed segment is in memory as a whole: with few checkpoints, memory
                grows for any kind of layer. Every layer runs once more for any number of
                checkpoints; many checkpoints need fewer operations, since PyTorch stops each
                recomputation early.
            """,
        figures={
            (
                f"64 layers, a = x, {64 // k} checkpoint{'s' * (k < 64)}: bytes at the peak / "
                "forward calls"
            ): f"{peak:,} / {count}"
            for k, (peak, count) in found.items()
        }
        | {
            (
                "tiny Llama, 16 layers, 16 / 4 checkpoints: bytes of activations"
            ): f"{each:,} / {few:,}",
            (
                "tiny Llama, 16 layers, 16 / 4 checkpoints: more operations"
            ): f"{work[1]:.1%} / {work[4]:.1%}",
        },
    )


@answers("C27")
def every_root_of_n() -> Finding:
    small, large = _best_equal(64, 1), _best_equal(64, 5)
    unequal = chain(64, 5, tuple(best_segments(64, 4, 1)))
    root = round(math.sqrt(GPT2_XL.layers))
    best = best_length(GPT2_XL)
    # a list keeps its last segment
    calls = {k: chain(64, 5, (k,) * (64 // k))[1] for k in (8, large[0])}
    return Finding(
        own=(about("best segments of GPT-2 1.5B, layers", root, best),),
        where=(about("best where layers keep only their input", 8, small[0]),),
        beyond=(
            about(
                "GPT-2 1.5B, root of n / best",
                1,
                left(GPT2_XL, root) / left(GPT2_XL, best),
                "times",
            ),
        ),
        says="""
            only if: a layer keeps little besides its input; a Transformer layer keeps 20 to 30
                times its input, so segments of one or two layers are best.
            holds: for a Transformer, too.
            fails: Other segments are best, even for layers that keep little.
            why: The best equal segments have sqrt(n x / a) layers, if a layer keeps a bytes and
                its input has x bytes. Segments of unequal length, long ones first, need even less
                memory, but a few more calls of a layer.
            """,
        figures={
            "64 layers, a = x: best equal segments": small[0],
            "64 layers, a = 5 x: best equal segments": large[0],
            "64 layers, a = 5 x: bytes at the peak, segments of 8": chain(64, 5, 8)[0],
            "64 layers, a = 5 x: bytes at the peak, best equal segments": large[1],
            "64 layers, a = 5 x: bytes at the peak, best unequal segments": unequal[0],
            "the same: layers run again, last segment kept": ", ".join(
                f"{n - 64} (segments of {k})" for k, n in calls.items()
            )
            + f", {unequal[1] - 64} (unequal)",
            "tiny Llama, 16 layers: bytes of activations, segments of 4": llama_bytes(16, 4),
            "tiny Llama, 16 layers: bytes of activations, segments of 1": llama_bytes(16, 1),
        },
    )


@answers("C28")
def shallow_networks() -> Finding:
    figures: Figures = {}
    saved = {}
    for n in (2, 4, 8, 16, 64):
        before, (k, after) = chain(n, 5, None)[0], _best_equal(n, 5)
        saved[n] = 1 - after / before
        figures[f"{n} layers, a = 5 x: best equal segments (of {k}) at the peak"] = (
            f"{before:,} / {after:,}, {saved[n]:.0%} less"
        )
    return Finding(
        own=(
            Figure(
                "activations saved of 4 layers",
                "less than of 8",
                saved[4],
                high=saved[8] - 0.01,
                unit="%",
            ),
            Figure("of 8 layers", "less than of 64", saved[8], high=saved[64] - 0.01, unit="%"),
        ),
        beyond=(Figure("of 64 layers", "most", saved[64], low=max(saved.values()), unit="%"),),
        says="""
            holds: Fewer layers save less, but there is no threshold at 10.
            fails: Shallow networks save as much.
            why: One segment is always in memory as a whole, and if there are few segments, this
                is a large share. Transformer blocks keep more besides their input, so they save
                more at the same depth.
            """,
        figures=figures,
    )
