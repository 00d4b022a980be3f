"""Programs by how they train: loops, precisions, ways to save memory, optimizers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from support.programs import adamw, batch, classifier, labels, mlp, program, usual
from torch import nn
from torch.optim import AdamW, RMSprop
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

# Loops and precisions.


@program
def gradients_zeroed_not_freed():
    model, x, y = mlp(128, 256, 10), batch(64, 128), labels(64)
    optimizer = adamw(model)

    def step():
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return model, optimizer, step


@program
def float16_with_a_scaler():
    model, x, y = mlp(128, 256, 10), batch(64, 128), labels(64)
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu")

    def step():
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return model, optimizer, step


# Critics and averages.


@program
def wasserstein_gan_with_gradient_penalty():
    d, real, fake = mlp(128, 256, 1), batch(64, 128), batch(64, 128)

    def loss():
        mix = (0.3 * real + 0.7 * fake).requires_grad_()
        slope = torch.autograd.grad(d(mix).sum(), mix, create_graph=True)[0]
        return d(fake).mean() - d(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()

    return usual(d, loss)


@program
def ema_by_averaged_model():
    model = mlp(128, 256, 10)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    _, optimizer, step = classifier(model, batch(64, 128))

    def both():
        step()
        average.update_parameters(model)

    return nn.ModuleList([model, average]), optimizer, both


# Less memory.


@program
def saved_tensors_packed_in_bf16():
    def pack(t):
        return (
            (t.bfloat16(), t.dtype)
            if t.is_floating_point() and not isinstance(t, nn.Parameter)
            else t
        )

    def unpack(kept):
        return kept[0].to(kept[1]) if isinstance(kept, tuple) else kept

    model, x, y = mlp(128, 256, 10), batch(64, 128), labels(64)

    def loss():
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return F.cross_entropy(model(x), y)

    return usual(model, loss)


OPTIMIZERS = {
    "adamw_foreach": lambda p: AdamW(p, foreach=True),
    "adamw_fused": lambda p: AdamW(p, fused=True),
    "rmsprop_centered": lambda p: RMSprop(p, momentum=0.9, centered=True, foreach=False),
    "adafactor": lambda p: torch.optim.Adafactor(p, foreach=False),
    "muon": lambda p: torch.optim.Muon(p),
}
for name, make in OPTIMIZERS.items():

    def with_optimizer(make=make, bias=name != "muon"):
        model = nn.Sequential(
            nn.Linear(128, 256, bias=bias), nn.GELU(), nn.Linear(256, 10, bias=bias)
        )
        return classifier(model, batch(64, 128), make(model.parameters()))

    program(with_optimizer, name=name)
