"""What lesson 02 says in figures that none of its cells prints."""

from functools import cache

import pytest
import torch
from build_notebooks import read_source
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


@cache
def descents():
    """The paths in the valley and the losses on the text, by the lesson's own cells."""

    def nothing(*given, **more):
        return None

    given = {"check": lambda id, answer: answer, "predict_first": nothing}
    given |= {"show_paths": nothing, "show_losses": nothing}
    names: dict = {}
    threads = torch.get_num_threads()
    try:
        for cell in read_source(SOURCE).cells:
            if cell.cell_type != "code":
                continue
            code = cell.source.partition("guess_a.reveal")[0]
            exec(code, names)
            names |= given
            if 'curves["AdamW"]' in code:
                break
    finally:
        torch.set_num_threads(threads)
    return names


def test_what_the_valley_shows():
    names = descents()
    paths, minimum = names["paths"], names["minimum"].double()
    assert "thirty times steeper in one direction than in the other" in TEXT
    assert (names["steepness"][1] / names["steepness"][0]).item() == 30
    # SGD: across the valley a step of 0.06 * 30 = 1.8 gradients is nearly too long
    across = paths["SGD"][:12, 1] - minimum[1]
    assert (across[1:] * across[:-1] < 0).sum() >= 8
    assert "the path jumps from side to side" in TEXT
    across = paths["momentum"][:12, 1] - minimum[1]
    assert (across[1:] * across[:-1] < 0).sum() <= 4 and "the zigzag is gone" in TEXT
    along = {name: (paths[name][20, 0] - minimum[0]).abs() for name in ("SGD", "momentum")}
    assert along["momentum"] >= 0.9 * along["SGD"]
    assert "Along the valley the path is no faster than before" in TEXT
    first = (paths["second moment"][1] - paths["second moment"][0]).abs()
    assert first[0].item() == pytest.approx(first[1].item(), rel=1e-3)
    assert "both directions are equally fast now" in TEXT
    decayed = names["both"]["AdamW"][-10:].mean(dim=0)
    reached = names["both"]["Adam"][-10:].mean(dim=0)
    assert decayed[0] < minimum[0] - 0.1 and (decayed - minimum).norm() > (reached - minimum).norm()
    assert "AdamW stops before the minimum" in TEXT
    assert "the decay is fifty times the usual 0.01" in TEXT
    assert "weight_decay=0.5," in SOURCE.read_text(encoding="utf-8")


def test_a_step_with_the_second_moment_alone():
    rule = descents()["second_moment"]
    for slope in (1.0, 30.0):
        p, state = torch.zeros((), dtype=torch.float64), {}
        gradient = torch.tensor(slope, dtype=torch.float64)
        rule(p, gradient, state, lr=0.1, beta=0.999, eps=1e-8)
        (v,) = state.values()
        assert v.item() == pytest.approx(0.001 * slope**2)
        assert r"after one gradient it is $0.001\, g^2$." in TEXT
        v.fill_(slope**2)
        before = p.clone()
        rule(p, gradient, state, lr=0.1, beta=0.999, eps=1e-8)
        assert (before - p).item() == pytest.approx(0.1)
    assert r"Once $\sqrt v$ is as large as g, a step is about 0.1 long in each direction" in TEXT


def test_what_the_small_llama_shows():
    curves = descents()["curves"]
    start = curves["second moment"][0]
    assert max(curves["second moment"][1:10]) > start
    assert "after a few of them its loss jumps above its start" in TEXT
    late = slice(20, None)
    adam, adamw = (torch.tensor(curves[name])[late] for name in ("Adam", "AdamW"))
    assert (adam - adamw).abs().max() < 0.1 and "Adam and AdamW run side by side" in TEXT
    for name in ("SGD", "momentum", "second moment"):
        others = torch.tensor(curves[name])[late]
        assert (adam < others).float().mean() > 0.6, name
    assert "mostly below the others" in TEXT
