"""Lesson 04's answers about shares and prices: how much of a model's activations is left, and for
how much work or time.

Shares of larger models are lesson 01's closed forms. Work is counted in floating-point operations,
and times are quoted from what ``benchmarks/checkpointing.py`` and a published table recorded.
"""

import math
from bisect import bisect_right
from functools import cache

from ....techniques.schedules import schedule_peak, uniform_segments
from ...ledger import Finding, answers, bert_large
from ...ledger.finding import Figures, about, at_least, between, each
from ...material import models
from ...material.flops import count_operations
from ..shared.claim_runs import checkpointed, peak_of, recorded, recorded_times
from .claims import (
    BERT_LARGE,
    GPT2_XL,
    GPT3,
    SEVEN,
    WIDTH,
    best_length,
    block,
    chain,
    inputs,
    left,
    llama_work,
    share_left,
)


def _times(*variants: str) -> dict[str, float]:
    """Recorded times relative to no checkpoint, for variants whose names begin like this, in every
    timed setting.
    """
    found = {}
    for setting in recorded("checkpointing")["settings"].values():
        for name, row in setting["variants"].items():
            if name.startswith(variants) and "time / none" in row:
                found[f"{name}: {setting['what']}"] = row["time / none"]
    return found


def _recorded_figures(*variants: str) -> Figures:
    return recorded_times("checkpointing", "recorded time / none, {}", _times(*variants))


def _recorded_range(*variants: str) -> str:
    """A sentence with the smallest and the largest recorded time."""
    found, times = recorded("checkpointing"), _times(*variants).values()
    return (
        f" In our record on one device ({found['where']['device']}, {found['clock']}), checkpoints "
        f"take {min(times):.2f} to {max(times):.2f} times as long as no checkpoints."
    )


@cache
def _operations(trained: bool, every: int | None) -> int:
    """Of a step of a chain of 32 layers."""
    layers = models.chain(32, width=WIDTH).requires_grad_(trained)
    with checkpointed(layers, every):
        return count_operations(lambda: layers(inputs()).square().sum().backward())


def _more(trained: bool, every: int) -> float:
    """How many more than without checkpoints, as a share."""
    return _operations(trained, every) / _operations(trained, None) - 1


@answers("C15")
def twenty_per_cent_slower() -> Finding:
    table = {run.name: run for run in bert_large.RUNS}
    before, after = table["1 x 4"], table["1 x 4, checkpointing"]
    slower = 1 - after.per_second / before.per_second
    return Finding(
        own=about("rows a second lost in its table", "20%", slower, within=0.25),
        elsewhere=about("time added in its table", "20%", after.seconds / before.seconds - 1),
        says=f"""
            only if: speed means rows per second, and then roughly; the added time is more.
            fails: Its own table says otherwise.
            why: The cost depends on the layers, the device and what is trained: with frozen
                weights, backward is shorter, so the second forward is a larger
                share.{_recorded_range("per layer", "sqrt")}
            """,
        figures=_recorded_figures("per layer", "sqrt"),
    )


@answers("C20")
def saves_half_to_four_fifths() -> Finding:
    saved = {}
    for shape in (BERT_LARGE, GPT2_XL):
        for k in (round(math.sqrt(shape.layers)), 1):
            saved[shape.name, shape.layers, k] = 1 - share_left(shape, k)
    root, each_layer = saved["BERT-large", 24, 5], saved["BERT-large", 24, 1]
    work = {k: llama_work(k) for k in (4, 1)}
    return Finding(
        own=(
            between("activations saved, BERT-large", "50 to 80%", root, within=0.1),
            between("more operations, 16 layers", "20 to 30%", work[4], within=0.1),
        ),
        elsewhere=between("saved by one checkpoint a layer", "50 to 80%", each_layer),
        says=f"""
            only if: segments have sqrt(n) layers, its own schedule; one checkpoint per layer
                saves more.
            fails: Its own models save a different share, or need a different amount of work.
            why: With one checkpoint per layer, BERT-large saves {each_layer:.0%}
                for {work[1]:.0%} more operations. The extra work is at most one forward: a third of
                a step where all weights are trained, half where they are frozen.
            """,
        figures=each("{}, {} layers, segments of {}: saved", saved, "{:.1%}")
        | each("a Llama of 16 layers, segments of {}: more operations", work, "{:.1%}")
        | _recorded_figures("per layer", "sqrt"),
    )


def _longest(card: int, checkpointing: int | str | None) -> int:
    """The longest sequence on which Llama-2-7B in pure bf16 trains with AdamW on a card of this
    size, at batch 1.
    """

    def bytes_of(seq_len: int) -> int:
        return peak_of(SEVEN, 1, seq_len, checkpointing=checkpointing).total

    return bisect_right(range(1, 2**20), card, key=bytes_of)


@answers("C39")
def twice_the_sequence() -> Finding:
    root = round(math.sqrt(SEVEN.layers))
    longest = {}
    for card in (60, 80, 141):
        for every in (None, root, "per-layer"):
            longest[card, every] = _longest(card * 10**9, every)
    times = {card: longest[card, root] / longest[card, None] for card in (60, 80, 141)}
    return Finding(
        own=(
            at_least("longer sequences, 7B on 60 GB", "2×", times[60]),
            at_least("the same on 80 GB", "2×", times[80]),
            about("more operations, 16 layers", "33%", llama_work(4)),
        ),
        says=f"""
            holds: A 7B in bf16 with AdamW gains at least that on a card of 60 GB or more.
            fails: On one of these cards the sequence is less than twice as long.
            why: On 141 GB the factor is {times[141]:.1f}, by the closed forms of lesson 01. One
                checkpoint per layer gives {longest[80, "per-layer"] / longest[80, None]:.1f} times
                on 80 GB. The activations shrink by more, but the logits do not.
            """,
        figures=each("longest sequence on {} GB, checkpointing {}", longest),
    )


@answers("C40")
def eight_segments_of_four() -> Finding:
    segments = uniform_segments(32, 4)
    _, calls, _ = chain(32, 5, 4)
    frozen = _more(False, 4)
    return Finding(
        own=(
            about("more operations, a checkpoint every 4", "33%", llama_work(4)),
            about(f"extra forward passes, {len(segments)} segments", "1", calls / 32 - 1, within=0),
        ),
        elsewhere=about("more operations, frozen weights", "33%", frozen),
        says=f"""
            only if: all weights are trained, as in its example; with frozen weights, backward
                is half as long.
            fails: The number of segments, passes or operations differs.
            why: The extra operations are a little less than a third, since PyTorch stops a
                recomputation as soon as it has the last missing tensor. With frozen weights,
                backward is half as long, and the extra is {frozen:.0%} in a chain.
            """,
        figures={"forward calls of a layer, in forward and backward": calls},
    )


@answers("C41")
def a_table_of_shares() -> Finding:
    setting = {"tokens": (8, 2048)}
    whole = SEVEN.layers * block(SEVEN, "float32", **setting)[0]
    still = {}
    for name in ("float32", "autocast-bf16", "bf16"):
        still[name] = left(SEVEN, 1, precision=name, **setting) / whole
    work = {k: llama_work(k) for k in (1, 4)}
    times, segments = _times("per layer").values(), _times("sqrt").values()
    return Finding(
        own=(
            about("activations left, one checkpoint a layer", "20%", still["float32"], within=0.25),
            about("the same, mixed precision", "10%", still["autocast-bf16"], within=0.25),
        ),
        beyond=about("speed, slowest of our CPU records", "67%", 1 / max(times)),
        says=f"""
            fails: One checkpoint per layer leaves {still["float32"]:.0%} of the activations,
                not 20%; our CPU records have {1 / max(times):.0%} to {1 / min(times):.0%} of the
                speed.
            holds: The memory and the speeds are as claimed.
            why: Segments of 6 leave about 20% ({share_left(SEVEN, 6):.1%}). In pure bf16, one
                checkpoint per layer leaves {still["bf16"]:.1%}. By operations, it has
                {1 / (1 + work[1]):.0%} of the speed ({work[1]:.0%} more operations), and segments
                of 4 have {1 / (1 + work[4]):.0%} ({work[4]:.0%} more): the claimed order is the
                other way round.{_recorded_range("per layer", "sqrt")} Segments of sqrt(n) layers
                have {1 / max(segments):.0%} to {1 / min(segments):.0%} of the speed.
            needs: a card for the speed of mixed precision
            """,
        figures=each("Llama-2-7B, 8 x 2048, a checkpoint a layer: left, {}", still, "{:.1%}")
        | _recorded_figures("per layer", "sqrt"),
    )


@answers("C50")
def root_of_depth_as_length() -> Finding:
    found = {}
    for shape in (SEVEN, GPT3):
        root, best = round(shape.layers**0.5), best_length(shape)
        found[shape.name, root, best] = share_left(shape, root), share_left(shape, best)
    of_root, of_best = found["Llama-2-7B", 6, 1]
    little = [schedule_peak(uniform_segments(32, k), 0, 1) for k in range(1, 33)]
    return Finding(
        own=about("Llama-2-7B, segments of 6 / best", "1×", of_root / of_best),
        where=about("layers that keep only their input", "1×", little[5] / min(little)),
        beyond=about("left by 6 of 32", "20%", of_root),
        says="""
            only if: layers keep little besides their input; in a Transformer, one checkpoint per
                layer leaves less.
            holds: For a Transformer, too.
            fails: Other segments are best, even where layers keep little.
            why: A Transformer block keeps more than 20 times its input. The shares are right:
                segments of 6 of 32 layers leave about 20%. They are not the least (see C27).
            """,
        figures=each("{}: left with segments of {} / of {}", found, "{:.1%} / {:.1%}"),
    )
