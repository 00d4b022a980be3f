"""A prediction leaves no tensors without values in caches of functions near a module."""

from __future__ import annotations

from functools import cache, lru_cache

import pytest
import torch
from support.predicted import assert_same, tracked
from torch import Tensor, nn

from gradmem_lib.prediction.predict import predict
from gradmem_lib.training.recipe import Recipe

RECIPE = Recipe(precision=None, attention=None)


@lru_cache
def positions(tokens: int) -> Tensor:
    return torch.arange(tokens, dtype=torch.float32)


class FromAFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):  # (rows, 6)
        return (self.linear(x) * positions(x.shape[1])).square().mean()


class FromAMethod(FromAFunction):
    @staticmethod
    @cache
    def own(tokens: int) -> dict[str, Tensor]:
        return {"positions": torch.arange(tokens, dtype=torch.float32)}

    def forward(self, x):
        return (self.linear(x) * self.own(x.shape[1])["positions"]).square().mean()


@pytest.mark.parametrize("kind", [FromAFunction, FromAMethod])
@pytest.mark.parametrize("real_step_first", [False, True])
def test_a_real_step_works_after_a_prediction(kind, real_step_first):
    positions.cache_clear()
    FromAMethod.own.cache_clear()
    torch.manual_seed(0)
    model, rows = kind(), torch.randn(4, 6)
    expected = model(rows).item() if real_step_first else None
    asked = predict(model, batch=rows, recipe=RECIPE, target="cpu")
    found = model(rows).item()
    assert expected is None or found == expected
    assert_same(asked, tracked(model, rows, RECIPE))


def test_a_cache_that_was_not_used_is_kept():
    positions.cache_clear()
    kept = positions(3)
    predict(nn.Linear(6, 6), batch=torch.randn(2, 6), loss=lambda m, x: m(x).sum(), target="cpu")
    assert positions(3) is kept
