"""Lesson 10's formulas: what each rank holds, and how long ranks take to talk."""

from __future__ import annotations

import math
from ast import literal_eval

from ...judge.exercise import Exercise, Mistake, calls

WAYS = ("ddp", "zero1", "zero2", "fsdp")


def bytes_per_rank(parameters, ranks, way):
    """Bytes of (weights, gradients, optimizer states) on each rank, in mixed precision."""
    return _held()(parameters, ranks, way)


_CUT = {"ddp": (0, 0, 0), "zero1": (0, 0, 1), "zero2": (0, 1, 1), "fsdp": (1, 1, 1)}


def _held(each=(2, 2, 12), cut=_CUT, result=tuple):
    def wrong(parameters, ranks, way):
        return result(
            size * parameters / (ranks if part else 1)
            for size, part in zip(each, cut[way], strict=True)
        )

    return wrong


_ONE_PART_WRONG = (
    (
        "only fsdp cuts the weights: with the other ways each rank has a whole copy, of 2 bytes a "
        "parameter."
    ),
    (
        "only zero2 and fsdp cut the gradients: with the other ways each rank has all of them, of "
        "2 bytes a parameter."
    ),
    (
        "every way except ddp cuts the optimizer's states: 12 bytes a parameter, for a float32 "
        "copy of the weights and two moments."
    ),
)


def _explain_held(got, expected):
    if not all(isinstance(each, (tuple, list)) and len(each) == 3 for each in got.values()):
        return "return three numbers, (weights, gradients, optimizer states), each in bytes."
    pairs = [(tuple(map(float, got[case])), expected[case]) for case in expected]
    units = [mine[0] / right[0] for mine, right in pairs]
    if units[0] < 1 / 500 and all(math.isclose(unit, units[0]) for unit in units):
        return "return bytes, not kB, MB or GB."
    for says, other in _OTHER_RANKS.items():
        if all(
            tuple(map(float, got[case])) == tuple(map(float, other(*literal_eval(case))))
            for case in expected
        ):
            return says
    wrong = [part for part in range(3) if any(mine[part] != right[part] for mine, right in pairs)]
    return _ONE_PART_WRONG[wrong[0]] if len(wrong) == 1 else None


def _all_together(parameters, ranks, way):
    return [ranks * part for part in bytes_per_rank(parameters, ranks, way)]


def _one_rank_less(parameters, ranks, way):
    whole = bytes_per_rank(parameters, 1, way)
    own = bytes_per_rank(parameters, ranks, way)
    return [n if n == part else n / (ranks - 1) for n, part in zip(whole, own, strict=True)]


_OTHER_RANKS = {
    "these are the bytes of all ranks together: return those of one rank.": _all_together,
    (
        "the parts that are cut are divided by ranks - 1: every rank keeps a share, so divide by "
        "ranks."
    ): _one_rank_less,
}


def communication_seconds(way, nbytes, ranks, micro_batches, bandwidth):
    """Seconds that one update's communication takes: a ring that sends ``bandwidth`` bytes a second
    from each rank.
    """
    return _seconds()(way, nbytes, ranks, micro_batches, bandwidth)


_PASSES = {"ddp": lambda k: 2, "zero2": lambda k: 2 * k, "fsdp": lambda k: 3 * k}


def _seconds(share=lambda ranks: (ranks - 1) / ranks, **passes):
    how = _PASSES | passes

    def wrong(way, nbytes, ranks, micro_batches, bandwidth):
        return share(ranks) * how[way](micro_batches) * nbytes / bandwidth

    return wrong


def _sent(power):
    """The bytes that are sent, times a power of the bandwidth."""

    def wrong(way, nbytes, ranks, micro_batches, bandwidth):
        seconds = communication_seconds(way, nbytes, ranks, micro_batches, bandwidth)
        return seconds * bandwidth * bandwidth**power

    return wrong


_TALK = calls(
    ("ddp", 14_000_000_000, 8, 4, 25e9),
    ("zero2", 3_000_000_000, 2, 1, 450e9),
    ("fsdp", 14_000_000_000, 4, 3, 25e9),
    ("zero2", 900_000_000, 3, 5, 12e9),
    ("ddp", 500_000_000, 2, 1, 64e9),
    hidden=(
        ("fsdp", 6_000_000_000, 16, 1, 300e9),
        ("zero2", 7_700_000, 5, 2, 9e9),
        ("fsdp", 10_000_000, 1, 4, 9e9),
    ),
)


def _explain_seconds(got, expected):
    ratios = {
        round(float(mine) / right, 12)
        for mine, right in zip(got.values(), expected.values(), strict=True)
        if right
    }
    ratio = ratios.pop() if len(ratios) == 1 else 0
    if ratio in (8, 1 / 8):
        return (
            "bytes are converted to bits, or bits to bytes: nbytes and bandwidth are both in bytes."
        )
    if ratio == 0.5:
        return (
            "half of the time is missing: bandwidth is what a rank sends a second, and it sends "
            "as much as it receives."
        )
    if all(
        math.isclose(float(got[case]) * literal_eval(case)[3], right)
        for case, right in expected.items()
    ):
        return "this is divided by the micro-batches: the seconds of a whole update were asked for."
    if 0 < ratio < 1e-2:
        return "every case is far too small: return seconds, from bytes and bytes a second."
    return None


EXERCISES = (
    Exercise(
        id="10.1",
        title="what is copied, and what is cut",
        difficulty=1,
        minutes=3,
        trains="deriving ZeRO's table from the parts of a step",
        reference=bytes_per_rank,
        observe=calls(
            (1_200, 4, "ddp"),
            (7_000_000_000, 8, "zero1"),
            (70_000_000_000, 2, "zero2"),
            (1_200, 3, "fsdp"),
            (600, 6, "zero1"),
            hidden=((4_500, 5, "zero2"), (9_100, 7, "fsdp"), (33, 3, "ddp"), (80, 1, "fsdp")),
        ),
        explain=_explain_held,
        mistakes=(
            Mistake(
                "no copy",
                _held((2, 2, 8)),
                (
                    "the optimizer holds two moments in float32, but its float32 copy of the "
                    "weights is missing: 12 bytes a parameter."
                ),
            ),
            Mistake(
                "float32",
                _held((4, 4, 8)),
                (
                    "weights, gradients and moments are in float32 here: in mixed precision "
                    "weights and gradients are bf16, and the optimizer has 12 bytes a parameter."
                ),
            ),
            Mistake(
                "float32 weights and gradients",
                _held((4, 4, 12)),
                (
                    "weights and gradients are in float32 here: mixed precision keeps them in "
                    "bf16, 2 bytes each."
                ),
            ),
            Mistake(
                "ddp is fsdp",
                _held(cut=_CUT | {"ddp": (1, 1, 1)}),
                "ddp cuts nothing: each rank has all weights, gradients and states.",
            ),
            Mistake(
                "float32 gradients",
                _held((2, 4, 12)),
                "the gradients are in float32 here: they must be bf16, like the weights.",
            ),
            Mistake(
                "the copy is cut as weights are",
                _held((6, 2, 8)),
                (
                    "the float32 copy of the weights belongs to the optimizer's states: it is cut "
                    "when they are."
                ),
            ),
            Mistake("numbers", _held((1, 1, 2)), "these are numbers: return bytes."),
            Mistake("numbers, and the copy", _held((1, 1, 3)), "these are numbers: return bytes."),
            Mistake(
                "bf16 moments alone",
                _held((2, 2, 4)),
                (
                    "the optimizer has only its two moments here: in mixed precision it also "
                    "holds a float32 copy of the weights."
                ),
            ),
            Mistake(
                "a stage too far",
                _held(
                    cut={
                        "ddp": (0, 0, 0),
                        "zero1": (0, 1, 1),
                        "zero2": (1, 1, 1),
                        "fsdp": (1, 1, 1),
                    }
                ),
                (
                    "this cuts one part too many: zero1 cuts only the states, zero2 the gradients "
                    "too, and fsdp all three."
                ),
            ),
            Mistake(
                "a stage short",
                _held(
                    cut={
                        "ddp": (0, 0, 0),
                        "zero1": (0, 0, 0),
                        "zero2": (0, 0, 1),
                        "fsdp": (0, 1, 1),
                    }
                ),
                (
                    "this cuts one part too few: zero1 cuts the states, zero2 the gradients too, "
                    "and fsdp all three."
                ),
            ),
            Mistake(
                "ddp cuts",
                _held(cut=dict.fromkeys(WAYS, (1, 1, 1))),
                "everything is cut, for every way: ddp cuts nothing, and zero1 only the states.",
            ),
            Mistake(
                "every stage cuts all",
                _held(cut=dict.fromkeys(WAYS, (1, 1, 1)) | {"ddp": (0, 0, 0)}),
                "zero1 and zero2 cut everything here, as only fsdp does.",
            ),
            Mistake(
                "weights first",
                _held(
                    cut={
                        "ddp": (0, 0, 0),
                        "zero1": (1, 0, 0),
                        "zero2": (1, 1, 0),
                        "fsdp": (1, 1, 1),
                    }
                ),
                (
                    "this begins with the weights: ZeRO cuts the largest part first, which is the "
                    "states, then the gradients, then the weights."
                ),
            ),
        ),
    ),
    Exercise(
        id="10.6",
        title="what communication costs",
        difficulty=2,
        minutes=3,
        trains="bytes over a link, and which of them accumulation saves",
        reference=communication_seconds,
        observe=_TALK,
        explain=_explain_seconds,
        mistakes=(
            Mistake(
                "ddp each time",
                _seconds(ddp=lambda k: 2 * k),
                (
                    "DDP sends its gradients after every micro-batch here: with no_sync it waits "
                    "for the last one, and sends once an update."
                ),
            ),
            Mistake(
                "fsdp once",
                _seconds(zero2=lambda k: 2, fsdp=lambda k: 3),
                (
                    "sharded weights are sent once an update here: every micro-batch needs them "
                    "again, and reduces its gradients."
                ),
            ),
            Mistake(
                "fsdp alone once",
                _seconds(fsdp=lambda k: 3),
                (
                    "fsdp sends once an update here: every micro-batch gathers the weights again, "
                    "and reduces its gradients."
                ),
            ),
            Mistake(
                "no share",
                _seconds(share=lambda ranks: 1),
                (
                    "a rank already has its own share: it sends (ranks - 1) / ranks of the bytes "
                    "round the ring."
                ),
            ),
            Mistake(
                "gathered once",
                _seconds(fsdp=lambda k: 2 * k),
                (
                    "fsdp frees a layer's weights after forward, so it gathers them again in "
                    "backward: with the pass of the gradients this makes three."
                ),
            ),
            Mistake(
                "one pass",
                _seconds(ddp=lambda k: 1),
                (
                    "an all-reduce is two passes round the ring: one adds up a share on each "
                    "rank, and one sends the sums to all ranks."
                ),
            ),
            Mistake(
                "every rank",
                _seconds(share=lambda ranks: ranks - 1),
                (
                    "every rank sends everything to every other rank here: in a ring each sends 1 "
                    "/ ranks of the bytes, ranks - 1 times."
                ),
            ),
            Mistake(
                "once an update",
                _seconds(fsdp=lambda k: 2 * k + 1, zero2=lambda k: k + 1),
                (
                    "the gradients are reduced once an update here: ranks without a whole copy of "
                    "them must reduce after every micro-batch."
                ),
            ),
            Mistake(
                "one of fsdp's once",
                _seconds(fsdp=lambda k: 2 * k + 1),
                (
                    "one of fsdp's three passes is counted once an update: both all-gathers and "
                    "the reduce-scatter come in every micro-batch."
                ),
            ),
            Mistake("bytes", _sent(0), "these are bytes: return seconds, so divide by bandwidth."),
            Mistake(
                "times bandwidth",
                _sent(1),
                "these are bytes: return seconds, so divide by bandwidth.",
            ),
            Mistake(
                "zero2 once an update",
                _seconds(zero2=lambda k: k + 1),
                (
                    "one of zero2's two passes is counted once an update: it gathers the weights "
                    "and reduces the gradients in every micro-batch."
                ),
            ),
            Mistake(
                "zero2 gathers twice",
                _seconds(zero2=lambda k: 3 * k),
                (
                    "zero2 has three passes a micro-batch here, and needs two: one gathers the "
                    "weights, which stay gathered until backward, and one reduces the gradients."
                ),
            ),
            Mistake(
                "three for all",
                _seconds(ddp=lambda k: 3, zero2=lambda k: 3 * k),
                "only fsdp has three passes: ddp sends no weights, and zero2 gathers them once.",
            ),
            Mistake(
                "one for all",
                _seconds(ddp=lambda k: 1, zero2=lambda k: k, fsdp=lambda k: k),
                "one pass is counted: an all-reduce is two, and sharded weights are gathered too.",
            ),
        ),
    ),
)
