"""Programs by what their models are made of: layers, parametrizations, operators of autograd,
functional transforms.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from support.programs import adamw, batch, classifier, labels, mlp, program, usual
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations, rnn
from torch.optim import SGD, SparseAdam

# Layers.


@program
def bidirectional_lstm_on_packed_rows():
    net, head = nn.LSTM(32, 32, bidirectional=True, batch_first=True), nn.Linear(64, 10)
    x, lengths, y = batch(8, 20, 32), torch.arange(20, 4, -2), labels(8)

    def loss():
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True)
        out, _ = rnn.pad_packed_sequence(net(packed)[0], batch_first=True)
        return F.cross_entropy(head(out.mean(1)), y)

    return usual(nn.ModuleList([net, head]), loss)


@program
def sparse_embedding():
    table, head, ids = (
        nn.Embedding(4096, 32, sparse=True),
        nn.Linear(32, 1),
        torch.randint(0, 4096, (64,)),
    )
    optimizers = [SparseAdam(table.parameters()), adamw(head)]

    def step():
        head(table(ids)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return nn.ModuleList([table, head]), optimizers, step


# Parametrized, constrained, quantized weights.

PARAMETRIZED = {
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}
for name, method in PARAMETRIZED.items():

    def parametrized(method=method):
        return classifier(
            nn.Sequential(method(nn.Linear(64, 64)), nn.ReLU(), nn.Linear(64, 10)), batch(32, 64)
        )

    program(parametrized, name=name)


# Modules that torch runs by itself.


@program
def script_module():
    return classifier(torch.jit.script(mlp(40, 48, 10)), batch(8, 40))


@program
def traced_module():
    x = batch(8, 40)
    return classifier(torch.jit.trace(mlp(40, 48, 10), x), x)


# Operators of autograd, hooks, and functional transforms.


@program
def in_place_operations():
    model, x = nn.Linear(128, 256), batch(64, 128)
    return usual(model, lambda: model(x).mul_(2).add_(1).relu_().sum())


@program
def hooks_on_modules_and_tensors():
    model, x, seen = mlp(128, 256, 10), batch(64, 128), {}
    model[0].register_forward_hook(lambda module, args, out: seen.update(out=out.detach().clone()))
    model[2].register_full_backward_hook(
        lambda module, gin, gout: seen.update(grad=gout[0].clone().norm().item())
    )
    for parameter in model.parameters():
        parameter.register_hook(lambda g: g.clamp(-1, 1))
    return classifier(model, x)


@program
def step_inside_backward():
    model, x, y = mlp(128, 256, 10), batch(64, 128), labels(64)
    own = {p: SGD([p], 0.1, momentum=0.9, foreach=False) for p in model.parameters()}

    def update(parameter):
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return model, list(own.values()), lambda: F.cross_entropy(model(x), y).backward()


@program
def gradients_a_sample():
    model, x, y = mlp(32, 64, 10), batch(64, 32), labels(64)
    optimizer = SGD(model.parameters(), 0.1, foreach=False)

    def one(weights, row, label):
        return F.cross_entropy(functional_call(model, weights, row[None]), label[None])

    def step():
        weights = {n: p.detach() for n, p in model.named_parameters()}
        each = vmap(grad(one), in_dims=(None, 0, 0))(weights, x, y)
        for name, parameter in model.named_parameters():
            parameter.grad = each[name].mean(0)
        del each
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


# Their backward makes other temporaries while a dispatch mode is active.


@program
def product_of_a_row():
    model, x = mlp(16, 32, 64), batch(32, 16)
    return usual(model, lambda: model(x).add(1.5).prod(1).mean())


@program
def binary_loss_with_pos_weight():
    model, x, weight = mlp(16, 32, 64), batch(32, 16), torch.full((64,), 3.0)
    y = (batch(32, 64) > 0).float()
    return usual(model, lambda: F.binary_cross_entropy_with_logits(model(x), y, pos_weight=weight))


@program
def householder_product():
    reflectors, scales = nn.Parameter(batch(32, 16)), nn.Parameter(batch(16))
    model = nn.ParameterList([reflectors, scales])

    def loss():
        return torch.linalg.householder_product(reflectors, scales.sigmoid()).square().mean()

    return usual(model, loss)
