"""Which rows of a batch have something that the first rows do not have.

A loss may count what only some rows show: a mask that hides, a flag, a class with a weight, a label
that is ignored. A mean over such things looks like a mean over rows as long as rows are alike.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat.trees import tree_leaves

MOST_VALUES = 256  # of labels and flags; with more values, whole numbers are words or positions


def unlike_rows(
    micro_batches: Sequence[Any], shown: Collection[int], allowed: Collection[int], most: int
) -> list[int]:
    """At most ``most`` of the rows ``allowed``, with what the rows ``shown`` do not have.

    Rows are numbered through all micro-batches. Of each tensor, these are the rows with more or
    fewer zeros, negative numbers or missing numbers than all rows before; those with a larger or a
    smaller label; and, if a row has a single label and there are at most ``most`` different ones,
    one row of each.
    """
    if not shown or not allowed:
        return []
    seen, found = sorted(shown), []
    candidates = torch.tensor(sorted(allowed))
    for column in _columns(micro_batches):
        values = column[candidates]
        for place in (values.argmax(), values.argmin()):
            new = int(candidates[place])
            known = column[seen]
            if column[new] > known.max() or column[new] < known.min():
                seen.append(new)
                found.append(new)
    for labels in _single_labels(micro_batches, most):
        for new in candidates.tolist():
            if labels[new] not in labels[seen]:
                seen.append(new)
                found.append(new)
    return found[:most]


def _columns(micro_batches: Sequence[Any]) -> Iterator[Tensor]:
    """Numbers that tell one row from another, of each tensor of the batch: (rows,)."""
    for pieces in _tensors(micro_batches):
        rows = [piece.flatten(1) if piece.dim() > 1 else piece[:, None] for piece in pieces]
        yield torch.cat([(row == 0).sum(1) for row in rows])
        if rows[0].is_complex():
            continue
        if rows[0].is_floating_point():
            yield torch.cat([(~row.isfinite()).sum(1) for row in rows])
            continue
        yield torch.cat([(row < 0).sum(1) for row in rows])
        if all(row.shape[1] for row in rows) and _number_of_values(rows) <= MOST_VALUES:
            yield torch.cat([row.amax(1).long() for row in rows])
            yield torch.cat([row.amin(1).long() for row in rows])


def _single_labels(micro_batches: Sequence[Any], most: int) -> Iterator[Tensor]:
    """The tensors with one whole number in a row, if there are few different ones: (rows,)."""
    for pieces in _tensors(micro_batches):
        whole = not (pieces[0].is_floating_point() or pieces[0].is_complex())
        if whole and all(piece.numel() == len(piece) for piece in pieces):
            labels = [piece.flatten() for piece in pieces]
            if _number_of_values(labels) <= most:
                yield torch.cat(labels)


def _number_of_values(tensors: list[Tensor]) -> int:
    return len(torch.cat([tensor.flatten() for tensor in tensors]).unique())


def _tensors(micro_batches: Sequence[Any]) -> Iterator[list[Tensor]]:
    """Of each tensor with rows, its pieces in all micro-batches, on the CPU."""
    by_batch = []
    for micro in micro_batches:
        leaves = tree_leaves(micro)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
        by_batch.append(tensors)
    if len({len(tensors) for tensors in by_batch}) != 1:
        return  # micro-batches of different kinds: their tensors have no common meaning
    for pieces in zip(*by_batch, strict=True):
        yield [piece.detach().cpu() for piece in pieces]
