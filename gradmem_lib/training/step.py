"""The one training step: a batch cut into micro-batches, their gradients added up, one update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..techniques.losses import chunked_loss, label_counts
from .recipe import Recipe

LOSS_SCALE = 2.0**12


def step(
    model: nn.Module,
    optimizer: Optimizer | list[Optimizer],
    batch: dict[str, Tensor] | Tensor | tuple,
    recipe: Recipe,
    *,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    mark: Callable[[str], None] = lambda part: None,
    micro_batches: int | None = None,
) -> Tensor:
    """One optimizer step on ``batch``, its rows cut into ``recipe.accumulation`` micro-batches. Returns the mean loss, detached.

    ``batch`` is given to the model as its arguments: a dict by name. ``loss(model, micro_batch)`` returns the scalar to
    minimise; without it the model's own output must hold it (``output.loss``, or the output itself). Micro-batches count
    by their number of labels that are not -100. ``mark`` is called with ``"forward"``, ``"backward"`` and ``"step"``
    before each begins. ``micro_batches`` ends after so many of them: for a prediction, which knows that the rest are alike.
    """
    device = next(model.parameters()).device.type
    scaled = recipe.precision == "autocast-fp16"
    losses = None
    for micro, weight in islice(cut_batch(model, batch, recipe), micro_batches):
        mark("forward")
        with autocast(device, recipe):
            value = loss(model, micro) if loss is not None else loss_of(model, micro, recipe)
        _check_loss(value, model)
        if weight is not None:
            value = value * weight
        detached = value.detach()
        losses = detached if losses is None else losses + detached
        mark("backward")
        (value * LOSS_SCALE if scaled else value).backward()
        del value, detached
    mark("step")
    if isinstance(optimizer, list):
        return losses  # every parameter has been stepped in backward
    if scaled:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(LOSS_SCALE)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return losses


def autocast(device: str, recipe: Recipe) -> AbstractContextManager:
    return torch.autocast(device, dtype=recipe.autocast_dtype) if recipe.autocast_dtype else nullcontext()


def cut_batch(model: nn.Module, batch, recipe: Recipe) -> Iterator[tuple[Any, Tensor | None]]:
    """Views of equal numbers of rows, each with its share of the labels (``None`` for a batch in one piece)."""
    if recipe.accumulation == 1:
        yield batch, None
        return
    tensors = (
        list(batch.values()) if isinstance(batch, dict) else [batch] if isinstance(batch, Tensor) else batch
    )
    rows = recipe.micro_batch(len(tensors[0]))
    counts = label_counts(model, batch)
    total = None if counts is None else counts.sum()
    for start in range(0, len(tensors[0]), rows):
        part = slice(start, start + rows)
        if isinstance(batch, dict):
            micro = {name: tensor[part] for name, tensor in batch.items()}
        else:
            micro = batch[part] if isinstance(batch, Tensor) else tuple(t[part] for t in batch)
        yield micro, 1 / recipe.accumulation if counts is None else counts[part].sum() / total


def loss_of(model: nn.Module, batch, recipe: Recipe) -> Tensor:
    if recipe.chunked_loss:
        return chunked_loss(model, batch)
    if isinstance(batch, dict):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    if isinstance(output, dict):
        output = output.get("loss")
    return getattr(output, "loss", output)


def _check_loss(value, model: nn.Module) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = (
            f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        )
        raise ValueError(
            f"{type(model).__name__} returned {what} where a scalar loss was expected: put labels into the batch, or give "
            "loss=lambda model, batch: ... that returns the scalar"
        )
