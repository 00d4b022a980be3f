"""Weights that are there twice: averages in a dict, with and without a graph, target networks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradmem_lib import MemoryTracker, diagnose
from gradmem_lib.measure.remedied_peak import peak_without

COPIED = "The weights are there more than once"
SECOND = "A second model is in memory"
DATA = "Data waits on the device"
LEFT = "Tensors of the step before are still there"
STAY = "Forwards stay in memory after their own backward"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = []
    for _ in range(6):  # of one shape: a dict of their clones looks like a list of batches
        layers += [nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*layers)


def clones(model, detach=True):
    if detach:
        return {name: p.detach().clone() for name, p in model.named_parameters()}
    return {name: p.clone() for name, p in model.named_parameters()}


@torch.no_grad()
def in_place(model, average):
    for name, parameter in model.named_parameters():
        average[name].lerp_(parameter, 0.1)


@torch.no_grad()
def replaced(model, average):
    for name, parameter in model.named_parameters():
        average[name] = average[name] * 0.9 + parameter * 0.1


def replaced_with_a_graph(model, average):
    for name, parameter in model.named_parameters():
        average[name] = average[name].detach() * 0.9 + parameter * 0.1


def average_of(update, made_before=False, detach=True, steps=5) -> MemoryTracker:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    average = clones(model, detach) if made_before else None
    with MemoryTracker(model, optimizer, live=False) as tracker:
        if average is None:
            average = clones(model, detach)
        for _ in range(steps):
            model(torch.randn(64, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if update is not None:
                update(model, average)
    return tracker


def without_an_average() -> int:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(5):
            model(torch.randn(64, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker.peak.total


@pytest.mark.parametrize("update", [in_place, replaced])
@pytest.mark.parametrize("made_before", [False, True], ids=["made in the run", "made before"])
def test_an_average_in_a_dict_is_a_copy_of_the_weights(update, made_before):
    before = diagnose(average_of(update, made_before))
    names = [cause.name for cause in before.causes]
    assert names[0] == COPIED, before
    assert not {DATA, LEFT} & set(names)
    weights = sum(p.nbytes for p in net().parameters())
    assert before.causes[0].nbytes >= 0.99 * weights
    assert "averaged weights" in before.causes[0].remedy or "EMA" in before.causes[0].remedy
    promised, _ = peak_without(before.causes[0], before.facts)
    assert without_an_average() <= promised


@pytest.mark.parametrize("update", [None, in_place, replaced_with_a_graph])
@pytest.mark.parametrize("made_before", [False, True], ids=["made in the run", "made before"])
def test_an_average_with_a_graph_is_no_rest_of_a_step(update, made_before):
    """Where its own turn is over, it is a copy of the weights, and not left over."""
    before = diagnose(average_of(update, made_before, detach=False))
    names = [cause.name for cause in before.causes]
    assert not {DATA, LEFT, STAY} & set(names)
    kept = 0
    for holder in before.facts.at_peak:
        is_older = holder.turn < before.peak.turn and not holder.module
        if is_older and holder.category == "activations":
            kept += holder.nbytes
    if kept > 1000:  # more than a loss
        assert names[0] == COPIED


def student_beside_a_teacher(layers: int, outputs: int, teachers: int = 1) -> MemoryTracker:
    """The student has three layers and a head of 64 outputs."""

    def mlp(layers, outputs):
        blocks = []
        for _ in range(layers):
            blocks += [nn.Linear(256, 256), nn.GELU()]
        return nn.Sequential(*blocks, nn.Linear(256, outputs))

    torch.manual_seed(0)
    student = mlp(3, 64)
    others = [mlp(layers, outputs).requires_grad_(False) for _ in range(teachers)]
    optimizer = torch.optim.SGD(student.parameters(), lr=0.01)
    with MemoryTracker(student, optimizer, live=False) as tracker:
        for _ in range(4):
            x = torch.randn(16, 256)
            with torch.no_grad():
                targets = sum(other(x)[:, :8] for other in others)
            (student(x)[:, :8] - targets).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


@pytest.mark.parametrize(("layers", "outputs"), [(8, 64), (4, 64), (6, 64), (3, 60), (8, 8)])
def test_a_teacher_with_other_layers_is_a_second_model_and_no_copy(layers, outputs):
    tracker = student_beside_a_teacher(layers, outputs)
    causes = {cause.name: cause for cause in diagnose(tracker).causes}
    assert COPIED not in causes
    weights = 4 * (layers * (256 * 256 + 256) + outputs * 256 + outputs)
    assert causes[SECOND].nbytes == weights


@pytest.mark.parametrize("teachers", [1, 2])
def test_a_teacher_of_the_same_shapes_is_a_copy(teachers):
    tracker = student_beside_a_teacher(3, 64, teachers)
    causes = {cause.name: cause for cause in diagnose(tracker).causes}
    assert SECOND not in causes
    assert causes[COPIED].nbytes == 4 * teachers * (3 * (256 * 256 + 256) + 64 * 256 + 64)
    assert ("a second copy" if teachers == 1 else "2 more copies") in causes[COPIED].evidence
