"""Gradients of weights in 16 bits that add up in float32.

A bf16 number has 8 bits of precision. Each addition rounds the sum to it, so that a window of many
micro-batches has a worse gradient than one large batch. In float32 the sum is exact enough, and it
is rounded once, at the end. What each micro-batch computes in 16 bits stays as it is.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ..names import GRADIENT_SUM
from .data_parallel import processes_of

NARROW = (torch.bfloat16, torch.float16)


@contextmanager
def float32_gradients(model: nn.Module) -> Iterator[None]:
    """Inside the block, the gradients of ``model``'s 16-bit weights are summed in float32.

    At its end, each sum is rounded to the dtype of its weight, and is the weight's ``.grad``.
    Gradients from before are in the sum.

    Bytes: 4 for each such number, and 2 more for the weight whose gradient is being added.
    """
    narrow = [p for p in model.parameters() if p.requires_grad and p.dtype in NARROW]
    with ExitStack() as undo:
        undo.callback(_round_sums, narrow)
        for p in narrow:
            undo.callback(p.register_hook(partial(_make_sum, p)).remove)
            undo.callback(p.register_post_accumulate_grad_hook(_move_into_sum).remove)
            if p.grad is not None:
                _make_sum(p, p.grad)
                _move_into_sum(p)
        yield


def _make_sum(parameter: Tensor, gradient: Tensor) -> None:
    # The sum exists before .grad does, so that a tracker, which looks for gradients when .grad is
    # there, finds both.
    if not hasattr(parameter, GRADIENT_SUM):
        wide = torch.zeros_like(gradient, dtype=torch.float32)
        setattr(parameter, GRADIENT_SUM, wide)


def _move_into_sum(parameter: Tensor) -> None:
    getattr(parameter, GRADIENT_SUM).add_(parameter.grad)
    parameter.grad = None


def _round_sums(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        if hasattr(p, GRADIENT_SUM):
            p.grad = getattr(p, GRADIENT_SUM).to(p.dtype)
            delattr(p, GRADIENT_SUM)


def check_float32_gradients(model: nn.Module | None, *totals: object) -> None:
    """Raise ``ValueError`` where the gradients of ``model`` cannot add up in float32.

    ``totals``: what is known of the number of items before the first backward.
    """
    if all(total is None for total in totals):
        raise ValueError(
            "float32_sums=True needs the total before the first backward, since a correction at "
            "the end would round each sum once more: give total_items= or count_items="
        )
    if model is None:
        raise ValueError(
            "float32_sums=True changes the dtype of the model's gradients: give model=, the model "
            "that is trained"
        )
    if processes_of(model).groups:
        raise ValueError(
            "float32_sums=True, and several processes train together: they send gradients in the "
            "dtype of the weights. Leave it out, or train float32 weights under autocast"
        )
