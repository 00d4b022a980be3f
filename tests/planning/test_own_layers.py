"""Layers of modules of one's own: which ones a forward shows to be such that they may run again,
and what their checkpoints need.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.nightly import each
from support.own_models import (
    CLASS,
    NOISE,
    OWN_MODELS,
    WIDTH,
    Block,
    Diffusion,
    UNet,
    class_loss,
    noise_loss,
    rows_of,
)
from support.plans import assert_code_needs_what_was_predicted
from support.predicted import assert_same, tracked
from torch import nn

from gradmem_lib import Recipe, find_card, fit, plan, predict
from gradmem_lib.model.description import Description
from gradmem_lib.model.layers import find_layers
from gradmem_lib.planning.own_layers import find_own_layers
from gradmem_lib.planning.rows import count_row


@pytest.mark.parametrize("name", OWN_MODELS)
def test_the_lists_of_layers_are_found_in_the_order_of_their_calls(name):
    build, batch, loss, lists = OWN_MODELS[name]
    assert find_own_layers(build(), batch, loss) == (lists, [])


SCHEDULES = ["per-layer", "first-1", "first-3", 2]
CASES = [
    (name, schedule, accumulation)
    for name in OWN_MODELS
    for schedule in SCHEDULES
    for accumulation in (1, 2)
]


@pytest.mark.parametrize(("name", "schedule", "accumulation"), each(11, CASES))
def test_checkpoints_of_named_lists_are_predicted_to_the_byte(name, schedule, accumulation):
    build, batch, loss, lists = OWN_MODELS[name]
    recipe = Recipe(checkpointing=schedule, layers=lists, accumulation=accumulation)
    rows = rows_of(batch)
    asked = {"batch": rows, "loss": loss, "recipe": recipe, "target": "cpu"}
    if schedule == 2 and name in ("unet", "pairs"):  # something happens between the layers
        says = "was given something else than the output of layer"
        with pytest.raises(RuntimeError, match=says):
            predict(build(), **asked)
        with pytest.raises(RuntimeError, match=says):
            tracked(build(), rows, recipe, loss)
        return
    predicted = predict(build(), **asked)
    assert_same(predicted, tracked(build(), rows, recipe, loss))
    assert predict(build(), full=True, **asked).peak == predicted.peak
    plain = predict(build(), **asked | {"recipe": replace(recipe, checkpointing=None)})
    assert predicted.peak_by_phase["forward"] < plain.peak_by_phase["forward"]


class Draws(Block):
    def forward(self, x):
        return super().forward(x) * random.random()


class InPlace(Block):
    def forward(self, x):
        return super().forward(F.relu_(x))


class Normed(Block):
    def __init__(self):
        super().__init__()
        self.statistics = nn.BatchNorm1d(8)

    def forward(self, x):
        return super().forward(self.statistics(x))


class Reads(Block):
    """Reads what the model has put into its place."""

    def forward(self, x):
        return super().forward(x + self.here[0])


class Takes(Block):
    """Takes a tensor out of a list."""

    def forward(self, x, skipped):
        return super().forward(x + skipped.pop())


class Named(Block):
    def forward(self, *, x):
        return super().forward(x)


class Chain(nn.Module):
    """A model with one list of layers of one kind."""

    def __init__(self, kind: type[nn.Module] = Block, called: int = 2, after: bool = False):
        super().__init__()
        self.inputs, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(kind() for _ in range(2))
        self.called, self.after = called, after

    def forward(self, x):
        x = self.inputs(x)
        skipped = [x, x + 1]
        for block in list(self.blocks)[: self.called]:
            if isinstance(block, Reads):
                block.here = [x * 2]
            if isinstance(block, Takes):
                x = block(x, skipped)
            elif isinstance(block, Named):
                x = block(x=x)
            elif self.after:
                x += block(x + 1) if block is self.blocks[0] else block(x)
            else:
                x = block(x)
        return self.head(x.mean(1))


VECTORS = (torch.zeros(1, 8, 4), CLASS)
PROBLEMS = [
    (lambda: Chain(Draws), "Layer 0 of blocks .* draws numbers from random"),
    (lambda: Chain(InPlace), "Layer 0 of blocks .* changes a tensor in place that it has not made"),
    (lambda: Chain(Reads), "Layer 0 of blocks .* reads a tensor that is none of its arguments"),
    (lambda: Chain(Takes), "Layer 0 of blocks .* changes a list or dict that it is given"),
    (lambda: Chain(Named), "Layer 0 of blocks .* gets no positional argument"),
    (lambda: Chain(called=1), "does not call layer 1 of blocks"),
    (lambda: Chain(after=True), "Layer 1 of blocks .* is changed in place after its call"),
    # a second forward would change running statistics a second time
    (lambda: Chain(Normed), "Layer 0 of blocks .* changes a tensor in place that it has not made"),
]


@pytest.mark.parametrize(("build", "says"), PROBLEMS)
def test_layers_that_must_not_run_again_are_left_alone(build, says):
    named, (problem,) = find_own_layers(build(), VECTORS, class_loss)
    assert "blocks" not in named and re.search(says, problem)


class Parted(Chain):
    """Its layers are in lists with places for parts that this model does not have."""

    def __init__(self):
        super().__init__()
        parts = [nn.ModuleList([Block(), None]) for _ in range(2)]
        self.blocks = nn.ModuleList(parts)

    def forward(self, x):
        x = self.inputs(x)
        for block, after in self.blocks:
            x = block(x)
            if after is not None:
                x = after(x)
        return self.head(x.mean(1))


def test_none_in_a_list_stands_for_no_layer():
    assert find_own_layers(Parted(), VECTORS, class_loss) == (("blocks",), [])
    recipe = Recipe(checkpointing="per-layer", layers="blocks")
    rows = rows_of(VECTORS)
    predicted = predict(Parted(), batch=rows, loss=class_loss, recipe=recipe, target="cpu")
    assert_same(predicted, tracked(Parted(), rows, recipe, class_loss))


class Frozen(dict):
    """As diffusers has it for a config."""

    def clear(self):
        raise TypeError("this dict cannot be changed")


class Keeps(Block):
    """Keeps what it computes, in three ways."""

    def __init__(self):
        super().__init__()
        self.list, self.config = [], Frozen(width=WIDTH)

    def forward(self, x):
        if "scale" not in dict(self.named_buffers()):
            self.register_buffer("scale", torch.ones_like(x[0, 0]), persistent=False)
            self.list.append(x.detach().mean())
            self.last = x
        return super().forward(x * self.scale)


def test_a_module_is_left_as_it_was_by_the_forward_that_is_watched():
    """A real step could not use what a forward on fake tensors has left in it."""
    model = Chain(Keeps)
    find_own_layers(model, VECTORS, class_loss)
    count_row(Description(model), VECTORS, class_loss)
    for block in model.blocks:
        assert not block.list and not hasattr(block, "last") and not hasattr(block, "scale")
    class_loss(model, VECTORS).backward()
    assert type(model.blocks[0].scale) is torch.Tensor


def test_a_list_that_keeps_little_inside_its_layers_is_not_taken():
    """Each layer of such a list keeps its input, as a checkpoint does."""
    batch = torch.zeros(1, 4), CLASS
    assert find_own_layers(Chain(), VECTORS, class_loss)[0] == ("blocks",)

    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

        def forward(self, x):
            return self.parts(x)

    assert find_own_layers(Parts(), batch, class_loss) == ((), [])


def lists_of(**counts: int) -> nn.Module:
    return nn.ModuleDict(
        {name: nn.ModuleList(nn.Identity() for _ in range(n)) for name, n in counts.items()}
    )


NOWHERE = [
    (Parted, ("nowhere",), r"such as model\.blocks \(2 layers\)"),
    (UNet, ("nowhere",), r"no such module in this UNet, such as model\.up \(2 layers\)"),
    (UNet, ("first", "down"), "first has no items"),
    (UNet, ((),), "has an empty list"),
    (UNet, (("down.0", "down.0"),), "the same layer is in the list more than once"),
    (UNet, ("down", ("down.0.first",)), "is a part of another layer that is given"),
    (
        lambda: lists_of(lower=3, upper=4),
        ("nowhere",),
        r"model\.upper \(4 layers\) or model\.lower \(3 layers\); call .* once for each list",
    ),
    (Block, ("nowhere",), r"has none: make one .* nn\.ModuleList\(\[model\.first"),
]


@pytest.mark.parametrize(("build", "layers", "says"), NOWHERE)
def test_lists_that_cannot_be_are_refused(build, layers, says):
    with pytest.raises(ValueError, match=says):
        find_layers(build(), layers)


def test_a_list_may_be_given_by_the_names_of_its_layers():
    """The encoder and the decoder of a UNet that has them as attributes."""
    recipe = Recipe(checkpointing="per-layer", layers=[["down.0", "up.1"], "middle"])
    assert recipe.layers == (("down.0", "up.1"), "middle")
    rows = rows_of(NOISE)
    predicted = predict(UNet(), batch=rows, loss=noise_loss, recipe=recipe, target="cpu")
    assert_same(predicted, tracked(UNet(), rows, recipe, noise_loss))
    for wrong in (3, [3], [[]], [["a", 3]]):
        with pytest.raises(TypeError, match="give the names of lists of layers"):
            Recipe(layers=wrong)


def test_fit_recomputes_as_few_of_the_named_layers_as_the_budget_allows():
    recipe = Recipe(layers="blocks")
    asked = {"batch": rows_of(NOISE), "loss": noise_loss, "target": "cpu"}
    peaks = []
    for k in range(5):
        one = replace(recipe, checkpointing=f"first-{k}" if k else None)
        peaks.append(predict(Diffusion(), recipe=one, **asked).peak.total)
    assert peaks[2] < peaks[1] < peaks[0]
    assert fit(Diffusion(), peaks[2], recipe=recipe, **asked).checkpointing == "first-2"


def test_a_plan_chooses_checkpoints_where_nothing_fits_without_them(monkeypatch):
    batch = {name: torch.zeros(1, 4, 32, 32) for name in ("latents", "noise")}
    batch["times"] = torch.zeros(1)
    asked = {"global_batch": 1, "batch": batch, "loss": noise_loss, "target": "cpu"}
    least = plan(Diffusion(3), card="1 B", **asked).closest.needs
    card = replace(find_card("RTX 4090"), nbytes=int(1.05 * least))
    with monkeypatch.context() as patched:
        patched.setattr("gradmem_lib.planning.work.find_own_layers", lambda *given: ((), []))
        assert plan(Diffusion(3), card=card, **asked).best is None
    made = plan(Diffusion(3), card=card, **asked)
    assert made.best.recipe.checkpointing is not None
    assert "layers=('blocks',)" in made.code
    rows = rows_of(batch, 1, made.best.recipe.weight_dtype)
    assert_code_needs_what_was_predicted(made, Diffusion(3), rows, noise_loss)
