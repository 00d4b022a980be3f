"""Gradient accumulation whose result is the full batch's gradient, however the batch is cut.

A mean over a batch is a sum over its *items* (tokens that are predicted, or examples) divided by their number. Sums can
be taken piece by piece; means of pieces cannot be averaged unless all pieces have the same number of items. So every
micro-batch contributes its summed loss, and all of them are divided by one number: the items of the whole window.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .data_parallel import NOTHING, Alone, own_part, processes_of


class Accumulated(NamedTuple):
    """What a window of micro-batches amounts to: its loss (the mean over all items) and the number of its items."""

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
    scaler: torch.amp.GradScaler | None = None,
) -> Accumulated:
    """Leave in ``.grad`` the gradient of the mean loss over all items of all ``micro_batches``, one backward for each.

    Neither zeroes gradients nor steps: clip and step afterwards, then ``optimizer.zero_grad()``. It is the full batch's
    gradient where an item's loss depends on its own row alone. It is not where rows are compared with each other (contrastive
    losses) or share statistics: a ``BatchNorm`` in ``model`` that sees a second micro-batch is a ``UserWarning``.

    Args:
        micro_batches: any iterable, also a generator; each is let go before the next forward. They may be of unequal size.
        loss_and_count: ``loss_and_count(micro) -> (summed loss, items)``: a scalar tensor in float32 or float64, and a
            whole number, 0 for a micro-batch without labels. Autocast belongs inside it.
        total_items: the items of all micro-batches together, where they are known before the first backward.
        count_items: ``count_items(micro) -> items``, to count a list of micro-batches before the first backward. With
            neither, each loss is divided by the first count, and the gradients are scaled once, in place, at the end.
        reduction: ``"sum"``, or ``"mean"`` where the loss is the mean over the micro-batch's items, as a model returns it.
        model: whose gradients they are. A ``DistributedDataParallel`` or a sharded module (``fully_shard``, FSDP) must be
            given: items (``total_items`` too) are added up over all processes. Gradients travel with the last micro-batch
            alone (DDP) or with each (FSDP, where all processes need equally many micro-batches). Without ``model`` the
            parameters are found in the graph of the loss.
        scaler: scales each loss. Unscale before clipping, as always.

    Gradients that exist already are added to if the total is known before the first backward, as ``backward()`` does.
    Otherwise they would be scaled with the rest, so anything but zeros in them is a ``ValueError``.

    Raises ``TypeError`` or ``ValueError`` for returns that cannot be right, for a total that does not come out, and when
    there is no item at all. After an error the gradients are incomplete: zero them.
    """
    if reduction not in ("sum", "mean"):
        raise ValueError(
            f"reduction={reduction!r}: loss_and_count returns a 'sum' over its items or their 'mean'"
        )
    processes = processes_of(model)
    if count_items is not None:
        total_items = _counted(micro_batches, count_items, total_items)
    divisor = None
    if total_items is not None:
        divisor = int(processes.sums(_whole(total_items, "total_items"))[0])
        if divisor == 0:
            raise ValueError(NOTHING)
    return _Window(processes, loss_and_count, divisor, reduction == "mean", model, scaler).run(micro_batches)


class _Window:
    """One window of micro-batches: what is counted so far, and by what each loss is divided."""

    def __init__(self, processes: Alone, loss_and_count, divisor: int | None, mean: bool, model, scaler):
        self.processes, self.loss_and_count, self.model, self.scaler = (
            processes,
            loss_and_count,
            model,
            scaler,
        )
        self.known, self.divisor, self.mean = divisor is not None, divisor, mean
        self.trained: dict[Tensor, None] = dict.fromkeys(model.parameters() if model is not None else ())
        self.items, self.loss_sum = 0, None

    def run(self, micro_batches: Iterable[Any]) -> Accumulated:
        if not self.known:
            self._refuse_existing(self.trained)
        for number, (micro, needed) in enumerate(self.processes.micro_batches(micro_batches)):
            if number == 1:
                _warn_of_shared_statistics(self.model)
            with self.processes.forward_and_backward(needed):
                self._add(micro, needed)
            del micro
        return self._end()

    def _add(self, micro: Any, needed: bool) -> None:
        loss, count = _checked(self.loss_and_count(micro), self.mean)
        del micro
        if self.divisor is None:  # a provisional one keeps sums over many items within the range of float16
            self.divisor = max(1, int(self.processes.sums(count)[0]))
        if not self.known and self.model is None and count:
            found = [p for p in _leaves(loss) if p not in self.trained]
            self._refuse_existing(found)
            self.trained.update(dict.fromkeys(found))
        if count:
            factor = (count if self.mean else 1) * self.processes.divisor / self.divisor
            scaled = loss if factor == 1 else loss * factor  # a batch in one piece needs no second loss
            (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
            del scaled
            # float64, where there is one: a window has many micro-batches, and their sums differ in size
            dtype = loss.dtype if loss.device.type == "mps" else torch.float64
            if self.loss_sum is None:
                self.loss_sum = torch.zeros((), dtype=dtype, device=loss.device)
            value = loss.detach().to(dtype)
            # In place: each micro-batch leaves as many bytes behind as the one before.
            self.loss_sum += value * count if self.mean else value
        elif needed:
            _send_without_items(loss)
        self.items += count

    def _end(self) -> Accumulated:
        mine = 0.0 if self.loss_sum is None else self.loss_sum.item()
        items, loss = self.processes.sums(self.items, mine)
        items = int(items)
        if items == 0:
            raise ValueError(NOTHING)
        if self.known and items != self.divisor:
            raise ValueError(
                f"the total said before was {self.divisor:,} items, and loss_and_count counted {items:,}: gradients were divided "
                "by the wrong number. Count the same things in both: labels that are not -100, after the shift"
            )
        if not self.known and items != self.divisor:
            for parameter in self.trained:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.divisor / items)
        return Accumulated(loss / items, items)

    def _refuse_existing(self, parameters: Iterable[Tensor]) -> None:
        old = [p for p in parameters if p.grad is not None and bool(own_part(p.grad).any())]
        # Over all processes: where one has some and raises, the others must not wait for it.
        found = int(self.processes.sums(len(old))[0])
        if found:
            raise ValueError(
                f"{found} parameters have gradients from before, and the correction at the end would scale them too: call "
                "optimizer.zero_grad() first or, to add to them, give total_items= or count_items="
            )


def _warn_of_shared_statistics(model: nn.Module | None) -> None:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    modules = [] if model is None else model.named_modules()
    name = next((name for name, module in modules if isinstance(module, kinds) and module.training), None)
    if name is not None:
        warnings.warn(
            f"{name} is a {type(model.get_submodule(name)).__name__}, which normalizes each micro-batch by its own rows: the "
            "gradient is not the full batch's. Freeze its statistics (its eval()), or use GroupNorm or LayerNorm",
            stacklevel=4,
        )


def split(batch: Any, size: int) -> Iterator[Any]:
    """Cut a batch into micro-batches of ``size`` rows; the last one has what is left. They are views: no bytes.

    ``batch`` is a tensor, or a dict or tuple of them; what has no rows in it (a number, a flag) goes into every micro-batch.
    Raises ``ValueError`` when ``size`` is not positive or the tensors have unequal numbers of rows.
    """
    rows = count_rows(batch)
    if size < 1:
        raise ValueError(
            f"cannot cut {rows} rows into micro-batches of {size}: a micro-batch has at least one row"
        )
    return (_rows_of(batch, slice(start, start + size)) for start in range(0, rows, size))


def count_rows(batch: Any) -> int:
    """How many rows the tensors of ``batch`` have. ``ValueError`` where they do not agree."""
    values = batch.values() if isinstance(batch, Mapping) else [batch] if isinstance(batch, Tensor) else batch
    rows = {len(value) for value in values if isinstance(value, Tensor) and value.dim()}
    if len(rows) != 1:
        raise ValueError(
            f"cannot cut tensors of {sorted(rows)} rows into micro-batches: all tensors need the same number of rows. Cut the "
            "batch yourself, and give the pieces to accumulate_gradients"
        )
    return rows.pop()


def _rows_of(batch: Any, part: slice) -> Any:
    if isinstance(batch, Mapping):
        return {name: _rows_of(value, part) for name, value in batch.items()}
    if isinstance(batch, Tensor):
        return batch[part] if batch.dim() else batch
    return tuple(_rows_of(value, part) for value in batch) if isinstance(batch, tuple | list) else batch


def _counted(micro_batches: Iterable[Any], count_items: Callable[[Any], int], total_items: int | None) -> int:
    if total_items is not None:
        raise ValueError("total_items= and count_items= both say the total: give one of them")
    if not isinstance(micro_batches, Sequence):
        raise TypeError(
            f"count_items= reads the micro-batches twice, and a {type(micro_batches).__name__} can be read once: give a list "
            "of them, or leave count_items out (the gradients are then corrected at the end)"
        )
    return sum(_whole(count_items(micro), "count_items(micro)") for micro in micro_batches)


def _whole(number: Any, what: str) -> int:
    """``number`` as an int of at least 0, from an int, a whole float or a tensor of one element."""
    value = number.item() if isinstance(number, Tensor) and number.numel() == 1 else number
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value != int(value):
        raise TypeError(f"{what} must be a whole number of items, and was {number!r}")
    if value < 0:
        raise ValueError(f"{what} was {value}: a number of items cannot be negative")
    return int(value)


def _checked(returned: Any, mean: bool) -> tuple[Tensor, int]:
    """The summed loss and the count that ``loss_and_count`` returned, if they can be right."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            f"loss_and_count must return two things, (summed loss, items), and returned {type(returned).__name__}: for "
            'example F.cross_entropy(logits, labels, reduction="sum") and (labels != -100).sum()'
        )
    loss, count = returned
    count = _whole(count, "the count of loss_and_count")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f'the loss must be a tensor of one element, and was {given}: use reduction="sum"')
    if count and not loss.requires_grad:
        raise ValueError(
            "the loss has no gradient: it was detached, or computed under torch.no_grad(), or no parameter requires one. "
            "Return the loss itself, not loss.detach() or a number made from loss.item()"
        )
    if count and not mean and loss.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"the summed loss is in {loss.dtype}, which keeps about three digits of it: compute it on logits.float()"
        )
    return loss.reshape(()), count


def _send_without_items(loss: Tensor) -> None:
    """Backward through a loss without items, for the gradients of the earlier micro-batches travel with it."""
    if not loss.requires_grad or not math.isfinite(loss.item()):
        raise ValueError(
            "the last micro-batch has no items, and its loss cannot carry the other gradients to the other processes: "
            'return F.cross_entropy(..., reduction="sum"), which is 0 with a gradient of zeros, and not a mean of nothing'
        )
    (loss * 0.0).backward()


def _leaves(loss: Tensor) -> list[Tensor]:
    """The tensors that ``loss.backward()`` gives a gradient to."""
    seen, todo, found = set(), [loss.grad_fn], []
    if loss.grad_fn is None:
        return [loss]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if "CheckpointFunction" in node.name():
            raise ValueError(
                "parameters are hidden inside a reentrant checkpoint: give model=, or total_items=, or use "
                "checkpoint(..., use_reentrant=False)"
            )
        if hasattr(node, "variable"):
            found.append(node.variable)
        todo += [following for following, _ in node.next_functions if following is not None]
    return found
