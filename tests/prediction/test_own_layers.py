"""Own modules, whose layers are in no list that the library knows: the refusal says how to name
them, and what it says is predicted as it is tracked.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.predicted import tracked
from torch import Tensor, nn

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
    """``calls`` returns the layers that are in ``parts`` as a forward calls them."""

    def __init__(self, parts: dict[str, nn.Module], calls):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.head, self.calls = nn.Linear(WIDTH, 8), calls

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.calls(self):
            x = layer(x)
        return F.cross_entropy(self.head(x), labels)


def by_name(n: int) -> dict[str, nn.Module]:
    return {f"part{i}": block for i, block in enumerate(blocks(n))}


# Its parts, the layers in the order of their calls, what the refusal says, and the lists that it
# names.
KINDS = {
    "a list": (
        lambda: {"stages": nn.ModuleList(blocks(6))},
        lambda m: m.stages,
        r"such as model\.stages \(6 layers\)\. A recipe",
        lambda m: [m.stages],
    ),
    "two lists": (
        lambda: {"lower": nn.ModuleList(blocks(3)), "upper": nn.ModuleList(blocks(4))},
        lambda m: [*m.lower, *m.upper],
        r"model\.upper \(4 layers\) or model\.lower \(3 layers\); call .* once for each list",
        lambda m: [m.lower, m.upper],
    ),
    "a sequential": (
        lambda: {"body": nn.Sequential(*blocks(5))},
        lambda m: [m.body],
        r"such as model\.body \(5 layers\)\. A recipe",
        lambda m: [m.body],
    ),
    "a dict": (
        lambda: {"parts": nn.ModuleDict(by_name(5))},
        lambda m: m.parts.values(),
        r"has none: make one .* nn\.ModuleList\(\[model\.first",
        lambda m: [nn.ModuleList(m.parts.values())],
    ),
    "one by one": (
        lambda: by_name(4),
        lambda m: [*m.children()][:4],
        r"has none: make one",
        lambda m: [nn.ModuleList([*m.children()][:4])],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_own_layers_are_checkpointed_as_the_refusal_says(kind):
    parts, calls, says, lists = KINDS[kind]
    model = Own(parts(), calls)
    batch = {
        "x": torch.randn(ROWS, WIDTH),
        "labels": torch.randint(8, (ROWS,)),
    }

    def loss(model, batch):
        return model(**batch)

    def predicted(recipe=RECIPE) -> int:
        asked = {"batch": batch, "loss": loss, "recipe": recipe, "target": "cpu"}
        return predict(model, **asked).peak.total

    names = list(model.state_dict())
    with pytest.raises(ValueError, match=says):
        predicted(Recipe(precision=None, attention=None, checkpointing="per-layer"))
    kept = predicted()
    for layers in lists(model):
        checkpoint_layers(layers, "per-layer")
    assert predicted() == tracked(model, batch, RECIPE, loss).peak.total < kept
    assert list(model.state_dict()) == names
