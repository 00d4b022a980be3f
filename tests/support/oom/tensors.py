"""Data, batches, and one kind of tensor that is large.

Each program returns its tracker, and does with ``remedied=True`` what the diagnosis tells it to.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.nn.functional as F
from support.oom import (
    DATA,
    DOUBLE,
    EXPANDED,
    LOGITS,
    ONE_STEP,
    SCORES,
    TABLE,
    Net,
    adamw,
    has,
    llama,
    rows,
    sgd,
    trained,
    trains,
    updated,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradmem_lib import MemoryTracker


@has(DATA)
def data_set_on_the_device(remedied=False):
    data, net = torch.randn(20_000, 64), Net()

    def loss(i):
        x = torch.randn(64, 64) if remedied else data[torch.randint(20_000, (64,))]
        return F.mse_loss(net(x), x)

    return trains(net, loss, adamw, steps=4)


@has(DATA)
def data_set_beside_an_evaluation(remedied=False):
    """All rows are on the device during the steps; an evaluation without them comes first."""
    net = Net()
    optimizer = sgd(net)
    with MemoryTracker(net, optimizer) as tracker:
        with torch.no_grad():
            net(torch.randn(4096, 64))
        data = None if remedied else torch.zeros(65_536, 64)
        for first in range(0, 256, 64):
            x = torch.randn(64, 64) if remedied else data[first : first + 64]
            updated(net(x).square().mean(), optimizer)
    return tracker


@has(DATA, line="torch.randn(512, 64)", says="one batch at a time")
def prefetched_batches(remedied=False):
    """A loader that is eight batches ahead. ``remedied``: one ahead."""
    net = Net(64)
    ahead = deque(torch.randn(512, 64) for _ in range(0 if remedied else 8))

    def loss(i):
        ahead.append(torch.randn(512, 64))
        x = ahead.popleft()
        return net(x).square().mean()

    return trains(net, loss, steps=12)


@has()
def sines_in_a_list():
    """Pieces that are joined in each step are no data that waits, though a list has them."""
    net, x = nn.Linear(36, 4), torch.randn(4096, 3)

    def loss():
        sines = [f(2**k * x) for k in range(6) for f in (torch.sin, torch.cos)]
        return net(torch.cat(sines, dim=-1)).square().mean()

    return trains(net, lambda i: loss())


class Embeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.body = nn.Embedding(100, 64), Net()

    def forward(self, ids):
        return self.body(self.table(ids))


@has(ONE_STEP)
def one_long_row(remedied=False, lengths=(32, 30, 40, 28, 400, 33, 31, 30)):
    net = Embeds()

    def loss(i):
        length = min(lengths[i], 40) if remedied else lengths[i]
        return net(torch.randint(0, 100, (8, length))).square().mean()

    return trains(net, loss, adamw, steps=len(lengths))


@has()
def rows_of_many_lengths():
    return one_long_row(lengths=(200, 330, 250, 400, 280, 310))


@has(TABLE)
def large_table(remedied=False):
    net = nn.Embedding(20_000, 64, sparse=remedied)
    return trains(net, lambda i: net(torch.randint(0, 20_000, (64,))).square().mean())


@has(EXPANDED, line="[:, None] * ", says="for a few rows at a time")
def pairs_of_a_contrast(remedied=False):
    """The products of all pairs are gone after the forward, and their gradients are as large."""
    net = Net(64)

    def loss(i):
        z = net(torch.randn(64, 64))
        if not remedied:
            return _products(z, z).logsumexp(-1).mean()
        sums = [checkpoint(_products, part, z, use_reentrant=False) for part in z.split(8)]
        return torch.cat(sums).logsumexp(-1).mean()

    return trains(net, loss)


def _products(some: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return (some[:, None] * z).sum(-1)


@has()
def augmented_batch():
    """Rows that are repeated and then changed are different rows."""
    net, images = Net(64), torch.randn(16, 64)

    def loss(i):
        x = images.repeat(16, 1)
        x = x + 0.1 * torch.randn_like(x)
        return net(x).square().mean()

    return trains(net, loss)


@has(EXPANDED, says="view_as")
def targets_of_another_shape(remedied=False):
    """(rows, 1) - (rows,) is a matrix of all pairs."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    x, y = torch.randn(512, 64), torch.randn(512)

    def loss(i):
        output = net(x)
        return (output - (y.view_as(output) if remedied else y)).square().mean()

    return trains(net, loss, steps=2)


class Segments(nn.Module):
    """Classes for each of 16 × 16 places of an image."""

    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 32, 3, padding=1, stride=4)
        self.head = nn.Conv2d(32, 32, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images).relu())


@has(EXPANDED, says="gather")
def one_hot_masks(remedied=False):
    """A dice loss, whose one-hot masks are int64. ``remedied``: ``gather``."""
    net, images = Segments(), torch.randn(4, 3, 64, 64)
    labels = torch.randint(0, 32, (4, 16, 16))

    def loss(i):
        shares = net(images).softmax(1)
        if remedied:
            shared = shares.gather(1, labels[:, None]).sum()
        else:
            masks = F.one_hot(labels, 32).permute(0, 3, 1, 2).float()
            shared = (shares * masks).sum()
        return -shared

    return trains(net, loss, steps=2)


@has(EXPANDED, says="smaller size")
def upsampled_scores(remedied=False):
    """Scores of 16 × 16 places at the size of the image. ``remedied``: the loss at 16 × 16."""
    net, images = Segments(), torch.randn(4, 3, 64, 64)
    labels = torch.randint(0, 32, (4, 64, 64))
    optimizer = sgd(net)

    def step(i):
        scores, wanted = net(images), labels
        if remedied:
            wanted = labels[:, ::4, ::4]
        else:
            scores = F.interpolate(scores, size=(64, 64), mode="bilinear")
        updated(F.cross_entropy(scores, wanted), optimizer)

    return trained(net, optimizer, step, steps=2)


@has(EXPANDED, says="F.conv2d")
def patches_of_images(remedied=False):
    """A convolution over the patches of each place. ``remedied``: ``F.conv2d``."""
    net, images = nn.Conv2d(8, 8, 7, padding=3, bias=False), torch.randn(4, 8, 32, 32)

    def loss(i):
        if remedied:
            out = F.conv2d(images, net.weight, padding=3)
        else:
            out = net.weight.flatten(1) @ F.unfold(images, 7, padding=3)
        return out.square().mean()

    return trains(net, loss, steps=2)


@has(EXPANDED, says="torch.sparse.mm")
def messages_of_edges(remedied=False):
    """A layer over a graph. ``remedied``: a sparse matrix sums up the neighbours."""
    source, target = torch.randint(0, 128, (2, 8192), generator=torch.Generator().manual_seed(0))
    edges, ones = torch.stack([target, source]), torch.ones(8192)
    matrix = torch.sparse_coo_tensor(edges, ones, (128, 128), check_invariants=True).coalesce()
    net, x = nn.Linear(64, 64), torch.randn(128, 64)

    def loss(i):
        h = net(x)
        if remedied:
            summed = torch.sparse.mm(matrix, h)
        else:
            messages = h[source]
            messages = messages * messages.new_ones(1)
            summed = torch.zeros_like(h).index_add(0, target, messages)
        return summed.tanh().square().mean()

    return trains(net, loss, steps=2)


@has(EXPANDED, says="device='cpu'")
def volume_of_windows(remedied=False):
    """The scores of a whole volume, summed up window by window. ``remedied``: not on the card."""
    net = nn.Conv3d(1, 8, 3, padding=1)
    volume = torch.randn(1, 1, 16, 16, 128)
    with MemoryTracker(net) as tracker, torch.no_grad():
        scores = None if remedied else torch.zeros(1, 8, 16, 16, 128)
        for start in range(0, 128, 16):
            part = net(volume[..., start : start + 16])
            if not remedied:
                scores[..., start : start + 16] += part
    return tracker


@has(LOGITS)
def large_vocabulary(remedied=False):
    from gradmem_lib import Recipe, prepare, step

    recipe = Recipe(chunked_loss=remedied, optimizer="sgd")
    made = prepare(llama(), recipe)
    ids = rows(8, 128)
    with MemoryTracker(made.model, made.optimizer) as tracker:
        for _ in range(2):
            step(made.model, made.optimizer, {"input_ids": ids, "labels": ids}, recipe)
    return tracker


@has(LOGITS, says="a few rows at a time")
def classes_of_frames(remedied=False):
    """CTC, which sums over all alignments of a row: no frame has a loss of its own. ``remedied``:
    one row at a time.
    """
    net = nn.ModuleDict({"body": nn.Linear(16, 256), "head": nn.Linear(256, 600)})
    sound, labels = torch.randn(16, 64, 16), torch.randint(1, 600, (16, 12))

    def loss_of(features, labels):
        scores = net["head"](features).log_softmax(-1).transpose(0, 1)  # (frames, rows, classes)
        frames = torch.full((len(labels),), 64)
        tokens = torch.full((len(labels),), 12)
        return F.ctc_loss(scores, labels, frames, tokens, reduction="sum") / 16

    def loss(i):
        features = net["body"](sound).relu()
        if remedied:
            parts = zip(features.split(1), labels.split(1), strict=True)
            loss = sum(checkpoint(loss_of, *part, use_reentrant=False) for part in parts)
        else:
            loss = loss_of(features, labels)
        return loss

    return trains(net, loss, steps=2)


def trained_llama(model):
    ids = rows(2, 192, 128)
    return trains(model, lambda i: model(input_ids=ids, labels=ids).loss, steps=2)


@has(SCORES, says="attn_implementation='sdpa'")
def stored_scores(remedied=False):
    model = llama(vocab=128)
    model.set_attn_implementation("sdpa" if remedied else "eager")
    return trained_llama(model)


@has(SCORES, says="output_attentions=False")
def scores_that_are_returned(remedied=False):
    model = llama(vocab=128)
    model.set_attn_implementation("sdpa" if remedied else "eager")
    model.config.output_attentions = not remedied
    return trained_llama(model)


@has(SCORES, says="runs already")
def scores_that_are_dropped(remedied=False):
    model = llama(vocab=128)
    model.set_attn_implementation("sdpa")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0 if remedied else 0.1
    return trained_llama(model)


@has(SCORES)
def own_softmax():
    """Attention whose weights are normalized by hand."""
    project, x = nn.Linear(64, 192), torch.randn(4, 256, 64)

    def loss(i):
        q, k, v = project(x).chunk(3, dim=-1)
        weights = (q @ k.mT / 8).exp()
        return (weights / weights.sum(dim=-1, keepdim=True) @ v).square().mean()

    return trains(project, loss, adamw)


def attention_of_three_dimensions(remedied=False):
    """PyTorch's own attention, whose inputs have no dimension for heads."""
    project, x = nn.Linear(16, 48), torch.randn(4, 96, 16)

    def loss(i):
        q, k, v = project(x).chunk(3, dim=-1)
        if remedied:
            q, k, v = q[:, None], k[:, None], v[:, None]
        return F.scaled_dot_product_attention(q, k, v).square().mean()

    return trains(project, loss, steps=2)


if not torch._fused_sdp_choice(*3 * [torch.zeros(4, 96, 16)]):  # before PyTorch 2.14
    has(SCORES, says="give it four")(attention_of_three_dimensions)


@has(DOUBLE)
def targets_in_float64(remedied=False):
    """Numbers of numpy, whose dtype is float64."""
    net, x = Net(64), torch.randn(512, 64)

    def loss(i):
        y = torch.rand(512, 64, dtype=torch.float64)
        if remedied:
            y = y.float()
        return (net(x) - y).tanh().square().mean()

    return trains(net, loss, steps=2)
