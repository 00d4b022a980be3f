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


# Comparisons, rewards, several heads.


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
