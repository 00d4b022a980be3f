"""What could lower a peak: bounds that the real techniques keep, and a list of what cannot that is
right.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import oom
from support.nightly import each
from support.oom import evaluations, growth, tensors, weights
from torch import nn

from gradmem_lib import BudgetExceeded, MemoryTracker, Recipe, diagnose, predict, prepare, step
from gradmem_lib.course.material import models
from gradmem_lib.measure.diagnosis import CHUNKS, FUSED, SGD, TECHNIQUES
from gradmem_lib.units import format_bytes

NAMES = [technique.name for technique in TECHNIQUES]
SMALLER = "smaller micro-batches, or shorter rows"
MOVED = "moving activations off the card"
# What each technique is in a recipe, in their order.
RECIPES = """
optimizer="adamw-fused"
chunked_loss=True
accumulation=4
checkpointing="per-layer"
offload="activations"
optimizer="adafactor-torch"
optimizer="sgd"
in_backward=True
lora_rank=2
lora_rank=2, quantized_base=True
"""
REAL = dict(zip(NAMES, RECIPES.strip().splitlines(), strict=True))
STARTS = {
    "states": (Recipe(optimizer="adamw-foreach", accumulation=4), 4, 8),
    "activations": (Recipe(optimizer="adamw"), 4, 96),
    "no states": (Recipe(optimizer="sgd", precision="bf16"), 4, 64),
    "checkpointed": (Recipe(checkpointing="per-layer"), 4, 64),
}


def tracked(recipe: Recipe, rows: int, tokens: int, layers: int = 3) -> MemoryTracker:
    model = models.tiny_llama(layers=layers, hidden=64, heads=4, intermediate=128, vocab=400)
    ids = torch.randint(0, 400, (rows, tokens), generator=torch.Generator().manual_seed(0))
    made = prepare(model, recipe)
    with MemoryTracker(
        made.model, None if isinstance(made.optimizer, list) else made.optimizer
    ) as tracker:
        for _ in range(2):
            step(made.model, made.optimizer, {"input_ids": ids, "labels": ids}, recipe)
    return tracker


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_loss_in_chunks_is_not_advised_to_a_run_that_has_it(pieces):
    whole = Recipe(accumulation=pieces, optimizer="sgd")
    found = diagnose(tracked(whole, 4, 1024, layers=1))
    in_chunks = diagnose(tracked(replace(whole, chunked_loss=True), 4, 1024, layers=1))
    assert oom.LOGITS in [cause.name for cause in found.causes] and CHUNKS in found.helps
    assert not in_chunks.causes and CHUNKS in in_chunks.cannot_help


@pytest.mark.parametrize("start", each(2, STARTS))
def test_no_real_technique_comes_below_its_bound_and_none_that_cannot_helps(start):
    recipe, rows, tokens = STARTS[start]
    plain = tracked(recipe, rows, tokens)
    found = diagnose(plain)
    assert found.peak == plain.peak and set(found.helps) | set(found.cannot_help) == set(NAMES)
    for name, change in REAL.items():
        if "in_backward" in change and recipe.accumulation > 1:
            continue
        changed = eval(f"replace(recipe, {change})")
        lora = recipe.lora_rank is None and changed.lora_rank is not None
        peak = tracked(changed, rows, tokens).peak.total
        # see diagnose: a side effect
        saved_less = 0.2 * plain.peak.by_category["activations"] if lora else 0
        assert peak >= found.lowest[name] - saved_less, name
        if name in found.cannot_help:
            assert peak >= 0.98 * plain.peak.total - saved_less, name


def test_what_helps_is_what_the_peak_is_made_of():
    states, activations = (diagnose(tracked(*STARTS[start])) for start in ("states", "activations"))
    assert states.peak.phase == "optimizer_step" and activations.peak.phase in (
        "forward",
        "backward",
    )
    assert {SMALLER, "checkpointing", MOVED} <= set(states.cannot_help)
    assert {SMALLER, "checkpointing", MOVED} <= set(activations.helps)
    assert activations.helps == [name for name in NAMES if name in activations.helps]
    assert FUSED in activations.cannot_help
    assert "in optimizer step: " in str(states)
    cannot = str(states).splitlines()[-1]
    assert cannot.startswith("What cannot: ") and SMALLER in cannot


def test_by_hand():
    """Two weights of 1 MiB each."""
    model = nn.Sequential(
        nn.Linear(512, 512, bias=False), nn.Tanh(), nn.Linear(512, 512, bias=False)
    )
    x = torch.randn(1024, 512)
    with MemoryTracker(model) as tracker:
        model(x).sum().backward()
    found, MiB = diagnose(tracker), 2**20
    at = found.peak.by_category
    loss = 8  # bytes of a scalar that was made outside of the layers, and its gradient
    assert found.lowest["checkpointing"] == found.peak.total - at["activations"] + loss
    assert found.lowest[SMALLER] == 4 * MiB  # weights and their gradients
    assert found.lowest[MOVED] == found.peak.total - at["activations"]
    assert found.lowest[FUSED] == found.peak.total and FUSED in found.cannot_help


def test_a_prediction_is_diagnosed_as_well():
    recipe = Recipe(optimizer="adamw-foreach")
    config = models.tiny_llama(layers=2, hidden=64, heads=4, vocab=4000).config
    predicted = predict(config, batch_size=1, seq_len=8, recipe=recipe, target="cpu")
    found = diagnose(predicted)
    assert found.peak == predicted.peak and "checkpointing" in found.cannot_help


# Whether a technique could help a program.
OFFERED = [
    (growth.losses_in_a_list, SGD, True),  # its optimizer is AdamW
    (weights.momentum_sgd, SGD, False),
    (tensors.classes_of_frames, CHUNKS, False),  # its loss takes whole rows
    (evaluations.larger_validation, SMALLER, False),
    (evaluations.teacher_of_the_whole_batch, SMALLER, False),
    (evaluations.chain_of_forwards_after_each_step, SMALLER, False),
]


@pytest.mark.parametrize(("program", "technique", "helps"), OFFERED)
def test_a_technique_is_offered_where_it_could_help(program, technique, helps):
    found = diagnose(program())
    assert (technique in found.helps, technique in found.cannot_help) == (helps, not helps)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("times", [2.2, 2.8, 3.6])
def test_where_adams_first_states_do_not_fit_sgd_is_offered_and_fused_is_not(times, fused):
    """Fused fails at the same allocation. By then, Adam may have made one state of one weight."""
    net = oom.Net(4096)
    optimizer = torch.optim.Adam(net.parameters(), foreach=False, fused=fused)
    budget = int(times * sum(p.nbytes for p in net.parameters()))
    with pytest.raises(BudgetExceeded) as caught, MemoryTracker(net, optimizer, budget=budget):
        net(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    found = diagnose(caught.value)
    assert found.peak.moment == "optimizer step"
    assert SGD in found.helps and FUSED in found.cannot_help
    assert found.causes[0].name == oom.FIRST_STEP
    assert "SGD keeps no states" in found.causes[0].remedy
    could = str(caught.value).partition("What could bring")[2].partition("What could not")[0]
    assert FUSED not in could and "SGD" in could


def ordinary_steps(net: nn.Module, optimizer) -> None:
    for _ in range(3):
        oom.stepped(net(torch.randn(64, 64)).square().mean(), optimizer)


def validation(net: nn.Module, optimizer) -> None:
    ordinary_steps(net, optimizer)
    with torch.no_grad():
        for _ in range(3):
            net(torch.randn(256, 64))


@pytest.mark.parametrize("what", [ordinary_steps, validation])
def test_after_a_reset_only_what_follows_counts(what):
    """As in a tracker that begins there."""
    net = oom.Net()
    optimizer = oom.adamw(net)
    ordinary_steps(net, optimizer)
    with MemoryTracker(net, optimizer) as begun_later:
        what(net, optimizer)
    with MemoryTracker(net, optimizer) as tracker:
        oom.stepped(net(torch.randn(2048, 64)).square().mean(), optimizer)
        with torch.no_grad():
            net(torch.randn(4096, 64))
        tracker.reset_peak()
        what(net, optimizer)
    found, expected = diagnose(tracker), diagnose(begun_later)
    assert found.peak.by_category == expected.peak.by_category
    assert found.lowest == expected.lowest
    found_causes = [(cause.name, cause.limit) for cause in found.causes]
    assert found_causes == [(cause.name, cause.limit) for cause in expected.causes]


def test_a_graph_from_before_the_reset_still_has_its_forward():
    net = oom.Net()
    optimizer = oom.adamw(net)
    with MemoryTracker(net, optimizer) as tracker:
        ordinary_steps(net, optimizer)
        kept = net(torch.randn(2048, 64))  # a graph that nothing uses
        tracker.reset_peak()
        ordinary_steps(net, optimizer)
        del kept
    assert oom.UNUSED in [cause.name for cause in diagnose(tracker).causes]


def test_a_reset_inside_a_forward_forgets_what_was_before_it():
    class Resets(nn.Module):
        def forward(self, x):
            torch.zeros(100_000)
            tracker.reset_peak()
            return (x * 2).sum()

    with MemoryTracker() as tracker, torch.no_grad():
        Resets()(torch.randn(1000))
    assert tracker.forwards[0].peak < 100_000 * 4


def test_what_has_no_peak_is_refused():
    with pytest.raises(TypeError, match="diagnose was given Linear: give a MemoryTracker"):
        diagnose(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="nothing was measured yet"):
        diagnose(MemoryTracker())


def test_an_ordinary_step_names_the_line_that_makes_most_of_it():
    net = nn.ModuleList([nn.Linear(8, 512), nn.Linear(512, 8)])
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x = torch.randn(2000, 8)
    with MemoryTracker(net, optimizer) as tracker:
        for _ in range(2):
            wide = net[0](x)
            narrow = net[1](wide)
            narrow.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            del wide, narrow
    said = str(diagnose(tracker))
    assert "This is an ordinary step." in said
    lines = Path(__file__).read_text().splitlines()
    number = lines.index("            wide = net[0](x)") + 1
    nbytes = 2000 * 512 * 4
    assert f"  {format_bytes(nbytes)} activations, held by wide" in said
    assert f"test_diagnosis.py:{number}" in said and "float32 2000 × 512" in said
