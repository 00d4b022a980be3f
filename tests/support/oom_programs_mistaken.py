"""Small programs whose cause was not named, or with a remedy that does not fit them.

As in ``oom_programs``, each returns its tracker, and does with ``remedied=True`` what the diagnosis
tells it to. Programs without this argument only look like one of the others.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from support.oom_programs import Net, sgd
from support.oom_programs_around import trained
from support.oom_programs_of_loops import updated
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradmem_lib import MemoryTracker


def classes_of_frames(remedied=False):
    """CTC, which sums over all alignments of a row: no frame has a loss of its own. ``remedied``:
    one row at a time.
    """
    net = nn.ModuleDict({"body": nn.Linear(16, 256), "head": nn.Linear(256, 600)})
    optimizer = sgd(net)
    sound, labels = torch.randn(16, 64, 16), torch.randint(1, 600, (16, 12))

    def loss_of(features, labels):
        scores = net["head"](features).log_softmax(-1).transpose(0, 1)  # (frames, rows, classes)
        frames = torch.full((len(labels),), 64)
        tokens = torch.full((len(labels),), 12)
        return F.ctc_loss(scores, labels, frames, tokens, reduction="sum") / 16

    def step(i):
        features = net["body"](sound).relu()
        if remedied:
            parts = zip(features.split(1), labels.split(1), strict=True)
            loss = sum(checkpoint(loss_of, *part, use_reentrant=False) for part in parts)
        else:
            loss = loss_of(features, labels)
        updated(loss, optimizer)

    return trained(net, optimizer, step, steps=2)


def targets_like_a_weight(bias=False):
    """As many rows as features: inputs, targets and the weight have one shape."""
    net = nn.Linear(256, 256, bias=bias)
    x, y = torch.randn(256, 256), torch.randn(256, 256)
    optimizer = sgd(net)
    return trained(net, optimizer, lambda i: updated(F.mse_loss(net(x), y), optimizer), steps=3)


def batches_like_a_weight():
    """The same with a batch that each step makes."""
    net = nn.Linear(256, 256)
    optimizer = sgd(net)

    def step(i):
        x, y = torch.randn(256, 256), torch.randn(256, 256)
        updated(F.mse_loss(net(x), y), optimizer)

    return trained(net, optimizer, step, steps=3)


class SharpnessAware:
    """SAM (arXiv:2010.01412): a step up along the gradient, whose gradient is then used."""

    def __init__(self, net: nn.Module, keeps: str):
        self.weights, self.optimizer, self.keeps = list(net.parameters()), sgd(net), keeps
        self.kept = {}

    def up(self) -> None:
        norm = torch.stack([p.grad.norm() for p in self.weights]).norm()
        with torch.no_grad():
            for p in self.weights:
                if self.keeps == "weights":
                    self.kept[p] = p.clone()
                    p.add_(0.05 * p.grad / norm)
                elif self.keeps == "perturbation":
                    self.kept[p] = 0.05 * p.grad / norm
                    p.add_(self.kept[p])
                else:
                    p.add_(0.05 * p.grad / norm)
        self.optimizer.zero_grad()

    def down(self) -> None:
        with torch.no_grad():
            for p, kept in self.kept.items():
                if self.keeps == "weights":
                    p.data = kept
                else:
                    p.sub_(kept)
        self.kept.clear()
        self.optimizer.step()
        self.optimizer.zero_grad()


def sharpness_aware(remedied=False, keeps="perturbation"):
    """``remedied``: what it keeps is not on the card."""
    net, x = Net(1024), torch.randn(64, 64)
    sam = SharpnessAware(net, "nothing" if remedied else keeps)

    def step(i):
        net(x).square().mean().backward()
        sam.up()
        net(x).square().mean().backward()
        sam.down()

    return trained(net, sam.optimizer, step, steps=3)


def sharpness_aware_with_weights(remedied=False):
    return sharpness_aware(remedied, keeps="weights")


def distances_under_a_checkpoint(remedied=False):
    """Distances of all pairs, which a checkpoint makes again in backward. ``remedied``: for a few
    rows at a time.
    """
    net, x = Net(1024), torch.randn(256, 64)
    optimizer = sgd(net)

    def near(part, z):
        return (part[:, None] - z[None]).square().sum(-1).neg().exp().sum()

    def step(i):
        z = net(x)
        pieces = z.split(2) if remedied else [z]
        loss = sum(checkpoint(near, piece, z, use_reentrant=False) for piece in pieces)
        updated(loss, optimizer)

    return trained(net, optimizer, step, steps=2)


class Conditioned(nn.Module):
    """Samples that are scored after a context."""

    def __init__(self):
        super().__init__()
        self.words, self.body = nn.Embedding(128, 64), Net(128)
        self.out = nn.Linear(64, 8)

    def read(self, context: torch.Tensor) -> torch.Tensor:
        return self.body(self.words(context)).mean(1)

    def forward(self, context: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
        if len(context) < len(samples):  # each context is read once
            read = self.read(context).repeat_interleave(len(samples) // len(context), 0)
        else:
            read = self.read(context)
        return self.out(read + self.words(samples).mean(1))


def augmented_batch():
    """Rows that are repeated and then changed are different rows."""
    net, images = Net(64), torch.randn(16, 64)
    optimizer = sgd(net)

    def step(i):
        x = images.repeat(16, 1)
        x = x + 0.1 * torch.randn_like(x)
        updated(net(x).square().mean(), optimizer)

    return trained(net, optimizer, step, steps=3)


def momentum_sgd():
    net, x = Net(1024), torch.randn(16, 64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)
    with MemoryTracker(net, optimizer, live=False) as tracker:
        for _ in range(2):
            updated(net(x).square().mean(), optimizer)
    return tracker
