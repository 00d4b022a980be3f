"""Programs by how they train: loops, precisions, ways to save memory, optimizers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from support.programs import adamw, batch, classifier, labels, mlp, program, usual
from torch import nn
from torch.optim import AdamW, RMSprop

# Loops: accumulation, clipping, evaluation, loaders, precisions.


@program
def gradient_accumulation():
    model, x, y = mlp(128, 256, 10), batch(64, 128), labels(64)
    optimizer = adamw(model)

    def step():
        for rows in torch.arange(64).split(16):
            (F.cross_entropy(model(x[rows]), y[rows]) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


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
def evaluation_after_the_step():
    model, x, y = mlp(128, 256, 10), batch(64, 128), labels(64)
    _, optimizer, train = classifier(model, x)

    def step():
        train()
        with torch.no_grad():
            (model(x).argmax(1) == y).float().mean().item()
        with torch.inference_mode():
            model(x)

    return model, optimizer, step


@program
def autocast_bf16():
    model, x, y = mlp(128, 256, 10), batch(64, 128), labels(64)

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x).float(), y)

    return usual(model, loss)


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


@program
def frozen_base_with_lora():
    base = nn.Linear(256, 256).requires_grad_(False)
    a, b, x = nn.Linear(256, 4, bias=False), nn.Linear(4, 256, bias=False), batch(64, 256)
    model = nn.ModuleList([base, a, b])
    return usual(model, lambda: (base(x) + b(a(x))).square().mean())


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
