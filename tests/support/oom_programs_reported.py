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
from torch.utils.checkpoint import checkpoint

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
        kept = fake.detach().cpu()[:1].clone() if remedied else fake
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


def gradients_until_the_backward(remedied=False):
    """zero_grad() stands just before backward, so the forward runs beside the old gradients."""
    net, x = Net(1024), torch.randn(128, 64)
    targets = torch.randn(128, 64)
    optimizer = sgd(net)

    def loss_of(output):
        return torch.stack([(output - k * targets).square() for k in range(40)]).mean()

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


def larger_validation(remedied=False):
    net, x = Net(), torch.randn(64, 64)
    optimizer = sgd(net)

    def step(i):
        updated(net(x).square().mean(), optimizer)
        with torch.no_grad():
            for part in torch.randn(1024, 64).split(64 if remedied else 512):
                net(part).square().mean()

    return trained(net, optimizer, step, steps=3)


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


# More of them


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
