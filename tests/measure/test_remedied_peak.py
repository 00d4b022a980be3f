"""The peak that is promised with a remedy holds when the remedy is applied, whatever other moments
of the run need.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradmem_lib import MemoryTracker, diagnose
from gradmem_lib.measure.remedied_peak import peak_without


def mlp(width: int = 256, layers: int = 6) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(width, 1))


def train(model, optimizer, rows: int) -> None:
    model(torch.randn(rows, 256)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def validation_with_gradients(remedied: bool) -> MemoryTracker:
    """The steps after a validation need two thirds of what its graph needs."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(2):
            train(model, optimizer, rows=1024)
            with torch.no_grad() if remedied else nullcontext():
                score = model(torch.randn(1536, 256)).mean()
            del score
        train(model, optimizer, rows=1024)
    return tracker


def logits_of_one_batch(remedied: bool) -> MemoryTracker:
    """Beside one large loss over a vocabulary, the steps of another head have large activations."""
    model = nn.ModuleDict({"words": nn.Linear(64, 4096), "body": mlp()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pieces = 8 if remedied else 1
    with MemoryTracker(model, optimizer, live=False) as tracker:
        train(model["body"], optimizer, rows=768)
        x, y = torch.randn(512, 64), torch.randint(0, 4096, (512,))
        for piece, labels in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
            loss = nn.functional.cross_entropy(model["words"](piece), labels) / pieces
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad()
        train(model["body"], optimizer, rows=768)
    return tracker


def losses_kept_before_a_large_step(remedied: bool) -> MemoryTracker:
    """Losses of one step are added up, and an ordinary step of many rows comes later."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        total = 0
        for _ in range(4):
            loss = model(torch.randn(512, 256)).pow(2).mean()
            if remedied:
                loss.backward()
                del loss
            else:
                total = total + loss
        if not remedied:
            total.backward()
            del total, loss
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, rows=1280)
    return tracker


def data_beside_an_evaluation(remedied: bool) -> MemoryTracker:
    """All rows are on the device during the steps; an evaluation without them comes first."""
    model = mlp(layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        with torch.no_grad():
            model(torch.randn(4096, 256))
        if remedied:
            for _ in range(4):
                train(model, optimizer, rows=64)
            return tracker
        data = torch.zeros(16384, 256)
        for first in range(0, 256, 64):
            model(data[first : first + 64]).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


def best_weights_of_two_epochs(remedied: bool) -> MemoryTracker:
    """The second copy is made after the peak, and takes the place of the first one."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    best = {}
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for step in range(6):
            train(model, optimizer, rows=32)
            if step in (1, 3) and not remedied:
                best = {name: p.detach().clone() for name, p in model.named_parameters()}
    del best
    return tracker


def outputs_of_uneven_batches(remedied: bool) -> MemoryTracker:
    """Outputs are kept; the largest of them belongs to a step that needs it."""
    model = nn.Linear(256, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept = []
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for rows in (512, 512, 1280, *([512] * 8), 768):
            outputs = model(torch.randn(rows, 256))
            outputs.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(outputs.mean().item() if remedied else outputs.detach())
            del outputs
    return tracker


def models_of_rounds_of_other_sizes(remedied: bool) -> MemoryTracker:
    """Each round trains a model for several steps. The second round has the largest batches, and
    needs its own model in all of them.
    """
    kept = []
    with MemoryTracker(live=False) as tracker:
        for rows in (64, 800, 64, 64, 64, 64, 64, 64, 64):
            model = mlp()
            optimizer = torch.optim.Adam(model.parameters())
            for _ in range(3):
                train(model, optimizer, rows)
            if not remedied:
                kept.append(model)
    return tracker


def optimizers_of_rounds(remedied: bool) -> MemoryTracker:
    """A new optimizer in each round, and the first ones are kept with their states."""
    model, kept = mlp(), []
    with MemoryTracker(model, live=False) as tracker:
        for rows in (64, 1200, 64, 64, 64, 64, 64):
            optimizer = torch.optim.Adam(model.parameters())
            for _ in range(3):
                train(model, optimizer, rows)
            if not remedied:
                kept.append(optimizer)
    return tracker


def logits_of_few_tokens(remedied: bool) -> MemoryTracker:
    """The backward of each piece makes a gradient of the whole head, larger than its logits."""
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 4096, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)

    def loss_of(hidden, labels):
        logits = model[1](hidden)
        return nn.functional.cross_entropy(logits, labels, reduction="sum") / 192

    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(3):
            hidden, labels = model[0](torch.randn(192, 64)), torch.randint(0, 4096, (192,))
            if remedied:
                parts = zip(hidden.chunk(8), labels.chunk(8), strict=True)
                losses = [checkpoint(loss_of, *part, use_reentrant=False) for part in parts]
                loss = sum(losses)
                del losses
            else:
                loss = loss_of(hidden, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss, hidden
    return tracker


def _validation(model: nn.Module, remedied: bool) -> MemoryTracker:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(2):
            train(model, optimizer, rows=16)
            with torch.no_grad() if remedied else nullcontext():
                score = model(torch.randn(1024, 256)).mean()
            del score
    return tracker


def chain(layers: int = 8) -> nn.Sequential:
    """Layers that keep one tensor each for a backward."""
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(256, 1))


def rollouts_before_updates(remedied: bool) -> MemoryTracker:
    """A policy acts for some time, with gradients, before it is trained on what it has seen."""
    policy = mlp(layers=3)
    optimizer = torch.optim.Adam(policy.parameters())
    with MemoryTracker(policy, optimizer, live=False) as tracker:
        for _ in range(3):
            scores = []
            for _ in range(24):
                with torch.no_grad() if remedied else nullcontext():
                    scores.append(policy(torch.randn(128, 256)))
            for _ in range(2):
                train(policy, optimizer, rows=256)
    return tracker


@pytest.mark.parametrize(
    "program",
    [
        validation_with_gradients,
        logits_of_one_batch,
        losses_kept_before_a_large_step,
        data_beside_an_evaluation,
        best_weights_of_two_epochs,
        outputs_of_uneven_batches,
        models_of_rounds_of_other_sizes,
        optimizers_of_rounds,
        logits_of_few_tokens,
        rollouts_before_updates,
    ],
    ids=lambda program: program.__name__,
)
def test_the_promised_peak_holds_beside_other_moments(program):
    before = diagnose(program(remedied=False))
    cause = before.causes[0]
    promised, _ = peak_without(cause, before.facts)
    measured = program(remedied=True).peak.total
    assert measured <= promised <= before.peak.total, before


def test_much_is_promised_of_many_forwards():
    before = diagnose(rollouts_before_updates(remedied=False))
    promised, _ = peak_without(before.causes[0], before.facts)
    assert promised < 0.7 * before.peak.total, before


def test_a_chain_with_a_scripted_part_is_diagnosed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        encoder = torch.jit.script(chain())
    before = diagnose(_validation(nn.Sequential(encoder, nn.Linear(1, 1)), remedied=False))
    assert "A forward's graph is never used" in [cause.name for cause in before.causes]


def test_a_copy_that_is_replaced_after_the_peak_is_taken_away_as_well():
    before = diagnose(best_weights_of_two_epochs(remedied=False))
    promised, _ = peak_without(before.causes[0], before.facts)
    assert promised == best_weights_of_two_epochs(remedied=True).peak.total


def test_a_batch_that_a_kept_graph_needs_is_no_data_that_waits():
    model = mlp(layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    penalty = 0
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(10):
            x = torch.randn(256, 256)
            loss = model(x).square().mean()
            penalty = penalty + model(x[:64]).abs().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
    names = [cause.name for cause in diagnose(tracker).causes]
    assert names[0] == "Bytes grow from step to step"
    assert "Data waits on the device" not in names
