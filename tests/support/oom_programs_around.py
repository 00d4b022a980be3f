"""More small programs that need more memory than they should: what surrounds the step of a training
loop, such as hooks, histories, data on the device, and networks that are not trained.

As in ``oom_programs``, each returns its tracker, and does with ``remedied=True`` what the diagnosis
tells it to. Programs without this argument only look like one of the others.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from support.oom_programs import Net, adamw, sgd, trained_with
from torch import nn
from torch.func import functional_call

from gradmem_lib import MemoryTracker

STEPS = 8


def trained(model, optimizers, step, steps=STEPS):
    """``step(i)`` runs under a tracker."""
    with MemoryTracker(model, optimizers, live=False) as tracker:
        for i in range(steps):
            step(i)
    return tracker


# Bytes that grow


def hook_keeps_outputs(remedied=False):
    net, x = Net(), torch.randn(256, 64)
    optimizer, kept = adamw(net), []

    def hook(module, inputs, output):
        kept.append(output.mean().item() if remedied else output)

    net.body[0].register_forward_hook(hook)

    def step(i):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(net, optimizer, step)


def weights_of_each_epoch(remedied=False):
    kept = []

    def keep(i, net, *given):
        if not remedied:
            kept.append(copy.deepcopy(net.state_dict()))

    return trained_with(keep)


def gradients_of_each_step(remedied=False):
    """The gradients themselves, which zero_grad() drops only from the parameters."""
    net, x, kept = Net(), torch.randn(64, 64), []
    optimizer = adamw(net)

    def step(i):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        kept.append([p.grad.norm().item() if remedied else p.grad for p in net.parameters()])
        optimizer.step()

    return trained(net, optimizer, step)


def optimizer_of_each_epoch(remedied=False):
    net, x = Net(), torch.randn(16, 64)
    optimizers = [adamw(net)]

    def step(i):
        if not remedied:
            optimizers.append(adamw(net))
        net(x).square().mean().backward()
        optimizers[-1].step()
        optimizers[-1].zero_grad()

    return trained(net, None, step)


def history_of(rows_of, join, steps=80):
    """``rows_of(out)`` is joined to the rows of earlier steps."""
    net, x, history = Net(64), torch.randn(256, 64), torch.empty(0, 64)
    optimizer = adamw(net)

    def step(i):
        nonlocal history
        out = net(x)
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        history = join((history, rows_of(out.detach())))

    return trained(net, optimizer, step, steps)


def history_in_one_tensor(remedied=False):
    """``remedied``: numbers are kept, and no rows."""
    return history_of(lambda out: out[:0] if remedied else out, torch.cat)


def history_in_one_row(remedied=False):
    """The same, by another name, and of a part of the outputs."""
    return history_of(lambda out: out[:0] if remedied else out[:192], torch.vstack)


def losses_without_an_optimizer(remedied=False):
    """Weights that are updated by hand: no optimizer ever steps."""
    net, x, y, kept = Net(), torch.randn(512, 64), torch.randn(512, 64), []

    def step(i):
        loss = F.mse_loss(net(x), y)
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad
        net.zero_grad()
        kept.append(loss.item() if remedied else loss.detach())

    return trained(net, None, step)


def hidden_state_carried(remedied=False):
    cell, head, x = nn.GRUCell(32, 64), nn.Linear(64, 32), torch.randn(64, 32)
    hidden = torch.zeros(64, 64)

    def step(i):
        nonlocal hidden
        if remedied:
            hidden = hidden.detach()
        hidden = cell(x, hidden)
        head(hidden).square().mean().backward(retain_graph=not remedied)

    return trained(nn.ModuleList([cell, head]), None, step)


def window_in_one_tensor():
    """A tensor of constant length that is replaced in each step."""
    window = torch.zeros(1024, 64)

    def keep(i, net, x, y, out, loss):
        nonlocal window
        window = torch.cat([window[512:], out.detach()])

    return trained_with(keep, steps=20)


def longer_and_longer_batches():
    net = Net()
    optimizer = adamw(net)

    def step(i):
        x = torch.randn(64 * (i + 1), 64)
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(net, optimizer, step)


def gradients_that_stay():
    """``set_to_none=False``: the same gradients in all steps, from the first one on."""
    net, x = Net(), torch.randn(64, 64)
    optimizer = adamw(net)

    def step(i):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return trained(net, optimizer, step)


# Generation


class KeepsKeys(nn.Module):
    """Attention that keeps keys and values in an attribute; it is in no list of layers."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))
        self.kept = None

    def forward(self, x):
        keys, values = self.key(x), self.value(x)
        if self.kept is not None:
            keys = torch.cat([self.kept[0], keys], dim=1)
            values = torch.cat([self.kept[1], values], dim=1)
        self.kept = keys, values
        return F.scaled_dot_product_attention(self.query(x), keys, values)


def own_keys_and_values(remedied=False):
    net, x = KeepsKeys(), torch.randn(8 if remedied else 64, 1, 64)
    with MemoryTracker(net, live=False) as tracker, torch.no_grad():
        for _ in range(60):
            x = net(x)
    return tracker


# Graphs


def samples_that_stay(remedied=False):
    """Sampling after an epoch. Its last result, and its graph, are there in the next epoch."""
    net, x = Net(), torch.randn(64, 64)
    optimizer, kept = adamw(net), []

    def step(i):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if i == 2:
            with torch.set_grad_enabled(not remedied):
                sample = torch.randn(256, 64)
                for _ in range(10):
                    sample = sample - 0.1 * net(sample)
                kept.append(sample)

    return trained(net, optimizer, step, steps=6)


def sum_of_a_validation(remedied=False):
    net, x, y = Net(), torch.randn(64, 64), torch.randn(64, 64)
    optimizer, large = adamw(net), torch.randn(256, 64)
    with MemoryTracker(net, optimizer, live=False) as tracker:
        for _ in range(2):
            for _ in range(3):
                F.mse_loss(net(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            summed = 0
            with torch.set_grad_enabled(not remedied):
                for _ in range(8):
                    summed = summed + net(large).square().mean()
    return tracker


def adversaries(remedied=False, detach=True, rows=1024):
    """A GAN. ``remedied``: the discriminator's loss does not go through the generator."""
    generator, discriminator = nn.Linear(16, 64), nn.Sequential(Net(), nn.Linear(64, 1))
    optimizers = [adamw(generator), adamw(discriminator)]

    def step(i):
        fake = generator(torch.randn(rows, 16))
        real = torch.randn(rows, 64)
        shown = fake.detach() if remedied else fake
        loss = discriminator(real).mean() - discriminator(shown).mean()
        loss.backward(retain_graph=not remedied)
        optimizers[1].step()
        optimizers[0].zero_grad()
        discriminator(fake).mean().backward()
        optimizers[0].step()
        optimizers[1].zero_grad()

    return trained(nn.ModuleList([generator, discriminator]), optimizers, step, steps=3)


def two_losses_one_graph(remedied=False):
    """The first loss keeps the graph, and its variable lives until the next step's loss."""
    net, x = Net(), torch.randn(1024, 64)
    optimizer = sgd(net)

    def run():
        loss = None
        with MemoryTracker(net, optimizer, live=False) as tracker:
            for _ in range(3):
                loss = net(x).square().mean()
                loss.backward(retain_graph=not remedied)
                optimizer.step()
                optimizer.zero_grad()
        return tracker

    return run()


def adversaries_detached():
    return adversaries(remedied=True)


def gradient_penalty():
    """A gradient that has a graph, through which the loss goes back."""
    critic = Net()
    optimizer = adamw(critic)

    def step(i):
        x = torch.randn(256, 64, requires_grad=True)
        gradient = torch.autograd.grad(critic(x).sum(), x, create_graph=True)[0]
        loss = critic(torch.randn(256, 64)).mean() + gradient.norm(dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return trained(critic, optimizer, step, steps=3)


def tasks_added_up(remedied=False, tasks=6):
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
        return functional_call(net, fast, x).square().mean() / tasks

    def step(i):
        summed = 0
        for _ in range(tasks):
            loss = loss_of(torch.randn(64, 64))
            if remedied:
                loss.backward()
            else:
                summed = summed + loss
            del loss
        if not remedied:
            summed.backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(net, optimizer, step, steps=3)


def _window(metric, remedied):
    """Micro-batches with a backward each, and a sum of ``metric(outputs)`` for the log."""
    net, rows = Net(), 64
    optimizer = sgd(net)

    def step(i):
        summed = 0
        for _ in range(8):
            outputs = net(torch.randn(rows, 64))
            outputs.square().mean().backward()
            value = metric(outputs)
            summed = summed + (value.item() if remedied else value)
            del outputs, value
        optimizer.step()
        optimizer.zero_grad()

    return trained(net, optimizer, step, steps=3)


def entropy_added_up(remedied=False):
    def entropy(outputs):
        shares = outputs.softmax(-1)
        return -(shares * shares.log()).sum()

    return _window(entropy, remedied)


def norms_added_up(remedied=False):
    return _window(lambda outputs: outputs.tanh().square().sum().sqrt(), remedied)


def experts():
    """Each call is of another module, and one loss takes them all."""
    parts = nn.ModuleList([Net(64) for _ in range(5)])
    optimizer, x = adamw(parts), torch.randn(512, 64)

    def step(i):
        torch.stack([part(x) for part in parts]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(parts, optimizer, step, steps=3)


def crops_of_one_image():
    """One loss compares all outputs: nothing is computed between the calls."""
    net, crops = Net(), [torch.randn(256, 64) for _ in range(5)]
    optimizer = adamw(net)

    def step(i):
        outputs = [net(crop) for crop in crops]
        torch.stack(outputs).std(dim=0).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(net, optimizer, step, steps=3)


def members_by_functional_call():
    """The module's own parameters are not used: an optimizer has others, that stand in for them."""
    net, x = Net(), torch.randn(512, 64)
    members = [{n: p.detach().clone() for n, p in net.named_parameters()} for _ in range(2)]
    parameters = [p.requires_grad_() for member in members for p in member.values()]
    optimizer = torch.optim.SGD([*parameters, next(net.parameters())], lr=0.1, foreach=False)

    def step(i):
        loss = sum(functional_call(net, member, x).square().mean() for member in members)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(net, optimizer, step, steps=3)


# Gradients for nobody


def perceptual_loss(remedied=False):
    features = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3))
    if remedied:
        features.requires_grad_(False)
    net = nn.Conv2d(3, 3, 3, padding=1)
    optimizer = adamw(net)

    def step(i):
        small, large = torch.rand(4, 3, 32, 32), torch.rand(4, 3, 32, 32)
        F.mse_loss(features(net(small)), features(large)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(net, optimizer, step, steps=3)


def teacher_without_detach(remedied=False):
    teacher, student = Net(512), Net(32)
    optimizer, x = adamw(student), torch.randn(2048, 64)

    def step(i):
        with torch.set_grad_enabled(not remedied):
            expected = teacher(x)
        F.mse_loss(student(x), expected).backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(student, optimizer, step, steps=3)


def head_alone_in_the_optimizer(remedied=False):
    body, head = Net(1024), nn.Linear(64, 2)
    if remedied:
        body.requires_grad_(False)
    optimizer, x = adamw(head), torch.randn(64, 64)

    def step(i):
        head(body(x)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(nn.Sequential(body, head), optimizer, step, steps=3)


def frozen_body():
    return head_alone_in_the_optimizer(remedied=True)


# Data


def data_set_on_the_device(remedied=False):
    data, net = torch.randn(20_000, 64), Net()
    optimizer = adamw(net)

    def step(i):
        x = torch.randn(64, 64) if remedied else data[torch.randint(20_000, (64,))]
        F.mse_loss(net(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(net, optimizer, step, steps=4)


def full_replay_buffer(remedied=False):
    """All of it is made before the training; batches are rows of it."""
    states, actions = torch.randn(20_000, 64), torch.randint(0, 64, (20_000,))
    net = Net()
    optimizer = sgd(net)

    def step(i):
        if remedied:
            x, taken = torch.randn(64, 64), torch.randint(0, 64, (64,))
        else:
            x, taken = states[64 * i : 64 * (i + 1)], actions[64 * i : 64 * (i + 1)]
        F.cross_entropy(net(x), taken).backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(net, optimizer, step, steps=4)


def empty_replay_buffer(remedied=False):
    """It is made at once for all steps, and filled row by row. ``remedied``: off the card."""
    net = Net(64)
    optimizer = sgd(net)
    with MemoryTracker(net, optimizer, live=False) as tracker:
        buffer = None if remedied else torch.zeros(20_000, 64)
        for i in range(6):
            if remedied:
                x = torch.randn(i + 1, 64)
            else:
                buffer[i] = torch.randn(64)
                x = buffer[: i + 1]
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


def batches_of_an_epoch(remedied=False):
    net = Net(64)
    optimizer = adamw(net)
    with MemoryTracker(net, optimizer, live=False) as tracker:
        waiting = [] if remedied else [torch.randn(1024, 64) for _ in range(20)]
        for i in range(20):
            x = torch.randn(1024, 64) if remedied else waiting[i]
            F.mse_loss(net(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


def data_like_a_weight():
    """A data set with the shape of the largest weight is no copy of the weights."""
    net, data = nn.Linear(64, 512), torch.randn(512, 64)
    optimizer = adamw(net)

    def step(i):
        net(data[8 * i : 8 * (i + 1)]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(net, optimizer, step, steps=4)


def one_batch_for_all_steps():
    net, x = nn.Linear(64, 8), torch.randn(4096, 64)
    optimizer = sgd(net)

    def step(i):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(net, optimizer, step)


# One step, one kind of tensor


class Embeds(nn.Module):
    def __init__(self, entries: int = 100, sparse: bool = False):
        super().__init__()
        self.table = nn.Embedding(entries, 64, sparse=sparse)
        self.body = Net()

    def forward(self, ids):
        return self.body(self.table(ids))


def one_long_row(remedied=False, lengths=(32, 30, 40, 28, 400, 33, 31, 30)):
    net = Embeds()
    optimizer = adamw(net)

    def step(i):
        length = min(lengths[i], 40) if remedied else lengths[i]
        net(torch.randint(0, 100, (8, length))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(net, optimizer, step, steps=len(lengths))


def rows_of_many_lengths():
    return one_long_row(lengths=(200, 330, 250, 400, 280, 310))


def large_table(remedied=False):
    net = nn.Embedding(20_000, 64, sparse=remedied)
    optimizer = sgd(net)

    def step(i):
        net(torch.randint(0, 20_000, (64,))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(net, optimizer, step, steps=3)


def table_of_users(remedied=False):
    """Two tables and a network; only a few rows are used in a step."""
    tables = nn.ModuleList([nn.Embedding(8000, 64, sparse=remedied) for _ in range(2)])
    net = Net(64)
    optimizer = torch.optim.SGD([*tables.parameters(), *net.parameters()], lr=0.1, foreach=False)

    def step(i):
        rows = [table(torch.randint(0, 8000, (32,))) for table in tables]
        net(rows[0] * rows[1]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(nn.ModuleList([tables, net]), optimizer, step, steps=3)


def one_hot_targets(remedied=False):
    net = nn.Conv2d(3, 64, 1)
    optimizer = adamw(net)

    def step(i):
        x, y = torch.rand(4, 3, 32, 32), torch.randint(0, 64, (4, 32, 32))
        if remedied:
            loss = net(x[:, :, :4]).mean() + F.cross_entropy(net(x[:, :, :4]), y[:, :4])
        else:
            target = F.one_hot(y, 512)
            loss = net(x[:, :, :4]).mean() + target.float().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(net, optimizer, step, steps=3)


def distances_of_all_pairs(remedied=False):
    net, x = Net(64), torch.randn(256, 64)
    optimizer = adamw(net)

    def step(i):
        rows = net(x)
        if remedied:
            distances = torch.cdist(rows, rows)
        else:
            distances = (rows[:, None] - rows[None]).square().sum(dim=-1)
        distances.mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(net, optimizer, step, steps=3)


def similarities_of_all_pairs(remedied=False):
    """``remedied``: a few rows at a time, each checkpointed."""
    net, x = Net(64), torch.randn(1024, 64)
    optimizer = adamw(net)

    def loss_of(rows, others, first):
        scores = rows @ others.T / 0.1
        return F.cross_entropy(scores, torch.arange(first, first + len(rows)), reduction="sum")

    def step(i):
        rows = F.normalize(net(x))
        if remedied:
            parts = []
            for first in range(0, 1024, 64):
                part = rows[first : first + 64]
                parts.append(
                    torch.utils.checkpoint.checkpoint(
                        loss_of, part, rows, first, use_reentrant=False
                    )
                )
            loss = torch.stack(parts).sum()
        else:
            loss = loss_of(rows, rows, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(net, optimizer, step, steps=3)


def mask_for_each_head(remedied=False):
    project, x = nn.Linear(64, 192), torch.randn(4, 256, 64)
    optimizer = adamw(project)

    def step(i):
        q, k, v = project(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        if remedied:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = torch.ones(256, 256).tril().bool().expand(4, 4, 256, 256).contiguous()
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(project, optimizer, step, steps=3)


def distances_after_an_evaluation(remedied=False):
    net, x = Net(64), torch.randn(64, 64)
    with MemoryTracker(net, live=False) as tracker, torch.no_grad():
        bank = torch.cat([net(x) for _ in range(20)])
        parts = bank.split(64) if remedied else [bank]
        nearest = [torch.cdist(part, bank).amin(dim=1) for part in parts]
    assert len(torch.cat(nearest)) == len(bank)
    return tracker


def own_softmax(remedied=False):
    """Attention whose weights are normalized by hand."""
    project, x = nn.Linear(64, 192), torch.randn(4, 256, 64)
    optimizer = adamw(project)

    def step(i):
        q, k, v = project(x).chunk(3, dim=-1)
        if remedied:
            out = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])
        else:
            weights = (q @ k.mT / 8).exp()
            out = weights / weights.sum(dim=-1, keepdim=True) @ v
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(project, optimizer, step, steps=3)


def large_images():
    """What layers make, and an upsampling to twice the size, are no such tensors."""
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2), nn.Conv2d(32, 3, 3)
    )
    optimizer = adamw(net)

    def step(i):
        net(torch.rand(2, 3, 32, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(net, optimizer, step, steps=3)


class _OwnSquare(torch.autograd.Function):
    """Counts a node of a graph at each call, also where no graph is recorded."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


class _OwnLoss(Net):
    def forward(self, x):
        return _OwnSquare.apply(super().forward(x)).mean()


def scores_of_a_reference_first():
    """One line scores for the reference model, for the old weights and for the training: only the
    last has a graph, and each micro-batch has its own backward.
    """
    net, reference = _OwnLoss(4096), _OwnLoss(4096)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)

    def score(model, x):
        return model(x)

    def step(i):
        x = torch.randn(2 if i else 64, 64)  # the peak is in the first step
        with torch.no_grad():
            far = score(reference, x) - score(net, x)
        for _ in range(2):
            (score(net, x) + far).backward()
        optimizer.step()

    return trained(net, optimizer, step, steps=2)
