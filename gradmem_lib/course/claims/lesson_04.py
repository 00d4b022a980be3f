"""Lesson 04's answers: what checkpointing saves at the peak, for which chains the root of n is right, and what it costs.

Bytes and forward calls are counted on chains and on a tiny Llama; larger models by lesson 01's closed forms. Work is
counted in floating-point operations, and times are quoted from what ``benchmarks/checkpointing.py`` recorded.
"""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from ...measure.tracker import MemoryTracker
from ...techniques import accounting
from ...techniques.checkpointing import checkpoint_layers
from ...techniques.schedules import best_segments, uniform_segments
from .. import models
from . import Finding, answers

RECORD = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "checkpointing.json"
ROWS, WIDTH = 16, 16
X = ROWS * WIDTH * 4  # bytes of a boundary of the chains
GPT3 = accounting.Shape("GPT-3", 50257, 12288, 96, 96, 96, 49152, gated=False, norm="layer", biases=True)


def on(layers, every):
    return nullcontext() if every is None else checkpoint_layers(layers, every)


def inputs() -> torch.Tensor:
    return torch.ones(ROWS, WIDTH, requires_grad=True)


@cache
def _chain(n: int, keeps: int, every: int | tuple | None) -> tuple[int, int]:
    """Peak of a step beyond the weights in bytes, and forward calls of a layer, for a chain with a = ``keeps`` x."""
    layers, x, calls = models.chain(n, width=WIDTH, keeps=keeps), inputs(), []
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, args: calls.append(1))
    schedule = list(every) if isinstance(every, tuple) else every
    with on(layers, schedule), MemoryTracker(layers, live=False) as tracker:
        layers(x).square().sum().backward()
    return tracker.peak.total - sum(p.nbytes for p in layers.parameters()), len(calls)


def _best_equal(n: int, keeps: int) -> tuple[int, int]:
    """The length of equal segments (n is a multiple of it) with the lowest measured peak, and that peak in bytes."""
    lengths = [k for k in range(1, n + 1) if n % k == 0]
    k = min(lengths, key=lambda k: _chain(n, keeps, k)[0])
    return k, _chain(n, keeps, k)[0]


def _llama(layers: int):
    model = models.tiny_llama(layers=layers, hidden=64, heads=4, intermediate=172, vocab=128)
    ids = torch.randint(0, 128, (4, 32), generator=torch.Generator().manual_seed(0))
    return model, ids


@cache
def _llama_bytes(layers: int, every: int | None) -> int:
    """Most bytes of activations in a step of a tiny Llama, all parameters trained."""
    model, ids = _llama(layers)
    with on(model, every), MemoryTracker(model, live=False) as tracker:
        model(input_ids=ids, labels=ids).loss.backward()
    return max(tracker.timeline.by_category["activations"])


@cache
def _llama_flops(layers: int, every: int | None) -> int:
    """Floating-point operations in the matrix products of the same step."""
    model, ids = _llama(layers)
    with on(model, every), FlopCounterMode(display=False) as flops:
        model(input_ids=ids, labels=ids).loss.backward()
    return flops.get_total_flops()


@cache
def _flops(n: int, trained: bool, every: int | None) -> int:
    layers = models.chain(n, width=WIDTH).requires_grad_(trained)
    with on(layers, every), FlopCounterMode(display=False) as flops:
        layers(inputs()).square().sum().backward()
    return flops.get_total_flops()


def _more(after: float, before: float) -> str:
    return f"{after / before - 1:+.1%}"


def _a_over_x(shape: accounting.Shape, seq_len: int = 1024) -> float:
    """All that a block keeps in bf16, its input included, in inputs."""
    block = accounting.block_activations(shape, 1, seq_len)
    return sum(block.values()) / (accounting.PRECISIONS["bf16"].residual * seq_len * shape.hidden)


def _kept(segments: list[int], a: float, x: float = 1) -> float:
    return max(i * x + m * a for i, m in enumerate(segments))


def recorded() -> dict | None:
    """What ``benchmarks/checkpointing.py`` wrote, or None where the course's folder has no record."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else None


def _times(*variants: str) -> dict[str, float]:
    """Recorded time over that of no checkpoint, of the variants whose names begin so, in every setting that was timed."""
    found = recorded() or {"settings": {}}
    return {
        f"{name}: {setting['what']}": row["time / none"]
        for setting in found["settings"].values()
        for name, row in setting["variants"].items()
        if name.startswith(variants) and "time / none" in row
    }


def _recorded_times(*variants: str) -> dict[str, str]:
    found, times = recorded(), _times(*variants)
    if not times:
        return {"recorded times": "none here: run benchmarks/checkpointing.py"}
    where = f"{found['clock']}, {found['where']['device']}, {found['where']['date']}"
    return {f"recorded time / none, {name} ({where})": f"{ratio:.2f}" for name, ratio in times.items()}


def _recorded_range(*variants: str) -> str:
    """A sentence with the smallest and the largest recorded time, or nothing where there is no record."""
    found, times = recorded(), _times(*variants).values()
    if not times:
        return ""
    return (
        f" Our record on one device ({found['where']['device']}, {found['clock']}) has {min(times):.2f} to "
        f"{max(times):.2f} times the time of no checkpoint."
    )


@answers("C15")
def twenty_per_cent_slower() -> Finding:
    work = {(trained, k): _flops(32, trained, k) for trained in (True, False) for k in (None, 1, 8)}
    more = {key: work[key] / work[key[0], None] - 1 for key in work}
    return Finding(
        "holds only if" if 0 < more[True, 1] < more[True, 8] < more[False, 8] else "does not hold",
        "your layers, your device and what you train happen to make it so. In floating-point operations, a chain of layers with two "
        f"matrices each needs {more[True, 1]:.0%} more with a checkpoint a layer, {more[True, 8]:.0%} with segments of 8, and "
        f"{more[False, 8]:.0%} with frozen weights." + _recorded_range("per layer", "sqrt"),
        {
            f"operations, {'trained' if trained else 'frozen'} weights, segments of {k}": f"{work[trained, k]:,}, {more[trained, k]:+.1%}"
            for trained, k in work
            if k
        }
        | _recorded_times("per layer", "sqrt"),
    )


@answers("C19")
def root_of_depth() -> Finding:
    figures: dict[str, int | float | str] = {}
    for n in (16, 64, 256):
        figures[f"{n} layers, a = x: bytes at the peak without a checkpoint"] = _chain(n, 1, None)[0]
        figures[f"{n} layers, a = x: with a checkpoint a layer"] = _chain(n, 1, 1)[0]
        figures[f"{n} layers, a = x: with segments of {round(math.sqrt(n))}"] = _chain(
            n, 1, round(math.sqrt(n))
        )[0]
    passing = 3 * X + 8
    growth = (_chain(256, 1, 16)[0] - passing) / (_chain(16, 1, 4)[0] - passing)
    figures["256 layers / 16 layers, segments of the root, gradients on their way not counted"] = (
        f"{growth:.2f} times"
    )
    return Finding(
        "holds only if" if 3.5 < growth < 4.6 else "does not hold",
        "segments grow with the root of n as well. 16 times the layers then need about 4 times the bytes. A checkpoint a layer, which "
        "is what libraries do by default, still grows with n: it keeps n inputs, small ones. And it is the activations of the layers "
        "that shrink: parameters, gradients and the logits stay as they are.",
        figures,
    )


@answers("C20")
def saves_half_to_four_fifths() -> Finding:
    figures: dict[str, int | float | str] = {}
    saved = {}
    for n in (4, 32):
        before, work = _llama_bytes(n, None), _llama_flops(n, None)
        for k in (1, round(math.sqrt(n))):
            after, with_it = _llama_bytes(n, k), _llama_flops(n, k)
            saved[n, k] = 1 - after / before
            figures[f"tiny Llama, {n} layers, segments of {k}: bytes of activations"] = (
                f"{before:,} / {after:,}, {saved[n, k]:.0%} less"
            )
            figures[f"tiny Llama, {n} layers, segments of {k}: floating-point operations"] = _more(
                with_it, work
            )
    low, high = min(saved.values()), max(saved.values())
    return Finding(
        "holds only if",
        f"the model is of middling depth. What is saved depends on depth and segments: {low:.0%} to {high:.0%} on a tiny Llama of 4 to "
        f"32 layers, all parameters trained, for {_more(_llama_flops(32, 1), _llama_flops(32, None))} operations with a checkpoint a layer. "
        "The work is bounded by one forward: a third of a step where all weights are trained, half where they are frozen.",
        figures | _recorded_times("per layer", "sqrt"),
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
    fooled = alive["the whole model"] < alive["each layer"] and peak["the whole model"] == peak["nothing"]
    return Finding(
        "does not hold" if fooled else "holds only if",
        "One checkpoint around the whole model saves nothing: backward runs all of it again at once, and the peak is the same to the "
        "byte, at the price of a forward. It only looks best when one measures after forward.",
        {f"16 layers, a = 5 x, checkpoint around {name}: bytes after forward": n for name, n in alive.items()}
        | {f"16 layers, a = 5 x, checkpoint around {name}: bytes at the peak": n for name, n in peak.items()},
    )


@answers("C26")
def more_checkpoints() -> Finding:
    found = {k: _chain(64, 1, k) for k in (1, 4, 8, 16, 64)}
    calls = {count for _, count in found.values()}
    bends = found[1][0] > found[8][0] < found[64][0]
    return Finding(
        "holds only if" if bends and len(calls) == 1 else "does not hold",
        "segments are shorter than the best length. With fewer checkpoints than that, memory grows again, since a segment that runs again "
        "is there in full. And the recomputation is the same number of calls for any number of checkpoints: every layer once more. "
        "(In operations many checkpoints are a little cheaper, since PyTorch ends each second run early.)",
        {
            f"64 layers, a = x, {64 // k} checkpoint{'s' * (k < 64)}: bytes at the peak / forward calls": f"{peak:,} / {count}"
            for k, (peak, count) in found.items()
        },
    )


@answers("C27")
def every_root_of_n() -> Finding:
    small, large = _best_equal(64, 1), _best_equal(64, 5)
    unequal = _chain(64, 5, tuple(best_segments(64, 4, 1)))
    deep = {k: _llama_bytes(32, k) for k in (1, 6)}
    best = min(deep, key=deep.get)
    return Finding(
        "holds only if" if small[0] == 8 and best == 1 else "does not hold",
        "a layer keeps little beside its input (a = x). The best equal segments have sqrt(n x / a) layers. A Transformer block keeps "
        "twenty to thirty times its input, which makes that one or two. And segments of unequal length, long ones first, are better "
        "still at no more work.",
        {
            "64 layers, a = x: best equal segments": small[0],
            "64 layers, a = 5 x: best equal segments": large[0],
            "64 layers, a = 5 x: bytes at the peak, segments of 8": _chain(64, 5, 8)[0],
            "64 layers, a = 5 x: bytes at the peak, best equal segments": large[1],
            "64 layers, a = 5 x: bytes at the peak, best unequal segments": unequal[0],
            "64 layers, a = 5 x: forward calls, equal / unequal": f"{_chain(64, 5, 8)[1]} / {unequal[1]}",
            "tiny Llama, 32 layers: bytes of activations, segments of 6": deep[6],
            "tiny Llama, 32 layers: bytes of activations, segments of 1": deep[1],
        },
    )


@answers("C28")
def shallow_networks() -> Finding:
    figures: dict[str, int | float | str] = {}
    saved = []
    for n in (2, 4, 8, 16, 32, 64):
        before, (k, after) = _chain(n, 5, None)[0], _best_equal(n, 5)
        saved.append(1 - after / before)
        figures[f"{n} layers, a = 5 x: best equal segments (of {k}) at the peak"] = (
            f"{before:,} / {after:,}, {saved[-1]:.0%} less"
        )
    return Finding(
        "holds" if saved == sorted(saved) else "does not hold",
        f"It saves {saved[1]:.0%} of 4 such layers and {saved[-1]:.0%} of 64: one segment is always there in full, and the fewer there "
        "are, the more of the whole that is. There is no border at 10, the curve is smooth; and a Transformer's blocks, which keep more "
        "beside their input, gain more at the same depth.",
        figures,
    )


def _longest(card: int, **checkpointing) -> int:
    """The longest sequence that Llama-2-7B in pure bf16 with AdamW trains on a card of so many bytes, batch 1."""
    low, high = 1, 2**20
    while low < high:
        middle = (low + high + 1) // 2
        need = accounting.estimate(
            accounting.SHAPES["Llama-2-7B"], batch_size=1, seq_len=middle, precision="bf16", **checkpointing
        )
        low, high = (middle, high) if need.total <= card else (low, middle - 1)
    return low


@answers("C39")
def twice_the_sequence() -> Finding:
    card = 80 * 10**9
    plain = _longest(card)
    root = _longest(card, checkpointing=6)
    each = _longest(card, checkpointing="per-layer")
    return Finding(
        "does not hold" if root > 3 * plain else "holds only if",
        f"By the closed forms of lesson 01, a 7B in bf16 with AdamW on 80 GB takes sequences {root / plain:.1f} times as long with "
        f"segments of 6, and {each / plain:.1f} times with a checkpoint a layer. With fused attention the bytes of a layer grow with the "
        "sequence's length, so the factor is whatever the activations fall by; it is 2 by accident. The 33 % are an upper bound for "
        "trained weights.",
        {
            "longest sequence, no checkpoint": plain,
            "longest sequence, segments of 6 layers": root,
            "longest sequence, a checkpoint a layer": each,
            "operations, 32 trained layers, segments of 6": _more(
                _flops(32, True, 6), _flops(32, True, None)
            ),
            "operations, 32 frozen layers, segments of 6": _more(
                _flops(32, False, 6), _flops(32, False, None)
            ),
        },
    )


@answers("C40")
def eight_segments_of_four() -> Finding:
    segments = uniform_segments(32, 4)
    _, calls = _chain(32, 5, 4)
    trained, frozen = (_flops(32, which, 4) / _flops(32, which, None) - 1 for which in (True, False))
    return Finding(
        "holds only if" if (len(segments), calls) == (8, 64) else "does not hold",
        f"you count calls, and all weights are trained: {len(segments)} segments, and {calls} calls of a layer where 32 would be one "
        f"forward. In operations it is {trained:+.0%}, since PyTorch leaves a second run as soon as the last missing tensor is there; "
        f"with frozen weights, whose backward is half as long, {frozen:+.0%}.",
        {
            "segments": len(segments),
            "forward calls of a layer, in forward and backward": calls,
            "operations, trained weights": _more(_flops(32, True, 4), _flops(32, True, None)),
            "operations, frozen weights": _more(_flops(32, False, 4), _flops(32, False, None)),
        },
    )


@answers("C41")
def a_table_of_shares() -> Finding:
    before, work = _llama_bytes(32, None), _llama_flops(32, None)
    each, with_each = _llama_bytes(32, 1), _llama_flops(32, 1)
    fourth, with_fourth = _llama_bytes(32, 4), _llama_flops(32, 4)
    ratio = _a_over_x(accounting.SHAPES["Llama-2-7B"])
    share = _kept([1] * 32, ratio) / (32 * ratio)
    return Finding(
        "does not hold",
        f"A checkpoint a layer leaves {each / before:.0%} of the activations of a tiny Llama with 32 layers ({share:.0%} of a 7B's blocks, "
        f"by the closed forms), and costs {_more(with_each, work)} operations. Segments of 4 leave more, {fourth / before:.0%}, and cost "
        f"more, {_more(with_fourth, work)}: in operations the table has the two the wrong way round. In bf16 a and x are both about half as large, and "
        "the share stays." + _recorded_range("per layer"),
        {
            "tiny Llama, 32 layers: bytes of activations": before,
            "with a checkpoint a layer": each,
            "with segments of 4": fourth,
            "operations with a checkpoint a layer": _more(with_each, work),
            "operations with segments of 4": _more(with_fourth, work),
            "a/x of Llama-2-7B in bf16": f"{ratio:.1f}",
            "a/x of Llama-2-7B in float32": f"{_a_over_x_float32():.1f}",
        }
        | _recorded_times("per layer", "every_n_layers"),
    )


def _a_over_x_float32() -> float:
    shape = accounting.SHAPES["Llama-2-7B"]
    block = accounting.block_activations(shape, 1, 1024, precision="float32")
    return sum(block.values()) / (4 * 1024 * shape.hidden)


@answers("C50")
def root_of_depth_as_length() -> Finding:
    figures: dict[str, int | float | str] = {}
    for shape in (accounting.SHAPES["Llama-2-7B"], GPT3):
        n, ratio = shape.layers, _a_over_x(shape)
        peaks = {k: _kept(uniform_segments(n, k), ratio) for k in range(1, n + 1)}
        best, root = min(peaks, key=peaks.get), round(math.sqrt(n))
        figures[f"{shape.name}, {n} layers: square root"] = f"{math.sqrt(n):.2f}"
        figures[f"{shape.name}: a/x in bf16"] = f"{ratio:.1f}"
        figures[f"{shape.name}: best equal segments"] = best
        figures[f"{shape.name}: boundaries kept at the peak, segments of {root} / of {best}"] = (
            f"{peaks[root]:.0f} / {peaks[best]:.0f}"
        )
    return Finding(
        "holds only if" if round(math.sqrt(32)) == 6 and round(math.sqrt(96)) == 10 else "does not hold",
        "layers keep little beside their input. The roots are right; as segment lengths for the Transformers of those depths they are "
        f"not: by the closed forms, {figures['Llama-2-7B: best equal segments']} and {figures['GPT-3: best equal segments']} layers need "
        "less than half of what 6 and 10 need.",
        figures,
    )
