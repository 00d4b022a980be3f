"""Predictions for losses that take derivatives of their own: with torch.func, in forward mode, and
as a penalty on a gradient.
"""

from __future__ import annotations

import pytest
import torch
from support.oracle import allocator_peak
from support.predicted import assert_predicted
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from gradmem_lib.prediction.predict import predict
from gradmem_lib.training.prepare import prepare
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.training.step import step

ROWS, FEATURES = 6, 8


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))


def along_ones(model, x):
    return jvp(model, (x,), (torch.ones_like(x),))


def slope_in_forward_mode(model, x):
    value, slope = along_ones(model, x)
    return value.square().mean() + slope.square().mean()


def dual_numbers(model, x):
    with forward_ad.dual_level():
        out = model(forward_ad.make_dual(x, torch.ones_like(x)))
        value, slope = forward_ad.unpack_dual(out)
        return value.square().mean() + slope.square().mean()


def second_derivative(model, x):
    _, slope_of_slope = jvp(lambda y: along_ones(model, y)[1], (x,), (torch.ones_like(x),))
    return slope_of_slope.square().mean()


def all_columns(model, x):
    return jacfwd(lambda y: model(y).sum(0))(x).square().mean()


def all_rows(model, x):
    return jacrev(lambda y: model(y).sum(0))(x).square().mean()


def curvature(model, x):
    return hessian(lambda y: model(y).mean())(x[0]).square().mean()


def slope_in_reverse_mode(model, x):
    value, backward = vjp(model, x)
    (slope,) = backward(torch.ones_like(value))
    return slope.square().mean() + value.mean()


def gradients_of_rows(model, x):
    def loss(weights, row):
        return functional_call(model, weights, (row,)).square().mean()

    weights = dict(model.named_parameters())
    found = vmap(grad(loss), in_dims=(None, 0))(weights, x)
    return sum(gradient.square().sum() for gradient in found.values())


def gradient_penalty(critic, x):
    """The loss of a Wasserstein critic: Gulrajani et al., 2017, equation 3."""
    real, generated = x, x.flip(0)
    share = torch.rand(len(x), 1)
    between = (share * real + (1 - share) * generated).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    return critic(generated).mean() - critic(real).mean() + 10 * penalty


def penalty_after_the_loss(critic, x):
    """The gradient is the last that the loss takes: between it and backward, memory is freed."""
    loss = critic(x).mean()
    point = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(critic(point).sum(), point, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean() + loss


LOSSES = [
    slope_in_forward_mode,
    dual_numbers,
    second_derivative,
    all_columns,
    curvature,
    all_rows,
    slope_in_reverse_mode,
    gradients_of_rows,
    gradient_penalty,
    penalty_after_the_loss,
]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_with_derivatives_is_predicted(loss):
    assert_predicted(net(), torch.rand(ROWS, FEATURES), loss=loss)


def test_an_earlier_prediction_changes_none_with_forward_mode():
    """The zeros of forward mode have no memory, and what is known of other tensors is not true of
    them.
    """
    x = torch.rand(ROWS, FEATURES)
    predict(net(), batch=x, loss=slope_in_forward_mode, target="cpu")
    assert_predicted(net(), x, loss=curvature)


@pytest.mark.parametrize("loss", [slope_in_forward_mode, all_columns, gradients_of_rows])
def test_the_allocator_gives_out_as_much(loss):
    model, x, recipe = net(), torch.rand(ROWS, FEATURES), Recipe()
    found = predict(model, batch=x, loss=loss, target="cpu")
    run = prepare(model, recipe)

    def one_step():
        step(run.model, run.optimizer, x, recipe, loss=loss)

    one_step()
    assert allocator_peak(one_step, before=1) == found.peak.total - found.current.total


class MakesOnMeta(nn.Module):
    """Asks for a shape on the device meta, whose tensors have no memory, however large they are."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, 16)

    def forward(self, x):
        many = x.to("meta").repeat(100, 2)
        return (self.linear(x) + torch.zeros(many.shape[1])).square().mean()


def test_tensors_on_meta_take_no_bytes():
    assert_predicted(MakesOnMeta(), torch.rand(ROWS, FEATURES))
