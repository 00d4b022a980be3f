"""Real text without a download: the Python language reference, which every Python carries for its own ``help()``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def language_reference() -> str:
    """The Python language reference as shipped with the running Python, its topics in alphabetical order.

    Another Python version carries another edition: exact byte counts of a batch do not depend on it, losses do.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def batch(
    tokenizer: PreTrainedTokenizerBase, *, batch_size: int, seq_len: int, seed: int = 0
) -> torch.LongTensor:
    """Token ids of real text, of shape (batch_size, seq_len): every row another stretch of the language reference.

    The same ``seed`` gives the same rows, and no padding is needed. Raises ``ValueError`` when the sizes are not positive
    or when the text is too short for them.
    """
    if batch_size < 1 or seq_len < 1:
        raise ValueError(f"batch_size={batch_size} and seq_len={seq_len}: both must be at least 1")
    text = language_reference()
    # verbose=False: the text is longer than the model's context, on purpose, since it is cut into rows just below.
    ids = torch.tensor(
        tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long
    )
    rows = len(ids) // seq_len
    if batch_size > rows:
        raise ValueError(
            f"asked for {batch_size} rows of {seq_len} tokens, but the text has {len(ids)} tokens, enough for {rows} such "
            "rows: lower batch_size or seq_len"
        )
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[:batch_size]
    return ids[: rows * seq_len].view(rows, seq_len)[order]
