"""Losses that are not finite: which rows have one, and what to say of it.

A row whose loss is nan or inf shows nothing about what the loss is a mean of, and one step on it
makes every weight nan.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import nn

from ..techniques.asking import asking_loss
from ..techniques.data_parallel import Processes
from ..techniques.splitting import split
from .probe_rows import rows_together, some_rows


def by_finite_loss(
    model: nn.Module, micro_batches: Sequence[Any], loss_of: Callable
) -> tuple[list[Any], str]:
    """The rows whose losses are finite, as micro-batches of one row, and where the first row
    without a finite loss is (empty: all are finite). Each row is asked about alone.

    The mean of nothing is nan too, as of a row without labels, or of a loss that compares rows. So
    a row counts as finite if its loss is, alone or beside a row that has one.
    """
    rows: list[tuple[Any, str]] = []  # with what is to be said; empty if the loss alone is finite
    with asking_loss(model, loss_of) as question:

        def is_finite(batch: Any) -> bool:
            [(loss, error)] = question.observe(batch)
            return error is not None or math.isfinite(loss)

        for number, micro in enumerate(micro_batches, 1):
            for place, row in enumerate(split(micro, 1), 1):
                where = f"row {place} of micro-batch {number}"
                rows.append((row, "" if is_finite(row) else where))
        finite = [row for row, where in rows if not where]
        if not finite and is_finite(some_rows(micro_batches)):
            return [row for row, _ in rows], ""
        first_other = ""
        for row, where in rows:
            if where and finite and is_finite(rows_together([finite[0], row])):
                finite.append(row)
            else:
                first_other = first_other or where
    return finite, first_other


def finite_rows(model: nn.Module, micro_batches: Sequence[Any], loss_of: Callable) -> list[Any]:
    """The rows that a model can be asked about, if its loss is not finite for some others; an empty
    list if it is finite for all. Raises ``ValueError`` if it is for none.
    """
    finite, first_other = by_finite_loss(model, micro_batches, loss_of)
    if first_other and not finite:
        raise not_finite("the loss of each row is not finite", model, micro_batches, loss_of)
    return finite if first_other else []


def not_finite(
    what: str,
    model: nn.Module,
    micro_batches: Sequence[Any],
    loss_of: Callable,
    processes: Processes | None = None,
) -> ValueError:
    """The error to raise before a step with ``what``, the words for a loss or a gradient."""
    where = ""
    if processes is None or not processes.groups:  # several would have to run each forward together
        with suppress(TypeError, ValueError):  # what cannot be cut into rows
            _, first = by_finite_loss(model, micro_batches, loss_of)
            where = f" ({first} shows it)" if first else ""
    return ValueError(
        "look for rows with very large or missing numbers, or lower the learning rate: "
        f"{what}, and a step would make every weight nan, so none was made{where}. In float16, "
        "give scaler=GradScaler(), which skips such a step and lowers its factor"
    )
