"""Bytes of more and more steps: lists, sums, hooks and caches that keep what a step has made.

Each program returns its tracker, and does with ``remedied=True`` what the diagnosis tells it to.
"""

from __future__ import annotations

import copy
from collections import deque

import torch
import torch.nn.functional as F
from support.oom import (
    EVALUATION,
    EXCEPTION,
    FIRST_STEP,
    FULL,
    GROWS,
    SCORES,
    SECOND,
    UNUSED,
    Net,
    adamw,
    has,
    sgd,
    stepped,
    trained,
    trained_with,
    trains,
    updated,
)
from torch import nn

from gradmem_lib import MemoryTracker


@has(GROWS)
def losses_in_a_list(remedied=False):
    kept = []

    def keep(i, net, x, y, out, loss):
        kept.append(loss.item() if remedied else loss)

    return trained_with(keep)


@has(GROWS, line="self.body(x)", says="handle.remove()")
def hooks_that_stay(remedied=False):
    """Each step registers one more, and no name of the script has what they fill."""
    net, x = Net(), torch.randn(64, 64)
    optimizer = sgd(net)

    def step(i):
        features = []

        def keep(module, inputs, out):
            features.append(out.detach())

        handle = net.body[0].register_forward_hook(keep)
        updated(net(x).mean(), optimizer)
        if remedied:
            handle.remove()

    return trained(net, optimizer, step)


def outputs_kept(kept, when=lambda i: True, remedied=False):
    """Training for 16 steps. ``kept`` gets the outputs of those steps for which ``when(i)``."""

    def keep(i, net, x, y, out, loss):
        if when(i) and not remedied:
            kept.append(out.detach())

    return trained_with(keep, steps=16)


@has(GROWS)
def outputs_after_a_warm_up(remedied=False):
    return outputs_kept([], lambda i: i >= 4, remedied)


@has()
def the_last_outputs():
    """A window for a moving average: it ends to grow after three steps."""
    return outputs_kept(deque(maxlen=3))


@has(FULL)
def full_replay_buffer():
    return outputs_kept(deque(maxlen=8))


@has()
def cache_that_stops():
    return outputs_kept([], lambda i: 4 <= i < 9)


@has(GROWS)
def outputs_joined_late(remedied=False):
    history = []

    def keep(i, net, x, y, out, loss):
        if i == 5:
            history.append(out.detach())
        if i > 5 and not remedied:
            history[0] = torch.cat([history[0], out.detach()])

    return trained_with(keep, steps=16)


def heads_of_rounds(tracks_the_body, remedied):
    """Each round trains a head of its own, and a body that all rounds share."""
    body, kept = nn.Linear(64, 128), []
    head = optimizer = None

    def step(i):
        nonlocal head, optimizer
        if i % 2 == 0:
            head = nn.Linear(128, 256)
            optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()])
            kept.append("round" if remedied else head)
        stepped(head(body(torch.randn(8, 64))).square().mean(), optimizer)

    return trained(body if tracks_the_body else None, None, step, steps=16)


@has(GROWS, FIRST_STEP, says="weights of earlier rounds")
def models_of_earlier_rounds(remedied=False):
    return heads_of_rounds(True, remedied)


@has(GROWS, FIRST_STEP, says="weights of earlier rounds")
def models_of_earlier_rounds_without_a_tracked_one(remedied=False):
    return heads_of_rounds(False, remedied)


@has(GROWS, says="weights that are needed again on the host")
def weights_of_each_epoch(remedied=False):
    kept = []

    def keep(i, net, *given):
        if not remedied:
            kept.append(copy.deepcopy(net.state_dict()))

    return trained_with(keep)


@has(GROWS, line="p.grad.clone()", says="p.grad.norm().item()")
def copies_of_gradients(remedied=False):
    net, x, kept = Net(), torch.randn(64, 64), []
    optimizer = adamw(net)

    def step(i):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        of_step = [p.grad.norm().item() if remedied else p.grad.clone() for p in net.parameters()]
        kept.append(of_step)
        optimizer.step()

    return trained(net, optimizer, step)


@has(GROWS, SCORES)
def masks_of_all_lengths(remedied=False):
    """Attention with a cache of masks, one for each length."""
    project, masks = nn.Linear(16, 48), {}

    def loss(i):
        tokens = 90 + 7 * i % 20
        if tokens not in masks:
            if remedied:
                masks.clear()
            masks[tokens] = torch.full((1, tokens, tokens), -1e9).triu(1)
        q, k, v = project(torch.randn(2, tokens, 16)).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=masks[tokens]).square().mean()

    return trains(project, loss, steps=12)


@has(GROWS, says="one row after another")
def jacobian_of_a_batch(remedied=False):
    """The derivative of each row's output by every row's input: most of it is zeros."""
    net, x = Net(64), torch.randn(32, 64)
    with MemoryTracker(net) as tracker:
        if remedied:
            for row in x:
                torch.autograd.functional.jacobian(net, row).square().sum()
        else:
            torch.autograd.functional.jacobian(net, x).square().sum()
    return tracker


@has(GROWS, FIRST_STEP, says="history_size")
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


@has(GROWS)
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


@has(GROWS)
def outputs_of_uneven_batches(remedied=False):
    """The largest of them belongs to a step that needs it."""
    net, kept = nn.Linear(256, 512), []
    optimizer = sgd(net)
    sizes = [512, 512, 1280, *([512] * 8), 768]

    def step(i):
        outputs = net(torch.randn(sizes[i], 256))
        updated(outputs.square().mean(), optimizer)
        kept.append(outputs.mean().item() if remedied else outputs.detach())

    return trained(net, optimizer, step, len(sizes))


@has(GROWS, UNUSED)
def penalty_that_keeps_its_batches(remedied=False):
    """A batch that a kept graph needs is no data that waits."""
    net, penalty = Net(), 0
    optimizer = sgd(net)

    def step(i):
        nonlocal penalty
        x = torch.randn(256, 64)
        loss = net(x).square().mean()
        more = net(x[:64]).abs().mean()
        penalty = penalty + (more.item() if remedied else more)
        updated(loss, optimizer)

    return trained(net, optimizer, step, 10)


@has(EXCEPTION)
def errors_that_are_kept(remedied=False):
    """A large batch is tried, fails after its forward, and a smaller one follows."""
    net, errors = Net(), []
    optimizer = adamw(net)

    def run(n):
        out = net(torch.randn(n, 64))
        if n > 64:
            raise ValueError("too large")
        updated(out.square().mean(), optimizer)

    def step(i):
        for n in (256, 64):
            try:
                run(n)
            except ValueError as error:
                errors.append(str(error) if remedied else error)

    return trained(net, optimizer, step, steps=6)


@has(GROWS, line="square", says="ctx.save_for_backward(y)")
def outputs_on_a_context(remedied=False):
    """Each was held by a variable of the step that made it, and is held by no name later."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.square()
            if not remedied:
                ctx.y = y
            ctx.save_for_backward(x, y)
            return y

        @staticmethod
        def backward(ctx, gradient):
            x, _ = ctx.saved_tensors
            return 2 * x * gradient

    net, x = Net(), torch.randn(512, 64)
    return trains(net, lambda i: Square.apply(net(x)).mean(), adamw, steps=10)


@has(GROWS, FIRST_STEP, line="optimizer.step()", says="optimizers that no longer step")
def optimizers_of_each_phase(remedied=False):
    net, kept = Net(), []
    optimizer = adamw(net)

    def step(i):
        nonlocal optimizer
        if i % 2 == 0:
            optimizer = adamw(net)
            kept.append("phase" if remedied else optimizer)
        updated(net(torch.randn(16, 64)).square().mean(), optimizer)

    return trained(net, optimizer, step, steps=12)


@has(FULL, EVALUATION, SECOND, line="body", says="features")
def features_that_are_kept_once_made():
    """Of a frozen model, for each batch of a data set: full after the first epoch."""
    frozen, head, features = Net(1024), nn.Linear(1024, 8), {}
    batches = [torch.randn(128, 64) for _ in range(6)]

    def loss(i):
        if i % 6 not in features:
            with torch.no_grad():
                features[i % 6] = frozen.body[:2](batches[i % 6])
        return head(features[i % 6]).square().mean()

    return trains(head, loss, sgd, steps=18)
