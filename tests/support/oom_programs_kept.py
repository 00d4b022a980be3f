"""Small programs of people who ran out of memory around the step: metrics, pictures, copies for an
average, loaders, rollouts.

As in ``oom_programs``, each returns its tracker, and does with ``remedied=True`` what the diagnosis
tells it to. What was expected of each was written down before its first run: ``EXPECTED``.
"""

from __future__ import annotations

import copy
from collections import deque

import torch
import torch.nn.functional as F
from support.oom_programs import Net, adamw, sgd
from support.oom_programs_around import trained
from support.oom_programs_of_loops import updated
from torch import nn
from torch.optim.swa_utils import AveragedModel

from gradmem_lib import MemoryTracker

# Results that stay


class CatMetric:
    """A metric that joins the values of all batches at the end, and that nobody resets."""

    def __init__(self, remedied: bool):
        self.remedied, self.values = remedied, []

    def update(self, value: torch.Tensor) -> None:
        self.values.append(value.tolist() if self.remedied else value)


def metric_over_epochs(remedied=False):
    """Epochs of training and validation, with one metric for all of them."""
    net, x, held_out = Net(64), torch.randn(64, 64), torch.randn(512, 64)
    optimizer, metric = sgd(net), CatMetric(remedied)

    def epoch(i):
        updated(net(x).square().mean(), optimizer)
        with torch.no_grad():
            for part in held_out.split(128):
                metric.update(net(part).softmax(-1))

    return trained(net, optimizer, epoch, steps=6)


def pictures_of_samples(remedied=False):
    """Every second step, samples of a generator for a picture."""
    net, noise, pictures = Net(64), torch.randn(256, 64), []
    optimizer = sgd(net)

    def step(i):
        updated(net(torch.randn(64, 64)).square().mean(), optimizer)
        if i % 2 == 0:
            with torch.no_grad():
                samples = net(noise).sigmoid()
            pictures.append(samples.tolist() if remedied else samples)

    return trained(net, optimizer, step, steps=12)


def feature_bank(remedied=False):
    """Features of all training rows for a nearest-neighbour evaluation, which stay in memory."""
    net = Net(64)
    optimizer = sgd(net)
    bank = []

    def epoch(i):
        with torch.no_grad():
            for _ in range(16):
                features = net(torch.randn(256, 64))
                bank.append(features.tolist() if remedied else features)
        for _ in range(2):
            updated(net(torch.randn(256, 64)).square().mean(), optimizer)

    return trained(net, optimizer, epoch, steps=1)


def maps_of_classes(remedied=False):
    """Grad-CAM: a hook keeps the activations of each image for a picture."""
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 10, 3, padding=1))
    kept = []

    def keep(module, inputs, output):
        kept.append(output.mean().item() if remedied else output)

    net[1].register_forward_hook(keep)
    with MemoryTracker(net, live=False) as tracker:
        for _ in range(8):
            net(torch.randn(4, 3, 32, 32)).mean((2, 3))[:, 0].sum().backward()
            net.zero_grad()
    return tracker


# Copies


def rate_finder(remedied=False):
    """A search for a learning rate, which restores the model and the optimizer afterwards."""
    net, x = Net(1024), torch.randn(16, 64)
    optimizer = adamw(net)
    with MemoryTracker(net, optimizer, live=False) as tracker:
        updated(net(x).square().mean(), optimizer)
        if not remedied:
            before = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
        for _ in range(4):
            updated(net(x).square().mean(), optimizer)
        if not remedied:
            net.load_state_dict(before[0])
    return tracker


def swa_average(remedied=False):
    """``remedied``: the average is not on the card."""
    net, x = Net(1024), torch.randn(16, 64)
    optimizer = sgd(net)
    average = None if remedied else AveragedModel(net)

    def step(i):
        updated(net(x).square().mean(), optimizer)
        if not remedied:
            average.update_parameters(net)

    return trained(net, optimizer, step, steps=4)


def half_weights_for_a_file(remedied=False):
    """Weights are rounded to half for a file. ``remedied``: one after another."""
    net, x = Net(2048), torch.randn(16, 64)
    optimizer = sgd(net)

    def step(i):
        updated(net(x).square().mean(), optimizer)
        if remedied:
            for value in net.state_dict().values():
                value.half().tolist()
        else:
            rounded = {name: value.half() for name, value in net.state_dict().items()}
            for value in rounded.values():
                value.tolist()

    return trained(net, optimizer, step, steps=2)


def best_weights_so_far(remedied=False):
    """Early stopping, which copies the weights whenever the loss is lower."""
    net, x = Net(1024), torch.randn(16, 64)
    optimizer = sgd(net)
    best = {}

    def step(i):
        updated(net(x).square().mean(), optimizer)
        if not remedied:
            best["weights"] = copy.deepcopy(net.state_dict())

    return trained(net, optimizer, step, steps=4)


def snapshot_ensemble(remedied=False):
    """Models of several epochs vote together."""
    net, x = Net(512), torch.randn(16, 64)
    optimizer = sgd(net)
    members = []

    def epoch(i):
        updated(net(x).square().mean(), optimizer)
        if not remedied:
            members.append(copy.deepcopy(net))
        with torch.no_grad():
            for member in members:
                member(x)

    return trained(net, optimizer, epoch, steps=5)


# Data


def prefetched_batches(remedied=False):
    """A loader that is eight batches ahead. ``remedied``: one ahead."""
    net = Net(64)
    optimizer = sgd(net)
    ahead = deque(torch.randn(512, 64) for _ in range(0 if remedied else 8))

    def step(i):
        ahead.append(torch.randn(512, 64))
        x = ahead.popleft()
        updated(net(x).square().mean(), optimizer)

    return trained(net, optimizer, step, steps=12)


def cached_logits_of_a_teacher(remedied=False):
    """Distillation from logits that were computed once, for all rows."""
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 128))
    optimizer = sgd(net)
    logits = torch.randn(8192, 128)

    def step(i):
        rows = torch.randint(0, 8192, (32,))
        wanted = torch.randn(32, 128) if remedied else logits[rows]
        updated(F.mse_loss(net(torch.randn(32, 64)), wanted), optimizer)

    return trained(net, optimizer, step, steps=4)


# Graphs and gradients


def curvature_by_signs():
    """Hutchinson's diagonal of the Hessian, an ordinary second derivative. Expected was that its
    graphs are named, but no line of it can go: only a smaller batch helps.
    """
    net, x = Net(), torch.randn(512, 64)
    optimizer = sgd(net)

    def step(i):
        parameters = list(net.parameters())
        loss = net(x).square().mean()
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        signs = [2 * torch.randint_like(gradient, 2) - 1 for gradient in gradients]
        torch.autograd.grad(gradients, parameters, signs)
        optimizer.step()

    return trained(net, optimizer, step, steps=3)


def gradients_of_micro_batches(remedied=False):
    """The noise of the gradient, from a copy for each micro-batch. ``remedied``: a running sum."""
    net, x = Net(512), torch.randn(16, 64)
    optimizer = sgd(net)

    def step(i):
        copies, squares = [], 0.0
        for _ in range(6):
            net(x).square().mean().backward()
            gradients = [parameter.grad for parameter in net.parameters()]
            if remedied:
                squares += sum(gradient.norm().item() ** 2 for gradient in gradients)
            else:
                copies.append([gradient.clone() for gradient in gradients])
        optimizer.step()
        optimizer.zero_grad()

    return trained(net, optimizer, step, steps=2)


def rollout_with_graph(remedied=False):
    """A rollout whose log-probabilities keep their graphs; the update computes them again."""
    policy = Net(256)
    optimizer = sgd(policy)

    def step(i):
        states, old = [], []
        for _ in range(8):
            state = torch.randn(128, 64)
            states.append(state)
            with torch.set_grad_enabled(not remedied):
                old.append(policy(state).log_softmax(-1)[:, 0])
        for state, before in zip(states, old, strict=True):
            ratio = policy(state).log_softmax(-1)[:, 0] - before.detach()
            updated(-ratio.exp().mean(), optimizer)

    return trained(policy, optimizer, step, steps=3)


def summed_losses():
    """A sum of losses with their graphs: each graph is free after its backward, so all is well."""
    net, x = Net(), torch.randn(512, 64)
    optimizer = sgd(net)
    total = 0

    def step(i):
        nonlocal total
        loss = net(x).square().mean()
        updated(loss, optimizer)
        total = total + loss

    return trained(net, optimizer, step, steps=8)


# The first cause, a part of the line that is shown first, and words of the remedy.
GROWS = "Bytes grow from step to step"
COPIED = "The weights are there more than once"
DATA = "Data waits on the device"
EXPECTED = {
    metric_over_epochs: (GROWS, "metric.update(", ".detach().cpu()"),
    pictures_of_samples: (GROWS, "samples = net(noise)", ".detach().cpu()"),
    feature_bank: (
        "Results of an evaluation stay during the training",
        "features = net(",
        "outputs.cpu()",
    ),
    maps_of_classes: (GROWS, "net(torch.randn(4, 3, 32, 32))", ".detach().cpu()"),
    rate_finder: (COPIED, "before = copy.deepcopy", "parameter.detach().cpu()"),
    swa_average: (COPIED, "average.update_parameters(net)", "on the host"),
    half_weights_for_a_file: (COPIED, "rounded = {", ".cpu()"),
    best_weights_so_far: (COPIED, "copy.deepcopy(net.state_dict())", ".cpu()"),
    # expected as copies of the weights, which is the second cause
    snapshot_ensemble: (GROWS, "members.append(copy.deepcopy(net))", ".cpu()"),
    prefetched_batches: (DATA, "torch.randn(512, 64)", "one batch at a time"),
    cached_logits_of_a_teacher: (DATA, "logits[rows]", "one batch at a time"),
    gradients_of_micro_batches: (
        "The gradients are there more than once",
        "copies.append(",
        "running sum",
    ),
    rollout_with_graph: ("A forward's graph is never used", "old.append(policy", "torch.no_grad()"),
}
