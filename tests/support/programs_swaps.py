"""Programs that change what their parameters hold, or how a step runs: swaps, searches, errors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from support.programs import adamw, batch, labels, mlp, program, usual
from torch import nn
from torch.optim import LBFGS, SGD
from torch.utils.checkpoint import checkpoint


@program
def average_swapped_in_for_an_evaluation():
    model, x, y = mlp(64, 128, 10), batch(32, 64), labels(32)
    optimizer = adamw(model)
    average = [nn.Parameter(p.detach().clone()) for p in model.parameters()]

    def swap():
        for p, a in zip(model.parameters(), average, strict=True):
            torch.utils.swap_tensors(p, a)

    def step():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        swap()
        with torch.inference_mode():
            model(x)
        swap()

    return model, optimizer, step


@program
def line_search():
    model, x, y = mlp(32, 64, 1), batch(32, 32), batch(32, 1)
    optimizer = LBFGS(model.parameters(), line_search_fn="strong_wolfe", max_iter=4, history_size=3)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    def step():
        optimizer.step(closure)
        optimizer.zero_grad()

    return model, optimizer, step


@program
def checkpoints_of_both_kinds():
    blocks, x = nn.ModuleList(mlp(64, 256, 64) for _ in range(4)), batch(32, 64).requires_grad_()

    def loss():
        x.grad, h = None, x
        for i, block in enumerate(blocks):
            h = checkpoint(block, h, use_reentrant=bool(i % 2), preserve_rng_state=False)
        return h.square().mean()

    model, optimizer, step = usual(blocks, loss)
    return model, optimizer, lambda: (step(), setattr(x, "grad", None))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("mine")


@program
def error_in_backward_is_caught():
    model, x, y = mlp(64, 128, 10), batch(32, 64), labels(32)
    optimizer = adamw(model)

    def step():
        try:
            Fails.apply(model(x)).sum().backward()
        except ArithmeticError:
            optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


@program
def float64_for_one_step():
    model, x, y = mlp(64, 128, 10), batch(32, 64), labels(32)
    optimizer = SGD(model.parameters(), 0.1, foreach=False)

    def step():
        model.double()
        F.cross_entropy(model(x.double()), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.float()

    return model, optimizer, step
