"""Which rows a model is asked about, before it is trained in pieces.

A probe compares a few rows together with each of them alone. Of equally long rows of one class,
most wrong losses have the right mean, and one row of many may show the difference: its mask, its
flag, its class. So all rows of the first window are asked about, in groups of a few.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.trees import tree_map
from ..names import IGNORED
from ..techniques.splitting import count_rows, split
from .item_rules import has_labels, rows, whole_labels, with_labels

# Of one forward. Two rows may hide a comparison with their mean: what one is above it, the other is
# below, and the differences cancel.
FEWEST_ROWS, MOST_ROWS = 3, 4


def groups_of_rows(micro_batches: Sequence[Any]) -> list[Any]:
    """Batches of a few rows, all rows in one of them, whose losses show what is counted. An empty
    list if the micro-batches cannot be cut into rows.

    A group has as many rows as the largest micro-batch, but at least ``FEWEST_ROWS`` if there are
    so many, and at most ``MOST_ROWS``; its first row is the same in all. Where a micro-batch is a
    single row, a forward of three rows takes less memory than training one, unless rows are long.
    With SmolLM2-135M in float32, it takes 145 MiB beside the weights at 128 tokens and 579 MiB at
    512, and training takes 729 and 945 MiB.

    The rows have labels. The last group has one without, which a second part of a loss may count.
    Rows of several micro-batches are cut to their common width.
    """
    if any(rows(nn.Module(), micro) is None for micro in micro_batches):
        return []
    largest = max(count_rows(micro) for micro in micro_batches)
    size = min(max(FEWEST_ROWS, largest), MOST_ROWS)
    labelled, without_labels = [], []
    for micro in micro_batches:
        for row in split(micro, 1):  # views
            if has_labels(row):
                labelled.append(row)
            else:
                without_labels.append(row)
    first, *others = labelled or without_labels[:1]
    another = _another_class(first)
    if another is not None:
        same = [torch.equal(whole_labels(row), whole_labels(first)) for row in others]
        if all(same):
            others.append(another)
    groups = []
    for start in range(0, max(len(others), 1), size - 1):
        groups.append(rows_together([first, *others[start : start + size - 1]]))
    if without_labels and has_labels(first):
        groups.append(rows_together([first, *others[: size - 2], without_labels[0]]))
    return groups


def some_rows(micro_batches: Sequence[Any]) -> Any:
    """The first group, or ``None``."""
    groups = groups_of_rows(micro_batches)
    return groups[0] if groups else None


def _another_class(row: Any) -> Any:
    """``row`` with another label, if it has one label: classes may be weighed. ``None`` if not."""
    labels = whole_labels(row)  # shape (1,), if a row is one example of a class
    if labels is None or labels.dim() != 1 or labels.item() == IGNORED:
        return None
    return with_labels(row, (labels == 0).to(labels.dtype))


def rows_together(parts: list[Any]) -> Any:
    """Rows of unequal widths, cut to the least width and put together.

    Of what has no rows (a number, a flag), the first part's is taken.
    """

    def joined(first: Any, *others: Any) -> Any:
        if not isinstance(first, Tensor) or not first.dim():
            return first
        tensors = [first, *others]
        shapes = [tensor.shape[1:] for tensor in tensors]
        least = [slice(min(sizes)) for sizes in zip(*shapes, strict=True)]
        return torch.cat([tensor[:, *least] for tensor in tensors])

    return tree_map(joined, *parts)


def twice(row: Any) -> Any:
    """A batch of the same row two times: any mean has the same value as of the row alone."""
    return rows_together([row, row])


def have_ignored_labels(model: nn.Module, micro_batches: Sequence[Any]) -> bool:
    """Whether the model may be given the label -100: the data have it, or the model has a config
    of transformers, whose models ignore it.

    A loss of somebody's own may use labels as positions in memory, and -100 is none.
    """
    if getattr(model, "config", None) is not None:
        return True
    for micro in micro_batches:
        labels = whole_labels(micro)
        if labels is not None and bool((labels == IGNORED).any()):
            return True
    return False


def with_fewer_labels(model: nn.Module, groups: list[Any], ignored_labels: bool) -> list[Any]:
    """The groups, and after them the first one with fewer labels."""
    found = list(groups)
    if groups:
        found += fewer_labels(model, groups[0], ignored_labels)
    return found


def fewer_labels(model: nn.Module, batch: Any, ignored_labels: bool) -> Iterator[Any]:
    """``batch`` with fewer labels in its first row, so that counting rows and counting labels give
    different means.

    Once -100 takes the place of labels, if the model takes ``ignored_labels``; and once the padding
    token, if it is a label that the model takes: on a card, another one ends the process.
    """
    labels = whole_labels(batch)  # rows x tokens
    if labels is None or labels.dim() != 2 or labels.shape[1] < 4:
        return
    config = getattr(model, "config", None)
    padding = getattr(config, "pad_token_id", None) or 0
    replacements = [IGNORED] if ignored_labels else []
    if 0 <= padding <= _largest_label(model, labels):
        replacements.append(padding)
    positions = labels[0].ne(IGNORED).nonzero().flatten().tolist()
    last = max(positions, default=0)
    for replacement in replacements:
        fewer = labels.clone()
        # About a third of the first row's labels stay. A model that shifts labels has no
        # prediction for the first label, so there must be two.
        fewer[0, max(2, last // 3) :] = replacement
        yield with_labels(batch, fewer)


def _largest_label(model: nn.Module, labels: Tensor) -> int:
    """The last word of a language model's output layer, or else the largest label of the batch."""
    head = None
    if hasattr(model, "get_output_embeddings"):
        head = model.get_output_embeddings()
    if head is not None:
        return len(head.weight) - 1
    return int(labels.max())
