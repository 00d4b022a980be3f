"""Programs by what is learned: critics, averages,
several optimizers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from support.programs import adamw, batch, classifier, labels, mlp, program, usual
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

# Critics.


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
