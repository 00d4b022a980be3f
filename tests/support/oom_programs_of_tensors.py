"""Small programs after reports from many fields, in which one kind of tensor is large: detection,
graphs, speech, images, recommendation.

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

# One kind of tensor


def regressed(loss_of, rows=512):
    """A regression from 64 features to one number."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    x, y = torch.randn(rows, 64), torch.randn(rows)
    optimizer = sgd(net)
    return trained(net, optimizer, lambda i: updated(loss_of(net(x), y), optimizer), steps=2)


def targets_of_another_shape(remedied=False):
    """(rows, 1) - (rows,) is a matrix of all pairs."""

    def loss_of(output, y):
        if remedied:
            y = y.view_as(output)
        return (output - y).square().mean()

    return regressed(loss_of)


def jacobian_of_a_batch(remedied=False):
    """The derivative of each row's output by every row's input: most of it is zeros."""
    net, x = Net(64), torch.randn(32, 64)
    with MemoryTracker(net, live=False) as tracker:
        if remedied:
            for row in x:
                torch.autograd.functional.jacobian(net, row).square().sum()
        else:
            torch.autograd.functional.jacobian(net, x).square().sum()
    return tracker


class Segments(nn.Module):
    """Classes for each of 16 × 16 places of an image."""

    def __init__(self, classes: int):
        super().__init__()
        self.body = nn.Conv2d(3, 32, 3, padding=1, stride=4)
        self.head = nn.Conv2d(32, classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images).relu())


def one_hot_masks(remedied=False, classes=32):
    """A dice loss, whose one-hot masks are int64. ``remedied``: ``gather``."""
    net, images = Segments(classes), torch.randn(4, 3, 64, 64)
    labels = torch.randint(0, classes, (4, 16, 16))
    optimizer = sgd(net)

    def step(i):
        shares = net(images).softmax(1)
        if remedied:
            shared = shares.gather(1, labels[:, None]).sum()
        else:
            masks = F.one_hot(labels, classes).permute(0, 3, 1, 2).float()
            shared = (shares * masks).sum()
        updated(-shared, optimizer)

    return trained(net, optimizer, step, steps=2)


def upsampled_scores(remedied=False, classes=32):
    """Scores of 16 × 16 places at the size of the image. ``remedied``: the loss at 16 × 16."""
    net, images = Segments(classes), torch.randn(4, 3, 64, 64)
    labels = torch.randint(0, classes, (4, 64, 64))
    optimizer = sgd(net)

    def step(i):
        scores, wanted = net(images), labels
        if remedied:
            wanted = labels[:, ::4, ::4]
        else:
            scores = F.interpolate(scores, size=(64, 64), mode="bilinear")
        updated(F.cross_entropy(scores, wanted), optimizer)

    return trained(net, optimizer, step, steps=2)


class SharesKeys(nn.Module):
    """Attention of 16 heads that share one head of keys and values, copied for each of them.
    ``remedied``: ``enable_gqa``.
    """

    def __init__(self, remedied: bool):
        super().__init__()
        self.project = nn.Linear(16, 16)
        self.remedied = remedied

    def forward(self, queries: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        keys = self.project(x)[:, None]
        if self.remedied:
            return F.scaled_dot_product_attention(queries, keys, keys, enable_gqa=True)
        keys = keys.expand(-1, 16, -1, -1).contiguous()
        return F.scaled_dot_product_attention(queries, keys, keys)


def keys_for_each_head(remedied=False):
    net = SharesKeys(remedied)
    queries, x = torch.randn(2, 16, 4, 16), torch.randn(2, 1024, 16)
    optimizer = sgd(net)
    return trained(
        net, optimizer, lambda i: updated(net(queries, x).square().mean(), optimizer), steps=2
    )


class OwnConvolution(nn.Module):
    """A convolution over the patches of each place. ``remedied``: ``F.conv2d``."""

    def __init__(self, remedied: bool):
        super().__init__()
        self.remedied = remedied
        self.weight = nn.Parameter(torch.randn(8, 8 * 49) / 20)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.remedied:
            return F.conv2d(images, self.weight.view(8, 8, 7, 7), padding=3)
        patches = F.unfold(images, 7, padding=3)
        return (self.weight @ patches).view(images.shape)


def patches_of_images(remedied=False):
    net, images = OwnConvolution(remedied), torch.randn(4, 8, 32, 32)
    optimizer = sgd(net)
    return trained(
        net, optimizer, lambda i: updated(net(images).square().mean(), optimizer), steps=2
    )


class Messages(nn.Module):
    """A layer over a graph. ``remedied``: a sparse matrix sums up the neighbours."""

    def __init__(self, edges: torch.Tensor, nodes: int, remedied: bool):
        super().__init__()
        self.project = nn.Linear(64, 64)
        self.edges, self.remedied = edges, remedied
        ones = torch.ones(edges.shape[1])
        self.matrix = torch.sparse_coo_tensor(
            edges.flip(0), ones, (nodes, nodes), check_invariants=True
        ).coalesce()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.project(x)
        if self.remedied:
            return torch.sparse.mm(self.matrix, h).tanh()
        source, target = self.edges
        messages = h[source]
        return torch.zeros_like(h).index_add(0, target, messages * messages.new_ones(1)).tanh()


def messages_of_edges(remedied=False, nodes=128, edges=8192):
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(0, nodes, (2, edges), generator=generator)
    net, x = Messages(pairs, nodes, remedied), torch.randn(nodes, 64)
    optimizer = sgd(net)
    return trained(net, optimizer, lambda i: updated(net(x).square().mean(), optimizer), steps=2)


class Joiner(nn.Module):
    """A transducer's joint: each frame with each token, 64 features, then 128 classes."""

    def __init__(self, remedied: bool):
        super().__init__()
        self.frames, self.tokens = nn.Linear(16, 64), nn.Embedding(128, 64)
        self.out = nn.Linear(64, 128)
        self.remedied = remedied

    def join(self, frames: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        joint = (frames[:, :, None] + tokens[:, None]).tanh()
        return self.out(joint).logsumexp(-1).sum()

    def forward(self, sound: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        frames, tokens = self.frames(sound), self.tokens(tokens)
        if not self.remedied:
            return self.join(frames, tokens)
        parts = frames.split(8, dim=1)
        return sum(checkpoint(self.join, part, tokens, use_reentrant=False) for part in parts)


def joint_of_a_transducer(remedied=False):
    net = Joiner(remedied)
    sound, tokens = torch.randn(2, 128, 16), torch.randint(0, 128, (2, 32))
    optimizer = sgd(net)
    return trained(net, optimizer, lambda i: updated(net(sound, tokens), optimizer), steps=2)


def overlaps_of_boxes(remedied=False):
    """Intersections of all predicted boxes with all true ones."""
    net, x = nn.Linear(16, 4), torch.randn(1024, 16)
    truth = torch.rand(256, 4)
    optimizer = sgd(net)

    def overlaps(boxes):
        low = torch.maximum(boxes[:, None, :2], truth[None, :, :2])
        high = torch.minimum(boxes[:, None, 2:], truth[None, :, 2:])
        return (high - low).clamp(min=0).prod(-1).sum()

    def step(i):
        boxes = net(x)
        if remedied:
            parts = [checkpoint(overlaps, part, use_reentrant=False) for part in boxes.split(64)]
            loss = -sum(parts)
        else:
            loss = -overlaps(boxes)
        updated(loss, optimizer)

    return trained(net, optimizer, step, steps=2)


def nearest_neighbours(remedied=False):
    """A loss on each row's nearest ones. ``remedied``: for a few rows at a time."""
    net, x = Net(64), torch.randn(1024, 64)
    optimizer = sgd(net)

    def nearest(part, z):
        return torch.cdist(part, z).topk(4, largest=False).values.sum()

    def step(i):
        z = net(x)
        if remedied:
            loss = sum(checkpoint(nearest, part, z, use_reentrant=False) for part in z.split(64))
        else:
            loss = nearest(z, z)
        updated(loss, optimizer)

    return trained(net, optimizer, step, steps=2)


def distances_to_codes(remedied=False):
    """A codebook's nearest entries (VQ-VAE). ``remedied``: for a few rows at a time."""
    net, codes = Net(64), torch.randn(2048, 64)
    x = torch.randn(1024, 64)
    optimizer = sgd(net)

    def nearest(z):
        distances = z.square().sum(1, keepdim=True) - 2 * z @ codes.T + codes.square().sum(1)
        return distances.argmin(1)

    def step(i):
        z = net(x)
        with torch.no_grad():
            found = torch.cat([nearest(part) for part in z.split(16 if remedied else len(z))])
        updated(F.mse_loss(z, codes[found]), optimizer)

    return trained(net, optimizer, step, steps=2)


# Evaluations


def larger_validation(remedied=False, each=4):
    """After every fourth step."""
    net, x = Net(), torch.randn(64, 64)
    optimizer = sgd(net)

    def step(i):
        updated(net(x).square().mean(), optimizer)
        if i % each == each - 1:
            with torch.no_grad():
                for part in torch.randn(1024, 64).split(64 if remedied else 512):
                    net(part).square().mean()

    return trained(net, optimizer, step, steps=2 * each)


def validation_in_each_step(remedied=False):
    """Its calls look like those of a teacher."""
    return larger_validation(remedied, each=1)


def teacher_in_each_step(remedied=False):
    """The remedy: micro-batches, for the teacher too."""
    student, teacher, x = Net(16), Net().requires_grad_(False), torch.randn(2048, 64)
    optimizer = sgd(student)

    def step(i):
        for part in x.split(256 if remedied else 2048):
            with torch.no_grad():
                wanted = teacher(part).softmax(-1)
            loss = (student(part).softmax(-1) - wanted).square().sum() / len(x)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(student, optimizer, step, steps=3)


class Attends(nn.Module):
    """Keys and values of all tokens so far, for each beam."""

    def __init__(self):
        super().__init__()
        self.project, self.cache = nn.Linear(64, 128), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new = self.project(x)
        self.cache = new if self.cache is None else torch.cat([self.cache, new], dim=1)
        keys, values = self.cache.split(64, dim=-1)
        return F.scaled_dot_product_attention(x, keys, values)

    def reorder(self, beams: torch.Tensor) -> None:
        self.cache = self.cache[beams]


def beams(remedied=False):
    net, n = Attends(), 4 if remedied else 32
    with MemoryTracker(net, live=False) as tracker, torch.no_grad():
        x = torch.randn(n, 1, 64)
        for _ in range(40):
            x = net(x)
            net.reorder(torch.arange(n).roll(1))
    return tracker


def volume_of_windows(remedied=False):
    """The scores of a whole volume, summed up window by window. ``remedied``: not on the card."""
    net = nn.Conv3d(1, 8, 3, padding=1)
    volume = torch.randn(1, 1, 16, 16, 128)
    with MemoryTracker(net, live=False) as tracker, torch.no_grad():
        scores = None if remedied else torch.zeros(1, 8, 16, 16, 128)
        for start in range(0, 128, 16):
            part = net(volume[..., start : start + 16])
            if not remedied:
                scores[..., start : start + 16] += part
    return tracker


def pseudo_labels(remedied=False):
    """Scores of all unlabelled rows, kept for the training. ``remedied``: one batch at a time."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 256))
    optimizer = sgd(net)

    def scored(i):
        x = torch.randn(64, 64)
        with torch.no_grad():
            return x, net(x).softmax(1)

    with MemoryTracker(net, optimizer, live=False) as tracker:
        batches = (scored(i) for i in range(16))
        if not remedied:
            batches = list(batches)
        for x, label in batches:
            updated(F.cross_entropy(net(x), label), optimizer)
    return tracker


# Others


def one_large_image(remedied=False):
    """Images of many sizes. ``remedied``: none is larger than 40 × 40."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    optimizer = sgd(net)
    sizes = [32, 32, 40, 32, 160, 32, 36, 32]

    def step(i):
        size = min(sizes[i], 40) if remedied else sizes[i]
        updated(net(torch.randn(1, 3, size, size)).square().mean(), optimizer)

    return trained(net, optimizer, step)


class Recommends(nn.Module):
    """A score of each item for each user: the table of items is the last matrix."""

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(256, 16), nn.Embedding(4096, 16)

    def forward(self, users: torch.Tensor) -> torch.Tensor:
        return self.users(users) @ self.items.weight.T


def scores_of_all_items(remedied=False):
    """``remedied``: the loss in chunks of users, each under a checkpoint."""
    net = Recommends()
    optimizer = sgd(net)
    users, items = torch.randint(0, 256, (256,)), torch.randint(0, 4096, (256,))

    def loss_of(users, items):
        return F.cross_entropy(net(users), items, reduction="sum") / 256

    def step(i):
        if remedied:
            loss = 0
            for of_users, of_items in zip(users.split(4), items.split(4), strict=True):
                loss = loss + checkpoint(loss_of, of_users, of_items, use_reentrant=False)
        else:
            loss = loss_of(users, items)
        updated(loss, optimizer)

    return trained(net, optimizer, step, steps=2)


class Positions(nn.Module):
    """Attention over as many tokens as its table of positions has rows."""

    def __init__(self):
        super().__init__()
        self.positions, self.project = nn.Embedding(256, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.positions.weight
        scores = (self.project(x) @ x.mT).softmax(-1)
        return scores @ x


def attention_with_a_table_of_positions():
    net, x = Positions(), torch.randn(4, 256, 16)
    optimizer = sgd(net)
    return trained(net, optimizer, lambda i: updated(net(x).square().mean(), optimizer), steps=2)


class MasksAreGiven(nn.Module):
    """Attention with a mask from the batch, or a causal one."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = self.project(x)[:, None].chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def masks_of_the_collate(remedied=False):
    """A mask for each row of a batch, all of them equal. ``remedied``: is_causal=True."""
    net = MasksAreGiven()
    optimizer = sgd(net)

    def step(i):
        x, mask = torch.randn(8, 256, 16), None
        if not remedied:
            mask = torch.stack([torch.ones(256, 256).tril().log() for _ in range(8)])[:, None]
        updated(net(x, mask).square().mean(), optimizer)

    return trained(net, optimizer, step, steps=3)


def samples_along_rays(remedied=False):
    """NeRF: 64 places on each ray, with sines of each. ``remedied``: for 16 rays at a time."""
    net = nn.Sequential(nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = sgd(net)
    origins, directions = torch.randn(256, 3), torch.randn(256, 3)

    def loss_of(origins, directions):
        distances = torch.linspace(0, 1, 64)[:, None]
        x = origins[:, None] + distances * directions[:, None]
        x = torch.cat([f(2**k * x) for k in range(6) for f in (torch.sin, torch.cos)], dim=-1)
        return net(x).sum(1).square().mean()

    def step(i):
        if remedied:
            loss = 0
            for rays in zip(origins.split(16), directions.split(16), strict=True):
                loss = loss + checkpoint(loss_of, *rays, use_reentrant=False)
        else:
            loss = loss_of(origins, directions)
        updated(loss, optimizer)

    return trained(net, optimizer, step, steps=2)


def sines_in_a_list():
    """Pieces that are joined in each step are no data that waits, though a list has them."""
    net, x = nn.Linear(36, 4), torch.randn(4096, 3)
    optimizer = sgd(net)

    def loss():
        sines = [f(2**k * x) for k in range(6) for f in (torch.sin, torch.cos)]
        return net(torch.cat(sines, dim=-1)).square().mean()

    return trained(net, optimizer, lambda i: updated(loss(), optimizer), steps=3)
