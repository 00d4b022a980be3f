"""Programs by what their models are made of: layers, parametrizations, operators of autograd,
functional transforms.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from support.programs import adamw, batch, classifier, labels, mlp, program, usual
from torch import nn
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap
from torch.nn.utils import parametrizations, parametrize, rnn
from torch.optim import SGD, SparseAdam

# Layers.


class Last(nn.Module):
    """A recurrent network, and a classifier of its last output."""

    def __init__(self, net: nn.Module, width: int = 64):
        super().__init__()
        self.net, self.head = net, nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.net(x)[0][:, -1])


@program
def lstm():
    net = nn.LSTM(32, 64, num_layers=2, batch_first=True)
    return classifier(Last(net), batch(16, 20, 32))


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
def truncated_backward_through_time():
    cell, x = nn.GRUCell(32, 64), batch(20, 16, 32)
    optimizer = adamw(cell)

    def step():
        h = torch.zeros(16, 64)
        for part in x.split(5):
            h = h.detach()
            for now in part:
                h = cell(now, h)
            h.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return cell, optimizer, step


@program
def convolutions_with_batch_norm():
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.SiLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    return classifier(model, batch(16, 3, 32, 32))


@program
def transformer_with_a_mask():
    model, a, b = (
        nn.Transformer(64, 4, 1, 1, 128, batch_first=True),
        batch(8, 16, 64),
        batch(8, 12, 64),
    )
    mask = nn.Transformer.generate_square_subsequent_mask(12)
    return usual(model, lambda: model(a, b, tgt_mask=mask).square().mean())


@program
def mixture_of_experts():
    router, experts, x = (
        nn.Linear(64, 4),
        nn.ModuleList(mlp(64, 128, 64) for _ in range(4)),
        batch(128, 64),
    )

    def loss():
        weight, chosen = router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for n, expert in enumerate(experts):
            rows = (chosen == n).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return F.mse_loss(out, x)

    return usual(nn.ModuleList([router, experts]), loss)


@program
def weight_tying():
    table, body = nn.Embedding(512, 64), mlp(64, 128, 64)
    ids = torch.randint(0, 512, (4, 32))
    head = nn.Linear(64, 512, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, body, head)
    return usual(model, lambda: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()))


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


@program
def embedding_bag():
    bag, ids = nn.EmbeddingBag(1024, 64), torch.randint(0, 1024, (64, 8))
    return usual(bag, lambda: bag(ids).square().mean())


@program
def complex_numbers():
    weight, x = nn.Parameter(torch.randn(64, 64, dtype=torch.cfloat)), batch(32, 64)
    model = nn.ParameterList([weight])
    return usual(model, lambda: torch.fft.ifft(torch.fft.fft(x) @ weight).abs().square().mean())


@program
def graph_convolution():
    model, x, y = mlp(64, 128, 10), batch(256, 64), labels(256)
    links = torch.sparse_coo_tensor(
        torch.randint(0, 256, (2, 1024)), torch.rand(1024), (256, 256), check_invariants=True
    ).coalesce()
    return usual(model, lambda: F.cross_entropy(model(torch.sparse.mm(links, x)), y))


@program
def dropout_and_layer_norm():
    model = nn.Sequential(
        nn.Linear(128, 256), nn.LayerNorm(256), nn.Dropout(0.2), nn.PReLU(), nn.Linear(256, 10)
    )
    return classifier(model, batch(64, 128))


@program
def ctc():
    model, x = nn.Linear(32, 20), batch(40, 8, 32)
    targets, long, short = torch.randint(1, 20, (8, 10)), torch.full((8,), 40), torch.full((8,), 10)
    return usual(model, lambda: F.ctc_loss(model(x).log_softmax(-1), targets, long, short))


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


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)


@program
def own_parametrization():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return classifier(model, batch(32, 64))


# Modules that torch runs by itself.


@program
def script_module():
    return classifier(torch.jit.script(mlp(40, 48, 10)), batch(8, 40))


@program
def traced_module():
    x = batch(8, 40)
    return classifier(torch.jit.trace(mlp(40, 48, 10), x), x)


# Operators of autograd, hooks, and functional transforms.


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@program
def own_function():
    model, x = mlp(128, 256, 10), batch(64, 128)
    return usual(model, lambda: Square.apply(model(x)).mean())


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
def ensemble_by_vmap():
    nets, x = [mlp(32, 64, 10) for _ in range(4)], batch(64, 32)
    stacked, _ = stack_module_state(nets)
    model = nn.ParameterList(nn.Parameter(p.detach()) for p in stacked.values())
    meta = nets[0].to("meta")

    def loss():
        named = dict(zip(stacked, model, strict=True))
        return vmap(lambda weights: functional_call(meta, weights, x))(named).square().mean()

    return usual(model, loss)


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


@program
def jacobian_penalty():
    model, x = mlp(16, 32, 4), batch(8, 16)
    return usual(model, lambda: vmap(jacrev(model))(x).square().mean())


# Their backward makes other temporaries while a dispatch mode is active.


@program
def product_of_a_row():
    model, x = mlp(16, 32, 64), batch(32, 16)
    return usual(model, lambda: model(x).add(1.5).prod(1).mean())


@program
def products_along_a_row():
    model, x = mlp(16, 32, 64), batch(32, 16)
    return usual(model, lambda: model(x).sigmoid().cumprod(1).mean())


@program
def binary_loss_with_pos_weight():
    model, x, weight = mlp(16, 32, 64), batch(32, 16), torch.full((64,), 3.0)
    y = (batch(32, 64) > 0).float()
    return usual(model, lambda: F.binary_cross_entropy_with_logits(model(x), y, pos_weight=weight))


@program
def orthogonal_by_householder():
    layer = parametrizations.orthogonal(nn.Linear(64, 64), orthogonal_map="householder")
    x = batch(8, 64)
    return usual(layer, lambda: layer(x).square().mean())


@program
def householder_product():
    reflectors, scales = nn.Parameter(batch(32, 16)), nn.Parameter(batch(16))
    model = nn.ParameterList([reflectors, scales])

    def loss():
        return torch.linalg.householder_product(reflectors, scales.sigmoid()).square().mean()

    return usual(model, loss)
