"""A training that is stopped between a forward and its backward is not told that its graph or its
gradients are for nothing: what would have come is not known. An evaluation's graph is still named.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from support.nightly import each
from support.programs import adamw, mlp
from torch import nn

from gradmem_lib import MemoryTracker, diagnose
from gradmem_lib.run.tracking import ScriptTracker

ROWS = 512
UNUSED = "A forward's graph is never used"


class StopAt:
    """Presses Ctrl-C at its ``number``-th call; 0: never."""

    def __init__(self, number: int):
        self.left = number

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def gan(stop, critic_steps=1):
    """The generator's graph waits while the critic steps."""
    generator, critic = mlp(16, 64, 64, 32), mlp(32, 64, 64, 1)
    of_generator, of_critic = adamw(generator), adamw(critic)
    for _ in range(3):
        fake = generator(torch.randn(ROWS, 16))
        stop()
        for _ in range(critic_steps):
            loss = critic(fake.detach()).mean() - critic(torch.randn(ROWS, 32)).mean()
            stop()
            of_critic.zero_grad()
            loss.backward()
            of_critic.step()
        loss = -critic(fake).mean()
        stop()
        of_generator.zero_grad()
        loss.backward()
        of_generator.step()


def wasserstein(stop):
    gan(stop, critic_steps=4)


def views(stop):
    """Several forwards by one line, and one loss that compares their outputs."""
    model = mlp(32, 64, 64, 8)
    optimizer = adamw(model)
    for _ in range(3):
        z = [model(torch.randn(ROWS, 32)) for _ in range(5)]
        stop()
        sum((a - b).square().mean() for a in z for b in z).backward()
        optimizer.step()
        optimizer.zero_grad()


def rare_steps(stop):
    """The head steps after each window, the encoder after every second one."""
    encoder, head = mlp(32, 64, 64, 8), nn.Linear(8, 4)
    of_encoder, of_head = adamw(encoder), adamw(head)
    for window in range(4):
        for _ in range(2):
            labels = torch.randint(0, 4, (ROWS,))
            loss = F.cross_entropy(head(encoder(torch.randn(ROWS, 32))), labels)
            stop()
            loss.backward()
        of_head.step()
        of_head.zero_grad()
        if window % 2:
            of_encoder.step()
            of_encoder.zero_grad()


PROGRAMS = [gan, wasserstein, views, rare_steps]


def measured(program, number: int) -> ScriptTracker:
    """``program`` under the tracker of ``gradmem run``, until its call of that number."""
    tracker = ScriptTracker(None)
    tracker.__enter__()
    error = None
    try:
        program(StopAt(number))
    except KeyboardInterrupt as raised:
        error = raised
    tracker.end(error)
    return tracker


def causes(tracker) -> list[str]:
    return [cause.name for cause in diagnose(tracker).causes]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("number", range(8))
def test_what_would_have_come_is_not_known(program, number):
    """Nor has the whole program such a cause."""
    assert causes(measured(program, number)) == []


@pytest.mark.parametrize(
    ("program", "steps"), each(4, itertools.product([gan, wasserstein, rare_steps], range(1, 5)), 2)
)
def test_after_the_given_steps_a_script_goes_on(program, steps):
    tracker = ScriptTracker(None)
    tracker.meter.limit = steps
    tracker.meter.at_limit = lambda: tracker.end(goes_on=True)
    tracker.__enter__()
    program(StopAt(0))
    assert tracker.steps == steps
    assert causes(tracker) == []


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_a_tracker_knows_the_optimizers_of_a_block_that_is_stopped(number):
    with pytest.raises(KeyboardInterrupt), MemoryTracker() as tracker:
        gan(StopAt(number))
    assert causes(tracker) == []


def evaluates(stop):
    """An evaluation after a training, whose outputs keep their graphs."""
    model = mlp(32, 64, 64, 8)
    optimizer = adamw(model)
    for _ in range(3):
        F.mse_loss(model(torch.randn(ROWS, 32)), torch.randn(ROWS, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    outputs = []
    for _ in range(4):
        outputs.append(model(torch.randn(4 * ROWS, 32)))
        stop()


@pytest.mark.parametrize("number", [1, 3])
def test_an_evaluation_with_a_graph_is_named_though_the_run_is_stopped_in_it(number):
    assert causes(measured(evaluates, number))[:1] == [UNUSED]


def test_an_evaluation_that_calls_the_training_s_function_is_not_the_training():
    """One function computes the loss of both; the evaluation keeps graphs and is stopped."""
    model = mlp(64, 256, 256, 1)
    optimizer = adamw(model)

    def loss_of(rows: int) -> torch.Tensor:
        return model(torch.randn(rows, 64)).square().mean()

    with pytest.raises(KeyboardInterrupt), MemoryTracker(model, optimizer) as tracker:
        for _ in range(3):
            loss_of(ROWS).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        losses = []
        stop = StopAt(6)
        while True:
            losses.append(loss_of(ROWS))
            stop()
    assert causes(tracker)[0] == UNUSED
    assert "Losses are added up before one backward" not in causes(tracker)
