"""Bytes that grow from a late step on, and what only looks like it."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import nn

from gradmem_lib import MemoryTracker, diagnose
from gradmem_lib.measure.causes_of_growth import GROWTH
from gradmem_lib.measure.remedied_peak import peak_without

STEPS = 16


def run(keep, optimizer_class=torch.optim.Adam, evaluate_every=0) -> MemoryTracker:
    """Training steps. ``keep(i, outputs)`` is called at the end of each, with its outputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    optimizer = optimizer_class(model.parameters(), lr=1e-3)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for i in range(STEPS):
            out = model(torch.randn(256, 64))
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            keep(i, out.detach())
            del out
    return tracker


def after_a_warm_up():
    kept = []

    def keep(i, out):
        if i >= 4:
            kept.append(out.clone())

    return keep


def from_the_first_evaluation_on():
    """A best score is known from the first evaluation on; worse outputs are kept."""
    kept, evaluations = {}, []

    def keep(i, out):
        if i % 5 == 4:
            evaluations.append(out.abs().max().item())
        if evaluations:
            kept[i] = out.clone()

    return keep


def every_second_step_late():
    kept = []

    def keep(i, out):
        if i > 6 and i % 2:
            kept.append(out * 2)

    return keep


def joined_late():
    history = []

    def keep(i, out):
        if i == 5:
            history.append(out.clone())
        if i > 5:
            history[0] = torch.cat([history[0], out])

    return keep


def late_window():
    kept = deque(maxlen=4)

    def keep(i, out):
        if i >= 6:
            kept.append(out.clone())

    return keep


def full_replay_buffer():
    kept = deque(maxlen=8)
    return lambda i, out: kept.append(out.clone())


def cache_that_stops():
    kept = {}

    def keep(i, out):
        if 4 <= i < 9:
            kept[i] = out.clone()

    return keep


def buffer_made_late():
    made = []

    def keep(i, out):
        if i == 6:
            made.append(torch.zeros(4096, 64))
        if made:
            made[0][i * 256 : (i + 1) * 256] = out

    return keep


def snapshots_that_are_replaced():
    """Every third step puts a new tensor in the place of the one before the last."""
    kept = deque(maxlen=3)

    def keep(i, out):
        if i > 3 and i % 3 == 0:
            kept.append(out.clone())

    return keep


def variables_of_three_steps():
    state = {}

    def keep(i, out):
        state["oldest"], state["old"] = state.get("old"), state.get("new")
        state["new"] = out.clone()

    return keep


@pytest.mark.parametrize(
    "program",
    [after_a_warm_up, from_the_first_evaluation_on, every_second_step_late, joined_late],
    ids=lambda program: program.__name__,
)
def test_a_leak_that_begins_late_is_named(program):
    before = diagnose(run(program()))
    cause = before.causes[0]
    assert cause.name == GROWTH, before
    ordinary = run(lambda i, out: None).peak.total
    assert ordinary <= peak_without(cause, before.facts)[0] < before.peak.total


@pytest.mark.parametrize(
    "program",
    [
        late_window,
        full_replay_buffer,
        cache_that_stops,
        buffer_made_late,
        snapshots_that_are_replaced,
        variables_of_three_steps,
    ],
    ids=lambda program: program.__name__,
)
def test_what_does_not_go_on_for_ever_is_no_leak(program):
    assert GROWTH not in [cause.name for cause in diagnose(run(program())).causes]


def heads_of_rounds(tracked: bool, keeps: bool) -> MemoryTracker:
    """Each round trains a head of its own, and a body that all rounds share."""
    torch.manual_seed(0)
    body, kept = nn.Linear(64, 128), []
    with MemoryTracker(body if tracked else None, live=False) as tracker:
        for i in range(STEPS):
            if i % 2 == 0:
                head = nn.Linear(128, 256)
                optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()])
                if keeps:
                    kept.append(head)
            head(body(torch.randn(8, 64))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


@pytest.mark.parametrize("tracked", [True, False])
def test_models_of_earlier_rounds_are_named_beside_one_in_use(tracked):
    before = diagnose(heads_of_rounds(tracked, keeps=True))
    cause = before.causes[0]
    assert cause.name == GROWTH and "weights of earlier rounds" in cause.remedy
    assert cause.nbytes >= 6 * 4 * (128 * 256 + 256)
    measured = heads_of_rounds(tracked, keeps=False).peak.total
    assert measured <= peak_without(cause, before.facts)[0] < before.peak.total
