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


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of a causal model, by another way than the library's: the mean that cross_entropy takes
    itself.
    """
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


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
