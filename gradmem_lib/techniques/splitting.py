"""Cutting a batch into micro-batches: views of its rows, which take no new bytes."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ..compat.trees import tree_leaves, tree_map_only


def split(batch: Any, size: int) -> Iterator[Any]:
    """Cut a batch into micro-batches of ``size`` rows; the last one has the rest. They are views
    and take no new bytes.

    ``batch`` is a tensor, or a dict or tuple of tensors. A value without rows (a number, a flag)
    goes into every micro-batch. Raises ``ValueError`` when ``size`` is not positive, the tensors
    have unequal numbers of rows, or there is no tensor with rows.
    """
    rows = count_rows(batch)
    if size < 1:
        raise ValueError(
            f"cannot cut {rows} rows into micro-batches of {size}: each has at least one row"
        )
    if size < rows:
        _refuse_lists_of_rows(batch, rows)
    return (_rows_of(batch, start, start + size) for start in range(0, rows, size))


def split_evenly(batch: Any, pieces: int) -> Iterator[Any]:
    """Cut a batch into ``pieces`` micro-batches, of which the first ones have one row more if the
    rows do not come out even; with fewer rows than that, into single rows.
    """
    rows = count_rows(batch)
    pieces = max(1, min(pieces, rows))
    if pieces > 1:
        _refuse_lists_of_rows(batch, rows)
    size, longer = divmod(rows, pieces)
    start = 0
    for number in range(pieces):
        end = start + size
        if number < longer:
            end += 1
        yield _rows_of(batch, start, end)
        start = end


def count_rows(batch: Any) -> int:
    """How many rows the tensors of ``batch`` have. Raises ``ValueError`` if they differ, or if no
    tensor with rows is found.
    """
    leaves = tree_leaves(as_dict(batch))
    rows = set()
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dim():
            rows.add(len(leaf))
    if not rows:
        kinds = sorted({type(leaf).__name__ for leaf in leaves})
        raise ValueError(
            "this batch cannot be cut into micro-batches, since no tensor with rows is found "
            f"(found: {', '.join(kinds) or 'nothing'}): give a tensor, or a dict or tuple of "
            "tensors. If batch is a dataclass, give vars(batch)"
        )
    if len(rows) != 1:
        raise ValueError(
            f"cannot cut tensors of {sorted(rows)} rows into micro-batches: all tensors need the "
            f"same number of rows. Expand one that all rows share (positions.expand({max(rows)}, "
            "-1)), or cut the batch yourself, and give the pieces to accumulate_gradients"
        )
    return rows.pop()


def _refuse_lists_of_rows(batch: Any, rows: int) -> None:
    """Raise ``ValueError`` for a list or tuple of as many other values as the tensors have rows:
    each micro-batch would get all of them.
    """
    entries = as_dict(batch)
    if isinstance(entries, dict):
        entries = list(entries.values())
    if rows == 1 or not isinstance(entries, list | tuple):
        return
    for value in entries:
        if not isinstance(value, list | tuple) or len(value) != rows:
            continue
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
            raise ValueError(
                f"the batch has a {type(value).__name__} of {rows} values beside tensors of {rows} "
                "rows, and only tensors are cut: make it a tensor, leave it out, or cut the batch "
                "yourself, and give the pieces to accumulate_gradients"
            )


def _rows_of(batch: Any, start: int, end: int) -> Any:
    def rows_of_tensor(tensor: Tensor) -> Tensor:
        return tensor[start:end] if tensor.dim() else tensor

    return tree_map_only(Tensor, rows_of_tensor, as_dict(batch))


def as_dict(batch: Any) -> Any:
    """``batch``, or a dict of its entries if it is another mapping, such as a ``BatchEncoding``."""
    return dict(batch) if isinstance(batch, Mapping) else batch
