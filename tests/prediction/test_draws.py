"""Steps that draw numbers which fake tensors do not have: those of Python and of numpy."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.families import tiny_config

from gradmem_lib import Recipe, predict
from gradmem_lib.prediction import draws
from gradmem_lib.prediction import trace as trace_module


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
