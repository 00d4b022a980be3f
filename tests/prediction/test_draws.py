"""Steps that draw numbers which fake tensors do not have: those of Python and of numpy."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from support.families import tiny_config
from support.predicted import assert_predicted
from torch import nn

from gradmem_lib.prediction import draws
from gradmem_lib.prediction import trace as trace_module
from gradmem_lib.prediction.predict import predict
from gradmem_lib.prediction.question import CannotTrace
from gradmem_lib.training.recipe import Recipe


class Dropping(nn.Module):
    """Leaves each layer out with a probability, as stochastic depth does."""

    def __init__(self, probability: float, draw=random.random):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.probability, self.draw = probability, draw

    def forward(self, x):
        for layer in self.layers:
            if self.draw() >= self.probability:
                x = x + layer(x).sin()
        return x.square().mean()


def numpy_number() -> float:
    return np.random.rand()


@pytest.mark.parametrize("draw", [random.random, numpy_number], ids=["python", "numpy"])
@pytest.mark.parametrize("probability", [0.01, 0.5, 0.99])
def test_layers_that_are_left_out_by_chance_are_refused(draw, probability):
    for seed in range(3):
        random.seed(seed)
        np.random.seed(seed)
        with pytest.raises(CannotTrace, match="set that probability to 0"):
            predict(Dropping(probability, draw), batch=torch.randn(8, 16), target="cpu")


@pytest.mark.parametrize("draw", [random.random, numpy_number], ids=["python", "numpy"])
def test_draws_that_decide_nothing_are_no_reason_to_refuse(draw):
    assert_predicted(Dropping(0.0, draw), torch.randn(8, 16))


@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_a_prediction_takes_no_number_from_the_generators(probability):
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    for draw in (random.random, numpy_number):
        try:
            predict(Dropping(probability, draw), batch=torch.randn(8, 16), target="cpu")
        except CannotTrace:
            assert probability
    assert (random.random(), np.random.rand()) == expected


@pytest.mark.parametrize("outputs", [draws.LOWEST, draws.HIGHEST], ids=["lowest", "highest"])
def test_the_generators_return_what_they_were_set_to(outputs):
    with draws.restored_generators():
        draws._set_next(outputs)
        assert [random.getrandbits(32) for _ in range(100)] == outputs[:100]
        drawn = np.random.randint(0, 2**32, size=100, dtype=np.uint32)
        assert drawn.tolist() == outputs[:100]
        draws._set_next(outputs)
        number = random.random(), np.random.rand()
    assert all(x < 1e-6 if outputs is draws.LOWEST else x > 1 - 1e-6 for x in number)


def test_the_numbers_that_fake_collectives_draw_ask_for_no_second_trace(monkeypatch):
    """PyTorch numbers their requests by Python's generator, which decides nothing."""
    traces = []
    recorded = trace_module._recorded

    def counted(*asked, **how):
        traces.append(asked)
        return recorded(*asked, **how)

    monkeypatch.setattr(trace_module, "_recorded", counted)
    recipe = Recipe(sharding="ddp")
    sizes = {"batch_size": 2, "seq_len": 16, "target": "cpu", "full": True}
    before = random.getstate()
    predict(tiny_config("llama"), recipe=recipe, ranks=2, **sizes)
    assert len(traces) == 1 and random.getstate() == before
