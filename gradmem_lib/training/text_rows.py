"""Rows of token ids of unequal lengths as one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import default_data_collator

IGNORED = -100  # the label of a token that is not predicted
# What the padding of each has.
PADDING = {"input_ids": 0, "labels": IGNORED, "attention_mask": 0}


def collate_text(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """``rows`` as tensors (rows, tokens of the longest), for a model that predicts the next token.

    Rows without labels are their own labels. If lengths differ, the shorter rows are padded at
    their ends, where a mask hides the padding, and none of it is predicted. A batch with a mask
    needs a little more memory than one without. Rows of one length with labels, and rows with
    anything else in them, are collated as ``Trainer`` does.
    """
    lengths = {len(row["input_ids"]) for row in rows if "input_ids" in row}
    is_text = all(set(row) <= set(PADDING) and "input_ids" in row for row in rows)
    has_labels = all("labels" in row for row in rows)
    if not is_text or (has_labels and len(lengths) == 1):
        return default_data_collator(rows)
    padded = {}
    for name, padding in PADDING.items():
        columns = [torch.as_tensor(_column(name, row)) for row in rows]
        padded[name] = pad_sequence(columns, batch_first=True, padding_value=padding)
    if len(lengths) == 1 and not any("attention_mask" in row for row in rows):
        del padded["attention_mask"]  # nothing is hidden
    return padded


def _column(name: str, row: Mapping[str, Any]) -> Any:
    if name in row:
        return row[name]
    return row["input_ids"] if name == "labels" else torch.ones(len(row["input_ids"]), dtype=int)
