"""What an evaluation collects, and what was there before it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradmem_lib import MemoryTracker


class WithoutTorchFunction(torch.Tensor):
    """A tensor whose own code must not run because the tracker asks for its size."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ in ("dim", "numel", "size", "element_size"):
            raise AssertionError(f"{func.__name__} was called")
        return super().__torch_function__(func, types, args, kwargs or {})


class TakesAnything(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given):
        return self.linear(torch.ones(2, 4))


# What a model is given, and its rows.
ROWS = {
    "torch.ones(3, 4)": 3,
    "{'ids': torch.ones(3, 4), 'mask': torch.ones(7, 7)}": 3,
    "torch.ones(3, 4).to_sparse()": 3,
    "torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])": 2,
    "torch.ones(3, 4).as_subclass(WithoutTorchFunction)": 3,
    "torch.tensor(1.0)": 0,
    "'a name'": 0,
}


@pytest.mark.parametrize("given", ROWS)
def test_the_rows_of_a_batch_are_known_of_any_tensor(given):
    model, batch = TakesAnything(), eval(given)
    with MemoryTracker(model) as tracker:
        model(batch).sum().backward()
    assert tracker.facts.batch_rows == ROWS[given]
