"""Lesson 04's answers about shares and prices: how much of a model's activations is left, and for
how much work or time.

Shares of larger models are lesson 01's closed forms. Work is counted in floating-point operations,
and times are quoted from what ``benchmarks/checkpointing.py`` and a published table recorded.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import cache

from torch.utils.flop_counter import FlopCounterMode

from ....techniques.schedules import uniform_segments
from ...ledger import Finding, answers, bert_large
from ...ledger.finding import Figures, about, at_least, between
from ...material import models
from ..shared.claim_runs import peak_of, recorded, where_recorded
from .claims import (
    BERT_LARGE,
    GPT2_XL,
    GPT3,
    SEVEN,
    WIDTH,
    best_length,
    block_bytes,
    chain,
    input_bytes,
    inputs,
    left,
    llama_work,
    on,
    share_left,
)


def _times(*variants: str) -> dict[str, float]:
    """Recorded times relative to no checkpoint, for variants whose names begin like this, in every
    timed setting.
    """
    found = recorded("checkpointing") or {"settings": {}}
    return {
        f"{name}: {setting['what']}": row["time / none"]
        for setting in found["settings"].values()
        for name, row in setting["variants"].items()
        if name.startswith(variants) and "time / none" in row
    }


def _recorded_times(*variants: str) -> dict[str, str]:
    found, times = recorded("checkpointing"), _times(*variants)
    if not times:
        return {"recorded times": "none here: run benchmarks/checkpointing.py"}
    where = where_recorded(found)
    return {
        f"recorded time / none, {name} ({where})": f"{ratio:.2f}" for name, ratio in times.items()
    }


def _recorded_range(*variants: str) -> str:
    """A sentence with the smallest and the largest recorded time, or nothing where there is no
    record.
    """
    found, times = recorded("checkpointing"), _times(*variants).values()
    if not times:
        return ""
    return (
        f" In our record on one device ({found['where']['device']}, {found['clock']}), checkpoints "
        f"take {min(times):.2f} to {max(times):.2f} times as long as no checkpoints."
    )


@cache
def _flops(trained: bool, every: int | None) -> int:
    """Operations of a step of a chain of 32 layers."""
    layers = models.chain(32, width=WIDTH).requires_grad_(trained)
    with on(layers, every), FlopCounterMode(display=False) as flops:
        layers(inputs()).square().sum().backward()
    return flops.get_total_flops()


def _more(trained: bool, every: int) -> float:
    """How many more than without checkpoints, as a share."""
    return _flops(trained, every) / _flops(trained, None) - 1


@answers("C15")
def twenty_per_cent_slower() -> Finding:
    table = {run.name: run for run in bert_large.RUNS}
    before, after = table["1 x 4"], table["1 x 4, checkpointing"]
    figures: Figures = {}
    for weights in ("trained", "frozen"):
        for k in (1, 8):
            trained = weights == "trained"
            figures[f"operations in a chain, {weights} weights, segments of {k}"] = (
                f"{_flops(trained, k):,}, {_more(trained, k):+.1%}"
            )
    return Finding(
        own=(
            about(
                "rows a second lost in its table",
                0.2,
                1 - after.per_second / before.per_second,
                "%",
                within=0.25,
            ),
        ),
        elsewhere=(about("time added in its table", 0.2, after.seconds / before.seconds - 1, "%"),),
        says=f"""
            only if: speed means rows per second, and then roughly; the added time is more.
            fails: Its own table says otherwise.
            why: The cost depends on the layers, the device and what is trained: with frozen
                weights, backward is shorter, so the second forward is a larger
                share.{_recorded_range("per layer", "sqrt")}
            """,
        figures=figures | _recorded_times("per layer", "sqrt"),
    )


@answers("C20")
def saves_half_to_four_fifths() -> Finding:
    figures: Figures = {}
    saved = {}
    for shape in (BERT_LARGE, GPT2_XL):
        for k in (round(math.sqrt(shape.layers)), 1):
            saved[shape.name, k] = 1 - share_left(shape, k)
            figures[f"{shape.name}, {shape.layers} layers, segments of {k}: saved"] = (
                f"{saved[shape.name, k]:.1%}"
            )
    work = {k: llama_work(16, k) for k in (4, 1)}
    figures |= {
        f"a Llama of 16 layers, segments of {k}: more operations": f"{n:.1%}"
        for k, n in work.items()
    }
    return Finding(
        own=(
            between(
                "activations saved, BERT-large", 0.5, 0.8, saved["BERT-large", 5], "%", within=0.1
            ),
            between("more operations, 16 layers", 0.2, 0.3, work[4], "%", within=0.1),
        ),
        elsewhere=(
            between("saved by one checkpoint a layer", 0.5, 0.8, saved["BERT-large", 1], "%"),
        ),
        says=f"""
            only if: segments have sqrt(n) layers, its own schedule; one checkpoint per layer
                saves more.
            fails: Its own models save a different share, or need a different amount of work.
            why: With one checkpoint per layer, BERT-large saves {saved["BERT-large", 1]:.0%}
                for {work[1]:.0%} more operations. The extra work is at most one forward: a third of
                a step where all weights are trained, half where they are frozen.
            """,
        figures=figures | _recorded_times("per layer", "sqrt"),
    )


def _longest(card: int, checkpointing: int | str | None) -> int:
    """The longest sequence on which Llama-2-7B in pure bf16 trains with AdamW on a card of this
    size, at batch 1.
    """
    low, high = 1, 2**20
    while low < high:
        middle = (low + high + 1) // 2
        if peak_of(SEVEN, 1, middle, checkpointing=checkpointing).total <= card:
            low = middle
        else:
            high = middle - 1
    return low


@answers("C39")
def twice_the_sequence() -> Finding:
    root = round(math.sqrt(SEVEN.layers))
    longest = {
        (card, every): _longest(card * 10**9, every)
        for card in (60, 80, 141)
        for every in (None, root, "per-layer")
    }
    times = {card: longest[card, root] / longest[card, None] for card in (60, 80, 141)}
    return Finding(
        own=(
            at_least("longer sequences, 7B on 60 GB", 2, times[60], "times"),
            at_least("the same on 80 GB", 2, times[80], "times"),
            about("more operations, 16 layers", 0.33, llama_work(16, 4), "%"),
        ),
        says=f"""
            holds: A 7B in bf16 with AdamW gains at least that on a card of 60 GB or more.
            fails: On one of these cards the sequence is less than twice as long.
            why: On 141 GB the factor is {times[141]:.1f}, by the closed forms of lesson 01. One
                checkpoint per layer gives {longest[80, "per-layer"] / longest[80, None]:.1f} times
                on 80 GB. The activations shrink by more, but the logits do not.
            """,
        figures={
            (
                f"longest sequence on {card} GB, "
                f"{f'checkpointing {every}' if every else 'no checkpoint'}"
            ): n
            for (card, every), n in longest.items()
        }
        | {
            "operations in a chain, 32 trained layers, segments of 6": f"{_more(True, 6):+.1%}",
            "operations in a chain, 32 frozen layers, segments of 6": f"{_more(False, 6):+.1%}",
        },
    )


@answers("C40")
def eight_segments_of_four() -> Finding:
    segments = uniform_segments(32, 4)
    _, calls = chain(32, 5, 4)
    frozen = _more(False, 4)
    return Finding(
        own=(
            about("more operations, a checkpoint every 4", 0.33, llama_work(16, 4), "%"),
            about(f"extra forward passes, {len(segments)} segments", 1, calls / 32 - 1, within=0),
        ),
        elsewhere=(about("more operations, frozen weights", 0.33, frozen, "%"),),
        says=f"""
            only if: all weights are trained, as in its example; with frozen weights, backward
                is half as long.
            fails: The number of segments, passes or operations differs.
            why: The extra operations are a little less than a third, since PyTorch stops a
                recomputation as soon as it has the last missing tensor. With frozen weights,
                backward is half as long, and the extra is {frozen:.0%} in a chain.
            """,
        figures={
            "forward calls of a layer, in forward and backward": calls,
            "operations in a chain, frozen weights": f"{frozen:+.1%}",
        },
    )


def _speeds(times: Collection[float]) -> str:
    """The end of a sentence: the range of recorded speeds, or nothing where there is no record."""
    if not times:
        return ""
    return f"; our CPU records have {1 / max(times):.0%} to {1 / min(times):.0%} of the speed"


@answers("C41")
def a_table_of_shares() -> Finding:
    setting = {"tokens": (8, 2048)}
    whole = SEVEN.layers * block_bytes(SEVEN, "float32", **setting)
    still = {
        name: left(SEVEN, 1, precision=name, **setting) / whole
        for name in ("float32", "autocast-bf16", "bf16")
    }
    work = {k: llama_work(16, k) for k in (1, 4)}
    times = _times("per layer").values()
    return Finding(
        own=(
            about("activations left, one a layer", 0.2, still["float32"], "%", within=0.25),
            about("the same, mixed precision", 0.1, still["autocast-bf16"], "%", within=0.25),
        ),
        beyond=(about("speed, slowest of our CPU records", 0.67, 1 / max(times), "%"),)
        if times
        else (),
        says=f"""
            fails: One checkpoint per layer leaves {still["float32"]:.0%} of the activations,
                not 20%{_speeds(times)}.
            holds: The memory and the speeds are as claimed.
            why: Segments of 6 leave about 20% ({share_left(SEVEN, 6):.1%}). In pure bf16, one
                checkpoint per layer leaves {still["bf16"]:.1%}. It needs {work[1]:.0%} more
                operations ({1 / (1 + work[1]):.0%} of the speed), and segments of 4 need
                {work[4]:.0%} more ({1 / (1 + work[4]):.0%}): by operations, one checkpoint per
                layer is faster.{_recorded_range("per layer")}
            """,
        figures={
            f"Llama-2-7B, 8 x 2048, a checkpoint a layer: left, {name}": f"{n:.1%}"
            for name, n in still.items()
        }
        | {
            (
                f"a/x of Llama-2-7B in {name}"
            ): f"{block_bytes(SEVEN, name) / input_bytes(SEVEN, name):.1f}"
            for name in ("bf16", "float32")
        }
        | _recorded_times("per layer", "every_n_layers"),
    )


@answers("C50")
def root_of_depth_as_length() -> Finding:
    figures: Figures = {}
    for shape in (SEVEN, GPT3):
        root, best = round(math.sqrt(shape.layers)), best_length(shape)
        figures[f"{shape.name}, {shape.layers} layers: square root"] = (
            f"{math.sqrt(shape.layers):.2f}"
        )
        figures[f"{shape.name}: a/x in bf16"] = f"{block_bytes(shape) / input_bytes(shape):.1f}"
        figures[f"{shape.name}: best equal segments"] = best
        figures[f"{shape.name}: left with segments of {root} / of {best}"] = (
            f"{share_left(shape, root):.1%} / {share_left(shape, best):.1%}"
        )
    root = round(math.sqrt(SEVEN.layers))
    return Finding(
        own=(
            about(f"left by segments of {root} of 32", 0.2, share_left(SEVEN, root), "%"),
            about("root of 96", 10, math.sqrt(GPT3.layers)),
        ),
        beyond=(
            about(
                "left by the best segments of 32", 0.2, share_left(SEVEN, best_length(SEVEN)), "%"
            ),
        ),
        says="""
            holds: Segments of 6 of 32 layers leave about 20%, but one checkpoint per layer
                leaves less.
            fails: The roots, or the share that is left, differ.
            why: The root of the depth is best where layers keep little besides their input (see
                C27). A Transformer block keeps more than 20 times its input.
            """,
        figures=figures,
    )
