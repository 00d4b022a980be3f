"""Gradient accumulation whose result is the full batch's gradient, however the batch is cut.

A mean over a batch is a sum over its *items* (predicted tokens, or examples) divided by their
number. A sum can be computed piece by piece. The means of pieces can only be averaged if all pieces
have the same number of items. So every micro-batch contributes its summed loss, and all of these
are divided by one number: the items of the whole window.

For a list of micro-batches in one process, all of it is this loop, which can be pasted into a
script::

    total = sum(count_items(micro) for micro in micro_batches)
    for micro in micro_batches:
        loss, count = loss_and_count(micro)  # a sum over the micro-batch's items
        (loss / total).backward()

``accumulate_gradients`` is this loop for any iterable, also where the total is not known before the
first backward, for losses of several means, and over several processes. ``_Window`` keeps its sums,
and ``_Correction`` scales the gradients at the end where the total was unknown. The rest refuses
what would give a wrong gradient.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from .counts import check_counts, check_reduction, check_returned, check_totals, whole
from .data_parallel import NO_ITEMS_ERROR, Processes, processes_of
from .shared_statistics import warn_of_shared_statistics, warning_of_changed_buffers
from .splitting import split as split  # lesson 03 imports it with accumulate_gradients

Items = int | float | tuple[int | float, ...]


class Accumulated(NamedTuple):
    """The result of a window of micro-batches: its loss (the mean over all items) and the number of
    its items: a tuple of numbers for a loss of several means.
    """

    loss: float
    items: Items


def accumulate_gradients(
    micro_batches: Iterable[Any],
    loss_and_count: Callable[[Any], Any],
    *,
    total_items: Any = None,
    count_items: Callable[[Any], Any] | None = None,
    reduction: str = "sum",
    model: nn.Module | None = None,
    scaler: Any = None,
) -> Accumulated:
    """Put the gradient of the mean loss over all items of all ``micro_batches`` into ``.grad``,
    with one backward for each.

    Neither zeroes gradients nor steps: clip and step afterwards, then call
    ``optimizer.zero_grad()``. The result is the full batch's gradient if each item's loss depends
    on its own row alone. It is not if rows are compared (contrastive losses: see
    ``accumulate_through_embeddings``) or share statistics: a ``BatchNorm`` in ``model`` gives a
    warning at the second micro-batch, and so does a module whose forward changes its buffers, such
    as a spectral norm.

    Args:
        micro_batches: any iterable, also a generator. Each is released before the next forward.
            Sizes may differ.
        loss_and_count: ``loss_and_count(micro) -> (summed loss, items)``: a scalar tensor in
            float32 or float64, and a number that is not negative: the number of items, or the sum
            of their weights (``weight[labels].sum()`` for ``F.cross_entropy(weight=weight)``); 0
            for a micro-batch without labels. The count only divides: what such a micro-batch has as
            its loss is added too (a focal loss, divided by its positives, of an image without any),
            and the total must be known then. Use autocast inside this function. A loss that adds
            several means returns a list of such pairs, one for each mean: each sum is divided by
            its own total, which must be known first (``total_items`` or ``count_items``).
        total_items: the items of all micro-batches together, if they are known before the first
            backward; a tuple of numbers for several means.
        count_items: ``count_items(micro) -> items`` counts a list of micro-batches before the first
            backward. Without both, losses are divided by the first count, and gradients are scaled
            in place at the end: then gradients from before that are not zero raise ``ValueError``.
            With a total, gradients are added to them, as ``backward()`` does.
        reduction: ``"sum"``, or ``"mean"`` if the loss is the micro-batch's mean over its items, as
            a model returns it. Whether a loss of one's own is such a sum or mean is not asked here:
            ``check_pieces_add_up`` asks, once, before the first window.
        model: the model that is trained. A ``DistributedDataParallel`` or a sharded module
            (``fully_shard``, FSDP) must be given: items (also ``total_items``) are added up over
            all processes. Gradients are sent with the last micro-batch (DDP) or with each one
            (FSDP, where all processes need equally many).
        scaler: scales each loss. Unscale before clipping, as always.

    Raises ``TypeError`` or ``ValueError`` for returned values that cannot be right, for a total
    that differs from the count, and for a window without any item. After an error the gradients are
    incomplete: zero them.
    """
    check_reduction(reduction)
    processes = processes_of(model)
    totals = _totals(micro_batches, total_items, count_items, processes)
    window = _Window(processes, totals, reduction == "mean", model, scaler)
    for number, (micro, sync_gradients) in enumerate(processes.micro_batches(micro_batches)):
        window.before(number)
        with processes.forward_and_backward(sync_gradients):
            returned = window.forward(loss_and_count, micro)
            loss = window.divided_loss(returned, sync_gradients)
            if loss is not None:
                loss.backward()
        del loss
        window.add_losses(returned)
        # Release the inputs and the graph before the next forward.
        del micro, returned
    processes.check_gradients()
    return window.end()


class _Window:
    """The sums so far, and the divisor of each.

    The divisors are the total numbers of items, or the first count if the total is unknown.
    """

    def __init__(
        self, processes: Processes, totals: tuple | None, mean: bool, model: Any, scaler: Any
    ):
        self.processes = processes
        self.totals = totals
        self.divisors = totals  # without totals, those of the first micro-batch
        self.mean = mean  # whether losses are means of their items
        self.model = model
        self.scaler = scaler
        self.items: list[int | float] = []  # of each mean, in this process
        self.loss_sums: list[Tensor | None] = []
        self.several = False  # whether loss_and_count returns a list of pairs
        self.is_watched = False  # whether buffers that this forward changes are looked for
        self.correction = None
        if totals is None:
            self.correction = _Correction(processes, model)

    def before(self, number: int) -> None:
        """Called before each forward."""
        # The first forward of a training also fills caches, so the second is watched.
        self.is_watched = number == 1
        between_ranks = self.processes.divisor > 1
        if number == 1 or (number == 0 and between_ranks):
            warn_of_shared_statistics(self.model, between_ranks=number == 0, stacklevel=4)

    def forward(self, loss_and_count: Callable, micro: Any) -> list[tuple[Tensor, int | float]]:
        """The pairs of loss and count of a micro-batch, checked."""
        with ExitStack() as watched:
            if self.is_watched:
                watched.enter_context(warning_of_changed_buffers(self.model, stacklevel=6))
            if self.correction is not None:
                watched.enter_context(self.correction.watch_modules())
            returned = loss_and_count(micro)
        self.several = isinstance(returned, list)
        pairs = returned if self.several else [returned]
        self._check_number_of_means(len(pairs))
        return [check_returned(pair, self.mean) for pair in pairs]

    def divided_loss(self, pairs: list, sync_gradients: bool) -> Tensor | None:
        """The loss to call ``backward()`` on: each sum divided by its divisor, all added up.

        ``None`` if there is nothing to compute.
        """
        if self.divisors is None:
            # Provisional. It keeps sums over many items within the range of float16.
            first = self.processes.sums(pairs[0][1])[0]
            self.divisors = (first or 1,)
        divided = None
        for place, (loss, count) in enumerate(pairs):
            self.items[place] += count
            if not self._is_added(loss, count) or not loss.requires_grad:
                continue
            factor = self.processes.divisor / self.divisors[place]
            if self.mean:
                factor *= count
            # an uncut batch needs no second loss tensor
            part = loss if factor == 1 else loss * factor
            divided = part if divided is None else divided + part
        if divided is None:
            # This backward sends the gradients of earlier micro-batches to the other processes.
            return _loss_without_items([loss for loss, _ in pairs]) if sync_gradients else None
        if self.correction is not None:
            self.correction.track(_leaves(divided))
        return divided if self.scaler is None else self.scaler.scale(divided)

    def end(self) -> Accumulated:
        local = [0.0 if total is None else total.item() for total in self.loss_sums]
        numbers = self.processes.sums(*self.items, *local)
        items = tuple(whole(number) for number in numbers[: len(self.items)])
        loss_sums = numbers[len(self.items) :]
        if not any(items):
            raise ValueError(NO_ITEMS_ERROR)
        if self.totals is not None:
            check_totals(self.totals, items)
        elif self.correction is not None and self.divisors is not None:
            self.correction.scale_gradients(self.divisors[0] / items[0])
        loss = 0.0
        for loss_sum, count in zip(loss_sums, items, strict=True):
            if count:
                loss += loss_sum / count
        return Accumulated(loss, items if self.several else items[0])

    def _check_number_of_means(self, means: int) -> None:
        if not self.items:
            self.items, self.loss_sums = [0] * means, [None] * means
        expected = len(self.items if self.totals is None else self.totals)
        if means != expected:
            raise ValueError(
                f"loss_and_count returned {means} pairs of loss and count where {expected} were "
                "expected: return as many for each micro-batch, and as many totals"
            )
        if means > 1 and self.totals is None:
            raise ValueError(
                f"a loss of {means} means is divided by {means} totals, which must be known before "
                "the first backward: give count_items= (it returns a tuple of counts) or "
                "total_items="
            )

    def add_losses(self, pairs: list) -> None:
        """Called after each backward."""
        for place, (loss, count) in enumerate(pairs):
            if not self._is_added(loss, count):
                continue
            # float64 where the device has it: a window has many micro-batches, and their sums
            # differ in size
            dtype = loss.dtype if loss.device.type == "mps" else torch.float64
            value = loss.detach().to(dtype)
            if self.loss_sums[place] is None:
                self.loss_sums[place] = torch.zeros((), dtype=dtype, device=loss.device)
            # In place, so that every micro-batch leaves equally many bytes behind.
            self.loss_sums[place] += value * count if self.mean else value

    def _is_added(self, loss: Tensor, count: int | float) -> bool:
        """Whether a loss is a part of the window. The mean of nothing, which is not a number, is
        none, also where it was multiplied by its count.
        """
        if count or self.mean or loss.isnan():
            return bool(count)
        # Without a total, the window may turn out to have no items, with its gradients made.
        if self.totals is None and loss.item():
            raise ValueError(
                "give total_items= or count_items=: a micro-batch with a count of 0 has the loss "
                f"{loss.item():g}, and if all of them had that count, there would be nothing to "
                "divide by"
            )
        return self.totals is not None


class _Correction:
    """Where the total is unknown, gradients are scaled at the end: those of the parameters that the
    window trains.

    These are the model's. Without a model, they are found: as leaves of each loss's graph, and in
    the modules that a forward calls, since what runs again in backward (a reentrant checkpoint) has
    a graph of its own.
    """

    def __init__(self, processes: Processes, model: nn.Module | None):
        self.processes = processes
        self.trained = WeakTensorKeyDictionary()
        self.called: dict[Tensor, None] = {}  # parameters of the modules of the last forward
        self.finds = model is None
        if model is not None:
            self._track(model.parameters())

    @contextmanager
    def watch_modules(self) -> Iterator[None]:
        """Notes the parameters of every module that is called."""
        if not self.finds:
            yield
            return
        self.called = {}
        hook = register_module_forward_pre_hook(self._on_forward)
        try:
            yield
        finally:
            hook.remove()

    def _on_forward(self, module: nn.Module, args: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                self.called[parameter] = None

    def track(self, leaves: Iterable[Tensor]) -> None:
        """Called before each backward, with the leaves of its graph."""
        if self.finds:
            self._track([*leaves, *self.called])
            self.called = {}

    def _track(self, parameters: Iterable[Tensor]) -> None:
        new = {p: None for p in parameters if p not in self.trained}
        existing = 0
        for parameter in new:
            grad = parameter.grad
            if hasattr(grad, "to_local"):
                grad = grad.to_local()  # of a sharded gradient, only this process's part
            if grad is not None and grad.any():
                existing += 1
        # Summed over all processes: if one has gradients and raises, the others must not wait.
        found = int(self.processes.sums(existing)[0])
        if found:
            raise ValueError(
                f"{found} parameters have gradients from before, and the correction at the end "
                "would scale them too: call optimizer.zero_grad() first or, to add to them, give "
                "total_items= or count_items="
            )
        self.trained |= new

    def scale_gradients(self, factor: float) -> None:
        if factor == 1:
            return
        for parameter in self.trained:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def _totals(
    micro_batches: Any, total_items: Any, count_items: Callable | None, processes: Processes
) -> tuple | None:
    """The totals over all processes, one for each mean; ``None`` if they are not known."""
    if total_items is None and count_items is None:
        return None
    if count_items is None:
        totals = check_counts(total_items, "total_items")
    else:
        if total_items is not None:
            raise ValueError("total_items= and count_items= both say the total: give one of them")
        if not isinstance(micro_batches, Sequence):
            raise TypeError(
                f"count_items= reads the micro-batches twice, and a {type(micro_batches).__name__} "
                "may give others the second time, or none: give a list of them, or leave "
                "count_items out (the gradients are then corrected at the end)"
            )
        counted = [check_counts(count_items(m), "count_items(micro)") for m in micro_batches]
        lengths = sorted({len(counts) for counts in counted})
        if len(lengths) > 1:
            raise ValueError(
                f"count_items returned {lengths[0]} counts for one micro-batch and {lengths[-1]} "
                "for another: return one count for each mean of the loss, 0 where a micro-batch "
                "has no such items"
            )
        totals = tuple(sum(numbers) for numbers in zip(*counted, strict=True)) or (0,)
    totals = tuple(whole(number) for number in processes.sums(*totals))
    if not any(totals):
        raise ValueError(NO_ITEMS_ERROR)
    return totals


def _loss_without_items(losses: list[Tensor]) -> Tensor:
    """Zero, with the graph of the losses of a micro-batch without items."""
    for loss in losses:
        if not loss.requires_grad or not math.isfinite(loss.item()):
            raise ValueError(
                "the last micro-batch has no items, and its loss cannot carry the other gradients "
                'to the other processes: return F.cross_entropy(..., reduction="sum"), which is 0 '
                "with a gradient of zeros, not a mean of nothing"
            )
    return torch.stack(losses).sum() * 0.0


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
