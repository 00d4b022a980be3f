"""Own modules, whose layers are in no list that the library knows: the refusal says how to name
them, and what it says is predicted as it is tracked.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.prediction.predict import predict
from gradmem_lib.techniques.checkpointing import checkpoint_layers
from gradmem_lib.training.recipe import Recipe

WIDTH, ROWS = 32, 64
RECIPE = Recipe(precision=None, attention=None, optimizer="adamw")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (rows, width)
        return x + self.down(F.gelu(self.up(x)))


def blocks(n: int) -> list[Block]:
    return [Block() for _ in range(n)]


class Own(nn.Module):
    """Its parts are set by ``build``; ``order`` returns its layers as the forward calls them."""

    def __init__(self):
        super().__init__()
        self.build()
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.order():
            x = layer(x)
        return F.cross_entropy(self.head(x), labels)


class InAList(Own):
    def build(self):
        self.stages = nn.ModuleList(blocks(6))

    def order(self):
        return list(self.stages)


class InTwoLists(Own):
    def build(self):
        self.lower, self.upper = nn.ModuleList(blocks(3)), nn.ModuleList(blocks(4))

    def order(self):
        return [*self.lower, *self.upper]


class InASequential(Own):
    def build(self):
        self.body = nn.Sequential(*blocks(5))

    def order(self):
        return [self.body]


class InADict(Own):
    def build(self):
        self.parts = nn.ModuleDict({f"part{i}": block for i, block in enumerate(blocks(5))})

    def order(self):
        return list(self.parts.values())


class OneByOne(Own):
    def build(self):
        self.first, self.second, self.third, self.fourth = blocks(4)

    def order(self):
        return [self.first, self.second, self.third, self.fourth]


@pytest.mark.parametrize(
    ("kind", "says", "lists"),
    [
        (InAList, r"such as model\.stages \(6 layers\)\. A recipe", lambda m: [m.stages]),
        (
            InTwoLists,
            r"model\.upper \(4 layers\) or model\.lower \(3 layers\); call .* once for each list",
            lambda m: [m.lower, m.upper],
        ),
        (InASequential, r"such as model\.body \(5 layers\)\. A recipe", lambda m: [m.body]),
        (
            InADict,
            r"has none: make one .* nn\.ModuleList\(\[model\.first",
            lambda m: [nn.ModuleList(m.parts.values())],
        ),
        (OneByOne, r"has none: make one", lambda m: [nn.ModuleList(m.order())]),
    ],
)
def test_own_layers_are_checkpointed_as_the_refusal_says(kind, says, lists):
    model = kind()
    batch = {
        "x": torch.randn(ROWS, WIDTH),
        "labels": torch.randint(8, (ROWS,)),
    }

    def loss(model, batch):
        return model(**batch)

    def predicted(recipe=RECIPE) -> int:
        asked = {"batch": batch, "loss": loss, "recipe": recipe, "target": "cpu"}
        return predict(model, **asked).peak.total

    def tracked() -> int:
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=False)
        for _ in range(2):  # the second step has the states
            with MemoryTracker(model, optimizer, live=False) as tracker:
                loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        return tracker.peak.total

    names = list(model.state_dict())
    with pytest.raises(ValueError, match=says):
        predicted(Recipe(precision=None, attention=None, checkpointing="per-layer"))
    kept = predicted()
    for layers in lists(model):
        checkpoint_layers(layers, "per-layer")
    assert predicted() == tracked() < kept
    assert list(model.state_dict()) == names
