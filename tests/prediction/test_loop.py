"""Loops as people write them: predicted as the tracker measures them."""

from __future__ import annotations

import copy

import pytest
import torch
from support.nightly import each
from support.predicted import config
from torch.nn.utils import clip_grad_norm_

from gradmem_lib import Loop, MemoryTracker, Recipe, predict
from gradmem_lib.model.classes import model_class
from gradmem_lib.model.inputs import example_batch

ROWS, TOKENS = 4, 16


def tracked_loop(family: str, loop: Loop) -> MemoryTracker:
    """The third step of a loop that is written out."""
    torch.manual_seed(0)
    cfg = config(family)
    model = model_class(cfg)(copy.deepcopy(cfg)).train()
    model.config.use_cache = False
    batch = example_batch(model, ROWS, TOKENS)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    outputs = loss = None

    def one_step():
        nonlocal outputs, loss
        if loop.zero_grad == "before forward":
            optimizer.zero_grad()
        # what the last step kept lives until the new outputs are there
        outputs = model(**batch)
        loss = outputs.loss
        if loop.keeps != "outputs":
            outputs = None
        if loop.zero_grad == "before backward":
            optimizer.zero_grad()
        loss.backward()
        if loop.clips:
            clip_grad_norm_(model.parameters(), 1.0)
        if loop.keeps != "loss":
            loss = None
        optimizer.step()
        if loop.zero_grad == "after step":
            optimizer.zero_grad()

    for _ in range(2):
        one_step()
    with MemoryTracker(model, optimizer, live=False) as tracker:
        one_step()
    return tracker


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
    tracker = tracked_loop(family, loop)
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
