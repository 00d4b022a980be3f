"""Whether a loss may be computed piece by piece: the loss is asked, with three forwards.

Accumulation adds up the sums of pieces. That is right if a batch has the same sums in pieces as
together. Two mistakes change the sum: a loss that compares rows, so that a row's part depends on
the other rows; and a count that is not the loss's divisor.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from .asking import PAIRS, RANDOM, SAME_ROWS, Question, asking, first_line
from .counts import check_reduction, checked_pair
from .data_parallel import processes_of
from .splitting import count_rows, split

Pairs = list[tuple[float, float]]  # a sum and its count, for each mean


def check_pieces_add_up(
    model: nn.Module,
    batch: Any,
    loss_and_count: Callable[[Any], Any],
    *,
    reduction: str = "sum",
) -> None:
    """Raise ``ValueError`` if the loss of all rows of ``batch`` is not the sum of two losses: that
    of all rows but the last, and that of the last row.

    ``accumulate_gradients`` cannot ask this by itself, since it is given pieces, and does not know
    how they would be put together. Call this once, before the first window::

        check_pieces_add_up(model, next(split(batch, 4)), loss_and_count, reduction="mean")

    It costs three forwards of at most these rows: in eval mode, without gradients, with a few other
    numbers in the trained weights, and unseen by a tracker. Afterwards the model and the random
    numbers are as before. ``loss_and_count`` is called three times (before a
    refusal up to ten times, and after a ``RuntimeError`` of its own once more, with gradients),
    with what it does besides.

    Args:
        model: what ``loss_and_count`` calls. With ``DistributedDataParallel`` or sharding, all
            processes call this together.
        batch: at least two rows that ``split`` can cut. Take rows that are unlike each other: of
            equally long rows of one class, most wrong losses have the right sum.
        loss_and_count: the one of ``accumulate_gradients``, as is ``reduction``. It returns one
            pair, or a list of several. Each count must be that of the rows that it is given.

    A loss that draws random numbers in eval mode differs from call to call, and is refused too.
    """
    check_reduction(reduction)
    processes = processes_of(model)

    def sums_and_counts(rows: Any) -> Pairs:
        returned = loss_and_count(rows)
        pairs = returned if isinstance(returned, list) else [returned]
        return [_sum_and_count(pair, reduction) for pair in pairs]

    pieces = _all_but_the_last_row_and_it(batch)
    with asking(model, sums_and_counts, processes) as question:
        [(found, error)], _ = question.observe_with_other_weights(
            [batch, *pieces], shows=lambda found: _is_finite(found[0].values)
        )
        if processes.sums(error is None and not _is_finite(found))[0]:
            raise ValueError(
                "look for very large or missing numbers: the loss of all rows together is not "
                "finite, which shows nothing about its pieces"
            )
        difference = ""
        if error is None:
            together, *alone = found
            difference = _difference(together, alone, question.rounding)
        refused = processes.sums(bool(error or difference))[0] > 0
        if refused and question.changes(batch, differ=partial(_differ, question)):
            difference = f"{RANDOM}: the loss {SAME_ROWS}"
    if error is not None:
        raise ValueError(
            f"let loss_and_count take any number of rows, or {PAIRS}: its loss for a few rows "
            f"raised {first_line(error)}"
        ) from error
    if refused:
        difference = difference or "another process found a difference"
        raise ValueError(f"{difference}. Accumulation would train another loss")


def _all_but_the_last_row_and_it(batch: Any) -> list[Any]:
    rows = count_rows(batch)
    if rows < 2:
        raise ValueError(
            f"a batch of {rows} rows cannot be compared with its pieces: give at least two rows"
        )
    return list(split(batch, rows - 1))


def _sum_and_count(returned: Any, reduction: str) -> tuple[float, float]:
    loss, count = checked_pair(returned)
    value = loss.item()
    if reduction == "mean":
        value = value * count if count else 0.0  # the mean of nothing is not a number
    return value, float(count)


def _is_finite(found: list[Pairs]) -> bool:
    """Whether the sums of all rows together are numbers."""
    return all(math.isfinite(loss) for loss, _ in found[0])


def _differ(question: Question, one: Pairs, other: Pairs) -> bool:
    """Whether the same rows have other sums or counts."""
    if len(one) != len(other):
        return True
    return any(any(map(question.differ, *both)) for both in zip(one, other, strict=True))


def _difference(together: Pairs, alone: list[Pairs], limit: float) -> str:
    """What differs between a batch and its pieces; an empty string if nothing does."""
    numbers = sorted({len(together), *(len(piece) for piece in alone)})
    if len(numbers) > 1:
        return f"{numbers[0]} pairs of loss and count for some rows, and {numbers[-1]} for others"
    for place, (loss, count) in enumerate(together):
        losses = [piece[place][0] for piece in alone]
        counts = [piece[place][1] for piece in alone]
        if (0.0, 0.0) in [piece[place] for piece in alone]:  # no loss, and no items
            return (
                "give rows that all have labels: a piece of this batch has no items, which shows "
                "nothing"
            )
        tolerance = limit
        if all(each.is_integer() for each in (count, *counts)):
            tolerance = 0.0  # whole numbers are not rounded
        if not math.isclose(sum(counts), count, rel_tol=tolerance):
            return (
                "count the rows that are given, as len(labels) does, or their labels that are not "
                f"-100, after the shift: the count of all rows is {count:g}, and those of its "
                f"pieces are {' and '.join(f'{each:g}' for each in counts)}"
            )
        # Sums of unlike signs cancel, and their rounding does not.
        scale = max(abs(loss), sum(abs(each) for each in losses))
        if not abs(sum(losses) - loss) <= limit * scale:
            return (
                "return class weights as counts (weight[labels].sum()), and several means as a "
                "list of pairs, each with its own count; or use accumulate_through_embeddings, if "
                f"the loss compares rows: its sum is {loss:.6g} for all rows together, and "
                f"{sum(losses):.6g} as the sum of pieces"
            )
    return ""
