"""What lesson 02 says in figures that none of its cells prints."""

import pytest
import torch
from support.paths import ROOT
from torch import nn

from gradmem_lib import MemoryTracker

SOURCE = ROOT / "solutions" / "02_manual_adam.py"
TEXT = " ".join(SOURCE.read_text(encoding="utf-8").replace("#", " ").split())


def test_the_first_step_of_adam_without_its_corrections():
    beta_1, beta_2, lr, gradient = 0.9, 0.999, 0.01, torch.tensor(7.0)
    m, v = (1 - beta_1) * gradient, (1 - beta_2) * gradient**2
    times = (lr * m / v.sqrt() / lr).item()
    assert times == pytest.approx(0.1 / 0.001**0.5)
    assert f"Adam's first step is 0.1 / √0.001 = {times:.2f} times lr" in TEXT
    # with the corrections it is as long as lr
    weight = nn.Parameter(torch.zeros(()))
    weight.grad = gradient
    torch.optim.Adam([weight], lr=lr, betas=(beta_1, beta_2)).step()
    assert abs(weight.item()) == pytest.approx(lr)


@pytest.mark.parametrize("widths, copies", [([64], 2), ([64, 32], 2), ([64, 64], 3)])
def test_the_temporaries_of_adamws_plain_loop(widths, copies):
    layers = nn.ModuleList(nn.Linear(64, width, bias=False) for width in widths)
    optimizer = torch.optim.AdamW(layers.parameters(), foreach=False)

    def set_gradients():
        for layer in layers:
            layer.weight.grad = torch.ones_like(layer.weight)

    set_gradients()
    optimizer.step()  # makes the states
    set_gradients()
    with MemoryTracker(layers, optimizer, live=False) as tracker:
        optimizer.step()
    temporaries = max(tracker.timeline.by_category["temporaries"])
    assert temporaries == copies * layers[0].weight.nbytes
    assert (
        "The plain loop needs two copies of the largest parameter here, and three where two such "
        "parameters follow each other."
    ) in TEXT
