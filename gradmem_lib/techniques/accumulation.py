"""Gradient accumulation whose result is the full batch's gradient, however the batch is cut.

A mean over a batch is a sum over its *items* (predicted tokens, or examples) divided by their
number. A sum can be computed piece by piece. The means of pieces can only be averaged if all pieces
have the same number of items. So every micro-batch contributes its summed loss, and all of these
are divided by one number: the items of the whole window.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..compat import tree_leaves, tree_map_only
from .data_parallel import NO_ITEMS_ERROR, Processes, processes_of


class Accumulated(NamedTuple):
    """The result of a window of micro-batches: its loss (the mean over all items) and the number of
    its items.
    """

    loss: float
    items: int


def accumulate_gradients(
    micro_batches: Iterable[Any],
    loss_and_count: Callable[[Any], tuple[Tensor, int]],
    *,
    total_items: int | None = None,
    count_items: Callable[[Any], int] | None = None,
    reduction: str = "sum",
    model: nn.Module | None = None,
    scaler: Any = None,
) -> Accumulated:
    """Put the gradient of the mean loss over all items of all ``micro_batches`` into ``.grad``,
    with one backward for each.

    Neither zeroes gradients nor steps: clip and step afterwards, then call
    ``optimizer.zero_grad()``. The result is the full batch's gradient if each item's loss depends
    on its own row alone. It is not if rows are compared (contrastive losses) or share statistics: a
    ``BatchNorm`` in ``model`` gives a warning at the second micro-batch.

    Args:
        micro_batches: any iterable, also a generator. Each is released before the next forward.
            Sizes may differ.
        loss_and_count: ``loss_and_count(micro) -> (summed loss, items)``: a scalar tensor in
            float32 or float64, and a whole number, 0 for a micro-batch without labels. Use autocast
            inside this function.
        total_items: the items of all micro-batches together, if they are known before the first
            backward.
        count_items: ``count_items(micro) -> items`` counts a list of micro-batches before the first
            backward. Without both, losses are divided by the first count, and gradients are scaled
            in place at the end: then gradients from before that are not zero raise ``ValueError``.
            With a total, gradients are added to them, as ``backward()`` does.
        reduction: ``"sum"``, or ``"mean"`` if the loss is the micro-batch's mean, as a model
            returns it.
        model: the model that is trained. A ``DistributedDataParallel`` or a sharded module
            (``fully_shard``, FSDP) must be given: items (also ``total_items``) are added up over
            all processes. Gradients are sent with the last micro-batch (DDP) or with each one
            (FSDP, where all processes need equally many).
        scaler: scales each loss. Unscale before clipping, as always.

    Raises ``TypeError`` or ``ValueError`` for returned values that cannot be right, for a total
    that differs from the count, and for a window without any item. After an error the gradients are
    incomplete: zero them.
    """
    if reduction not in ("sum", "mean"):
        raise ValueError(
            f"reduction={reduction!r}: loss_and_count returns a 'sum' or a 'mean' of its items"
        )
    processes = processes_of(model)
    if count_items is not None:
        if total_items is not None:
            raise ValueError("total_items= and count_items= both say the total: give one of them")
        if not isinstance(micro_batches, Sequence):
            raise TypeError(
                f"count_items= reads the micro-batches twice, and a {type(micro_batches).__name__} "
                "can be read once: give a list of them, or leave count_items out (the gradients "
                "are then corrected at the end)"
            )
        total_items = sum(
            _check_count(count_items(micro), "count_items(micro)") for micro in micro_batches
        )
    if total_items is not None:
        total_items = int(processes.sums(_check_count(total_items, "total_items"))[0])
    window = _Window(processes, total_items, reduction == "mean", model, scaler)
    for number, (micro, sync_gradients) in enumerate(processes.micro_batches(micro_batches)):
        if number == 1 or (number == 0 and processes.divisor > 1):
            _warn_of_shared_statistics(model, between_ranks=number == 0)
        with processes.forward_and_backward(sync_gradients):
            window.add(loss_and_count(micro), sync_gradients)
        del micro
    processes.check_gradients()
    return window.end()


class _Window:
    """The counts so far, and the divisor of each loss.

    The divisor is the total number of items, or the first count if the total is unknown.
    """

    def __init__(self, processes: Processes, total: int | None, mean: bool, model, scaler):
        if total == 0:
            raise ValueError(NO_ITEMS_ERROR)
        self.processes, self.total, self.mean, self.scaler = processes, total, mean, scaler
        self.divisor, self.items, self.loss_sum = total, 0, None
        self.trained = WeakTensorKeyDictionary()  # the parameters whose gradients end() corrects
        self.find_parameters = total is None and model is None  # in the graph of each loss
        if total is None and model is not None:
            self._track_parameters(model.parameters())

    def add(self, returned: Any, sync_gradients: bool) -> None:
        loss, count = _check_returned(returned, self.mean)
        self.items += count
        # a provisional one keeps sums over many items within the range of float16
        if self.divisor is None:
            self.divisor = max(1, int(self.processes.sums(count)[0]))
        if not count:
            if sync_gradients:
                _backward_without_items(loss)
            return
        factor = (count if self.mean else 1) * self.processes.divisor / self.divisor
        # an uncut batch needs no second loss tensor
        scaled = loss if factor == 1 else loss * factor
        with patch.object(
            torch.autograd, "backward", partial(self._backward, torch.autograd.backward)
        ):
            (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
        del scaled
        # float64 where the device has it: a window has many micro-batches, and their sums differ in
        # size
        dtype = loss.dtype if loss.device.type == "mps" else torch.float64
        if self.loss_sum is None:
            self.loss_sum = torch.zeros((), dtype=dtype, device=loss.device)
        value = loss.detach().to(dtype)
        # In place, so that every micro-batch leaves equally many bytes behind.
        self.loss_sum += value * count if self.mean else value

    def end(self) -> Accumulated:
        local_sum = 0.0 if self.loss_sum is None else self.loss_sum.item()
        items, loss = self.processes.sums(self.items, local_sum)
        items = int(items)
        if items == 0:
            raise ValueError(NO_ITEMS_ERROR)
        if self.total not in (None, items):
            raise ValueError(
                f"the total said before was {self.total:,} items, and loss_and_count counted "
                f"{items:,}: gradients were divided by the wrong number. Count the same things in "
                "both: labels that are not -100, after the shift"
            )
        for parameter in self.trained if items != self.divisor else ():
            if parameter.grad is not None:
                parameter.grad.mul_(self.divisor / items)
        return Accumulated(loss / items, items)

    def _backward(self, backward: Callable, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Run ``backward``, after finding the parameters that get a gradient from it.

        A reentrant checkpoint calls backward again inside.
        """
        if self.find_parameters:
            roots = [tensors] if isinstance(tensors, Tensor) else tensors
            for root in roots:
                self._track_parameters(p for p in _leaves(root) if p not in self.trained)
        backward(tensors, *args, **kwargs)

    def _track_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Remember the parameters whose gradients are corrected at the end.

        They must not have gradients from before.
        """
        new = dict.fromkeys(parameters)
        old = [p.grad for p in new if p.grad is not None]
        # Of a sharded gradient, only this process's part.
        existing = sum(bool((g.to_local() if hasattr(g, "to_local") else g).any()) for g in old)
        # Summed over all processes: if one has gradients and raises, the others must not wait for
        # it.
        if found := int(self.processes.sums(existing)[0]):
            raise ValueError(
                f"{found} parameters have gradients from before, and the correction at the end "
                "would scale them too: call optimizer.zero_grad() first or, to add to them, give "
                "total_items= or count_items="
            )
        self.trained |= new


def _warn_of_shared_statistics(model: nn.Module | None, between_ranks: bool) -> None:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) + (
        () if between_ranks else (nn.SyncBatchNorm,)
    )
    for name, module in [] if model is None else model.named_modules():
        if isinstance(module, kinds) and module.training:
            warnings.warn(
                f"{name} is a {type(module).__name__}, which normalizes each "
                f"micro-batch{' of each rank' * between_ranks} by its own rows: the gradient is "
                "not the full batch's. Freeze its statistics (its eval()), or use GroupNorm or "
                "LayerNorm",
                stacklevel=3,
            )
            return


def split(batch: Any, size: int) -> Iterator[Any]:
    """Cut a batch into micro-batches of ``size`` rows; the last one has the rest. They are views
    and take no new bytes.

    ``batch`` is a tensor, or a dict or tuple of tensors. A value without rows (a number, a flag)
    goes into every micro-batch. Raises ``ValueError`` when ``size`` is not positive or the tensors
    have unequal numbers of rows.
    """
    rows = count_rows(batch)
    if size < 1:
        raise ValueError(
            f"cannot cut {rows} rows into micro-batches of {size}: each has at least one row"
        )

    def cut(start: int) -> Any:
        return tree_map_only(
            Tensor, lambda t: t[start : start + size] if t.dim() else t, _plain(batch)
        )

    return map(cut, range(0, rows, size))


def count_rows(batch: Any) -> int:
    """How many rows the tensors of ``batch`` have. Raises ``ValueError`` if they differ."""
    rows = {
        len(leaf) for leaf in tree_leaves(_plain(batch)) if isinstance(leaf, Tensor) and leaf.dim()
    }
    if len(rows) != 1:
        raise ValueError(
            f"cannot cut tensors of {sorted(rows)} rows into micro-batches: all tensors need the "
            "same number of rows. Cut the batch yourself, and give the pieces to "
            "accumulate_gradients"
        )
    return rows.pop()


def _plain(batch: Any) -> Any:
    return dict(batch) if isinstance(batch, Mapping) else batch


def _check_count(number: Any, what: str) -> int:
    """``number`` as an int of at least 0, from an int, a whole float or a tensor of one element."""
    value = number.item() if isinstance(number, Tensor) and number.numel() == 1 else number
    if (
        not isinstance(value, int | float | np.number)
        or not math.isfinite(value)
        or value != int(value)
    ):
        raise TypeError(f"{what} must be a whole number of items, and was {number!r}")
    if value < 0:
        raise ValueError(f"{what} was {value}: a number of items cannot be negative")
    return int(value)


def _check_returned(returned: Any, mean: bool) -> tuple[Tensor, int]:
    """Check what ``loss_and_count`` returned. Returns the loss and the count."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            "loss_and_count must return two things, (summed loss, items), and returned "
            f"{type(returned).__name__}: for "
            'example F.cross_entropy(logits, labels, reduction="sum") and (labels != -100).sum()'
        )
    loss, count = returned[0], _check_count(returned[1], "the count of loss_and_count")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, Tensor)
            else type(loss).__name__
        )
        raise TypeError(
            f'the loss must be a tensor of one element, and was {given}: use reduction="sum"'
        )
    if count and not loss.requires_grad:
        raise ValueError(
            "the loss has no gradient: it was detached, or computed under torch.no_grad(), or no "
            "parameter requires one. Return the loss itself, not loss.detach() or a number made "
            "from loss.item()"
        )
    if count and not mean and loss.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"the summed loss is in {loss.dtype}, which keeps about three digits of it: "
            "compute it on logits.float()"
        )
    return loss.reshape(()), count


def _backward_without_items(loss: Tensor) -> None:
    """Run backward through a loss without items.

    This backward sends the gradients of the earlier micro-batches to the other processes.
    """
    if not loss.requires_grad or not math.isfinite(loss.item()):
        raise ValueError(
            "the last micro-batch has no items, and its loss cannot carry the other gradients to "
            "the other processes: "
            'return F.cross_entropy(..., reduction="sum"), which is 0 with a gradient of zeros, '
            "not a mean of nothing"
        )
    (loss * 0.0).backward()


def _leaves(loss: Tensor) -> list[Tensor]:
    """The tensors that ``loss.backward()`` gives a gradient to."""
    if loss.grad_fn is None:
        return [loss]
    seen, pending = {loss.grad_fn}, [loss.grad_fn]
    for node in pending:  # the list grows in this loop
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        pending += new
    return [node.variable for node in pending if hasattr(node, "variable")]
