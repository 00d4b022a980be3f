"""The one training step: a batch cut into micro-batches, their gradients added up, one update."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..techniques.accumulation import accumulate_gradients, count_rows, split
from ..techniques.data_parallel import check_trained_together, device_of, processes_of
from ..techniques.offload import ACTIVATION_OFFLOADS, offload_activations
from ..techniques.precision import GradScaler
from .items import find_rule
from .losses import check_pieces, chunked_loss, count_items, usual_rule
from .recipe import Recipe


class _FixedScale(GradScaler):
    """Keeps small float16 gradients above 0 with a fixed factor, where ``GradScaler`` adapts it.

    It skips no step.
    """

    def step(self, optimizer: Optimizer) -> None:
        for grad in [
            p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None
        ]:
            grad.div_(self.factor)
        optimizer.step()


def step(
    model: nn.Module,
    optimizer: Optimizer | list[Optimizer],
    batch: Any,
    recipe: Recipe,
    *,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    mark: Callable[[str], None] = lambda part: None,
    micro_batches: int | None = None,
    scaler: GradScaler | torch.amp.GradScaler | None = None,
    offload: offload_activations | None = None,
) -> Tensor:
    """One optimizer step on ``batch``, its rows cut into ``recipe.accumulation`` micro-batches.
    Returns the mean loss, detached.

    The gradients are those of ``accumulate_gradients`` (lesson 03), also over several processes.

    Args:
        batch: the model's arguments: a dict by name, a tuple, or one tensor, each (rows, ...).
        loss: ``loss(model, micro_batch)`` returns the scalar to minimise: a mean over the
            micro-batch's labels that are not
            -100, or over its rows if it has no labels. Without ``loss``, the model's output has the
            scalar (``output.loss``, or the output itself).
        mark: called with ``"forward"``, ``"backward"`` and ``"step"`` before each of them begins.
        micro_batches: stop after this many micro-batches. Predictions use it, since the others are
            alike.
        scaler: adapts the factor of float16's loss from step to step, and skips a step whose
            gradients are not finite. Without a scaler the factor is fixed, and no step is skipped.
        offload: an ``offload_activations``, which counts the bytes that it moves. Without it, one
            is made.

    Raises ``ValueError`` if the batch is to be cut and the loss, which is asked before its first
    step (``find_rule``), is not a mean over labels or rows, as with CLIP.
    """
    how = f"accumulation={recipe.accumulation}, sharding={recipe.sharding!r}"
    in_pieces = recipe.accumulation > 1 or recipe.sharding is not None
    _check_parts(model, optimizer, batch, recipe, how if loss is None and in_pieces else None)
    device = device_of(model).type
    offload_hooks = offload or offload_context(model, recipe)
    parts = list(cut_batch(batch, recipe))

    def mean_loss(asked: nn.Module, micro: Any) -> Tensor:
        with autocast(device, recipe):
            value = loss_of(asked, micro, recipe) if loss is None else loss(asked, micro)
        check_loss(value, asked)
        return value

    rule = None
    if in_pieces:
        # A function that is written in a loop is another one each time, with the same code.
        key = (getattr(loss, "__code__", loss), recipe.chunked_loss)
        usual = usual_rule(model)
        processes = processes_of(model)
        rule = find_rule(model, parts, mean_loss, usual, how=how, key=key, processes=processes)
    counts = [count_items(model, micro, rule) for micro in parts][:micro_batches]

    def loss_and_count(numbered: tuple[Any, int]) -> tuple[Tensor, int]:
        micro, count = numbered
        mark("forward")
        with offload_hooks:
            value = mean_loss(model, micro)
        mark("backward")
        return value, count

    if scaler is None and recipe.scales_loss:
        scaler = _FixedScale(2.0**12)
    with closing(offload_hooks):
        result = accumulate_gradients(
            zip(parts[:micro_batches], counts, strict=True),
            loss_and_count,
            total_items=sum(counts),
            reduction="mean",
            model=model,
            scaler=scaler,
        )
    mark("step")
    if not isinstance(optimizer, list):  # with a list, every parameter was stepped in backward
        _update(optimizer, scaler)
        optimizer.zero_grad(set_to_none=True)
    return torch.tensor(result.loss)


def _check_parts(model: nn.Module, optimizer: Any, batch: Any, recipe: Recipe, how: Any) -> None:
    """Refuse a batch that cannot be cut, and an optimizer of another process group.

    ``how`` the batch is cut; ``None``: it is not, or the loss is not the model's own.
    """
    if how is not None:
        check_pieces(model, batch, how)
    if recipe.sharding is not None:
        check_trained_together(model, optimizer)


def _update(optimizer: Optimizer, scaler: Any) -> None:
    if scaler is None:
        optimizer.step()
        return
    scaler.step(optimizer)
    scaler.update()


def autocast(device: str, recipe: Recipe) -> AbstractContextManager:
    return (
        torch.autocast(device, dtype=recipe.autocast_dtype)
        if recipe.autocast_dtype
        else nullcontext()
    )


def offload_context(model: nn.Module, recipe: Recipe) -> offload_activations | ExitStack:
    """The context for a forward whose activations are offloaded as ``recipe.offload`` says."""
    if recipe.offload in ACTIVATION_OFFLOADS:
        return offload_activations(model=model, what=recipe.offload)
    return ExitStack()


def cut_batch(batch: Any, recipe: Recipe) -> Iterator[Any]:
    """The micro-batches of ``batch``: views with equally many rows, or the uncut batch itself."""
    return (
        iter([batch])
        if recipe.accumulation == 1
        else split(batch, recipe.micro_batch(count_rows(batch)))
    )


def loss_of(model: nn.Module, batch: Any, recipe: Recipe) -> Tensor:
    """The loss that the model returns for ``batch``, or whatever it returns instead."""
    if recipe.chunked_loss:
        return chunked_loss(model, batch)
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    if isinstance(output, dict):
        output = output.get("loss")
    return getattr(output, "loss", output)


def check_loss(value: Any, model: nn.Module) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = f"{type(value).__name__}"
        if isinstance(value, Tensor):
            what = f"a tensor of shape {(*value.shape,)}"
        raise ValueError(
            f"{type(model).__name__} returned {what} where a scalar loss was expected: put labels "
            "into the batch, or give loss=lambda model, batch: ... that returns the scalar"
        )
