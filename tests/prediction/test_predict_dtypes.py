"""A batch in another dtype than the weights: what the real step refuses, a prediction refuses, and
what runs has its bytes.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.predicted import assert_predicted
from torch import nn

from gradmem_lib import Recipe, predict
from gradmem_lib.prediction.question import CannotTrace

AS_IT_IS = Recipe(precision=None, optimizer="sgd")
ROWS, FIRST = torch.rand(2, 4), torch.tensor([0, 1])


class Beside(nn.Module):
    """``function(weight, rows)``, for a weight of the rows' shape."""

    def __init__(self, function, *shape):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.rand(shape))

    def forward(self, rows):
        return self.function(self.weight, rows)


def put(weight, rows):
    changed = rows.clone()
    changed[FIRST] = weight
    return changed


CASES = {
    "linear": lambda: (nn.Linear(4, 3), ROWS),
    "added product": lambda: (
        Beside(lambda weight, rows: torch.addmm(weight, rows, rows.T), 2, 2),
        ROWS,
    ),
    "convolution": lambda: (nn.Conv2d(4, 3, 2, bias=False), torch.rand(2, 4, 5, 5)),
    "batch norm": lambda: (nn.BatchNorm2d(4), torch.rand(2, 4, 5, 5)),
    "layer norm": lambda: (nn.LayerNorm(4), ROWS),
    "put in": lambda: (Beside(put, 2, 4), ROWS),
    "added by index": lambda: (Beside(lambda w, rows: rows.index_add(0, FIRST, w), 2, 4), ROWS),
    "huber": lambda: (Beside(F.huber_loss, 2, 4), ROWS),
    "product by number": lambda: (Beside(torch.mul, 2, 4), ROWS),
}


def mean(model, batch):
    return model(batch).float().mean()


@pytest.mark.parametrize(
    "weights, given", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
@pytest.mark.parametrize("case", CASES)
def test_what_the_real_step_refuses_is_refused(case, weights, given):
    model, batch = CASES[case]()
    model, batch = model.to(weights), batch.to(given)
    try:
        mean(model, batch).backward()
    except RuntimeError:
        with pytest.raises(CannotTrace, match="would most likely fail for real"):
            predict(model, batch=batch, recipe=AS_IT_IS, loss=mean, target="cpu")
    else:
        model.zero_grad()
        assert_predicted(model, batch, AS_IT_IS, mean)
