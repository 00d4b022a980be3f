"""Which rows of a batch have something that the first rows do not have.

A loss may count what only some rows show: a mask that hides, a flag, a class with a weight, a label
that is ignored. A mean over such things looks like a mean over rows as long as rows are alike.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat.trees import tree_flatten_with_path
from ..techniques.splitting import as_dict

# With more different values than this, numbers are words, positions or measurements.
MOST_VALUES = 256
MOST_CLASSES = 16  # with more different values, not each of them is asked about
SAMPLE = 4096  # numbers among which values are counted


def unlike_rows(
    micro_batches: Sequence[Any], shown: Collection[int], allowed: Collection[int], most: int
) -> list[int]:
    """At most ``most`` of the rows ``allowed``, with what the rows ``shown`` do not have.

    Rows are numbered through all micro-batches. They are found tensor by tensor:

    - one row of each value, if a row has a single number and there are at most ``MOST_CLASSES``
      different ones;
    - the row with the most and the row with the fewest zeros, negative numbers, or numbers that are
      not finite;
    - the row with the largest and the row with the smallest number, if there are at most
      ``MOST_VALUES`` different ones.
    """
    if not shown or not allowed:
        return []
    chosen, added = sorted(shown), []
    candidates = torch.tensor(sorted(allowed))
    for numbers in _single_numbers(micro_batches):
        for row in candidates.tolist():
            if numbers[row] not in numbers[chosen]:
                chosen.append(row)
                added.append(row)
    for column in _columns(micro_batches):
        of_candidates = column[candidates]
        for place in (of_candidates.argmax(), of_candidates.argmin()):
            row = int(candidates[place])
            of_chosen = column[chosen]
            if column[row] > of_chosen.max() or column[row] < of_chosen.min():
                chosen.append(row)
                added.append(row)
    return added[:most]


def cut_to_least_sizes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of the tensors, each dimension but the rows cut to its least size among them."""
    shapes = [tensor.shape[1:] for tensor in tensors]
    least = [min(sizes) for sizes in zip(*shapes, strict=True)]
    common = tuple(slice(size) for size in least)
    return [tensor[:, *common] for tensor in tensors]


def _single_numbers(micro_batches: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors with one number in a row, if there are few different ones: (rows,)."""
    for pieces in _tensors(micro_batches):
        if all(piece.numel() == len(piece) for piece in pieces):
            numbers = torch.cat([piece.flatten().cpu() for piece in pieces])
            if len(numbers.unique()) <= MOST_CLASSES:
                yield numbers


def _columns(micro_batches: Sequence[Any]) -> Iterator[Tensor]:
    """Numbers that tell one row from another, of each tensor of the batch: (rows,)."""
    for pieces in _tensors(micro_batches):
        matrices = [piece.reshape(len(piece), -1) for piece in pieces]
        yield torch.cat([(matrix == 0).sum(1).cpu() for matrix in matrices])
        yield torch.cat([(matrix < 0).sum(1).cpu() for matrix in matrices])
        if matrices[0].is_floating_point():
            yield torch.cat([(~matrix.isfinite()).sum(1).cpu() for matrix in matrices])
            matrices = [matrix.nan_to_num() for matrix in matrices]
        if matrices[0].shape[1] and _has_few_values(matrices):
            yield torch.cat([matrix.amax(1).double().cpu() for matrix in matrices])
            yield torch.cat([matrix.amin(1).double().cpu() for matrix in matrices])


def _has_few_values(tensors: list[Tensor]) -> bool:
    """Whether a sample has at most ``MOST_VALUES`` different values: to count those of all pixels
    would take long.
    """
    share = SAMPLE // len(tensors) + 1
    sample = torch.cat([tensor.flatten()[:share].cpu() for tensor in tensors])
    return len(sample.unique()) <= MOST_VALUES


def _tensors(micro_batches: Sequence[Any]) -> Iterator[list[Tensor]]:
    """Of each tensor with rows, its pieces in all micro-batches, cut to one width.

    Left out are tensors that not every micro-batch has, and those of complex numbers or without
    dense memory.
    """
    by_path: dict[Any, list[Tensor]] = {}
    for micro in micro_batches:
        leaves, _ = tree_flatten_with_path(as_dict(micro))
        for path, leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.layout == torch.strided:
                by_path.setdefault(path, []).append(leaf.detach())
    for pieces in by_path.values():
        kinds = {(piece.dim(), piece.dtype) for piece in pieces}
        in_all = len(pieces) == len(micro_batches) and len(kinds) == 1
        if in_all and not pieces[0].is_complex():
            yield cut_to_least_sizes(pieces)
