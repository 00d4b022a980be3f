"""Modules that other libraries define: the short traces, the full trace and the tracker agree to
the byte, or a refusal says what to do.

Only every night (``GRADMEM_ALL=1``), and only where the packages are installed: CONTRIBUTING.md has
the command.
"""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import replace

import pytest
import torch
from support.modules_of_others import MODULES
from support.nightly import ALL
from support.predicted import assert_same, tracked

from gradmem_lib.prediction.predict import predict
from gradmem_lib.prediction.question import CannotTrace
from gradmem_lib.training.recipe import Recipe

pytestmark = pytest.mark.skipif(not ALL, reason="makes the modules of other libraries: nightly")

AS_IT_IS = Recipe(precision=None, attention=None)
RECIPES = {
    "plain": AS_IT_IS,
    "accumulated": replace(AS_IT_IS, accumulation=2, optimizer="sgd", momentum=0.9),
    "autocast": replace(AS_IT_IS, precision="autocast-bf16", optimizer="adamw-foreach"),
}
# What is refused with any recipe, or with one of them, and words of the sentence that says why.
REFUSED = {
    "x_transformers layer_dropout": "set that probability to 0",
    "vit_pytorch CaiT": "reads a tensor's value",
    "diffusers AutoencoderKL accumulated": "random",
    "open_clip CLIP accumulated": "no mean over labels or rows",
    "open_clip CustomTextCLIP accumulated": "no mean over labels or rows",
}


def test_there_are_enough_modules():
    assert len(MODULES) >= 40 and len(RECIPES) == 3


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_others_is_predicted_to_the_byte_or_refused(name, recipe):
    needed = name.split()[0]
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: CONTRIBUTING.md says how")
    torch.manual_seed(0)
    model, batch, loss = MODULES[name]()
    model.train()
    ask = {"batch": batch, "loss": loss, "recipe": RECIPES[recipe]}
    says = REFUSED.get(name) or REFUSED.get(f"{name} {recipe}")
    if says is not None:
        with pytest.raises((ValueError, CannotTrace), match=says):
            predict(model, **ask, target="cpu")
        return
    short = predict(model, **ask, target="cpu")
    full = predict(model, **ask, target="cpu", full=True)
    assert short.peak == full.peak
    assert short.peak_by_phase == full.peak_by_phase
    assert_same(short, tracked(copy.deepcopy(model), **ask))
