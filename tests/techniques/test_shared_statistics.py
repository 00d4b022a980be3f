"""A module whose forward in training changes its buffers is named, and the way out is exact."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from support.gradients import error, gradient
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from gradmem_lib import accumulate_gradients, split


def batch():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])}


def with_spectral_norm():
    torch.manual_seed(0)
    model = nn.Sequential(spectral_norm(nn.Linear(6, 16)), nn.Tanh(), nn.Linear(16, 5))
    return model.double()


def summed(model, micro):
    return F.cross_entropy(model(micro["x"]), micro["labels"], reduction="sum"), len(micro["x"])


def full(model):
    """The full batch's gradient, in one forward of a copy."""
    model = copy.deepcopy(model)
    F.cross_entropy(model(batch()["x"]), batch()["labels"]).backward()
    return gradient(model)


def accumulated(model, rows=2):
    pieces = split(batch(), rows)
    accumulate_gradients(pieces, lambda m: summed(model, m), total_items=8, model=model)
    return gradient(model)


def test_a_spectral_norm_is_named_and_the_way_out_is_exact():
    model = with_spectral_norm()
    expected = full(model)
    first = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"of 0\.parametrizations\.weight\.0 .*: _u\."):
        found = accumulated(first)
    assert error(found, expected) > 1e-6  # the warning is true

    with torch.no_grad():
        model(batch()["x"][:1])
    model.get_submodule("0.parametrizations.weight.0").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = accumulated(model)
    assert error(found, expected) <= 1e-12


class Replacing(nn.Linear):
    """Puts a new tensor in the place of its buffer, instead of changing it."""

    def __init__(self):
        super().__init__(6, 5)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        self.seen = self.seen + x.detach().mean(0)
        return super().forward(x)


class Caching(nn.Linear):
    """Fills a buffer in its first forward, and only there."""

    def __init__(self):
        super().__init__(6, 5)
        self.register_buffer("positions", None)
        self.register_buffer("scale", torch.zeros(1))

    def forward(self, x):
        if self.positions is None:
            self.positions = torch.ones(6, dtype=x.dtype)
            self.scale.fill_(1.0)
        return super().forward(x * self.positions * self.scale)


def normed():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))


NORMED = "1 is a BatchNorm1d, which normalizes each micro-batch by its own rows"


@pytest.mark.parametrize(
    ("model", "rows", "says"),
    [
        (Replacing(), 2, "of the model (Replacing): seen"),
        (Caching(), 2, None),
        (normed(), 2, NORMED),
        (normed(), 8, None),  # one micro-batch
        (nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5).eval()), 2, None),
    ],
)
def test_what_micro_batches_share_is_said_and_nothing_else(model, rows, says):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        accumulated(model.double(), rows)
    assert (says in str(said[0].message)) if says else not said
