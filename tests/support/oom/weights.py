"""Weights, gradients and states that are there more than once, or wider than they need to be.

Each program returns its tracker, and does with ``remedied=True`` what the diagnosis tells it to.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from support.oom import (
    COPIED,
    DOUBLE,
    FIRST_STEP,
    FOR_NOBODY,
    GRADIENTS,
    ONE_LINE,
    SECOND,
    WAIT,
    WIDE,
    Net,
    adamw,
    has,
    sgd,
    stepped,
    trained,
    trains,
    updated,
)
from torch import nn

from gradmem_lib import MemoryTracker


@torch.no_grad()
def average(copies, net):
    for name, mine in copies.items():
        mine.lerp_(net.get_parameter(name), 0.1)


def copied(copy_of, remedied, is_averaged=True, made_before=False):
    """Layers of one shape: a dict of their copies looks like a list of batches."""
    layers = []
    for _ in range(6):
        layers += [nn.Linear(64, 64), nn.ReLU()]
    net = nn.Sequential(*layers)
    optimizer, x = sgd(net), torch.randn(16, 64)

    def copies():
        return {} if remedied else {name: copy_of(p) for name, p in net.named_parameters()}

    kept = copies() if made_before else None
    with MemoryTracker(net, optimizer) as tracker:
        if not made_before:
            kept = copies()
        for _ in range(5):
            stepped(net(x).square().mean(), optimizer)
            if is_averaged:
                average(kept, net)
        del kept
    return tracker


@has(COPIED, says="EMA")
def average_in_place(remedied=False):
    return copied(lambda p: p.detach().clone(), remedied)


@has(COPIED, says="EMA")
def average_with_a_graph_from_before(remedied=False):
    return copied(torch.clone, remedied, made_before=True)


@has()
def copy_with_a_graph():
    """In its own turn, a forward may have used it."""
    return copied(torch.clone, remedied=False, is_averaged=False)


class Preferences(nn.Module):
    """The trained model and its reference, as parts of one module."""

    def __init__(self):
        super().__init__()
        self.policy = Net(2048)
        self.reference = copy.deepcopy(self.policy)


def of_preferences(both, expected=None):
    optimizer, x = adamw(both.policy), torch.randn(16, 64)

    def step(i):
        with torch.no_grad():
            goal = expected if expected is not None else both.reference(x)
        updated(F.mse_loss(both.policy(x), goal), optimizer)

    return trained(both, optimizer, step, steps=2)


@has(COPIED, FIRST_STEP, says="compute its outputs once")
def reference_in_the_model(remedied=False):
    both = Preferences()
    both.reference.requires_grad_(False)
    if not remedied:
        return of_preferences(both)
    with torch.no_grad():
        expected = both.reference(torch.randn(16, 64))
    del both.reference
    return of_preferences(both, expected)


@has()
def targets_like_a_weight(bias=False):
    """As many rows as features: inputs, targets and the weight have one shape."""
    net = nn.Linear(256, 256, bias=bias)
    x, y = torch.randn(256, 256), torch.randn(256, 256)
    return trains(net, lambda i: F.mse_loss(net(x), y))


@has(COPIED)
def sharpness_aware(remedied=False):
    """SAM (arXiv:2010.01412): a step up along the gradient, whose gradient is then used.
    ``remedied``: the weights that it goes back to are not on the card.
    """
    net, x = Net(1024), torch.randn(64, 64)
    optimizer = sgd(net)

    def step(i):
        net(x).square().mean().backward()
        kept = []
        with torch.no_grad():
            for p in net.parameters():
                kept.append(p.tolist() if remedied else p.clone())
                p.add_(0.05 * p.grad)
        optimizer.zero_grad()
        net(x).square().mean().backward()
        for p, weight in zip(net.parameters(), kept, strict=True):
            if remedied:
                weight = torch.tensor(weight)
            p.data = weight
        optimizer.step()
        optimizer.zero_grad()

    return trained(net, optimizer, step, steps=3)


@has(ONE_LINE)
def noise_of_the_weights_shapes(remedied=False):
    """Evolution: random numbers for all weights, made again in each step. ``remedied``: for one
    weight after another.
    """
    net, x = Net(1024), torch.randn(16, 64)
    groups = [list(net.parameters())]
    if remedied:
        groups = [[parameter] for parameter in net.parameters()]
    with MemoryTracker(net) as tracker, torch.no_grad():
        for _ in range(4):
            for some in groups:
                noise = [2 * torch.randn_like(parameter) for parameter in some]
                for parameter, change in zip(some, noise, strict=True):
                    parameter += change
            net(x)
    return tracker


@has(SECOND)
def teacher(remedied=False):
    student, x = Net(), torch.randint(0, 4096, (4, 8))
    other = nn.Sequential(nn.Embedding(4096, 64), nn.Linear(64, 512)).requires_grad_(False)
    if remedied:
        other = other.to(torch.bfloat16)

    def loss(i):
        with torch.no_grad():
            other(x)
        return student(torch.randn(8, 64)).sum()

    return trains(student, loss, steps=2)


@has(FIRST_STEP)
def first_step(remedied=False, steps=2, given=False):
    net = Net(4096)
    optimizer = sgd(net) if remedied else adamw(net)
    x, y = torch.randn(8, 64), torch.randn(8, 64)

    def run():
        stepped(F.mse_loss(net(x), y), optimizer)

    if given:
        run()
    with MemoryTracker(net, optimizer) as tracker:
        for _ in range(steps):
            run()
    return tracker


def momentum_sgd():
    net, x = Net(1024), torch.randn(16, 64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)

    def step(i):
        updated(net(x).square().mean(), optimizer)

    return trained(net, optimizer, step, steps=2)


@has(DOUBLE, says="model.float()")
def double_weights(remedied=False):
    net = Net(4096) if remedied else Net(4096).double()
    x = torch.randn(8, 64, dtype=net.body[0].weight.dtype)
    with MemoryTracker(net) as tracker:
        for _ in range(2):
            net(x).sum().backward()
            net.zero_grad()
    return tracker


@has(WIDE)
def frozen_float32(remedied=False):
    net = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 64), nn.Linear(64, 2))
    net[0].requires_grad_(False)
    net[2].requires_grad_(False)
    x = torch.randn(8, 64)
    if remedied:
        net, x = net.bfloat16(), x.bfloat16()
    with MemoryTracker(net) as tracker:
        for _ in range(2):
            net(x).sum().backward()
    return tracker


@has(GRADIENTS, line="copies.append(", says="running sum")
def gradients_of_samples(remedied=False):
    """The noise of the gradient, from a row for each sample. ``remedied``: a running sum."""
    net, x = Net(512), torch.randn(1, 64)
    optimizer = sgd(net)

    def step(i):
        copies, squares = [], 0.0
        for _ in range(64):
            net(x).square().mean().backward()
            gradients = [parameter.grad for parameter in net.parameters()]
            if remedied:
                squares += sum(gradient.norm().item() ** 2 for gradient in gradients)
            else:
                copies.append(torch.cat([gradient.flatten() for gradient in gradients]))
        optimizer.step()
        optimizer.zero_grad()

    return trained(net, optimizer, step, steps=2)


@has(GRADIENTS)
def norm_of_all_gradients(remedied=False):
    """``remedied``: of one gradient after another."""
    net, x = Net(2048), torch.randn(16, 64)
    optimizer = sgd(net)

    def step(i):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        gradients = [p.grad for p in net.parameters()]
        if remedied:
            torch.stack([gradient.norm() for gradient in gradients]).norm()
        else:
            torch.cat([gradient.flatten() for gradient in gradients]).norm()
        optimizer.step()

    return trained(net, optimizer, step, steps=3)


@has(GRADIENTS)
def gradients_in_two_dtypes(remedied=False):
    """Weights in bf16, and float32 copies that the optimizer trains."""
    net, x = Net(2048).bfloat16(), torch.randn(16, 64).bfloat16()
    masters = [p.detach().float().requires_grad_() for p in net.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1, foreach=False)

    def step(i):
        net(x).float().square().mean().backward()
        for master, parameter in zip(masters, net.parameters(), strict=True):
            master.grad = parameter.grad.float()
            if remedied:
                parameter.grad = None
        optimizer.step()
        net.zero_grad()
        optimizer.zero_grad()

    return trained(net, optimizer, step, steps=3)


@has(FOR_NOBODY)
def head_alone_in_the_optimizer(remedied=False):
    body, head = Net(1024), nn.Linear(64, 2)
    if remedied:
        body.requires_grad_(False)
    x = torch.randn(64, 64)
    optimizer = adamw(head)

    def step(i):
        stepped(head(body(x)).square().mean(), optimizer)

    return trained(nn.Sequential(body, head), optimizer, step, steps=3)


@has(WAIT, says="right after optimizer.step()")
def gradients_until_the_backward(remedied=False, squares=40):
    """zero_grad() stands just before backward, so the forward runs beside the old gradients."""
    net, x = Net(1024), torch.randn(128, 64)
    targets = torch.randn(128, 64)
    optimizer = sgd(net)

    def loss_of(output):
        return torch.stack([(output - k * targets).square() for k in range(squares)]).mean()

    def step(i):
        if remedied:
            optimizer.zero_grad()
        output = net(x)
        with torch.no_grad():
            loss_of(output)  # for the log
        loss = output.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return trained(net, optimizer, step, steps=3)
