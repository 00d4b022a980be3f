"""Loops as people write them: predicted as the tracker measures them."""

from __future__ import annotations

import pytest
from support.nightly import each
from support.predicted import config, tracked_loop

from gradmem_lib import Loop, Recipe, predict
from gradmem_lib.model.classes import model_class
from gradmem_lib.model.inputs import example_batch

ROWS, TOKENS = 4, 16


LOOPS = [
    Loop(),
    Loop(zero_grad="before forward"),
    Loop(zero_grad="before backward"),
    Loop(keeps="loss"),
    Loop(keeps="outputs"),
    Loop(clips=True),
    Loop(zero_grad="before backward", keeps="outputs", clips=True),
]


CASES = [(family, loop) for family in ("llama", "bert") for loop in LOOPS]


@pytest.mark.parametrize(("family", "loop"), each(3, CASES), ids=str)
def test_a_loop_is_predicted_as_it_is_tracked(family, loop):
    found = predict(
        config(family),
        batch_size=ROWS,
        seq_len=TOKENS,
        recipe=Recipe(attention=None),
        target="cpu",
        loop=loop,
    )
    cfg = config(family)
    cfg.use_cache = False
    model = model_class(cfg)(cfg).train()
    tracker = tracked_loop(model, example_batch(model, ROWS, TOKENS), loop)
    assert found.peak == tracker.peak
    for phase in ("forward", "optimizer_step"):
        assert found.peak_by_phase[phase] == tracker.peak_by_phase[phase]


@pytest.mark.parametrize("loop", [Loop(clips=True), Loop(zero_grad="before forward")])
def test_a_loop_that_cannot_be_is_refused(loop):
    asked = {"batch_size": ROWS, "seq_len": TOKENS, "target": "cpu"}
    with pytest.raises(ValueError, match="none is left to clip"):
        predict(config("llama"), **asked, recipe=Recipe(in_backward=True), loop=loop)
    with pytest.raises(TypeError, match="give a Loop"):
        predict(config("llama"), **asked, loop="plain")
    with pytest.raises(ValueError, match="zero_grad='never'"):
        Loop(zero_grad="never")
    with pytest.raises(ValueError, match="clips=1: it is a switch"):
        Loop(clips=1)
