"""Which rows a model is asked about, before it is trained in pieces.

A probe compares a few rows together with each of them alone. The rows have to be unlike each other:
of equally long rows of one class, most wrong losses have the right mean.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..names import IGNORED
from ..techniques.splitting import count_rows, split
from .item_rules import has_labels, rows, whole_labels, with_labels
from .unlike_rows import MOST_CLASSES, cut_to_least_sizes, unlike_rows

# Of one forward. Two rows may hide a comparison with their mean: what one is above it, the other is
# below, and the differences cancel.
FEWEST_ROWS, MOST_ROWS = 3, 4
MOST_UNLIKE = 16  # rows that have something which the first ones do not show


def groups_of_rows(micro_batches: Sequence[Any]) -> list[Any]:
    """Batches of a few rows, unlike each other, whose losses show what is counted. An empty list if
    the micro-batches cannot be cut into rows.

    A group has as many rows as the largest micro-batch, but at least ``FEWEST_ROWS`` if there are
    so many, and at most ``MOST_ROWS``. Where a micro-batch is a single row, a forward of three rows
    takes less memory than training one, unless rows are long. With SmolLM2-135M in float32, it
    takes 145 MiB beside the weights at 128 tokens and 579 MiB at 512, and training takes 729 and
    945 MiB.

    The first group has rows with labels. Others follow where the data have something that it does
    not show: more classes, and rows with other masks or flags (``unlike_rows``), each compared with
    the first row; and a row without labels, which a second part of a loss may count. Rows of
    several micro-batches are cut to their common width.
    """
    if any(rows(nn.Module(), micro) is None for micro in micro_batches):
        return []
    largest = max(count_rows(micro) for micro in micro_batches)
    size = min(max(FEWEST_ROWS, largest), MOST_ROWS)
    single_rows: list[Any] = []  # views
    for micro in micro_batches:
        single_rows += split(micro, 1)
    labelled, without_labels = [], []
    for number, row in enumerate(single_rows):
        if has_labels(row):
            labelled.append(number)
        else:
            without_labels.append(row)
    first_numbers = _first_labelled_rows(single_rows, labelled, size)
    other_numbers = unlike_rows(micro_batches, first_numbers, labelled, MOST_UNLIKE)
    numbers = [*first_numbers, *other_numbers][: MOST_CLASSES + MOST_UNLIKE]
    if not numbers:  # no row has labels
        numbers = [0]
    first, *others = [single_rows[number] for number in numbers]
    if not others:
        others = [_another_class(first)]
    groups = []
    for start in range(0, len(others), size - 1):
        groups.append(rows_together([first, *others[start : start + size - 1]]))
    if without_labels and has_labels(first):
        groups.append(rows_together([first, *others[: size - 2], without_labels[0]]))
    return groups


def some_rows(micro_batches: Sequence[Any]) -> Any:
    """The first group, or ``None``."""
    groups = groups_of_rows(micro_batches)
    return groups[0] if groups else None


def _first_labelled_rows(single_rows: list[Any], labelled: list[int], size: int) -> list[int]:
    """The numbers of the first rows with labels: one of each class if a row has a single label, and
    otherwise ``size`` of them.
    """
    found = []
    classes: set[Any] = set()
    for number in labelled:
        labels = whole_labels(single_rows[number])
        if labels is not None and labels.numel() == 1:
            if labels.item() not in classes and len(classes) < MOST_CLASSES:
                classes.add(labels.item())
                found.append(number)
        elif len(found) < size:
            found.append(number)
    return found


def _another_class(row: Any) -> Any:
    """``row`` with another label, if it has one label: classes may be weighed."""
    labels = whole_labels(row)  # shape (1,), if a row is one example of a class
    if labels is None or labels.dim() != 1 or labels.item() == IGNORED:
        return row
    if labels.item() == 0:
        other = labels + 1
    else:
        other = torch.zeros_like(labels)
    return with_labels(row, other)


def rows_together(parts: list[Any]) -> Any:
    """Rows of unequal widths, cut to the least width and put together.

    Of what has no rows (a number, a flag), the first part's is taken.
    """
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: rows_together([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple | list):
        joined = [rows_together([part[i] for part in parts]) for i in range(len(first))]
        if type(first) in (tuple, list):
            return type(first)(joined)
        return type(first)(*joined)  # a namedtuple
    if not isinstance(first, Tensor) or not first.dim():
        return first
    return torch.cat(cut_to_least_sizes(parts))


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
    """Each group, and after it the same with fewer labels."""
    found = []
    for group in groups:
        found += [group, *fewer_labels(model, group, ignored_labels)]
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
