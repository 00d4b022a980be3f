"""Weights, gradients and states that are there more than once, or wider than they need to be.

Each program returns its tracker, and does with ``remedied=True`` what the diagnosis tells it to.
"""

from __future__ import annotations

import copy
import io

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


def trained_beside(make, after=None, net=None, made_before=False, steps=2):
    """``make(net)`` makes what is there beside the training, and ``after(kept, net)`` changes it
    after each step.
    """
    net = Net(2048) if net is None else net
    optimizer, x = sgd(net), torch.randn(16, 64)
    kept = make(net) if made_before else None
    with MemoryTracker(net, optimizer) as tracker:
        if not made_before:
            kept = make(net)
        for _ in range(steps):
            stepped(net(x).square().mean(), optimizer)
            if after is not None:
                after(kept, net)
        del kept
    return tracker


@has(COPIED)
def deepcopy_at_save(remedied=False):
    return trained_beside(lambda net: None if remedied else copy.deepcopy(net))


def of_one_shape() -> nn.Sequential:
    """Layers of one shape: a dict of their clones looks like a list of batches."""
    layers = []
    for _ in range(6):
        layers += [nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*layers)


def clones(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def clones_with_a_graph(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.clone() for name, p in net.named_parameters()}


@torch.no_grad()
def in_place(average, net):
    for name, p in net.named_parameters():
        average[name].lerp_(p, 0.1)


@torch.no_grad()
def replaced(average, net):
    for name, p in net.named_parameters():
        average[name] = average[name] * 0.9 + p * 0.1


def replaced_with_a_graph(average, net):
    for name, p in net.named_parameters():
        average[name] = average[name].detach() * 0.9 + p * 0.1


def average_of(remedied, update, make=clones, made_before=False):
    if remedied:
        return trained_beside(lambda net: None, None, of_one_shape(), steps=5)
    return trained_beside(make, update, of_one_shape(), made_before, steps=5)


AVERAGES = {
    "average_in_place": (in_place,),
    "average_replaced_from_before": (replaced, clones, True),
    "average_with_a_graph_from_before": (in_place, clones_with_a_graph, True),
}
# In its own turn, a forward may have used it.
OF_THIS_TURN = {
    "copy_with_a_graph": (None, clones_with_a_graph),
    "average_replaced_with_a_graph_from_before": (replaced_with_a_graph, clones_with_a_graph, True),
}
for name, way in AVERAGES.items():

    def average(remedied=False, way=way):
        return average_of(remedied, *way)

    average.__name__ = name
    has(COPIED, says="EMA")(average)
for name, way in OF_THIS_TURN.items():

    def copies_of_this_turn(way=way):
        return average_of(False, *way)

    copies_of_this_turn.__name__ = name
    has()(copies_of_this_turn)


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


@has(COPIED)
def checkpoint_after_resume(remedied=False):
    net = Net(2048)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)

    def make(net):
        loaded = torch.load(file)
        net.load_state_dict(loaded)
        return None if remedied else loaded

    return trained_beside(make, net=net)


@has()
def copy_of_one_layer():
    return trained_beside(lambda net: copy.deepcopy(net.body[0]))


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
def noise_of_the_weights_shapes():
    """Evolution: random numbers for all weights, made again in each step."""
    net, x = Net(1024), torch.randn(16, 64)
    with MemoryTracker(net) as tracker, torch.no_grad():
        for _ in range(4):
            noise = [2 * torch.randn_like(parameter) for parameter in net.parameters()]
            for parameter, change in zip(net.parameters(), noise, strict=True):
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


@has()
def frozen_bf16():
    return frozen_float32(remedied=True)


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
