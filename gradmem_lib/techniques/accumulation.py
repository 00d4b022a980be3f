"""Gradient accumulation whose result is the full batch's gradient, however the batch is cut.

A mean over a batch is a sum over its *items* (tokens that are predicted, or examples) divided by their number. Sums can
be taken piece by piece; means of pieces cannot be averaged unless all pieces have the same number of items. So every
micro-batch contributes its summed loss, and all of them are divided by one number: the items of the whole window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


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
    model: nn.Module | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Accumulated:
    """Leave in ``.grad`` the gradient of the mean loss over all items of all ``micro_batches``, one backward for each.

    Neither zeroes gradients nor steps: clip and step afterwards, then ``optimizer.zero_grad()``.

    Args:
        micro_batches: any iterable, also a generator; each is let go before the next forward. They may be of unequal size.
        loss_and_count: ``loss_and_count(micro) -> (summed loss, items)``: a scalar tensor in float32 or float64, and a
            whole number, 0 for a micro-batch without labels. Autocast belongs inside it.
        total_items: the items of all micro-batches together, where they are known before the first backward.
        count_items: ``count_items(micro) -> items``, to count a list of micro-batches before the first backward. With
            neither, each loss is divided by the first count, and the gradients are scaled once, in place, at the end.
        model: whose gradients they are. A ``DistributedDataParallel`` must be given: gradients then travel with the last
            micro-batch alone, and the items (``total_items`` too) are added up over all processes. Without it the
            parameters are found in the graph of the loss.
        scaler: scales each loss. Unscale before clipping, as always.

    Gradients that exist already are added to if the total is known before the first backward, as ``backward()`` does.
    Otherwise they would be scaled with the rest, so anything but zeros in them is a ``ValueError``.

    Raises ``TypeError`` or ``ValueError`` for returns that cannot be right, for a total that does not come out, and when
    there is no item at all. After an error the gradients are incomplete: zero them.
    """
    parallel = _parallel(model)
    world = torch.distributed.get_world_size(parallel.process_group) if parallel else 1
    if count_items is not None:
        total_items = _counted(micro_batches, count_items, total_items)
    known = total_items is not None
    divisor = 0
    if known:
        divisor = int(_sum_over_processes([_whole(total_items, "total_items")], parallel)[0])
        if divisor == 0:
            raise ValueError(_NOTHING)

    trained: dict[Tensor, None] = dict.fromkeys(model.parameters() if model is not None else ())
    if not known:
        _refuse_existing(trained)
    loss_sum, items = None, 0
    for micro, last in _looking_ahead(micro_batches) if parallel else ((m, False) for m in micro_batches):
        # DDP sends gradients in any backward whose forward ran outside no_sync().
        with parallel.no_sync() if parallel and not last else nullcontext():
            loss, count = _checked(loss_and_count(micro))
            if divisor == 0:  # a provisional divisor keeps sums over many items within the range of float16
                divisor = max(1, int(_sum_over_processes([count], parallel)[0]))
            if not known and model is None and count:
                found = [p for p in _leaves(loss) if p not in trained]
                _refuse_existing(found)
                trained.update(dict.fromkeys(found))
            if count:
                scaled = loss * (world / divisor)  # DDP takes the mean over processes
                (scaled if scaler is None else scaler.scale(scaled)).backward()
                del scaled
            elif last:
                _send_without_items(loss)
        if count:
            # float64, where there is one: a window has many micro-batches, and their sums differ in size
            value = loss.detach().to(loss.dtype if loss.device.type == "mps" else torch.float64)
            loss_sum = value if loss_sum is None else loss_sum + value
            del value
        items += count
        del loss, micro

    mine = [items, 0.0 if loss_sum is None else loss_sum.item()]
    all_items, all_loss = _sum_over_processes(mine, parallel)
    all_items = int(all_items)
    if all_items == 0:
        raise ValueError(_NOTHING)
    if known and all_items != divisor:
        raise ValueError(
            f"the total said before was {divisor:,} items, and loss_and_count counted {all_items:,}: gradients were divided "
            "by the wrong number. Count the same things in both: labels that are not -100, after the shift"
        )
    if not known and all_items != divisor:
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad.mul_(divisor / all_items)
    return Accumulated(all_loss / all_items, all_items)


def split(batch: dict[str, Tensor], size: int) -> Iterator[dict[str, Tensor]]:
    """Cut a dict of tensors into micro-batches of ``size`` rows; the last one has what is left. They are views: no bytes.

    Raises ``ValueError`` when ``size`` is not positive or the tensors have unequal numbers of rows.
    """
    rows = {len(tensor) for tensor in batch.values()}
    if size < 1 or len(rows) != 1:
        raise ValueError(
            f"cannot cut tensors of {sorted(rows)} rows into micro-batches of {size}: all tensors need the same number of "
            "rows, and a micro-batch at least one"
        )
    return (
        {name: tensor[start : start + size] for name, tensor in batch.items()}
        for start in range(0, rows.pop(), size)
    )


_NOTHING = "there is nothing to learn from: no micro-batch, or not one item in all of them. Are all labels -100? Skip this window"


def _parallel(model: nn.Module | None):
    """``model`` if it is a DistributedDataParallel, else None. Raises where leaving it out would go unnoticed."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and model is None and torch.distributed.get_world_size() > 1:
        raise ValueError(
            "several processes train together, and accumulate_gradients was not told the model: give "
            "model=the DistributedDataParallel, so that items are counted over all processes (or model=the plain module, "
            "if this process trains one of its own)"
        )
    return model if isinstance(model, nn.parallel.DistributedDataParallel) else None


def _sum_over_processes(numbers: list[float], parallel) -> list[float]:
    if not parallel:
        return numbers
    device = next(parallel.parameters()).device
    total = torch.tensor(numbers, dtype=torch.float64, device=device)  # exact for whole numbers up to 2**53
    torch.distributed.all_reduce(total, group=parallel.process_group)
    return total.tolist()


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


def _checked(returned: Any) -> tuple[Tensor, int]:
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
    if count and loss.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"the summed loss is in {loss.dtype}, which keeps about three digits of it: compute it on logits.float()"
        )
    return loss.reshape(()), count


def _looking_ahead(micro_batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each micro-batch, and whether it is the last. The next one is fetched early: two of them are held at a time."""
    rest = iter(micro_batches)
    try:
        held = next(rest)
    except StopIteration:
        raise ValueError(_NOTHING) from None
    for following in rest:
        yield held, False
        held = following
    yield held, True


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


def _refuse_existing(parameters: Iterable[Tensor]) -> None:
    old = [p for p in parameters if p.grad is not None and bool(p.grad.any())]
    if old:
        raise ValueError(
            f"{len(old)} parameters have gradients from before, and the correction at the end would scale them too: call "
            "optimizer.zero_grad() first or, to add to them, give total_items= or count_items="
        )
