"""Steps that change a view in place: what their backward allocates, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.predicted import assert_predicted, assert_same, tracked
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradmem_lib.prediction.predict import predict
from gradmem_lib.prediction.question import CannotTrace
from gradmem_lib.techniques.checkpointing import checkpoint_layers

SHAPE = (-1, 4, 16)


def normed(y):
    """As a layer of instance norm with an activation in place."""
    return F.relu_(F.instance_norm(y.view(SHAPE)))


def viewed(y):
    return F.relu(y.view(SHAPE), inplace=True)


def by_method(y):
    view = y.view(SHAPE)
    view.mul_(2)
    return view


def transposed(y):
    view = y.t()
    view *= 2
    return view.t()


def selected(y):
    view = y[0]
    view *= 2
    return view


def sliced(y):
    view = y[1:]
    view.mul_(3)
    return view


def assigned(y):
    y[1:, 2:] = 0  # a part of a part, which is not used afterwards
    return y


def base(y):
    y.view(SHAPE).sin_()
    return y


KINDS = [normed, viewed, by_method, transposed, selected, sliced, assigned, base]


class Changing(nn.Module):
    """A residual layer: the gradient of its sum waits while the changed view's backward runs."""

    def __init__(self, change):
        super().__init__()
        self.beside, self.before, self.change = nn.Linear(16, 16), nn.Linear(16, 16), change

    def forward(self, x):
        beside = self.beside(x)
        changed = self.change(self.before(x))
        return (beside.flatten()[: changed.numel()].view_as(changed) + changed).sum() * 1.0


@pytest.mark.parametrize("change", KINDS)
def test_a_changed_view_is_predicted_to_the_byte(change):
    assert_predicted(Changing(change), torch.randn(400, 16))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.beside, self.before = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.beside(x) + normed(self.before(x)).view_as(x)


class Recomputed(nn.Module):
    def __init__(self, use_reentrant: bool):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.first, self.use_reentrant = nn.Linear(16, 16), use_reentrant

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x.square().mean()


def test_a_changed_view_in_a_recomputed_layer():
    assert_predicted(Recomputed(use_reentrant=False), torch.randn(400, 16))
    with pytest.raises(CannotTrace, match="give use_reentrant=False"):
        predict(Recomputed(use_reentrant=True), batch=torch.randn(400, 16), target="cpu")


def test_a_changed_view_in_layers_that_this_library_recomputes():
    layers = nn.Sequential(Layer(), Layer(), Layer())
    checkpoint_layers(layers, every=1)
    predicted = predict(layers, batch=torch.randn(400, 16), loss=mean_square, target="cpu")
    assert_same(predicted, tracked(layers, torch.randn(400, 16), loss=mean_square))


def mean_square(model, x):
    return model(x).square().mean()


def test_a_changed_part_of_a_part_that_is_used_afterwards_is_refused():
    def part_of_part(y):
        view = y[1:, 2:]
        view.sin_()
        return view

    with pytest.raises(CannotTrace, match=r"changed in place.*change a copy instead"):
        predict(Changing(part_of_part), batch=torch.randn(40, 16), target="cpu")
