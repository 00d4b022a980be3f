"""A prediction of a backward that fills its own zeros has the allocator's bytes."""

from __future__ import annotations

import torch
from support.oracle import allocator_peak
from torch import nn

from gradmem_lib.prediction.predict import predict
from gradmem_lib.training.recipe import Recipe

SIZE = 64


class Chosen(nn.Module):
    """As in a policy's loss: the score of each token that was sampled."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, SIZE)

    def forward(self, x, tokens):
        return self.head(x).gather(-1, tokens[:, None]).mean()


def test_a_prediction_has_the_allocators_bytes():
    model = Chosen()
    batch = {"x": torch.randn(SIZE, 8), "tokens": torch.randint(SIZE, (SIZE,))}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=False)

    def step():
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    recipe = Recipe(precision=None, attention=None, optimizer="sgd")
    predicted = predict(model, batch=batch, recipe=recipe, target="cpu")
    there_before = sum(tensor.nbytes for tensor in [*model.parameters(), *batch.values()])
    assert predicted.peak.total - there_before == allocator_peak(step, before=1)
