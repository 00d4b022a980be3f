"""Real text without a download: the Python language reference, which every Python has for its own
``help()``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def language_reference() -> str:
    """The Python language reference as shipped with the running Python, its topics in alphabetical
    order.

    Another Python version has another edition of it. Byte counts of a batch do not depend on the
    edition, but losses do.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def batch(
    tokenizer: PreTrainedTokenizerBase, *, batch_size: int, seq_len: int, seed: int = 0
) -> torch.LongTensor:
    """Token ids of real text, of shape (batch_size, seq_len): every row is another part of the
    language reference.

    The same ``seed`` gives the same rows, and no padding is needed. Raises ``ValueError`` when the
    sizes are not positive or when the text is too short for them.
    """
    return _rows(tokenizer, language_reference(), seq_len, batch_size, "batch_size", seed)


def _rows(
    tokenizer, text: str, seq_len: int, wanted: int | None, what: str, seed: int
) -> torch.LongTensor:
    """``wanted`` rows of ``seq_len`` tokens (``None``: all) from all parts of ``text``, in an order
    that ``seed`` decides.
    """
    if seq_len < 1 or (wanted is not None and wanted < 1):
        raise ValueError(f"{what}={wanted} and seq_len={seq_len}: both must be at least 1")
    # verbose=False: the text is longer than the model's context, on purpose, since it is cut into
    # rows just below.
    ids = torch.tensor(
        tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long
    )
    there = len(ids) // seq_len
    wanted = there if wanted is None else wanted
    if wanted > there or not there:
        raise ValueError(
            f"asked for {wanted} rows of {seq_len} tokens, but the text has {len(ids)} tokens, "
            f"enough for {there} such rows: lower {what} or seq_len"
        )
    order = torch.randperm(there, generator=torch.Generator().manual_seed(seed))[:wanted]
    return ids[: there * seq_len].view(there, seq_len)[order]


class Rows(Dataset):
    """Rows of token ids for ``Trainer``: each a dict with ``input_ids`` and ``labels`` of shape
    (seq_len,), the same tensor.
    """

    def __init__(self, ids: torch.LongTensor):
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.LongTensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def datasets(
    tokenizer: PreTrainedTokenizerBase,
    *,
    seq_len: int,
    rows: int | None = None,
    held_out: int | None = None,
    seed: int = 0,
) -> tuple[Rows, Rows]:
    """(training rows, held-out rows) of the language reference, each row ``seq_len`` tokens without
    padding.

    Every tenth topic is held out, so that no training row is near a held-out row. ``rows`` and
    ``held_out`` say how many of each; ``None`` is all. The same ``seed`` gives the same rows in the
    same order. Raises ``ValueError`` when the sizes are not positive, or when the text is too short
    for them.
    """
    from pydoc_data.topics import topics

    names = sorted(topics)
    held = names[::10]
    parts = [[name for name in names if name not in held], held]
    found = []
    for what, wanted, part in zip(("rows", "held_out"), (rows, held_out), parts, strict=True):
        text = "\n\n".join(topics[name] for name in part)
        found.append(Rows(_rows(tokenizer, text, seq_len, wanted, what, seed)))
    return found[0], found[1]
