"""Graphs that nobody uses, or that stay longer than their backward.

Each program returns its tracker, and does with ``remedied=True`` what the diagnosis tells it to.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from support.oom import (
    ADDED_UP,
    FOR_NOBODY,
    IDLE,
    LEFT,
    LOGITS,
    STAY,
    TWICE,
    UNUSED,
    WAIT,
    Net,
    adamw,
    added_up,
    has,
    llama,
    rows,
    sgd,
    stepped,
    trained,
    trains,
    updated,
)
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from gradmem_lib import MemoryTracker


@has(UNUSED)
def sampling_with_gradients(remedied=False):
    """A denoiser that is called again and again with its own output."""
    net, x = Net(), torch.randn(512, 64)
    with MemoryTracker(net) as tracker, torch.set_grad_enabled(not remedied):
        for _ in range(10):
            x = x - 0.1 * net(x)
    return tracker


@has(UNUSED, WAIT)
def predictions_of_a_function(remedied=False):
    """The model is a function, and no module is ever called."""
    weights = [torch.randn(64, 256, requires_grad=True), torch.randn(256, 64, requires_grad=True)]
    optimizer = torch.optim.SGD(weights, lr=0.1, foreach=False)

    def model(x):
        return (x @ weights[0]).relu() @ weights[1]

    with MemoryTracker(optimizer=optimizer) as tracker:
        for _ in range(4):
            updated(model(torch.randn(64, 64)).square().mean(), optimizer)
        with torch.set_grad_enabled(not remedied):
            predictions = [model(torch.randn(128, 64)).argmax(-1) for _ in range(2)]
            scores = [model(torch.randn(128, 64)) for _ in range(4)]
    assert len(predictions) + len(scores) == 6
    return tracker


@has(UNUSED)
def queue_of_keys(remedied=False):
    """MoCo's queue of the last keys. ``remedied``: made under no_grad()."""
    net, keys_of = Net(), Net()
    optimizer = sgd(net)
    queue = deque(maxlen=6)

    def step(i):
        x = torch.randn(256, 64)
        with torch.set_grad_enabled(not remedied):
            queue.append(keys_of(x))
        wanted = torch.stack(list(queue)).detach().mean(0)
        updated(F.mse_loss(net(x), wanted), optimizer)

    return trained(nn.ModuleList([net, keys_of]), optimizer, step, steps=16)


@has(ADDED_UP)
def losses_added_up(remedied=False):
    net = Net()
    optimizer = adamw(net)
    batches = [(torch.randn(256, 64), torch.randn(256, 64)) for _ in range(6)]

    def step(i):
        losses = (F.mse_loss(net(x), y) / 6 for x, y in batches)
        added_up(losses, optimizer, remedied)

    return trained(net, optimizer, step, steps=2)


@has(ADDED_UP)
def losses_added_up_before_a_large_step(remedied=False):
    net = Net()
    optimizer = sgd(net)

    def step(i):
        if i == 0:
            losses = (net(torch.randn(512, 64)).square().mean() for _ in range(4))
            added_up(losses, optimizer, remedied)
        else:
            updated(net(torch.randn(1280, 64)).square().mean(), optimizer)

    return trained(net, optimizer, step, steps=2)


@has()
def recurrent_cell():
    """Backward through time: each call continues the one before, the first one zeros."""
    cell, x = nn.GRUCell(64, 64), torch.randn(256, 64)

    def loss(i):
        state = torch.zeros(256, 64)
        for _ in range(6):
            state = cell(x, state)
        return state.square().mean()

    return trains(cell, loss, steps=2)


@has(ADDED_UP)
def tasks_added_up(remedied=False):
    """Meta-learning: the gradients of each task have a graph, and all losses are added up."""
    net = Net(128)
    optimizer = sgd(net)

    def loss_of(x):
        parameters = dict(net.named_parameters())
        inner = functional_call(net, parameters, x).square().mean()
        gradients = torch.autograd.grad(inner, parameters.values(), create_graph=True)
        fast = {}
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
            fast[name] = parameter - 0.1 * gradient
        return functional_call(net, fast, x).square().mean() / 6

    def step(i):
        losses = (loss_of(torch.randn(64, 64)) for _ in range(6))
        added_up(losses, optimizer, remedied)

    return trained(net, optimizer, step, steps=3)


@has(STAY, says=".item()")
def entropy_added_up(remedied=False):
    """Micro-batches with a backward each, and a sum of their entropies for the log."""
    net = Net()
    optimizer = sgd(net)

    def step(i):
        summed = 0
        for _ in range(8):
            outputs = net(torch.randn(64, 64))
            outputs.square().mean().backward()
            shares = outputs.softmax(-1)
            value = -(shares * shares.log()).sum()
            summed = summed + (value.item() if remedied else value)
            del outputs, shares, value
        optimizer.step()
        optimizer.zero_grad()

    return trained(net, optimizer, step, steps=3)


@has(STAY, says="hidden.detach()")
def windows_through_time(remedied=False):
    """Truncated backpropagation through time whose state is not detached."""
    model = nn.ModuleDict({"cell": nn.GRU(16, 64, batch_first=True), "out": nn.Linear(64, 50)})
    optimizer = sgd(model)

    def step(i):
        hidden = torch.zeros(1, 8, 64)
        for _ in range(8):
            states, hidden = model["cell"](torch.randn(8, 32, 16), hidden)
            if remedied:
                hidden = hidden.detach()
            model["out"](states).square().mean().backward(retain_graph=not remedied)
            del states
        optimizer.step()
        optimizer.zero_grad()

    return trained(model, optimizer, step, steps=2)


@has(STAY, says="argmax(-1)")
def outputs_of_micro_batches(remedied=False):
    """Accumulation that keeps each micro-batch's outputs, without their graphs, for a metric."""
    net = Net(64)
    optimizer = sgd(net)

    def step(i):
        outputs = []
        for _ in range(16):
            output = net(torch.randn(256, 64))
            output.square().mean().backward()
            outputs.append(output.argmax(-1).sum().item() if remedied else output.detach())
            del output
        optimizer.step()
        optimizer.zero_grad()

    return trained(net, optimizer, step, steps=3)


@has(STAY, FOR_NOBODY)
def epochs_over_features(remedied=False):
    """PPO: several updates of a head on features whose graph is kept for nothing."""
    body, head = Net(), nn.Linear(64, 4)
    optimizer = sgd(head)

    def step(i):
        features = body(torch.randn(512, 64))
        if remedied:
            features = features.detach()
        for _ in range(4):
            head(features).square().mean().backward(retain_graph=not remedied)
            optimizer.step()
            optimizer.zero_grad()

    return trained(nn.ModuleList([body, head]), optimizer, step, steps=3)


def checkpointed(model, steps=2):
    ids = rows(4, 128)
    return trains(model, lambda i: model(input_ids=ids, labels=ids).loss, adamw, steps=steps)


@has(IDLE, LOGITS)
def checkpointing_in_eval_mode(remedied=False):
    model = llama(layers=4)
    model.gradient_checkpointing_enable()
    model.train(remedied)
    return checkpointed(model)


class Switched(nn.Module):
    """Checkpointing is switched on, and ``run(layer, x)`` runs each layer."""

    def __init__(self, layers, run, use_reentrant=False):
        super().__init__()
        self.gradient_checkpointing, self.run = True, run
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=use_reentrant)
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(64, 64)

    def forward(self, input_ids, labels):
        x = F.one_hot(input_ids % 64, 64).float()
        for layer in self.layers:
            x = self.run(layer, x)
        return SimpleNamespace(loss=self.head(x).square().mean())


@has(IDLE)
def reentrant_on_frozen_inputs(remedied=False):
    run = partial(checkpoint, use_reentrant=not remedied)
    layers = [nn.Linear(64, 64) for _ in range(4)]
    return checkpointed(Switched(layers, run, use_reentrant=not remedied))


@has(IDLE)
def ignored_switch(remedied=False):
    layers = []
    for _ in range(4):
        layers.append(nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True))

    def run(layer, x):
        return checkpoint(layer, x, use_reentrant=False) if remedied else layer(x)

    return checkpointed(Switched(layers, run))


@has()
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


@has(TWICE)
def penalty_in_one_step():
    """A penalty on gradients that comes every few steps: it needs a graph of gradients."""
    critic = nn.Sequential(Net(), Net(), Net())

    def loss(i):
        x = torch.randn(512, 64, requires_grad=True)
        scores = critic(x)
        if i != 5:
            return scores.mean()
        (gradient,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return gradient.square().sum()

    return trains(critic, loss, steps=8)


@has()
def critic_frozen_in_turns(zeros=False):
    """Which weights are trained is asked of the optimizers too."""
    generator, critic = nn.Linear(16, 64), Net(2048)
    optimizers = [sgd(generator), sgd(critic)]

    def step(i):
        critic.requires_grad_(True)
        critic(generator(torch.randn(8, 16)).detach()).mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad(set_to_none=not zeros)
        critic.requires_grad_(False)
        stepped(critic(generator(torch.randn(8, 16))).mean(), optimizers[0])

    return trained(nn.ModuleList([generator, critic]), optimizers, step, steps=3)


@has()
def critic_frozen_in_turns_with_zeros():
    return critic_frozen_in_turns(zeros=True)


@has(TWICE)
def inner_steps(remedied=False):
    """Meta-learning: the loss goes through all steps of an inner training."""
    net, x = Net(64), torch.randn(64, 64)

    def loss(i):
        fast = dict(net.named_parameters())
        for _ in range(6):
            inner = functional_call(net, fast, x).square().mean()
            gradients = torch.autograd.grad(inner, list(fast.values()), create_graph=not remedied)
            changed = zip(fast.items(), gradients, strict=True)
            fast = {name: weight - 0.1 * gradient for (name, weight), gradient in changed}
        return functional_call(net, fast, x).square().mean()

    return trains(net, loss, steps=2)


@has(LEFT)
def outputs_of_the_step_before(remedied=False):
    """What a layer has computed is returned. ``remedied``: the variable is deleted."""
    net, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), torch.randn(256, 64)
    optimizer = sgd(net)
    with MemoryTracker(net, optimizer) as tracker:
        for _ in range(2):
            h = net[0](x)
            states = [h.detach().clamp(min=threshold) for threshold in (0.1, 0.2, 0.3, 0.4)]
            updated(net[1](h).square().mean(), optimizer)
            del h
            if remedied:
                del states
    return tracker


@has()
def targets_that_each_step_reads():
    """The features of a picture, which all steps compare with those of another one."""
    body, wanted = Net().body, torch.randn(512, 64)
    picture = wanted.clone().requires_grad_()
    optimizer, targets = torch.optim.SGD([picture], lr=0.1), []

    def features(x):
        for layer in body:
            x = layer(x)
            yield x

    def step(i):
        if i == 0:
            targets.extend(features(wanted))
        pairs = zip(features(picture), targets, strict=True)
        loss = sum(F.mse_loss(*pair) for pair in pairs)
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()

    return trained(body, optimizer, step, steps=6)
