"""Accumulation for losses that compare rows, such as in-batch negatives: two passes (GradCache).

Such a loss is no sum over rows, so it cannot be computed piece by piece. But it sees a row only
through the row's embedding, which is small. So all embeddings are computed first, micro-batch by
micro-batch and without a graph. The loss of all of them gives the gradient of each embedding. Then
each micro-batch is embedded again, with a graph, and its backward starts from these gradients.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .accumulation import Accumulated
from .counts import described
from .second_run import FirstRun, nearly_same
from .shared_statistics import warn_of_shared_statistics


def accumulate_through_embeddings(
    micro_batches: Sequence[Any],
    embed: Callable[[Any], Tensor | tuple[Tensor, ...]],
    loss_of: Callable[..., Tensor],
    *,
    model: nn.Module | None = None,
) -> Accumulated:
    """Put the gradient of a loss that compares all rows of all ``micro_batches`` into ``.grad``,
    with the activations of one micro-batch at a time. Each forward runs twice.

    Neither zeroes gradients nor steps; gradients from before are added to, as ``backward()`` does.
    This is GradCache (Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory
    Limited Setup", section 3.2).

    Args:
        micro_batches: a list, since it is read twice. Sizes may differ.
        embed: ``embed(micro)`` returns the embeddings of its rows, (rows, ...), or a tuple of such
            tensors: for example those of queries and of passages. A tensor of whole numbers among
            them, such as labels, is passed on. Use autocast inside this function.
        loss_of: ``loss_of(*tensors)`` gets each tensor of all micro-batches together, in their
            order, and returns a scalar. It may have parameters of its own, such as a temperature.
        model: what ``embed`` calls. A ``BatchNorm`` in it that is trained gives a warning, since
            embeddings then depend on how the batch is cut. What its forward writes into buffers is
            written once.

    Returns the loss, and how many rows it compares.

    Bytes: beside the activations of one micro-batch, the embeddings of all rows and their gradients
    (2 x rows x width x bytes of a number), what the loss keeps of them (a few times rows x rows
    numbers for in-batch negatives), and the state of the random numbers before each micro-batch
    (5,056 bytes, and 16 for each card), and copies of the buffers that a forward writes. The second
    pass draws the same random numbers, so that dropout leaves out the same values. Afterwards the
    state is the one after the first pass.

    Raises ``TypeError`` or ``ValueError`` for returned values that cannot be right, for
    micro-batches that can be read only once, if the second pass has other embeddings than the
    first, and where several processes train together, whose losses would compare only their own
    rows. After an error the gradients are incomplete: zero them.
    """
    _check_before(micro_batches)
    if len(micro_batches) > 1:
        warn_of_shared_statistics(model, between_ranks=False, stacklevel=3)

    # The first pass keeps no graph.
    modules = [] if model is None else [model]
    first_runs, pieces = [], []
    with torch.no_grad():
        for micro in micro_batches:
            first = FirstRun(modules)
            first_runs.append((_random_state(), first))
            with first.watched():
                pieces.append(_as_tuple(embed(micro)))
    embeddings = [torch.cat(tensors) for tensors in zip(*pieces, strict=True)]
    sizes = [[len(tensor) for tensor in piece] for piece in pieces]
    del pieces

    # The loss of all rows gives each embedding its gradient.
    for tensor in embeddings:
        tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
    loss = loss_of(*embeddings)
    _check_loss(loss)
    loss.backward()
    loss = loss.detach()  # releases its graph

    # The second pass begins each backward at these gradients.
    starts = [0] * len(embeddings)
    with torch.random.fork_rng(_cards()):
        for micro, (state, first), lengths in zip(micro_batches, first_runs, sizes, strict=True):
            again = _embedded_again(embed, micro, state, first)
            reached, grads = [], []
            for place, tensor in enumerate(again):
                rows = slice(starts[place], starts[place] + lengths[place])
                starts[place] = rows.stop
                whole = embeddings[place]
                _check_same(tensor, whole[rows])
                if tensor.requires_grad and whole.grad is not None:
                    reached.append(tensor)
                    grads.append(whole.grad[rows])
            if not reached:
                raise ValueError(NO_GRADIENT)
            torch.autograd.backward(reached, grads)
            # Release the graph before the next forward.
            del again, tensor, reached
    return Accumulated(loss.item(), len(embeddings[0]))


def _embedded_again(
    embed: Callable[[Any], Any], micro: Any, state: tuple[Tensor, list[Tensor]], first: FirstRun
) -> tuple[Tensor, ...]:
    """The embeddings of the second pass, from the random numbers and buffers of the first."""
    cpu, cards = state
    torch.set_rng_state(cpu)
    for card, of_card in enumerate(cards):
        torch.cuda.set_rng_state(of_card, card)
    with first.found_again():
        return _as_tuple(embed(micro))


NO_GRADIENT = (
    "no embedding has a gradient: embed ran under torch.no_grad() or detached them, no parameter "
    "requires a gradient, or loss_of does not use what embed returns. Return the embeddings "
    "themselves"
)


# The random numbers: of the CPU, and of the cards in use.


def _cards() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


def _random_state() -> tuple[Tensor, list[Tensor]]:
    return torch.get_rng_state(), list(map(torch.cuda.get_rng_state, _cards()))


# What cannot be right.


def _check_before(micro_batches: Any) -> None:
    if not isinstance(micro_batches, Sequence | Tensor):
        raise TypeError(
            f"the micro-batches are read twice, and a {type(micro_batches).__name__} can be read "
            "once: give a list of them, such as list(split(batch, 8))"
        )
    if not len(micro_batches):
        raise ValueError("there is no micro-batch: give at least one")
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"{dist.get_world_size()} processes train together, and each would compare its own "
            "rows only, which is another loss: use accumulate_through_embeddings in one process"
        )


def _as_tuple(returned: Any) -> tuple[Tensor, ...]:
    tensors = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or not tensor.dim():
            raise TypeError(
                "embed must return a tensor (rows, ...) or a tuple of such tensors, such as "
                f"model(**micro).last_hidden_state[:, 0], and returned {described(tensor)}"
            )
    return tensors


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError(
            f"loss_of must return a tensor of one element, and returned {described(loss)}"
        )
    if not loss.requires_grad:
        raise ValueError(NO_GRADIENT)


@torch.no_grad()
def _check_same(again: Tensor, first: Tensor) -> None:
    """``ValueError`` if the second pass has other embeddings than the first."""
    if again.shape != first.shape or not nearly_same(again, first, first.dtype):
        raise ValueError(
            "embed returned other embeddings for the same micro-batch in the second pass, and the "
            "gradient would be of neither: draw random numbers from torch, Python or NumPy, "
            "give model=, and leave what embed reads as it is (a queue, a counter, an iterator)"
        )
