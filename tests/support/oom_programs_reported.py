"""Small programs after reports from many fields: generative models, detection, graphs, speech,
reinforcement learning, sampling.

As in ``oom_programs``, each returns its tracker, and does with ``remedied=True`` what the diagnosis
tells it to. Programs without this argument only look like one of the others.
"""

from __future__ import annotations

import copy
import io
import random
from collections import deque

import torch
import torch.nn.functional as F
from support.oom_programs import Net, adamw, sgd
from support.oom_programs_around import trained
from support.oom_programs_of_loops import updated
from torch import nn
from torch.func import functional_call, grad, vmap

from gradmem_lib import MemoryTracker

# Bytes that grow


def penalties_for_the_log(remedied=False):
    """A gradient penalty (WGAN-GP) that is kept for a plot."""
    critic, kept = Net(), []
    optimizer = adamw(critic)

    def step(i):
        x = torch.randn(256, 64, requires_grad=True)
        gradient = torch.autograd.grad(critic(x).sum(), x, create_graph=True)[0]
        penalty = (gradient.norm(dim=1) - 1).square().mean()
        kept.append(penalty.item() if remedied else penalty)
        updated(critic(x.detach()).mean() + penalty, optimizer)

    return trained(critic, optimizer, step)


def log_probabilities_of_all_episodes(remedied=False):
    """A policy's buffer that nobody empties: each loss takes the last episode's part."""
    policy, states = Net(), torch.randn(32, 64)
    optimizer = adamw(policy)
    buffer = []

    def step(i):
        start = len(buffer)
        for _ in range(4):
            buffer.append(policy(states).log_softmax(-1)[:, 0])
        updated(-torch.stack(buffer[start:]).mean(), optimizer)
        if remedied:
            buffer[start:] = [probability.detach().clone() for probability in buffer[start:]]
            buffer.clear()

    return trained(policy, optimizer, step)


def running_average_of_a_metric(remedied=False):
    """The metric has a graph of its own, and no backward goes through it."""
    net, x, y = Net(), torch.randn(256, 64), torch.randn(256, 64)
    optimizer = sgd(net)
    average = torch.zeros(())

    def step(i):
        nonlocal average
        output = net(x)
        metric = (output - y).square().mean(dim=0)
        average = 0.9 * average + 0.1 * (metric.detach().cpu().clone() if remedied else metric)
        loss = F.mse_loss(output, y)
        del output, metric
        updated(loss, optimizer)

    return trained(net, optimizer, step)


def gradients_by_a_hook(remedied=False):
    net, x, kept = Net(), torch.randn(32, 64), []
    optimizer = adamw(net)
    for parameter in net.parameters():
        parameter.register_hook(lambda g: kept.append(g.norm().item() if remedied else g.clone()))
    return trained(net, optimizer, lambda i: updated(net(x).square().mean(), optimizer))


def pool_of_images(remedied=False):
    """CycleGAN's pool of generated images, which keeps the graph of each."""
    generator, pool = Net(), []
    optimizer = adamw(generator)
    choice = random.Random(0)

    def step(i):
        fake = generator(torch.randn(256, 64))
        kept = fake[:1].tolist() if remedied else fake
        if len(pool) < 50:
            pool.append(kept)
        else:
            pool[choice.randrange(50)] = kept
        updated(fake.square().mean(), optimizer)

    return trained(generator, optimizer, step, steps=12)


def history_of_lbfgs(remedied=False):
    """``remedied``: history_size=2."""
    net, x = Net(128), torch.randn(16, 64)
    optimizer = torch.optim.LBFGS(
        net.parameters(), lr=1e-3, max_iter=1, history_size=2 if remedied else 100
    )

    def closure():
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    return trained(net, optimizer, lambda i: optimizer.step(closure), steps=20)


def predictions_joined_in_each_step(remedied=False):
    """A metric on the card whose state is one tensor."""
    net, x, y = Net(64), torch.randn(256, 64), torch.randn(256, 64)
    optimizer = sgd(net)
    predictions = torch.empty(0, 64)

    def step(i):
        nonlocal predictions
        output = net(x)
        updated(F.mse_loss(output, y), optimizer)
        new = output.detach()
        predictions = torch.cat([predictions, new[:0] if remedied else new])

    return trained(net, optimizer, step, steps=10)


# Graphs


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


def guided_sampling(remedied=False):
    """Each step of a sampler follows a gradient, and the sample is never detached."""
    net = Net()
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    sample = torch.randn(256, 64, requires_grad=True)
    with MemoryTracker(net, live=False) as tracker:
        for _ in range(10):
            if remedied:
                sample = sample.detach().requires_grad_()
            predicted = net(sample)
            gradient = torch.autograd.grad(
                predicted.square().sum(), sample, retain_graph=not remedied
            )[0]
            sample = sample - 0.1 * predicted - 0.01 * gradient
            del predicted, gradient
    return tracker


def features_of_a_hook():
    """A hook that stores each layer's output by name: the next forward replaces one by one."""
    net = nn.Sequential(*[Net(64) for _ in range(6)])
    optimizer = sgd(net)
    features = {}
    for name, layer in net.named_children():

        def keep(module, inputs, output, name=name):
            features[name] = output

        layer.register_forward_hook(keep)

    def step(i):
        loss = net(torch.randn(1024, 64)).square().mean()
        updated(loss + 0.01 * features["2"].abs().mean(), optimizer)

    return trained(net, optimizer, step, steps=3)


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


# Weights and gradients


def slow_weights(remedied=False):
    """Lookahead. ``remedied``: its slow weights are not on the card."""
    net, x = Net(2048), torch.randn(16, 64)
    optimizer = adamw(net)
    slow = []

    def step(i):
        updated(net(x).square().mean(), optimizer)
        if remedied:
            return
        if not slow:
            slow.extend(parameter.detach().clone() for parameter in net.parameters())
        with torch.no_grad():
            for average, parameter in zip(slow, net.parameters(), strict=True):
                average.lerp_(parameter, 0.5)
                parameter.copy_(average)

    return trained(net, optimizer, step, steps=3)


class Adapted(nn.Module):
    """A frozen weight of 512 × 512, and an adapter of rank 4."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(512, 512, bias=False)
        self.base.requires_grad_(False)
        self.a = nn.Parameter(0.01 * torch.randn(4, 512))
        self.b = nn.Parameter(torch.zeros(512, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def merged_adapters(remedied=False):
    """``remedied``: merged in place."""
    net, x = nn.Sequential(*[Adapted() for _ in range(4)]), torch.randn(16, 512)
    with MemoryTracker(net, live=False) as tracker, torch.no_grad():
        net(x)
        merged = []
        for layer in net:
            if remedied:
                layer.base.weight.addmm_(layer.b, layer.a)
            else:
                merged.append(layer.base.weight + layer.b @ layer.a)
        if merged:
            for weight in merged:
                x = x @ weight.T
        else:
            net(x)
    return tracker


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


def gradients_of_each_row(remedied=False):
    """Gradients of each row by vmap. ``remedied``: of a few rows at a time."""
    net, x = Net(128), torch.randn(64, 64)
    weights = {name: parameter.detach() for name, parameter in net.named_parameters()}

    def loss_of(weights, row):
        return functional_call(net, weights, (row,)).square().mean()

    of_rows = vmap(grad(loss_of), in_dims=(None, 0))
    with MemoryTracker(net, live=False) as tracker:
        pieces = x.split(4) if remedied else [x]
        squares = torch.zeros(())
        for piece in pieces:
            gradients = of_rows(weights, piece)
            squares += sum(gradient.square().sum() for gradient in gradients.values())
            del gradients
    return tracker


def states_of_a_checkpoint(remedied=False):
    """A resumed run whose checkpoint stays alive: load_state_dict has copied the states."""
    net, x = Net(1024), torch.randn(16, 64)
    optimizer = adamw(net)
    updated(net(x).square().mean(), optimizer)
    file = io.BytesIO()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)

    def run():
        file.seek(0)
        net = Net(1024)
        optimizer = adamw(net)
        with MemoryTracker(net, optimizer, live=False) as tracker:
            loaded = torch.load(file)
            net.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
            if remedied:
                del loaded
            for _ in range(2):
                updated(net(x).square().mean(), optimizer)
        return tracker

    return run()


def states_of_a_checkpoint_in_float32(remedied=False):
    """The same in bf16: load_state_dict has to copy the states, and the checkpoint's stay.
    ``remedied``: one tensor at a time, as from the host.
    """
    x = torch.randn(16, 64)
    net = Net(1024)
    optimizer = adamw(net)
    updated(net(x).square().mean(), optimizer)
    saved = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    del net, optimizer

    def load(net, optimizer, loaded):
        if not remedied:
            net.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
            return
        with torch.no_grad():
            for i, (name, parameter) in enumerate(net.named_parameters()):
                parameter.copy_(loaded["model"].pop(name))
                states = loaded["optimizer"]["state"].pop(i)
                for key in list(states):
                    state = states.pop(key)
                    kept = state.clone() if key == "step" else state.bfloat16()
                    optimizer.state[parameter][key] = kept
                    del state

    net = Net(1024).bfloat16()
    optimizer = adamw(net)
    with MemoryTracker(net, optimizer, live=False) as tracker:
        load(net, optimizer, saved)
        for _ in range(2):
            updated(net(x.bfloat16()).square().mean(), optimizer)
    return tracker


def states_of_a_checkpoint_before():
    """The loaded states become the optimizer's own: load_state_dict copies none of them."""
    net, x = Net(1024), torch.randn(16, 64)
    optimizer = adamw(net)
    updated(net(x).square().mean(), optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    net = Net(1024)
    optimizer = adamw(net)
    with MemoryTracker(net, optimizer, live=False) as tracker:
        optimizer.load_state_dict(saved)
        for _ in range(2):
            updated(net(x).square().mean(), optimizer)
    return tracker


# Others


def curvature():
    """A second derivative along random signs, which have the shapes of the weights."""
    net, x = Net(256), torch.randn(64, 64)
    optimizer = sgd(net)

    def step(i):
        parameters = list(net.parameters())
        gradients = torch.autograd.grad(net(x).square().mean(), parameters, create_graph=True)
        signs = [2 * torch.randint_like(parameter, 2) - 1 for parameter in parameters]
        curved = torch.autograd.grad(gradients, parameters, signs)
        for parameter, gradient, curve in zip(parameters, gradients, curved, strict=True):
            parameter.grad = (gradient / (curve.abs() + 1)).detach()
        optimizer.step()
        optimizer.zero_grad()

    return trained(net, optimizer, step, steps=2)


class KeepsMaps(nn.Module):
    """Attention that keeps its maps for a picture. ``remedied``: off the card."""

    def __init__(self, remedied: bool):
        super().__init__()
        self.project, self.maps, self.remedied = nn.Linear(16, 16), [], remedied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = (self.project(x) @ x.mT).softmax(-1)
        if not self.remedied:
            self.maps.append(shares)
        return shares @ x


def maps_for_pictures(remedied=False):
    net, x = KeepsMaps(remedied), torch.randn(4, 64, 16)
    optimizer = sgd(net)
    return trained(net, optimizer, lambda i: updated(net(x).square().mean(), optimizer))


def averages_in_new_tensors(remedied=False):
    """A target network of which each step makes a new one. ``remedied``: it is not on the card."""
    net, x = Net(1024), torch.randn(16, 64)
    optimizer = sgd(net)
    target = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    if remedied:
        target = {}

    def step(i):
        nonlocal target
        updated(net(x).square().mean(), optimizer)
        weights = dict(net.named_parameters())
        target = {name: 0.9 * old + 0.1 * weights[name].detach() for name, old in target.items()}

    return trained(net, optimizer, step, steps=4)


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


def best_weights_by_reference():
    """A state dict that is kept is no copy: its tensors are the model's."""
    net, x = Net(1024), torch.randn(16, 64)
    optimizer = sgd(net)
    best = []

    def step(i):
        updated(net(x).square().mean(), optimizer)
        best[:] = [net.state_dict()]

    return trained(net, optimizer, step, steps=4)


def noise_of_the_weights_shapes():
    """Evolution: random numbers for all weights, made again in each step."""
    net, x = Net(1024), torch.randn(16, 64)
    with MemoryTracker(net, live=False) as tracker, torch.no_grad():
        for _ in range(4):
            noise = [2 * torch.randn_like(parameter) for parameter in net.parameters()]
            for parameter, change in zip(net.parameters(), noise, strict=True):
                parameter += change
            net(x)
    return tracker


def checkpoint_that_is_written(remedied=False):
    """A copy of all states for a thread that writes them. ``remedied``: it is not on the card."""
    net, x = Net(1024), torch.randn(16, 64)
    optimizer = adamw(net)
    writing = {}

    def step(i):
        updated(net(x).square().mean(), optimizer)
        if not remedied:
            states = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
            writing["states"] = copy.deepcopy(states)

    return trained(net, optimizer, step, steps=3)


def snapshots_for_an_average(remedied=False):
    """SWA by hand: the weights of every fourth step. ``remedied``: they are not on the card."""
    net, x = Net(512), torch.randn(16, 64)
    optimizer = sgd(net)
    snapshots = []

    def step(i):
        updated(net(x).square().mean(), optimizer)
        if i % 4 == 3 and not remedied:
            snapshots.append({name: t.clone() for name, t in net.state_dict().items()})

    return trained(net, optimizer, step, steps=12)
