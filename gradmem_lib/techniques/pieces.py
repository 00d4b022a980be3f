"""Whether a loss may be computed piece by piece: the loss is asked, with three forwards.

Accumulation adds up the sums of pieces. That is right if a batch has the same sums in pieces as
together. Two mistakes change the sum: a loss that compares rows, so that a row's part depends on
the other rows; and a count that is not the loss's divisor.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..compat.data_parallel import is_sharded
from ..compat.dispatch_modes import without_modes
from .counts import check_reduction, checked_pair
from .data_parallel import Processes, Sharded, device_of, processes_of
from .module_state import left_as_it_was
from .second_run import FirstRun
from .splitting import count_rows, split

CHANGED_NUMBERS = 2**18  # of each weight: their copies are smaller than the gradients will be
ROUNDING = 1e-5  # float32 losses of the same rows, computed together and alone, differ by less

Pairs = list[tuple[float, float]]  # a sum and its count, for each mean


def check_pieces_add_up(
    model: nn.Module,
    batch: Any,
    loss_and_count: Callable[[Any], Any],
    *,
    reduction: str = "sum",
) -> None:
    """Raise ``ValueError`` if the loss of all rows of ``batch`` is not the sum of two losses: that
    of all rows but the last, and that of the last row.

    ``accumulate_gradients`` cannot ask this by itself, since it is given pieces, and does not know
    how they would be put together. Call this once, before the first window::

        check_pieces_add_up(model, next(split(batch, 4)), loss_and_count, reduction="mean")

    It costs three forwards of at most these rows: in eval mode, without gradients, with a few other
    numbers in the trained weights, and unseen by a tracker. Afterwards the model and the random
    numbers are as before. ``loss_and_count`` is called three times (before a
    refusal up to eight times, and after a ``RuntimeError`` of its own once more, with gradients),
    with what it does besides.

    Args:
        model: what ``loss_and_count`` calls. With ``DistributedDataParallel`` or sharding, all
            processes call this together.
        batch: at least two rows that ``split`` can cut. Take rows that are unlike each other: of
            equally long rows of one class, most wrong losses have the right sum.
        loss_and_count: the one of ``accumulate_gradients``, as is ``reduction``. It returns one
            pair, or a list of several. Each count must be that of the rows that it is given.

    A loss that draws random numbers in eval mode differs from call to call, and is refused too.
    """
    check_reduction(reduction)
    processes = processes_of(model)
    pieces = _all_but_the_last_row_and_it(batch)
    with as_in_evaluation(model) as autocasts:
        with other_weights(model, processes):
            together, alone, error = _ask(loss_and_count, batch, pieces, reduction)
        finite = all(math.isfinite(loss) for loss, _ in together)
        if processes.sums(bool(error) or not finite)[0]:  # the model cannot have such weights
            together, alone, error = _ask(loss_and_count, batch, pieces, reduction)
            finite = all(math.isfinite(loss) for loss, _ in together)
        if processes.sums(not finite)[0]:
            raise ValueError(
                "look for very large or missing numbers: the loss of all rows together is not "
                "finite, which shows nothing about its pieces"
            )
        limit = rounding(model, autocasts)
        difference = error or _difference(together, alone, limit)
        refused = processes.sums(bool(difference))[0] > 0
        if refused:
            first, _ = _sums_and_counts(loss_and_count, batch, reduction)
            again, _ = _sums_and_counts(loss_and_count, batch, reduction)
            if not error and _difference(first, [again], limit):
                difference = DRAWS_RANDOM_NUMBERS
    if refused:
        difference = difference or "another process found a difference"
        raise ValueError(f"{difference}. Accumulation would train another loss")


DRAWS_RANDOM_NUMBERS = (
    "draw random numbers in the data's collator, or only in training "
    "(F.dropout(x, p, training=self.training)), and leave what the loss reads as it is: the same "
    "rows have another loss each time, also in eval mode"
)


def _all_but_the_last_row_and_it(batch: Any) -> list[Any]:
    rows = count_rows(batch)
    if rows < 2:
        raise ValueError(
            f"a batch of {rows} rows cannot be compared with its pieces: give at least two rows"
        )
    return list(split(batch, rows - 1))


def _ask(
    loss_and_count: Callable, batch: Any, pieces: list[Any], reduction: str
) -> tuple[Pairs, list[Pairs], str]:
    """The sums and counts of ``batch`` and of each piece, and an error if there was one."""
    together, message = _sums_and_counts(loss_and_count, batch, reduction)
    alone = []
    for piece in pieces:  # after an error too: sharded processes run each forward together
        found, error = _sums_and_counts(loss_and_count, piece, reduction)
        alone.append(found)
        message = message or error
    return together, alone, message


def _sums_and_counts(loss_and_count: Callable, batch: Any, reduction: str) -> tuple[Pairs, str]:
    """Each sum and its count, and an error if there was one."""
    pairs = []
    try:
        returned = with_graph_if_needed(lambda: loss_and_count(batch))
        for pair in returned if isinstance(returned, list) else [returned]:
            loss, count = checked_pair(pair)
            value = loss.item()
            if reduction == "mean":
                value = value * count if count else 0.0  # the mean of nothing is not a number
            pairs.append((value, float(count)))
    except Exception as error:  # the loss's own code may raise anything
        return [], first_line(error)
    return pairs, ""


def _difference(together: Pairs, alone: list[Pairs], limit: float) -> str:
    """What differs between a batch and its pieces; an empty string if nothing does."""
    numbers = sorted({len(together), *(len(piece) for piece in alone)})
    if len(numbers) > 1:
        return f"{numbers[0]} pairs of loss and count for some rows, and {numbers[-1]} for others"
    for place, (loss, count) in enumerate(together):
        losses = [piece[place][0] for piece in alone]
        counts = [piece[place][1] for piece in alone]
        if (0.0, 0.0) in [piece[place] for piece in alone]:  # no loss, and no items
            return (
                "give rows that all have labels: a piece of this batch has no items, which shows "
                "nothing"
            )
        tolerance = limit
        if all(each.is_integer() for each in (count, *counts)):
            tolerance = 0.0  # whole numbers are not rounded
        if not math.isclose(sum(counts), count, rel_tol=tolerance):
            return (
                "count the rows that are given, as len(labels) does, or their labels that are not "
                f"-100, after the shift: the count of all rows is {count:g}, and those of its "
                f"pieces are {' and '.join(f'{each:g}' for each in counts)}"
            )
        # Sums of unlike signs cancel, and their rounding does not.
        scale = max(abs(loss), sum(abs(each) for each in losses))
        if not abs(sum(losses) - loss) <= limit * scale:
            return (
                "return class weights as counts (weight[labels].sum()), and several means as a "
                "list of pairs, each with its own count; or use accumulate_through_embeddings, if "
                f"the loss compares rows: its sum is {loss:.6g} for all rows together, and "
                f"{sum(losses):.6g} as the sum of pieces"
            )
    return ""


# training/items.py uses these, too.


@contextmanager
def as_in_evaluation(model: nn.Module) -> Iterator[set[torch.dtype]]:
    """In the block, there are no gradients, no dropout and no tracker. Afterwards all is as before:
    what a forward has changed in the model is put back (``left_as_it_was``), except if the model is
    sharded.

    The block gets a set, which collects the dtype of each autocast that a module is called in.
    """
    kind = device_of(model).type
    autocasts = set[torch.dtype]()

    def note_autocast(module: nn.Module, args: tuple) -> None:
        if torch.is_autocast_enabled(kind):
            autocasts.add(torch.get_autocast_dtype(kind))

    before = set(model.modules())
    training = [module for module in before if module.training]
    cuda = [device_of(model)] if kind == "cuda" else []
    others = FirstRun([model]).found_again()  # the random numbers that are not torch's own
    # For every module, since the loss may call a wrapper around the model.
    hook = register_module_forward_pre_hook(note_autocast)
    # FSDP keeps what it has gathered in attributes of its own, which must not be put back.
    state = nullcontext() if is_sharded(model) else left_as_it_was(model)
    try:
        with torch.no_grad(), without_modes(), torch.random.fork_rng(cuda), others, state:
            for module in before:
                module.training = False  # a module's own eval() may do more, as loralib's merges
            yield autocasts
    finally:
        hook.remove()
        for module in training:
            module.training = True
        for module in model.modules():
            for child in module.children():
                if child not in before:  # made in a forward of a sharded model
                    child.train(module.training)
            if hasattr(module, "reshard"):  # fully_shard gathers the root's weights in a forward
                module.reshard()


@contextmanager
def other_weights(model: nn.Module, processes: Processes) -> Iterator[None]:
    """In the block, a part of each trained weight has other numbers. Afterwards it has its own.

    The weights that a training starts from may hide what a loss does. A head of zeros gives all
    tokens the same loss, and then each way to weigh them looks right. With preferences, the model
    is its own reference at first, and all pairs have the loss log 2. Almost any other weights show
    the difference.

    Shards stay as they are, since some kinds of sharding keep the weights that they have gathered.
    """
    if isinstance(processes, Sharded):
        yield
        return
    generator = torch.Generator().manual_seed(0)
    changed = []
    try:
        for parameter in model.parameters():
            part = _first_numbers(parameter)
            if part is None:
                continue
            changed.append((part, part.clone()))
            if parameter.dim() == 1:
                size = 0.1  # a gain of 1 stays positive
            else:
                size = parameter[0].numel() ** -0.5  # outputs are about as large as inputs
            noise = torch.randn(len(part), generator=generator) * size
            part.add_(noise.to(part))
        yield
    finally:
        for part, numbers in changed:
            part.copy_(numbers)
        if changed:
            torch.clear_autocast_cache()  # the caller's autocast may have cast the other numbers


def _first_numbers(parameter: nn.Parameter) -> torch.Tensor | None:
    """The first numbers of a trained weight, as a view; ``None`` for any other kind of weight."""
    data = parameter.data
    plain = type(data) is torch.Tensor and data.is_floating_point() and data.is_contiguous()
    if not parameter.requires_grad or not plain or not data.dim() or not data.numel():
        return None
    return data.view(-1)[:CHANGED_NUMBERS]


def rounding(model: nn.Module, autocasts: set[torch.dtype]) -> float:
    """The relative difference of two losses that rounding alone explains.

    ``autocasts``: the dtypes of autocast that the losses were computed under. A matrix product of
    more rows adds in another order. In 16 bits, rounding changes each loss by up to half of
    ``eps``, the gap after 1, so the two may be ``eps`` apart.
    """
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    narrow = (dtypes | autocasts) & {torch.bfloat16, torch.float16}
    return max([ROUNDING, *(torch.finfo(dtype).eps for dtype in narrow)])


def with_graph_if_needed(loss: Callable[[], Any]) -> Any:
    """What ``loss()`` returns. It is called a second time, with gradients, if it needs them: a
    gradient penalty, say, or forces that are the gradient of an energy.
    """
    try:
        return loss()
    except RuntimeError:
        with torch.enable_grad():
            return loss()


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
