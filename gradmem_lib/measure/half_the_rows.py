"""How many bytes of a forward without gradients go if its batch has half as many rows.

Sure to go is half of each tensor whose first dimension is that of the batch: its rows, or all rows'
tokens in one dimension. Masks, tables and cast weights stay as large as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from .bytes_alive import bytes_alive
from .facts import Facts, total
from .parts_of_the_step import largest_evaluation
from .timeline import TOTAL, ForwardPass, Holder


def bytes_with_rows(call: ForwardPass, facts: Facts) -> int:
    """The bytes at the peak of the tensors with rows that ``call`` has made."""
    return total(_with_rows(facts.at_peak, facts)[call.samples])


def without_half_the_rows(facts: Facts) -> np.ndarray:
    """The bytes that go at each of ``facts.rows`` if the batches of all calls like the peak's have
    half as many rows, or less: int64 (samples,).

    Of a long run, the tensors of the last calls alone are known. An earlier call then counts as if
    it needed the same part of its bytes as the known call that needs the largest part.
    """
    largest = largest_evaluation(facts)
    goes = np.zeros(len(facts.rows), dtype=np.int64)
    if largest is None:
        return goes
    with_rows = _with_rows((*facts.at_peak, *facts.others), facts)
    older = list[ForwardPass]()
    stays = 0.0  # the largest part of its bytes that a known call needs
    for call in facts.evaluations:
        if call.call != largest.call:
            continue
        if call.samples[0] < facts.freed_since:
            older.append(call)
            continue
        inside = _inside(call, facts)
        needed = facts.rows[inside, TOTAL] - call.live_before
        goes[inside] = bytes_alive(with_rows[call.samples], facts)[inside] // 2
        most = int(needed.max(initial=0))
        if most > 0:
            stays = max(stays, int((needed - goes[inside]).max()) / most)
    for call in older:
        if stays > 0:
            inside = _inside(call, facts)
            needed = facts.rows[inside, TOTAL] - call.live_before
            goes[inside] = np.maximum(needed - stays * needed.max(initial=0), 0)
    return goes


def _inside(call: ForwardPass, facts: Facts) -> np.ndarray:
    """Which of ``facts.rows`` are inside of a call: bool (samples,)."""
    return (facts.samples >= call.samples[0]) & (facts.samples < call.samples[1])


def _with_rows(
    holders: Iterable[Holder], facts: Facts
) -> defaultdict[tuple[int, int], list[Holder]]:
    """Those of ``holders`` that forwards have made, and whose first dimension is that of the batch,
    for each forward (by its ``samples``).
    """
    weights = set[tuple[int, ...]]()
    for holder in facts.at_peak:
        if holder.category == "parameters" or facts.of_another_model(holder):
            weights |= {holder.shape, holder.shape[::-1]}  # a cast weight may be transposed
    found = defaultdict[tuple[int, int], list[Holder]](list)
    for holder in holders:
        call = facts.last_begun(holder.samples[0])
        if call is None or holder.samples[0] >= call.samples[1]:
            continue  # made outside of forwards
        if _has_rows(holder.shape, call) and holder.shape not in weights:
            found[call.samples].append(holder)
    return found


def _has_rows(shape: tuple[int, ...], call: ForwardPass) -> bool:
    """Whether a tensor is surely half as large if the batch of ``call`` has half as many rows.

    Its first dimension is that of the batch, and no other one is as large: else the tensor may be
    a mask of tokens with tokens. If the tokens may come first in the batch, it has to have both
    dimensions: else it may be made of tokens alone, such as their positions.
    """
    if not shape or shape[0] not in call.row_counts or shape[0] in shape[1:]:
        return False
    is_first_of_the_batch = shape[0] == min(call.row_counts)
    if call.second_size and is_first_of_the_batch:
        return call.second_size in shape[1:]
    return True
