"""Steps that draw numbers which fake tensors do not have: those of Python and of numpy."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.families import tiny_config

from gradmem_lib import Recipe, predict
from gradmem_lib.prediction import draws
from gradmem_lib.prediction import trace as trace_module


@pytest.mark.parametrize(("word", "output"), [(draws.LOWEST, 1), (draws.HIGHEST, 2**32 - 1)])
def test_the_generators_return_what_they_were_set_to(word, output):
    with draws.restored_generators():
        draws._set_next(word)
        assert [random.getrandbits(32) for _ in range(100)] == [output] * 100
        drawn = np.random.randint(0, 2**32, size=100, dtype=np.uint32)
        assert drawn.tolist() == [output] * 100
        draws._set_next(word)
        number = random.random(), np.random.rand()
        # it goes on where the whole state is used up, and does not stay where it is
        assert len({random.getrandbits(32) for _ in range(10_000)}) > 10
    assert all(x < 1e-6 if word == draws.LOWEST else x > 1 - 1e-6 for x in number)


def test_the_numbers_that_fake_collectives_draw_ask_for_no_second_trace(spy):
    """PyTorch numbers their requests by Python's generator, which decides nothing."""
    traces = spy(trace_module, "_recorded")
    recipe = Recipe(sharding="ddp")
    sizes = {"batch_size": 2, "seq_len": 16, "target": "cpu", "full": True}
    before = random.getstate()
    predict(tiny_config("llama"), recipe=recipe, ranks=2, **sizes)
    assert traces.call_count == 1 and random.getstate() == before
