"""Rows of unlike lengths, a language model's own loss of them, the gradient of a model, and how far
it is from another one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def ragged(lengths, vocab: int, seed: int = 0) -> dict[str, Tensor]:
    """Random tokens in rows of these lengths, padded to the longest: padding is masked and not
    predicted.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (len(lengths), max(lengths)), generator=generator)
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "attention_mask": real.long(), "labels": ids.masked_fill(~real, -100)}


def own_loss(model: nn.Module, batch: dict[str, Tensor], shifted: bool = True) -> Tensor:
    """By another way than the library's, in float64: the mean that cross_entropy takes itself of a
    model's logits, ``shifted`` if it is causal.
    """
    logits, labels = model(**batch).logits.double(), batch["labels"]
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def gradient(model: nn.Module) -> Tensor:
    """All gradients that are there, in one vector of float64."""
    found = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(found)


def taken_gradient(model: nn.Module) -> Tensor:
    """The same, taken off the model."""
    found = gradient(model)
    model.zero_grad()
    return found


def error(found: Tensor, expected: Tensor) -> float:
    """The difference, relative to what is expected."""
    return ((found - expected).norm() / expected.norm()).item()
