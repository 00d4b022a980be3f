"""accumulate_gradients where parameters are not in the loss's graph: what runs again in backward
has them in a graph of its own.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradmem_lib import accumulate_gradients


class Again(torch.autograd.Function):
    """A module that runs again in backward, where its parameters get their gradients."""

    @staticmethod
    def forward(ctx, layer, x):
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(grad)
        return None, x.grad


HIDDEN = {
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "own": Again.apply,
    "own in a reentrant one": lambda layer, x: checkpoint(
        partial(Again.apply, layer), x, use_reentrant=True
    ),
}


@pytest.mark.parametrize("way", HIDDEN)
@pytest.mark.parametrize("given", [True, False])
def test_parameters_inside_what_runs_again(way, given):
    layer, x = nn.Linear(3, 3), torch.randn(4, 3, requires_grad=True)
    layer(x).square().sum().div(4).backward()
    expected = [t.grad for t in (layer.weight, layer.bias, x)]
    layer.zero_grad()
    x.grad = None

    def loss_and_count(rows):
        return HIDDEN[way](layer, rows).square().sum(), len(rows)

    accumulate_gradients([x[:1], x[1:]], loss_and_count, model=layer if given else None)
    torch.testing.assert_close([t.grad for t in (layer.weight, layer.bias)], expected[:2])
    if not given:  # with a model, its parameters alone are corrected
        torch.testing.assert_close(x.grad, expected[2])


def test_gradients_from_before_are_refused_in_what_runs_again():
    layer, x = nn.Linear(3, 3), torch.randn(4, 3, requires_grad=True)
    layer(x).sum().backward()
    with pytest.raises(ValueError, match="2 parameters have gradients from before"):
        accumulate_gradients(
            [x.detach().requires_grad_()], lambda x: (Again.apply(layer, x).sum(), len(x))
        )
    assert torch.autograd.backward.__module__ == "torch.autograd"
