"""Lesson 04's answers: what checkpointing saves at the peak, and for which chains the root of n is
right.

Bytes and forward calls are counted on chains and on a tiny Llama; larger models by lesson 01's
closed forms. Work is counted in floating-point operations.
"""

import math
from functools import cache

import torch

from ....measure.tracker import MemoryTracker
from ....techniques.schedules import best_segments, schedule_peak, uniform_segments
from ...ledger import Finding, answers
from ...ledger.finding import Figure, Figures, about, each, less, more
from ...material import accounting, models
from ...material.flops import count_operations
from ..shared.claim_runs import activations, checkpointed, token_ids, tracked_step
from ..shared.settings import tiny_llama

ROWS, WIDTH = 16, 16
X = ROWS * WIDTH * 4  # bytes of a boundary of the chains
_GPT = {"gated": False, "norm": "layer", "biases": True}
SEVEN, GPT2_XL = accounting.SHAPES["Llama-2-7B"], accounting.SHAPES["GPT-2 XL"]
GPT3 = accounting.Shape("GPT-3", 50257, 12288, 96, 96, 96, 49152, **_GPT)
BERT_LARGE = accounting.Shape("BERT-large", 30522, 1024, 24, 16, 16, 4096, **_GPT)


def inputs() -> torch.Tensor:
    return torch.ones(ROWS, WIDTH, requires_grad=True)


@cache
def chain(n: int, keeps: int, every: int | tuple | None):
    """Of a step of a chain with a = ``keeps`` x: bytes at the peak, forward calls of a layer, and
    bytes after forward. The weights' bytes do not count.
    """
    layers, x, calls = models.chain(n, width=WIDTH, keeps=keeps), inputs(), []
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, args: calls.append(1))
    schedule = list(every) if isinstance(every, tuple) else every
    with checkpointed(layers, schedule), MemoryTracker(layers, live=False) as tracker:
        out = layers(x)
        after_forward = tracker.current.total
        loss = out.square().sum()
        del out
        loss.backward()
    weights = sum(p.nbytes for p in layers.parameters())
    return tracker.peak.total - weights, len(calls), after_forward - weights


def _best_equal(n: int, keeps: int):
    """The length of equal segments (n is a multiple of it) with the lowest measured peak, and that
    peak in bytes.
    """
    lengths = [k for k in range(1, n + 1) if n % k == 0]
    k = min(lengths, key=lambda k: chain(n, keeps, k)[0])
    return k, chain(n, keeps, k)[0]


def _llama(attention: str):
    """A tiny Llama of 16 layers, all trained, and its token ids."""
    return tiny_llama(16, 128, attention=attention), token_ids(4, vocab=128)


@cache
def llama_bytes(every: int | None) -> int:
    """Most bytes of activations in its step."""
    model, ids = _llama("sdpa")
    with checkpointed(model, every):
        return activations(tracked_step(model, ids))


@cache
def _llama_operations(every: int | None) -> int:
    """Operations of the same step, eager."""
    model, ids = _llama("eager")
    with checkpointed(model, every):
        return count_operations(lambda: model(input_ids=ids, labels=ids).loss.backward())


def llama_work(every: int) -> float:
    """How many more than without checkpoints, as a share."""
    return _llama_operations(every) / _llama_operations(None) - 1


def block(shape: accounting.Shape, precision: str = "bf16", tokens: tuple[int, int] = (1, 1024)):
    """Bytes that a block keeps, its input included, and those of its input, which a checkpoint
    keeps: a and x.
    """
    kept = accounting.block_activations(shape, *tokens, precision=precision)
    x = accounting.PRECISIONS[precision].residual * math.prod(tokens) * shape.hidden
    return sum(kept.values()), x


def left(shape: accounting.Shape, every: int, **setting) -> int:
    """Bytes of the blocks at the peak with equal segments of ``every``: earlier inputs, and one
    segment in full.
    """
    a, x = block(shape, **setting)
    return schedule_peak(uniform_segments(shape.layers, every), a - x, x)


def share_left(shape: accounting.Shape, every: int) -> float:
    return left(shape, every) / (shape.layers * block(shape)[0])


def best_length(shape: accounting.Shape) -> int:
    return min(range(1, shape.layers + 1), key=lambda every: left(shape, every))


@answers("C19")
def root_of_depth() -> Finding:
    figures: Figures = {}
    power = {}
    for way, of_16, of_256 in (
        ("no checkpoint", None, None),
        ("a checkpoint a layer", 1, 1),
        ("segments of the root", 4, 16),
    ):
        peaks = {16: chain(16, 1, of_16)[0], 256: chain(256, 1, of_256)[0]}
        power[way] = math.log(peaks[256] / peaks[16]) / math.log(256 / 16)
        figures |= each(f"{{}} layers, a = x, {way}: bytes at the peak", peaks)
    return Finding(
        own=(
            about(
                "activations grow as n to the power",
                "0.5",
                power["segments of the root"],
                within=0.2,
            ),
            about("the same, no checkpoint", "1", power["no checkpoint"]),
        ),
        elsewhere=about("power of n, a checkpoint a layer", "0.5", power["a checkpoint a layer"]),
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
    alive, peak = {}, {}
    for name, every in (("nothing", None), ("each layer", 1), ("the whole model", 16)):
        highest, _, alive[name] = chain(16, 5, every)
        peak[name] = highest + X  # a loop holds its output until backward is done
    whole = peak["the whole model"]
    return Finding(
        own=about("peak, one checkpoint / one a layer", "1×", whole / peak["each layer"]),
        beyond=less("peak, one checkpoint / none", whole / peak["nothing"]),
        says="""
            fails: One checkpoint around the whole model saves nothing at the peak.
            holds: Both save the same at the peak.
            why: Backward recomputes the whole model at once. One checkpoint looks best only if
                you measure right after forward.
            """,
        figures=each("16 layers, a = 5 x, checkpoint around {}: bytes after forward", alive)
        | each("16 layers, a = 5 x, checkpoint around {}: bytes at the peak", peak),
    )


@answers("C26")
def more_checkpoints() -> Finding:
    found = {64 // k: chain(64, 1, k) for k in (1, 4, 8, 16)}
    many, few = llama_bytes(1), llama_bytes(4)
    many_work, few_work = llama_work(1), llama_work(4)
    return Finding(
        own=(
            more("memory of a Llama, 16 / 4 checkpoints", many / few),
            less("work added to it, 16 / 4", many_work / few_work),
        ),
        where=more("memory of small layers, 64 / 8", found[64][0] / found[8][0]),
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
        figures=each(
            "64 layers, a = x, {} checkpoints: bytes at the peak / forward calls",
            found,
            "{:,} / {}",
        )
        | each(
            "tiny Llama, 16 layers, 16 / 4 checkpoints: {}",
            {
                "bytes of activations": f"{many:,} / {few:,}",
                "more operations": f"{many_work:.1%} / {few_work:.1%}",
            },
        ),
    )


@answers("C27")
def every_root_of_n() -> Finding:
    small, large = _best_equal(64, 1)[0], _best_equal(64, 5)[0]
    root, best = round(math.sqrt(GPT2_XL.layers)), best_length(GPT2_XL)
    # a list keeps its last segment
    schedules = {
        "segments of 8": (8,) * 8,
        "best equal segments": (large,) * (64 // large),
        "best unequal segments": tuple(best_segments(64, 4, 1)),
    }
    found = {name: chain(64, 5, schedule) for name, schedule in schedules.items()}
    return Finding(
        own=about("best segments of GPT-2 1.5B, layers", "7", best),
        where=about("best where layers keep only their input", "8", small),
        beyond=about(
            "GPT-2 1.5B, root of n / best", "1×", left(GPT2_XL, root) / left(GPT2_XL, best)
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
            "64 layers, a = x: best equal segments": small,
            "64 layers, a = 5 x: best equal segments": large,
        }
        | each("64 layers, a = 5 x, {}: bytes at the peak / forward calls", found, "{:,} / {}"),
    )


@answers("C28")
def shallow_networks() -> Finding:
    found, saved = {}, {}
    for n in (2, 4, 8, 16, 64):
        before, (k, after) = chain(n, 5, None)[0], _best_equal(n, 5)
        saved[n] = 1 - after / before
        found[n, k] = before, after, saved[n]
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
        beyond=Figure("of 64 layers", "most", saved[64], low=max(saved.values()), unit="%"),
        says="""
            holds: Fewer layers save less, but there is no threshold at 10.
            fails: Shallow networks save as much.
            why: One segment is always in memory as a whole, and if there are few segments, this
                is a large share. Transformer blocks keep more besides their input, so they save
                more at the same depth.
            """,
        figures=each(
            "{} layers, a = 5 x: best equal segments (of {}) at the peak",
            found,
            "{:,} / {:,}, {:.0%} less",
        ),
    )
