"""Programs by what is learned: generative models, teachers and averages, comparisons, rewards,
several optimizers.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from support.programs import adamw, batch, classifier, labels, mlp, program, usual
from torch import nn
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

# Generative models.


@program
def gan():
    g, d = mlp(32, 256, 128), mlp(128, 256, 1)
    og, od, real = adamw(g), adamw(d), batch(64, 128)

    def step():
        fake = g(batch(64, 32))
        od.zero_grad()
        (F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()).backward()
        od.step()
        F.softplus(-d(fake)).mean().backward()
        og.step()
        og.zero_grad()
        od.zero_grad()

    return nn.ModuleList([g, d]), [og, od], step


@program
def wasserstein_gan_with_gradient_penalty():
    d, real, fake = mlp(128, 256, 1), batch(64, 128), batch(64, 128)

    def loss():
        mix = (0.3 * real + 0.7 * fake).requires_grad_()
        slope = torch.autograd.grad(d(mix).sum(), mix, create_graph=True)[0]
        return d(fake).mean() - d(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()

    return usual(d, loss)


@program
def vector_quantized_autoencoder():
    model = nn.ModuleDict({"e": mlp(128, 64), "book": nn.Embedding(32, 64), "d": mlp(64, 128)})
    x = batch(64, 128)

    def loss():
        z = model["e"](x)
        q = model["book"](torch.cdist(z, model["book"].weight).argmin(1))
        return (
            F.mse_loss(model["d"](z + (q - z).detach()), x)
            + F.mse_loss(q, z.detach())
            + F.mse_loss(z, q.detach())
        )

    return usual(model, loss)


@program
def normalizing_flow():
    model, x = nn.ModuleList([mlp(64, 128, 128) for _ in range(3)]), batch(64, 128)

    def loss():
        a, b = x.chunk(2, 1)
        volume = 0.0
        for net in model:
            scale, shift = net(a).chunk(2, 1)
            scale = scale.tanh()
            a, b, volume = b * scale.exp() + shift, a, volume + scale.sum(1)
        return (0.5 * (a.square().sum(1) + b.square().sum(1)) - volume).mean()

    return usual(model, loss)


# Averages, teachers, and steps that are not plain descent.


@program
def ema_by_averaged_model():
    model = mlp(128, 256, 10)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    _, optimizer, step = classifier(model, batch(64, 128))

    def both():
        step()
        average.update_parameters(model)

    return nn.ModuleList([model, average]), optimizer, both


@program
def distillation():
    student, teacher, x, y = (
        mlp(128, 64, 10),
        mlp(128, 512, 10).requires_grad_(False),
        batch(64, 128),
        labels(64),
    )
    optimizer = adamw(student)

    def step():
        with torch.no_grad():
            wanted = teacher(x)
        out = student(x)
        soft = F.kl_div(F.log_softmax(out / 2, 1), F.softmax(wanted / 2, 1), reduction="batchmean")
        (soft + F.cross_entropy(out, y)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return nn.ModuleList([student, teacher]), optimizer, step


@program
def mean_teacher_consistency():
    model = mlp(128, 256, 10)
    teacher, x, optimizer = copy.deepcopy(model).requires_grad_(False), batch(64, 128), adamw(model)

    def step():
        F.mse_loss(model(x + 0.1 * torch.randn_like(x)), teacher(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for t, p in zip(teacher.parameters(), model.parameters(), strict=True):
            t.data.mul_(0.99).add_(p.data, alpha=0.01)

    return nn.ModuleList([model, teacher]), optimizer, step


@program
def meta_learning():
    model, x, y = mlp(64, 128, 10), batch(32, 64), labels(32)

    def loss():
        weights = dict(model.named_parameters())
        inner = F.cross_entropy(functional_call(model, weights, x), y)
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {n: p - 0.1 * g for (n, p), g in zip(weights.items(), slopes, strict=True)}
        return F.cross_entropy(functional_call(model, moved, x), y)

    return usual(model, loss)


@program
def reptile():
    model, x, y = mlp(64, 128, 10), batch(32, 64), labels(32)
    optimizer = SGD(model.parameters(), 0.1, foreach=False)

    def step():
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(3):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for p, old in zip(model.parameters(), before, strict=True):
                p.copy_(old + 0.5 * (p - old))

    return model, optimizer, step


# Comparisons, rewards, several heads.


@program
def contrastive():
    left, right, x, z = mlp(128, 256, 64), mlp(96, 256, 64), batch(64, 128), batch(64, 96)
    model = nn.ModuleList([left, right])

    def loss():
        scores = F.normalize(left(x), dim=1) @ F.normalize(right(z), dim=1).T / 0.07
        same = torch.arange(64)
        return (F.cross_entropy(scores, same) + F.cross_entropy(scores.T, same)) / 2

    return usual(model, loss)


@program
def momentum_contrast_with_a_queue():
    query, key = mlp(128, 64), mlp(128, 64).requires_grad_(False)
    query.register_buffer("queue", F.normalize(batch(512, 64), dim=1))
    x, optimizer = batch(64, 128), adamw(query)

    def step():
        q = F.normalize(query(x), dim=1)
        with torch.no_grad():
            k = F.normalize(key(x), dim=1)
        scores = torch.cat([(q * k).sum(1, keepdim=True), q @ query.queue.clone().T], 1)
        F.cross_entropy(scores, torch.zeros(64, dtype=torch.long)).backward()
        optimizer.step()
        optimizer.zero_grad()
        query.queue = torch.cat([k, query.queue[:-64]])

    return nn.ModuleList([query, key]), optimizer, step


@program
def proximal_policy():
    model = nn.ModuleDict({"actor": mlp(16, 128, 4), "critic": mlp(16, 128, 1)})
    x, optimizer = batch(256, 16), adamw(model)

    def step():
        with torch.no_grad():
            old = torch.distributions.Categorical(logits=model["actor"](x))
            action = old.sample()
            before = old.log_prob(action)
        gain = torch.randn(256)
        for rows in torch.randperm(256).split(64):
            now = torch.distributions.Categorical(logits=model["actor"](x[rows]))
            ratio = (now.log_prob(action[rows]) - before[rows]).exp()
            policy = torch.min(ratio * gain[rows], ratio.clamp(0.8, 1.2) * gain[rows]).mean()
            value = F.mse_loss(model["critic"](x[rows])[:, 0], gain[rows])
            (value - policy - 0.01 * now.entropy().mean()).backward()
            clip_grad_norm_(model.parameters(), 0.5, foreach=False)
            optimizer.step()
            optimizer.zero_grad()

    return model, optimizer, step


@program
def q_learning_with_a_replay():
    online, target = mlp(16, 128, 4), mlp(16, 128, 4).requires_grad_(False)
    seen, after, optimizer = batch(1024, 16), batch(1024, 16), adamw(online)

    def step():
        rows = torch.randint(0, 1024, (64,))
        with torch.no_grad():
            wanted = torch.randn(64) + 0.99 * target(after[rows]).amax(1)
        got = online(seen[rows]).gather(1, torch.randint(0, 4, (64, 1)))[:, 0]
        F.smooth_l1_loss(got, wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
        target.load_state_dict(online.state_dict())

    return nn.ModuleList([online, target]), optimizer, step


@program
def two_heads_backward_twice():
    model, x = (
        nn.ModuleDict({"body": mlp(128, 256, 128), "a": mlp(128, 10), "b": mlp(128, 1)}),
        batch(64, 128),
    )
    y, optimizer = labels(64), adamw(model)

    def step():
        shared = model["body"](x)
        F.cross_entropy(model["a"](shared), y).backward(retain_graph=True)
        model["b"](shared).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step
