"""What a loss and its number of items must be, and the sentences that say what is wrong with them.

``accumulate_gradients`` checks every loss and count with these functions.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor


def check_reduction(reduction: str) -> None:
    if reduction not in ("sum", "mean"):
        raise ValueError(
            f"reduction={reduction!r}: loss_and_count returns a 'sum' or a 'mean' of its items"
        )


def check_totals(said: tuple, counted: tuple) -> None:
    """``ValueError`` if the totals that losses were divided by are not what was counted."""
    for total, items in zip(said, counted, strict=True):
        whole = isinstance(total, int) and isinstance(items, int)
        # Sums of float32 weights depend on the order in which they are added.
        same = total == items if whole else math.isclose(total, items, rel_tol=1e-5)
        if not same:
            raise ValueError(
                f"the total said before was {total:,} items, and loss_and_count counted "
                f"{items:,}: gradients were divided by the wrong number. Count the same things in "
                "both: labels that are not -100, after the shift"
            )


def check_counts(counts: Any, what: str) -> tuple:
    """A count, or a tuple or list of counts, as a tuple."""
    if isinstance(counts, tuple | list):
        return tuple(check_count(count, what) for count in counts)
    return (check_count(counts, what),)


def whole(number: float) -> int | float:
    """A whole number as an int, which Python prints as a count."""
    return int(number) if number == int(number) else number


def check_count(number: Any, what: str) -> int | float:
    """``number`` of at least 0, from a number or a tensor of one element; an int if it is whole."""
    value = number.item() if isinstance(number, Tensor) and number.numel() == 1 else number
    if not isinstance(value, int | float | np.number) or not math.isfinite(value):
        raise TypeError(
            f"{what} must be a number of items, or a sum of their weights, and was {number!r}"
        )
    if value < 0:
        raise ValueError(f"{what} was {value}: a number of items cannot be negative")
    return whole(value if isinstance(value, int) else float(value))


def check_returned(returned: Any, mean: bool) -> tuple[Tensor, int | float]:
    """Check what ``loss_and_count`` returned. Returns the loss and the count."""
    loss, count = checked_pair(returned)
    if count and not loss.requires_grad:
        raise ValueError(
            "the loss has no gradient: it was detached, or computed under torch.no_grad(), or no "
            "parameter requires one. Return the loss itself, not loss.detach() or a number made "
            "from loss.item()"
        )
    if count and not mean and loss.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"the summed loss is in {loss.dtype}, which keeps about three digits of it: "
            "compute it on logits.float()"
        )
    return loss.reshape(()), count


def checked_pair(returned: Any) -> tuple[Tensor, int | float]:
    """A loss of one element and its count, if ``returned`` is such a pair."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            "loss_and_count must return two things, (summed loss, items), and returned "
            f"{type(returned).__name__}: for "
            'example F.cross_entropy(logits, labels, reduction="sum") and (labels != -100).sum()'
        )
    loss, count = returned[0], check_count(returned[1], "the count of loss_and_count")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError(
            "the loss must be a tensor of one element, and was "
            f'{described(loss)}: use reduction="sum"'
        )
    return loss, count


def described(value: Any) -> str:
    """What was given in place of a loss, for an error."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__}"
